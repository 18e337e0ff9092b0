"""jaxtrain resume: what it refuses and why, what it tells, finished runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cli_helpers import one_line, tree

from jaxtrain.hooks.folder import RunFolder
from jaxtrain.resuming import REFUSED

CHANGES = {
    "name": "--name=other",
    "data": "--data.split_seed=1",
    "model": "--model.hidden=[8]",
    "objective": "--objective.label_smoothing=0.1",
    "train.seed": "--train.seed=1",
    "train.global_batch_size": "--train.global_batch_size=32",
    "train.init_from": "--train.init_from=.",
    "train.ema_decay": "--train.ema_decay=0.9",
    "train.overfit_batches": "--train.overfit_batches=1",
    "optimizer.kind": "--optimizer.kind=sgd",
    "optimizer.moment_dtype": "--optimizer.moment_dtype=bfloat16",
    "evaluate.metric": "--evaluate.metric=accuracy",
    "evaluate.mode": "--evaluate.mode=max",
    "precision": "--precision=bf16",
}


def test_every_refused_key_is_tried() -> None:
    assert CHANGES.keys() == REFUSED.keys()


@pytest.mark.parametrize("key", REFUSED)
def test_a_change_that_makes_another_run_is_refused_with_its_reason(cli: Any, trained: Path, key: str) -> None:
    before = tree(trained)
    answer = cli("resume", trained, CHANGES[key], "--train.duration=30", "--quiet")
    assert (answer.code, answer.out) == (2, "")
    line = one_line(answer.err)
    assert line.startswith(CHANGES[key].removeprefix("--").split("=")[0] + ": a resume cannot change ")
    assert line.endswith(f": {REFUSED[key]}; train a new run with it instead")
    assert tree(trained) == before


def test_allowed_changes_are_told_written_down_and_done(cli: Any, trained: Path) -> None:
    answer = cli("resume", trained, "--train.duration=30", "--optimizer.peak_lr", "1e-4", "--log.every=4")
    assert (answer.code, answer.results[-1]) == (0, str(trained))
    told = [line for line in answer.err.splitlines() if line.startswith("changed: ")]
    assert sorted(told) == [
        "changed: log.every 50 -> 4",
        "changed: optimizer.peak_lr 0.003 -> 0.0001",
        "changed: train.duration 20 -> 30; the schedule is drawn anew over the new length",
    ]
    assert "resuming after step 20; 10 steps to go" in answer.err
    (line,) = (trained / "journal.jsonl").read_text().splitlines()
    assert json.loads(line)["step"] == 20
    rows = RunFolder(trained).rows()
    assert [row["step"] for row in rows if "train/loss" in row] == [1, 20, 24, 28, 30]
    assert [row["step"] for row in rows if "test/loss" in row] == [30]
    assert RunFolder(trained).read_status()["reason"] == "30 steps"


def test_a_finished_run_says_how_to_extend_it(cli: Any, trained: Path) -> None:
    before = tree(trained)
    answer = cli("resume", trained, "--quiet")
    assert answer.code == 0
    assert answer.err == "step 20 of 20 is reached; extend it: --train.duration=...\n"
    assert answer.results[-1] == str(trained)
    assert any(line.startswith("test/accuracy ") for line in answer.results)
    assert tree(trained) == before


def test_an_unknown_key_is_named(cli: Any, trained: Path) -> None:
    answer = cli("resume", trained, "--optimizer.peek_lr=1")
    assert (answer.code, answer.out) == (2, "")
    assert "optimizer.peak_lr" in answer.err.splitlines()[-1]


def test_a_run_is_found_as_the_last_and_by_the_start_of_its_id(
    cli: Any, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(trained.parents[2])
    for reference in ("last", "2026"):
        answer = cli("resume", reference, "--quiet")
        assert (answer.code, answer.results[-1]) == (0, "runs/digits/20260101T000000Z")


def test_a_run_without_a_checkpoint_needs_a_person(cli: Any, trained: Path) -> None:
    for manifest in trained.glob("checkpoints/*/manifest.json"):
        manifest.unlink()
    answer = cli("resume", trained, "--quiet")
    assert (answer.code, answer.out) == (78, "")
    assert one_line(answer.err) == (
        f"{trained}: its checkpoints are gone; bring a copy back, or begin anew with jaxtrain train --run-dir=... "
        "--resume=auto --allow-fresh"
    )
