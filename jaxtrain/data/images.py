"""Pictures as rows: decode one, read many. Pillow decodes; nothing here knows of models.

In: files and an `ImageForm`. Out: arrays, uint8 or float32 [n, H, W, C]. `decode` is the one way from a file to an
array, for training and prediction alike. Nothing is written.

Not seen, because the format has no checksum: a JPEG cut off and closed again with an end marker, and zeros in the
middle of a BMP, WEBP or TIFF. Colour profiles are not applied.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
from PIL import ExifTags, Image, ImageFile, UnidentifiedImageError

from jaxtrain.config.errors import ConfigError, UserError
from jaxtrain.data.threads import each

Picture = Image.Image
Area = tuple[float, float, float, float]  # left, top, right, bottom, in pixels

FORMATS = ("JPEG", "PNG", "GIF", "BMP", "WEBP", "TIFF")
KINDS = "JPEG, PNG, GIF, BMP, WEBP or TIFF"
_MAGIC = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF87a", b"GIF89a", b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
_BMP_HEADERS = (12, 16, 40, 52, 56, 64, 108, 124)  # bytes; "BM" alone also begins a text on BMX
_WHOLE = 2 << 30  # bytes up to which the fingerprint reads everything
_END = 64 << 10  # bytes at either end of a file that it reads beyond


class BadImage(UserError):
    """A file that is no whole picture of a kind we take. path: its name, or "<bytes>"."""

    def __init__(self, path: Path | str, reason: str) -> None:
        super().__init__(str(path), reason)  # both, so that the error can be pickled
        self.path, self.reason = str(path), reason

    def __str__(self) -> str:
        return f"{self.path} cannot be used as a picture: {self.reason}; remove or replace it"


@dataclass(frozen=True)
class ImageForm:
    """How a picture becomes an array [height, width, channels]; stored with a trained model.

    resize: "crop" covers the form and cuts the middle out, "pad" fits inside and adds black bars, "stretch" distorts;
    bilinear with antialias. high: the number that white becomes; 255 keeps uint8, another gives float32.
    """

    height: int
    width: int
    channels: int
    resize: Literal["crop", "pad", "stretch"] = "crop"
    high: float = 255.0

    def __post_init__(self) -> None:
        right = self.channels in (1, 3) and self.resize in ("crop", "pad", "stretch") and math.isfinite(self.high)
        if not right or min(self.height, self.width) < 1 or self.high <= 0:
            raise ConfigError(f"{self}; allowed: sizes from 1, channels 1 or 3, resize crop, pad or stretch, high > 0")

    @property
    def shape(self) -> tuple[int, int, int]:
        """(H, W, C)."""
        return self.height, self.width, self.channels

    @property
    def dtype(self) -> np.dtype:
        """uint8, or float32 where white is not 255."""
        return np.dtype(np.uint8 if self.high == 255 else np.float32)

    def to_json(self) -> dict[str, Any]:
        """Plain values; `ImageForm.from_json` gives an equal form."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> ImageForm:
        """The form that `to_json` wrote."""
        return cls(**values)


def decode(source: Path | bytes | BinaryIO, form: ImageForm) -> np.ndarray:
    """One picture as an array [H, W, C] of the form's type, upright, whatever its file is called.

    Raises BadImage for a file that is missing, damaged, cut off, of another kind, or larger than Pillow's limit.
    """
    if ImageFile.LOAD_TRUNCATED_IMAGES:
        raise ConfigError(
            "PIL.ImageFile.LOAD_TRUNCATED_IMAGES is on: damaged pictures would be filled in; set it False"
        )
    name, data = _content(source)
    try:
        values = np.array(_framed(*_upright(data, form), form)).reshape(form.shape)
    except UnidentifiedImageError:
        reason = "its header is damaged" if is_picture(data) else f"it is no {KINDS}"
        raise BadImage(name, reason if data else "it is empty") from None
    except Exception as error:  # damaged bytes raise nearly anything in Pillow, from struct.error to SyntaxError
        raise BadImage(name, " ".join(str(error).split()) or type(error).__name__) from error
    if form.high == 255:
        return values
    return (np.arange(256) * form.high / 255).astype(np.float32)[values]


def _content(source: Path | bytes | BinaryIO) -> tuple[str, bytes]:
    if isinstance(source, bytes):
        return "<bytes>", source
    if not isinstance(source, Path):
        return str(getattr(source, "name", "<bytes>")), source.read()
    with _naming(source):
        return str(source), source.read_bytes()


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """A file that vanished or may not be read is named."""
    try:
        yield
    except OSError as error:
        raise BadImage(path, (error.strerror or str(error)).lower()) from None


