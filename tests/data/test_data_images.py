"""Pictures: what a file becomes, which files a folder has, rows decoded once. Control arms are plain Pillow."""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import shutil
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageFile, JpegImagePlugin

from jaxtrain.config import ConfigError
from jaxtrain.config.errors import UserError
from jaxtrain.data import folders, images
from jaxtrain.data.folders import Scan, is_hidden, is_picture_file, scan
from jaxtrain.data.images import BadImage, ImageForm, ImageRows, decode

RNG = np.random.default_rng(0)
NOISE = RNG.integers(0, 256, (40, 60, 3), np.uint8)
ORIENTATION = 0x0112
UNDONE = {  # EXIF orientation -> how the stored picture is made from the upright one
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.swapaxes(0, 1),
    6: lambda a: a.swapaxes(0, 1)[::-1],
    7: lambda a: a.swapaxes(0, 1)[::-1, ::-1],
    8: lambda a: a.swapaxes(0, 1)[:, ::-1],
}


def form_of(height: int, width: int, channels: int = 3, resize: Any = "stretch", high: float = 255.0) -> ImageForm:
    return ImageForm(height, width, channels, resize, high)


def encoded(array: np.ndarray, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(array)).save(file, kind, **options)
    return file.getvalue()


def opened(data: bytes | Path) -> Image.Image:
    """What Pillow alone gives."""
    image = Image.open(io.BytesIO(data if isinstance(data, bytes) else data.read_bytes()))
    image.load()
    return image


def distance(a: np.ndarray, b: np.ndarray) -> float:
    assert a.shape == b.shape
    return float(np.abs(a.astype(float) - b.astype(float)).mean())


def reason(source: Any, form: ImageForm | None = None) -> str:
    with pytest.raises(BadImage) as caught:
        decode(source, form or form_of(4, 4))
    line = str(caught.value)
    assert "\n" not in line
    assert line == f"{caught.value.path} cannot be used as a picture: {caught.value.reason}; remove or replace it"
    return caught.value.reason


# Orientation


def test_every_exif_orientation_becomes_upright_once(shared: Path) -> None:
    folder, form = shared / "faults/img_exif", form_of(40, 60)
    upright = np.array(Image.open(folder / "upright.png"))
    for n in range(1, 9):
        picture = decode(folder / f"orientation_{n}.jpg", form)
        assert distance(picture, upright) < 4, n
        red = picture[:8, :10].reshape(-1, 3).astype(int)
        assert (red[:, 0] > 200).all(), n
        assert (red[:, 1:] < 60).all(), n
    # Control: Pillow alone leaves them as they are stored.
    assert opened(folder / "orientation_6.jpg").size == (40, 60)
    assert distance(np.array(opened(folder / "orientation_3.jpg")), upright) > 4


@pytest.mark.parametrize("kind", ["TIFF", "PNG", "WEBP"])
def test_orientation_is_exact_in_formats_without_loss_and_a_tiff_is_not_turned_twice(kind: str) -> None:
    for n, store in UNDONE.items():
        exif = Image.Exif()
        exif[ORIENTATION] = n
        data = encoded(store(NOISE), kind, exif=exif, **({"lossless": True} if kind == "WEBP" else {}))
        assert np.array_equal(decode(data, form_of(40, 60)), NOISE), n
    # Control: without the tag the same stored pixels stay on their side.
    assert not np.array_equal(decode(encoded(UNDONE[8](NOISE), kind), form_of(60, 40)).swapaxes(0, 1), NOISE)


def test_tags_that_cannot_be_read_do_not_cost_the_picture() -> None:
    data = encoded(NOISE, "JPEG", exif=b"Exif\0\0MM\0*\0\0\0\x08\0\1\1\x12\0\2\0\0\0\4abc\0\0\0\0\0")
    assert opened(data).getexif()[ORIENTATION] == "abc"  # control
    assert np.array_equal(decode(data, form_of(40, 60)), np.array(opened(data)))


# Modes of pixels


def test_16_bit_grey_is_scaled_by_its_full_range(shared: Path) -> None:
    folder, form = shared / "faults/img_16bit_gray", form_of(32, 256)
    deep, plain = (decode(folder / f"{n}_gradient.png", form) for n in ("gray16", "gray8"))
    assert np.abs(deep.astype(int) - plain).max() <= 1
    assert deep[0, [0, 255]].tolist() == [[0] * 3, [255] * 3]
    assert abs(int(deep[0, 128, 0]) - 128) <= 1
    assert decode(folder / "gray16_dark.png", form).max() in (3, 4)
    clipped = np.array(opened(folder / "gray16_gradient.png").convert("RGB"))
    assert (clipped == 255).mean() > 0.9  # control


