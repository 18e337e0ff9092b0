"""Moments of an optimizer in one byte a value, block by block (Dettmers et al. 2022, "8-bit Optimizers via Block-wise
Quantization").

In: an optax transformation. Out: the same, which keeps bytes between the updates; the update itself is computed in
float32 from what they stand for, by the transformation that came in. A block is a run of at most `BLOCK` values along
one axis, with the largest magnitude s in it as its scale. A value x is kept as the whole number k next to
K (|x| / s)^(1/p), and read as s (k / K)^p:

first moments    int8, with the sign, K = 127, p = 2
second moments   uint8, K = 255, p = 4. What is above 0 is never read as 0: the update divides by its root

A power in place of the paper's table needs no look-up. Blocks lie along the shortest axis that holds one, which `fsdp`
splits last, so that codes are split over devices as their parameter is and nothing more is sent. Of the codes that
were tried (benchmarks/moments.py), these stay nearest to the updates of float32 where values in a block are unlike;
where they are alike, equal steps of m and sqrt(v) are a little nearer. Rounding is to the nearest: the same state gives
the same bits. Its price: with b2 near 1 an update moves a second moment by less than half a step, so that its share of
the block's largest stays as it is until a large gradient comes, and the distance grows with the length of the run.

As in the paper, arrays under `SMALL` values and embeddings stay float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from optax import contrib

BLOCK = 128
"""Values that share a scale, at most: 4 bytes for 128 are 3 %. Longer ones would more often lie on two devices."""
SMALL = 4096
"""An array of fewer values stays float32: there is little to gain."""
TINY = 2.0**-126
"""The smallest normal float32."""

CODES = {"int8": (127, 1), "uint8": (255, 2)}
"""Type of the codes -> (K, how many square roots make the p-th)."""

MOMENTS: dict[type, dict[str, str]] = {
    optax.TraceState: {"trace": "int8"},
    optax.ScaleByAdamState: {"mu": "int8", "nu": "uint8"},
    optax.ScaleByLionState: {"mu": "int8"},
    contrib.MuonState: {"mu": "int8"},
}
"""State of a transformation -> its moments and the type of their codes. All are {name of a parameter: array}."""


class Blocks(NamedTuple):
    """A moment in 8 bits.

    codes: int8 (any sign) or uint8 (not negative), in the shape of the parameter.
    scales: float32, in that shape but for the largest axis, which counts the blocks.
    """

    codes: jax.Array
    scales: jax.Array


def in_blocks(inner: optax.GradientTransformation, whole: Callable[[str], bool]) -> optax.GradientTransformation:
    """`inner` with its moments in 8 bits between updates. whole: names of parameters whose moments stay float32."""

    def init(params: optax.Params) -> optax.OptState:
        return _each(inner.init(params), keep)

    def update(
        gradients: optax.Updates, state: optax.OptState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.OptState]:
        direction, state = inner.update(gradients, _each(state, read), params)
        return direction, _each(state, keep)

    def keep(moments: Mapping[str, Any], dtype: str) -> dict[str, Any]:
        # A parameter that another optimizer has is masked by a node without a size.
        large = {name: getattr(x, "size", 0) >= SMALL and not whole(name) for name, x in moments.items()}
        return {name: quantise(x, dtype) if large[name] else x for name, x in moments.items()}

    def read(moments: Mapping[str, Any], _: str) -> dict[str, Any]:
        return {name: dequantise(x) if isinstance(x, Blocks) else x for name, x in moments.items()}

    return optax.GradientTransformation(init, update)


def quantise(x: jax.Array, dtype: str) -> Blocks:
    """A float32 array of one axis or more in 8 bits. dtype: int8, or uint8 when no value is negative.

    A block whose values are all below the smallest normal float32 becomes zeros. Not for values that are not finite.
    """
    top, roots = CODES[dtype]
    axis, size = _blocking(x.shape)
    blocks = _split(x, axis, size)
    scales = jnp.max(jnp.abs(blocks), axis + 1)
    scales = jnp.where(scales >= TINY, scales, 0.0)
    share = jnp.abs(blocks) / jnp.expand_dims(jnp.where(scales > 0.0, scales, 1.0), axis + 1)
    for _ in range(roots):
        share = jnp.sqrt(share)
    codes = jnp.round(top * share)
    codes = jnp.sign(blocks) * codes if dtype == "int8" else jnp.where(blocks > 0.0, jnp.maximum(codes, 1.0), 0.0)
    return Blocks(_join(codes.astype(dtype), axis, x.shape), scales)


def dequantise(blocks: Blocks) -> jax.Array:
    """The float32 array that 8 bits stand for, in the shape of the codes."""
    codes, scales = blocks
    top, roots = CODES[str(codes.dtype)]
    axis, size = _blocking(codes.shape)
    parts = _split(codes.astype(jnp.float32), axis, size)
    share = jnp.abs(parts) / top
    for _ in range(roots):
        share = share * share
    return _join(jnp.sign(parts) * share * jnp.expand_dims(scales, axis + 1), axis, codes.shape)


def _blocking(shape: tuple[int, ...]) -> tuple[int, int]:
    """(axis, size) of the blocks: along the shortest axis that holds one, else the longest; a size that divides it."""
    long = [i for i, length in enumerate(shape) if length >= BLOCK]
    axis = min(long, key=lambda i: (shape[i], -i)) if long else max(range(len(shape)), key=lambda i: shape[i])
    length = shape[axis]
    if length <= BLOCK:
        return axis, length
    return axis, next((size for size in range(BLOCK, BLOCK // 2, -1) if length % size == 0), BLOCK)


def _split(x: jax.Array, axis: int, size: int) -> jax.Array:
    """[..., n, ...] -> [..., blocks, size, ...], zeros behind the last value."""
    lacking = -x.shape[axis] % size
    if lacking:
        x = jnp.pad(x, [(0, lacking if i == axis else 0) for i in range(x.ndim)])
    return x.reshape(*x.shape[:axis], -1, size, *x.shape[axis + 1 :])


def _join(blocks: jax.Array, axis: int, shape: tuple[int, ...]) -> jax.Array:
    """The array of this shape that was split."""
    x = blocks.reshape(*shape[:axis], -1, *shape[axis + 1 :])
    return jax.lax.slice_in_dim(x, 0, shape[axis], axis=axis)


def _each(state: optax.OptState, change: Callable[[Any, str], Any]) -> optax.OptState:
    """The state with change(moments, type of their codes) in place of all moments in it."""

    def changed(node: Any) -> Any:
        if type(node) not in MOMENTS:
            return node
        fields = MOMENTS[type(node)].items()
        return node._replace(**{field: change(getattr(node, field), dtype) for field, dtype in fields})

    return jax.tree.map(changed, state, is_leaf=lambda node: type(node) in MOMENTS)
