"""Several processes that train one model: how they find each other, and what they have to agree on.

`jaxtrain launch` names a coordinator in the environment. Slurm and Open MPI say there how many processes they started
and which one this is; where the first one runs jax reads from it too, where it can. All processes run the same program
and meet in every step, so whatever a clock or a signal decides in one must be decided in all.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxtrain.config.errors import PEER_FAILED, ConfigError, UserError
from jaxtrain.parallel.environment import COORDINATOR, LAUNCHERS, PROCESS, PROCESSES

HEARTBEAT = 60
"""Seconds after which a process that says nothing counts as lost; no less: a jump of the wall clock would end a job."""

_LOST = ("gloo", "nccl", "connection", "heartbeat", "coordination", "peer", "unavailable", "deadline", "barrier")
"""Words of jax's errors where another process is gone."""


class PeerFailed(UserError):
    """Another process of this run has failed or is lost."""

    exit_code = PEER_FAILED


@functools.cache
def start() -> None:
    """Join the other processes, where the environment speaks of any; before the first array is made."""
    address = os.environ.get(COORDINATOR)
    if address and PROCESSES in os.environ:
        return _join(address, int(os.environ[PROCESSES]), int(os.environ[PROCESS]))
    for launcher, names in LAUNCHERS.items():
        if int(os.environ.get(names[0], 1)) > 1:
            count, number, local = (int(os.environ[name]) for name in names)
            return _join(address, count, number, [local]) if address else _join_found(launcher, count)
    if address and not any(names[0] in os.environ for names in LAUNCHERS.values()):
        raise ConfigError(
            f"{COORDINATOR}: {address!r} is set, and nothing says how many processes there are: start them by "
            f"`jaxtrain launch`, srun or mpirun, or unset it"
        )
    return None


def _join(address: str, count: int, number: int, devices: list[int] | None = None) -> None:
    """Join at a given address. The first process listens there alone: it asks nobody who he is.

    devices: numbers of this process's own, where a launcher lets each see those of all.
    """
    _get_ready()
    jax.distributed.initialize(
        address,
        count,
        number,
        devices,
        coordinator_bind_address=address,
        heartbeat_timeout_seconds=HEARTBEAT,
        cluster_detection_method="deactivate",  # in a Slurm job, `jaxtrain launch` would be one of Slurm's processes
    )


def _join_found(launcher: str, count: int) -> None:
    """Join at the address that jax finds."""
    _get_ready()
    try:
        jax.distributed.initialize(heartbeat_timeout_seconds=HEARTBEAT)
    except ValueError:  # as with Open MPI 5, which no longer says where its first process is
        raise ConfigError(
            f"{launcher} has started {count} processes and does not say where the first of them runs; set "
            f"{COORDINATOR}=HOST:PORT, an address of that machine which all of them reach and a free port"
        ) from None


def _get_ready() -> None:
    # The runner saves at a signal by itself; jax's own service would swallow it.
    jax.config.update("jax_enable_preemption_service", False)
    _own_stdout()


def _own_stdout() -> None:
    """Results go to stdout, and what C++ says there (Gloo does) to stderr."""
    sys.stdout.flush()
    results = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = os.fdopen(results, "w")


def joined() -> bool:
    """Whether this process has met others; starts no backend."""
    return jax.distributed.is_initialized()


def several() -> bool:
    """Whether there is more than this process."""
    return jax.process_count() > 1


def peer_failed(error: BaseException) -> PeerFailed | None:
    """What an error of jax means where there are several processes and it speaks of the others."""
    text = str(error)
    if not isinstance(error, jax.errors.JaxRuntimeError) or not several():
        return None
    if not any(word in text.lower() for word in _LOST):
        return None
    return PeerFailed(f"another process has failed or is lost: {text.splitlines()[0][:200]}; restart them all")


def is_first() -> bool:
    """Whether this process writes: files, console."""
    return jax.process_index() == 0


def agree(value: Any) -> Any:
    """What the first process has, in all; JSON values. All processes must call it at the same place."""
    if not several():
        return value
    from jax.experimental import multihost_utils

    text = np.frombuffer(json.dumps(value if is_first() else None).encode(), np.uint8)
    with jax.transfer_guard("allow"):
        size = int(multihost_utils.broadcast_one_to_all(np.int32(len(text))))
        padded = np.zeros(size, np.uint8)
        padded[: min(len(text), size)] = text[:size]
        return json.loads(np.asarray(multihost_utils.broadcast_one_to_all(padded)).tobytes())


def largest(numbers: Sequence[int]) -> list[int]:
    """The largest of each of these numbers over all processes. All must call it at the same place."""
    if not several():
        return list(numbers)
    from jax.experimental import multihost_utils

    with jax.transfer_guard("allow"):
        return np.asarray(multihost_utils.process_allgather(np.array(numbers, np.int32))).max(0).tolist()


def whole(array: jax.Array) -> Any:
    """An array of which this process holds a part, as numpy, in every process; others as they are."""
    if not several():
        return array
    if array.is_fully_replicated:
        return np.asarray(array)
    from jax.experimental import multihost_utils

    with jax.transfer_guard("allow"):
        return multihost_utils.process_allgather(array, tiled=True)


def put(array: Any, sharding: Any, rows: int | None = None, first: int = 0) -> jax.Array:
    """An array on the devices of all processes, each of which has it in full.

    rows: the array has so many, and this process, of those from `first` on, at least what its own devices hold.
    """
    if not several():
        return jax.device_put(array, sharding)
    host = np.asarray(array)
    shape = host.shape if rows is None else (rows, *host.shape[1:])

    def own(index: tuple[slice, ...]) -> np.ndarray:
        begin, end, _ = index[0].indices(rows or 0)
        return host[(slice(begin - first, end - first), *index[1:])]

    parts = sharding.addressable_devices_indices_map(shape).items()
    arrays = [jax.device_put(host[index] if rows is None else own(index), device) for device, index in parts]
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays)


def own_rows(sharding: Any, rows: int) -> tuple[int, int]:
    """[first, last) of the rows that the devices of this process hold, and what lies between."""
    parts = [index[0].indices(rows) for index in sharding.addressable_devices_indices_map((rows,)).values()]
    return min(begin for begin, _, _ in parts), max(end for _, end, _ in parts)