def test_each_way_to_store_16_bits_gives_the_same_grey() -> None:
    values = np.array([[0, 128, 129, 257, 32896, 65535]], np.uint16)
    wanted = [0, 0, 1, 1, 128, 255]  # v / 257, to the nearest
    wide = values.astype(np.int32)
    tiffs = [encoded(v, "TIFF") for v in (values, wide, values.astype(">u2"))]
    assert [opened(data).mode for data in tiffs] == ["I;16", "I", "I;16B"]
    for data in (encoded(values), *tiffs):
        assert decode(data, form_of(1, 6, 1)).reshape(-1).tolist() == wanted


def test_a_16_bit_tiff_whose_white_is_0_is_turned_round() -> None:
    values = np.array([[0, 65535]], np.uint16)
    data = encoded(values, "TIFF", tiffinfo={262: 0})
    assert decode(data, form_of(1, 2, 1)).reshape(-1).tolist() == [255, 0]
    assert decode(encoded(values, "TIFF"), form_of(1, 2, 1)).reshape(-1).tolist() == [0, 255]  # control


def test_transparent_becomes_white_and_hidden_colours_stay_hidden(shared: Path) -> None:
    folder, form = shared / "faults/img_alpha_palette", form_of(32, 32)
    hidden, palette = decode(folder / "rgba_hidden_red.png", form), decode(folder / "palette_trns.png", form)
    assert hidden[0, 0].tolist() == [255, 255, 255]
    assert hidden[16, 16].tolist() == [0, 128, 0]
    assert np.array_equal(hidden, palette)
    assert (decode(folder / "la_fully_transparent.png", form) == 255).all()
    half = decode(folder / "rgba_half_blue.png", form)
    assert set(half[..., :2].reshape(-1).tolist()) <= {127, 128}
    assert (half[..., 2] == 255).all()
    assert opened(folder / "rgba_hidden_red.png").convert("RGB").getpixel((0, 0)) == (255, 0, 0)  # control


def test_one_transparent_colour_becomes_white_in_each_mode() -> None:
    rgb = np.array([[[1, 2, 3], [4, 5, 6]]], np.uint8)
    for array, clear, rest in (
        (rgb, (1, 2, 3), [4, 5, 6]),
        (rgb[..., 0], 1, [4, 4, 4]),
        (rgb[..., 0].astype(np.uint16) * 257, 257, [4, 4, 4]),
    ):
        assert decode(encoded(array, transparency=clear), form_of(1, 2))[0].tolist() == [[255] * 3, rest]
        assert decode(encoded(array), form_of(1, 2))[0, 0].tolist() != [255] * 3  # control


def test_one_bit_palette_and_grey_files_give_what_the_form_wants() -> None:
    bits = encoded(np.array([[True, False]]))
    assert opened(bits).mode == "1"
    assert decode(bits, form_of(1, 2)).tolist() == [[[255] * 3, [0] * 3]]
    file = io.BytesIO()
    few = Image.fromarray(NOISE).quantize(16)
    few.save(file, "PNG")
    assert np.array_equal(decode(file.getvalue(), form_of(40, 60)), np.array(few.convert("RGB")))
    assert decode(encoded(NOISE), form_of(40, 60, 1)).shape == (40, 60, 1)
    luma = np.array(Image.fromarray(NOISE).convert("L"))
    assert np.array_equal(decode(encoded(NOISE), form_of(40, 60, 1))[..., 0], luma)
    assert np.array_equal(decode(encoded(luma), form_of(40, 60)), np.repeat(luma[..., None], 3, 2))


def test_a_cmyk_jpeg_has_its_colours(shared: Path) -> None:
    folder = shared / "faults/img_cmyk_jpeg"
    rows = ImageRows(folder, ["cmyk_adobe.jpg", "rgb_control.jpg"], form_of(64, 64))
    picture = rows.read(np.array([0, 1]))[0].astype(int)
    corners = {(16, 16): (0, 255, 255), (48, 16): (255, 0, 255), (16, 48): (255, 255, 0), (48, 48): (0, 0, 0)}
    for (x, y), colour in corners.items():
        assert np.abs(picture[y, x] - colour).max() <= 12
    image = opened(folder / "cmyk_adobe.jpg")
    assert image.info["adobe_transform"] == 0
    assert np.array(image).shape == (64, 64, 4)  # control: four channels
    as_stored = Image.frombytes("CMYK", image.size, bytes(255 - np.array(image))).convert("RGB")
    assert np.abs(np.array(as_stored)[16, 16].astype(int) - corners[16, 16]).max() > 100  # control: not inverted


