"""Many steps in one dispatch: the same bits, rows and borders; chosen only where it pays and is exact."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from run_helpers import differing, rows_without_time, stop_at

import jaxtrain as jt
from jaxtrain import dispatch
from jaxtrain.build import build
from jaxtrain.config import load
from jaxtrain.hooks.control import Evaluator, Saver
from jaxtrain.loop import Hook, _border

CONFIG: dict[str, Any] = {
    "name": "many",
    "model": {"kind": "mlp", "hidden": [16], "dropout": 0.2},
    "train": {"duration": 60, "global_batch_size": 50, "ema_decay": 0.9},
    "log": {"every": 7, "tensorboard": False},
    "evaluate": {"every": 11},
    "checkpoint": {"every": 13, "keep_last": 9},
}


def trained(place: Path, steps: int | str, **keys: Any) -> jt.Run:
    return jt.train(CONFIG, run_dir=place, quiet=True, **{"train.steps_per_dispatch": steps, **keys})


def saved(run: jt.Run) -> list[str]:
    return sorted(p.name for p in (run.path / "checkpoints").glob("[0-9]*"))


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of the dispatches of several steps, as they come."""
    seen: list[int] = []
    plain = dispatch.Many.__call__

    def call(self: dispatch.Many, state: Any, fed: Any, count: int) -> Any:
        seen.append(count)
        return plain(self, state, fed, count)

    monkeypatch.setattr(dispatch.Many, "__call__", call)
    return seen


@pytest.mark.parametrize("steps", [50, 3, 10**9])
def test_one_step_and_many_leave_the_same_run(steps: int, groups: list[int], tmp_path: Path) -> None:
    one = trained(tmp_path / "one", 1)
    assert groups == []
    many = trained(tmp_path / "many", steps)
    assert groups
    assert max(groups) <= steps
    with one, many:
        assert differing(one.state, many.state) == []
        assert rows_without_time(one) == rows_without_time(many)
        assert saved(one) == saved(many)
        assert json.loads((many.path / "chosen.json").read_text())["steps_per_dispatch"] == steps
        logged = [row["step"] for row in many.metrics() if "train/loss" in row]
        assert logged == [1, *range(7, 60, 7), 60]


def test_no_group_goes_over_a_border(groups: list[int], tmp_path: Path) -> None:
    trained(tmp_path / "run", 50).close()
    ends = sorted({1, 60, *range(7, 60, 7), *range(11, 60, 11), *range(13, 60, 13)})
    between = [b - a for a, b in zip([0, *ends], ends, strict=False)]
    assert groups == [count for count in between if count > 1]


