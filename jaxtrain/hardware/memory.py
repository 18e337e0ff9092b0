"""How much memory there is to train in: of an accelerator what jax may take, of a machine what is free now.

In: the devices. Out: bytes, with the words for where they come from; and how fast a CPU moves them.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import psutil

from jaxtrain.hardware.devices import Devices

COPIED, TIMES = 128 * 2**20, 5
CGROUP = Path("/sys/fs/cgroup")
_FILES = (
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)
"""Limit and use of a container, in version 2 of control groups and in version 1."""


@dataclass(frozen=True)
class Limit:
    """bytes: what one device offers, or (shared) all devices of a CPU together. what: in words, after "bytes are"."""

    bytes: int
    what: str
    shared: bool


def limit(devices: Devices) -> Limit:
    """Of an accelerator the share that jax takes (three quarters, unless XLA_PYTHON_CLIENT_MEM_FRACTION says more)."""
    if devices.platform != "cpu":
        return Limit(devices.memory, f"what jax may use on a {devices.kind}", shared=False)
    return Limit(free(), "free in this machine now", shared=True)


def free() -> int:
    """Bytes that this process can have without swapping: of the machine, and of its container where that has less."""
    return min([psutil.virtual_memory().available, *_left_in_container()])


def _left_in_container() -> list[int]:
    for most, used in _FILES:
        with contextlib.suppress(OSError, ValueError):  # "max" is no number: there is no limit
            return [max(int((CGROUP / most).read_text()) - int((CGROUP / used).read_text()) + _cache(most), 0)]
    return []


def _cache(most: str) -> int:
    """Bytes of files in the container's memory that the kernel gives up when it needs them."""
    with contextlib.suppress(OSError, ValueError):
        lines = (CGROUP / most).with_name("memory.stat").read_text().splitlines()
        return int(dict(line.split() for line in lines)["inactive_file"])
    return 0


def bandwidth() -> float:
    """Bytes a second that this CPU reads and writes: the best of a few copies of an array that no cache holds.

    STREAM's "scale": each element is read once and written once.
    """
    scale = jax.jit(lambda x: 3 * x)
    x = jax.block_until_ready(scale(jnp.ones(COPIED // 4, jnp.float32)))
    seconds = []
    for _ in range(TIMES):
        since = time.perf_counter()
        jax.block_until_ready(scale(x))
        seconds.append(time.perf_counter() - since)
    return 2 * COPIED / min(seconds)
