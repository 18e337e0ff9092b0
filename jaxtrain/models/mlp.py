"""Multi-layer perceptron on flattened inputs."""

from __future__ import annotations

import math
from itertools import pairwise

import jax
from flax import nnx

from jaxtrain.config import schema
from jaxtrain.models.layers import ACTIVATIONS, INITIALISERS, NORMS


class Mlp(nnx.Module):
    """x: [B, ...] -> [B, outputs]."""

    def __init__(self, config: schema.Mlp, shape: tuple[int, ...], outputs: int, *, rngs: nnx.Rngs) -> None:
        init = INITIALISERS[config.init]
        widths = (math.prod(shape), *config.hidden)
        self.layers = nnx.List(
            nnx.Linear(i, o, use_bias=config.norm == "none", kernel_init=init, rngs=rngs) for i, o in pairwise(widths)
        )
        self.norms = nnx.List(NORMS[config.norm](width, rngs) for width in config.hidden)
        self.dropout = nnx.Dropout(config.dropout, rngs=rngs)
        self.head = nnx.Linear(widths[-1], outputs, kernel_init=init, rngs=rngs)
        self.activation = ACTIVATIONS[config.activation]

    def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        x = x.reshape(x.shape[0], -1)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = self.activation(norm(layer(x), mask))
        return self.head(self.dropout(x))
