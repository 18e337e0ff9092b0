"""The two models of sequences written again, in float64 numpy and loops: what the product is held against.

`gpt_in_numpy` has switches that a test turns the wrong way, to show that it would see the difference.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Arrays = dict[str, Any]


def dense(x: np.ndarray, a: Arrays, name: str) -> np.ndarray:
    y = x @ np.asarray(a[f"{name}.kernel"], np.float64)
    return y + a[f"{name}.bias"] if f"{name}.bias" in a else y


def layer_norm(x: np.ndarray, a: Arrays, name: str) -> np.ndarray:
    y = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6) * a[f"{name}.scale"]
    return y + a[f"{name}.bias"] if f"{name}.bias" in a else y


def rms_norm(x: np.ndarray, a: Arrays, name: str) -> np.ndarray:
    return x / np.sqrt(np.square(x).mean(-1, keepdims=True) + 1e-6) * a[f"{name}.scale"]


def turned(x: np.ndarray, place: int) -> np.ndarray:
    """One head's vector [D] at a place: D / 2 complex numbers, each turned at its own speed."""
    half = len(x) // 2
    z = (x[:half] + 1j * x[half:]) * np.exp(1j * place / 10_000.0 ** (np.arange(half) / half))
    return np.concatenate([z.real, z.imag])


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3)))


def gpt_in_numpy(
    tokens: np.ndarray,
    a: Arrays,
    config: Any,
    *,
    causal: bool = True,
    first_place: int = 0,
    neighbours_share: bool = True,
    gate_is_gate: bool = True,
    scale: float = 1.0,
) -> np.ndarray:
    """tokens [B, T] -> [B, T, V]; row by row, head by head, token by token."""
    norm = {"rms": rms_norm, "layer": layer_norm}[config.norm]
    kv_heads, size = config.kv_heads or config.heads, config.width // config.heads
    group = config.heads // kv_heads
    rotary = config.positions == "rotary"
    table = np.asarray(a["token_embed.embedding"], np.float64)

    def attention(x: np.ndarray, name: str) -> np.ndarray:
        length = len(x)
        groups = dense(x, a, f"{name}.qkv").reshape(length, kv_heads, group + 2, size)
        mixed = np.zeros((length, config.heads, size))
        for h in range(config.heads):
            shared = h // group if neighbours_share else h % kv_heads
            queries = groups[:, h // group, h % group]
            keys, values = groups[:, shared, group], groups[:, shared, group + 1]
            if rotary:
                queries = np.stack([turned(q, first_place + t) for t, q in enumerate(queries)])
                keys = np.stack([turned(k, t) for t, k in enumerate(keys)])
            for t in range(length):
                seen = t + 1 if causal else length
                weights = np.exp(scale * keys[:seen] @ queries[t] / np.sqrt(size))
                mixed[t, h] = weights @ values[:seen] / weights.sum()
        return dense(mixed.reshape(length, config.width), a, f"{name}.out")

    def hidden(x: np.ndarray, name: str) -> np.ndarray:
        up = dense(x, a, f"{name}.up")
        if config.activation == "gelu":
            return dense(gelu(up), a, f"{name}.down")
        gate, value = dense(x, a, f"{name}.gate"), up
        gate, value = (gate, value) if gate_is_gate else (value, gate)
        return dense(silu(gate) * value, a, f"{name}.down")

    def row(numbers: np.ndarray) -> np.ndarray:
        x = table[numbers]
        if not rotary:
            x = x + a["position_embed.embedding"][first_place : first_place + len(numbers)]
        for i in range(config.layers):
            x = x + attention(norm(x, a, f"blocks.{i}.attention_norm"), f"blocks.{i}.attention")
            x = x + hidden(norm(x, a, f"blocks.{i}.hidden_norm"), f"blocks.{i}.hidden")
        x = norm(x, a, "norm")
        return x @ table.T if config.tie_embeddings else dense(x, a, "head")

    return np.stack([row(numbers) for numbers in np.asarray(tokens)])


def tcn_in_numpy(x: np.ndarray, a: Arrays, config: Any, *, growth: int = 2, reverse: bool = False) -> np.ndarray:
    """x [B, T, C] -> [B, outputs] or [B, T, wide]; relu; norm layer, none, or batch by its running statistics."""

    def conv(x: np.ndarray, name: str, dilation: int) -> np.ndarray:
        kernel = np.asarray(a[f"{name}.kernel"], np.float64)
        kernel = kernel[::-1] if reverse else kernel
        y = np.zeros((*x.shape[:2], kernel.shape[2])) + a.get(f"{name}.bias", 0.0)
        for t in range(x.shape[1]):
            for tap in range(len(kernel)):
                back = t - (len(kernel) - 1 - tap) * dilation  # the last tap is the step itself
                if back >= 0:
                    y[:, t] += x[:, back] @ kernel[tap]
        return y

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        if config.norm == "layer":
            return layer_norm(x, a, f"{name}.norm")
        if config.norm == "batch":
            scaled = (x - a[f"{name}.mean"]) / np.sqrt(a[f"{name}.var"] + 1e-5)
            return scaled * a[f"{name}.scale"] + a[f"{name}.bias"]
        return x

    x = np.asarray(x, np.float64)
    for i in range(len(config.channels)):
        name = f"blocks.{i}"
        shortcut = dense(x, a, f"{name}.project") if f"{name}.project.kernel" in a else x
        for j in range(2):
            x = np.maximum(norm(conv(x, f"{name}.convs.{j}", growth**i), f"{name}.norms.{j}"), 0)
        x = np.maximum(shortcut + x, 0)
    return dense(x if config.output == "step" else x[:, -1], a, "head")
