"""One gpt on 1, 2, 4 and 8 simulated devices in every kind of mesh: the same losses, smaller parts, what is sent.

    python benchmarks/scaling.py

Simulated devices share two cores, so their times say nothing and none is given. What a real machine would send is read
from the compiled program: the bytes that the collectives of one step give to a device.
"""

from __future__ import annotations

import math
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import numpy as np
from record import record

from jaxtrain.build import Job, build
from jaxtrain.config import load
from jaxtrain.parallel import mesh as meshes
from jaxtrain.parallel import rules

STEPS, BATCH = 20, 16
MESHES: list[dict[str, int]] = [
    {"data": 1},
    {"data": 2},
    {"data": 4},
    {"data": 8},
    {"data": 1, "fsdp": 2},
    {"data": 1, "fsdp": 4},
    {"data": 1, "fsdp": 8},
    {"data": 2, "fsdp": 4},
    {"data": 1, "tensor": 2},
    {"data": 2, "tensor": 4},
    {"data": 2, "fsdp": 2, "tensor": 2},
    {"data": 2, "context": 4},
]
STACKED: list[dict[str, int]] = [
    {"data": 1},
    {"data": 1, "fsdp": 8},
    {"data": 2, "pipe": 4},
    {"data": 1, "pipe": 2, "fsdp": 2, "tensor": 2},
    {"data": 2, "pipe": 2, "context": 2},
]
"""Meshes of a gpt whose blocks are one stack; `pipe` needs it."""
COLLECTIVE = re.compile(r"= (\([^)]*\)|\S+) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)\(")
WIDTH = {"f32": 4, "s32": 4, "u32": 4, "pred": 1, "bf16": 2, "f16": 2, "u8": 1}


def job_of(path: Path, mesh: dict[str, int], stack: bool = False) -> Job:
    return build(
        load(
            {
                "name": "scaling",
                "model": {"kind": "gpt", "layers": 4, "heads": 4, "width": 128, "scan_layers": stack},
                "data": {"kind": "text", "path": str(path), "block_size": 64},
                "train": {"duration": STEPS, "global_batch_size": BATCH},
                "optimizer": {"kind": "adamw", "peak_lr": 1e-3},
                "mesh": mesh,
            }
        )
    )


def sent(text: str) -> dict[str, int]:
    """{collective: bytes a device receives} of a compiled program."""
    found: dict[str, int] = {}
    for shapes, name in COLLECTIVE.findall(text):
        for kind, sizes in re.findall(r"(\w+)\[([\d,]*)\]", shapes):
            count = math.prod(int(n) for n in sizes.split(",") if n)
            found[name] = found.get(name, 0) + count * WIDTH[kind]
    return found


def main() -> None:
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "words.txt"
        rng = np.random.default_rng(0)
        path.write_text(" ".join(rng.choice(["rain", "in", "spain", "stays", "mainly", "plain"], 30_000)))
        for mesh, stack in [*((mesh, False) for mesh in MESHES), *((mesh, True) for mesh in STACKED)]:
            job = job_of(path, mesh, stack)
            text = job.lower().compile().as_text()
            state, feeder = job.init(), job.feeder()
            losses = []
            for position in range(STEPS):
                state, metrics = job.advance(state, feeder(position))
                losses.append(float(metrics["loss"]))
            one, once = rules.state_bytes(job.abstract_state)
            own = {"mesh": meshes.words(job.mesh), "stack": stack, "losses": losses}
            rows.append({**own, "held": one, "whole": once, "sent": sent(text)})
            print(rows[-1]["mesh"], losses[-1], one / 2**20, rows[-1]["sent"], file=sys.stderr, flush=True)
    first = {row["stack"]: np.array(row["losses"]) for row in rows if row["mesh"] == "one device"}
    lines = [
        f"gpt, 4 layers, 128 wide, {BATCH} rows of 64 tokens, fp32, {STEPS} steps of AdamW on 8 simulated CPU devices. "
        "`apart`: the largest relative distance of a loss from one device's. `held`: parameters, moments and counters "
        "on a device. `stack`: the blocks in one stack, which starts from other numbers. `sent`: what the collectives "
        "of a step give to a device, read from the compiled program; not run on a GPU.\n",
        "| mesh | loss of the last step | apart | held, MiB | sent, MiB a step |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        one = first[row["stack"]]
        apart = float(np.max(np.abs(np.array(row["losses"]) - one) / one))
        parts = ", ".join(f"{name} {size / 2**20:.2f}" for name, size in sorted(row["sent"].items())) or "nothing"
        held = f"{row['held'] / 2**20:.2f}"
        name = row["mesh"] + (", stack" if row["stack"] else "")
        lines.append(f"| {name} | {row['losses'][-1]:.6f} | {apart:.0e} | {held} | {parts} |")
    record(
        "scaling", "Meshes", lines, {"rows": rows}, ["core/step.py", "parallel", "models/gpt.py", "models/layers.py"]
    )


if __name__ == "__main__":
    main()
