"""Sources: where rows come from. A source answers `read(rows) -> arrays` for a whole batch (contract 5).

So far every source holds its rows in memory; `ArraySource` is what `digits`, `arrays` and a library user's own
arrays become. Targets are as the user wrote them (numbers or words); `dataset.py` gives them their meaning.
"""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxtrain.config import schema
from jaxtrain.config.errors import ConfigError, choices

_SPLITS = {"train": 0, "validation": 1, "test": 2}


@dataclass(frozen=True)
class ArraySource:
    """inputs [n, ...], targets [n] or [n, K], weights [n] or None, split [n] (0 train, 1 validation, 2 test) or None.

    names: words for classes when the targets are numbers.
    """

    name: str
    inputs: np.ndarray
    targets: np.ndarray
    weights: np.ndarray | None = None
    split: np.ndarray | None = None
    names: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        for label in ("inputs", "targets"):
            if getattr(self, label).ndim == 0:
                raise ConfigError(f"{self.name}: {label} is a single value; one for each row is needed")
        rows = len(self.inputs)
        for label in ("targets", "weights", "split"):
            array = getattr(self, label)
            if array is not None and len(array) != rows:
                raise ConfigError(f"{self.name}: {rows} inputs but {len(array)} {label}; one for each row is needed")
        if rows == 0:
            raise ConfigError(f"{self.name}: no rows")
        if self.inputs.dtype.kind not in "fiub":
            raise ConfigError(f"{self.name}: inputs are of type {self.inputs.dtype}; numbers are needed")
        if self.inputs.dtype.kind == "f" and not np.isfinite(self.inputs).all():
            bad = np.flatnonzero(~np.isfinite(self.inputs.reshape(rows, -1)).all(1))
            raise ConfigError(f"{self.name}: {len(bad)} rows have NaN or infinite inputs, the first is row {bad[0]}")
        wide = self.inputs.dtype.itemsize > 4
        if wide and rows:
            limit = np.finfo(np.float32).max if self.inputs.dtype.kind == "f" else np.iinfo(np.int32).max
            large = np.flatnonzero((np.abs(self.inputs.reshape(rows, -1)) > limit).any(1))
            if len(large):
                raise ConfigError(
                    f"{self.name}: {len(large)} rows have inputs beyond {limit:g}, which the device cannot hold; "
                    f"the first is row {large[0]}"
                )
        if self.weights is not None:
            wrong = np.flatnonzero(~(np.isfinite(self.weights) & (self.weights >= 0)).reshape(rows, -1).all(1))
            if len(wrong):
                raise ConfigError(
                    f"{self.name}: {len(wrong)} weights are negative or not finite, the first is that of row {wrong[0]}"
                )

    def __len__(self) -> int:
        return len(self.inputs)

    def read(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """The arrays of these rows, gathered."""
        return {"inputs": self.inputs[rows], "targets": self.targets[rows]}

    def fingerprint(self) -> str:
        """sha256 of everything that makes up the rows."""
        digest = hashlib.sha256()
        for array in (self.inputs, self.targets, self.weights, self.split):
            if array is not None:
                digest.update(f"{array.dtype.str}{array.shape}".encode())
                plain = array.dtype.kind != "O"  # repr of a long array of objects leaves its middle out
                digest.update(np.ascontiguousarray(array).data if plain else repr(array.tolist()).encode())
        return digest.hexdigest()


def _digits(config: schema.Digits) -> ArraySource:
    """The UCI digits (Alpaydin & Kaynak 1998) that scikit-learn carries: 1,797 images of 8x8, values 0..16."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = bunch.images.astype(np.float32)[..., None]
    return ArraySource("digits", images, bunch.target.astype(np.int64), names=tuple(str(i) for i in range(10)))


def _arrays(config: schema.Arrays) -> ArraySource:
    path, reading = Path(config.path), ("data.path", config.path)
    try:
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as stored:
                parts = {name: stored[name] for name in stored.files}
        elif config.targets_path is None:
            raise ConfigError(f"data.targets_path: needed beside data.path {config.path!r}, which holds inputs only")
        else:
            parts = {"inputs": np.load(path, allow_pickle=False)}
            reading = ("data.targets_path", config.targets_path)
            parts["targets"] = np.load(config.targets_path, allow_pickle=False)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ConfigError(f"{reading[0]}: {reading[1]!r} cannot be read as arrays: {error}") from None
    known = ("inputs", "targets", "weights", "split")
    for name in parts:
        if name not in known:
            raise ConfigError(f"data.path: {config.path!r} holds an array {name!r}; {choices(name, known)}")
    for name in ("inputs", "targets"):
        if name not in parts:
            raise ConfigError(f"data.path: {config.path!r} has no array {name!r}; it holds {', '.join(parts)}")
    split = parts.get("split")
    if split is not None:
        split = _split_numbers(config.path, split)
    return ArraySource(path.name, parts["inputs"], parts["targets"], parts.get("weights"), split)


def _split_numbers(path: str, split: np.ndarray) -> np.ndarray:
    if split.dtype.kind in "US":
        words = split.astype(str)
        unknown = sorted(set(words.tolist()) - set(_SPLITS))
        if unknown:
            raise ConfigError(f"data.path: {path!r}: split {unknown[0]!r}; {choices(unknown[0], _SPLITS)}")
        return np.array([_SPLITS[w] for w in words], np.int8)
    if split.dtype.kind not in "iu" or not np.isin(split, (0, 1, 2)).all():
        raise ConfigError(f"data.path: {path!r}: `split` must hold 0 (train), 1 (validation) or 2 (test) for each row")
    return split.astype(np.int8)


SOURCES: dict[str, Callable[..., ArraySource]] = {"digits": _digits, "arrays": _arrays}


def open_source(config: schema.Data) -> ArraySource:
    """The source of a config."""
    return SOURCES[config.kind](config)
