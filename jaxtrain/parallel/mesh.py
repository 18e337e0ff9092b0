"""The mesh of devices, and how a batch is laid over it.

Axes, the slowest links first:
pipe      the blocks are split, a stage on each device (Huang et al. 2019): parallel/pipe.py
data      rows are split, everything else is on each device
fsdp      rows are split too, and every large parameter with its moments: each device holds a part (Rajbhandari et al.
          2020, ZeRO-3), gathered where it is used
tensor    products are split by columns, then by rows (Shoeybi et al. 2019)
context   the tokens of a row are split; keys and values are gathered
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxtrain.config import schema
from jaxtrain.config.errors import ConfigError

AXES = ("pipe", "data", "fsdp", "tensor", "context")
ROWS = ("data", "fsdp")
"""The axes that split the rows of a batch."""


def make_mesh(config: schema.Mesh, devices: Sequence[Any]) -> Mesh:
    """A mesh of these devices, `data: -1` as many as the other axes leave. Raises ConfigError with the numbers."""
    there, others = len(devices), math.prod(getattr(config, axis) for axis in AXES if axis != "data")
    if others == 1:
        count = there if config.data == -1 else config.data
        if count > there:
            raise ConfigError(f"mesh.data: {count} devices asked for, {there} are there; allowed: -1 or 1..{there}")
    elif config.data == -1 and there % others:
        fits = ", ".join(str(n) for n in range(1, there + 1) if there % n == 0)
        raise ConfigError(
            f"mesh: {words(config)}: {others} does not divide the {there} device{'s'[: there - 1]} there are; "
            f"allowed: {fits}, or a number for mesh.data"
        )
    sizes = {axis: getattr(config, axis) for axis in AXES}
    if config.data == -1:
        sizes["data"] = there // others
    total = math.prod(sizes.values())
    if total > there:
        raise ConfigError(f"mesh: {words(config)} = {total} devices asked for, {there} are there; allowed: 1..{there}")
    types = (AxisType.Auto,) * len(AXES)
    return jax.make_mesh(tuple(sizes.values()), AXES, axis_types=types, devices=list(devices)[:total])


def words(mesh: schema.Mesh | Mesh) -> str:
    """The axes that split something: "data 2 x fsdp 4"."""
    sizes = dict(mesh.shape) if isinstance(mesh, Mesh) else {axis: getattr(mesh, axis) for axis in AXES}
    return " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size not in (1, -1)) or "one device"


def row_parts(mesh: Mesh) -> int:
    """In how many parts the rows of a batch are split."""
    return math.prod(mesh.shape[axis] for axis in ROWS)


def replicated(mesh: Mesh) -> NamedSharding:
    """The same array on every device."""
    return NamedSharding(mesh, PartitionSpec())


def everywhere(mesh: Mesh, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` inside jit, computed in full by every device for itself.

    Left to the compiler, the loop that orders rows would be split, and wait for the others in each turn; on XLA:CPU
    such a wait and one outside the loop can wait for each other for ever.
    """
    if mesh.size == 1:
        return function
    whole = PartitionSpec()
    return jax.shard_map(function, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)


def rows_sharding(mesh: Mesh) -> NamedSharding:
    """Of an array with one value a row of a batch."""
    return NamedSharding(mesh, PartitionSpec(ROWS))


def batch_shardings(mesh: Mesh, batch: dict[str, Any]) -> dict[str, NamedSharding]:
    """Rows (the first axis) are split, with `context` the tokens (the second axis) too; scalars are everywhere."""

    def spec(x: Any) -> PartitionSpec:
        axes = (ROWS, "context") if mesh.shape["context"] > 1 else (ROWS,)
        return PartitionSpec(*axes[: getattr(x, "ndim", 0)])

    return {name: NamedSharding(mesh, spec(x)) for name, x in batch.items()}
