"""From the losses of a learning-rate range test to one learning rate, or to none and the reason.

In: the learning rates of the test and the losses of several seeds. Out: a Suggestion; and, while a test runs, when to
stop it. Nothing is run or drawn here. The loss is seen over log10(lr), never over lr: on a linear axis nearly all
points lie next to each other at zero, and noise divided by their tiny distance beats every true slope.

Range test: L. Smith, "Cyclical Learning Rates for Training Neural Networks", WACV 2017. The constants were chosen on
the curves of tests/tune/tune_helpers.py, on other seeds than those that the tests assert on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

RULES = ("valley", "steepest", "minimum/10")
"""valley: the middle of the longest descent. steepest: where the loss falls fastest per decade of lr. minimum/10: a
tenth of the lr of the least loss. The first and the last are rules of fastai's learning-rate finder."""

AGREE = 10.0
"""Rules further apart than this factor are no answer."""
FEWEST = 12
"""Learning rates before divergence; less are no curve."""
CLEAR = 6.0
"""Standard errors by which the loss has to fall: fewer than 1 in 10,000 flat curves do, also with heavy tails."""
_LEAST_NOISE = 1e-3
"""Of the loss at small lr: a curve without noise is flat too when it falls by less than CLEAR times this or so."""
_NARROW, _WIDE = 0.4, 0.8
"""Half widths of the kernel in decades: for the loss, and for its slope, which noise hurts more."""
_POINTS = 3
"""So many points to each side are in a kernel at least, where they are sparse."""
_LEFT = 0.25
"""The descent begins where the loss has made this share of its fall: its slow start still looks like the plateau."""


@dataclass(frozen=True)
class Suggestion:
    """lr: None is a refusal. why: one line, the reason and the rules' values. rules: {name of RULES: lr or None}.

    smoothed: the smoothed mean of the seeds [N]; NaN from the divergence on.
    """

    lr: float | None
    why: str
    rules: dict[str, float | None]
    smoothed: np.ndarray


@dataclass(frozen=True)
class StopRule:
    """A test has diverged when its average loss is above `factor` times the best average so far.

    decay: of the exponential average, a loss. after: so many losses are too few to judge by.
    """

    factor: float = 4.0
    decay: float = 0.8
    after: int = 10


class Stopper:
    """Watches one running test, loss by loss. Its average is corrected for its start at zero, as Adam's are."""

    def __init__(self, rule: StopRule | None = None) -> None:
        self._rule = rule or StopRule()
        self._count, self._sum, self._best = 0, 0.0, math.inf

    def diverged(self, loss: float) -> bool:
        """Take the next loss and say whether the test is over. A loss that is not finite always ends it."""
        if not math.isfinite(loss):
            return True
        rule = self._rule
        self._count += 1
        self._sum = rule.decay * self._sum + (1 - rule.decay) * loss
        average = self._sum / (1 - rule.decay**self._count)
        # factor x best, in a form that is right for a loss below zero too.
        limit = self._best + (rule.factor - 1) * abs(self._best)
        self._best = min(self._best, average)
        return self._count > rule.after and average > limit


