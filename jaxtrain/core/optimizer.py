"""Optimizers as optax chains that give a *direction*: the step multiplies it by -lr(updates) and adds it.

The learning rate stays outside, so that one counter (`updates` of the state) drives the schedule. Clipping is in the
step, where the norm is known already. Moments are fp32 unless `moment_dtype` says otherwise: bfloat16 is for the first
ones only, int8 for all (core/moments.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import optax
from optax import contrib

from jaxtrain.config import schema
from jaxtrain.core.moments import in_blocks


def decays(params: Mapping[str, Any]) -> dict[str, bool]:
    """The weight-decay mask: matrices and kernels yes; biases, norms (all that is 0-D or 1-D) and embeddings no."""
    return {name: p.ndim - is_stacked(name) >= 2 and not _is_embedding(name) for name, p in params.items()}


def is_stacked(name: str) -> bool:
    """Whether the first axis counts the blocks of a stack (models.layers.Stack)."""
    return "stacked" in name.split(".")


def _is_embedding(name: str) -> bool:
    return "embed" in name.lower()


def _decay(weight_decay: float) -> list[optax.GradientTransformation]:
    return [optax.add_decayed_weights(weight_decay, mask=decays)] if weight_decay else []


def _dtype(name: str) -> Any:
    return jnp.bfloat16 if name == "bfloat16" else None


def _sgd(c: schema.Sgd) -> optax.GradientTransformation:
    return optax.chain(*_decay(c.weight_decay), optax.identity())


def _momentum(c: schema.Momentum) -> optax.GradientTransformation:
    trace = optax.trace(c.momentum, c.nesterov, accumulator_dtype=_dtype(c.moment_dtype))
    return optax.chain(*_decay(c.weight_decay), trace)


def _adam(c: schema.Adam) -> optax.GradientTransformation:
    return optax.scale_by_adam(c.b1, c.b2, c.eps, mu_dtype=_dtype(c.moment_dtype))


def _adamw(c: schema.Adamw) -> optax.GradientTransformation:
    adam = optax.scale_by_adam(c.b1, c.b2, c.eps, mu_dtype=_dtype(c.moment_dtype))
    return optax.chain(adam, *_decay(c.weight_decay))


def _lion(c: schema.Lion) -> optax.GradientTransformation:
    return optax.chain(optax.scale_by_lion(c.b1, c.b2, mu_dtype=_dtype(c.moment_dtype)), *_decay(c.weight_decay))


def _muon(c: schema.Muon) -> optax.GradientTransformation:
    """Muon for matrices and kernels (all axes but the last are the input side), Adam for the rest."""

    def dimensions(params: Mapping[str, Any]) -> dict[str, contrib.MuonDimensionNumbers | None]:
        return {
            name: contrib.MuonDimensionNumbers(tuple(range(is_stacked(name), p.ndim - 1)), p.ndim - 1)
            # optax also asks about masked leaves
            if getattr(p, "ndim", 0) - is_stacked(name) >= 2 and not _is_embedding(name)
            else None
            for name, p in params.items()
        }

    # optax builds the rate in; a rate of -1 leaves the direction as it is.
    return contrib.muon(
        learning_rate=-1.0,
        ns_steps=c.ns_steps,
        beta=c.momentum,
        weight_decay=c.weight_decay,  # falls on the matrices alone
        mu_dtype=_dtype(c.moment_dtype),
        adam_b1=c.b1,
        adam_b2=c.b2,
        adam_learning_rate=-c.adam_lr_factor,
        muon_weight_dimension_numbers=dimensions,
    )


def _adafactor(c: schema.Adafactor) -> optax.GradientTransformation:
    return optax.chain(
        optax.scale_by_factored_rms(decay_rate=c.decay_rate, min_dim_size_to_factor=c.min_dim_size_to_factor),
        optax.clip_by_block_rms(c.clipping_threshold),
        *_decay(c.weight_decay),
    )


def _lamb(c: schema.Lamb) -> optax.GradientTransformation:
    return optax.chain(optax.scale_by_adam(c.b1, c.b2, c.eps), *_decay(c.weight_decay), optax.scale_by_trust_ratio())


OPTIMIZERS: dict[str, Callable[..., optax.GradientTransformation]] = {
    "sgd": _sgd,
    "momentum": _momentum,
    "adam": _adam,
    "adamw": _adamw,
    "lion": _lion,
    "muon": _muon,
    "adafactor": _adafactor,
    "lamb": _lamb,
}


def make_optimizer(config: schema.Optimizer) -> optax.GradientTransformation:
    """The optax chain of a config; its update is a direction, to be multiplied by -lr."""
    optimizer = OPTIMIZERS[config.kind](config)
    if getattr(config, "moment_dtype", "float32") == "int8":
        return in_blocks(optimizer, whole=_is_embedding)
    return optimizer
