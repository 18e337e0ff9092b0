"""Run k + resume = run n, bit for bit: state, metrics.jsonl outside time/, best step, patience."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from run_helpers import TINY, differing, host, rows_without_time, stop_at, tiny

import jaxtrain as jt
from jaxtrain.checkpoint import Checkpoints
from jaxtrain.config import load
from jaxtrain.core.schedules import SCHEDULES, make_schedule
from jaxtrain.data.order import batch_rows

# Everything that has a memory: BatchNorm, dropout, EMA, augmentation, accumulation, patience, a moving optimizer.
RICH = {
    "model.kind": "cnn",
    "model.channels": [4],
    "model.dense": [8],
    "model.dropout": 0.2,
    "augment.shift": 1,
    "train.ema_decay": 0.9,
    "train.micro_batch_size": 32,
    "early_stopping.patience": 3,
    "optimizer.peak_lr": 0.02,
    "optimizer.clip_norm": 0.5,
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> jt.Run:
    return tiny(tmp_path_factory.mktemp("whole") / "run", **RICH)


@pytest.mark.parametrize("k", [1, 7, 8, 15, 23])
def test_stopped_and_resumed_equals_uninterrupted(
    whole: jt.Run, k: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_at(monkeypatch, k)
    with tiny(tmp_path / "run", **RICH) as stopped:
        assert stopped.exit_code == 130
        assert int(stopped.state["step"]) == k
        assert differing(stopped.state, whole.state) != []  # the control: it is not there yet
    monkeypatch.undo()
    resumed = jt.resume(tmp_path / "run", quiet=True)
    assert differing(resumed.state, whole.state) == []
    assert rows_without_time(resumed) == rows_without_time(whole)
    assert resumed.result["best"] == whole.result["best"]
    assert resumed.test == whole.test
    assert _saved_hooks(resumed) == _saved_hooks(whole)


def test_moments_in_8_bits_go_on_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"model.hidden": [128], "optimizer.moment_dtype": "int8"}  # a matrix of 64 x 128 is large enough
    whole = tiny(tmp_path / "whole", **options)
    stop_at(monkeypatch, 11)
    tiny(tmp_path / "run", **options).close()
    monkeypatch.undo()
    resumed = jt.resume(tmp_path / "run", quiet=True)
    assert differing(resumed.state, whole.state) == []
    assert rows_without_time(resumed) == rows_without_time(whole)
    kept = whole.state["opt_state"][0]
    assert [str(m["layers.0.kernel"].codes.dtype) for m in (kept.mu, kept.nu)] == ["int8", "uint8"]
    assert np.unique(np.asarray(kept.nu["layers.0.kernel"].codes)).size > 50
    wide = tiny(tmp_path / "float32", **{"model.hidden": [128]})
    assert differing(wide.state["params"], whole.state["params"]) != []  # the control: 8 bits are seen


def _saved_hooks(run: jt.Run) -> dict[str, object]:
    newest = sorted((run.path / "checkpoints").glob("[0-9]*"))[-1]
    return json.loads((newest / "meta.json").read_text())["hooks"]


def test_patience_counts_over_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {
        "evaluate.every": 2,
        "early_stopping.patience": 3,
        "early_stopping.min_delta": 10.0,  # only the first evaluation can be an improvement
        "log.every": 1,
    }
    whole = tiny(tmp_path / "whole", **options)
    assert whole.stop.state == "early_stop"
    assert int(whole.state["step"]) == 8  # the first at 2, then 4, 6, 8 without improvement
    stop_at(monkeypatch, 5)
    tiny(tmp_path / "run", **options)
    monkeypatch.undo()
    resumed = jt.resume(tmp_path / "run", quiet=True)
    assert int(resumed.state["step"]) == 8
    assert resumed.stop.reason == whole.stop.reason


SCHEDULE_OPTIONS = {
    "constant": {"schedule.warmup": 3},
    "linear": {"schedule.warmup": 3},
    "cosine": {"schedule.warmup": 3, "schedule.end_factor": 0.1},
    "one_cycle": {},
    "wsd": {"schedule.warmup": 3, "schedule.decay": 5},
    "exponential": {"schedule.decay_every": 4},
    "piecewise": {"schedule.boundaries": [4, 9], "schedule.factors": [0.5, 0.1]},
    "inverse_sqrt": {"schedule.warmup": 3, "schedule.timescale": 4},
}


def test_all_schedules_are_tried() -> None:
    assert SCHEDULE_OPTIONS.keys() == SCHEDULES.keys()


@pytest.mark.parametrize("kind", SCHEDULE_OPTIONS)
def test_learning_rate_is_right_at_every_step_across_a_resume(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"schedule.kind": kind, **SCHEDULE_OPTIONS[kind], "train.duration": 12, "log.every": 1}
    stop_at(monkeypatch, 7)
    tiny(tmp_path / "run", **options).close()
    monkeypatch.undo()
    run = jt.resume(tmp_path / "run", quiet=True)
    config = load(TINY, options.items())
    schedule = make_schedule(config.schedule, config.optimizer.peak_lr, total_steps=12, steps_per_epoch=17)
    rates = {row["step"]: row["train/lr"] for row in run.metrics() if "train/lr" in row}
    assert list(rates) == list(range(1, 13))
    expected = [float(schedule(n)) for n in range(12)]
    np.testing.assert_allclose(list(rates.values()), expected, rtol=1e-6)
    restarted = [float(schedule(n)) for n in (*range(7), *range(5))]
    if kind != "constant":
        assert not np.allclose(list(rates.values()), restarted)  # the control: beginning again would show


def test_fault_loop_lr_resume(shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped after step 37 of 100: the next update uses lr[37]; accumulation does not move the schedule faster."""
    table = np.loadtxt(shared / "faults/loop_lr_resume/lr_expected.csv", delimiter=",", skiprows=1)
    options = {
        "optimizer.kind": "sgd",
        "optimizer.peak_lr": 0.1,
        "schedule.warmup": 10,
        "schedule.end_factor": 0.01,
        "train.duration": 100,
        "train.micro_batch_size": 16,
        "evaluate.every": 50,
        "log.every": 1,
    }
    stop_at(monkeypatch, 37)
    tiny(tmp_path / "run", **options).close()
    monkeypatch.undo()
    run = jt.resume(tmp_path / "run", quiet=True)
    rates = [row["train/lr"] for row in run.metrics() if "train/lr" in row]
    np.testing.assert_allclose(rates, table[:100, 1], rtol=1e-5)


