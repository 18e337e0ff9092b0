"""What each setting for XLA:CPU is worth: a step with it and without it, interleaved; and that both give one update.

    python benchmarks/cpu.py

Each pair is the product as it is and the product with one switch or one function of it put back to what one writes
first. The allocator is a property of a process, so its two arms are processes. A quiet machine is needed.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
from flax import nnx
from record import record

from jaxtrain.build import Job, build
from jaxtrain.config import load
from jaxtrain.core import guard
from jaxtrain.models import gpt
from jaxtrain.models.layers import Dense, LayerNorm

ROUNDS, STEPS, PROCESSES = 15, 8, 5
NANOGPT = {
    "model.positions": "learned",
    "model.norm": "layer",
    "model.activation": "gelu",
    "data.path": os.__file__,
    "data.tokenizer": "byte",
}
NANOGPT["log.every"] = 10**6
RESNET = {"name": "cifar-form", "model.kind": "resnet", "model.depth": 8, "train.global_batch_size": 64}


@dataclass(frozen=True)
class Setting:
    """One thing that can be off: by keys of the config, or by what stands in for a function of the product."""

    name: str
    network: str
    keys: dict[str, Any]
    without: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext


def _heads_last(q: Any, k: Any, v: Any, places: Any = None) -> Any:
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def _where(finite: Any, update: Any, old: Any, *, branch: bool) -> Any:
    return guard.keep(finite, update(old), old)


SETTINGS = [
    Setting("two lanes", "gpt", {"train.lanes": 1}),
    Setting("update by a branch", "gpt", {}, lambda: mock.patch.object(guard, "apply", _where)),
    Setting("heads first", "gpt", {}, lambda: mock.patch.object(gpt, "attend", _heads_last)),
    Setting("2-D products", "gpt", {}, lambda: mock.patch.object(Dense, "__call__", nnx.Linear.__call__)),
    Setting("norm's own gradient", "gpt", {}, lambda: mock.patch.object(LayerNorm, "__call__", nnx.LayerNorm.__call__)),
    Setting(
        "convolution option", "resnet-8", {}, lambda: mock.patch("jaxtrain.build.compiler_options", return_value={})
    ),
]


@contextlib.contextmanager
def pictures() -> Iterator[str]:
    """A file of random 32x32 pictures in 10 classes."""
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "pictures.npz"
        shape = (512, 32, 32, 3)
        np.savez(path, inputs=rng.normal(size=shape).astype(np.float32), targets=rng.integers(0, 10, 512))
        yield str(path)


def job(network: str, path: str, **keys: Any) -> Job:
    """nanoGPT's CPU network, or the smallest resnet of the CIFAR form."""
    if network == "gpt":
        return build(load("shakespeare", list((NANOGPT | keys).items())))
    own: dict[str, Any] = {"data.kind": "arrays", "data.path": path, "train.duration": 1000, **RESNET, **keys}
    tree: dict[str, Any] = {}
    for key, value in own.items():
        section, _, name = key.rpartition(".")
        (tree.setdefault(section, {}) if section else tree)[name] = value
    return build(load(tree))


class Arm:
    """A job that is stepped through; `update` is what its first step did to the parameters."""

    def __init__(self, job: Job) -> None:
        self._advance, self._rows, self._state = job.advance, job.feeder()(0), job.init()
        before = jax.tree.map(np.array, self._state["params"])
        self.steps(1)
        after = jax.tree.map(np.array, self._state["params"])
        self.update = {name: after[name] - before[name] for name in after}

    def steps(self, count: int) -> float:
        """Seconds a step."""
        begun = time.perf_counter()
        for _ in range(count):
            self._state, metrics = self._advance(self._state, self._rows)
        jax.block_until_ready((self._state, metrics))
        return (time.perf_counter() - begun) / count


def apart(left: dict[str, Any], right: dict[str, Any]) -> float:
    """The largest distance of two updates, over their largest element."""
    largest = max(float(np.abs(x).max()) for x in right.values())
    return max(float(np.abs(left[name] - right[name]).max()) for name in right) / largest


def compare(setting: Setting, path: str) -> dict[str, Any]:
    """Times with and without, and how far the two first updates are apart."""
    # Plain descent: Adam makes a full step of a gradient that is nothing but rounding.
    plain = {"optimizer.kind": "sgd", "schedule.warmup": 0}
    apart_ = apart(Arm(job(setting.network, path, **plain)).update, _without(setting, path, **plain).update)
    arms = {"on": Arm(job(setting.network, path)), "off": _without(setting, path)}
    times: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(ROUNDS):
        for name, arm in arms.items():
            times[name].append(arm.steps(STEPS))
    return times | {"apart": apart_}


def _without(setting: Setting, path: str, **keys: Any) -> Arm:
    with setting.without():
        return Arm(job(setting.network, path, **keys, **setting.keys))


def allocator() -> dict[str, Any]:
    """Processes with the product's allocator settings, and with glibc's own (any MALLOC_ variable leaves them)."""
    times: dict[str, list[float]] = {"on": [], "off": []}
    for _ in range(PROCESSES):
        for name, extra in (("on", {}), ("off", {"MALLOC_PERTURB_": "0"})):
            command = [sys.executable, __file__, "--process"]
            out = subprocess.run(command, env=os.environ | extra, capture_output=True, text=True, check=True).stdout
            times[name].append(json.loads(out.splitlines()[-1]))
            print("allocator", name, times[name][-1], flush=True)
    return times


def main() -> None:
    if "--process" in sys.argv:
        arm = Arm(job("gpt", ""))
        arm.steps(30)
        print(json.dumps(arm.steps(100)))
        return
    raw: dict[str, Any] = {"allocator": allocator()}
    with pictures() as path:
        for setting in SETTINGS:
            raw[setting.name] = compare(setting, path)
            print(setting.name, {k: v if k == "apart" else statistics.median(v) for k, v in raw[setting.name].items()})
    networks = {"allocator": "gpt"} | {setting.name: setting.network for setting in SETTINGS}
    rows = []
    for name, own in raw.items():
        ratios = [off / on for on, off in zip(own["on"], own["off"], strict=True)]
        on, off = (1e3 * statistics.median(own[arm]) for arm in ("on", "off"))
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        far = f"{own['apart']:.0e}" if "apart" in own else "not compared"
        rows.append(f"| {name} | {networks[name]} | {on:.1f} | {off:.1f} | {spread} | {len(ratios)} | {far} |")
    lines = [
        "One setting at a time is off, all others on. gpt: 4 layers, 128 wide, 12 rows of 64 tokens; resnet-8: 64 "
        "pictures of 32x32. `apart`: the largest distance of the two first updates over their largest element.\n",
        "| setting | network | ms a step | without | without / with, median of rounds | n | apart |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        *rows,
    ]
    rooms = ["core/step.py", "core/guard.py", "models/gpt.py", "models/layers.py", "models/__init__.py"]
    rooms += ["hardware/allocator.py", "hardware/compiler.py"]
    record("cpu", "Settings for XLA:CPU", lines, raw, rooms)


if __name__ == "__main__":
    main()
