"""Parts that models share: initialisers, activations, normalisation by name, masked BatchNorm, rematerialisation,
equal blocks in one stack."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

INITIALISERS: dict[str, Callable[..., Any]] = {
    "he_normal": nnx.initializers.he_normal(),
    "he_uniform": nnx.initializers.he_uniform(),
    "xavier_normal": nnx.initializers.xavier_normal(),
    "xavier_uniform": nnx.initializers.xavier_uniform(),
    "lecun_normal": nnx.initializers.lecun_normal(),
    "lecun_uniform": nnx.initializers.lecun_uniform(),
    "truncated_normal": nnx.initializers.truncated_normal(0.02),
    "orthogonal": nnx.initializers.orthogonal(),
    "zeros": nnx.initializers.zeros_init(),
}

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "relu": jax.nn.relu,
    "gelu": jax.nn.gelu,
    "silu": jax.nn.silu,
    "tanh": jnp.tanh,
}


class Dense(nnx.Linear):
    """A dense layer on the last axis of [..., features], as one product of matrices: XLA:CPU takes twice as long for
    [B, T, features] as it comes."""

    def __call__(self, x: jax.Array, *unused: Any) -> jax.Array:
        return super().__call__(x.reshape(-1, x.shape[-1])).reshape(*x.shape[:-1], self.out_features)


class LayerNorm(nnx.LayerNorm):
    """nnx.LayerNorm over the last axis (Ba et al. 2016), statistics in fp32, with a gradient of its own: of the input
    it keeps two numbers a row in place of three arrays (benchmarks/cpu.py)."""

    def __call__(self, x: jax.Array, *unused: Any, **more: Any) -> jax.Array:
        assert self.scale is not None
        y = _normalised(x, self.scale[...], True, self.epsilon)
        return y if self.bias is None else y + self.bias[...].astype(y.dtype)


class RMSNorm(nnx.RMSNorm):
    """nnx.RMSNorm over the last axis (Zhang & Sennrich 2019); see `LayerNorm`."""

    def __call__(self, x: jax.Array, *unused: Any, **more: Any) -> jax.Array:
        assert self.scale is not None
        return _normalised(x, self.scale[...], False, self.epsilon)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _normalised(x: jax.Array, scale: jax.Array, centred: bool, epsilon: float) -> jax.Array:
    return _normalise(x, scale, centred, epsilon)[0]


def _normalise(
    x: jax.Array, scale: jax.Array, centred: bool, epsilon: float
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """x [..., C] and scale [C] -> (y, (mean, 1 / sd) [..., 1]); the mean is 0 where it is not taken away."""
    wide = x.astype(jnp.float32)
    mean = jnp.mean(wide, -1, keepdims=True) if centred else jnp.zeros((), jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(jnp.square(wide - mean), -1, keepdims=True) + epsilon)
    return ((wide - mean) * inverse * scale).astype(x.dtype), (mean, inverse)


def _normalised_forward(x: jax.Array, scale: jax.Array, centred: bool, epsilon: float) -> Any:
    y, statistics = _normalise(x, scale, centred, epsilon)
    return y, (x, scale, *statistics)


def _normalised_backward(centred: bool, epsilon: float, kept: tuple[jax.Array, ...], dy: jax.Array) -> Any:
    x, scale, mean, inverse = kept
    z, dy = (x.astype(jnp.float32) - mean) * inverse, dy.astype(jnp.float32)
    dz = dy * scale
    dx = dz - z * jnp.mean(dz * z, -1, keepdims=True)
    if centred:
        dx -= jnp.mean(dz, -1, keepdims=True)
    dscale = jnp.sum((dy * z).reshape(-1, x.shape[-1]), 0)
    return (dx * inverse).astype(x.dtype), dscale.astype(scale.dtype)


_normalised.defvjp(_normalised_forward, _normalised_backward)


class BatchNorm(nnx.Module):
    """Batch normalisation (Ioffe & Szegedy 2015) over real rows only.

    x: [B, ..., C]; mask: [B] bool or None. Statistics are computed in fp32 over the rows whose mask is true; a call
    without one real row normalises by the running statistics and leaves them alone. Under a batch sharded over
    devices they are the statistics of the whole micro-batch.
    """

    def __init__(self, features: int, *, rngs: nnx.Rngs, momentum: float = 0.9, epsilon: float = 1e-5) -> None:
        self.scale = nnx.Param(jnp.ones(features))
        self.bias = nnx.Param(jnp.zeros(features))
        self.mean = nnx.BatchStat(jnp.zeros(features))
        self.var = nnx.BatchStat(jnp.ones(features))
        self.momentum = momentum
        self.epsilon = epsilon
        self.use_running_average = False

    def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        mean, var = self.mean[...], self.var[...]
        if not self.use_running_average:
            mean, var = self._statistics(x.astype(jnp.float32), mask)
        factor = self.scale[...].astype(jnp.float32) * jax.lax.rsqrt(var + self.epsilon)
        y = (x.astype(jnp.float32) - mean) * factor + self.bias[...].astype(jnp.float32)
        return y.astype(x.dtype)

    def _statistics(self, x: jax.Array, mask: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        axes = tuple(range(x.ndim - 1))
        if mask is None:
            mask = jnp.ones(x.shape[0], bool)
        real = mask.reshape(-1, *(1 for _ in range(x.ndim - 1)))
        count = jnp.sum(mask.astype(jnp.float32)) * math.prod(x.shape[1:-1])
        divisor = jnp.maximum(count, 1.0)
        # Two passes: E[x^2] - E[x]^2 loses its digits in fp32.
        mean = jnp.sum(jnp.where(real, x, 0.0), axes) / divisor
        var = jnp.sum(jnp.where(real, jnp.square(x - mean), 0.0), axes) / divisor
        any_real = count > 0
        old_mean, old_var = self.mean[...], self.var[...]
        for stat, old, new in ((self.mean, old_mean, mean), (self.var, old_var, var)):
            moved = self.momentum * old + (1.0 - self.momentum) * jax.lax.stop_gradient(new)
            stat[...] = jnp.where(any_real, moved, old)
        return jnp.where(any_real, mean, old_mean), jnp.where(any_real, var, old_var)


class _Maskless(nnx.Module):
    """Gives a row-wise normalisation the signature of BatchNorm."""

    def __init__(self, norm: nnx.Module | None) -> None:
        self.norm = norm

    def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        return x if self.norm is None else self.norm(x)  # type: ignore[operator]


def _group_norm(features: int, rngs: nnx.Rngs) -> nnx.Module:
    # Wu & He 2018: 32 groups, or as many as divide the channels with at least 4 in each.
    groups = next(g for g in (32, 16, 8, 4, 2, 1) if features % g == 0 and (features // g >= 4 or g == 1))
    return _Maskless(nnx.GroupNorm(features, num_groups=groups, rngs=rngs))


NORMS: dict[str, Callable[[int, nnx.Rngs], nnx.Module]] = {
    "batch": lambda features, rngs: BatchNorm(features, rngs=rngs),
    "group": _group_norm,
    "layer": lambda features, rngs: _Maskless(LayerNorm(features, rngs=rngs)),
    "none": lambda features, rngs: _Maskless(None),
}

_POLICIES: dict[str, Any] = {"full": None, "dots": jax.checkpoint_policies.checkpoint_dots}


def call_block(block: Any, x: jax.Array, mask: jax.Array | None, remat: str) -> jax.Array:
    """block(x, mask); with `remat` its activations are computed again in the backward pass instead of kept."""
    if remat == "none":
        return block(x, mask)
    run = nnx.remat(lambda block, x, mask: block(x, mask), policy=_POLICIES[remat])
    return run(block, x, mask)


Layer = Callable[[jax.Array, Any], jax.Array]
"""(x, the arrays of one block) -> x."""


def one_after_another(layer: Layer, x: jax.Array, arrays: Any) -> jax.Array:
    """All blocks of a stack in a loop: the program holds one, whatever the depth."""
    return jax.lax.scan(lambda x, own: (layer(x, own), None), x, arrays)[0]


class Stack(nnx.Module):
    """`count` equal blocks, each array of theirs in one with the blocks along the first axis.

    run: how x goes through them; who shares the blocks out over devices puts another function there.
    """

    def __init__(self, make: Callable[[nnx.Rngs], nnx.Module], count: int, *, rngs: nnx.Rngs) -> None:
        self.count = count
        self.stacked = nnx.vmap(make)(rngs.split(count))
        self.run = one_after_another

    def __call__(self, x: jax.Array, remat: str) -> jax.Array:
        graph, arrays = nnx.split(self.stacked)
        return self.run(lambda x, own: call_block(nnx.merge(graph, own), x, None, remat), x, arrays)

    def decode(self, x: jax.Array, cache: Any, at: jax.Array) -> tuple[jax.Array, Any]:
        """Each block's `decode` in turn; the caches lie along the first axis too."""
        graph, arrays = nnx.split(self.stacked)

        def one(x: jax.Array, own: Any) -> Any:
            block: Any = nnx.merge(graph, own[0])
            return block.decode(x, own[1], at)

        return jax.lax.scan(one, x, (arrays, cache))  # type: ignore[return-value]
