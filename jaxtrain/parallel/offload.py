"""`optimizer.offload: host`: moments live in the host's pinned memory; a step fetches them and puts the new ones back.

In: the shardings of the state, the step. Out: the same with another kind of memory, the same with two transfers in it.
All else of the run finds the kind of memory in the shardings.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from jaxtrain.config import schema
from jaxtrain.config.errors import ConfigError
from jaxtrain.hardware.devices import Devices

HOST = "pinned_host"
"""jax's name of the host's memory that a device can read by itself."""


def placed(optimizer: schema.Optimizer, devices: Devices, state: Any, shardings: Any) -> Any:
    """The shardings of an abstract state, with `opt_state` where `optimizer.offload` says; its counters stay.

    Raises ConfigError where there is no such memory, or nothing to put there.
    """
    if optimizer.offload == "none":
        return shardings
    if devices.platform == "cpu":
        raise ConfigError(
            "optimizer.offload: host: this run computes on the CPU, so its moments are in the host's memory already; "
            "allowed: none, or host on a GPU"
        )
    kinds = [memory.kind for memory in devices.devices[0].addressable_memories()]
    if HOST not in kinds:
        raise ConfigError(
            f"optimizer.offload: host needs memory of kind {HOST}, and {devices.kind} has {', '.join(kinds)}; "
            "allowed: none"
        )
    if not any(x.ndim for x in jax.tree.leaves(state["opt_state"])):
        raise ConfigError(f"optimizer.offload: host: optimizer.kind={optimizer.kind} keeps no moments; allowed: none")

    def on_host(array: Any, sharding: Any) -> Any:
        return sharding.with_memory_kind(HOST) if array.ndim else sharding

    return {**shardings, "opt_state": jax.tree.map(on_host, state["opt_state"], shardings["opt_state"])}


def around(step: Callable[[Any, Any], Any], shardings: Any) -> Callable[[Any, Any], Any]:
    """`step(state, batch)` with the moments fetched into the device's memory before and put back after it."""
    resting = shardings["opt_state"]
    if all(sharding.memory_kind != HOST for sharding in jax.tree.leaves(resting)):
        return step
    kind = shardings["step"].memory_kind
    working = jax.tree.map(lambda sharding: sharding.with_memory_kind(kind), resting)

    def moved(state: Any, batch: Any) -> Any:
        state, metrics = step({**state, "opt_state": jax.device_put(state["opt_state"], working)}, batch)
        return {**state, "opt_state": jax.device_put(state["opt_state"], resting)}, metrics

    return moved
