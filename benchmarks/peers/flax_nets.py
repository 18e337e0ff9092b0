"""The networks in plain flax, with jaxtrain's names of parts, so that its weights fit."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

Array = jax.Array
Shape = tuple[int, ...]


class Mlp(nnx.Module):
    """[B, features] -> [B, outputs]."""

    def __init__(self, model: dict[str, Any], shape: Shape, outputs: int, rngs: nnx.Rngs, dtype: Any) -> None:
        widths = [shape[0], *model["hidden"]]
        self.layers = nnx.List(
            nnx.Linear(i, o, dtype=dtype, rngs=rngs) for i, o in zip(widths, model["hidden"], strict=False)
        )
        self.head = nnx.Linear(widths[-1], outputs, dtype=dtype, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        for layer in self.layers:
            x = jax.nn.relu(layer(x))
        return self.head(x)


class GptBlock(nnx.Module):
    """Attention and hidden layer, normalised before."""

    def __init__(self, heads: int, width: int, rngs: nnx.Rngs, dtype: Any) -> None:
        def dense(into: int, out: int) -> nnx.Linear:
            return nnx.Linear(into, out, use_bias=False, dtype=dtype, rngs=rngs)

        self.heads = heads
        self.attention_norm = nnx.LayerNorm(width, use_bias=False, dtype=dtype, rngs=rngs)
        self.hidden_norm = nnx.LayerNorm(width, use_bias=False, dtype=dtype, rngs=rngs)
        self.attention = nnx.Dict(qkv=dense(width, 3 * width), out=dense(width, width))
        self.hidden = nnx.Dict(up=dense(width, 4 * width), down=dense(4 * width, width))

    def __call__(self, x: Array) -> Array:
        qkv = self.attention["qkv"](self.attention_norm(x)).reshape(*x.shape[:2], self.heads, 3, -1)
        y = jax.nn.dot_product_attention(qkv[..., 0, :], qkv[..., 1, :], qkv[..., 2, :], is_causal=True)
        x = x + self.attention["out"](y.reshape(x.shape))
        return x + self.hidden["down"](jax.nn.gelu(self.hidden["up"](self.hidden_norm(x)), approximate=True))


class Gpt(nnx.Module):
    """Tokens [B, T] -> [B, T, vocabulary]; the output layer is the embedding."""

    def __init__(self, model: dict[str, Any], shape: Shape, outputs: int, rngs: nnx.Rngs, dtype: Any) -> None:
        self.token_embed = nnx.Embed(outputs, model["width"], dtype=dtype, rngs=rngs)
        self.position_embed = nnx.Embed(shape[0], model["width"], dtype=dtype, rngs=rngs)
        self.blocks = nnx.List(GptBlock(model["heads"], model["width"], rngs, dtype) for _ in range(model["layers"]))
        self.norm = nnx.LayerNorm(model["width"], use_bias=False, dtype=dtype, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        x = self.token_embed(x) + self.position_embed(jnp.arange(x.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.token_embed.attend(self.norm(x))


def _conv(into: int, out: int, size: int, stride: int, rngs: nnx.Rngs, dtype: Any) -> nnx.Conv:
    return nnx.Conv(into, out, (size, size), stride, padding=size // 2, use_bias=False, dtype=dtype, rngs=rngs)


def _batch_norm(features: int, rngs: nnx.Rngs, dtype: Any) -> nnx.BatchNorm:
    return nnx.BatchNorm(features, momentum=0.9, epsilon=1e-5, dtype=dtype, rngs=rngs)


class ResnetBlock(nnx.Module):
    """Two 3x3 convolutions, or a bottleneck of three, beside a shortcut."""

    def __init__(self, into: int, width: int, stride: int, deep: bool, rngs: nnx.Rngs, dtype: Any) -> None:
        self.out = 4 * width if deep else width
        plan = [(1, width, 1), (3, width, stride), (1, self.out, 1)] if deep else [(3, width, stride), (3, width, 1)]
        ins = [into, *(out for _, out, _ in plan)]
        self.convs = nnx.List(
            _conv(i, o, size, step, rngs, dtype) for i, (size, o, step) in zip(ins, plan, strict=False)
        )
        self.norms = nnx.List(_batch_norm(o, rngs, dtype) for _, o, _ in plan)
        projects = stride != 1 or into != self.out
        self.project = _conv(into, self.out, 1, stride, rngs, dtype) if projects else None
        self.project_norm = _batch_norm(self.out, rngs, dtype) if projects else None

    def __call__(self, x: Array) -> Array:
        shortcut = self.project_norm(self.project(x)) if self.project else x
        for conv, norm in zip(self.convs[:-1], self.norms[:-1], strict=True):
            x = jax.nn.relu(norm(conv(x)))
        return jax.nn.relu(shortcut + self.norms[-1](self.convs[-1](x)))


class Resnet(nnx.Module):
    """[B, H, W, C] -> [B, outputs]: the ImageNet form of 18 or 50 layers."""

    def __init__(self, model: dict[str, Any], shape: Shape, outputs: int, rngs: nnx.Rngs, dtype: Any) -> None:
        counts, deep = {18: (2, 2, 2, 2), 50: (3, 4, 6, 3)}[model["depth"]], model["depth"] == 50
        self.stem = _conv(shape[-1], model["width"], 7, 2, rngs, dtype)
        self.stem_norm = _batch_norm(model["width"], rngs, dtype)
        blocks: list[ResnetBlock] = []
        features = model["width"]
        for stage, count in enumerate(counts):
            for i in range(count):
                stride = 2 if stage and not i else 1
                blocks.append(ResnetBlock(features, model["width"] * 2**stage, stride, deep, rngs, dtype))
                features = blocks[-1].out
        self.blocks = nnx.List(blocks)
        self.head = nnx.Linear(features, outputs, dtype=dtype, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        x = jax.nn.relu(self.stem_norm(self.stem(x)))
        x = nnx.max_pool(x, window_shape=(3, 3), strides=(2, 2), padding=((1, 1), (1, 1)))
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((1, 2)))


class TcnBlock(nnx.Module):
    """Two dilated causal convolutions beside a shortcut."""

    def __init__(self, into: int, out: int, size: int, dilation: int, rngs: nnx.Rngs, dtype: Any) -> None:
        def conv(into: int) -> nnx.Conv:
            return nnx.Conv(
                into,
                out,
                (size,),
                kernel_dilation=(dilation,),
                padding="CAUSAL",
                use_bias=False,
                dtype=dtype,
                rngs=rngs,
            )

        self.convs = nnx.List([conv(into), conv(out)])
        self.norms = nnx.List(nnx.LayerNorm(out, dtype=dtype, rngs=rngs) for _ in range(2))
        self.project = nnx.Linear(into, out, dtype=dtype, rngs=rngs) if into != out else None

    def __call__(self, x: Array) -> Array:
        shortcut = self.project(x) if self.project else x
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = jax.nn.relu(norm(conv(x)))
        return jax.nn.relu(shortcut + x)


class Tcn(nnx.Module):
    """[B, T, C] -> [B, outputs], from the last step."""

    def __init__(self, model: dict[str, Any], shape: Shape, outputs: int, rngs: nnx.Rngs, dtype: Any) -> None:
        widths = [shape[1], *model["channels"]]
        self.blocks = nnx.List(
            TcnBlock(i, o, model["kernel_size"], 2**number, rngs, dtype)
            for number, (i, o) in enumerate(zip(widths, model["channels"], strict=False))
        )
        self.head = nnx.Linear(widths[-1], outputs, dtype=dtype, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        for block in self.blocks:
            x = block(x)
        return self.head(x[:, -1])


NETS = {"mlp": Mlp, "gpt": Gpt, "resnet": Resnet, "tcn": Tcn}


def make(
    model: dict[str, Any], shape: Shape, outputs: int, weights: dict[str, Any] | None = None, dtype: Any = None
) -> nnx.Module:
    """The network, with given weights or its own. dtype: of the computation; parameters stay float32."""
    net = NETS[model["kind"]](model, shape, outputs, nnx.Rngs(0), dtype)
    if weights is None:
        return net
    params = dict(nnx.to_flat_state(nnx.state(net, nnx.Param)))
    assert {".".join(map(str, path)) for path in params} == set(weights)
    for path, param in params.items():
        value = weights[".".join(map(str, path))]
        assert param.shape == value.shape, path
        param[...] = jnp.asarray(value)
    return net
