"""Small trained runs for the tests of this folder, and the same figures in numpy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import jaxtrain as jt

RAIN = "the rain in spain stays mainly in the plain\n"
TINY: dict[str, Any] = {
    "name": "tiny",
    "model": {"kind": "mlp", "hidden": [16]},
    "train": {"duration": 40, "global_batch_size": 32},
    "optimizer": {"peak_lr": 0.01},
    "log": {"every": 20, "tensorboard": False},
    "evaluate": {"every": 0},
}
"""No evaluation before the end: the last step is the one that is sealed and tested."""
GPT = {"kind": "gpt", "layers": 2, "heads": 2, "kv_heads": 1, "width": 32}
BLOCK = 16


NO_SPLIT = {"validation_fraction": 0.0, "test_fraction": 0.0}
"""All rows for training: there is no evaluation to compile."""


def text_config(path: Path, *, model: Any = (), data: Any = (), **train: Any) -> dict[str, Any]:
    """Sections for a language model of all the text at `path`; `model`, `data`, `train`: keys that are to differ."""
    return {
        "model": {**GPT, **dict(model)},
        "data": {"kind": "text", "path": str(path), "block_size": BLOCK, **NO_SPLIT, **dict(data)},
        "train": {"duration": 80, "global_batch_size": 16, **train},
    }


def train(place: Path, sections: dict[str, Any] | None = None, **options: Any) -> jt.Run:
    """A run of `TINY` with other `sections`, quiet; options as in `jt.train`."""
    return jt.train({**TINY, **(sections or {})}, run_dir=place, quiet=True, **options)


def made_rows(n: int = 150, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Rows of five features of different size, and two values of each that can be learnt."""
    inputs = np.random.default_rng(seed).normal(size=(n, 5)) * [1, 10, 100, 0.1, 1] + [0, 50, 0, 3, -2]
    return inputs.astype(np.float32), np.stack([inputs[:, 0] + inputs[:, 4], inputs[:, 1] / 10 - inputs[:, 0]], 1)


def words_of(values: np.ndarray) -> np.ndarray:
    """Three classes, whose names are in another order than their sizes."""
    return np.array(["low", "mid", "high"])[np.digitize(values[:, 0], [-2.7, -1.3])]


def write_pictures(root: Path, classes: dict[str, int], seed: int = 0, size: tuple[int, int] = (6, 9)) -> Path:
    """`classes`: how many PNGs each folder gets. Class k is brighter in colour k."""
    rng = np.random.default_rng(seed)
    for name, count in classes.items():
        (root / name).mkdir(parents=True, exist_ok=True)
        for i in range(count):
            pixels = rng.integers(0, 160, (*size, 3))
            pixels[..., sorted(classes).index(name) % 3] += 90
            Image.fromarray(pixels.astype(np.uint8)).save(root / name / f"{i:03}.png")
    return root


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """In float64, over the last axis."""
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def cross_entropy(logits: np.ndarray, targets: np.ndarray) -> float:
    """The mean loss of [..., C] for [...]."""
    return float(-np.take_along_axis(log_softmax(logits), targets[..., None], -1).mean())
