"""Small runs for the tests of this folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.hooks.control import Signals
from jaxtrain.loop import Stop

TINY: dict[str, Any] = {
    "name": "tiny",
    "model": {"kind": "mlp", "hidden": [16]},
    "train": {"duration": 24, "global_batch_size": 64},
    "log": {"every": 5, "tensorboard": False},
    "evaluate": {"every": 8},
}


def tiny(place: Path, **overrides: Any) -> jt.Run:
    """A run of 24 steps of a small mlp on digits."""
    return jt.train(TINY, run_dir=place, quiet=True, **overrides)


def stop_at(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """The next runs behave as if Ctrl-C had come during `step`."""

    def after_step(self: Signals, now: int) -> Stop | None:
        return Stop("interrupted", "test", 130) if now == step else None

    monkeypatch.setattr(Signals, "after_step", after_step)


def host(tree: Any) -> dict[str, np.ndarray]:
    """A state as {path: numpy array}."""
    paths, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path): np.array(leaf) for path, leaf in paths}


def differing(a: Any, b: Any) -> list[str]:
    """Paths of the leaves that are not bit-equal."""
    left, right = host(a), host(b)
    assert left.keys() == right.keys()
    return [name for name in left if left[name].tobytes() != right[name].tobytes()]


def rows_without_time(run: jt.Run) -> list[dict[str, Any]]:
    """metrics.jsonl as it stands, without what a clock decides."""
    lines = (run.path / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if not k.startswith("time/")} for line in lines]