def _upright(data: bytes, form: ImageForm) -> tuple[Picture, Area]:
    """(the first frame, fully decoded, upright, of mode L or RGB as the form wants; the area that counts in it).

    A JPEG much larger than the form is decoded at 1/2, 1/4 or 1/8; then its last row and column may be in part beyond
    the edge, which would move everything by up to half a pixel of the form.
    """
    with Image.open(io.BytesIO(data), formats=FORMATS) as image:
        pixels, limit = image.width * image.height, Image.MAX_IMAGE_PIXELS
        # Pillow only warns here, and catching a warning is not safe in threads.
        if limit is not None and pixels > limit:
            raise ValueError(f"{image.width} x {image.height} pixels are more than Pillow's limit of {limit}")
        if image.format == "PNG":
            Image.open(io.BytesIO(data), formats=("PNG",)).verify()  # loading does not compare the checksums
        turned = _orientation(image) in (5, 6, 7, 8)
        width, height = _scaled(image.size[::-1] if turned else image.size, form)
        # At least twice the size, so that the resampling that follows still decides how the picture looks.
        drafted = image.draft(None, (2 * height, 2 * width) if turned else (2 * width, 2 * height))
        image.load()
        if image.mode not in _MODES:
            raise ValueError(_REFUSED.get(image.mode, f"pixels of Pillow's mode {image.mode} are not supported"))
        # Pillow has turned a TIFF already and taken its tag away, so the orientation is asked for anew.
        method, from_right, from_bottom = _TURNS.get(_orientation(image), (None, False, False))
        plain = _MODES[image.mode](image).convert("L" if form.channels == 1 else "RGB")
        plain = plain if method is None else plain.transpose(method)
        across, down = drafted[1][2:] if drafted else plain.size
        if drafted and turned:
            across, down = down, across
        left, top = from_right * (plain.width - across), from_bottom * (plain.height - down)
        return plain, (left, top, left + across, top + down)


def _orientation(image: Picture) -> int:
    """The EXIF orientation, 1 to 8; 1 where there is none or it cannot be read, as browsers do."""
    try:
        return int(image.getexif().get(ExifTags.Base.Orientation, 1))
    except Exception:  # the tags are a small TIFF file; a damaged one raises nearly anything
        return 1


# EXIF orientation -> how it is undone, and whether the file's last column is then the first, its last row the first.
_TURNS: dict[int, tuple[Image.Transpose | None, bool, bool]] = {
    2: (Image.Transpose.FLIP_LEFT_RIGHT, True, False),
    3: (Image.Transpose.ROTATE_180, True, True),
    4: (Image.Transpose.FLIP_TOP_BOTTOM, False, True),
    5: (Image.Transpose.TRANSPOSE, False, False),
    6: (Image.Transpose.ROTATE_270, True, False),
    7: (Image.Transpose.TRANSVERSE, True, True),
    8: (Image.Transpose.ROTATE_90, False, True),
}


def _plain(image: Picture) -> Picture:
    """Grey stays grey, all else becomes RGB; what is transparent becomes white: hidden colours never show."""
    if image.has_transparency_data:
        clear = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", clear.size, "white"), clear).convert("RGB")
    return image.convert("L" if image.mode in ("1", "L") else "RGB")


_PHOTOMETRIC = 262  # the TIFF tag that says which end is white


