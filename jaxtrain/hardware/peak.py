"""Operations a second that devices reach at most: what model FLOPs utilisation is a share of.

GPUs: dense bf16 (or fp16) products with fp32 sums by the catalogue of cards, whatever precision a run has.
CPU: the largest of a few products of fp32 matrices, measured, and kept for a day in the user's cache folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import time

import jax
import jax.numpy as jnp

from jaxtrain.hardware import catalogue, compile_cache
from jaxtrain.hardware.devices import Devices

SIZE, TIMES, DAY, FILE = 1024, 6, 86_400.0, "peak.json"


def peak(devices: Devices, used: int) -> float | None:
    """Operations a second (2 for a multiply-add) of `used` of these devices together; None: not known.

    CPU "devices" share one machine, which counts once. Several processes on CPUs may share one too: not known.
    """
    if devices.platform == "cpu":
        return None if jax.process_count() > 1 else _cpu()
    each = card(devices.kind)
    return each * used if each else None


def card(name: str) -> float | None:
    """Of one GPU by the name that its driver gives. None: not in the catalogue, or forms of this name differ in it."""
    rates = {catalogue.tensor_rate(form) for form in catalogue.forms(name)}
    return rates.pop() if len(rates) == 1 else None


def _cpu() -> float:
    folder = compile_cache.use()
    here = f"{platform.node()} {platform.machine()} {os.cpu_count()} jax {jax.__version__}"
    if folder is not None:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            kept = json.loads((folder / FILE).read_text())
            if kept["on"] == here and 0 <= time.time() - kept["time"] < DAY:
                return float(kept["peak"])
    found = measure()
    if folder is not None:
        with contextlib.suppress(OSError):
            (folder / FILE).write_text(json.dumps({"on": here, "time": time.time(), "peak": found}))
    return found


def measure() -> float:
    """The fastest of a few products on the first device: about 0.1 s on two cores."""
    product = jax.jit(lambda x: x @ x)
    x = jax.block_until_ready(product(jnp.ones((SIZE, SIZE), jnp.float32) / SIZE))
    seconds = []
    for _ in range(TIMES):
        since = time.perf_counter()
        x = jax.block_until_ready(product(x))
        seconds.append(time.perf_counter() - since)
    return 2 * SIZE**3 / min(seconds)
