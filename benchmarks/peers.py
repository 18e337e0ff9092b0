"""Seconds a step of five networks: jaxtrain, a jit loop by hand, Keras 3, PyTorch, Lightning, HF Trainer.

    python benchmarks/peers.py --keras-python PYTHON --torch-python PYTHON [--only tiny_mlp,gpt] [--rounds 5]

The peers live in environments of their own, as their packages do not fit together:

    python3.11 -m venv keras && keras/bin/pip install keras jax==0.10.2
    python3.11 -m venv torch && torch/bin/pip install torch --index-url https://download.pytorch.org/whl/cpu
    torch/bin/pip install lightning transformers accelerate

A peer without an environment is left out, and the record says so. Every arm is one file in `peers/`, run in a process
of its own for every workload and round, the order of the arms rotating. `peers/work.py` holds what all of them train:
the same network from the same weights on the same float32 rows in the same order, with AdamW (constant rate 1e-3, no
decay, no clipping). So the loss of the first step is the same in every arm, and the mean loss of the last epoch up to
what rounding does to a run; both are checked. What is timed are whole epochs after the first, feeding included,
compilation not. With --only nothing is recorded. A quiet machine is needed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from record import record

HERE = Path(__file__).resolve().parent / "peers"
sys.path.insert(0, str(HERE))  # this file is called `peers` too
from work import WORKLOADS  # noqa: E402


@dataclass(frozen=True)
class Arm:
    """file: in `peers/`. home: whose Python runs it. only: the workloads it is for, if not all."""

    file: str
    home: str
    options: tuple[str, ...] = ()
    only: tuple[str, ...] = tuple(WORKLOADS)


ARMS = {
    "jaxtrain": Arm("jaxtrain_train.py", "own"),
    "jaxtrain, 1 step a dispatch": Arm("jaxtrain_train.py", "own", ("--steps-per-dispatch", "1"), ("tiny_mlp",)),
    "jit loop by hand": Arm("jit_loop.py", "own"),
    "Keras fit": Arm("keras_fit.py", "keras"),
    "Keras fit, steps_per_execution": Arm("keras_fit.py", "keras", ("--steps-per-execution",)),
    "PyTorch by hand": Arm("torch_loop.py", "torch"),
    "Lightning": Arm("lightning_fit.py", "torch"),
    "HF Trainer": Arm("hf_trainer.py", "torch"),
}
PACKAGES = {"keras": ("keras", "jax"), "torch": ("torch", "lightning", "transformers")}
TITLES = {
    "tiny_mlp": "mlp 64-64-10, batch 32",
    "mlp": "mlp 784-512-512-10, batch 128",
    "gpt": "gpt, 4 layers, 4 heads, 128 wide, 12 rows of 64 tokens",
    "resnet18": "resnet-18, 64 wide, batch 32 of 32x32x3",
    "tcn": "tcn, 4 blocks of 64 channels, batch 32 of 128x8",
}
FIRST = 1e-3
"""How far from jaxtrain's the loss of the first step may be, as a share of it."""
LAST = {"tiny_mlp": 0.005, "mlp": 0.05, "gpt": 0.005, "resnet18": 0.5, "tcn": 0.02}
"""The same for the mean loss of the last epoch. Adam's first updates are the signs of gradients; in a deep network with
BatchNorm many of these are almost zero, and rounding decides. The larger mlp ends with a loss of 0.06."""
ROOMS = ["core", "loop.py", "dispatch.py", "session.py", "models", "hardware/allocator.py", "hardware/compiler.py"]
ROOMS += ["data/feed.py", "data/order.py", "hooks/writers.py", "hooks/control.py", "hooks/console.py"]