def _deep_grey(image: Picture) -> Picture:
    """16 bits to 8 by the full range, v / 257: a dark picture stays dark."""
    values = np.asarray(image).astype(np.int64)
    low, high = int(values.min()), int(values.max())
    if low < 0 or high > 65535:
        raise ValueError(f"grey values from {low} to {high} have no agreed white; 8 or 16 bit is needed")
    grey = ((values + 128) // 257).astype(np.uint8)
    if getattr(image, "tag_v2", {}).get(_PHOTOMETRIC) == 0:
        grey = 255 - grey  # in this TIFF white is 0, which Pillow heeds for 8 bits only
    grey[values == image.info.get("transparency")] = 255
    return Image.fromarray(grey)


# Pillow's mode -> how it becomes L or RGB. CMYK: Pillow takes a JPEG's inks as Adobe stores them, inverted.
_MODES: dict[str, Callable[[Picture], Picture]] = {
    **dict.fromkeys(("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr"), _plain),
    **dict.fromkeys(("I", "I;16", "I;16L", "I;16B"), _deep_grey),
}
_REFUSED = {"F": "floating-point pixels have no agreed white; convert it to 8 or 16 bit"}


def _scaled(size: tuple[float, float], form: ImageForm) -> tuple[int, int]:
    """(width, height) in pixels that a picture of this (width, height) is resampled to, before it is cut or padded."""
    width, height = size
    if form.resize == "stretch":
        return form.width, form.height
    wider = width * form.height >= height * form.width
    if wider == (form.resize == "crop"):
        return max(1, round(width * form.height / height)), form.height
    return form.width, max(1, round(height * form.width / width))


def _framed(image: Picture, area: Area, form: ImageForm) -> Picture:
    """An area of a picture, in the form's size. What fits already keeps its exact pixels."""
    across, down = area[2] - area[0], area[3] - area[1]
    width, height = _scaled((across, down), form)
    if form.resize == "pad":
        framed = Image.new(image.mode, (form.width, form.height))
        inner = image.resize((width, height), Image.Resampling.BILINEAR, box=area)
        framed.paste(inner, ((form.width - width) // 2, (form.height - height) // 2))
        return framed
    # Resampling only what is kept gives the pixels of "resample all, then cut", and a strip of 1 x 60,000 stays cheap.
    left, top = (width - form.width) // 2, (height - form.height) // 2
    kept = (
        area[0] + left * across / width,
        area[1] + top * down / height,
        area[0] + (left + form.width) * across / width,
        area[1] + (top + form.height) * down / height,
    )
    return image.resize((form.width, form.height), Image.Resampling.BILINEAR, box=kept)


def is_picture(head: bytes) -> bool:
    """Whether a file that begins like this is a picture of a kind we take."""
    if head[:2] == b"BM":
        return int.from_bytes(head[14:18], "little") in _BMP_HEADERS
    return head.startswith(_MAGIC) or (head[:4] == b"RIFF" and head[8:12] == b"WEBP")


class ImageRows:
    """Pictures by row number, decoded when they are read, by threads; kept when all of them fit into cache_bytes."""

    def __init__(self, root: Path, paths: Sequence[str], form: ImageForm, cache_bytes: int = 2 << 30) -> None:
        self.root, self.paths, self.form = root, tuple(paths), form
        size = len(self.paths) * math.prod(form.shape) * form.dtype.itemsize
        self._kept = np.empty((len(self.paths), *form.shape), form.dtype) if size <= cache_bytes else None
        self._done = np.zeros(len(self.paths), bool)
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self.paths)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(H, W, C) of a row."""
        return self.form.shape

    @property
    def dtype(self) -> np.dtype:
        """Type of a row."""
        return self.form.dtype

    @property
    def cached(self) -> bool:
        """Whether decoded rows are kept, so that each file is decoded once."""
        return self._kept is not None

    def read(self, rows: np.ndarray) -> np.ndarray:
        """The pictures of these rows, [n, H, W, C]. Raises BadImage for the first that cannot be used."""
        if self._kept is None:
            unique, places = np.unique(rows, return_inverse=True)
            decoded = np.empty((len(unique), *self.shape), self.dtype)
            for place, picture in enumerate(each(self._decode, unique.tolist(), 4)):
                decoded[place] = picture
            return decoded[places]
        # Held while decoding: a second reader waits for rows that it may want too, and the threads are the same.
        with self._lock:
            missing = np.unique(rows[~self._done[rows]]).tolist()
            for row, picture in zip(missing, each(self._decode, missing, 4), strict=True):
                self._kept[row], self._done[row] = picture, True
        return self._kept[rows]

    def _decode(self, row: int) -> np.ndarray:
        return decode(self.root / self.paths[row], self.form)

    def fingerprint(self) -> str:
        """sha256 of relative paths, sizes and contents (beyond 2 GiB in all: of both ends of each file)."""
        sizes = list(each(self._size, self.paths, 256))
        whole = sum(sizes) <= _WHOLE
        contents = each(lambda path: self._digest(path, whole), self.paths, 16)
        digest = hashlib.sha256()
        for path, size, content in zip(self.paths, sizes, contents, strict=True):
            digest.update(os.fsencode(path) + f"\0{size}\0".encode() + content)
        return digest.hexdigest()

    def _size(self, path: str) -> int:
        with _naming(self.root / path):
            return os.path.getsize(self.root / path)

    def _digest(self, path: str, whole: bool) -> bytes:
        with _naming(self.root / path), open(self.root / path, "rb") as file:
            if whole:
                return hashlib.file_digest(file, "sha256").digest()
            start = file.read(_END)
            file.seek(max(_END, os.path.getsize(self.root / path) - _END))
            return hashlib.sha256(start + file.read()).digest()
