"""metrics.jsonl, TensorBoard, status.json, run.log: what they hold, and that a broken one stops nothing."""

from __future__ import annotations

import csv
import json
import logging
import math
import os
import re
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hooks_helpers import evaluation, events, no_constant, scalars, strict_rows, tiny, untimed

import jaxtrain as jt
from jaxtrain.hooks.control import Evaluator
from jaxtrain.hooks.folder import RunFolder, names
from jaxtrain.hooks.ledger import Ledger
from jaxtrain.hooks.writers import Clock, Jsonl, RunLog, Status, TensorBoard
from jaxtrain.loop import Stop

# ------------------------------------------------------------ metrics.jsonl


def test_metrics_are_strict_json_with_nan_as_a_word(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    writer = Jsonl(folder, steps_per_epoch=4, clock=Clock(64, lambda: 0.0))
    writer.on_metrics(1, {"loss": math.nan, "grad_norm": math.inf})
    writer.on_evaluation(2, evaluation(-math.inf))
    rows = strict_rows(folder.metrics)
    assert rows[0]["train/loss"] == "NaN"
    assert rows[0]["train/grad_norm"] == "Infinity"
    assert rows[1] == {"step": 2, "epoch": 0.5, "eval/loss": "-Infinity"}
    again = folder.rows()
    assert math.isnan(again[0]["train/loss"])
    assert again[1]["eval/loss"] == -math.inf
    with pytest.raises(AssertionError, match="NaN is not JSON"):
        json.loads(json.dumps({"train/loss": math.nan}), parse_constant=no_constant)  # the control arm


def test_the_clock_times_the_steps_since_the_last_row_evaluation_or_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, waited = 100.0, 5.0
    monkeypatch.setattr("jaxtrain.hooks.writers.time.perf_counter", lambda: now)
    clock = Clock(64, lambda: waited)
    writer = Jsonl(RunFolder(tmp_path), 4, clock)

    def row(step: int) -> dict[str, float]:
        clock.on_metrics(step, {})
        writer.on_metrics(step, {})
        last = strict_rows(tmp_path / "metrics.jsonl")[-1]
        return {name: value for name, value in last.items() if name.startswith("time/")}

    clock.start(5)
    now, waited = 102.0, 6.0
    assert row(10) == {"time/step": 0.4, "time/data_wait": 0.2, "time/examples_per_s": 160.0}
    clock.knows(flops=3_000, peak=24_000.0)
    now = 107.0
    expected = {"time/step": 0.5, "time/data_wait": 0.0, "time/examples_per_s": 128.0, "time/mfu": 0.25}
    assert row(20) == expected
    now, waited = 117.0, 16.0
    clock.on_evaluation(20, evaluation(1.0))
    now = 120.0
    clock.on_save(22)
    now = 122.0
    assert row(26) == expected
    assert row(26) == {}  # a row after an evaluation of its own step: no step has been timed
    clock.knows(flops=3_000, peak=None)
    now = 124.0
    assert "time/mfu" not in row(30)


@pytest.mark.parametrize(("duration", "every"), [(24, 5), (20, 5), (1, 5)])
def test_first_and_last_step_are_there_and_no_name_twice_at_a_step(tmp_path: Path, duration: int, every: int) -> None:
    with tiny(tmp_path / "run", **{"train.duration": duration, "log.every": every}) as run:
        rows = strict_rows(run.path / "metrics.jsonl")
    steps = [row["step"] for row in rows if "train/loss" in row]
    assert steps == sorted({1, *range(every, duration + 1, every), duration})
    assert [row["step"] for row in rows if "eval/loss" in row] == sorted({*range(8, duration + 1, 8), duration})
    assert [row["step"] for row in rows if "test/loss" in row] == [duration]
    pairs = Counter((row["step"], name) for row in rows for name in row if "/" in name)
    assert set(pairs.values()) == {1}


def test_only_names_under_time_differ_between_two_runs(tmp_path: Path) -> None:
    with tiny(tmp_path / "a") as a, tiny(tmp_path / "b") as b:
        rows = [strict_rows(run.path / "metrics.jsonl") for run in (a, b)]
    assert untimed(rows[0]) == untimed(rows[1])
    timed = [f"time/{name}" for name in ("step", "data_wait", "examples_per_s", "mfu")]
    assert [name for name in names(rows[0]) if name.startswith("time/")] == timed
    assert rows[0] != rows[1]


# ------------------------------------------------------------ a writer that breaks


def test_a_full_disk_under_metrics_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = RunFolder(tmp_path)
    folder.metrics = Path("/dev/full")
    writer = Jsonl(folder, 4, Clock(64, lambda: 0.0))
    with caplog.at_level(logging.WARNING, "jaxtrain"):
        for step in (1, 2, 3):
            writer.write(step, {"train/loss": 0.0})
    assert [record.getMessage() for record in caplog.records] == [
        "metrics.jsonl stopped writing: OSError: [Errno 28] No space left on device; training goes on"
    ]


def test_training_with_broken_writers_ends_with_the_same_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with tiny(tmp_path / "whole") as whole:
        figures = whole.test

    def full(*args: Any, **values: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("jaxtrain.hooks.writers.strict", full)
    monkeypatch.setattr("tensorboardX.SummaryWriter", full)
    monkeypatch.setattr(RunFolder, "write_status", full)
    with tiny(tmp_path / "broken", quiet=False, **{"log.tensorboard": True}) as broken:
        assert broken.test == figures
        assert broken.exit_code == 0
        log = (broken.path / "run.log").read_text()
    shown = capfd.readouterr().err
    for name in ("metrics.jsonl", "TensorBoard", "status.json"):
        line = f"{name} stopped writing: OSError: [Errno 28] No space left on device; training goes on"
        assert shown.count(line) == 1
        assert log.count(line) == 1


def test_training_works_without_tensorboardx_and_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with tiny(tmp_path / "run", quiet=False, **{"log.tensorboard": True}) as run:
        assert run.exit_code == 0
        assert list(run.path.glob("events.*")) == []
    shown = capfd.readouterr().err
    assert shown.count("warning: ") == shown.count("TensorBoard stopped writing: ModuleNotFoundError") == 1


def test_without_tensorboard_nothing_is_written_or_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with tiny(tmp_path / "run", quiet=False) as run:
        assert list(run.path.glob("events.*")) == []
    assert "TensorBoard" not in capfd.readouterr().err


# ------------------------------------------------------------ TensorBoard


def test_fault_tb_resume_duplicates(shared: Path, tmp_path: Path) -> None:
    with (shared / "faults/tb_resume_duplicates/expected_scalars.csv").open() as file:
        table = list(csv.DictReader(file))
    first = {int(row["step"]): float(row["first_run"]) for row in table if int(row["step"]) <= 150}
    resumed = {int(row["step"]): float(row["after_resume"]) for row in table if row["after_resume"]}
    expected = {**{step: value for step, value in first.items() if step <= 100}, **resumed}
    assert sorted(expected) == list(range(0, 201, 10))

    folder = RunFolder(tmp_path)
    for begin, values in ((0, first), (100, resumed)):
        if begin:
            folder.truncate(begin, log_every=10, evaluate_every=0)
        clock = Clock(64, lambda: 0.0)
        writers = (Jsonl(folder, 10, clock), TensorBoard(folder, clock))
        for writer in writers:
            writer.start(begin)
            for step, value in values.items():
                writer.on_metrics(step, {"loss": value})
        writers[1].finish()
        (written,) = tmp_path.glob("events.out.*")  # a writer's file bears the second of its beginning
        written.rename(tmp_path / f"events.{begin:03d}")

    rows = strict_rows(folder.metrics)
    assert [row["step"] for row in rows] == list(range(0, 201, 10))
    assert {row["step"]: row["train/loss"] for row in rows} == expected
    read = [(step, value) for tag, step, value in scalars(tmp_path) if tag == "train/loss"]
    assert [step for step, _ in read] == list(range(0, 201, 10))
    assert dict(read) == pytest.approx(expected, rel=1e-6)  # float32 there
    twice = Counter(step for tag, step, _ in scalars(tmp_path, purge=False))
    assert [step for step, count in twice.items() if count == 2] == [110, 120, 130, 140, 150]  # the control arm


def test_a_run_resumed_from_an_older_step_shows_each_tag_once_a_step(tmp_path: Path) -> None:
    keys = {"log.tensorboard": True, "checkpoint.every": 10, "checkpoint.keep_last": 5}
    tiny(tmp_path / "run", **keys).close()

    def untimed() -> list[Any]:
        return sorted(row for row in scalars(tmp_path / "run") if not row[0].startswith("time/"))

    before = untimed()
    for step in (24, 20, 16):  # as if the process had been killed before they were sealed
        (tmp_path / f"run/checkpoints/{step:09d}/manifest.json").unlink()
    jt.resume(tmp_path / "run", quiet=True).close()
    after = scalars(tmp_path / "run")
    assert set(Counter((tag, step) for tag, step, _ in after).values()) == {1}
    assert untimed() == before
    assert max(Counter((tag, step) for tag, step, _ in scalars(tmp_path / "run", purge=False)).values()) == 2
    rows = strict_rows(tmp_path / "run/metrics.jsonl")
    assert set(Counter((row["step"], name) for row in rows for name in row if "/" in name).values()) == {1}


def test_tensorboard_holds_the_rows_of_metrics_jsonl_images_and_settings(tmp_path: Path) -> None:
    with tiny(tmp_path / "run", **{"log.tensorboard": True}) as run:
        rows = run.metrics()
        found = {(tag, step): value for tag, step, value in scalars(run.path)}
        images = {v.tag: e.step for e in events(run.path) for v in e.summary.value if v.WhichOneof("value") == "image"}
        settings = [p for p in run.path.rglob("events.*") if p.parent != run.path]
    named = {
        (name, row["step"]): value
        for row in rows
        for name, value in row.items()
        if name.startswith(("train/", "eval/", "test/", "time/")) and name != "test/best_step"
    }
    assert found.keys() == named.keys()
    assert [found[key] for key in named] == pytest.approx(list(named.values()), rel=1e-6)
    assert images.pop("confusion") == 24
    assert set(images.values()) == {0}
    assert all(tag.startswith("samples") for tag in images)
    assert len(settings) == 1


# ------------------------------------------------------------ status.json


def test_status_tells_the_run_from_running_to_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[dict[str, Any]] = []
    write = RunFolder.write_status

    def recording(self: RunFolder, **values: Any) -> None:
        write(self, **values)
        written.append(self.read_status())

    monkeypatch.setattr(RunFolder, "write_status", recording)
    tiny(tmp_path / "run").close()
    first, last = written[0], written[-1]
    assert set(last) == {"state", "reason", "step", "last_sealed", "best", "pid", "host", "time", "updated"}
    assert (first["state"], first["step"], first["last_sealed"], first["best"]) == ("running", 0, None, None)
    assert (last["state"], last["reason"], last["step"], last["last_sealed"]) == ("done", "24 steps", 24, 24)
    assert last["best"] == jt.load_run(tmp_path / "run").result["best"]["step"]
    assert (last["pid"], last["host"]) == (os.getpid(), os.uname().nodename)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", last["updated"])


def test_status_is_written_every_two_seconds_not_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = 100.0
    monkeypatch.setattr("jaxtrain.hooks.writers.time.monotonic", lambda: clock)
    folder = RunFolder(tmp_path)
    hook = Status(folder, lambda: (None, None), Ledger())
    hook.start(0)
    seen = []
    for step in range(1, 9):  # half a second a step
        clock += 0.5
        hook.after_step(step)
        seen.append(folder.read_status()["step"])
    assert seen == [0, 0, 0, 0, 5, 5, 5, 5]
    hook.close(Stop("done", "8 steps"))
    assert folder.read_status()["step"] == 8


@pytest.mark.parametrize(
    ("number", "state", "code"), [(signal.SIGINT, "interrupted", 130), (signal.SIGTERM, "preempted", 75)]
)
def test_a_signal_in_a_run_is_in_its_status_and_its_step_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, state: str, code: int
) -> None:
    def raising(self: Status, step: int) -> None:
        self._step = step
        if step == 11:
            signal.raise_signal(number)

    monkeypatch.setattr(Status, "after_step", raising)
    with tiny(tmp_path / "run") as run:
        status = run.folder.read_status()
        assert (run.exit_code, run.test) == (code, {})
        assert int(run.state["step"]) == status["step"] == status["last_sealed"]
    assert status["state"] == state
    assert status["step"] in (11, 12)


def test_an_error_in_a_run_is_in_its_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Evaluator, step: int) -> None:
        if step == 5:
            raise ValueError("boom\nand more")

    monkeypatch.setattr(Evaluator, "after_step", broken)
    with pytest.raises(ValueError, match="boom"):
        tiny(tmp_path / "run")
    status = RunFolder(tmp_path / "run").read_status()
    assert (status["state"], status["reason"]) == ("failed", "ValueError: boom")


