"""Which devices jax uses, which precision they want, and which GPU is there but unused."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import psutil

from jaxtrain.config.errors import ConfigError
from jaxtrain.core.precision import PRECISIONS, Precision
from jaxtrain.hardware import compile_cache
from jaxtrain.hardware.allocator import keep_buffers

log = logging.getLogger("jaxtrain")
GIB = 1024**3


@dataclass(frozen=True)
class Devices:
    """The devices of one run. memory: bytes that jax may use on one of them (of the machine, on CPU)."""

    devices: tuple[Any, ...]
    platform: str
    kind: str
    memory: int

    def __str__(self) -> str:
        return f"{len(self.devices)} x {self.kind} ({self.platform}, {self.memory / GIB:.0f} GiB)"


def available() -> Devices:
    """All devices of jax's default backend. Starts the backend and the compile cache, sets the allocator on CPU.

    Raises ConfigError when the backend does not start.
    """
    compile_cache.use()
    try:
        devices = tuple(jax.devices())
    except Exception as error:  # jax raises RuntimeError, and AssertionError for a platform without a plugin
        asked = os.environ.get("JAX_PLATFORMS")
        why = " ".join(str(error).split()) or type(error).__name__
        hint = f"JAX_PLATFORMS={asked} asks for it: unset it, " if asked else ""
        raise ConfigError(
            f"jax cannot start its backend: {why}; {hint}or install jaxtrain[cuda12] for a GPU"
        ) from error
    first = devices[0]
    if first.platform == "cpu":
        keep_buffers()
    memory = (first.memory_stats() or {}).get("bytes_limit") if first.platform != "cpu" else None
    return Devices(devices, first.platform, first.device_kind, memory or psutil.virtual_memory().total)


def resolve_precision(name: str, devices: Devices) -> Precision:
    """`auto`: `precision_of` a GPU's compute capability, bf16 on TPU, fp32 elsewhere (FACTS: CPU)."""
    if name == "auto":
        name = "fp32"
        if devices.platform == "tpu":
            name = "bf16"
        elif devices.platform in ("gpu", "cuda"):
            try:
                capability = float(getattr(devices.devices[0], "compute_capability", 0) or 0)
            except ValueError:  # ROCm says "gfx90a"
                capability = 0.0
            name = precision_of(capability)
    return PRECISIONS[name]


def precision_of(capability: float) -> str:
    """What a GPU of this compute capability is fast in: bf16 from 8.0 on, fp16 on 7.x, else fp32."""
    return "bf16" if capability >= 8.0 else "fp16" if capability >= 7.0 else "fp32"


def gpus() -> int:
    """NVIDIA GPUs that NVML sees; 0 without NVML. Starts no backend."""
    return _ask_nvml(lambda nvml: int(nvml.nvmlDeviceGetCount())) or 0


def unused_gpu(devices: Devices) -> str | None:
    """The name of an NVIDIA GPU that NVML sees while jax computes on the CPU; None otherwise, and without NVML."""
    if devices.platform != "cpu":
        return None
    name = _ask_nvml(lambda nvml: nvml.nvmlDeviceGetName(nvml.nvmlDeviceGetHandleByIndex(0)))
    return name.decode() if isinstance(name, bytes) else name


def _ask_nvml(question: Callable[[Any], Any]) -> Any:
    """question(pynvml), with NVML started; None without NVML, and where it answers with an error."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception as error:  # no library, no driver, a mismatch: each is simply "no GPU to be seen"
        log.debug("NVML is not available: %s", error)
        return None
    try:
        return question(pynvml)
    except pynvml.NVMLError as error:
        log.debug("NVML sees no GPU: %s", error)
        return None
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()
