"""The order of rows: an O(1) permutation `(seed, epoch, i) -> row`, the same code under numpy and jnp (contract 5).

A Feistel network (Luby & Rackoff 1988) on the smallest power of two that holds n, walked until the value falls below
n (Black & Rogaway 2002). So a batch depends on (n, seed, position) alone: no shuffle buffer, nothing to save.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_ROUNDS = 10  # with 6, the permutations of 7 rows fail a chi-squared test


def steps_per_epoch(rows: int, batch: int) -> int:
    """Batches that show every row once; the last may be padded."""
    return -(-rows // batch)


def permute(seed: Any, epoch: Any, index: Any, rows: int, xp: Any = np) -> Any:
    """Where the permutation of (seed, epoch) over range(rows) sends `index` [any shape, int32]. xp: numpy or jnp."""
    if rows == 1:
        return index * 0
    bits = max((rows - 1).bit_length(), 2)
    keys = [
        _mix(_mix(_u32(seed, xp) + xp.uint32(r * 0x9E3779B9 & 0xFFFFFFFF), xp) ^ _u32(epoch, xp), xp)
        for r in range(_ROUNDS)
    ]

    def walk(value: Any) -> Any:
        return _feistel(value, keys, bits, xp)

    value = walk(_u32(index, xp))
    limit = xp.uint32(rows)
    if xp is np:
        while (outside := value >= limit).any():
            value = np.where(outside, walk(value), value)
    else:
        value = jax.lax.while_loop(lambda v: jnp.any(v >= limit), lambda v: jnp.where(v >= limit, walk(v), v), value)
    return value.astype(xp.int32)


def batch_rows(seed: Any, position: Any, rows: int, batch: int, xp: Any = np) -> tuple[Any, Any, Any]:
    """(row numbers [B], mask [B] bool, epoch) of the batch at `position` (an int or an int32 array).

    The last batch of an epoch is padded with its own rows again, mask false. Real rows come first; the step deals
    rows to micro-batches in turn, so no micro-batch is all padding unless there are fewer rows than micro-batches.
    """
    per_epoch = steps_per_epoch(rows, batch)
    epoch, k = position // per_epoch, position % per_epoch
    slot = xp.arange(batch, dtype=xp.int32)
    start = k * batch
    real = xp.minimum(rows - start, batch)
    index = start + slot % real
    return permute(seed, epoch, index.astype(xp.int32), rows, xp), slot < real, epoch


def sequential_rows(position: Any, rows: int, batch: int, xp: Any = np) -> tuple[Any, Any]:
    """(row numbers [B], mask [B]) of evaluation batch `position`: rows in order, the last batch padded with row 0."""
    index = position * batch + xp.arange(batch, dtype=xp.int32)
    mask = index < rows
    return xp.where(mask, index, 0), mask


def _u32(value: Any, xp: Any) -> Any:
    if isinstance(value, int):  # a seed may need all 32 bits, and jnp makes int32 of a Python number
        return xp.asarray(value & 0xFFFFFFFF, xp.uint32)
    return xp.asarray(value).astype(xp.uint32)


def _mix(x: Any, xp: Any) -> Any:
    """The finaliser of MurmurHash3 (Appleby, public domain): every input bit reaches every output bit."""
    with np.errstate(over="ignore"):
        x = x ^ (x >> xp.uint32(16))
        x = x * xp.uint32(0x85EBCA6B)
        x = x ^ (x >> xp.uint32(13))
        x = x * xp.uint32(0xC2B2AE35)
        return x ^ (x >> xp.uint32(16))


def _feistel(value: Any, keys: list[Any], bits: int, xp: Any) -> Any:
    low_bits = bits // 2
    high_bits = bits - low_bits
    low, high = value & xp.uint32((1 << low_bits) - 1), value >> xp.uint32(low_bits)
    # Alternating halves: each round changes one half by a hash of the other, so unequal halves are no problem.
    for number, key in enumerate(keys):
        with np.errstate(over="ignore"):
            if number % 2:
                low = (low ^ _mix(high + key, xp)) & xp.uint32((1 << low_bits) - 1)
            else:
                high = (high ^ _mix(low + key, xp)) & xp.uint32((1 << high_bits) - 1)
    return (high << xp.uint32(low_bits)) | low