Runs = dict[str, dict[str, list[dict[str, float]]]]
"""{workload: {arm: [{step, first, loss} of each round]}}."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--keras-python")
    parser.add_argument("--torch-python")
    parser.add_argument("--only", help=f"some of {','.join(WORKLOADS)}")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    names = options.only.split(",") if options.only else list(WORKLOADS)
    versions = {home: versions_of(getattr(options, f"{home}_python"), home) for home in PACKAGES}
    pythons = {"own": sys.executable}
    for home, found in versions.items():
        if found:
            pythons[home] = getattr(options, f"{home}_python")
        else:
            print(f"{home}: left out, as no --{home}-python has {' and '.join(PACKAGES[home])}", flush=True)
    runs: Runs = {name: {} for name in names}
    with tempfile.TemporaryDirectory() as place:
        run([sys.executable, str(HERE / "jaxtrain_train.py"), "--prepare", place], place)
        for number in range(options.rounds):
            for name in names:
                arms = [arm for arm, own in ARMS.items() if name in own.only and own.home in pythons]
                for arm in arms[number % len(arms) :] + arms[: number % len(arms)]:
                    own = ARMS[arm]
                    line = run([pythons[own.home], str(HERE / own.file), name, place, *own.options], place)
                    runs[name].setdefault(arm, []).append(json.loads(line))
                    print(number, name, arm, line, flush=True)
    lines = report(runs, versions)
    print("\n".join(lines))
    check(runs)
    if not options.only:
        record(
            "peers", "A step of five networks: jaxtrain and its peers", lines, {"runs": runs, "peers": versions}, ROOMS
        )


def versions_of(python: str | None, home: str) -> str:
    """The packages of a peer's environment; empty where one is missing."""
    if not python or not shutil.which(python):
        return ""
    script = "import sys\nfrom importlib.metadata import version\nprint(*(f'{n} {version(n)}' for n in sys.argv[1:]))"
    done = subprocess.run([python, "-c", script, *PACKAGES[home]], capture_output=True, text=True)
    return done.stdout.strip()


def run(command: list[str], place: str) -> str:
    """The last line of a process. What jax compiles is kept for the next round: compiling is not timed."""
    cache = {"JAX_COMPILATION_CACHE_DIR": f"{place}/cache", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    done = subprocess.run(command, env={**os.environ, **cache}, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return done.stdout.splitlines()[-1]


def report(runs: Runs, versions: dict[str, str]) -> list[str]:
    """A table for each workload. Ratios are of one round's neighbours; medians over rounds."""
    count = len(next(iter(runs.values()))["jaxtrain"])
    there = ", ".join(found for found in versions.values() if found)
    missing = [name for name, found in versions.items() if not found]
    lines = [
        f"Whole epochs after the first, each arm in its own process, {count} rounds interleaved; the same weights, "
        "rows and order of rows, AdamW without decay and clipping. `jaxtrain` is `jt.train` with all it writes; "
        "`jit loop by hand` is flax and optax without a trainer and without jaxtrain's tricks; the others are bare "
        "(nothing logged or saved), PyTorch eager with fused AdamW on all cores. "
        "Of the tiny mlp `jaxtrain` runs 96 epochs, as steps_per_dispatch=auto measures only where 3 s of training "
        f"are to come; its loss is that of the same epoch. {there or 'No peer was run'}."
        + "".join(f" Not run, as its environment was missing: {name}." for name in missing),
    ]
    for name, arms in runs.items():
        scale, unit = (1e6, "µs") if name == "tiny_mlp" else (1e3, "ms")
        lines += [
            "",
            f"{TITLES[name]}: {WORKLOADS[name].timed * WORKLOADS[name].steps} steps a round.",
            "",
            f"| arm | {unit} a step, median | least to greatest | arm / jaxtrain, median of rounds | last loss |",
            "| --- | --- | --- | --- | --- |",
        ]
        for arm, own in arms.items():
            times = [scale * one["step"] for one in own]
            ratios = [a["step"] / b["step"] for a, b in zip(own, arms["jaxtrain"], strict=True)]
            lines.append(
                f"| {arm} | {statistics.median(times):.3g} | {min(times):.3g} to {max(times):.3g} | "
                f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) | "
                f"{statistics.fmean(one['loss'] for one in own):.4f} |"
            )
    tolerances = ", ".join(f"{name} {LAST[name]:.1%}" for name in runs)
    lines += ["", f"Last loss: mean over the last epoch. Checked to be jaxtrain's within: {tolerances}; that of the "]
    lines[-1] += f"first step within {FIRST:.1%}."
    return lines


def check(runs: Runs) -> None:
    """Every arm trained the same: by the loss of the first step and the mean loss of the last epoch."""
    wrong: list[Any] = []
    for name, arms in runs.items():
        for arm, own in arms.items():
            for key, tolerance in (("first", FIRST), ("loss", LAST[name])):
                wanted = arms["jaxtrain"][0][key]
                wrong += [(name, arm, key, one[key], wanted) for one in own if abs(one[key] / wanted - 1) > tolerance]
    if wrong:
        sys.exit("losses differ from jaxtrain's:\n" + "\n".join(map(str, wrong)))


if __name__ == "__main__":
    main()
