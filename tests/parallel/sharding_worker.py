"""A gpt on 8 simulated devices in every mesh, in a process of its own; prints one line of JSON."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np

import jaxtrain as jt
from jaxtrain.build import Job, build
from jaxtrain.config import UserError, load
from jaxtrain.core.module import ModuleDef
from jaxtrain.core.state import weights_for_evaluation
from jaxtrain.loop import evaluate
from jaxtrain.parallel import rules
from jaxtrain.session import eval_batches
from jaxtrain.words import model_summary

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import scaling
from scaling import sent

STEPS = 20
MESHES = {
    "one": {"data": 1},
    "data 8": {"data": 8},
    "fsdp 8": {"fsdp": 8},
    "data 2 x fsdp 4": {"fsdp": 4},
    "data 2 x tensor 4": {"tensor": 4},
    "data 2 x fsdp 2 x tensor 2": {"fsdp": 2, "tensor": 2},
    "data 2 x context 4": {"context": 4},
    "tensor 2 x context 2": {"data": 1, "tensor": 2, "context": 2},
}
STACKED = {
    "one": {"data": 1},
    "pipe 4 x data 2": {"pipe": 4},
    "pipe 2 x fsdp 2 x tensor 2": {"pipe": 2, "fsdp": 2, "tensor": 2},
    "pipe 2 x context 2 x data 2": {"pipe": 2, "context": 2},
    "fsdp 8": {"fsdp": 8},
}
"""Meshes for four blocks in a stack."""


def tree_of(path: Path, mesh: dict[str, int]) -> dict[str, Any]:
    return {
        "name": "t",
        "model": {"kind": "gpt", "layers": 2, "heads": 4, "kv_heads": 4, "width": 32},
        "data": {"kind": "text", "path": str(path), "block_size": 16},
        "train": {"duration": STEPS, "global_batch_size": 16, "ema_decay": 0.9},
        "optimizer": {"kind": "adamw", "peak_lr": 3e-3},
        "mesh": mesh,
    }


def job_of(path: Path, mesh: dict[str, int], **changes: Any) -> Job:
    return build(load(tree_of(path, mesh), [(key.replace("__", "."), value) for key, value in changes.items()]))


def bytes_held(tree: Any) -> int:
    """What the first device holds, from the arrays themselves."""
    first = jax.devices()[0]
    return sum(s.data.nbytes for x in jax.tree.leaves(tree) for s in x.addressable_shards if s.device == first)


def trained(path: Path, mesh: dict[str, int], steps: int = STEPS, **changes: Any) -> dict[str, Any]:
    job = job_of(path, mesh, **changes)
    state, feeder = job.init(), job.feeder()
    held, losses = bytes_held(state), []
    for position in range(steps):
        state, metrics = job.advance(state, feeder(position))
        losses.append(float(metrics["loss"]))
    figures = evaluate(job.eval_step, weights_for_evaluation(state), eval_batches(job, "validation"), job.metrics)
    qkv = "blocks.stacked.attention.qkv.kernel" if job.config.model.scan_layers else "blocks.1.attention.qkv.kernel"
    return {
        "losses": losses,
        "eval": figures.figures["loss"],
        "norm": float(sum(np.square(np.asarray(x, np.float64)).sum() for x in state["params"].values())),
        "parameters": sum(x.nbytes for x in state["params"].values()),
        "held": [held, bytes_held(state)],
        "table": list(rules.state_bytes(job.abstract_state)),
        "spec": {n: str(tuple(x.sharding.spec)) for n, x in job.abstract_state["params"].items()},
        "moment": str(tuple(state["opt_state"][0].mu[qkv].sharding.spec)),
        "average": str(tuple(state["ema"]["params"][qkv].sharding.spec)),
        "sent": sent(job.lower().compile().as_text()),
        "executables": job.advance._cache_size(),  # type: ignore[attr-defined]
        "names": sorted(name for name, size in job.mesh.shape.items() if size > 1),
        "batch": str(tuple(job.put(job.host_batches()(0))["inputs"].sharding.spec)),
    }


def resumed(path: Path, place: Path) -> dict[str, Any]:
    """Losses of 20 steps: straight on one device; and 10 on one device, then 10 on two meshes of 8, 5 on each."""
    keys = {"schedule.kind": "constant", "log.every": 1, "log.tensorboard": False, "checkpoint.keep_last": 5}

    def losses(run: jt.Run) -> list[float]:
        return [row["train/loss"] for row in run.metrics() if "train/loss" in row]

    with jt.train(tree_of(path, {"data": 1}), run_dir=place / "straight", quiet=True, **keys) as run:
        straight = losses(run)
    jt.train(tree_of(path, {"data": 1}), run_dir=place / "moved", quiet=True, **keys, **{"train.duration": 10}).close()
    to = {"train.duration": 15, "mesh.data": -1, "mesh.fsdp": 4}
    jt.resume(place / "moved", quiet=True, **to).close()
    to = {"train.duration": 20, "mesh.fsdp": 1, "mesh.tensor": 4}
    with jt.resume(place / "moved", quiet=True, **to) as run:
        assert run.state is not None
        split = str(tuple(run.state["params"]["blocks.0.attention.qkv.kernel"].sharding.spec))
        figures = jt.evaluate_run(place / "moved", "validation", step="last")[0].figures["loss"]
        rows = [row["eval/loss"] for row in run.metrics() if "eval/loss" in row]
        return {"straight": straight, "moved": losses(run), "split": split, "evaluated": [figures, rows[-1]]}


def line(action: Any) -> str:
    try:
        action()
    except UserError as error:
        return str(error)
    return ""


def main() -> None:
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "words.txt"
        rng = np.random.default_rng(0)
        path.write_text(" ".join(rng.choice(["rain", "in", "spain", "stays", "mainly", "plain"], 3000)))
        only = sys.argv[1:] or list(MESHES)
        result: dict[str, Any] = {name: trained(path, MESHES[name]) for name in only}
        if len(sys.argv) == 1:
            stacked = {"model__scan_layers": True, "model__layers": 4}
            for name, mesh in STACKED.items():
                result[f"stacked: {name}"] = trained(path, mesh, **stacked)
            with mock.patch("jax.lax.ppermute", lambda x, *_: x):
                result["no stage hands on"] = trained(path, STACKED["pipe 4 x data 2"], 5, **stacked)
            dropped = stacked | {"model__dropout": 0.5, "optimizer__peak_lr": 1e-9}
            result["dropped"] = trained(path, STACKED["pipe 4 x data 2"], 5, **dropped)
            result["direct"] = trained(path, MESHES["data 2 x context 4"], data__feed="direct")
            result["accumulated"] = trained(path, MESHES["data 2 x fsdp 4"], train__micro_batch_size=8)
            wide = {"data": 2, "fsdp": 4}
            result["wide"] = sent(scaling.job_of(path, wide).lower().compile().as_text())
            with mock.patch("jaxtrain.build.Placed", lambda make, *_: ModuleDef(make)):
                result["left alone"] = sent(scaling.job_of(path, wide).lower().compile().as_text())
            result["resumed"] = resumed(path, Path(place))
            result["other seed"] = trained(path, MESHES["one"], train__seed=1)
            result["summary"] = model_summary(job_of(path, MESHES["data 2 x fsdp 2 x tensor 2"]))
            result["errors"] = {
                "heads": line(lambda: job_of(path, {"tensor": 3, "data": 1})),
                "groups": line(lambda: job_of(path, {"tensor": 4}, model__kv_heads=2)),
                "context": line(lambda: job_of(path, {"context": 5, "data": 1})),
                "devices": line(lambda: job_of(path, {"fsdp": 3})),
                "many": line(lambda: job_of(path, {"data": 4, "fsdp": 4})),
                "pipe": line(lambda: job_of(path, {"pipe": 2})),
                "stages": line(lambda: job_of(path, {"pipe": 4}, model__scan_layers=True)),
                "rows": line(lambda: job_of(path, {"fsdp": 8}, train__global_batch_size=12)),
            }
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()