def suggest(lrs: np.ndarray, losses: np.ndarray) -> Suggestion:
    """The median of the three rules, if the loss clearly falls, the range holds its fall, and the rules agree.

    lrs [N], positive and rising, log-spaced; losses [S, N] of S seeds, not finite from where a seed was stopped.
    Raises ValueError for other shapes or learning rates.
    """
    lrs, losses = _checked(lrs, losses)
    mean = _mean(losses)
    count = len(mean)
    smoothed = np.full(len(lrs), np.nan)
    rules: dict[str, float | None] = dict.fromkeys(RULES)
    if count < FEWEST:
        why = f"only {count} learning rates before divergence, {FEWEST} are needed: start lower or take more steps"
        return Suggestion(None, f"no suggestion: {why}", rules, smoothed)
    early = max(count // 4, 5)
    start = float(np.median(mean[:early]))
    noise = max(_noise(losses[:, :count], mean), _LEAST_NOISE * abs(start))
    # What lies above the start is divergence, which a kernel would carry down into the valley.
    kept = np.minimum(mean, start + 3 * noise)
    x = np.log10(lrs[:count])
    heights, slopes = _lines(x, _NARROW)[0], _lines(x, _WIDE)[1]
    smooth, slope = heights @ kept, slopes @ kept
    smoothed[:count] = smooth
    least = int(np.argmin(smooth))
    fall = start - float(smooth[least])
    # Of a weighted sum and of a median, whose variance is pi / 2 times that of a mean.
    error = noise * math.sqrt(float((heights[least] ** 2).sum()) + math.pi / 2 / early)
    if not fall > CLEAR * error:
        why = f"the curve is flat: the loss falls by {fall:.2g}, its noise needs {CLEAR * error:.2g} to be sure"
        return Suggestion(None, f"no suggestion: {why}", rules, smoothed)
    steepest = int(np.argmin(slope[: least + 1]))
    high = np.flatnonzero(smooth[: least + 1] >= start - _LEFT * fall)
    first = int(high[-1]) if len(high) else 0
    middle = first + valley(smooth[first : least + 1])
    found = [float(lrs[middle]), float(lrs[steepest]), float(lrs[least]) / 10]
    rules.update(zip(RULES, found, strict=True))
    values = ", ".join(f"{name} {lr:.1e}" for name, lr in zip(RULES, found, strict=True))
    falling = count == len(lrs) and least == count - 1 and slope[-1] < slope[steepest] / 2
    apart = max(found) / min(found)
    if falling:
        trouble = f"the loss still falls at the largest lr {lrs[-1]:.1e}: end higher"
    elif apart > AGREE:
        trouble = f"the rules are {apart:,.1f}x apart, more than {AGREE:g}x"
    elif steepest == 0:
        trouble = f"the loss falls from the smallest lr {lrs[0]:.1e} on: start lower"
    else:
        return Suggestion(float(np.median(found)), f"the median of {values}", rules, smoothed)
    return Suggestion(None, f"no suggestion: {trouble} ({values})", rules, smoothed)


def valley(losses: np.ndarray) -> int:
    """The place in the middle of the longest falling subsequence of `losses` [N]; of equals, the first to end."""
    length = np.ones(len(losses), np.int64)
    for i in range(1, len(losses)):
        length[i] += max(length[:i][losses[:i] > losses[i]], default=0)
    end = int(np.argmax(length))
    return end - int(length[end]) // 2


def _checked(lrs: np.ndarray, losses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    lrs, losses = np.asarray(lrs, np.float64), np.asarray(losses, np.float64)
    if losses.ndim != 2 or lrs.shape != losses.shape[1:]:
        raise ValueError(f"losses {list(losses.shape)} are not [seeds, N] of lrs {list(lrs.shape)}")
    if not (np.isfinite(lrs).all() and (lrs > 0).all() and (np.diff(lrs) > 0).all()):
        raise ValueError("learning rates have to be positive, finite and rising")
    return lrs, losses


def _mean(losses: np.ndarray) -> np.ndarray:
    """Of the seeds [n], while more than half of them live and their mean has not diverged."""
    there = np.isfinite(losses)
    alive = there.sum(0) > len(losses) / 2
    count = len(alive) if alive.all() else int(np.argmin(alive))
    mean = np.where(there, losses, 0.0)[:, :count].sum(0) / there[:, :count].sum(0)
    stopper = Stopper()
    end = next((i for i, loss in enumerate(mean.tolist()) if stopper.diverged(loss)), count)
    return np.asarray(mean[:end])


def _noise(losses: np.ndarray, mean: np.ndarray) -> float:
    """The standard deviation of a point of the mean, from the median step to the next: trend and spikes hardly count.

    Of two estimates the larger: seeds may have seen the same batches; a single curve is less sure of its noise.
    """
    steps = np.abs(np.diff(losses, axis=1))
    single = float(np.median(steps[np.isfinite(steps)])) / math.sqrt(len(losses))
    # 0.6745: the median of |z|; a step has two points' noise.
    return max(single, float(np.median(np.abs(np.diff(mean))))) / (0.6745 * math.sqrt(2))


def _lines(x: np.ndarray, width: float) -> tuple[np.ndarray, np.ndarray]:
    """Matrices [n, n] that make of y [n] its height and its slope at each x: of a line fitted with tricube weights.

    Cleveland, "Robust Locally Weighted Regression", JASA 1979. Centred: it does not lag as a running average does.
    """
    away = x[None, :] - x[:, None]
    reach = np.maximum(width, (_POINTS + 0.5) * np.gradient(x))[:, None]
    weight = np.maximum(1 - np.abs(away / reach) ** 3, 0) ** 3
    s0, s1, s2 = ((weight * away**power).sum(1)[:, None] for power in (0, 1, 2))
    area = s0 * s2 - s1**2
    return weight * (s2 - s1 * away) / area, weight * (s0 * away - s1) / area
