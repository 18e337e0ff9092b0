"""Randomness without stored keys: a key is a function of (seed, stream, counters), so a resume needs none."""

from __future__ import annotations

import jax

STREAMS = {"init": 0, "module": 1, "augment": 2, "sample": 3}


def stream_key(seed: int, stream: str, *counters: jax.Array | int) -> jax.Array:
    """The key of `stream` at `counters` (step, micro-batch, ...), e.g. `stream_key(0, "augment", step)`."""
    key = jax.random.fold_in(jax.random.key(seed), STREAMS[stream])
    for counter in counters:
        key = jax.random.fold_in(key, counter)
    return key
