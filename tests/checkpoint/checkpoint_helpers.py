"""A state of every kind of leaf, and stores on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxtrain.checkpoint import Checkpoints

META = {"evaluation": {"loss": 1.0}}


def state_of(value: float = 0.5) -> dict[str, Any]:
    """Params, Adam's NamedTuples with bf16 moments, an int32 that a float32 cannot hold, a bool, an empty dict."""
    params = {"layers.0.kernel": jnp.full((4, 3), value), "head.bias": jnp.arange(3.0) + value}
    optimizer = optax.chain(optax.scale_by_adam(mu_dtype=jnp.bfloat16), optax.trace(0.9))
    opt_state = optimizer.init(params)
    _, opt_state = optimizer.update(jax.tree.map(lambda p: p * 0.1, params), opt_state)
    return {
        "step": jnp.int32(16777217),
        "params": params,
        "opt_state": opt_state,
        "ema": {},
        "flags": (jnp.array([True, False]), jnp.float32(value)),
    }


def store_of(folder: Path, **options: Any) -> Checkpoints:
    return Checkpoints(folder, **({"metric": "loss", "mode": "min", "keep_last": 99} | options))


def saved(folder: Path, steps: dict[int, float | None], **options: Any) -> Checkpoints:
    """A store in which each step was saved with this loss, the state holding step / 8."""
    store = store_of(folder, **options)
    for step, loss in steps.items():
        store.save(step, state_of(step / 8), {"evaluation": {"loss": loss}} if loss is not None else {})
        store.wait()
    return store


def abstract(state: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)


def files_of(folder: Path) -> list[str]:
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


def same(a: Any, b: Any) -> bool:
    """Same structure, types and bits."""
    if jax.tree.structure(a) != jax.tree.structure(b):
        return False
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(x.dtype == y.dtype and np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in pairs)
