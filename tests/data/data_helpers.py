"""Sources and configs of the tests of data."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxtrain.config import RunConfig, load
from jaxtrain.data.dataset import Dataset, make_dataset
from jaxtrain.data.sources import ArraySource


def config_of(**overrides: Any) -> RunConfig:
    """The default config; `data__normalize="none"` is data.normalize=none."""
    return load({}, [(key.replace("__", "."), value) for key, value in overrides.items()])


def source_of(targets: Any, inputs: Any = None, **more: Any) -> ArraySource:
    """Rows whose first input is their number, unless `inputs` are given."""
    targets = np.asarray(targets)
    if inputs is None:
        inputs = np.stack([np.arange(len(targets)), np.arange(len(targets)) ** 2 % 7], 1).astype(np.float32)
    return ArraySource("made", np.asarray(inputs), targets, **more)


def dataset_of(
    targets: Any, inputs: Any = None, *, split: Any = None, weights: Any = None, **overrides: Any
) -> Dataset:
    split = None if split is None else np.asarray(split, np.int8)
    return make_dataset(config_of(**overrides), source_of(targets, inputs, split=split, weights=weights))
