"""Hooks that decide: when to evaluate, save, and stop. They return actions; `fit` carries them out."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from jaxtrain.config.errors import INTERRUPTED, PREEMPTED
from jaxtrain.hooks.notebook import kernel
from jaxtrain.loop import Action, EvaluateNow, Evaluation, Hook, SaveNow, Stop
from jaxtrain.parallel import processes
from jaxtrain.parallel.environment import HANDED_ON

TOGETHER = 1.0
"""Seconds within which signals are one, where a parent hands them on; it does so within 0.1 s."""

PREEMPTING = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name))
"""What a cluster announces the end with; Windows has no SIGUSR1."""


class BestSoFar:
    """The best figure seen. NaN and infinity are never an improvement (fault case loop_nan_metric)."""

    def __init__(self, mode: str, min_delta: float = 0.0) -> None:
        self._sign, self._min_delta = (1.0 if mode == "min" else -1.0), min_delta
        self.step: int | None = None
        self.value: float | None = None

    def update(self, step: int, value: float) -> bool:
        """Whether `value` is better than all before by more than min_delta; then it is kept."""
        if not math.isfinite(value):
            return False
        if self.value is not None and self._sign * (self.value - value) <= self._min_delta:
            return False
        self.step, self.value = step, value
        return True

    def state_dict(self) -> dict[str, Any]:
        """Step and value."""
        return {"step": self.step, "value": self.value}

    def load_state_dict(self, values: dict[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        self.step, self.value = values["step"], values["value"]


class Evaluator(Hook):
    """Evaluates every `every` steps (0: never) and at the last one."""

    def __init__(self, every: int, last: int) -> None:
        self._every, self._last = every, last

    def border(self, step: int) -> int | None:
        return step - step % self._every + self._every if self._every else None

    def after_step(self, step: int) -> Action | None:
        due = step == self._last or (self._every > 0 and step % self._every == 0)
        return EvaluateNow if due else None


class Saver(Hook):
    """Saves at the multiples of `periods` (0: none), at the last step, and when an evaluation is the best so far."""

    def __init__(self, periods: Sequence[int], last: int, metric: str, mode: str) -> None:
        self._periods, self._last, self._metric = [every for every in periods if every], last, metric
        self.best = BestSoFar(mode)
        self.evaluations = 0
        self._evaluated: tuple[int, dict[str, float]] = (-1, {})

    def border(self, step: int) -> int | None:
        return min((step - step % every + every for every in self._periods), default=None)

    def after_step(self, step: int) -> Action | None:
        due = step == self._last or any(step % every == 0 for every in self._periods)
        return SaveNow if due else None

    def on_evaluation(self, step: int, evaluation: Evaluation) -> Action | None:
        self._evaluated = (step, evaluation.figures)
        self.evaluations += 1
        value = evaluation.figures.get(self._metric, math.nan)
        return SaveNow if self.best.update(step, value) else None

    def evaluation_at(self, step: int) -> dict[str, float] | None:
        """The figures of the evaluation at `step`, if there was one."""
        return self._evaluated[1] if self._evaluated[0] == step else None

    def state_dict(self) -> dict[str, Any]:
        return {**self.best.state_dict(), "evaluations": self.evaluations}

    def load_state_dict(self, values: dict[str, Any]) -> None:
        self.best.load_state_dict(values)
        self.evaluations = values["evaluations"]


class SaveClock(Hook):
    """Saves when the last save, or the start, is so many seconds ago."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._saved = seconds, time.monotonic()

    def start(self, step: int) -> None:
        self._saved = time.monotonic()

    def after_step(self, step: int) -> Action | None:
        return SaveNow if time.monotonic() - self._saved >= self._seconds else None

    def on_save(self, step: int) -> None:
        self._saved = time.monotonic()


class CheckSaves(Hook):
    """Lets the error of a save that failed in the background surface at the next step, not at the next save."""

    def __init__(self, poll: Callable[[], None]) -> None:
        self._poll = poll

    def after_step(self, step: int) -> None:
        self._poll()


