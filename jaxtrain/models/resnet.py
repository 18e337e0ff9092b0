"""Residual networks (He et al. 2015): the CIFAR form (8 20 32 56) and the ImageNet form (18 34 50).

Convolutions pad as PyTorch does (3x3: 1, 7x7: 3), so that published weights fit without a shift of half a pixel.
"""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from jaxtrain.config import schema
from jaxtrain.models.conv import Conv, max_pool
from jaxtrain.models.layers import ACTIVATIONS, INITIALISERS, NORMS, call_block

_STAGES = {
    **{depth: ((depth - 2) // 6,) * 3 for depth in (8, 20, 32, 56)},
    18: (2, 2, 2, 2),
    34: (3, 4, 6, 3),
    50: (3, 4, 6, 3),
}


def _conv(config: schema.Resnet, features: int, out: int, size: int, stride: int, rngs: nnx.Rngs) -> Conv:
    return Conv(
        features,
        out,
        kernel_size=(size, size),
        strides=(stride, stride),
        padding=size // 2,
        use_bias=config.norm == "none",
        kernel_init=INITIALISERS[config.init],
        rngs=rngs,
    )


class Block(nnx.Module):
    """Two 3x3 convolutions (basic) or 1x1, 3x3, 1x1 (bottleneck, output four times as wide), and a shortcut."""

    def __init__(
        self, config: schema.Resnet, features: int, width: int, stride: int, drop: float, rngs: nnx.Rngs
    ) -> None:
        bottleneck = config.depth == 50
        self.out = width * 4 if bottleneck else width
        plan = (
            [(1, width, 1), (3, width, stride), (1, self.out, 1)] if bottleneck else [(3, width, stride), (3, width, 1)]
        )
        convs, norms, into = [], [], features
        for size, out, step in plan:
            convs.append(_conv(config, into, out, size, step, rngs))
            norms.append(NORMS[config.norm](out, rngs))
            into = out
        self.convs, self.norms = nnx.List(convs), nnx.List(norms)
        projects = stride != 1 or features != self.out
        self.project = _conv(config, features, self.out, 1, stride, rngs) if projects else None
        self.project_norm = NORMS[config.norm](self.out, rngs) if projects else None
        # Stochastic depth (Huang et al. 2016): the whole branch of a row is dropped, the shortcut stays.
        self.drop_path = nnx.Dropout(drop, broadcast_dims=(1, 2, 3), rngs=rngs)
        self.activation = ACTIVATIONS[config.activation]

    def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        shortcut, last = x, len(self.convs) - 1
        for i, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            x = norm(conv(x), mask)
            x = x if i == last else self.activation(x)
        if self.project is not None:
            shortcut = self.project_norm(self.project(shortcut), mask)  # type: ignore[misc]
        return self.activation(shortcut + self.drop_path(x))


class Resnet(nnx.Module):
    """x: [B, H, W, C] -> [B, outputs]."""

    def __init__(self, config: schema.Resnet, shape: tuple[int, ...], outputs: int, *, rngs: nnx.Rngs) -> None:
        stages = _STAGES[config.depth]
        self.imagenet = len(stages) == 4
        width = config.width
        self.stem = _conv(config, shape[-1], width, 7 if self.imagenet else 3, 2 if self.imagenet else 1, rngs)
        self.stem_norm = NORMS[config.norm](width, rngs)
        blocks: list[Any] = []
        features, total = width, sum(stages)
        for stage, count in enumerate(stages):
            for i in range(count):
                stride = 2 if stage > 0 and i == 0 else 1
                drop = config.stochastic_depth * (len(blocks) + 1) / total
                blocks.append(Block(config, features, width * 2**stage, stride, drop, rngs))
                features = blocks[-1].out
        self.blocks = nnx.List(blocks)
        self.dropout = nnx.Dropout(config.dropout, rngs=rngs)
        self.head = nnx.Linear(features, outputs, kernel_init=INITIALISERS[config.init], rngs=rngs)
        self.activation = ACTIVATIONS[config.activation]
        self.remat = config.remat

    def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        x = self.activation(self.stem_norm(self.stem(x), mask))
        if self.imagenet:
            x = max_pool(x, 3, 2, 1)
        for block in self.blocks:
            x = call_block(block, x, mask, self.remat)
        return self.head(self.dropout(x.mean((1, 2))))
