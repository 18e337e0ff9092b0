"""A causal transformer for tokens (Vaswani et al. 2017, Radford et al. 2019): pre-normalised blocks of attention and a
hidden layer. Rotary or learned positions, LayerNorm or RMSNorm, GELU or SwiGLU, keys and values shared by groups of
heads (Ainslie et al. 2023), tied embeddings. `decode` is the same network a few tokens at a time, with a cache.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.config import schema
from jaxtrain.models.layers import Dense, LayerNorm, RMSNorm, Stack, call_block

ROTARY_BASE = 10_000.0
Cache = list[tuple[jax.Array, jax.Array]] | tuple[jax.Array, jax.Array]
"""Keys and values of each block, [B, block_size, kv_heads, head width] each; of a stack with a first axis of blocks."""


def _norm(config: schema.Gpt, rngs: nnx.Rngs) -> nnx.Module:
    if config.norm == "rms":
        return RMSNorm(config.width, rngs=rngs)
    return LayerNorm(config.width, use_bias=config.bias, rngs=rngs)


def _dense(config: schema.Gpt, into: int, out: int, rngs: nnx.Rngs, *, last: bool = False) -> Dense:
    # The sum over 2 x layers branches keeps its spread (Radford et al. 2019).
    sd = config.init_sd / math.sqrt(2 * config.layers) if last else config.init_sd
    return Dense(into, out, use_bias=config.bias, kernel_init=nnx.initializers.normal(sd), rngs=rngs)


def rotate(x: jax.Array, positions: jax.Array) -> jax.Array:
    """Rotary positions (Su et al. 2021): x [B, T, H, D], positions [T]. Halves are turned as pairs, in fp32."""
    half = x.shape[-1] // 2
    frequency = ROTARY_BASE ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = positions.astype(jnp.float32)[:, None] * frequency
    cos, sin = jnp.cos(angle)[:, None, :], jnp.sin(angle)[:, None, :]
    a, b = jnp.split(x.astype(jnp.float32), 2, -1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1).astype(x.dtype)


def attend(q: jax.Array, k: jax.Array, v: jax.Array, places: jax.Array | None = None) -> jax.Array:
    """Causal attention (Vaswani et al. 2017): q [B, T, H, D], k and v [B, S, K, D], K dividing H -> [B, T, H, D].

    places: [T], where in 0..S the queries stand; None: T = S, from the first on. Scores and softmax are fp32.
    """
    if jax.default_backend() != "cpu":
        if places is None:
            return jax.nn.dot_product_attention(q, k, v, is_causal=True)
        return jax.nn.dot_product_attention(q, k, v, mask=_seen(places, k.shape[1])[None, None])
    # Heads first, as plain batched products, and normalised after the second (Dao et al. 2022): XLA:CPU takes 1.2x
    # for a step of a small model the other way.
    (rows, queries, heads, size), groups = q.shape, k.shape[2]
    q, k, v = q.swapaxes(1, 2), k.swapaxes(1, 2), v.swapaxes(1, 2)
    q = q.reshape(rows, groups, -1, size)
    scores = jnp.matmul(q, k.swapaxes(2, 3), preferred_element_type=jnp.float32) / math.sqrt(size)
    seen = _seen(jnp.arange(queries) if places is None else places, k.shape[2])
    scores = jnp.where(seen, scores.reshape(rows, heads, queries, -1), jnp.finfo(jnp.float32).min)
    weights = jnp.exp(scores - jax.lax.stop_gradient(scores.max(-1, keepdims=True)))
    total = weights.sum(-1, keepdims=True)
    y = jnp.matmul(weights.astype(v.dtype).reshape(rows, groups, -1, k.shape[2]), v, preferred_element_type=jnp.float32)
    return (y.reshape(rows, heads, queries, size) / total).astype(v.dtype).swapaxes(1, 2)


def _seen(places: jax.Array, length: int) -> jax.Array:
    return jnp.arange(length)[None, :] <= places[:, None]


class Attention(nnx.Module):
    """[B, T, width] -> [B, T, width]; a token sees itself and those before it."""

    def __init__(self, config: schema.Gpt, *, rngs: nnx.Rngs) -> None:
        self.heads, self.kv_heads = config.heads, config.kv_heads or config.heads
        self.size = config.width // config.heads
        self.rotary = config.positions == "rotary"
        # By groups: the queries of a group of heads, then the key and the value that they share. So a part of the
        # columns holds whole groups, and can live on a device of its own.
        self.qkv = _dense(config, config.width, (self.heads + 2 * self.kv_heads) * self.size, rngs)
        self.out = _dense(config, config.width, config.width, rngs, last=True)

    def __call__(self, x: jax.Array) -> jax.Array:
        q, k, v = self._project(x, jnp.arange(x.shape[1]))
        return self.out(attend(q, k, v).reshape(x.shape))

    def decode(self, x: jax.Array, cache: tuple[jax.Array, jax.Array], at: jax.Array) -> Any:
        """x [B, S, width] at places at..at+S -> (the same as the whole sequence would give there, new cache)."""
        places = at + jnp.arange(x.shape[1])
        q, k, v = self._project(x, places)
        keys = jax.lax.dynamic_update_slice_in_dim(cache[0], k, at, 1)
        values = jax.lax.dynamic_update_slice_in_dim(cache[1], v, at, 1)
        return self.out(attend(q, keys, values, places).reshape(x.shape)), (keys, values)

    def _project(self, x: jax.Array, places: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        shared = self.heads // self.kv_heads
        groups = self.qkv(x).reshape(*x.shape[:2], self.kv_heads, shared + 2, self.size)
        q = groups[..., :shared, :].reshape(*x.shape[:2], self.heads, self.size)
        k, v = groups[..., shared, :], groups[..., shared + 1, :]
        return (rotate(q, places), rotate(k, places), v) if self.rotary else (q, k, v)


class Hidden(nnx.Module):
    """[B, T, width] -> [B, T, width]: GELU, or SwiGLU (Shazeer 2020), which has a gate beside it."""

    def __init__(self, config: schema.Gpt, *, rngs: nnx.Rngs) -> None:
        gated = config.activation == "swiglu"
        # 8/3 in place of 4: three matrices then have as many parameters as two.
        usual = -(-8 * config.width // 3 // 8) * 8 if gated else 4 * config.width
        self.width = config.mlp_width or usual
        self.gate = _dense(config, config.width, self.width, rngs) if gated else None
        self.up = _dense(config, config.width, self.width, rngs)
        self.down = _dense(config, self.width, config.width, rngs, last=True)

    def __call__(self, x: jax.Array) -> jax.Array:
        if self.gate is None:
            return self.down(jax.nn.gelu(self.up(x), approximate=True))
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class Block(nnx.Module):
    """Attention and hidden layer, each behind a normalisation and beside a shortcut."""

    def __init__(self, config: schema.Gpt, *, rngs: nnx.Rngs) -> None:
        self.attention_norm, self.attention = _norm(config, rngs), Attention(config, rngs=rngs)
        self.hidden_norm, self.hidden = _norm(config, rngs), Hidden(config, rngs=rngs)
        self.dropout = nnx.Dropout(config.dropout, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        x = x + self.dropout(self.attention(self.attention_norm(x)))  # type: ignore[operator]
        return x + self.dropout(self.hidden(self.hidden_norm(x)))  # type: ignore[operator]

    def decode(self, x: jax.Array, cache: tuple[jax.Array, jax.Array], at: jax.Array) -> Any:
        y, cache = self.attention.decode(self.attention_norm(x), cache, at)  # type: ignore[operator]
        x = x + y
        return x + self.hidden(self.hidden_norm(x)), cache  # type: ignore[operator]


class Gpt(nnx.Module):
    """tokens [B, T] int32 -> [B, T, vocabulary], T <= block_size; position t gives the token t + 1."""

    def __init__(self, config: schema.Gpt, shape: tuple[int, ...], outputs: int, *, rngs: nnx.Rngs) -> None:
        self.block_size = shape[0]
        self.kv_heads, self.head_size = config.kv_heads or config.heads, config.width // config.heads
        init = nnx.initializers.normal(config.init_sd)
        self.token_embed = nnx.Embed(outputs, config.width, embedding_init=init, rngs=rngs)
        learned = config.positions == "learned"
        self.position_embed = nnx.Embed(shape[0], config.width, embedding_init=init, rngs=rngs) if learned else None
        self.dropout = nnx.Dropout(config.dropout, rngs=rngs)
        self.blocks: Any
        if config.scan_layers:
            self.blocks = Stack(lambda rngs: Block(config, rngs=rngs), config.layers, rngs=rngs)
        else:
            self.blocks = nnx.List(Block(config, rngs=rngs) for _ in range(config.layers))
        self.norm = _norm(config, rngs)
        self.head = None if config.tie_embeddings else _dense(config, config.width, outputs, rngs)
        self.remat = config.remat

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.dropout(self._embed(tokens, jnp.arange(tokens.shape[1])))
        if isinstance(self.blocks, Stack):
            return self._logits(self.blocks(x, self.remat))
        for block in self.blocks:
            x = call_block(block, x, None, self.remat)
        return self._logits(x)

    def empty_cache(self, rows: int, dtype: Any = jnp.float32) -> Cache:
        """A cache for `rows` sequences of up to block_size tokens."""
        shape: tuple[int, ...] = (rows, self.block_size, self.kv_heads, self.head_size)
        if isinstance(self.blocks, Stack):
            shape = (self.blocks.count, *shape)
            return jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)
        return [(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in self.blocks]

    def decode(self, tokens: jax.Array, cache: Cache, at: jax.Array) -> tuple[jax.Array, Cache]:
        """tokens [B, S] at places at..at+S of sequences whose first `at` tokens are in the cache.

        Gives (logits [B, S, vocabulary], the cache with these tokens): what `__call__` gives for those places.
        """
        x = self._embed(tokens, at + jnp.arange(tokens.shape[1]))
        if isinstance(self.blocks, Stack):
            x, kept = self.blocks.decode(x, cache, at)
            return self._logits(x), kept
        out = []
        for block, kept in zip(self.blocks, cache, strict=True):
            x, kept = block.decode(x, kept, at)
            out.append(kept)
        return self._logits(x), out

    def _embed(self, tokens: jax.Array, places: jax.Array) -> jax.Array:
        # nnx.Embed gives the type its table was made in, whatever the table has been cast to.
        x = jnp.take(self.token_embed.embedding[...], tokens, axis=0)
        if self.position_embed is None:
            return x
        return x + jnp.take(self.position_embed.embedding[...], places, axis=0)

    def _logits(self, x: jax.Array) -> jax.Array:
        x = self.norm(x)  # type: ignore[operator]
        if self.head is not None:
            return self.head(x)
        table = self.token_embed.embedding[...]
        return (x.reshape(-1, x.shape[-1]) @ table.T.astype(x.dtype)).reshape(*x.shape[:-1], -1)
