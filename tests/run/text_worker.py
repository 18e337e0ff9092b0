"""A language model on 8 simulated devices, in a process of its own (`test_run_kinds_of_data.py` starts it).

Arguments: a text file. Prints one line of JSON.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import jax
import numpy as np
from run_files import GPT

from jaxtrain.build import build
from jaxtrain.config import load
from jaxtrain.core.state import weights_for_evaluation
from jaxtrain.loop import evaluate
from jaxtrain.session import eval_batches

STEPS = 8


def trained(path: str, devices: int, feed: str) -> dict[str, Any]:
    config = {
        "model": GPT,
        "data": {"kind": "text", "path": path, "block_size": 8, "feed": feed},
        "train": {"duration": STEPS, "global_batch_size": 16},
        "optimizer": {"kind": "momentum", "peak_lr": 0.3},
        "evaluate": {"batch_size": 8},
        "mesh": {"data": devices},
        "log": {"every": 1000},
    }
    job = build(load(config))
    state, feeder, losses = job.init(), job.feeder(), []
    for position in range(STEPS):
        state, metrics = job.advance(state, feeder(position))
        losses.append(float(metrics["loss"]))
    feeder.close()
    weights = weights_for_evaluation(state)
    counts = [float(job.eval_step(*weights, batch)["loss_count"]) for _, batch in eval_batches(job, "test")]
    return {
        "losses": losses,
        "params": {name: np.asarray(x, np.float64).ravel().tolist() for name, x in state["params"].items()},
        "figures": evaluate(job.eval_step, weights, eval_batches(job, "test"), job.metrics).figures,
        "targets": sum(counts),
        "tokens": len(job.dataset.tokens["test"]),  # type: ignore[union-attr]
        "devices": job.mesh.size,
    }


def main() -> None:
    path = sys.argv[1]
    result = {
        "devices": len(jax.devices()),
        "one": trained(path, 1, "direct"),
        "eight": trained(path, 8, "direct"),
        "eight_resident": trained(path, 8, "resident"),
    }
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()
