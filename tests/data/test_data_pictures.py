"""Pictures in a folder as a dataset: splits, statistics of what was decoded, other pictures for a trained model."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from jaxtrain.build import build
from jaxtrain.config import ConfigError, RunConfig, load
from jaxtrain.data import dataset as dataset_module
from jaxtrain.data.dataset import Dataset, make_rows
from jaxtrain.data.images import ImageForm, ImageRows, decode
from jaxtrain.data.make import make_dataset, other_data
from jaxtrain.data.sources import SOURCES, ImageSource

SPLITS = ("train", "validation", "test")
SIZE = (6, 5)  # height and width of all pictures: of this size they keep their exact pixels


def picture(number: int, size: tuple[int, int] = SIZE) -> np.ndarray:
    """Random bytes [H, W, 3]: red is darker than blue."""
    return np.random.default_rng(number).integers(0, (60, 160, 256), (*size, 3)).astype(np.uint8)


def folder_of(root: Path, counts: dict[str, int], size: tuple[int, int] = SIZE, start: int = 0) -> Path:
    """Folders of so many pictures each, numbered through."""
    number = start
    for folder, count in counts.items():
        (root / folder).mkdir(parents=True)
        for i in range(count):
            Image.fromarray(picture(number, size)).save(root / folder / f"{i:04}.png")
            number += 1
    return root


def config_of(path: Path, **data: Any) -> RunConfig:
    return load({"data": {"kind": "images", "path": str(path), "size": list(SIZE), **data}})


def pictures_of(path: Path, **data: Any) -> Dataset:
    made = make_dataset(config_of(path, **data))
    assert isinstance(made, Dataset)
    return made


# ---------------------------------------------------------------- rows


def test_rows_are_the_pixels_of_the_files(tmp_path: Path) -> None:
    dataset = pictures_of(folder_of(tmp_path / "p", {"a": 6, "b": 4}))
    assert dataset.schema.class_names == ("a", "b")
    assert dataset.schema.input_shape == (6, 5, 3)
    assert dataset.schema.input_dtype == "uint8"
    assert dataset.schema.image == {"height": 6, "width": 5, "channels": 3, "resize": "crop", "high": 255.0}
    assert dataset.name == "p"
    for split in SPLITS:
        batch = dataset.read(split, np.arange(dataset.rows(split))[::-1])
        for pixels, target, row in zip(batch["inputs"], batch["targets"], batch["ids"], strict=True):
            np.testing.assert_array_equal(pixels, picture(int(row)))
            assert target == (row >= 6)
    assert sum(dataset.rows(split) for split in SPLITS) == 10


@pytest.mark.parametrize(("size", "shape"), [(7, (7, 7, 3)), ([7], (7, 7, 3)), ([7, 3], (7, 3, 3)), ([1, 2, 3], None)])
def test_the_size_is_one_number_or_height_and_width(size: Any, shape: Any, tmp_path: Path) -> None:
    root = folder_of(tmp_path / "p", {"a": 5, "b": 5})
    if shape is None:
        with pytest.raises(ConfigError) as caught:
            pictures_of(root, size=size)
        assert str(caught.value) == "data.size: [1, 2, 3]; allowed: one number, or height and width"
    else:
        dataset = pictures_of(root, size=size)
        assert dataset.schema.input_shape == shape
        assert dataset.read("train", np.array([0]))["inputs"].shape == (1, *shape)


def test_colour_and_resizing_are_those_of_the_config(tmp_path: Path) -> None:
    root = folder_of(tmp_path / "p", {"a": 5, "b": 5}, size=(12, 6))
    made = {}
    for color, channels in (("rgb", 3), ("grey", 1)):
        for resize in ("crop", "pad", "stretch"):
            dataset = pictures_of(root, color=color, resize=resize)
            batch = dataset.read("train", np.arange(3))
            form = ImageForm(6, 5, channels, resize)
            for pixels, row in zip(batch["inputs"], batch["ids"], strict=True):
                path = root / ("a" if row < 5 else "b") / f"{row % 5:04}.png"
                np.testing.assert_array_equal(pixels, decode(path, form))
            assert dataset.schema.image == form.to_json()
            made[color, resize] = (batch["inputs"].tobytes(), str(dataset.fingerprint()))
    assert len({pixels for pixels, _ in made.values()}) == 6  # the control
    assert len({digest for _, digest in made.values()}) == 6


# ---------------------------------------------------------------- splits


@pytest.mark.parametrize(
    ("folders", "expected"),
    [
        ({"a": 50, "b": 30}, (48, 16, 16)),
        ({"train/a": 20, "train/b": 10, "test/a": 3, "test/b": 4}, (24, 6, 7)),
        ({"train/a": 20, "train/b": 10, "val/a": 2, "val/b": 1, "test/b": 4}, (30, 3, 4)),
        ({"train/a": 20, "train/b": 10, "valid/a": 2}, (30, 2, 0)),
        ({"train/a": 20, "train/b": 10}, (24, 6, 0)),
    ],
    ids=["none", "train-test", "all", "train-valid", "train"],
)
def test_a_folder_may_carry_its_splits(folders: dict[str, int], expected: tuple[int, ...], tmp_path: Path) -> None:
    """Without a folder of validation, it comes out of the training pictures, class by class."""
    dataset = pictures_of(folder_of(tmp_path / "p", folders))
    assert tuple(dataset.rows(split) for split in SPLITS) == expected
    if "train/a" in folders and expected[0] == 24:
        assert np.bincount(dataset.targets[dataset.splits.validation]).tolist() == [4, 2]
    source = dataset.source
    assert isinstance(source, ImageSource)
    for split in SPLITS:
        names = {source.pictures.paths[row].split("/")[0] for row in dataset.splits[split]}
        if "test/b" in folders:
            assert ("test" in names) == (split == "test")


# ---------------------------------------------------------------- statistics


def exact(values: np.ndarray, axes: tuple[int, ...]) -> tuple[list[Any], list[Any]]:
    """Mean and sd in whole numbers: sd is the root of (n * sum of squares - square of the sum) / n^2."""
    moved = np.moveaxis(values.astype(object), axes, range(len(axes)))
    flat = moved.reshape(-1, *moved.shape[len(axes) :])
    n, total, squares = len(flat), flat.sum(0), (flat * flat).sum(0)
    mean = np.vectorize(lambda s: int(s) / n)(total)
    sd = np.vectorize(lambda s, q: math.sqrt(int(n * q - s * s) / n**2))(total, squares)
    return mean.tolist(), sd.tolist()


@pytest.mark.parametrize(("normalize", "axes"), [("channel", (0, 1, 2)), ("feature", (0,))])
def test_statistics_are_those_of_all_pixels_of_the_training_rows(
    normalize: str, axes: tuple[int, ...], tmp_path: Path
) -> None:
    """More rows than are decoded at once."""
    root = folder_of(tmp_path / "p", {"train/a": 200, "train/b": 101, "validation/a": 9, "test/b": 9})
    dataset = pictures_of(root, normalize=normalize)
    training = np.stack([picture(i) for i in range(301)])
    assert dataset.rows("train") == 301 > 256
    mean, sd = exact(training, axes)
    assert dataset.schema.mean == mean == training.mean(axes, dtype=np.float64).tolist()
    np.testing.assert_allclose(dataset.schema.sd, sd, rtol=1e-12)
    np.testing.assert_allclose(dataset.schema.sd, training.std(axes, dtype=np.float64), rtol=1e-12)
    all_rows = np.stack([picture(i) for i in range(319)])
    assert dataset.schema.mean != all_rows.mean(axes, dtype=np.float64).tolist()  # the control
    if normalize == "channel":
        red, green, blue = dataset.schema.mean
        assert red < green < blue


def test_statistics_of_pictures_equal_those_of_the_same_arrays(tmp_path: Path) -> None:
    root = folder_of(tmp_path / "p", {"train/a": 20, "train/b": 11, "test/b": 4})
    inputs = np.stack([picture(i) for i in range(35)])
    np.savez(tmp_path / "p.npz", inputs=inputs, targets=np.repeat([0, 1], [20, 15]), split=np.repeat([0, 2], [31, 4]))
    arrays = make_dataset(load({"data": {"kind": "arrays", "path": str(tmp_path / "p.npz")}})).schema
    pictures = pictures_of(root, validation_fraction=0.0).schema
    assert pictures.mean == pytest.approx(arrays.mean, rel=1e-12)
    assert pictures.sd == pytest.approx(arrays.sd, rel=1e-12)


def test_of_many_pictures_evenly_taken_ones_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = folder_of(tmp_path / "p", {"train/a": 15, "train/b": 10, "validation/a": 1})
    training = np.stack([picture(i) for i in range(25)])
    means = {}
    for most, step in ((10, 3), (24, 2), (25, 1), (1000, 1), (1, 25)):
        monkeypatch.setattr(dataset_module, "STATISTICS_ROWS", most)
        means[most] = pictures_of(root).schema.mean
        assert means[most] == training[::step].mean((0, 1, 2), dtype=np.float64).tolist()
    assert means[10] != means[24] != means[25]  # the control


def test_pictures_of_one_grey_are_moved_to_zero_and_not_divided(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / "p" / name).mkdir(parents=True)
        for i in range(7):
            Image.fromarray(np.full((6, 5), 201, np.uint8)).save(tmp_path / "p" / name / f"{i}.png")
    dataset = pictures_of(tmp_path / "p", color="grey")
    assert (dataset.schema.mean, dataset.schema.sd) == ([201.0], [1.0])
    assert pictures_of(tmp_path / "p", normalize="none").schema.mean is None


# ---------------------------------------------------------------- rows that are not kept


def test_pictures_that_do_not_fit_are_prefetched(tmp_path: Path) -> None:
    root = folder_of(tmp_path / "p", {"a": 20, "b": 20})
    config = config_of(root)
    kept = SOURCES["images"](config.data)
    assert isinstance(kept, ImageSource)
    rows = ImageRows(root, kept.pictures.paths, kept.form, cache_bytes=10)
    decoded = ImageSource(kept.name, rows, kept.targets, kept.split, kept.names, kept.form)
    one, two = make_rows(config, kept), make_rows(config, decoded)
    assert (one.in_memory, two.in_memory) == (True, False)
    assert build(config, dataset=one).feed_kind == "resident"
    assert build(config, dataset=two).feed_kind == "prefetch"
    assert one.schema == two.schema
    assert one.fingerprint() == two.fingerprint()
    order = np.array([5, 0, 5, 23])
    for name, value in one.read("train", order).items():
        np.testing.assert_array_equal(value, two.read("train", order)[name])


def test_the_fingerprint_changes_with_pixels_and_labels_and_not_with_the_place(tmp_path: Path) -> None:
    root = folder_of(tmp_path / "p", {"a": 5, "b": 5})
    before = pictures_of(root).fingerprint()
    assert pictures_of(shutil.copytree(root, tmp_path / "q")).fingerprint() == before
    Image.fromarray(picture(99)).save(tmp_path / "q/a/0003.png")
    touched = pictures_of(tmp_path / "q").fingerprint()
    shutil.copytree(root, tmp_path / "r")
    (tmp_path / "r/a/0003.png").rename(tmp_path / "r/b/0000a.png")
    moved = pictures_of(tmp_path / "r").fingerprint()
    others = [pictures_of(root, **other).fingerprint() for other in ({"split_seed": 1}, {"normalize": "none"})]
    assert len({str(parts) for parts in (before, touched, moved, *others)}) == 5


# ---------------------------------------------------------------- other pictures for a trained model


def test_other_pictures_have_the_classes_of_training(tmp_path: Path) -> None:
    """A folder with other classes numbers them otherwise."""
    config = config_of(folder_of(tmp_path / "p", {"ant": 9, "bee": 9, "cat": 9}))
    schema = make_dataset(config).schema
    root = folder_of(tmp_path / "q", {"cat": 2, "bee": 1}, start=50)
    made = other_data(root, config.data, schema)
    assert isinstance(made, Dataset)
    batch = made.read("test", np.arange(3))
    assert batch["targets"].tolist() == [1, 2, 2]  # in the order of the folders: bee, cat
    np.testing.assert_array_equal(batch["inputs"], np.stack([picture(i) for i in (52, 50, 51)]))
    assert made.schema == schema
    assert pictures_of(root, validation_fraction=0.0, test_fraction=0.0).targets.tolist() == [0, 1, 1]  # the control


def test_another_folder_with_an_unknown_class_is_refused(tmp_path: Path) -> None:
    config = config_of(folder_of(tmp_path / "p", {"ant": 9, "cat": 9}))
    root = folder_of(tmp_path / "q", {"ant": 2, "dog": 2})
    with pytest.raises(ConfigError) as caught:
        other_data(root, config.data, make_dataset(config).schema)
    assert str(caught.value) == "q: class 'dog' (row 2) has no training row"


def test_of_another_folder_with_a_test_folder_only_that_counts(tmp_path: Path) -> None:
    config = config_of(folder_of(tmp_path / "p", {"ant": 9, "cat": 9}))
    root = folder_of(tmp_path / "q", {"train/ant": 3, "train/cat": 2, "train/dog": 2, "test/cat": 2, "test/ant": 1})
    made = other_data(root, config.data, make_dataset(config).schema)
    assert [made.rows(split) for split in SPLITS] == [0, 0, 3]
    assert made.read("test", np.arange(3))["targets"].tolist() == [0, 1, 1]


@pytest.mark.parametrize("resize", ["crop", "pad", "stretch"])
def test_other_pictures_get_the_form_of_training(resize: str, tmp_path: Path) -> None:
    config = config_of(folder_of(tmp_path / "p", {"ant": 9, "cat": 9}), resize=resize, color="grey", normalize="none")
    root = folder_of(tmp_path / "q", {"ant": 2, "cat": 2}, size=(20, 9))
    batch = other_data(root, config.data, make_dataset(config).schema).read("test", np.arange(4))
    form = ImageForm(6, 5, 1, resize)  # type: ignore[arg-type]
    paths = [root / "ant/0000.png", root / "ant/0001.png", root / "cat/0000.png", root / "cat/0001.png"]
    np.testing.assert_array_equal(batch["inputs"], np.stack([decode(path, form) for path in paths]))


def test_a_model_of_pictures_takes_arrays_of_their_shape(tmp_path: Path) -> None:
    config = config_of(folder_of(tmp_path / "p", {"ant": 9, "cat": 9}))
    schema = make_dataset(config).schema
    pixels = np.stack([picture(i) for i in (3, 4)])
    np.savez(tmp_path / "right.npz", inputs=pixels, targets=np.array(["cat", "ant"]))
    batch = other_data(tmp_path / "right.npz", config.data, schema).read("test", np.arange(2))
    assert batch["targets"].tolist() == [1, 0]
    np.testing.assert_array_equal(batch["inputs"], pixels)
    np.savez(tmp_path / "wrong.npz", inputs=pixels[:, :5], targets=np.array(["cat", "ant"]))
    with pytest.raises(ConfigError) as caught:
        other_data(tmp_path / "wrong.npz", config.data, schema)
    assert str(caught.value) == "wrong.npz has rows of shape [5, 5, 3]; the model was trained on [6, 5, 3]"
