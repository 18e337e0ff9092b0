"""From a config to a dataset; and other data for a trained model, whose schema holds."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from data_helpers import source_of, text_of
from PIL import Image

from jaxtrain.config import ConfigError, RunConfig, load
from jaxtrain.data import text as text_module
from jaxtrain.data.dataset import Dataset, rows_of_schema
from jaxtrain.data.make import Data, make_dataset, other_data
from jaxtrain.data.schema import Schema
from jaxtrain.data.text import TextDataset

SPLITS = ("train", "validation", "test")


def arrays_config(place: Path, *, objective: str = "cross_entropy", **arrays: Any) -> RunConfig:
    """The config of an .npz."""
    np.savez(place, **arrays)
    return load({"data": {"kind": "arrays", "path": str(place)}, "objective": {"kind": objective}})


def trained_on(tmp_path: Path, targets: Any, inputs: Any = None, **more: Any) -> Schema:
    """The schema of arrays that are all in training."""
    targets = np.asarray(targets)
    inputs = np.arange(2 * len(targets), dtype=np.float32).reshape(-1, 2) if inputs is None else inputs
    split = np.zeros(len(targets), np.int8)
    return make_dataset(
        arrays_config(tmp_path / "train.npz", inputs=inputs, targets=targets, split=split, **more)
    ).schema


def other(tmp_path: Path, schema: Schema, **arrays: Any) -> Dataset:
    np.savez(tmp_path / "other.npz", **arrays)
    own = load({"data": {"kind": "arrays", "path": str(tmp_path / "train.npz")}}).data
    made = other_data(tmp_path / "other.npz", own, schema)
    assert isinstance(made, Dataset)
    return made


# ---------------------------------------------------------------- other rows for a trained model


@pytest.mark.parametrize(
    ("learnt", "asked", "encoded"),
    [
        (["cat", "ant", "bee"], ["cat", "bee", "cat"], [2, 1, 2]),
        (["cat", "ant", "bee"], ["bee"], [1]),
        ([7, 3, 900], [900, 3], [2, 0]),
        ([7, 3, 900], [900.0, 3.0], [2, 0]),
        ([0.0, 1.0, 2.0], [2, 1], [2, 1]),
        ([True, False, True], [True], [1]),
    ],
    ids=["order", "subset", "gaps", "floats", "ints-of-floats", "bools"],
)
def test_classes_keep_the_numbers_that_training_gave_them(
    learnt: Any, asked: Any, encoded: list[int], tmp_path: Path
) -> None:
    schema = trained_on(tmp_path, learnt)
    asked = np.asarray(asked)
    made = other(tmp_path, schema, inputs=np.ones((len(asked), 2)), targets=asked)
    assert made.read("test", np.arange(len(asked)))["targets"].tolist() == encoded
    assert made.schema == schema


def test_by_itself_a_subset_of_classes_has_other_numbers(tmp_path: Path) -> None:
    """The control of the test above."""
    own = trained_on(tmp_path, ["cat", "bee", "cat"])
    assert own.class_names == ("bee", "cat")


def test_words_of_a_source_meet_the_words_of_another() -> None:
    """The numbers of two sources may stand for other words; the words count."""
    learnt = make_dataset(load({}), source_of([0, 1, 2], names=("ant", "bee", "cat"), split=np.zeros(3, np.int8)))
    made = rows_of_schema(source_of([0, 1, 1], names=("cat", "ant")), learnt.schema)
    assert made.targets.tolist() == [2, 0, 0]
    assert rows_of_schema(source_of(["bee", "ant"]), learnt.schema).targets.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("learnt", "asked", "named", "row"),
    [
        (["cat", "ant"], ["ant", "dog"], "'dog'", 1),
        ([0, 1], [1, 0, 5], "'5'", 2),
        ([0, 1], [-1, 0], "'-1'", 0),
        (["0", "1"], ["zero"], "'zero'", 0),
    ],
)
def test_a_class_that_training_never_saw_is_named(
    learnt: Any, asked: Any, named: str, row: int, tmp_path: Path
) -> None:
    schema = trained_on(tmp_path, learnt)
    with pytest.raises(ConfigError) as caught:
        other(tmp_path, schema, inputs=np.ones((len(asked), 2)), targets=np.asarray(asked))
    assert str(caught.value) == f"other.npz: class {named} (row {row}) has no training row"


def test_the_stored_normalisation_is_used(tmp_path: Path) -> None:
    schema = trained_on(tmp_path, [0, 1, 1])
    inputs = np.array([[100.0, -3.0], [7.0, 7.0]])
    made = other(tmp_path, schema, inputs=inputs, targets=np.array([1, 0]))
    assert (made.schema.mean, made.schema.sd) == (schema.mean, schema.sd)
    rows = made.read("test", np.arange(2))["inputs"]
    assert rows.dtype == np.float32
    learnt = np.arange(6).reshape(3, 2)
    expected = (inputs - learnt.mean(0)) / learnt.std(0)
    np.testing.assert_allclose(made.schema.preprocess()(rows), expected, rtol=1e-6)
    assert trained_on(tmp_path, [0, 1], inputs).mean != schema.mean  # the control


def test_all_rows_are_the_test_split(tmp_path: Path) -> None:
    schema = trained_on(tmp_path, [0, 1, 1])
    inputs = np.arange(80, dtype=np.float32).reshape(40, 2)
    made = other(tmp_path, schema, inputs=inputs, targets=np.arange(40) % 2)
    assert [made.rows(split) for split in SPLITS] == [0, 0, 40]
    assert [made.eval_rows(split) for split in SPLITS] == [0, 0, 40]
    batch = made.evaluation("test", np.array([39, 4, 0]), np.array([True, True, False]))
    assert batch["inputs"].tolist() == inputs[[39, 4, 0]].tolist()
    assert batch["ids"].tolist() == [39, 4, 0]
    assert batch["mask"].tolist() == [True, True, False]


def test_of_a_source_with_a_test_split_only_that_counts(tmp_path: Path) -> None:
    """What else it holds may have been trained on."""
    schema = trained_on(tmp_path, [0, 1, 1])
    arrays = {"inputs": np.ones((6, 2)), "targets": np.array([0, 9, 1, 9, 1, 0])}
    made = other(tmp_path, schema, **arrays, split=np.array([2, 0, 2, 1, 2, 0]))
    assert made.splits.test.tolist() == [0, 2, 4]
    assert made.read("test", np.arange(3))["targets"].tolist() == [0, 1, 1]
    with pytest.raises(ConfigError, match="class '9' \\(row 1\\) has no training row"):
        other(tmp_path, schema, **arrays, split=np.array([0, 0, 0, 1, 1, 0]))  # the control: no test split


def test_weights_of_other_rows_are_kept(tmp_path: Path) -> None:
    schema = trained_on(tmp_path, [0, 1, 1])
    weights = np.array([0.5, 2.0])
    made = other(tmp_path, schema, inputs=np.ones((2, 2)), targets=np.array([0, 1]), weights=weights)
    assert made.read("test", np.array([1, 0]))["weights"].tolist() == [2.0, 0.5]


def test_rows_of_another_shape_are_refused(tmp_path: Path) -> None:
    schema = trained_on(tmp_path, [0, 1, 1])
    with pytest.raises(ConfigError) as caught:
        other(tmp_path, schema, inputs=np.ones((4, 2, 1)), targets=np.zeros(4, int))
    assert str(caught.value) == "other.npz has rows of shape [2, 1]; the model was trained on [2]"


@pytest.mark.parametrize(
    ("objective", "targets", "wrong", "shapes"),
    [
        ("mse", [[0.5, 1.0], [2.0, 3.0]], [0.5, 1.0], ([], [2])),
        ("binary", [[0, 1], [1, 1]], [[0, 1, 1], [1, 0, 0]], ([3], [2])),
        ("mae", [0.5, 1.0], [[0.5], [1.0]], ([1], [])),
    ],
)
def test_targets_of_another_shape_are_refused(
    objective: str, targets: Any, wrong: Any, shapes: Any, tmp_path: Path
) -> None:
    inputs = np.ones((2, 2))
    learnt = arrays_config(
        tmp_path / "train.npz",
        objective=objective,
        inputs=inputs,
        targets=np.array(targets),
        split=np.zeros(2, np.int8),
    )
    schema = make_dataset(learnt).schema
    assert other(tmp_path, schema, inputs=inputs, targets=np.array(targets)).rows("test") == 2  # the control
    with pytest.raises(ConfigError) as caught:
        other(tmp_path, schema, inputs=inputs, targets=np.array(wrong))
    assert str(caught.value) == (
        f"other.npz has targets of shape {shapes[0]} a row; the model was trained on {shapes[1]}"
    )


def test_values_are_taken_as_they_are(tmp_path: Path) -> None:
    config = arrays_config(
        tmp_path / "train.npz",
        objective="mse",
        inputs=np.ones((2, 1)),
        targets=np.array([0.5, 9.0]),
        split=np.zeros(2, int),
    )
    schema = make_dataset(config).schema
    made = other(tmp_path, schema, inputs=np.ones((2, 1)), targets=np.array([-4, 1000]))
    assert made.read("test", np.arange(2))["targets"].tolist() == [-4.0, 1000.0]
    with pytest.raises(ConfigError, match=r"other\.npz: the target of row 1 is not finite"):
        other(tmp_path, schema, inputs=np.ones((2, 1)), targets=np.array([1.0, np.nan]))


def mnist_folder(folder: Path, labels: dict[str, list[int]], side: int = 4) -> Path:
    """Four small IDX files; each picture is filled with its number."""
    folder.mkdir()
    for part, of_part in labels.items():
        n = len(of_part)
        pixels = np.repeat(np.arange(n, dtype=np.uint8), side * side).tobytes()
        sizes = b"".join(size.to_bytes(4, "big") for size in (n, side, side))
        (folder / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(b"\0\0\x08\x03" + sizes + pixels))
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(b"\0\0\x08\x01" + n.to_bytes(4, "big") + bytes(of_part))
    return folder


def test_another_mnist_gives_its_test_files(tmp_path: Path) -> None:
    learnt = mnist_folder(tmp_path / "a", {"train": [0, 1, 2, 0, 1, 2], "t10k": [1, 2]})
    asked = mnist_folder(tmp_path / "b", {"train": [5, 6], "t10k": [2, 0, 2]})
    config = load({"data": {"kind": "mnist", "path": str(learnt), "validation_fraction": 0.0}})
    schema = make_dataset(config).schema
    made = other_data(asked, config.data, schema)
    assert made.rows("test") == 3
    batch = made.read("test", np.arange(3))
    assert batch["ids"].tolist() == [2, 3, 4]
    assert batch["targets"].tolist() == [2, 0, 2]
    assert batch["inputs"][:, 0, 0, 0].tolist() == [0, 1, 2]
    with pytest.raises(ConfigError, match=r"^data\.path: '.*gone': no such folder"):
        other_data(tmp_path / "gone", config.data, schema)


def test_a_model_of_arrays_in_the_form_of_pictures_takes_a_folder_of_them(tmp_path: Path) -> None:
    """Digits: 8 x 8 grey numbers from 0 to 16."""
    for name, grey in (("7", 255), ("0", 0), ("3", 51)):
        (tmp_path / "p" / name).mkdir(parents=True)
        Image.fromarray(np.full((20, 20), grey, np.uint8)).save(tmp_path / "p" / name / "a.png")
    digits = make_dataset(load({}))
    made = other_data(tmp_path / "p", load({}).data, digits.schema)
    batch = made.read("test", np.arange(3))
    assert batch["targets"].tolist() == [0, 3, 7]
    assert batch["inputs"].shape == (3, 8, 8, 1)
    assert batch["inputs"].dtype == np.float32
    np.testing.assert_allclose(batch["inputs"][:, 4, 4, 0], [0.0, 3.2, 16.0], rtol=1e-6)
    np.savez(tmp_path / "own.npz", inputs=digits.read("train", np.arange(5))["inputs"], targets=np.arange(5))
    assert other_data(tmp_path / "own.npz", load({}).data, digits.schema).rows("test") == 5


def test_what_cannot_be_evaluated_is_told_with_what_can(tmp_path: Path) -> None:
    vectors = trained_on(tmp_path, [0, 1, 1])
    own = load({"data": {"kind": "arrays", "path": str(tmp_path / "train.npz")}}).data
    for path in (tmp_path, tmp_path / "rows.csv"):
        with pytest.raises(ConfigError) as caught:
            other_data(path, own, vectors)
        assert str(caught.value) == f"{str(path)!r} is nothing to evaluate; allowed: an .npz with inputs and targets"
    with pytest.raises(ConfigError) as caught:
        other_data(tmp_path / "rows.csv", load({}).data, make_dataset(load({})).schema)
    assert str(caught.value).endswith(
        "allowed: an .npz with inputs and targets, or a folder with a folder of pictures a class"
    )


# ---------------------------------------------------------------- what lives on the device, for all kinds


def picture_folder(folder: Path, classes: dict[str, int], size: tuple[int, int] = (5, 4)) -> Path:
    """Classes with so many pictures each, of random bytes [H, W, 3]."""
    rng = np.random.default_rng(0)
    for name, count in classes.items():
        (folder / name).mkdir(parents=True)
        for i in range(count):
            Image.fromarray(rng.integers(0, 256, (*size, 3), np.uint8)).save(folder / name / f"{i:03}.png")
    return folder


def _arrays(inputs: Any, targets: Any, **more: Any) -> Callable[[Path, Any], Data]:
    def make(tmp_path: Path, monkeypatch: Any) -> Data:
        objective = more.pop("objective", "cross_entropy")
        path = tmp_path / "a.npz"
        return make_dataset(arrays_config(path, objective=objective, inputs=inputs, targets=targets, **more))

    return make


def _text(**options: Any) -> Callable[[Path, Any], Data]:
    def make(tmp_path: Path, monkeypatch: Any) -> Data:
        (tmp_path / "a.txt").write_text("".join(chr(32 + i % 50) for i in range(400)))
        return text_of(tmp_path / "a.txt", **options)

    return make


def _library(tmp_path: Path, monkeypatch: Any) -> Data:
    (tmp_path / "a.py").write_text("print()\n" * 100)
    monkeypatch.setattr(text_module.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    return make_dataset(load({"data": {"kind": "pystdlib", "block_size": 8}}))


def _mnist(tmp_path: Path, monkeypatch: Any) -> Data:
    path = mnist_folder(tmp_path / "m", {"train": [0, 1] * 20, "t10k": [1, 0, 1]})
    return make_dataset(load({"data": {"kind": "mnist", "path": str(path)}}))


def _images(tmp_path: Path, monkeypatch: Any) -> Data:
    path = picture_folder(tmp_path / "p", {"a": 6, "b": 5})
    return make_dataset(load({"data": {"kind": "images", "path": str(path), "size": [3, 2]}}))


WIDE, CLASSES = np.arange(60.0).reshape(20, 3), np.arange(20) % 2
KINDS: dict[str, Callable[[Path, Any], Data]] = {
    "digits": lambda tmp_path, monkeypatch: make_dataset(load({})),
    "float64": _arrays(WIDE, CLASSES),
    "float16": _arrays(WIDE.astype(np.float16), CLASSES.astype(str)),
    "int64": _arrays(WIDE.astype(np.int64), CLASSES.astype(float), weights=np.ones(20)),
    "uint8": _arrays(np.zeros((20, 4, 4, 3), np.uint8), CLASSES),
    "bool": _arrays(WIDE > 7, CLASSES > 0),
    "scalars": _arrays(np.arange(20), CLASSES),
    "binary": _arrays(WIDE, np.ones((20, 3), np.int64), objective="binary"),
    "values": _arrays(WIDE, WIDE.reshape(20, 3, 1), objective="mse", weights=np.ones(20, np.int64)),
    "mnist": _mnist,
    "images": _images,
    "text-char": _text(),
    "text-byte": _text(tokenizer="byte"),
    "pystdlib": _library,
}


def described(arrays: dict[str, Any]) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    return {name: (tuple(x.shape), np.dtype(x.dtype)) for name, x in arrays.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_shapes_are_told_before_anything_is_read(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of the rows, and the program of a step, are known from them."""
    dataset = KINDS[kind](tmp_path, monkeypatch)
    for split in SPLITS:
        if dataset.rows(split):
            assert described(dataset.resident_shapes(split)) == described(dataset.resident(split))
    rows = np.arange(min(dataset.rows("train"), 7), dtype=np.int32)
    assert len(rows) > 1
    read = dataset.read("train", rows)
    assert described(dataset.shapes(len(rows))) == described(read)
    resident = dataset.resident("train")
    assert described(jax.eval_shape(dataset.take, resident, rows, np.int32(0))) == described(read)
    assert described(dataset.shapes(3)) != described(read)  # the control
    for name, value in dataset.take(jax.device_put(resident), rows, np.int32(1)).items():
        np.testing.assert_array_equal(value, dataset.read("train", rows, 1)[name], err_msg=name)


