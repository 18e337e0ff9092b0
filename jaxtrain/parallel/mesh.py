"""The mesh of devices. So far one axis: `data`. The state is replicated, a batch is split along its rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxtrain.config.errors import ConfigError


def make_mesh(data: int, devices: Sequence[Any]) -> Mesh:
    """`data` devices (-1: all). Raises ConfigError when there are not as many."""
    count = len(devices) if data == -1 else data
    if count > len(devices):
        raise ConfigError(
            f"mesh.data: {count} devices asked for, {len(devices)} are there; allowed: -1 or 1..{len(devices)}"
        )
    return jax.make_mesh((count,), ("data",), axis_types=(AxisType.Auto,), devices=list(devices)[:count])


def replicated(mesh: Mesh) -> NamedSharding:
    """The same array on every device."""
    return NamedSharding(mesh, PartitionSpec())


def over_rows(mesh: Mesh) -> NamedSharding:
    """Rows (the first axis) split over the devices."""
    return NamedSharding(mesh, PartitionSpec("data"))


def batch_shardings(mesh: Mesh, batch: dict[str, Any]) -> dict[str, NamedSharding]:
    """Arrays with rows are split, scalars are everywhere."""
    return {name: over_rows(mesh) if getattr(x, "ndim", 0) else replicated(mesh) for name, x in batch.items()}
