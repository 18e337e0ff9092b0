"""Which part of which array lives on which device: rules of (regex, spec) for tensor parallelism, one for the rest.

A spec names, for each axis of an array, the mesh axis that splits it. What follows a parameter in the state (moments,
averages) is found by its name and shape and split like it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxtrain.config import schema
from jaxtrain.config.errors import ConfigError
from jaxtrain.core.optimizer import is_stacked
from jaxtrain.models import MODELS
from jaxtrain.parallel.offload import HOST

Spec = tuple[str | None, ...]
Params = Mapping[str, Any]

TENSOR: dict[str, tuple[tuple[str, Spec], ...]] = {
    "gpt": (
        (r".*\.(qkv|gate|up)\.kernel", (None, "tensor")),
        (r".*\.(qkv|gate|up)\.bias", ("tensor",)),
        (r".*\.(out|down)\.kernel", ("tensor", None)),
        # By vocabulary, where it divides. By width it would split what every block adds to, and be gathered in each.
        (r"token_embed\.embedding", ("tensor", None)),
        (r"head\.kernel", (None, "tensor")),
    ),
    "mlp": (
        (r"layers\.\d*[02468]\.kernel", (None, "tensor")),
        (r"layers\.\d*[02468]\.bias", ("tensor",)),
        (r"layers\.\d*[13579]\.kernel", ("tensor", None)),
    ),
}
"""Per kind of model: a pattern for whole names, and the spec of the arrays that it divides."""

SIZES: dict[str, Callable[[Any, Params], dict[str, int]]] = {
    "gpt": lambda c, params: {
        "model.heads": c.heads,
        "model.kv_heads": c.kv_heads or c.heads,
        "model.mlp_width": next(x.shape[-2] for name, x in params.items() if name.endswith("hidden.down.kernel")),
    },
    "mlp": lambda c, params: {"model.hidden": math.gcd(*c.hidden)},
}
"""What `mesh.tensor` must divide: whole heads and equal parts of the hidden features."""

SMALL = 1024
"""An array of fewer elements stays whole under fsdp: its parts would cost more to gather than they save."""
LARGE = 1 << 20
"""Bytes from which an array that stayed whole is worth a word."""


def check(config: schema.RunConfig, params: Params, shape: tuple[int, ...]) -> None:
    """Raise ConfigError for a mesh that this model cannot use. shape: of a row of inputs."""
    kind, mesh = config.model.kind, config.mesh
    if mesh.tensor > 1:
        if kind not in TENSOR:
            raise ConfigError(
                f"mesh.tensor: {mesh.tensor} needs rules, which model.kind={kind} has not; "
                f"allowed: 1, or model.kind {' or '.join(TENSOR)}"
            )
        _divides("tensor", mesh.tensor, SIZES[kind](config.model, params))
    if mesh.context > 1:
        if MODELS.get(kind) is None or MODELS[kind].takes != "tokens":
            fits = " or ".join(name for name, model in MODELS.items() if model.takes == "tokens")
            raise ConfigError(
                f"mesh.context: {mesh.context} splits tokens, which model.kind={kind} does not take; "
                f"allowed: 1, or model.kind {fits}"
            )
        _divides("context", mesh.context, {"data.block_size": shape[0]})
    if mesh.pipe > 1:
        if not any(map(is_stacked, params)):
            raise ConfigError(
                f"mesh.pipe: {mesh.pipe} splits a stack of blocks, which this model has not; "
                "allowed: 1, or model.kind gpt with model.scan_layers=true"
            )
        _divides("pipe", mesh.pipe, {"model.layers": next(x.shape[0] for n, x in params.items() if is_stacked(n))})


def _divides(axis: str, parts: int, sizes: dict[str, int]) -> None:
    wrong = [f"{name}={size}" for name, size in sizes.items() if size % parts]
    if wrong:
        common = math.gcd(*sizes.values())
        fits = ", ".join(str(n) for n in range(1, common + 1) if common % n == 0)
        raise ConfigError(f"mesh.{axis}: {parts} does not divide {' and '.join(wrong)}; allowed: {fits}")


def parameter_specs(kind: str, params: Params, mesh: Mesh) -> dict[str, PartitionSpec]:
    """The spec of every parameter: the rule of its kind, then fsdp on the largest axis that is left and divides."""
    rules = TENSOR.get(kind, ()) if mesh.shape["tensor"] > 1 else ()
    specs = {}
    for name, array in params.items():
        stack: list[str | None] = ["pipe" if mesh.shape["pipe"] > 1 else None] if is_stacked(name) else []
        shape = array.shape[len(stack) :]
        spec: list[str | None] = [None] * len(shape)
        for pattern, own in rules:
            if re.fullmatch(pattern, name) and _fits(own, shape, mesh):
                spec = list(own)
        parts = mesh.shape["fsdp"]
        if parts > 1 and math.prod(shape) >= SMALL:
            free = [i for i, size in enumerate(shape) if spec[i] is None and size % parts == 0]
            if free:
                spec[max(free, key=lambda i: shape[i])] = "fsdp"
        spec = stack + spec
        while spec and spec[-1] is None:
            spec.pop()
        specs[name] = PartitionSpec(*spec)
    return specs


def _fits(spec: Spec, shape: tuple[int, ...], mesh: Mesh) -> bool:
    return all(axis is None or size % mesh.shape[axis] == 0 for axis, size in zip(spec, shape, strict=True))


def state_shardings(state: Any, params: Params, specs: Mapping[str, PartitionSpec], mesh: Mesh) -> Any:
    """A sharding for every leaf: that of the parameter whose name it has, on the axes that it divides there.

    A leaf without such a name, or with another number of axes, is whole everywhere.
    """

    def sharding(path: Any, leaf: Any) -> NamedSharding:
        for key in reversed(path):
            name = str(getattr(key, "key", ""))
            if name in params and len(params[name].shape) == len(leaf.shape):
                return NamedSharding(mesh, _dividing(specs[name], leaf.shape, mesh))
        return NamedSharding(mesh, PartitionSpec())

    return jax.tree_util.tree_map_with_path(sharding, state)


def _dividing(spec: PartitionSpec, shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
    """The spec of a parameter for an array with as many axes, such as the scales of its moments in 8 bits."""
    pairs = zip(spec, shape, strict=False)  # a spec does not name the last axes that are whole
    return PartitionSpec(*(None if axis and size % mesh.shape[axis] else axis for axis, size in pairs))


def bytes_per_device(array: Any) -> int:
    """Of an abstract or real array with a sharding: what one device holds of it; what the host holds does not count."""
    if array.sharding.memory_kind == HOST:
        return 0
    return math.prod(array.sharding.shard_shape(tuple(array.shape))) * array.dtype.itemsize


def state_bytes(state: Any) -> tuple[int, int]:
    """(on one device, all together once) of a state with shardings."""
    leaves = jax.tree.leaves(state)
    return sum(map(bytes_per_device, leaves)), sum(math.prod(x.shape) * x.dtype.itemsize for x in leaves)


def table(params: Params) -> str:
    """parameter, shape, spec, bytes on a device: as aligned text. `params` carry their shardings."""
    rows = [("parameter", "shape", "spec", "bytes/device")]
    for name, array in params.items():
        spec = ", ".join("-" if axis is None else str(axis) for axis in array.sharding.spec) or "whole"
        rows.append((name, str(list(array.shape)), spec, f"{bytes_per_device(array):,}"))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    lines = [f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c:<{widths[2]}}  {d:>{widths[3]}}" for a, b, c, d in rows]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def large_and_whole(params: Params, mesh: Mesh) -> list[str]:
    """Names of large arrays that every device holds in full although an axis of the mesh could split parameters."""
    if mesh.shape["fsdp"] * mesh.shape["tensor"] * mesh.shape["pipe"] == 1:
        return []
    return [
        name
        for name, x in params.items()
        if x.sharding.is_fully_replicated and math.prod(x.shape) * x.dtype.itemsize >= LARGE
    ]
