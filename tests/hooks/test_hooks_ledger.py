"""Where the time of a run went: every second once, over several processes, what is lost, what is goodput."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace

import pytest

import jaxtrain as jt
from jaxtrain.hooks.ledger import REDONE, SHARES, Ledger, goodput, wall

NONE = dict.fromkeys(SHARES, 0.0)


class Time:
    """A clock that is set by hand; both of its hands go together."""

    def __init__(self, now: float) -> None:
        self.now = now
        self.module = SimpleNamespace(time=lambda: self.now, monotonic=lambda: self.now - 900.0)


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    time = Time(1000.0)
    monkeypatch.setattr("jaxtrain.hooks.ledger.time", time.module)
    return time


def test_every_second_belongs_to_the_innermost_phase(time: Time) -> None:
    ledger = Ledger()
    time.now += 1
    with ledger.phase("compile"):
        time.now += 2
        with ledger.phase("init"):
            time.now += 4
        time.now += 8
    with contextlib.suppress(KeyError), ledger.phase("train"):
        time.now += 16
        raise KeyError
    time.now += 32
    shares = {**NONE, "other": 33.0, "compile": 10.0, "init": 4.0, "train": 16.0}
    assert ledger.account() == {**shares, "begun": 1000.0, "until": 1063.0}
    assert wall(ledger.account()) == 63.0
    assert goodput(ledger.account()) == 16 / 63


def test_waiting_for_batches_is_no_training(time: Time) -> None:
    ledger, waited = Ledger(), 0.0
    ledger.waited = lambda: waited
    with ledger.phase("init"):  # what is waited for here is no training
        time.now, waited = time.now + 5, 3.0
    with ledger.phase("train"):
        time.now, waited = time.now + 10, 4.5
        with ledger.phase("evaluate"):
            time.now += 20
        time.now, waited = time.now + 1, 5.0
    assert ledger.account() | {"begun": 0, "until": 0} == {
        **NONE,
        "init": 5.0,
        "train": 9.0,
        "data_wait": 2.0,
        "evaluate": 20.0,
        "begun": 0,
        "until": 0,
    }


def test_a_process_after_a_kill_knows_what_was_lost_and_how_long_nobody_was_there(time: Time) -> None:
    first = Ledger()
    with first.phase("train"):
        time.now += 10
        sealed = first.account()
        time.now += 7
        with first.phase("evaluate"):
            time.now += 3
        before = first.account()
    time.now += 100  # killed
    second = Ledger()
    with second.phase("init"):
        time.now += 2
    second.go_on(before, sealed)
    with second.phase("train"):
        time.now += 40
    assert second.account() == {
        **NONE,
        "train": 50.0,
        "lost": 10.0,
        "pause": 100.0,
        "init": 2.0,
        "begun": 1000.0,
        "until": 1162.0,
    }
    assert wall(second.account()) == 162.0


def test_the_time_between_an_end_and_an_extension_is_no_pause(time: Time) -> None:
    first = Ledger()
    with first.phase("train"):
        time.now += 10
    before = first.account()
    time.now += 5000
    second = Ledger()
    second.go_on(before, before, ended=True)
    with second.phase("train"):
        time.now += 20
    assert second.account() == {**NONE, "train": 30.0, "begun": 6000.0, "until": 6030.0}
    assert goodput(second.account()) == 1.0


def test_going_back_to_a_step_loses_what_was_done_after_it(time: Time) -> None:
    ledger = Ledger()
    with ledger.phase("train"):
        time.now += 5
    sealed = ledger.account()
    for share in (*REDONE, "save"):
        with ledger.phase(share):
            time.now += 1
    ledger.back_to(sealed)
    assert ledger.account() == {**NONE, "train": 5.0, "lost": 3.0, "save": 1.0, "begun": 1000.0, "until": 1009.0}
    ledger.back_to({})  # to the first step
    assert ledger.account()["lost"] == 8.0


def test_a_clock_that_was_set_back_and_a_run_without_an_account_do_no_harm(time: Time) -> None:
    ledger = Ledger()
    ledger.go_on({}, {})
    assert ledger.account() == {**NONE, "begun": 1000.0, "until": 1000.0}
    ledger.go_on({**NONE, "begun": 900.0, "until": 2000.0}, {})
    assert ledger.account() == {**NONE, "begun": 900.0, "until": 1000.0}


def test_a_runs_account_sums_to_its_wall_time_and_is_kept_over_a_resume(tmp_path: Path) -> None:
    keys = {"model.kind": "mlp", "model.hidden": [8], "log.tensorboard": False, "evaluate.every": 4}
    jt.train("digits", run_dir=tmp_path / "run", quiet=True, **{**keys, "train.duration": 12}).close()
    first = jt.load_run(tmp_path / "run").folder.read_status()["time"]
    jt.resume(tmp_path / "run", quiet=True, **{"train.duration": 24}).close()
    second = jt.load_run(tmp_path / "run").folder.read_status()["time"]
    for account in (first, second):
        assert wall(account) == pytest.approx(account["until"] - account["begun"], abs=0.05)
        assert all(account[share] >= 0 for share in SHARES)
    used = ("init", "compile", "train", "evaluate", "save", "other")
    assert all(first[share] > 0 for share in used)
    assert all(second[share] > first[share] for share in used)
    assert first["begun"] < second["begun"]
    assert first["pause"] == second["pause"] == 0
    # What was evaluated after the last save, the test of the best step, is done again by the longer run.
    assert 0 < second["lost"] <= first["evaluate"]
    assert "Where the time went" in (tmp_path / "run/report.html").read_text()
