"""Arrays from files: .npz, or .npy beside .npy; whatever is wrong with them is one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxtrain.config import ConfigError, RunConfig, load
from jaxtrain.data.make import make_dataset
from jaxtrain.data.sources import SOURCES, ArraySource

X = np.arange(12, dtype=np.float64).reshape(6, 2)
Y = np.array([0, 1, 0, 1, 0, 1])


def config_of(path: Path, targets: Path | None = None) -> RunConfig:
    data: dict[str, Any] = {"kind": "arrays", "path": str(path)}
    return load({"data": data | ({"targets_path": str(targets)} if targets else {})})


def source_of(config: RunConfig) -> ArraySource:
    source = SOURCES[config.data.kind](config.data)
    assert isinstance(source, ArraySource)
    return source


def npz(place: Path, **arrays: Any) -> Path:
    path = place / "rows.npz"
    np.savez(path, **arrays)
    return path


def refused(config: RunConfig) -> str:
    with pytest.raises(ConfigError) as caught:
        make_dataset(config)
    line = str(caught.value)
    assert "\n" not in line
    return line


def test_an_npz_gives_inputs_targets_weights_and_split(tmp_path: Path) -> None:
    weights, split = np.arange(6) / 4, np.array([0, 0, 1, 0, 2, 0])
    dataset = make_dataset(config_of(npz(tmp_path, inputs=X, targets=Y, weights=weights, split=split)))
    assert dataset.source.name == "rows.npz"
    assert [dataset.splits[n].tolist() for n in ("train", "validation", "test")] == [[0, 1, 3, 5], [2], [4]]
    batch = dataset.read("train", np.arange(4))
    assert batch["inputs"].tolist() == X[[0, 1, 3, 5]].tolist()
    assert batch["targets"].tolist() == [0, 1, 1, 1]
    assert batch["weights"].tolist() == [0.0, 0.25, 0.75, 1.25]


def test_a_split_may_be_words(tmp_path: Path) -> None:
    split = np.array(["train", "test", "train", "validation", "train", "train"])
    source = source_of(config_of(npz(tmp_path, inputs=X, targets=Y, split=split)))
    assert source.split is not None
    assert source.split.tolist() == [0, 2, 0, 1, 0, 0]


def test_npy_beside_npy_is_the_same_data(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", X)
    np.save(tmp_path / "y.npy", Y)
    source = source_of(config_of(tmp_path / "x.npy", tmp_path / "y.npy"))
    packed = source_of(config_of(npz(tmp_path, inputs=X, targets=Y)))
    assert source.fingerprint() == packed.fingerprint()
    assert source.read(np.array([4, 1])).tolist() == X[[4, 1]].tolist()


def test_digits_are_the_1797_images_that_scikit_learn_carries() -> None:
    source = source_of(load({}))
    assert source.inputs.shape == (1797, 8, 8, 1)
    assert (source.inputs.min(), source.inputs.max()) == (0, 16)
    assert np.bincount(source.targets).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]


@pytest.mark.parametrize(
    ("arrays", "expected"),
    [
        ({"inputs": X}, "data.path: {path!r} has no array 'targets'; it holds inputs"),
        ({"targets": Y}, "data.path: {path!r} has no array 'inputs'; it holds targets"),
        (
            {"inputs": X, "target": Y},
            "data.path: {path!r} holds an array 'target'; did you mean targets? "
            "allowed: inputs, targets, weights, split",
        ),
        ({"inputs": X, "targets": Y[:5]}, "rows.npz: 6 inputs but 5 targets; one for each row is needed"),
        (
            {"inputs": X, "targets": Y, "split": np.array([0, 0, 0, 0, 0, 3])},
            "data.path: {path!r}: `split` must hold 0 (train), 1 (validation) or 2 (test) for each row",
        ),
        (
            {"inputs": X, "targets": Y, "split": np.array([0.0, 0, 0, 0, 0, 1])},
            "data.path: {path!r}: `split` must hold 0 (train), 1 (validation) or 2 (test) for each row",
        ),
        (
            {"inputs": X, "targets": Y, "split": np.array(["train", "val", "test", "test", "train", "train"])},
            "data.path: {path!r}: split 'val'; allowed: train, validation, test",
        ),
        ({"inputs": np.array([["a"]] * 6), "targets": Y}, "rows.npz: inputs are of type <U1; numbers are needed"),
        ({"inputs": X[:0], "targets": Y[:0]}, "rows.npz: no rows"),
        (
            {"inputs": np.where(X == 7, np.nan, X), "targets": Y},
            "rows.npz: 1 rows have NaN or infinite inputs, the first is row 3",
        ),
        ({"inputs": np.float64(3.0), "targets": Y}, None),
        ({"inputs": X, "targets": np.int64(1)}, None),
    ],
    ids=[
        "no-targets",
        "no-inputs",
        "typo",
        "short",
        "split-3",
        "split-float",
        "split-word",
        "words",
        "empty",
        "nan",
        "scalar",
        "scalar-targets",
    ],
)
def test_each_wrong_npz_is_one_line(arrays: dict[str, Any], expected: str | None, tmp_path: Path) -> None:
    path = npz(tmp_path, **arrays)
    line = refused(config_of(path))
    if expected is not None:
        assert line == expected.format(path=str(path))


@pytest.mark.parametrize("name", ["text.npz", "text.npy", "empty.npz", "empty.npy", "cut.npz", "cut.npy"])
def test_a_file_that_is_no_array_is_one_line_with_its_path(name: str, tmp_path: Path) -> None:
    np.save(tmp_path / "y.npy", Y)
    whole = npz(tmp_path, inputs=X, targets=Y) if name.endswith("npz") else tmp_path / "y.npy"
    content = whole.read_bytes()
    path = tmp_path / name
    path.write_bytes({"text": b"hello", "empty": b"", "cut": content[: len(content) // 2]}[name.split(".")[0]])
    line = refused(config_of(path, tmp_path / "y.npy" if name.endswith("npy") else None))
    assert line.startswith(f"data.path: {str(path)!r} cannot be read as arrays: ")


def test_the_other_format_under_the_name_is_one_line(tmp_path: Path) -> None:
    np.save(tmp_path / "y.npy", Y)
    several = npz(tmp_path, inputs=X, targets=Y)
    (tmp_path / "one.npz").write_bytes((tmp_path / "y.npy").read_bytes())
    (tmp_path / "several.npy").write_bytes(several.read_bytes())
    said = "cannot be read as arrays: it"
    assert f"{said} is one array, an .npy" in refused(config_of(tmp_path / "one.npz"))
    assert f"{said} holds several arrays, an .npz" in refused(config_of(tmp_path / "several.npy", tmp_path / "y.npy"))
    np.save(tmp_path / "x.npy", X)
    assert f"{said} holds several" in refused(config_of(tmp_path / "x.npy", tmp_path / "several.npy"))


@pytest.mark.parametrize("content", [b"", b"hello"])
def test_unreadable_targets_are_named_and_not_the_inputs(content: bytes, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", X)
    path = tmp_path / "targets.npy"
    path.write_bytes(content)
    assert "targets.npy" in refused(config_of(tmp_path / "x.npy", path))


def test_pickled_objects_are_not_read(tmp_path: Path) -> None:
    """A pickle may run anything."""
    path = npz(tmp_path, inputs=X, targets=np.array([{"a": 1}] * 6, object))
    assert "cannot be read as arrays" in refused(config_of(path))


def test_an_npy_needs_its_targets(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", X)
    with pytest.raises(ConfigError, match=r"data\.targets_path"):
        make_dataset(config_of(tmp_path / "x.npy"))
