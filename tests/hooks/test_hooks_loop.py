"""fit() with fakes for the device: the order at a border, metrics one step late, bounded run-ahead, stops."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.loop import (
    RUN_AHEAD,
    Action,
    EvaluateNow,
    Evaluation,
    Hook,
    SaveNow,
    Stop,
    fit,
    window_figures,
)

Event = tuple[str, int]


class Loss:
    """A device value: it is there after `seconds` of waiting."""

    def __init__(self, device: Device, step: int) -> None:
        self.device, self.step = device, step

    def block_until_ready(self) -> Loss:
        if self.step not in self.device.finished:
            time.sleep(self.device.seconds)
            self.device.finished.add(self.step)
        return self

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        self.block_until_ready()
        return np.asarray(float(self.step))


@dataclass
class Device:
    """Counts what was fed and what was waited for. The state is the number of the step."""

    seconds: float = 0.0
    events: list[Event] = field(default_factory=list)
    finished: set[int] = field(default_factory=set)
    in_flight: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)

    def feed(self, position: int) -> int:
        self.positions.append(position)
        return position

    def advance(self, state: int, fed: int) -> tuple[int, dict[str, Any]]:
        step = state + 1
        self.events.append(("dispatch", step))
        self.in_flight.append(step - len(self.finished))
        sums = {"loss": float(step), "weight": 1.0, "count": 1.0, "skipped": 0.0, "overflow": 0.0}
        return step, {"loss": Loss(self, step), **{f"window/{name}": value for name, value in sums.items()}}


class Recorder(Hook):
    """Writes down all that it is told, and answers as told."""

    def __init__(self, device: Device, answers: dict[Event, Action] | None = None) -> None:
        self.device, self.answers = device, answers or {}
        self.rows: list[tuple[int, float]] = []

    def _note(self, name: str, step: int) -> Action | None:
        self.device.events.append((name, step))
        return self.answers.get((name, step))

    def start(self, step: int) -> None:
        self._note("start", step)

    def after_step(self, step: int) -> Action | None:
        return self._note("after", step)

    def on_metrics(self, step: int, figures: dict[str, float]) -> Action | None:
        self.rows.append((step, figures["loss"]))
        return self._note("metrics", step)

    def on_evaluation(self, step: int, evaluation: Evaluation) -> Action | None:
        return self._note("evaluated", step)

    def on_save(self, step: int) -> None:
        self._note("saved", step)


def run(
    device: Device,
    answers: dict[Event, Action] | None = None,
    *,
    stop: int = 10,
    log_every: int = 5,
    start: int = 0,
    feed: Callable[[int], Any] | None = None,
    advance: Callable[..., Any] | None = None,
    data_offset: int = 0,
) -> tuple[Any, Stop, Recorder]:
    hook = Recorder(device, answers)

    def evaluate(state: Any) -> Evaluation:
        device.events.append(("evaluate", int(state)))
        return Evaluation({"loss": 0.0})

    def save(step: int, state: Any) -> None:
        assert step == int(state)
        device.events.append(("save", int(state)))

    state, ending = fit(
        start,  # type: ignore[arg-type]
        advance or device.advance,
        feed or device.feed,
        [hook],
        start=start,
        stop=stop,
        log_every=log_every,
        data_offset=data_offset,
        evaluate=evaluate,
        save=save,
    )
    return state, ending, hook


def test_a_run_without_borders_ends_at_its_last_step() -> None:
    state, ending, hook = run(Device(), stop=7)
    assert state == 7
    assert ending == Stop("done", "7 steps", 0)
    assert hook.rows == [(1, 1.0), (5, 5.0), (7, 7.0)]


def test_metrics_come_one_step_late() -> None:
    device = Device()
    run(device, stop=7)
    assert device.events == [
        ("start", 0),
        ("dispatch", 1),
        ("after", 1),
        ("dispatch", 2),
        ("metrics", 1),
        ("after", 2),
        ("dispatch", 3),
        ("after", 3),
        ("dispatch", 4),
        ("after", 4),
        ("dispatch", 5),
        ("after", 5),
        ("dispatch", 6),
        ("metrics", 5),
        ("after", 6),
        ("dispatch", 7),
        ("after", 7),
        ("metrics", 7),
    ]


def test_metrics_of_a_border_come_before_its_evaluation_and_are_not_repeated() -> None:
    device = Device()
    _, _, hook = run(device, {("after", 5): EvaluateNow}, stop=7)
    at = device.events.index(("after", 5))
    assert device.events[at + 1 : at + 5] == [("metrics", 5), ("evaluate", 5), ("evaluated", 5), ("dispatch", 6)]
    assert hook.rows == [(1, 1.0), (5, 5.0), (7, 7.0)]


def test_a_border_that_is_no_log_step_writes_no_row() -> None:
    _, _, hook = run(Device(), {("after", 3): EvaluateNow, ("after", 4): SaveNow}, stop=7)
    assert hook.rows == [(1, 1.0), (5, 5.0), (7, 7.0)]


def test_one_border_evaluates_saves_stops_early_and_is_controlled_in_this_order() -> None:
    device = Device()
    early, control = Stop("early_stop", "no better"), Stop("interrupted", "Ctrl-C", 130)
    hooks = [
        Recorder(device, {("after", 5): control}),
        Recorder(device, {("after", 5): SaveNow, ("evaluated", 5): early}),
        Recorder(device, {("after", 5): EvaluateNow}),
    ]

    def save(step: int, state: Any) -> None:
        device.events.append(("save", step))

    def evaluate(state: Any) -> Evaluation:
        device.events.append(("evaluate", state))
        return Evaluation({})

    _, ending = fit(
        0,  # type: ignore[arg-type]
        device.advance,
        device.feed,
        hooks,
        start=0,
        stop=10,
        log_every=5,
        evaluate=evaluate,
        save=save,
    )
    names = [name for name, step in device.events if step == 5 and name != "after"]
    assert names == ["dispatch", *["metrics"] * 3, "evaluate", *["evaluated"] * 3, "save", *["saved"] * 3]
    assert ending is control
    assert ("dispatch", 6) not in device.events


@pytest.mark.parametrize(("first", "second"), [(("after", 5), ("evaluated", 5)), (("evaluated", 5), ("after", 5))])
def test_of_two_stops_the_one_with_the_higher_code_is_told(first: Event, second: Event) -> None:
    answers: dict[Event, Action] = {first: Stop("failed", "NaN", 78), second: Stop("early_stop", "no better")}
    device = Device()
    trigger = Recorder(device, {("after", 5): EvaluateNow})
    _, ending = fit(
        0,  # type: ignore[arg-type]
        device.advance,
        device.feed,
        [Recorder(device, answers), trigger],
        start=0,
        stop=10,
        log_every=5,
        evaluate=lambda s: Evaluation({}),
        save=lambda step, s: None,
    )
    assert ending.code == 78


@pytest.mark.parametrize("at", [1, 2, 4, 5, 6, 9, 10])
def test_a_stop_at_any_step_delivers_its_row_and_saves_it(at: int) -> None:
    device = Device()
    state, ending, hook = run(device, {("after", at): Stop("interrupted", "Ctrl-C", 130)})
    assert state == at
    assert ending.state == "interrupted"
    assert hook.rows == [(step, float(step)) for step in sorted({1, 5, 10, at}) if step <= at]
    assert device.events[-2:] == [("save", at), ("saved", at)]
    assert max(step for name, step in device.events if name == "dispatch") == at


def test_a_stop_asked_for_by_a_late_row_ends_at_the_step_that_was_fed_meanwhile() -> None:
    device = Device()
    state, ending, hook = run(device, {("metrics", 5): Stop("failed", "NaN", 78)})
    assert state == 6
    assert ending.code == 78
    assert hook.rows == [(1, 1.0), (5, 5.0), (6, 6.0)]
    assert device.events[-2:] == [("save", 6), ("saved", 6)]


def test_an_improving_evaluation_saves_the_step_that_was_evaluated() -> None:
    device = Device()
    run(device, {("after", 4): EvaluateNow, ("evaluated", 4): SaveNow}, stop=7)
    assert ("save", 4) in device.events
    assert [event for event in device.events if event[0] == "save"] == [("save", 4)]


@pytest.mark.parametrize("at", [1, 3, 10])
def test_the_state_at_a_border_is_the_state_of_that_very_step(at: int) -> None:
    device = Device()
    run(device, {("after", at): EvaluateNow, ("evaluated", at): SaveNow})
    assert ("evaluate", at) in device.events
    assert ("save", at) in device.events


def test_a_resume_begins_after_its_step_and_feeds_from_there() -> None:
    device = Device()
    state, _, hook = run(device, start=5, stop=10)
    assert state == 10
    assert device.positions == [5, 6, 7, 8, 9]
    assert device.events[0] == ("start", 5)
    assert hook.rows == [(10, 10.0)]


def test_data_offset_moves_the_data_and_not_the_step() -> None:
    device = Device()
    state, _, _ = run(device, stop=3, data_offset=7)
    assert device.positions == [7, 8, 9]
    assert state == 3


def test_a_finished_run_does_nothing() -> None:
    device = Device()
    state, ending, hook = run(device, start=10, stop=10)
    assert (state, ending.state, hook.rows) == (10, "done", [])


# ------------------------------------------------------------ run-ahead


def test_run_ahead_is_bounded() -> None:
    device = Device()
    run(device, stop=200, log_every=10**6)
    assert max(device.in_flight) <= RUN_AHEAD + 1
    assert max(device.in_flight) > 8  # the control arm: fast steps are not waited for one by one


def test_slow_steps_are_not_dispatched_far_ahead() -> None:
    """Else a stop, a signal and the console are 32 steps behind: minutes where a step takes seconds."""
    device = Device(seconds=0.03)
    run(device, stop=40, log_every=10**6)
    assert max(device.in_flight) <= 8
    assert max(device.in_flight[8:]) <= 3


# ------------------------------------------------------------ transfers


def device_advance(state: Any, fed: Any) -> tuple[Any, dict[str, Any]]:
    step = _plus(state, fed)
    sums = dict.fromkeys(("loss", "weight", "count", "skipped", "overflow"), step)
    return step, {"loss": step, **{f"window/{name}": value for name, value in sums.items()}}


_plus = jax.jit(lambda a, b: a + b)


def fit_on_the_device(feed: Callable[[int], Any]) -> Any:
    state, _ = fit(
        jnp.zeros(()),  # type: ignore[arg-type]
        device_advance,
        feed,
        [],
        start=0,
        stop=3,
        log_every=1,
        evaluate=lambda s: Evaluation({}),
        save=lambda step, s: None,
    )
    return state


def test_a_batch_that_was_not_put_on_the_device_raises() -> None:
    with pytest.raises(Exception, match="Disallowed host-to-device transfer"):
        fit_on_the_device(lambda position: np.float32(1.0))
    assert float(fit_on_the_device(lambda position: jax.device_put(np.float32(1.0)))) == 3.0


# ------------------------------------------------------------ rows


def row(**sums: float) -> dict[str, Any]:
    metrics = {"loss": 9.0, "lr": 0.5, "in_row": 0.0}
    return {**metrics, **{f"window/{name}": value for name, value in sums.items()}}


def test_a_row_divides_the_sums_of_its_window_once() -> None:
    figures = window_figures(row(loss=6.0, weight=4.0, count=8.0, hits=2.0, skipped=1.0, overflow=0.0))
    assert figures == {"lr": 0.5, "in_row": 0.0, "loss": 1.5, "hits": 0.25, "skipped": 1.0}


def test_a_window_without_a_finite_step_is_nan_and_an_overflow_is_told() -> None:
    figures = window_figures(row(loss=0.0, weight=0.0, count=0.0, hits=0.0, skipped=5.0, overflow=2.0))
    assert np.isnan(figures["loss"])
    assert np.isnan(figures["hits"])
    assert (figures["skipped"], figures["overflow"]) == (5.0, 2.0)


def test_fit_is_at_most_60_lines() -> None:
    assert len(inspect.getsource(fit).splitlines()) <= 60
