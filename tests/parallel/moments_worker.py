"""A gpt with moments in 8 bits on 8 simulated devices, in a process of its own; prints one line of JSON."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from sharding_worker import bytes_held

import jaxtrain as jt
from jaxtrain.build import build
from jaxtrain.config import load
from jaxtrain.parallel import rules

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from scaling import sent

STEPS = 12
MESHES = {"one": {"data": 1}, "fsdp 8": {"fsdp": 8}, "data 2 x fsdp 2 x tensor 2": {"fsdp": 2, "tensor": 2}}
QKV = "blocks.0.attention.qkv.kernel"


def tree_of(path: Path, mesh: dict[str, int], dtype: str) -> dict[str, Any]:
    return {
        "name": "t",
        "model": {"kind": "gpt", "layers": 1, "heads": 4, "width": 128},
        "data": {"kind": "text", "path": str(path), "block_size": 16},
        "schedule": {"kind": "constant"},
        "train": {"duration": STEPS, "global_batch_size": 16},
        "optimizer": {"kind": "adamw", "peak_lr": 3e-3, "moment_dtype": dtype},
        "log": {"every": 1, "tensorboard": False},
        "mesh": mesh,
    }


def trained(path: Path, mesh: dict[str, int], dtype: str) -> dict[str, Any]:
    job = build(load(tree_of(path, mesh, dtype)))
    state, feeder, losses = job.init(), job.feeder(), []
    held = bytes_held(state)
    for position in range(STEPS):
        state, metrics = job.advance(state, feeder(position))
        losses.append(float(metrics["loss"]))
    found = {
        "losses": losses,
        "held": [held, bytes_held(state)],
        "moments": bytes_held(state["opt_state"]),
        "table": rules.state_bytes(job.abstract_state)[0],
        "sent": sent(job.lower().compile().as_text()),
        "executables": job.advance._cache_size(),  # type: ignore[attr-defined]
        "spec": str(tuple(state["params"][QKV].sharding.spec)),
    }
    if dtype == "int8":
        kept = state["opt_state"][0].nu[QKV]
        found["codes"], found["scales"] = (str(tuple(x.sharding.spec)) for x in kept)
    return found


def updated(path: Path, mesh: dict[str, int]) -> list[Any]:
    """Host copies of direction and moments after three updates with gradients that depend on the name alone."""
    job = build(load(tree_of(path, mesh, "int8")))
    state, optimizer = job.init(), job.spec.optimizer
    shardings = jax.tree.map(lambda x: x.sharding, (state["params"], state["opt_state"]))
    update = jax.jit(optimizer.update, out_shardings=shardings)
    kept = state["opt_state"]
    for seed in range(3):
        rng = np.random.default_rng(seed)
        gradients = {
            name: jax.device_put(rng.normal(size=x.shape).astype(np.float32), x.sharding)
            for name, x in sorted(state["params"].items())
        }
        zero = jax.tree.map(jnp.zeros_like, state["params"])
        direction, kept = update(gradients, kept, zero)
    return [np.asarray(x) for x in jax.tree.leaves((direction, kept))]


def resumed(path: Path, place: Path) -> dict[str, Any]:
    """Losses of a run whose first half is on one device and whose second is on eight."""
    half = {"train.duration": STEPS // 2}
    jt.train(tree_of(path, MESHES["one"], "int8"), run_dir=place / "moved", quiet=True, **half).close()
    to = {"train.duration": STEPS, "mesh.data": -1, "mesh.fsdp": 8}
    with jt.resume(place / "moved", quiet=True, **to) as run:
        assert run.state is not None
        codes = run.state["opt_state"][0].mu[QKV].codes
        losses = [row["train/loss"] for row in run.metrics() if "train/loss" in row]
        return {"losses": losses, "codes": str(tuple(codes.sharding.spec)), "dtype": str(codes.dtype)}


def main() -> None:
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "words.txt"
        rng = np.random.default_rng(0)
        path.write_text(" ".join(rng.choice(["rain", "in", "spain", "stays", "mainly", "plain"], 3000)))
        result: dict[str, Any] = {}
        for dtype in ("float32", "int8"):
            result[dtype] = {name: trained(path, mesh, dtype) for name, mesh in MESHES.items()}
        alone = updated(path, MESHES["one"])
        result["differing"] = {}
        for name, mesh in MESHES.items():
            pairs = list(zip(alone, updated(path, mesh), strict=True))
            result["differing"][name] = [int((a != b).sum()) for a, b in pairs], sum(a.size for a, _ in pairs)
        result["resumed"] = resumed(path, Path(place))
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()
