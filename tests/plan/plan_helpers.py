"""Jobs for the tests of this folder."""

from __future__ import annotations

from typing import Any

from jaxtrain.build import Job, build
from jaxtrain.config import load

TINY: dict[str, Any] = {
    "name": "tiny",
    "model": {"kind": "mlp", "hidden": [16]},
    "augment": {"shift": 0},
    "data": {"feed": "resident"},
    "train": {"duration": 24, "global_batch_size": 64},
    "log": {"every": 5, "tensorboard": False},
}
GPT = {"model.kind": "gpt", "data.kind": "pystdlib", "data.feed": "auto", "data.block_size": 64, "model.width": 64}
NETWORKS: dict[str, dict[str, Any]] = {
    "mlp": {"model.hidden": [512, 512], "train.global_batch_size": 1024},
    "cnn": {"model.kind": "cnn", "train.global_batch_size": 512},
    "gpt": {**GPT, "model.layers": 2, "train.global_batch_size": 16},
}
"""Each with a step that takes some tens of MiB, most of them activations."""


def job_of(**keys: Any) -> Job:
    """A small mlp on digits, changed by dotted keys."""
    return build(load(TINY, keys.items()))
