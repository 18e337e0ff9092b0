"""Runs on 8 simulated devices, in a process of its own (`test_parallel_mesh.py` starts it); prints one line of JSON."""

from __future__ import annotations

import json
import re
from typing import Any

import jax
import numpy as np

from jaxtrain.build import Job, build
from jaxtrain.config import UserError, load, schema
from jaxtrain.core.state import weights_for_evaluation
from jaxtrain.data.sources import ArraySource
from jaxtrain.loop import evaluate
from jaxtrain.parallel.mesh import batch_shardings, make_mesh
from jaxtrain.session import eval_batches

BATCH, HIDDEN, STEPS = 40, 24, 10
FIRST: dict[Any, Any] = {}


def source() -> ArraySource:
    """95 training rows (so the third batch is padded), 21 validation rows, 5 test rows."""
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(121, 6)).astype(np.float32)
    split = np.repeat([0, 1, 2], [95, 21, 5]).astype(np.int8)
    return ArraySource("made", inputs, inputs[:, :3].argmax(1), split=split)


def job_of(devices: int, feed: str, **overrides: Any) -> Job:
    config = {
        "model": {"kind": "mlp", "hidden": [HIDDEN], "norm": "batch"},
        "data": {"feed": feed},
        "train": {"duration": STEPS, "global_batch_size": BATCH},
        # Not Adam: a bias before BatchNorm has no gradient, and Adam makes its rounding as large as a step.
        "optimizer": {"kind": "momentum", "peak_lr": 0.1},
        "evaluate": {"batch_size": 21},
        "mesh": {"data": devices},
        "log": {"every": 1000},
    }
    return build(load(config, [(key.replace("__", "."), value) for key, value in overrides.items()]), source=source())


def plain(tree: Any) -> Any:
    return {name: np.asarray(x, np.float64).ravel().tolist() for name, x in tree.items()}


def first_state(job: Job, own: bool) -> Any:
    """`job.init`, compiled for this mesh; or what it gave on the first mesh, put there (that costs no compilation)."""
    if own:
        return job.init()
    key = tuple(job.abstract_state["params"])
    if key not in FIRST:
        FIRST[key] = jax.tree.map(lambda x: np.array(x), job.init())
    return jax.device_put(FIRST[key], jax.tree.map(lambda x: x.sharding, job.abstract_state))


def trained(devices: int, feed: str, own: bool = False, **overrides: Any) -> dict[str, Any]:
    job = job_of(devices, feed, **overrides)
    text = job.lower().compile().as_text()  # the calls below find it compiled
    state, feeder = first_state(job, own), job.feeder()
    losses, ids = [], []
    for position in range(STEPS):
        fed = feeder(position)
        if feed == "direct":
            ids.append(np.asarray(fed["ids"]).tolist())
        state, metrics = job.advance(state, fed)
        losses.append(float(metrics["loss"]))
    feeder.close()
    evaluation = evaluate(job.eval_step, weights_for_evaluation(state), eval_batches(job, "validation"), job.metrics)
    counts = [
        float(job.eval_step(*weights_for_evaluation(state), b)["loss_count"])
        for _, b in eval_batches(job, "validation")
    ]
    return {
        "losses": losses,
        "ids": ids,
        "statistics": plain(state["model_state"]),
        "params": plain(state["params"]),
        "evaluation": evaluation.figures,
        "confusion": int(np.sum(evaluation.details["confusion"])),
        "counts": counts,
        # Rows of the hidden layer in the program of one device.
        "activations": sorted({int(rows) for rows in re.findall(rf"f32\[(\d+),{HIDDEN}\]", text)}),
        "eval_batch": job.eval_batch,
        "devices_of_params": sorted({len(x.sharding.device_set) for x in state["params"].values()}),
        "replicated": all(x.sharding.is_fully_replicated for x in jax.tree.leaves(state)),
        "executables": job.advance._cache_size(),  # type: ignore[attr-defined]
    }


def shards(devices: int) -> dict[str, Any]:
    job = job_of(devices, "direct")
    batch = job.put(job.host_batches()(2))
    return {name: [list(s.data.shape) for s in x.addressable_shards] for name, x in batch.items()}


def line(action: Any) -> list[str]:
    try:
        action()
    except UserError as error:
        return [type(error).__name__, str(error)]
    return ["none", ""]


def main() -> None:
    every = jax.devices()
    result = {
        "devices": len(every),
        "trained": {
            f"{devices}-{feed}": trained(devices, feed, own=feed == "resident")
            for devices, feed in ((1, "direct"), (2, "direct"), (8, "direct"), (8, "resident"))
        },
        "all": make_mesh(schema.Mesh(), every).size,
        "first": [d.id for d in make_mesh(schema.Mesh(data=2), every).devices.flat],
        "accumulated": trained(8, "direct", train__micro_batch_size=8, model__norm="none"),
        "accumulated_alone": trained(1, "direct", train__micro_batch_size=8, model__norm="none"),
        "shards_8": shards(8),
        "shards_1": shards(1),
        "scalar": batch_shardings(make_mesh(schema.Mesh(data=8), every), {"epoch": np.int32(0)})[
            "epoch"
        ].is_fully_replicated,
        "errors": {
            "too_many": line(lambda: job_of(9, "direct")),
            "indivisible": line(lambda: job_of(8, "direct", train__global_batch_size=42)),
            "small": line(lambda: job_of(8, "direct", train__global_batch_size=3)),
            "micro": line(lambda: job_of(8, "direct", train__micro_batch_size=20)),
            "fits": line(lambda: job_of(8, "direct", train__global_batch_size=48)),
            "one": line(lambda: job_of(1, "direct", train__global_batch_size=42)),
        },
    }
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()
