"""jaxtrain runs | eval | report | config | init: looking at what is there."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_helpers import one_line, tree
from sklearn.datasets import load_digits

import jaxtrain as jt
from jaxtrain.config import dump, load
from jaxtrain.config.schema import RunConfig
from jaxtrain.config.schema_tools import dotted_keys, sections
from jaxtrain.hooks.folder import RunFolder

# ------------------------------------------------------------ runs


def test_without_runs_the_list_says_how_to_make_one(cli: Any) -> None:
    answer = cli("runs")
    assert (answer.code, answer.out) == (0, "no runs here yet; jaxtrain train digits makes one\n")


def test_runs_are_listed_with_state_step_and_figures(cli: Any, trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(trained.parents[2])
    result = RunFolder(trained).read_result()
    best = result["best"]
    header, row = cli("runs").results
    assert header.split() == ["name", "id", "state", "step", "best", "evaluation", "test"]
    assert row.split() == [
        "digits",
        "20260101T000000Z",
        "done",
        "20",
        str(best["step"]),
        "loss",
        f"{best['evaluation']['loss']:.4g}",
        "accuracy",
        f"{result['test']['accuracy']:.4g}",
    ]


def test_a_run_whose_process_is_gone_was_killed(cli: Any, trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(trained.parents[2])
    RunFolder(trained).write_status(state="running", pid=2**22 + 1)
    assert cli("runs").results[1].split()[2] == "killed"
    RunFolder(trained).write_status(state="running", pid=1)
    assert cli("runs").results[1].split()[2] == "running"


def test_two_runs_are_compared_by_what_differs(cli: Any, trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = Path(shutil.copytree(trained, trained.parent / "20260102T000000Z"))
    config = load(RunFolder(other).resolved, [("train.seed", 7), ("optimizer.peak_lr", 0.01)])
    (other / "resolved.yaml").write_text(dump(config))
    monkeypatch.chdir(trained.parents[2])
    answer = cli("runs", "20260101", "20260102")
    rows = {line.split("  ")[0]: line.split()[-2:] for line in answer.results[1:]}
    assert answer.code == 0
    assert answer.results[0].split() == ["20260101T000000Z", "20260102T000000Z"]
    assert rows["train.seed"] == ["0", "7"]
    assert rows["optimizer.peak_lr"] == ["0.003", "0.01"]
    assert not any(name.startswith(("model.", "data.")) for name in rows)
    assert rows["test/accuracy"][0] == rows["test/accuracy"][1]
    equal = cli("runs", "20260101", "20260101")
    assert "(configs are equal)" in equal.out


def test_one_run_cannot_be_compared(cli: Any, trained: Path) -> None:
    answer = cli("runs", trained)
    assert (answer.code, answer.out) == (2, "")
    assert one_line(answer.err) == "runs to compare: 1 given; two or more are needed"


# ------------------------------------------------------------ eval and report


def test_eval_repeats_the_test_figures_of_the_run(cli: Any, finished: Path) -> None:
    answer = cli("eval", finished)
    result = RunFolder(finished).read_result()
    assert answer.code == 0
    *figures, step = answer.results
    assert figures == [f"test/{name} {value:.6g}" for name, value in sorted(result["test"].items())]
    assert step == f"step {result['best']['step']}"


def test_eval_takes_a_split_and_a_step(cli: Any, finished: Path) -> None:
    rows = {row["step"]: row["eval/loss"] for row in RunFolder(finished).rows() if "eval/loss" in row}
    for which, step in (("last", 20), ("20", 20), ("17", 17)):
        answer = cli("eval", finished, "--split=validation", f"--step={which}")
        assert f"validation/loss {rows[step]:.6g}" in answer.results
        assert answer.results[-1] == f"step {step}"


def test_eval_of_a_step_that_is_not_there_names_those_that_are(cli: Any, finished: Path) -> None:
    answer = cli("eval", finished, "--step", "7")
    assert (answer.code, answer.out) == (2, "")
    assert one_line(answer.err) == "checkpoint '7' is not there; allowed: best, last, 17, 20"


def test_eval_of_a_split_that_is_not_there_names_those_that_are(cli: Any, finished: Path) -> None:
    answer = cli("eval", finished, "--split", "val")
    assert (answer.code, answer.out) == (2, "")
    assert one_line(answer.err) == "split 'val' is not allowed; allowed: train, validation, test"


def test_eval_of_other_data_says_other(cli: Any, finished: Path) -> None:
    digits = load_digits()
    inputs = digits.images[:50, ..., None].astype(np.float32)
    np.savez("some.npz", inputs=inputs, targets=digits.target[:50])
    answer = cli("eval", finished, "--path=some.npz")
    figures = {name: float(value) for name, value in (line.split() for line in answer.results)}
    assert (answer.code, answer.err) == (0, "")
    model = jt.load_model(finished)
    right = np.array(model.predict(inputs)) == digits.target[:50].astype(str)
    assert figures["other/accuracy"] == pytest.approx(right.mean(), abs=1e-6)
    assert all(name.startswith("other/") for name in figures if name != "step")
    assert figures["step"] == model.step
    own = {line.split()[0].partition("/")[0] for line in cli("eval", finished).results[:-1]}
    assert own == {"test"}  # the control
    last = cli("eval", finished, "--path", "some.npz", "--step", "last").results
    assert last[-1] == "step 20"


def test_eval_of_a_path_that_is_nothing_to_evaluate_is_one_line(cli: Any, finished: Path) -> None:
    Path("some.txt").write_text("7")
    for path, words in (("nowhere.npz", "no such file or folder"), ("some.txt", "allowed: an .npz")):
        answer = cli("eval", finished, f"--path={path}")
        assert (answer.code, answer.out) == (2, "")
        assert path in one_line(answer.err)
        assert words in answer.err


def test_report_writes_anew_and_prints_its_path(cli: Any, trained: Path) -> None:
    (trained / "report.html").unlink()
    answer = cli("report", trained)
    assert (answer.code, answer.out) == (0, f"{trained / 'report.html'}\n")
    assert (trained / "report.html").read_text().lstrip().lower().startswith("<!doctype html>")


# ------------------------------------------------------------ config


def test_shipped_configs_are_listed_with_their_files(cli: Any) -> None:
    rows = [line.split() for line in cli("config", "list").results]
    assert "digits" in [name for name, _ in rows]
    assert all(Path(path).is_file() for _, path in rows)


def test_the_schema_is_json_and_knows_the_sections(cli: Any) -> None:
    answer = cli("config", "schema")
    schema = json.loads(answer.out)
    assert answer.code == 0
    assert set(sections()) <= set(schema["properties"])


def test_describe_tells_every_key(cli: Any) -> None:
    listed = [line.split()[0] for line in cli("config", "describe").out.split("\n\n")[0].splitlines()]
    assert listed == list(RunConfig.model_fields)
    for section in sections():
        told = cli("config", "describe", section)
        assert told.code == 0
        keys = [key.partition(".")[2] for key in dotted_keys() if key.startswith(f"{section}.")]
        assert [key for key in keys if key not in told.out] == []
    assert "peak_lr" in cli("config", "describe", "optimizer").out
    assert "nesterov" not in cli("config", "describe", "optimizer.adamw").out
    assert "nesterov" in cli("config", "describe", "optimizer.momentum").out


# ------------------------------------------------------------ init


def test_init_writes_a_config_and_a_model_that_train(cli: Any) -> None:
    answer = cli("init")
    assert (answer.code, answer.err) == (0, "")
    assert answer.results == ["config.yaml", "my_model.py"]
    run = cli("train", "config.yaml", "--train.duration=20", "--augment.shift=0", "--log.tensorboard=false", "--quiet")
    assert run.code == 0, run.err
    assert run.results[-1].startswith("runs/my_run/")
    assert any(line.startswith("test/accuracy ") for line in run.results)


def test_init_into_a_folder_makes_it(cli: Any) -> None:
    answer = cli("init", "deep/own")
    assert (answer.code, answer.results) == (0, ["deep/own/config.yaml", "deep/own/my_model.py"])


@pytest.mark.parametrize("name", ["config.yaml", "my_model.py"])
def test_init_overwrites_nothing(cli: Any, name: str) -> None:
    Path(name).write_text("mine")
    before = tree(Path.cwd())
    answer = cli("init")
    assert (answer.code, answer.out) == (2, "")
    assert one_line(answer.err) == f"{name} exists; nothing was written: name another folder"
    assert tree(Path.cwd()) == before
