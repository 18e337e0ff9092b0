"""Fully sharded parameters are whole only where they are used (Rajbhandari et al. 2020, ZeRO-3).

Left to itself the compiler may split a product by the parts of its parameter and move activations instead, which are
far larger than what it spares.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxtrain.core.module import Arrays, Make, ModuleDef


class Gathered(ModuleDef):
    """A module whose parameters are gathered over `fsdp` in the forward pass; their gradients are split again.

    specs: of every parameter. What `tensor` splits stays split.
    """

    def __init__(self, make: Make, specs: Mapping[str, PartitionSpec], mesh: Mesh) -> None:
        super().__init__(make)
        self._gather = {
            name: _gather(NamedSharding(mesh, _without_fsdp(spec)), NamedSharding(mesh, spec))
            for name, spec in specs.items()
        }

    def bind(self, params: Arrays, model_state: Arrays, key: jax.Array | None) -> Any:
        """As `ModuleDef.bind`, with gathered parameters."""
        return super().bind({name: self._gather[name](x) for name, x in params.items()}, model_state, key)


def _without_fsdp(spec: PartitionSpec) -> PartitionSpec:
    return PartitionSpec(*(None if axis == "fsdp" else axis for axis in spec))


def _gather(whole: NamedSharding, part: NamedSharding) -> Any:
    @jax.custom_vjp
    def gather(x: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, whole)

    def forward(x: jax.Array) -> tuple[jax.Array, None]:
        return gather(x), None

    def backward(_: None, gradient: jax.Array) -> tuple[jax.Array]:
        return (jax.lax.with_sharding_constraint(gradient, part),)

    gather.defvjp(forward, backward)
    return gather
