"""Range tests whose best learning rate is known: a noisy quadratic, a formula, and curves with nothing to find.

The quadratic is the usual model of training with small batches (Zhang et al., "Which Algorithmic Choices Matter at
Which Batch Sizes?", 2019): loss = floor + sum(h x^2) / 2, and the gradient of direction h has noise of variance s2 h.
The expected loss after T steps of SGD with one lr is known in closed form; the lr of the least one defines `best`. The
noise s2 is such that this is the drawn factor below the edge 2 / max(h). The range test is SGD on the same model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jaxtrain.tune.lr_rules import Stopper

TUNED, ASSERTED = (2, 3, 4, 5), 1000
"""Seeds of curves: those that the constants of lr_rules.py were checked on while they were chosen (the first choice was
made on curves of a draft of this file), and the one that tests assert on, first drawn when all was chosen."""
STARTS = (2.3, 10.0, 1.0)
"""Losses before training: ten classes, a regression, a regression of normed targets."""


class Curve(NamedTuple):
    """best: NaN where there is none. noise: of the observed losses, relative. lrs [N], losses [S, N]."""

    best: float
    noise: float
    lrs: np.ndarray
    losses: np.ndarray


@dataclass(frozen=True)
class Quadratic:
    """h [D]: curvatures. x2 [D]: squared distances from the minimum at first. s2: variance of gradients, by h."""

    floor: float
    h: np.ndarray
    x2: np.ndarray
    s2: float

    def expected(self, lrs: np.ndarray, steps: int) -> np.ndarray:
        """The loss after training with each of lrs [L] for so many steps."""
        bias, noise = self.parts(lrs, steps)
        return self.floor + bias + self.s2 * noise

    def parts(self, lrs: np.ndarray, steps: int) -> tuple[np.ndarray, np.ndarray]:
        """What is left of the first error [L], and what gradient noise of s2 = 1 has added [L]."""
        lr = np.asarray(lrs)[:, None]
        keep = (1 - lr * self.h) ** 2
        left = keep**steps
        return (self.h * self.x2 * left).sum(1) / 2, ((lr * self.h) ** 2 * (1 - left) / (1 - keep)).sum(1) / 2

    def losses(self, lrs: np.ndarray, seeds: int, rng: np.random.Generator) -> np.ndarray:
        """Training with lrs[i] in step i: the loss before each step [S, N]."""
        x = np.sqrt(self.x2) * rng.choice([-1.0, 1.0], (seeds, len(self.h)))
        losses = np.empty((seeds, len(lrs)))
        with np.errstate(over="ignore", invalid="ignore"):  # it diverges
            for step, lr in enumerate(lrs):
                losses[:, step] = self.floor + (self.h * x * x).sum(1) / 2
                x = x - lr * (self.h * x + np.sqrt(self.s2 * self.h) * rng.standard_normal(x.shape))
        return losses


def quadratic(rng: np.random.Generator) -> tuple[Quadratic, float, int]:
    """A drawn model, its best lr, and the steps of training that this holds for.

    Drawn again where the best lr leaves less than 1 % of the error: there any of a wide range of lrs is as good.
    """
    while True:
        start, steps = rng.choice(STARTS), round(_log_uniform(rng, 300, 3000))
        floor = start * rng.uniform(0, 0.5)
        h = np.arange(1, 49) ** -rng.uniform(0.7, 1.5)
        x2 = h ** -rng.uniform(0, 0.7)
        model = Quadratic(floor, h, x2 * 2 * (start - floor) / (h * x2).sum(), 0.0)
        best = 2.0 / _log_uniform(rng, 5, 20)
        bias, noise = model.parts(best * np.array([1 - 1e-4, 1 + 1e-4]), steps)
        # Where the derivative of bias + s2 noise is zero.
        model = Quadratic(floor, h, model.x2, float((bias[0] - bias[1]) / (noise[1] - noise[0])))
        if model.expected(np.array([best]), steps)[0] - floor > 0.01 * (start - floor):
            return model, best, steps


def quadratics(seed: int, count: int, noise: tuple[float, float] = (0.0, 0.3), seeds: int = 3) -> list[Curve]:
    """best log-uniform in 1e-5..1, N in 60..200 over 1e-7 to 10..100, losses seen with relative noise in `noise`."""
    rng = np.random.default_rng(seed)
    curves = []
    for _ in range(count):
        model, own, _ = quadratic(rng)
        best, lrs = _log_uniform(rng, 1e-5, 1), _range(rng)
        # The model in units in which its best lr is the drawn one.
        losses = model.losses(lrs * own / best, seeds, rng)
        curves.append(_observed(best, lrs, losses, rng.uniform(*noise), rng))
    return curves


def formulas(seed: int, count: int, noise: tuple[float, float] = (0.0, 0.3), seeds: int = 3) -> list[Curve]:
    """As `quadratics`, without a model: a fall half done within 2x of best, a rise from 5 to 20 times best on."""
    rng = np.random.default_rng(seed)
    curves = []
    for _ in range(count):
        best, lrs, start = _log_uniform(rng, 1e-5, 1), _range(rng), rng.choice(STARTS)
        floor, middle = start * rng.uniform(0, 0.5), best * _log_uniform(rng, 0.5, 2)
        edge = best * _log_uniform(rng, 5, 20)
        fall = (start - floor) / (1 + (lrs / middle) ** rng.uniform(1, 3))
        rise = start * (lrs / edge) ** rng.uniform(2, 4)
        losses = np.tile(floor + fall + rise, (seeds, 1))
        curves.append(_observed(best, lrs, losses, rng.uniform(*noise), rng))
    return curves


def flats(seed: int, count: int, heavy: bool = False) -> list[Curve]:
    """No lr helps; every second one diverges somewhere. heavy: noise as of Student's t with 4 degrees of freedom."""
    rng = np.random.default_rng(seed)
    curves = []
    for place in range(count):
        lrs, start = _range(rng), rng.choice(STARTS)
        rise = (lrs / _log_uniform(rng, 1e-4, 10)) ** rng.uniform(1, 4) * (place % 2)
        losses = np.tile(start * (1 + rise), (3, 1))
        curves.append(_observed(math.nan, lrs, losses, rng.uniform(0.001, 0.3), rng, heavy))
    return curves


def stopped(losses: np.ndarray) -> np.ndarray:
    """As a runner leaves them: NaN from where the Stopper ended a seed."""
    losses = losses.copy()
    for seed in losses:
        stopper = Stopper()
        end = next((i for i, loss in enumerate(seed.tolist()) if stopper.diverged(loss)), len(seed))
        seed[end:] = np.nan
    return losses


def within(lr: float, best: float, factor: float = 5.0) -> bool:
    return 1 / factor <= lr / best <= factor


def _range(rng: np.random.Generator) -> np.ndarray:
    return np.geomspace(1e-7, _log_uniform(rng, 10, 100), rng.integers(60, 201))


def _observed(
    best: float, lrs: np.ndarray, losses: np.ndarray, noise: float, rng: np.random.Generator, heavy: bool = False
) -> Curve:
    drawn = rng.standard_t(4, losses.shape) / math.sqrt(2) if heavy else rng.standard_normal(losses.shape)
    return Curve(best, noise, lrs, stopped(losses * np.maximum(1 + noise * drawn, 0.05)))


def _log_uniform(rng: np.random.Generator, low: float, high: float) -> float:
    return math.exp(rng.uniform(math.log(low), math.log(high)))
