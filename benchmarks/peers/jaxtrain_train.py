"""The arm `jaxtrain`: `jt.train` as a user runs it, with all that it writes; and the start of all arms."""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import work
from work import WORKLOADS, Workload

LONG = {"tiny_mlp": 96}
"""Epochs of a longer run: steps_per_dispatch=auto measures what is better only where 3 s of training are to come."""


def tree(name: str, own: Workload, folder: Path, epochs: int) -> dict[str, Any]:
    """The config of a run."""
    if own.model["kind"] == "gpt":
        data = {"kind": "text", "path": str(folder / f"{name}.txt"), "block_size": own.shape[0]}
    else:
        data = {"kind": "arrays", "path": str(folder / f"{name}_rows.npz"), "normalize": "none"}
    return {
        "name": name,
        "model": own.model,
        "data": data | {"validation_fraction": 0, "test_fraction": 0},
        "optimizer": {"kind": "adamw", "peak_lr": work.RATE, "weight_decay": 0, "clip_norm": 0},
        "schedule": {"kind": "constant"},
        "train": {"duration": epochs * own.steps, "global_batch_size": own.batch},
        "log": {"every": own.steps},
    }


def train(name: str, folder: Path, steps_per_dispatch: int | None) -> None:
    """Time from the rows of metrics.jsonl."""
    import jaxtrain as jt

    own = WORKLOADS[name]
    epochs = own.epochs if steps_per_dispatch else LONG.get(name, own.epochs)
    keys = {"train.steps_per_dispatch": steps_per_dispatch or "auto"}
    with (
        tempfile.TemporaryDirectory() as place,
        jt.train(tree(name, own, folder, epochs), run_dir=Path(place) / "run", quiet=True, **keys) as run,
    ):
        rows = {row["step"]: row for row in run.metrics() if "time/step" in row}
    times = [row["time/step"] for step, row in rows.items() if step > own.warm * own.steps]
    last = rows[own.epochs * own.steps]["train/loss"]
    work.report(own, np.mean(times) * own.timed * own.steps, rows[1]["train/loss"], last)


def write(name: str, data: dict[str, Any], folder: Path) -> None:
    """The rows as jaxtrain reads them; a token is a character."""
    if "tokens" in data:
        text = "".join(chr(ord("0") + token) for token in data["tokens"])
        (folder / f"{name}.txt").write_text(text, encoding="utf-8")
    else:
        np.savez(folder / f"{name}_rows.npz", **data)


def prepare(folder: Path) -> None:
    """Data for jaxtrain; its initial weights and its order of the rows for the others."""
    from jaxtrain.build import build
    from jaxtrain.config import load

    folder.mkdir(parents=True, exist_ok=True)
    for name, own in WORKLOADS.items():
        write(name, work.arrays(own), folder)
        job = build(load(tree(name, own, folder, own.epochs)))
        assert job.steps.per_epoch == own.steps, (name, job.steps.per_epoch)
        read = job.host_batches()
        orders = np.array([read(position)["ids"] for position in range(own.epochs * own.steps)])
        params = {plain(path): np.asarray(x) for path, x in job.init()["params"].items()}
        np.savez(folder / f"{name}.npz", orders=orders.reshape(own.epochs, own.rows), **params)
        print(name, f"{sum(x.size for x in params.values()):,} parameters", flush=True)


def plain(path: str) -> str:
    """jaxtrain keeps a LayerNorm of a list one level deeper."""
    return re.sub(r"(norms\.\d+)\.norm\.", r"\1.", path)


if __name__ == "__main__":
    if sys.argv[1] == "--prepare":
        prepare(Path(sys.argv[2]))
    else:
        options = work.parse()
        train(options.workload, Path(options.folder), options.steps_per_dispatch)