# ------------------------------------------------------------ run.log


def test_run_log_has_the_opening_the_arrays_and_the_result_with_times(tmp_path: Path) -> None:
    with tiny(tmp_path / "run") as run:
        text = (run.path / "run.log").read_text()
    stamp = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} INFO "
    lines = text.splitlines()
    assert re.match(stamp + "tiny: mlp, ", lines[0])
    assert re.search(r"^total .* 1,210 .*$", text, re.MULTILINE)  # 64*16 + 16 + 16*10 + 10
    assert re.match(stamp + "next: jaxtrain ", lines[-1]) or "jaxtrain" in lines[-1]
    assert any(re.match(stamp + r"done \(24 steps\) in ", line) for line in lines)
    assert any(re.match(stamp + r"test: accuracy 0\.\d{4}, ", line) for line in lines)


def test_run_log_gives_the_logger_back_as_it_was(tmp_path: Path) -> None:
    logger = logging.getLogger("jaxtrain")
    before = (list(logger.handlers), logger.level, logger.propagate)
    log = RunLog(RunFolder(tmp_path))
    logger.info("inside")
    assert not logger.propagate
    log.close()
    logger.warning("outside")
    assert (list(logger.handlers), logger.level, logger.propagate) == before
    assert (tmp_path / "run.log").read_text().endswith(" INFO inside\n")


def test_pictures_of_any_size_can_be_written(tmp_path: Path) -> None:
    board = TensorBoard(RunFolder(tmp_path), Clock(64, lambda: 0.0), np.zeros((2, 8, 8, 1), np.uint8))
    board.start(0)
    board.image("confusion", np.zeros((4, 6, 3), np.uint8), 7)
    board.finish()
    sizes = [
        (value.tag, event.step, value.image.height, value.image.width)
        for event in events(tmp_path)
        for value in event.summary.value
    ]
    assert sizes[-1] == ("confusion", 7, 4, 6)
    assert sizes[0][:2] == ("samples", 0)
