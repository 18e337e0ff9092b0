"""What `jaxtrain plan` says of a step's memory, against what the process grows by; its least time, against the step's.

    python benchmarks/plan_accuracy.py

Each case is a process of its own: it compiles the step, resets the kernel's high-water mark, and takes a few steps; the
growth of the mark is compared with what was predicted: state, batch, temporary memory. On Linux only.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from record import record

CASES: dict[str, tuple[dict[str, Any], tuple[int, ...], tuple[int, ...]]] = {
    "mlp": ({"model.kind": "mlp", "model.hidden": [2048, 2048, 2048]}, (256,), (8192, 16384, 32768)),
    "resnet-18": ({"model.kind": "resnet", "model.depth": 18, "model.width": 64}, (32, 32, 3), (384, 512, 768)),
    "tcn": ({"model.kind": "tcn", "model.channels": [64] * 4}, (512, 8), (128, 256, 512)),
    "gpt": ({"model.kind": "gpt", "model.layers": 4, "model.width": 256, "data.kind": "pystdlib"}, (), (16, 32, 64)),
}
"""Keys of the config, shape of an input (none: tokens), rows of a step."""
STEPS = 4
LINE = (
    "| {network} | {rows:,} | {step:,.0f} | {predicted:,.0f} | {grown:,.0f} | {error:+.1f} % | {least:.2f} | {ms:.2f} |"
)


def child(network: str, rows: int) -> dict[str, float]:
    """One case, in this process."""
    import jax

    from jaxtrain.build import build
    from jaxtrain.config import load
    from jaxtrain.data.sources import ArraySource
    from jaxtrain.parallel import rules
    from jaxtrain.plan import memory, roofline

    keys, shape, _ = CASES[network]
    more = {"train.duration": 9, "train.global_batch_size": rows, "data.feed": "direct", "optimizer.kind": "adamw"}
    if keys.get("data.kind") == "pystdlib":
        more |= {"data.block_size": 256}
    source = None
    if shape:
        rng = np.random.default_rng(0)
        inputs = rng.normal(size=(rows, *shape)).astype(np.float32)
        split = np.repeat(np.arange(3), [rows - 2, 1, 1]).astype(np.int8)
        source = ArraySource("made", inputs, rng.integers(0, 10, rows), split=split)
    job = build(load({}, {**keys, **more}.items()), source=source)
    own = memory.compiled_step(job)
    predicted = own.state + sum(map(rules.bytes_per_device, jax.tree.leaves(job.expected[1]))) + own.step
    roof = roofline.of_job(job)
    feeder = job.feeder()
    jax.block_until_ready(job.init())  # compiled here, so that it is not counted below
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what compiling has left free would be used first, and hide a growth
    before = _high_water_mark()
    state, seconds = job.init(), []
    for position in range(STEPS):
        fed = feeder(position)
        since = time.perf_counter()
        state, _ = job.advance(state, fed)
        jax.block_until_ready(state["step"])
        seconds.append(time.perf_counter() - since)
    grown = _peak() - before
    least = roofline.least_seconds(job, roof) if roof else float("nan")
    return {
        "step": own.step,
        "predicted": predicted,
        "grown": grown,
        "least": least,
        "seconds": statistics.median(seconds[1:]),
    }


def _high_water_mark() -> int:
    """Reset the mark to what is in memory now, and return that, in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _peak() -> int:
    return _status("VmHWM")


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(f"{name}:")).split()[1])


def main() -> None:
    """All cases, then the record."""
    found: dict[str, dict[str, Any]] = {}
    lines = []
    for network, (_, _, sizes) in CASES.items():
        for rows in sizes:
            run = subprocess.run(
                [sys.executable, __file__, network, str(rows)], capture_output=True, text=True, env=dict(os.environ)
            )
            if run.returncode:
                sys.exit(run.stderr[-3000:])
            own = found[f"{network} {rows}"] = json.loads(run.stdout.splitlines()[-1])
            mib = {name: own[name] / 2**20 for name in ("step", "predicted", "grown")}
            error = 100 * (own["predicted"] / own["grown"] - 1)
            times = {"least": 1e3 * own["least"], "ms": 1e3 * own["seconds"]}
            lines.append(LINE.format(network=network, rows=rows, **mib, error=error, **times))
            print(lines[-1], flush=True)
    errors = [abs(own["predicted"] / own["grown"] - 1) for own in found.values()]
    ratios = [own["seconds"] / own["least"] for own in found.values()]
    head = [
        f"{len(errors)} cases, each a fresh process: state, batch, temporary memory as `jaxtrain plan` says, against "
        f"the growth of the process over {STEPS} steps. Largest error {100 * max(errors):.1f} %. A step takes "
        f"{min(ratios):.1f} to {max(ratios):.1f} times the least time that the plan gives.",
        "",
        "| network | rows | temporary, MiB | predicted, MiB | measured, MiB | error | least, ms | a step, ms |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    record(
        "plan_accuracy",
        "A plan against the run",
        head + lines,
        found,
        ["plan/memory.py", "plan/roofline.py", "core/step.py"],
    )


if __name__ == "__main__":
    if len(sys.argv) == 3:
        print(json.dumps(child(sys.argv[1], int(sys.argv[2]))))
    else:
        main()
