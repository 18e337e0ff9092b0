"""Hooks that decide: best, early stopping, evaluation, saves, limits, signals."""

from __future__ import annotations

import json
import math
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hooks_helpers import evaluation

from jaxtrain.hooks import control
from jaxtrain.hooks.control import BestSoFar, EarlyStopping, Evaluator, SaveClock, Saver, Signals, TimeBudget
from jaxtrain.loop import EvaluateNow, Hook, SaveNow, Stop

# ------------------------------------------------------------ fault case loop_nan_metric

SEQUENCES = [  # case, mode, best (0-based) and its value, last evaluation of an early stop with patience 3
    ("A", "min", 3, 0.6, 6),
    ("B", "min", 2, 0.7, None),
    ("C_max", "max", 2, 0.6, None),
    ("D", "min", None, None, 2),
    ("E", "min", 2, 0.4, None),
]


def sequence(shared: Path, case: str) -> list[float]:
    values = json.loads((shared / "faults/loop_nan_metric/sequences.json").read_text())[case]
    return [float(value) for value in values]


@pytest.mark.parametrize(("case", "mode", "best", "value", "ends"), SEQUENCES)
def test_fault_loop_nan_metric_the_best_is_the_best_finite_value(
    shared: Path, case: str, mode: str, best: int | None, value: float | None, ends: int | None
) -> None:
    seen = BestSoFar(mode)
    for epoch, figure in enumerate(sequence(shared, case)[: None if ends is None else ends + 1]):
        seen.update(epoch, figure)
    assert (seen.step, seen.value) == (best, value)


@pytest.mark.parametrize(("case", "mode", "best", "value", "ends"), SEQUENCES)
def test_fault_loop_nan_metric_early_stopping_counts_nan_as_no_improvement(
    shared: Path, case: str, mode: str, best: int | None, value: float | None, ends: int | None
) -> None:
    hook = EarlyStopping("loss", mode, patience=3, min_delta=0.0)
    answers = [hook.on_evaluation(epoch, evaluation(figure)) for epoch, figure in enumerate(sequence(shared, case))]
    stops = [epoch for epoch, answer in enumerate(answers) if answer is not None]
    assert (stops[0] if stops else None) == ends


@pytest.mark.parametrize(("case", "mode", "best", "value", "ends"), SEQUENCES)
def test_fault_loop_nan_metric_saves_happen_at_improvements_only(
    shared: Path, case: str, mode: str, best: int | None, value: float | None, ends: int | None
) -> None:
    saver = Saver((0,), last=10**9, metric="loss", mode=mode)
    saved = [
        epoch
        for epoch, figure in enumerate(sequence(shared, case))
        if saver.on_evaluation(epoch, evaluation(figure)) is SaveNow
    ]
    expected = {"A": [0, 1, 3], "B": [1, 2], "C_max": [0, 2], "D": [], "E": [0, 2]}
    assert saved == expected[case]
    assert (saver.best.step, saver.best.value) == (best, value)


def test_a_comparison_without_the_check_would_keep_nan_for_ever() -> None:
    """The control arm of the fault case: what `value < best` alone makes of sequence B."""
    best = math.nan
    for value in (math.nan, 0.8, 0.7):
        best = value if value < best or math.isnan(value) else best
    assert math.isnan(best)


# ------------------------------------------------------------ best and early stopping


def test_an_improvement_must_be_larger_than_min_delta() -> None:
    best = BestSoFar("min", min_delta=0.125)
    assert [best.update(step, value) for step, value in enumerate((1.0, 0.875, 0.75, 0.75))] == [
        True,
        False,
        True,
        False,
    ]
    assert (best.step, best.value) == (2, 0.75)
    exact = BestSoFar("min")
    assert [exact.update(step, value) for step, value in enumerate((1.0, 0.875, 0.75, 0.75))] == [
        True,
        True,
        True,
        False,
    ]


def test_min_delta_counts_upwards_too() -> None:
    best = BestSoFar("max", min_delta=0.125)
    assert [best.update(step, value) for step, value in enumerate((0.5, 0.625, 0.75))] == [True, False, True]


def test_early_stopping_names_the_metric_the_patience_and_the_best() -> None:
    hook = EarlyStopping("accuracy", "max", patience=2, min_delta=0.0)
    answers = [hook.on_evaluation(10 * i, evaluation(v, "accuracy")) for i, v in enumerate((0.1, 0.5, 0.4, 0.5), 1)]
    assert answers[:3] == [None, None, None]
    stop = answers[3]
    assert isinstance(stop, Stop)
    assert (stop.state, stop.code) == ("early_stop", 0)
    assert stop.reason == "eval/accuracy did not improve in 2 evaluations; the best is 0.5 at step 20"


def test_early_stopping_of_nothing_but_nan_says_so() -> None:
    hook = EarlyStopping("loss", "min", patience=1, min_delta=0.0)
    stop = hook.on_evaluation(5, evaluation(math.nan))
    assert isinstance(stop, Stop)
    assert stop.reason == "eval/loss did not improve in 1 evaluations; none was finite"


