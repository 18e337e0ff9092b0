"""A plain convolutional network: 3x3 convolutions, each halved by pooling, then dense layers."""

from __future__ import annotations

from itertools import pairwise

import jax
from flax import nnx

from jaxtrain.config import schema
from jaxtrain.models.conv import Conv, max_pool
from jaxtrain.models.layers import ACTIVATIONS, INITIALISERS, NORMS, call_block


class ConvBlock(nnx.Module):
    """Convolution, normalisation, activation, 2x2 max pooling: [B, H, W, C] -> [B, ceil(H/2), ceil(W/2), out]."""

    def __init__(self, features: int, out: int, config: schema.Cnn, *, rngs: nnx.Rngs) -> None:
        self.conv = Conv(
            features,
            out,
            kernel_size=(3, 3),
            use_bias=config.norm == "none",
            kernel_init=INITIALISERS[config.init],
            rngs=rngs,
        )
        self.norm = NORMS[config.norm](out, rngs)
        self.activation = ACTIVATIONS[config.activation]

    def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        x = self.activation(self.norm(self.conv(x), mask))
        return max_pool(x, 2, 2, "SAME")


class Cnn(nnx.Module):
    """x: [B, H, W, C] -> [B, outputs]."""

    def __init__(self, config: schema.Cnn, shape: tuple[int, ...], outputs: int, *, rngs: nnx.Rngs) -> None:
        height, width, features = shape
        blocks = []
        for out in config.channels:
            blocks.append(ConvBlock(features, out, config, rngs=rngs))
            height, width, features = -(-height // 2), -(-width // 2), out
        self.blocks = nnx.List(blocks)
        init = INITIALISERS[config.init]
        widths = (height * width * features, *config.dense)
        self.dense = nnx.List(nnx.Linear(i, o, kernel_init=init, rngs=rngs) for i, o in pairwise(widths))
        self.dropout = nnx.Dropout(config.dropout, rngs=rngs)
        self.head = nnx.Linear(widths[-1], outputs, kernel_init=init, rngs=rngs)
        self.activation = ACTIVATIONS[config.activation]
        self.remat = config.remat

    def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        for block in self.blocks:
            x = call_block(block, x, mask, self.remat)
        x = x.reshape(x.shape[0], -1)
        for layer in self.dense:
            x = self.activation(layer(x))
        return self.head(self.dropout(x))