class EarlyStopping(Hook):
    """Stops after `patience` evaluations without improvement by more than min_delta; NaN is no improvement."""

    def __init__(self, metric: str, mode: str, patience: int, min_delta: float) -> None:
        self._metric, self._patience = metric, patience
        self._best, self._waited = BestSoFar(mode, min_delta), 0

    def on_evaluation(self, step: int, evaluation: Evaluation) -> Action | None:
        if self._best.update(step, evaluation.figures.get(self._metric, math.nan)):
            self._waited = 0
            return None
        self._waited += 1
        if self._waited < self._patience:
            return None
        best = f"the best is {self._best.value:.4g} at step {self._best.step}" if self._best.step else "none was finite"
        return Stop("early_stop", f"eval/{self._metric} did not improve in {self._waited} evaluations; {best}")

    def state_dict(self) -> dict[str, Any]:
        return {**self._best.state_dict(), "waited": self._waited}

    def load_state_dict(self, values: dict[str, Any]) -> None:
        self._best.load_state_dict(values)
        self._waited = values["waited"]


class Agreed(Hook):
    """What a clock or a signal decides, in several processes: at every `every`-th step all do what one of them wants.

    hooks: whose `after_step` may differ between processes.
    """

    WANTED: tuple[tuple[str, int], ...] = (("time_budget", 0), ("interrupted", INTERRUPTED), ("preempted", PREEMPTED))
    """State and code of each Stop, the strongest last."""

    def __init__(self, hooks: Sequence[Hook], every: int) -> None:
        self._hooks, self._every = hooks, every

    def start(self, step: int) -> None:
        for hook in self._hooks:
            hook.start(step)

    def on_save(self, step: int) -> None:
        for hook in self._hooks:
            hook.on_save(step)

    def border(self, step: int) -> int | None:
        return step - step % self._every + self._every

    def after_step(self, step: int) -> Action | None:
        if step % self._every:
            return None
        actions = [hook.after_step(step) for hook in self._hooks]
        stops = [a for a in actions if isinstance(a, Stop)]
        states = [state for state, _ in self.WANTED]
        mine = max((states.index(stop.state) + 1 for stop in stops), default=0)
        save, stop = processes.largest([SaveNow in actions, mine])
        if stop:
            state, code = self.WANTED[stop - 1]
            reason = next((own.reason for own in stops if own.state == state), "another process was told to stop")
            return Stop(state, reason, code)
        return SaveNow if save else None


class TimeBudget(Hook):
    """Ends a run after so many seconds of this process."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._since = seconds, time.monotonic()

    def after_step(self, step: int) -> Action | None:
        if time.monotonic() - self._since < self._seconds:
            return None
        return Stop("time_budget", f"train.time_budget of {self._seconds:g} s is used up")


class Signals(Hook):
    """Ctrl-C saves and ends with 130, SIGTERM and SIGUSR1 save and end with 75; a second signal ends at once.

    In a notebook a second Ctrl-C ends the cell, not the process. Where a parent hands its signals on, those within
    TOGETHER seconds are one.
    """

    def __init__(self, say: Callable[[str], None] = lambda text: None) -> None:
        self._say = say
        self._seen: int | None = None
        self._until = 0.0
        self._before: dict[int, Any] = {}

    def install(self) -> None:
        """Take the signals over; only the main thread can."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, *PREEMPTING):
                self._before[number] = signal.signal(number, self._receive)

    def after_step(self, step: int) -> Action | None:
        return self.pending()

    def pending(self) -> Stop | None:
        """The stop that a signal asked for."""
        if self._seen is None:
            return None
        if self._seen == signal.SIGINT:
            return Stop("interrupted", "Ctrl-C", INTERRUPTED)
        return Stop("preempted", signal.Signals(self._seen).name, PREEMPTED)

    def restore(self) -> None:
        """Give the signals back."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _receive(self, number: int, frame: Any) -> None:
        if self._seen is not None:
            # A terminal, `timeout` and Slurm may signal the children as well as the parent, which hands it on.
            if time.monotonic() < self._until:
                return
            if number == signal.SIGINT and kernel() is not None:
                raise KeyboardInterrupt  # the end of a notebook's process would take all its variables along
            os._exit(INTERRUPTED if number == signal.SIGINT else PREEMPTED)
        self._seen = number
        self._until = time.monotonic() + TOGETHER if HANDED_ON in os.environ else 0.0
        self._say("stopping after this step and saving; a second signal ends at once")