def test_a_metric_that_is_not_there_is_no_improvement() -> None:
    hook = EarlyStopping("f1", "max", patience=1, min_delta=0.0)
    assert isinstance(hook.on_evaluation(5, evaluation(0.5, "loss")), Stop)


@pytest.mark.parametrize("cut", range(1, 7))
def test_early_stopping_goes_on_from_its_saved_state_as_if_never_stopped(shared: Path, cut: int) -> None:
    values = sequence(shared, "A")[:7]
    hook = EarlyStopping("loss", "min", patience=3, min_delta=0.0)
    for epoch in range(cut):
        hook.on_evaluation(epoch, evaluation(values[epoch]))
    other = EarlyStopping("loss", "min", patience=3, min_delta=0.0)
    other.load_state_dict(json.loads(json.dumps(hook.state_dict())))
    answers = [other.on_evaluation(epoch, evaluation(values[epoch])) for epoch in range(cut, 7)]
    assert [isinstance(answer, Stop) for answer in answers] == [False] * (6 - cut) + [True]
    forgetful = EarlyStopping("loss", "min", patience=3, min_delta=0.0)
    forgotten = [forgetful.on_evaluation(epoch, evaluation(values[epoch])) for epoch in range(cut, 7)]
    assert (forgotten[-1] is None) == (cut > 3)  # after the best at 3 the count is what a resume must know


def test_the_state_of_the_saver_is_its_best_and_how_many_it_saw() -> None:
    saver = Saver((0,), 100, "loss", "min")
    saver.on_evaluation(7, evaluation(0.5))
    assert saver.state_dict() == {"step": 7, "value": 0.5, "evaluations": 1}
    other = Saver((0,), 100, "loss", "min")
    other.load_state_dict(saver.state_dict())
    assert other.on_evaluation(8, evaluation(0.6)) is None
    assert Saver((0,), 100, "loss", "min").on_evaluation(8, evaluation(0.6)) is SaveNow


# ------------------------------------------------------------ borders


def due(hook: Hook, last: int, action: Any) -> list[int]:
    return [step for step in range(1, last + 1) if hook.after_step(step) is action]


@pytest.mark.parametrize(
    ("every", "last", "steps"),
    [(10, 30, [10, 20, 30]), (10, 25, [10, 20, 25]), (0, 25, [25]), (1, 3, [1, 2, 3]), (100, 3, [3])],
)
def test_evaluations_and_saves_come_every_so_many_steps_and_at_the_last(
    every: int, last: int, steps: list[int]
) -> None:
    assert due(Evaluator(every, last), last, EvaluateNow) == steps
    assert due(Saver((every,), last, "loss", "min"), last, SaveNow) == steps


def test_a_save_by_the_clock_counts_from_the_last_save(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = 100.0
    monkeypatch.setattr(control.time, "monotonic", lambda: clock)
    saver = SaveClock(30.0)
    saver.start(0)
    saved = []
    for step in range(1, 101):  # a second a step
        clock += 1.0
        if saver.after_step(step) is SaveNow:
            saved.append(step)
            saver.on_save(step)
    assert saved == [30, 60, 90]
    clock += 1e6
    assert saver.after_step(101) is SaveNow
    assert Saver((0,), last=1000, metric="loss", mode="min").after_step(101) is None  # steps know no clock


def test_the_figures_of_an_evaluation_belong_to_its_own_step_only() -> None:
    saver = Saver((0,), 100, "loss", "min")
    saver.on_evaluation(7, evaluation(0.5))
    assert saver.evaluation_at(7) == {"loss": 0.5}
    assert saver.evaluation_at(8) is None


# ------------------------------------------------------------ limits


def test_a_time_budget_ends_the_run_with_success(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = 0.0
    monkeypatch.setattr(control.time, "monotonic", lambda: clock)
    hook = TimeBudget(90.0)
    clock = 89.9
    assert hook.after_step(1) is None
    clock = 90.0
    assert hook.after_step(2) == Stop("time_budget", "train.time_budget of 90 s is used up", 0)


# ------------------------------------------------------------ signals


@pytest.mark.parametrize(
    ("number", "stop"),
    [
        (signal.SIGINT, Stop("interrupted", "Ctrl-C", 130)),
        (signal.SIGTERM, Stop("preempted", "SIGTERM", 75)),
    ],
)
def test_a_signal_becomes_a_stop_after_the_step(number: int, stop: Stop, capfd: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(number)
    signals = Signals()
    signals.install()
    try:
        assert signals.pending() is None
        assert signals.after_step(1) is None
        os.kill(os.getpid(), number)
        time.sleep(0.01)
        assert signals.after_step(2) == stop
        assert signals.pending() == stop
    finally:
        signals.restore()
    assert signal.getsignal(number) is before


def test_signals_are_left_alone_outside_the_main_thread() -> None:
    before = signal.getsignal(signal.SIGINT)
    signals = Signals()
    thread = threading.Thread(target=signals.install)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGINT) is before
    signals.restore()