def test_a_resumed_run_is_the_same_and_keeps_its_choice(
    groups: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight = trained(tmp_path / "straight", 1)
    with monkeypatch.context() as patch:
        stop_at(patch, 33)
        trained(tmp_path / "stopped", "auto").close()
    chosen = tmp_path / "stopped" / "chosen.json"
    assert json.loads(chosen.read_text())["steps_per_dispatch"] == 1
    assert groups == []
    assert json.loads(chosen.read_text())["why"] == "the run is short"
    chosen.write_text(json.dumps({**json.loads(chosen.read_text()), "steps_per_dispatch": 5, "why": "measured"}))
    monkeypatch.setattr(dispatch, "choose", lambda *_: pytest.fail("measured again"))
    with straight, jt.resume(tmp_path / "stopped", quiet=True) as resumed:
        assert set(groups) <= {2, 3, 4, 5}
        assert 5 in groups
        assert differing(straight.state, resumed.state) == []


def test_the_next_border_is_the_nearest_of_all() -> None:
    class Other(Hook):
        def border(self, step: int) -> int | None:
            return 17

    hooks = [Hook(), Evaluator(20, 100), Saver((0,), 100, "loss", "min")]
    assert _border(hooks, 0, 100, 50) == 1
    assert _border(hooks, 1, 100, 50) == 20
    assert _border(hooks, 20, 100, 50) == 40
    assert _border(hooks, 40, 100, 50) == 50
    assert _border(hooks, 99, 100, 50) == 100
    assert _border([*hooks, Other()], 1, 100, 50) == 17
    assert _border([Saver((30,), 100, "loss", "min")], 59, 100, 1000) == 60


# ---------------------------------------------------------------- the choice


def choice_of(monkeypatch: pytest.MonkeyPatch, left: int = 10**6, **keys: Any) -> dispatch.Choice:
    job = build(load(CONFIG, [(key.replace("__", "."), value) for key, value in keys.items()]))
    state, feeder = job.init(), job.feeder()
    before = {name: np.array(x) for name, x in state["params"].items()}
    try:
        choice = dispatch.choose(job, state, feeder, left)
    finally:
        feeder.close()
    assert all((np.array(x) == before[name]).all() for name, x in state["params"].items())  # only copies were trained
    return choice


def test_a_tiny_model_takes_many_and_at_most_a_quarter_of_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "GAIN", 100.0)  # whatever a busy machine measures
    choice = choice_of(monkeypatch)
    assert 1 < choice.steps <= dispatch.MOST
    monkeypatch.setattr(dispatch, "SECONDS", 1e-9)
    assert choice_of(monkeypatch).steps == 1


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"data__feed": "prefetch"}, "rows come from the host (data.feed prefetch)"),
        ({"model": {"kind": "cnn", "channels": [2], "dense": [4]}}, "convolutions are slow in a loop on this device"),
        ({"train__steps_per_dispatch": 9}, "asked for"),
    ],
)
def test_where_nothing_is_measured(keys: dict[str, Any], why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_seconds", lambda *_: pytest.fail("measured"))
    choice = choice_of(monkeypatch, **keys)
    assert (choice.steps, choice.why) == (keys.get("train__steps_per_dispatch", 1), why)


def test_a_short_run_and_a_long_step_stay_single(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choice_of(monkeypatch, left=1).why == "the run is short"
    monkeypatch.setattr(dispatch, "SHORT", 0.0)
    choice = choice_of(monkeypatch)
    assert choice.steps == 1
    assert choice.why.startswith("a step takes ")


def test_a_large_state_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "LARGE", 1000)
    monkeypatch.setattr(dispatch, "_copy", lambda _: pytest.fail("copied"))
    assert choice_of(monkeypatch).why == "a step over a state of 0 MiB is not short"


def test_a_choice_made_for_a_short_run_or_other_devices_does_not_stand(tmp_path: Path) -> None:
    trained(tmp_path / "run", "auto").close()
    chosen = tmp_path / "run" / "chosen.json"
    first = json.loads(chosen.read_text())
    five = {"steps_per_dispatch": 5}
    for change in (
        five,
        five | {"why": "asked for"},
        {"steps_per_dispatch": 5, "why": "measured", "devices": "8 x other"},
    ):
        chosen.write_text(json.dumps(first | change))
        duration = json.loads((tmp_path / "run" / "result.json").read_text())["steps"]["planned"] + 5
        jt.resume(tmp_path / "run", quiet=True, **{"train.duration": duration}).close()
        assert json.loads(chosen.read_text()) == first


def test_a_loop_that_rounds_otherwise_or_gains_nothing_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "GAIN", 0.0)
    choice = choice_of(monkeypatch)
    assert choice.steps == 1
    assert " µs a step, " in choice.why
    plain = dispatch.Many.__call__

    def rounded(self: dispatch.Many, state: Any, fed: Any, count: int) -> Any:
        after, metrics = plain(self, state, fed, count)
        return {**after, "lr_scale": after["lr_scale"] * (1 + 2.0**-23)}, metrics

    monkeypatch.setattr(dispatch.Many, "__call__", rounded)
    assert choice_of(monkeypatch).why == "the loop rounds otherwise ([0]['lr_scale'] and 0 more)"


def test_many_steps_over_rows_from_the_host_are_refused() -> None:
    keys = {"train.steps_per_dispatch": 8, "data.feed": "direct"}
    with pytest.raises(jt.ConfigError) as caught:
        build(load(CONFIG, keys.items()))
    assert str(caught.value) == (
        "train.steps_per_dispatch: 8 needs rows on the device, and these come by data.feed=direct; "
        "allowed: auto or 1, or data.feed=resident"
    )


@pytest.mark.parametrize("value", ["fast", 0, -1, 2.5, True])
def test_what_is_no_number_of_steps_is_one_line(value: Any) -> None:
    with pytest.raises(jt.ConfigError) as caught:
        load(CONFIG, {"train.steps_per_dispatch": value}.items())
    said = f"train.steps_per_dispatch: {value!r} is not valid: allowed: auto, or a whole number from 1"
    assert str(caught.value).startswith(said)
