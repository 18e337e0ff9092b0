"""Precision: parameters and moments stay fp32, the computation is cast. fp16 adds dynamic loss scaling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

GROWTH_INTERVAL = 2000  # clean updates before the scale doubles (Micikevicius et al. 2018)
MIN_SCALE, MAX_SCALE = 1.0, 2.0**24


@dataclass(frozen=True)
class Precision:
    """compute: dtype of activations and matrix products. initial_scale: 1 without loss scaling."""

    name: str
    compute: Any
    initial_scale: float = 1.0

    @property
    def scales_loss(self) -> bool:
        """Whether the loss is scaled (fp16)."""
        return self.initial_scale != 1.0


PRECISIONS = {
    "fp32": Precision("fp32", jnp.float32),
    "bf16": Precision("bf16", jnp.bfloat16),
    "fp16": Precision("fp16", jnp.float16, initial_scale=2.0**15),
}


def cast_floats(tree: Any, dtype: Any) -> Any:
    """The tree with every floating-point array in `dtype`; integers and booleans as they are."""

    def cast(x: jax.Array) -> jax.Array:
        return x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x

    return jax.tree.map(cast, tree)


def next_scale(scale: jax.Array, good: jax.Array, finite: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(scale, clean updates so far) after an update: halve on overflow, double after GROWTH_INTERVAL clean ones."""
    good = jnp.where(finite, good + 1, 0)
    grow = good >= GROWTH_INTERVAL
    scale = jnp.where(
        finite, jnp.where(grow, jnp.minimum(scale * 2, MAX_SCALE), scale), jnp.maximum(scale / 2, MIN_SCALE)
    )
    return scale, jnp.where(grow, 0, good)
