"""Durations: `500` (steps), "20ep", "5%" of the run, and "30s", "5m", "2h" for periods of wall time.

They stay as written in the config and are turned into steps in one place, `to_steps`.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction
from numbers import Integral
from typing import Annotated

from pydantic import BeforeValidator

_STEPS = re.compile(r"(\d+(?:\.\d+)?)(ep|%)")
_CLOCK = re.compile(r"(\d+(?:\.\d+)?)(s|m|h)")
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}
_ALLOWED = 'steps (500), epochs ("20ep") or a share of the run ("5%")'


def _check(value: object, *, clock: bool) -> int | str:
    if isinstance(value, str) and re.fullmatch(r"\d+", value):
        value = int(value)
    allowed = _ALLOWED + (' or wall time ("30s", "5m", "2h")' if clock else "")
    if isinstance(value, Integral) and not isinstance(value, bool):
        if value < 0:
            raise ValueError(f"must not be negative; allowed: {allowed}")
        return int(value)
    if isinstance(value, str):
        if (share := _STEPS.fullmatch(value)) and share[2] == "%" and float(share[1]) > 100:
            raise ValueError(f"more than the whole run; allowed: {allowed}")
        if share or (clock and to_seconds(value)):
            return value
    raise ValueError(f"allowed: {allowed}")


def _check_seconds(value: object) -> float | str | None:
    if value is None or (isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf):
        return value
    if isinstance(value, str) and to_seconds(value):
        return value
    raise ValueError('allowed: seconds (90) or "30s", "5m", "2h"')


StepDuration = Annotated[int | str, BeforeValidator(lambda v: _check(v, clock=False))]
"""A length in steps, epochs or percent of the run."""

Period = Annotated[int | str, BeforeValidator(lambda v: _check(v, clock=True))]
"""A distance between events: as StepDuration, or wall time."""

Seconds = Annotated[float | str | None, BeforeValidator(_check_seconds)]
"""An amount of wall time."""


def to_steps(duration: int | str, *, steps_per_epoch: int, total_steps: int | None = None) -> int:
    """Turn a step-like duration into whole steps (rounded up; zero stays zero).

    Raises ValueError for a percentage when there is no total to take it of.
    """
    if isinstance(duration, int):
        return duration
    match = _STEPS.fullmatch(duration)
    if match is None:
        raise ValueError(f"{duration!r} is not a number of steps; allowed: {_ALLOWED}")
    amount = Fraction(match[1])  # exact: 1.1 epochs of 10 steps are 11 steps, not 12
    if match[2] == "ep":
        return math.ceil(amount * steps_per_epoch)
    if total_steps is None:
        raise ValueError(f"{duration!r}: a percentage needs a total; allowed here: steps or epochs")
    return math.ceil(amount * total_steps / 100)


def to_seconds(duration: float | str | None) -> float | None:
    """Seconds of a wall-time duration, or None when the value counts steps (or is None)."""
    if isinstance(duration, str):
        match = _CLOCK.fullmatch(duration)
        return float(match[1]) * _SECONDS[match[2]] if match else None
    return duration


def period(duration: int | str, *, steps_per_epoch: int, total_steps: int) -> tuple[int, float | None]:
    """A period as (steps, seconds): one of the two is set; steps is 0 for wall time or "never" (0)."""
    seconds = to_seconds(duration) if isinstance(duration, str) else None
    if seconds is not None:
        return 0, seconds
    return to_steps(duration, steps_per_epoch=steps_per_epoch, total_steps=total_steps), None
