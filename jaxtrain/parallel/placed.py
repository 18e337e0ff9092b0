"""A module whose parameters live in parts on several devices.

Fully sharded ones are whole only where they are used (Rajbhandari et al. 2020, ZeRO-3), those of a stack of blocks one
block at a time. Left to itself the compiler may split a product by the parts of its parameter and move activations
instead, which are far larger than what it spares.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxtrain.core.module import Arrays, Make, ModuleDef, name_of
from jaxtrain.core.optimizer import is_stacked
from jaxtrain.models.layers import Layer, Stack
from jaxtrain.parallel.pipe import through_stages

Gather = Callable[[jax.Array], jax.Array]


class Placed(ModuleDef):
    """A module whose parameters are gathered over `fsdp` in the forward pass; their gradients are split again.

    specs: of every parameter. What `tensor` splits stays split. With `pipe` the blocks of a stack run in stages.
    """

    def __init__(self, make: Make, specs: Mapping[str, PartitionSpec], mesh: Mesh) -> None:
        super().__init__(make)
        self._mesh = mesh
        self._gather: dict[str, Gather] = {}
        self._gather_block: dict[str, Gather] = {}  # by the name inside its block
        for name, spec in specs.items():
            if is_stacked(name):
                own = PartitionSpec(*spec[1:])
                self._gather_block[name.split("stacked.", 1)[1]] = _gather(mesh, own)
            else:
                self._gather[name] = _gather(mesh, spec)
        # A loop with a transfer in it and one outside can wait for each other for ever on XLA:CPU.
        self._unroll = mesh.devices.flat[0].platform == "cpu"

    def bind(self, params: Arrays, model_state: Arrays, key: jax.Array | None) -> Any:
        """As `ModuleDef.bind`, with gathered parameters."""
        whole = {name: self._gather[name](x) if name in self._gather else x for name, x in params.items()}
        module = super().bind(whole, model_state, key)
        for _, part in nnx.iter_modules(module):
            if isinstance(part, Stack):
                part.run = self._run
        return module

    def _run(self, layer: Layer, x: jax.Array, arrays: Any) -> jax.Array:
        def gathered(x: jax.Array, own: Any) -> jax.Array:
            return layer(x, jax.tree_util.tree_map_with_path(self._whole, own))

        if self._mesh.shape["pipe"] > 1:
            return through_stages(self._mesh, gathered, x, arrays, unroll=self._unroll)
        return jax.lax.scan(lambda x, own: (gathered(x, own), None), x, arrays, unroll=self._unroll)[0]

    def _whole(self, path: Any, x: Any) -> Any:
        name = name_of(path)
        return self._gather_block[name](x) if name in self._gather_block else x


def _gather(mesh: Mesh, spec: PartitionSpec) -> Gather:
    if "fsdp" not in spec:
        return lambda x: x
    without = PartitionSpec(*(None if axis == "fsdp" else axis for axis in spec))

    def constrain(x: jax.Array, spec: PartitionSpec) -> jax.Array:
        around = jax.sharding.get_abstract_mesh()  # inside the stages of a pipe: without its axis
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh if around.empty else around, spec))

    @jax.custom_vjp
    def gather(x: jax.Array) -> jax.Array:
        return constrain(x, without)

    def forward(x: jax.Array) -> tuple[jax.Array, None]:
        return gather(x), None

    def backward(_: None, gradient: jax.Array) -> tuple[jax.Array]:
        return (constrain(gradient, spec),)

    gather.defvjp(forward, backward)
    return gather
