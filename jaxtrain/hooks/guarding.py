"""Hooks that see training go wrong and want it back at a sealed step from before (contract 7)."""

from __future__ import annotations

import logging
import math
import statistics
from collections import deque
from collections.abc import Callable
from typing import Any

from jaxtrain.core.state import State
from jaxtrain.loop import Action, Hook, Look, Rollback

log = logging.getLogger("jaxtrain")


class SkipLimit(Hook):
    """Goes back when `limit` updates in a row were not finite: it would not recover by itself."""

    def __init__(self, limit: int) -> None:
        self._limit = limit

    def on_metrics(self, step: int, figures: dict[str, float]) -> Action | None:
        in_row = int(figures["in_row"])
        if in_row < self._limit:
            return None
        reason = f"{in_row} updates in a row were not finite (guard.max_skips {self._limit})"
        return Rollback(step - in_row + 1, step, reason)


class NameSkipped(Hook):
    """Names the rows for which updates were skipped, the first TOLD times: it reads the batches of a row again.

    name: (state, first step, last step) -> the rows of their batches that are not finite, in words, or "".
    every: steps of a row.
    """

    TOLD = 3

    def __init__(self, name: Callable[[State, int, int], str], every: int) -> None:
        self._name, self._every, self._told = name, every, 0

    def on_metrics(self, step: int, figures: dict[str, float]) -> Action | None:
        if not figures.get("skipped") or self._told == self.TOLD:
            return None
        self._told += 1

        def at(state: State) -> None:
            words = self._name(state, step - (step - 1) % self._every, step)
            if words:
                log.warning("skipped up to step %d: %s", step, words)

        return Look(at)


class LossSpike(Hook):
    """Goes back when the loss of a row lies more than `limit` robust deviations above those of the rows before.

    A deviation is 1.4826 times the median absolute deviation from the median (Iglewicz & Hoaglin 1993), over the last
    ROWS rows; at least LEAST of them, and at least SMALLEST of the median, so that a loss that stands still has one.
    every: steps of a row; what a stop writes between two rows is left alone, as a run without the stop has none.
    """

    ROWS, LEAST, SMALLEST = 50, 10, 1e-3

    def __init__(self, limit: float, every: int) -> None:
        self._limit, self._every = limit, every
        self._losses: deque[float] = deque(maxlen=self.ROWS)

    def on_metrics(self, step: int, figures: dict[str, float]) -> Action | None:
        loss = figures["loss"]
        if step % self._every or not math.isfinite(loss):
            return None
        if len(self._losses) >= self.LEAST:
            middle = statistics.median(self._losses)
            spread = 1.4826 * statistics.median(abs(x - middle) for x in self._losses)
            score = (loss - middle) / max(spread, self.SMALLEST * abs(middle), 1e-30)
            if score > self._limit:
                reason = (
                    f"train/loss {loss:.4g} lies {score:.1f} deviations above {middle:.4g}, the median of "
                    f"{len(self._losses)} rows (guard.loss_spike {self._limit:g})"
                )
                return Rollback(step - self._every + 1, step, reason)
        self._losses.append(loss)
        return None

    def state_dict(self) -> dict[str, Any]:
        return {"losses": list(self._losses)}

    def load_state_dict(self, values: dict[str, Any]) -> None:
        self._losses = deque(values["losses"], maxlen=self.ROWS)