def test_the_kinds_of_this_file_are_all_that_there_are() -> None:
    from jaxtrain.data.sources import SOURCES

    # Of arrays there are several, by their types.
    assert {*SOURCES, *text_module.DOCUMENTS} <= {*(kind.split("-")[0] for kind in KINDS), "arrays"}


def test_a_source_of_ones_own_replaces_the_data_of_a_config() -> None:
    dataset = make_dataset(load({}), source_of([0, 1, 0, 1, 1]))
    assert isinstance(dataset, Dataset)
    assert dataset.name == "made"
    assert make_dataset(load({})).name == "digits"  # the control
    assert not isinstance(dataset, TextDataset)


@pytest.mark.parametrize("key", ["path", "targets_path"])
def test_a_missing_data_file_is_named_with_the_folder_looked_in(key: str, tmp_path: Path) -> None:
    """When it is read: the config of a run loads where its data is gone."""
    there, missing = tmp_path / "there.npy", tmp_path / "missing.npy"
    np.save(there, np.zeros((8, 2)))
    paths = {"path": str(there), "targets_path": str(there), key: str(missing)}
    config = load({"data": {"kind": "arrays", **paths}})
    with pytest.raises(ConfigError) as refused:
        make_dataset(config)
    assert str(refused.value) == f"data.{key}: {str(missing)!r}: no such file (looked in {tmp_path})"


def test_a_relative_data_file_is_looked_for_in_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = load({"data": {"kind": "arrays", "path": "rows.npz"}})
    with pytest.raises(ConfigError, match="no such file") as refused:
        make_dataset(config)
    assert str(refused.value) == f"data.path: 'rows.npz': no such file (looked in {tmp_path})"
    np.savez(tmp_path / "rows.npz", inputs=np.zeros((8, 2)), targets=np.arange(8) % 2)
    assert make_dataset(config).rows("train") > 0
