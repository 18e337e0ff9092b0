"""Learning-rate schedules as functions of `updates` (0-based count of updates done), never of epochs.

The first update uses rate(0): with a warm-up that is 0, as in optax.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
import optax

from jaxtrain.config import schema
from jaxtrain.config.durations import to_steps

Steps = Callable[[int | str], int]


def _constant(c: schema.Constant, peak_lr: float, total: int, steps: Steps) -> optax.Schedule:
    return optax.constant_schedule(peak_lr)


def _linear(c: schema.Linear, peak_lr: float, total: int, steps: Steps) -> optax.Schedule:
    return optax.linear_schedule(peak_lr, peak_lr * c.end_factor, max(total - steps(c.warmup), 1))


def _cosine(c: schema.Cosine, peak_lr: float, total: int, steps: Steps) -> optax.Schedule:
    return optax.cosine_decay_schedule(peak_lr, max(total - steps(c.warmup), 1), alpha=c.end_factor)


def _one_cycle(c: schema.OneCycle, peak_lr: float, total: int, steps: Steps) -> optax.Schedule:
    up = min(max(steps(c.warmup), 1), total)
    # Smith & Topin 2018: cosine up, cosine down.
    rise = optax.cosine_decay_schedule(1.0, up)
    fall = optax.cosine_decay_schedule(peak_lr, max(total - up, 1), alpha=c.end_factor)
    start = peak_lr * c.start_factor
    return optax.join_schedules([lambda n: peak_lr - (peak_lr - start) * rise(n), fall], [up])


def _wsd(c: schema.Wsd, peak_lr: float, total: int, steps: Steps) -> optax.Schedule:
    decay = max(steps(c.decay), 1)
    stable = max(total - steps(c.warmup) - decay, 0)
    return optax.linear_schedule(peak_lr, peak_lr * c.end_factor, decay, transition_begin=stable)


def _exponential(c: schema.Exponential, peak_lr: float, total: int, steps: Steps) -> optax.Schedule:
    return optax.exponential_decay(peak_lr, max(steps(c.decay_every), 1), c.decay_factor)


def _piecewise(c: schema.Piecewise, peak_lr: float, total: int, steps: Steps) -> optax.Schedule:
    warmup = steps(c.warmup)
    scales: dict[int, float] = {}
    for boundary, factor in zip(c.boundaries, c.factors, strict=True):
        at = max(steps(boundary) - warmup, 0)
        scales[at] = scales.get(at, 1.0) * factor
    return optax.piecewise_constant_schedule(peak_lr, scales)


def _inverse_sqrt(c: schema.InverseSqrt, peak_lr: float, total: int, steps: Steps) -> optax.Schedule:
    timescale = float(max(steps(c.timescale), 1))
    return lambda n: peak_lr * jnp.sqrt(timescale / (timescale + n))


SCHEDULES: dict[str, Callable[..., optax.Schedule]] = {
    "constant": _constant,
    "linear": _linear,
    "cosine": _cosine,
    "one_cycle": _one_cycle,
    "wsd": _wsd,
    "exponential": _exponential,
    "piecewise": _piecewise,
    "inverse_sqrt": _inverse_sqrt,
}


def make_schedule(config: schema.Schedule, peak_lr: float, *, total_steps: int, steps_per_epoch: int) -> optax.Schedule:
    """`updates` (int32 array) -> learning rate (float32), for a run of `total_steps` updates."""

    def steps(duration: int | str) -> int:
        return to_steps(duration, steps_per_epoch=steps_per_epoch, total_steps=total_steps)

    after = SCHEDULES[config.kind](config, peak_lr, total_steps, steps)
    warmup = 0 if isinstance(config, schema.OneCycle) else steps(config.warmup)
    if not warmup:
        return after
    return optax.join_schedules([optax.linear_schedule(0.0, peak_lr, warmup), after], [warmup])