def test_an_animation_is_its_first_frame(shared: Path) -> None:
    for name in ("anim.gif", "anim.png", "anim.webp", "multi.tiff"):
        path = shared / "faults/img_animated/a" / name
        picture = decode(path, form_of(16, 16)).astype(int)
        assert np.abs(picture - [255, 0, 0]).max() <= 3, name
        with Image.open(path) as image:
            image.seek(image.n_frames - 1)  # type: ignore[attr-defined]
            assert np.abs(np.array(image.convert("RGB")).astype(int) - [255, 0, 0]).max() > 100, name  # control


def test_pixels_without_an_agreed_white_are_refused() -> None:
    data = encoded(np.array([[0.0, 0.5, 1.0]], np.float32), "TIFF")
    assert reason(data) == "floating-point pixels have no agreed white; convert it to 8 or 16 bit"
    assert np.array(opened(data).convert("L")).max() <= 1  # control: black to Pillow
    for values, told in (([[0, 65536]], "from 0 to 65536"), ([[-1, 5]], "from -1 to 5")):
        assert told in reason(encoded(np.array(values, np.int32), "TIFF"))
    lab = io.BytesIO()
    Image.new("LAB", (4, 4)).save(lab, "TIFF")
    assert reason(lab.getvalue()) == "pixels of Pillow's mode LAB are not supported"


# Damaged and foreign files


def test_the_content_decides_not_the_name(shared: Path) -> None:
    folder, form = shared / "faults/img_wrong_extension/a", form_of(48, 64)
    pictures = {p.name: decode(p, form) for p in sorted(folder.iterdir()) if p.name != "html_as.jpg"}
    assert list(pictures) == [
        "UPPER.JPG", "bmp_as.jpg", "gif_as.jpg", "jpeg_as.png", "no_extension", "png_as.jpg", "webp_as.png",
    ]  # fmt: skip
    for name, picture in pictures.items():
        assert np.array_equal(picture, np.array(opened(folder / name).convert("RGB")))
    assert reason(folder / "html_as.jpg") == "it is no JPEG, PNG, GIF, BMP, WEBP or TIFF"
    other = encoded(NOISE, "PPM")
    assert opened(other).size == (60, 40)  # control: Pillow knows many more kinds, some of which start programs
    assert reason(other) == "it is no JPEG, PNG, GIF, BMP, WEBP or TIFF"


