"""The guard: a non-finite update changes nothing but the counters (contract 7). Never multiply by 0: 0 * NaN = NaN."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def is_finite(loss: jax.Array, grad_norm: jax.Array) -> jax.Array:
    """One bool: the update may be applied."""
    return jnp.isfinite(loss) & jnp.isfinite(grad_norm)


def apply(finite: jax.Array, update: Callable[[Any], Any], old: Any, *, branch: bool) -> Any:
    """update(old) where it is finite, else `old`, leaf by leaf.

    branch: choose by a branch in place of a `where` over both. XLA:CPU then writes moments and parameters in place;
    behind a `where` it copies both first. A GPU's host would have to wait for each step to know the branch.
    """
    if branch:
        return jax.lax.cond(finite, update, lambda old: old, old)
    return keep(finite, update(old), old)


def keep(finite: jax.Array, new: Any, old: Any) -> Any:
    """`new` where the update was finite, else `old`, leaf by leaf."""
    return jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, old)


def count(guard: dict[str, jax.Array], finite: jax.Array, real: jax.Array) -> dict[str, jax.Array]:
    """Counters after an update. `real`: the skip is not a normal fp16 overflow, which counts for nothing.

    skipped: all real skips. in_row: real skips since the last finite update.
    """
    bad = (~finite & real).astype(jnp.int32)
    return {
        "skipped": guard["skipped"] + bad,
        "in_row": jnp.where(finite, 0, guard["in_row"] + bad),
    }
