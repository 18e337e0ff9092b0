"""Temporal convolutional network (Bai, Kolter & Koltun 2018): residual blocks of two dilated causal convolutions."""

from __future__ import annotations

import jax
from flax import nnx

from jaxtrain.config import schema
from jaxtrain.config.errors import ConfigError
from jaxtrain.models.conv import Conv
from jaxtrain.models.layers import ACTIVATIONS, INITIALISERS, NORMS, Dense, call_block


class Block(nnx.Module):
    """[B, T, C] -> [B, T, out]: step t depends on steps t - 2 x (kernel_size - 1) x dilation .. t.

    With norm=group also on the row's other steps, and in training with norm=batch on all of the batch's.
    """

    def __init__(self, config: schema.Tcn, features: int, out: int, dilation: int, *, rngs: nnx.Rngs) -> None:
        init = INITIALISERS[config.init]

        def conv(into: int) -> Conv:
            return Conv(
                into,
                out,
                kernel_size=(config.kernel_size,),
                kernel_dilation=(dilation,),
                padding="CAUSAL",
                use_bias=config.norm == "none",
                kernel_init=init,
                rngs=rngs,
            )

        self.convs = nnx.List([conv(features), conv(out)])
        self.norms = nnx.List([NORMS[config.norm](out, rngs) for _ in range(2)])
        # A whole channel of a row is dropped, as neighbouring steps are alike (Bai et al. 2018).
        self.dropout = nnx.Dropout(config.dropout, broadcast_dims=(1,), rngs=rngs)
        self.project = Dense(features, out, kernel_init=init, rngs=rngs) if features != out else None
        self.activation = ACTIVATIONS[config.activation]

    def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        shortcut = x if self.project is None else self.project(x)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = self.dropout(self.activation(norm(conv(x), mask)))
        return self.activation(shortcut + x)


class Tcn(nnx.Module):
    """x: [B, T] or [B, T, C] -> [B, outputs] (output=row, from the last step) or [B, T, outputs / T] (output=step)."""

    def __init__(self, config: schema.Tcn, shape: tuple[int, ...], outputs: int, *, rngs: nnx.Rngs) -> None:
        steps, features = shape[0], shape[1] if len(shape) == 2 else 1
        self.each_step = config.output == "step"
        if self.each_step and outputs % steps:
            raise ConfigError(
                f"model.output=step: rows have {steps} steps and {outputs} target values; the same number for each "
                "step is needed (model.output=row gives some for the whole row)"
            )
        blocks = []
        for i, out in enumerate(config.channels):
            blocks.append(Block(config, features, out, 2**i, rngs=rngs))
            features = out
        self.blocks = nnx.List(blocks)
        wide = outputs // steps if self.each_step else outputs
        self.head = Dense(features, wide, kernel_init=INITIALISERS[config.init], rngs=rngs)
        self.remat = config.remat

    def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        x = x[..., None] if x.ndim == 2 else x
        for block in self.blocks:
            x = call_block(block, x, mask, self.remat)
        return self.head(x if self.each_step else x[:, -1])
