"""What every arm trains: networks, sizes, data, the order of the rows, and how often what is timed. Plain numpy.

`jaxtrain_train.py --prepare FOLDER` writes the initial weights and the order of the rows of jaxtrain's own run, once;
every other arm starts from these weights and takes these rows in this order, so the losses of all are alike.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

RATE, B1, B2, EPS = 1e-3, 0.9, 0.999, 1e-8  # AdamW without decay: the masks of the libraries differ


@dataclass(frozen=True)
class Workload:
    """model: the keys of jaxtrain's `model`. shape: of a row. steps: of an epoch. warm, timed: epochs."""

    model: dict[str, Any]
    shape: tuple[int, ...]
    batch: int
    steps: int
    outputs: int = 10
    warm: int = 1
    timed: int = 2
    steps_per_execution: int = 16

    @property
    def rows(self) -> int:
        """Rows of an epoch."""
        return self.batch * self.steps

    @property
    def epochs(self) -> int:
        """Epochs of an arm."""
        return self.warm + self.timed


WORKLOADS = {
    "tiny_mlp": Workload({"kind": "mlp", "hidden": [64]}, (64,), 32, 512, timed=4),
    "mlp": Workload({"kind": "mlp", "hidden": [512, 512]}, (784,), 128, 96, timed=4),
    "gpt": Workload(
        {
            "kind": "gpt",
            "layers": 4,
            "heads": 4,
            "width": 128,
            "positions": "learned",
            "norm": "layer",
            "activation": "gelu",
        },
        (64,),
        12,
        16,
        outputs=65,
        timed=3,
        steps_per_execution=8,
    ),
    "resnet18": Workload(
        {"kind": "resnet", "depth": 18, "width": 64}, (32, 32, 3), 32, 6, timed=1, steps_per_execution=3
    ),
    "tcn": Workload(
        {"kind": "tcn", "channels": [64, 64, 64, 64], "kernel_size": 3},
        (128, 8),
        32,
        10,
        timed=2,
        steps_per_execution=5,
    ),
}


def arrays(work: Workload) -> dict[str, np.ndarray]:
    """The synthetic data: `inputs` float32 and `targets` int32 that a linear map explains in part, or `tokens`."""
    rng = np.random.default_rng(0)
    if work.model["kind"] == "gpt":
        follower = rng.permutation(work.outputs)  # a token is followed by a given one, or in a quarter by any
        tokens = rng.integers(0, work.outputs, (work.rows + 2) * work.shape[0] - 1)
        kept = rng.random(len(tokens)) < 0.75
        for i in range(1, len(tokens)):
            tokens[i] = follower[tokens[i - 1]] if kept[i] else tokens[i]
        return {"tokens": tokens.astype(np.int32), "span": np.arange(work.shape[0] + 1)}
    inputs = rng.normal(size=(work.rows, *work.shape)).astype(np.float32)
    flat = inputs.reshape(work.rows, -1)
    scores = flat @ rng.normal(size=(flat.shape[1], work.outputs)) / flat.shape[1] ** 0.5
    targets = (scores + rng.gumbel(size=scores.shape)).argmax(1)
    targets[: work.outputs] = np.arange(work.outputs)  # every class is there
    return {"inputs": inputs, "targets": targets.astype(np.int32)}


def take(data: dict[str, Any], rows: Any) -> tuple[Any, Any]:
    """(inputs, targets) of some rows; of tokens, `rows` are the places of the first. For numpy, jax and PyTorch."""
    if "tokens" in data:
        window = data["tokens"][rows[:, None] + data["span"]]
        return window[:, :-1], window[:, 1:]
    return data["inputs"][rows], data["targets"][rows]


@dataclass(frozen=True)
class Start:
    """What `--prepare` wrote. weights: {"layers.0.kernel": array}, in flax's layout. orders: [epochs, rows]."""

    weights: dict[str, np.ndarray]
    orders: np.ndarray


def load(folder: str, name: str) -> Start:
    """The start of a workload."""
    with np.load(Path(folder) / f"{name}.npz") as stored:
        parts = dict(stored)
    return Start(orders=parts.pop("orders"), weights=parts)


def batches(order: Any, batch: int) -> Iterator[Any]:
    """The rows of each step of an epoch."""
    for start in range(0, len(order), batch):
        yield order[start : start + batch]


def parse() -> argparse.Namespace:
    """The command line of an arm."""
    parser = argparse.ArgumentParser()
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("folder", help="what `jaxtrain_train.py --prepare` wrote")
    parser.add_argument("--steps-per-execution", action="store_true", help="of Keras")
    parser.add_argument("--steps-per-dispatch", type=int, help="of jaxtrain; else auto")
    return parser.parse_args()


def report(work: Workload, seconds: float, first: float, last: float) -> None:
    """The line of an arm. seconds: of the timed epochs. first: loss of the first step. last: mean of the last epoch."""
    print(json.dumps({"step": seconds / (work.timed * work.steps), "first": float(first), "loss": float(last)}))


def report_losses(work: Workload, seconds: float, losses: Any) -> None:
    """The same from the loss of each step."""
    report(work, seconds, losses[0], np.mean([float(loss) for loss in losses[-work.steps :]]))
