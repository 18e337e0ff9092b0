"""Three splits (contract 10): train, validation (may choose), test (read once). Stratified, and stable for ever.

The shuffle is our own permutation, not a library's generator, whose stream may change between versions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxtrain.data.order import permute

_STREAM = 0x5B117  # keeps a split apart from epoch orders of the same seed


@dataclass(frozen=True)
class Splits:
    """Row numbers of the source, ascending, int64."""

    train: np.ndarray
    validation: np.ndarray
    test: np.ndarray

    def __getitem__(self, name: str) -> np.ndarray:
        rows: np.ndarray = getattr(self, name)
        return rows


def given(split: np.ndarray, labels: np.ndarray | None = None, validation: float = 0.0, seed: int = 0) -> Splits:
    """The split that the data carries: 0 train, 1 validation, 2 test; -1 is divided into train and validation."""
    train, held, test = (np.flatnonzero(split == part) for part in range(3))
    open_ = np.flatnonzero(split == -1)
    if len(open_):
        drawn = stratified(None if labels is None else labels[open_], len(open_), (validation, 0.0), seed)
        train = np.sort(np.concatenate([train, open_[drawn.train]]))
        held = np.sort(np.concatenate([held, open_[drawn.validation]]))
    return Splits(train, held, test)


def stratified(labels: np.ndarray | None, rows: int, fractions: tuple[float, float], seed: int) -> Splits:
    """Each class (or all rows, without labels) divided by largest remainder into (train, validation, test).

    fractions: of validation and test. A class with a single row goes to train.
    """
    shares = np.array([1.0 - sum(fractions), *fractions])
    groups = [np.arange(rows)] if labels is None else [np.flatnonzero(labels == c) for c in np.unique(labels)]
    parts: list[list[np.ndarray]] = [[], [], []]
    for number, group in enumerate(groups):
        shuffled = group[permute(seed, _STREAM + number, np.arange(len(group), dtype=np.int32), len(group))]
        counts = _largest_remainder(shares * len(group), len(group))
        for part, rows_of_part in zip(parts, np.split(shuffled, np.cumsum(counts)[:-1]), strict=True):
            part.append(rows_of_part)
    return Splits(*(np.sort(np.concatenate(part)) for part in parts))


def _largest_remainder(wanted: np.ndarray, total: int) -> np.ndarray:
    counts = np.floor(wanted + 1e-9).astype(int)
    order = np.argsort(-(wanted - counts), kind="stable")
    counts[order[: total - counts.sum()]] += 1
    if counts[0] == 0:  # never a class without training rows
        counts[int(np.argmax(counts))] -= 1
        counts[0] = 1
    return counts