def test_a_longer_duration_is_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tiny(tmp_path / "run").close()
    capfd.readouterr()
    run = jt.resume(tmp_path / "run", **{"train.duration": 30})
    said = capfd.readouterr().err
    assert "changed: train.duration 24 -> 30; the schedule is drawn anew over the new length" in said
    assert int(run.state["step"]) == 30
    steps = [row["step"] for row in run.metrics()]
    assert steps == sorted(steps)
    names = [(row["step"], name) for row in run.metrics() for name in row if name not in ("step", "epoch")]
    assert len(names) == len(set(names))


def test_fault_loop_resume_mid_epoch(shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """23 rows, batch 4, 3 epochs: stopped after any step, the rows and the final parameters are the same."""
    table = np.loadtxt(shared / "faults/loop_resume_mid_epoch/ids.csv", delimiter=",", skiprows=1)
    arrays = {
        "inputs": table[:, 1:2].astype(np.float32),
        "targets": table[:, 2].astype(np.int64),
        "split": np.zeros(23),
    }
    arrays["split"] = arrays["split"].astype(np.int8)
    options = {"train.duration": "3ep", "train.global_batch_size": 4, "checkpoint.every": 1, "checkpoint.keep_last": 99}
    trainer = jt.Trainer(TINY, data=arrays, **options)
    whole = trainer.fit(run_dir=tmp_path / "whole", quiet=True)
    assert int(whole.state["step"]) == 18
    job = whole.job
    store = Checkpoints(whole.path / "checkpoints", metric="loss", mode="min")
    feed = job.feeder()
    for sealed in store.steps()[:-1]:
        state = store.restore(sealed, job.abstract_state)
        for step in range(sealed.step, 18):
            state, _ = job.advance(state, feed(step))
        assert differing(state, whole.state) == [], sealed.step
    epochs = [[], [], []]
    for position in range(18):
        rows, mask, epoch = batch_rows(0, position, 23, 4)
        epochs[int(epoch)] += rows[mask].tolist()
    assert [sorted(epoch) for epoch in epochs] == [list(range(23))] * 3
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_a_resume_with_other_data_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    inputs, targets = rng.normal(size=(60, 4)).astype(np.float32), rng.integers(0, 3, 60)
    stop_at(monkeypatch, 5)
    jt.Trainer(TINY, data=(inputs, targets)).fit(run_dir=tmp_path / "run", quiet=True).close()
    monkeypatch.undo()
    inputs[3, 0] += 1e-3
    with pytest.raises(jt.ConfigError, match="has changed since step 5 was saved"):
        jt.Trainer(TINY, data=(inputs, targets)).resume(tmp_path / "run", quiet=True)
    inputs[3, 0] -= 1e-3


def test_a_corrupt_newest_step_is_set_aside_and_the_end_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = tiny(tmp_path / "whole")
    stop_at(monkeypatch, 20)
    tiny(tmp_path / "run", **{"checkpoint.every": 6}).close()
    monkeypatch.undo()
    newest = sorted((tmp_path / "run/checkpoints").glob("[0-9]*"))[-1]
    victim = max((p for p in newest.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(bytes(data))
    resumed = jt.resume(tmp_path / "run", quiet=True)
    assert (tmp_path / "run/checkpoints" / f".quarantine-{newest.name}").is_dir()
    events = [json.loads(line) for line in (tmp_path / "run/journal.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events] == ["quarantine", "resume"]
    assert victim.name in events[0]["why"]
    assert host(resumed.state["params"]).keys() == host(whole.state["params"]).keys()
    assert differing(resumed.state, whole.state) == []


def test_auto_resume_goes_on_and_treats_another_config_as_a_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    stop_at(monkeypatch, 10)
    tiny(tmp_path / "run").close()
    monkeypatch.undo()
    with pytest.raises(jt.ConfigError, match=r"train\.seed: a resume cannot change 0 to 3"):
        tiny(tmp_path / "run", auto_resume=True, **{"train.seed": 3})
    capfd.readouterr()
    run = jt.train(TINY, run_dir=tmp_path / "run", auto_resume=True, **{"train.duration": 26})
    assert int(run.state["step"]) == 26
    assert "changed: train.duration 24 -> 26" in capfd.readouterr().err
    again = jt.train(TINY, run_dir=tmp_path / "run", auto_resume=True, quiet=True, **{"train.duration": 26})
    assert again.test == run.test  # finished: nothing is done twice


def test_runs_without_validation_or_test_rows_say_so(tmp_path: Path) -> None:
    run = tiny(tmp_path / "a", **{"data.validation_fraction": 0.0})
    assert run.result["best"]["step"] == 24  # nothing chose: the last
    assert run.result["best"]["evaluation"] is None
    assert run.test["accuracy"] > 0
    run = tiny(tmp_path / "b", **{"data.test_fraction": 0.0})
    assert run.test == {}
    assert run.result["best"]["evaluation"]["loss"] > 0
    run = tiny(tmp_path / "c", **{"data.test_fraction": 0.0, "data.validation_fraction": 0.0})
    assert run.exit_code == 0
    assert (tmp_path / "c/report.html").exists()


def test_auto_resume_leaves_a_run_that_stopped_early_as_it_is(tmp_path: Path) -> None:
    options = {"evaluate.every": 2, "early_stopping.patience": 3, "early_stopping.min_delta": 10.0}
    run = tiny(tmp_path / "run", **options)
    assert run.stop.state == "early_stop"
    rows = rows_without_time(run)
    again = tiny(tmp_path / "run", auto_resume=True, **options)
    assert (again.stop.state, again.exit_code, again.test) == ("early_stop", 0, run.test)
    assert rows_without_time(again) == rows
    longer = tiny(tmp_path / "run", auto_resume=True, **{**options, "early_stopping.patience": 5})
    assert int(longer.state["step"]) == 12  # the control: two more evaluations of patience


def test_a_run_that_was_killed_after_its_last_save_is_tested_as_if_it_had_not_been(tmp_path: Path) -> None:
    run = tiny(tmp_path / "run", **{"train.duration": 23, "evaluate.every": 8})
    rows, folder = rows_without_time(run), run.folder
    run.close()
    folder.result.unlink()
    lines = folder.metrics.read_text().splitlines(keepends=True)
    folder.metrics.write_text("".join(line for line in lines if "test/" not in line))
    resumed = jt.resume(folder.path, quiet=True)
    assert (resumed.exit_code, resumed.test) == (0, run.test)
    assert rows_without_time(resumed) == rows
    assert folder.read_result()["best"] == run.result["best"]
    again = jt.resume(folder.path, quiet=True)
    assert again.state is None  # the control: now there is nothing left to do


def test_when_all_checkpoints_are_corrupt_only_allow_fresh_begins_anew_and_keeps_what_was_set_aside(
    tmp_path: Path,
) -> None:
    place = tmp_path / "run"
    tiny(place, **{"checkpoint.every": 8}).close()
    rows = [line for line in (place / "metrics.jsonl").read_text().splitlines() if "test/" not in line]
    for meta in place.glob("checkpoints/*/meta.json"):
        meta.write_text("{}")
    for _ in range(2):  # the second finds what was set aside, and nothing else
        with pytest.raises(jt.NeedsPerson, match=r"or begin anew with .* --allow-fresh"):
            tiny(place, auto_resume=True, **{"checkpoint.every": 8})
    assert len((place / "metrics.jsonl").read_text().splitlines()) == len(rows) + 1  # nothing was touched
    anew = tiny(place, auto_resume=True, allow_fresh=True, **{"checkpoint.every": 8})
    assert (anew.exit_code, int(anew.state["step"])) == (0, 24)
    assert len(list(place.glob("checkpoints/.quarantine-*/why.txt"))) == 2
    events = [json.loads(line)["event"] for line in (place / "journal.jsonl").read_text().splitlines()]
    assert events == ["quarantine"] * 2


def test_one_process_at_a_time_writes_a_run(tmp_path: Path) -> None:
    run = tiny(tmp_path / "run")
    with run.folder.writing():
        with pytest.raises(jt.ConfigError, match=r"is in use by process \d+ on .*; wait for it to end, or stop it"):
            jt.resume(tmp_path / "run", quiet=True, **{"train.duration": 30})
        with pytest.raises(jt.ConfigError, match="is in use by process"):
            tiny(tmp_path / "run", overwrite=True)
        assert run.folder.read_status()["state"] == "done"
    assert int(jt.resume(tmp_path / "run", quiet=True, **{"train.duration": 30}).state["step"]) == 30  # the control


def test_another_type_of_moments_needs_cast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stop_at(monkeypatch, 11)
    with tiny(tmp_path / "run") as stopped:
        before = np.asarray(stopped.state["opt_state"][0].mu["head.kernel"])
    monkeypatch.undo()
    narrow = {"optimizer.moment_dtype": "bfloat16", "train.duration": 24}
    with pytest.raises(jt.ConfigError, match=r"moment_dtype: .*--cast converts floats"):
        jt.resume(tmp_path / "run", quiet=True, **narrow)
    stop_at(monkeypatch, 12)
    resumed = jt.resume(tmp_path / "run", quiet=True, cast=True, **narrow)
    after = resumed.state["opt_state"][0].mu["head.kernel"]
    assert str(after.dtype) == "bfloat16"
    assert np.abs(np.asarray(after, np.float32)).max() > 0.1 * np.abs(before).max()  # carried over, not begun anew
    with pytest.raises(jt.ConfigError, match="int8"):
        jt.resume(tmp_path / "run", quiet=True, **{"optimizer.moment_dtype": "int8"})


def test_a_run_that_has_no_room_for_a_checkpoint_ends_before_its_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(jt.NeedsPerson, match=r"no room for a checkpoint: it needs \S+ MB, 1 kB are free; no step is"):
        tiny(tmp_path / "run")
    assert not (tmp_path / "run/metrics.jsonl").exists()
