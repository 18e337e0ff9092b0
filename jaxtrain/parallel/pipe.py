"""A stack of blocks in stages (GPipe, Huang et al. 2019): each device holds some blocks, and micro-batches go through
all devices one after another.

With P stages and M micro-batches a device is idle for P - 1 of M + P - 1 turns. The backward pass is the transpose of
the forward pass, in the opposite order.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jaxtrain.models.layers import Layer
from jaxtrain.parallel.mesh import row_parts

PER_STAGE = 4
"""Micro-batches a stage, where the rows allow it: at most a fifth of the time is idle then (Huang et al. 2019)."""


def micro_batches(rows: int, stages: int) -> int:
    """The largest number up to PER_STAGE x stages that divides the rows of one device."""
    return next(n for n in range(min(PER_STAGE * stages, rows), 0, -1) if rows % n == 0)


def through_stages(mesh: Mesh, layer: Layer, x: jax.Array, arrays: Any, *, unroll: bool) -> jax.Array:
    """x [B, ...] through all blocks; `arrays` lie blocks first and are split by `pipe`, x is not.

    Rows are shared out as by accumulation: micro-batch m has rows m, m + M, ..., so no row leaves its device.
    """
    stages = mesh.shape["pipe"]
    count = micro_batches(x.shape[0] // row_parts(mesh), stages)
    turns = count + stages - 1

    def stage(micros: jax.Array, arrays: Any) -> jax.Array:
        mine = jax.lax.axis_index("pipe")

        def turn(before: jax.Array, fed: Any) -> Any:
            number, micro = fed
            own = jax.tree.map(lambda a: _own_key(a, jnp.clip(number - mine, 0, count - 1)), arrays)
            y = jnp.where(mine == 0, micro, before)
            y = jax.lax.scan(lambda x, own: (layer(x, own), None), y, own, unroll=unroll)[0]
            return jax.lax.ppermute(y, "pipe", [(i, i + 1) for i in range(stages - 1)]), y

        fed = jnp.concatenate([micros, jnp.broadcast_to(micros[-1:], (stages - 1, *micros.shape[1:]))])
        _, ys = jax.lax.scan(turn, jnp.zeros_like(micros[0]), (jnp.arange(turns), fed), unroll=unroll)
        return jax.lax.psum(jnp.where(mine == stages - 1, ys[stages - 1 :], 0), "pipe")

    split = jax.shard_map(
        stage,
        mesh=mesh,
        in_specs=(PartitionSpec(), PartitionSpec("pipe")),
        out_specs=PartitionSpec(),
        axis_names={"pipe"},
        check_vma=False,
    )
    micros = x.reshape(-1, count, *x.shape[1:]).swapaxes(0, 1)
    return split(micros, arrays).swapaxes(0, 1).reshape(x.shape)


def _own_key(array: jax.Array, micro: jax.Array) -> jax.Array:
    """Random keys of a micro-batch: its rows do not drop what those of another drop."""
    if not jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        return array
    return jax.vmap(lambda key: jax.random.fold_in(key, micro))(array)