def test_damaged_files_are_named_and_the_others_decode(shared: Path) -> None:
    folder, form = shared / "faults/img_corrupt", form_of(48, 64)
    good, bad, named = [], {}, []
    for path in sorted(folder.glob("[ab]/*")):
        try:
            decode(path, form)
            good.append(str(path.relative_to(folder)))
        except BadImage as error:
            bad[path.name] = error.reason
            named.append(error.path == str(path))
    assert good == [f"{c}/ok{n}.jpg" for c in "ab" for n in range(4)]
    assert all(named)
    assert bad == {
        "truncated60.jpg": "Truncated File Read",
        "zero_bytes.jpg": "it is empty",
        "crc_broken.png": "broken PNG file (bad header checksum in b'IDAT')",
        "only_header.jpg": "its header is damaged",
        "zeros.jpg": "it is no JPEG, PNG, GIF, BMP, WEBP or TIFF",
    }


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF", "BMP", "WEBP", "TIFF"])
def test_a_file_that_was_cut_off_is_never_filled_in(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = encoded(NOISE, kind)
    assert decode(data, form_of(40, 60)).shape == (40, 60, 3)
    for share in (0.3, 0.6, 0.95):
        reason(data[: int(len(data) * share)], form_of(40, 60))
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    if kind == "JPEG":
        assert opened(data[: len(data) // 2]).size == (60, 40)  # control: half of it made up, without a word
    with pytest.raises(ConfigError, match="LOAD_TRUNCATED_IMAGES is on: damaged pictures would be filled in; set it"):
        decode(data, form_of(40, 60))


def test_a_wrong_checksum_in_a_png_is_seen() -> None:
    data = bytearray(encoded(NOISE))
    data[-13] ^= 1  # the last byte of the checksum of the last IDAT
    assert np.array_equal(np.array(opened(bytes(data))), NOISE)  # control: Pillow does not compare it
    assert "checksum in b'IDAT'" in reason(bytes(data))


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_more_pixels_than_pillows_limit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    data, larger = encoded(NOISE[:10, :11]), encoded(NOISE[:10, :30])
    decode(data, form_of(4, 4))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    assert opened(data).size == (11, 10)  # control: a warning is all
    assert reason(data) == "11 x 10 pixels are more than Pillow's limit of 100"
    assert "decompression bomb" in reason(larger)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    assert decode(data, form_of(4, 4)).shape == (4, 4, 3)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert reason(tmp_path / "gone.png") == "no such file or directory"
    assert reason(tmp_path) == "is a directory"


def test_path_bytes_and_open_file_give_the_same_and_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(encoded(NOISE))
    with path.open("rb") as file:
        for source in (path, path.read_bytes(), io.BytesIO(path.read_bytes()), file):
            assert np.array_equal(decode(source, form_of(40, 60)), NOISE)  # type: ignore[arg-type]
    path.write_bytes(b"words")
    for source, name in ((b"words", "<bytes>"), (io.BytesIO(b"words"), "<bytes>"), (path, str(path))):
        with pytest.raises(BadImage, match=f"^{re.escape(name)} cannot"):
            decode(source, form_of(4, 4))  # type: ignore[arg-type]
    with path.open("rb") as file, pytest.raises(BadImage, match=f"^{re.escape(str(path))} cannot"):
        decode(file, form_of(4, 4))


def test_the_error_is_the_users_and_can_be_pickled() -> None:
    error = pickle.loads(pickle.dumps(BadImage("a.jpg", "it is empty")))
    assert isinstance(error, UserError)
    assert (error.path, error.reason) == ("a.jpg", "it is empty")
    assert str(error) == "a.jpg cannot be used as a picture: it is empty; remove or replace it"


# Size


def test_crop_cuts_the_middle_of_what_fits_without_touching_pixels() -> None:
    for height, width, top, left in ((40, 40, 0, 10), (40, 41, 0, 9), (40, 60, 0, 0)):
        picture = decode(encoded(NOISE), form_of(height, width, resize="crop"))
        assert np.array_equal(picture, NOISE[top : top + height, left : left + width])
    tall = NOISE.swapaxes(0, 1)
    assert np.array_equal(decode(encoded(tall), form_of(40, 40, resize="crop")), tall[10:50])
    assert not np.array_equal(decode(encoded(NOISE), form_of(40, 40)), NOISE[:, 10:50])  # control: stretch


def test_crop_is_resample_then_cut() -> None:
    for height, width, covered in ((20, 20, (30, 20)), (10, 27, (27, 18)), (64, 32, (96, 64)), (7, 5, (10, 7))):
        whole = np.array(Image.fromarray(NOISE).resize(covered, Image.Resampling.BILINEAR)).astype(int)
        top, left = (covered[1] - height) // 2, (covered[0] - width) // 2
        picture = decode(encoded(NOISE), form_of(height, width, resize="crop")).astype(int)
        assert np.abs(picture - whole[top : top + height, left : left + width]).max() <= 1
        corner = np.abs(picture - whole[:height, :width]).max()
        assert corner > 10 or (top, left) == (0, 0)  # control: the corner is not the middle


def test_a_long_strip_is_cut_before_it_is_enlarged() -> None:
    strip = np.zeros((1, 60_000, 3), np.uint8)
    strip[:, 30_000:] = 200
    picture = decode(encoded(strip), form_of(64, 64, resize="crop"))  # all of it would have 246 million pixels
    assert picture[:, 0].max() < 5
    assert picture[:, -1].min() > 195


def test_pad_fits_inside_black_bars() -> None:
    picture = decode(encoded(NOISE), form_of(60, 60, resize="pad"))
    assert np.array_equal(picture[10:50], NOISE)
    assert picture[:10].max() == picture[50:].max() == 0
    tall = decode(encoded(NOISE.swapaxes(0, 1)), form_of(60, 63, resize="pad"))
    assert np.array_equal(tall[:, 11:51], NOISE.swapaxes(0, 1))  # of 23 columns too many, 11 are on the left
    half = np.array(Image.fromarray(NOISE).resize((30, 20), Image.Resampling.BILINEAR))
    assert np.array_equal(decode(encoded(NOISE), form_of(30, 30, resize="pad"))[5:25], half)
    assert decode(encoded(NOISE), form_of(60, 60))[:10].max() > 0  # control: stretch has no bars
    assert decode(encoded(NOISE[:1]), form_of(8, 8, resize="pad"))[3].max() > 0  # never thinner than a pixel


def test_stretch_takes_both_sides_and_antialiases() -> None:
    wanted = np.array(Image.fromarray(NOISE).resize((11, 33), Image.Resampling.BILINEAR))
    assert np.array_equal(decode(encoded(NOISE), form_of(33, 11)), wanted)
    board = np.indices((64, 64)).sum(0).astype(np.uint8) % 2 * 255
    assert np.abs(decode(encoded(board), form_of(16, 16, 1)).astype(int) - 127).max() <= 16
    nearest = np.array(Image.fromarray(board).resize((16, 16), Image.Resampling.NEAREST))
    assert set(nearest.reshape(-1).tolist()) <= {0, 255}  # control


def smooth(height: int, width: int) -> np.ndarray:
    """A picture with detail in all places that survives JPEG: a sum of waves."""
    y, x = np.mgrid[:height, :width]
    waves = [np.sin(x / 9 + k) + np.sin(y / 7 - k) + np.sin((x + 2 * y) / 23 + k) for k in range(3)]
    return (np.stack(waves, -1) * 40 + 127).astype(np.uint8)


@pytest.mark.parametrize("resize", ["crop", "pad", "stretch"])
def test_a_large_jpeg_is_decoded_small_and_looks_the_same(resize: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    upright, form, sizes = smooth(401, 603), form_of(48, 40, resize=resize), []
    files = []
    for n, store in UNDONE.items():
        exif = Image.Exif()
        exif[ORIENTATION] = n
        files.append(encoded(store(upright), "JPEG", quality=95, exif=exif))
    load = JpegImagePlugin.JpegImageFile.load

    def seen(image: Any) -> Any:
        sizes.append(tuple(sorted(image.size)))
        return load(image)

    with monkeypatch.context() as patch:
        patch.setattr(JpegImagePlugin.JpegImageFile, "load", seen)
        small = [decode(data, form) for data in files]
    assert set(sizes) == {(101, 151)}  # a quarter; an eighth would be less than twice the form
    with monkeypatch.context() as patch:
        patch.setattr(JpegImagePlugin.JpegImageFile, "draft", lambda *_: None)
        full = [decode(data, form) for data in files]
    for n, (a, b) in enumerate(zip(small, full, strict=True), 1):
        assert distance(a, b) < 1, n
        assert np.abs(a.astype(int) - b).max() < 12, n


def test_white_becomes_the_forms_high() -> None:
    data = encoded(np.array([[0, 51, 255]], np.uint8))
    for high in (1.0, 16.0, 0.1):
        picture = decode(data, form_of(1, 3, 1, high=high))
        assert picture.dtype == np.float32
        assert picture.reshape(-1).tolist() == np.array([0, high / 5, high], np.float32).tolist()
    plain = decode(data, form_of(1, 3, 1))
    assert plain.dtype == np.uint8
    assert plain.reshape(-1).tolist() == [0, 51, 255]


def test_a_form_survives_json_and_refuses_what_it_does_not_know() -> None:
    form = ImageForm(48, 64, 1, "pad", 16.0)
    assert ImageForm.from_json(json.loads(json.dumps(form.to_json()))) == form
    assert (form.shape, form.dtype) == ((48, 64, 1), np.float32)
    assert ImageForm(2, 3, 3).dtype == np.uint8
    for wrong in ({"channels": 4}, {"height": 0}, {"resize": "fit"}, {"high": 0.0}, {"high": float("nan")}):
        with pytest.raises(ConfigError, match="allowed: sizes from 1, channels 1 or 3, resize crop, pad or stretch"):
            ImageForm.from_json(form.to_json() | wrong)


# Folders

TINY = encoded(NOISE[:4, :4])


def tree(root: Path, *paths: str, data: bytes = TINY) -> Path:
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(data)
    return root


def labelled(found: Scan) -> dict[str, str]:
    return {path: found.class_names[k] for path, k in zip(found.paths, found.labels, strict=True)}


def test_folders_of_systems_and_tools_are_no_classes(shared: Path) -> None:
    root = shared / "faults/img_hidden_folders"
    found = scan(root)
    assert found.root == root
    assert found.paths == tuple(f"{c}/{n}.png" for c in ("cat", "dog") for n in range(3))
    assert found.class_names == ("cat", "dog")
    assert found.labels.dtype == np.int64
    assert found.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert found.split is None
    assert found.skipped == ()
    assert found.notes == ("1 class folder has no images and is left out: empty_class",)
    assert sorted(p.name for p in root.iterdir() if p.is_dir())[:2] == [".ipynb_checkpoints", "__MACOSX"]  # control


def test_a_file_counts_by_its_first_bytes_and_what_is_left_out_is_listed(shared: Path, tmp_path: Path) -> None:
    shutil.copytree(shared / "faults/img_wrong_extension/a", tmp_path / "a")
    tree(tmp_path, "b/x.png")
    tree(tmp_path, "b/notes.txt", data=b"BMX bicycles are not bitmaps")
    found = scan(tmp_path)
    assert Counter(labelled(found).values()) == {"a": 7, "b": 1}
    assert found.skipped == (
        ("a/html_as.jpg", "it is no JPEG, PNG, GIF, BMP, WEBP or TIFF"),
        ("b/notes.txt", "it is no JPEG, PNG, GIF, BMP, WEBP or TIFF"),
    )
    assert found.notes == ("2 files are no images and are left out, the first: a/html_as.jpg",)


def test_each_format_is_known_by_its_first_bytes(tmp_path: Path) -> None:
    for kind in images.FORMATS:
        assert is_picture_file(next(tree(tmp_path, kind, data=encoded(NOISE, kind)).glob(kind))), kind
    for data in (b"", b"RIFF....WAVEfmt ", b"%PDF-1.7", b"BM" + bytes(30)):
        assert not is_picture_file(tree(tmp_path, "other", data=data) / "other"), data
    big = encoded(NOISE, "TIFF", big_tiff=True)
    assert is_picture_file(tree(tmp_path, "big", data=big) / "big")
    assert np.array_equal(decode(big, form_of(40, 60)), NOISE)


def test_files_below_a_class_folder_are_found_at_any_depth_in_the_order_of_class_and_path(tmp_path: Path) -> None:
    tree(tmp_path, "a/z.png", "a/deep/er/1.png", "a/._z.png", "a/.hidden/2.png", "a/@eaDir/3.png", "a-b/0.png")
    found = scan(tmp_path)
    assert found.paths == ("a/deep/er/1.png", "a/z.png", "a-b/0.png")
    assert list(found.paths) != sorted(found.paths)  # control: classes come first
    assert found.class_names == ("a", "a-b")
    assert is_hidden(Path("a/.hidden/2.png"))
    assert not is_hidden(Path("a/z.png"))


def test_links_are_followed_once_and_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    tree(tmp_path / "elsewhere", "1.png")
    root = tree(tmp_path / "root", "a/0.png")
    (root / "b").symlink_to(tmp_path / "elsewhere")
    (root / "a/up").symlink_to(root / "a")
    (root / "a/gone.png").symlink_to(tmp_path / "nothing")
    os.mkfifo(root / "a/pipe.png")
    found = scan(root)
    assert found.paths == ("a/0.png", "b/1.png")
    assert found.skipped == (("a/gone.png", "it is no file"), ("a/pipe.png", "it is no file"))


def test_folders_of_splits_divide_the_rows(shared: Path, tmp_path: Path) -> None:
    found = scan(shared / "data/hymenoptera")
    assert found.class_names == ("ants", "bees")
    assert found.split is not None
    assert found.split.dtype == np.int8
    counts = Counter((found.split[k], found.class_names[found.labels[k]]) for k in range(len(found.paths)))
    assert counts == {(0, "ants"): 124, (0, "bees"): 121, (1, "ants"): 70, (1, "bees"): 83}
    assert [path.split("/")[0] for path in found.paths] == [("train", "val")[part] for part in found.split]
    three = tree(tmp_path, *(f"{s}/{c}/0.png" for s in ("Train", "valid", "test") for c in "xy"), ".cache/0.png")
    assert scan(three).paths == tuple(f"{s}/{c}/0.png" for s in ("Train", "valid", "test") for c in "xy")
    assert [scan(three).labels.tolist(), scan(three).split.tolist()] == [  # type: ignore[union-attr]
        [0, 1, 0, 1, 0, 1],
        [0, 0, 1, 1, 2, 2],
    ]


def test_names_of_splits_are_classes_beside_another_folder_or_without_train(tmp_path: Path) -> None:
    one = scan(tree(tmp_path / "1", "train/a/0.png", "val/a/0.png", "other/0.png"))
    assert (one.class_names, one.split) == (("other", "train", "val"), None)
    two = scan(tree(tmp_path / "2", "val/a/0.png", "test/a/0.png"))
    assert (two.class_names, two.split) == (("test", "val"), None)


def test_pictures_outside_of_class_folders_are_left_out_and_noted(tmp_path: Path) -> None:
    tree(tmp_path, "train/a/0.png", "train/b/0.png", "test/1.png", "test/0.png", "cover.png")
    tree(tmp_path, "LICENSE", data=b"words")
    found = scan(tmp_path)
    assert found.paths == ("train/a/0.png", "train/b/0.png")
    assert found.skipped == tuple((p, "it lies in no class folder") for p in ("cover.png", "test/0.png", "test/1.png"))
    assert found.notes == ("3 images lie in no class folder and are left out, the first: cover.png",)


NEEDED = "one folder of pictures a class is needed"
KINDS_OF_ERROR: dict[str, tuple[tuple[str, ...], str]] = {
    "no folders": ((), f"data.path: 'ROOT' has no folders; {NEEDED}"),
    "pictures only": (("0.png",), f"data.path: 'ROOT' has pictures, but none in a class folder; {NEEDED}"),
    "no picture": (("a/0.txt", "b/0.txt"), f"data.path: 'ROOT' has folders but no picture in them; {NEEDED}"),
    "one class": (
        ("a/0.png", "b/0.txt"),
        "data.path: 'ROOT' has pictures of one class only, 'a'; at least two classes are needed",
    ),
    "one split twice": (
        ("train/a/0.png", "train/b/0.png", "val/a/0.png", "valid/a/0.png"),
        "data.path: 'ROOT' has two folders of one split: train, val, valid; keep one of each",
    ),
    "a class that train lacks": (
        ("train/ants/0.png", "train/bees/0.png", "val/ant/0.png"),
        "data.path: 'ROOT': class 'ant' of val/ant is not in train; did you mean ants? allowed: ants, bees",
    ),
    "a class that is empty in train": (
        ("train/a/0.png", "train/b/0.png", "train/c/0.txt", "test/c/0.png"),
        "data.path: 'ROOT': class 'c' of test/c is not in train; allowed: a, b",
    ),
}


@pytest.mark.parametrize("case", KINDS_OF_ERROR)
def test_a_folder_without_classes_is_refused_in_one_line(case: str, tmp_path: Path) -> None:
    paths, line = KINDS_OF_ERROR[case]
    for path in paths:
        tree(tmp_path, path, data=b"words" if path.endswith(".txt") else TINY)
    with pytest.raises(ConfigError) as caught:
        scan(tmp_path)
    assert str(caught.value) == line.replace("ROOT", str(tmp_path))


def test_a_path_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "nothing", tree(tmp_path, "file") / "file"):
        with pytest.raises(ConfigError) as caught:
            scan(path)
        assert str(caught.value) == f"data.path: {str(path)!r} is no folder; {NEEDED}"


def test_what_may_not_be_read_is_an_error_not_a_gap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By patches, as these tests may run as root, whom no permission stops."""
    tree(tmp_path, "a/0.png", "b/0.png")

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(folders, "open", refuse, raising=False)
        with pytest.raises(ConfigError) as caught:
            scan(tmp_path)
    assert str(caught.value) == f"data.path: {str(tmp_path / 'a/0.png')!r} cannot be read: Permission denied"
    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(ConfigError) as caught:
        scan(tmp_path)
    assert str(caught.value) == f"data.path: {str(tmp_path)!r} cannot be listed: Permission denied"


# Rows


@pytest.fixture
def twelve(tmp_path: Path) -> Path:
    """12 pictures of 2x3, the k-th all of value 10 k."""
    for k in range(12):
        tree(tmp_path, f"c/{k:02}.png", data=encoded(np.full((2, 3, 3), 10 * k, np.uint8)))
    return tmp_path


PATHS = tuple(f"c/{k:02}.png" for k in range(12))
FORM = form_of(2, 3)


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each file is decoded, by name."""
    counts: Counter[str] = Counter()
    lock = threading.Lock()

    def counting(source: Path, form: ImageForm) -> np.ndarray:
        with lock:
            counts[source.name] += 1
        time.sleep(0.002)  # so that two readers do meet
        return decode(source, form)

    monkeypatch.setattr(images, "decode", counting)
    return counts


@pytest.mark.parametrize("cache", [0, 1 << 20])
def test_rows_come_in_the_order_asked_for(cache: int, twelve: Path, decoded: Counter[str]) -> None:
    rows = ImageRows(twelve, PATHS, FORM, cache)
    assert (len(rows), rows.shape, rows.dtype) == (12, (2, 3, 3), np.uint8)
    asked = np.array([5, 0, 5, 11, 5])
    got = rows.read(asked)
    assert got.shape == (5, 2, 3, 3)
    assert got.dtype == np.uint8
    assert np.array_equal(got, np.broadcast_to((asked * 10)[:, None, None, None], got.shape))
    assert decoded == {"00.png": 1, "05.png": 1, "11.png": 1}  # one that is asked for twice is decoded once
    assert rows.read(np.array([], np.int64)).shape == (0, 2, 3, 3)
    got[:] = 7  # a batch is the reader's own
    assert rows.read(asked).max() == 110


def test_rows_are_kept_when_all_of_them_fit(twelve: Path, decoded: Counter[str]) -> None:
    size = 12 * 2 * 3 * 3
    kept, loose = ImageRows(twelve, PATHS, FORM, size), ImageRows(twelve, PATHS, FORM, size - 1)
    assert (kept.cached, loose.cached) == (True, False)
    assert not ImageRows(twelve, PATHS, form_of(2, 3, high=1.0), size).cached  # float32 takes four times as much
    for _ in range(3):
        kept.read(np.arange(8))
    kept.read(np.arange(12))
    assert decoded == dict.fromkeys((Path(p).name for p in PATHS), 1)
    decoded.clear()
    for _ in range(3):
        loose.read(np.arange(8))
    assert decoded == dict.fromkeys((Path(p).name for p in PATHS[:8]), 3)  # control


@pytest.mark.parametrize("cache", [0, 1 << 20])
def test_two_threads_may_read_at_once(cache: int, twelve: Path, decoded: Counter[str]) -> None:
    rows, start, got = ImageRows(twelve, PATHS, FORM, cache), threading.Barrier(4), {}

    def reader(k: int) -> None:
        start.wait()
        got[k] = rows.read(np.roll(np.arange(12), k))

    threads = [threading.Thread(target=reader, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for k in range(4):
        assert got[k][:, 0, 0, 0].tolist() == np.roll(np.arange(12) * 10, k).tolist()
    assert set(decoded.values()) == {1 if cache else 4}


def test_decoding_is_spread_over_threads_that_all_readers_share(twelve: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = set()

    def noting(source: Path, form: ImageForm) -> np.ndarray:
        names.add(threading.current_thread().name.rpartition("_")[0])
        return decode(source, form)

    monkeypatch.setattr(images, "decode", noting)
    for _ in range(2):
        ImageRows(twelve, PATHS, FORM).read(np.arange(12))
    assert names == {"jaxtrain-images"}
    alive = [t for t in threading.enumerate() if t.name.startswith("jaxtrain-images")]
    assert 1 <= len(alive) <= min(8, os.cpu_count() or 1)


@pytest.mark.parametrize("cache", [0, 1 << 20])
def test_a_bad_or_vanished_file_is_named_and_the_others_can_still_be_read(cache: int, twelve: Path) -> None:
    (twelve / "c/03.png").unlink()
    tree(twelve, "c/07.png", data=TINY[:60])
    rows = ImageRows(twelve, PATHS, FORM, cache)
    for asked, first in ((np.arange(12), "03.png"), (np.arange(11, 3, -1), "07.png")):
        with pytest.raises(BadImage) as caught:
            rows.read(asked)
        assert caught.value.path == str(twelve / "c" / first)
    assert rows.read(np.array([8, 2]))[:, 0, 0, 0].tolist() == [80, 20]


def copied(root: Path, place: Path) -> Path:
    shutil.copytree(root, place)
    return place


def test_the_fingerprint_is_that_of_names_and_contents(twelve: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    def print_of(root: Path, paths: Sequence[str] = PATHS) -> str:
        return ImageRows(root, paths, FORM).fingerprint()

    first = print_of(twelve)
    assert re.fullmatch(r"[0-9a-f]{64}", first)
    other = copied(twelve, tmp_path_factory.mktemp("moved") / "here")
    for path in other.rglob("*"):
        os.utime(path, (1, 1))
    assert print_of(other) == first
    raw = bytearray((other / PATHS[4]).read_bytes())
    raw[-20] ^= 1
    (other / PATHS[4]).write_bytes(bytes(raw))
    assert print_of(other) != first  # one bit, the same size
    assert print_of(twelve, PATHS[:-1]) != first
    assert print_of(twelve, (PATHS[1], PATHS[0], *PATHS[2:])) != first
    (twelve / PATHS[0]).rename(twelve / "c/zz.png")
    assert print_of(twelve, ("c/zz.png", *PATHS[1:])) != first
    with pytest.raises(BadImage, match=re.escape(f"{twelve / PATHS[0]} cannot be used as a picture: no such file")):
        print_of(twelve)


def test_beyond_2_gib_the_fingerprint_reads_both_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def printed(change: int | None = None, whole: int = 0, size: int = 100) -> str:
        monkeypatch.setattr(images, "_WHOLE", whole)
        data = bytearray(size)
        if change is not None:
            data[change] ^= 1
        tree(tmp_path, "x", data=bytes(data))
        return ImageRows(tmp_path, ["x"], FORM).fingerprint()

    monkeypatch.setattr(images, "_END", 16)
    plain = printed()
    assert [k for k in range(100) if printed(k) == plain] == list(range(16, 84))
    assert printed(50, whole=100) != printed(whole=100)  # control: all of it is read
    assert [k for k in range(20) if printed(k, size=20) == printed(size=20)] == []
    assert printed(size=99) != plain  # the same ends, one byte fewer
