"""The run folder: finding runs, the journal, what a resume drops."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest
from hooks_helpers import no_constant, tiny

import jaxtrain as jt
from jaxtrain.config import ConfigError
from jaxtrain.hooks.console import Console
from jaxtrain.hooks.folder import RunFolder, find_run, list_runs, new_folder


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Three runs of two names."""
    for name in ("a/20260101T000000Z", "b/20260102T000000Z", "a/20260102T120000Z"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "resolved.yaml").write_text("name: x\n")
    (tmp_path / "runs/a/20260103T000000Z").mkdir()  # no run lives here
    return tmp_path / "runs"


def test_runs_are_listed_oldest_first(runs: Path) -> None:
    assert [run.id for run in list_runs(runs)] == ["20260101T000000Z", "20260102T000000Z", "20260102T120000Z"]
    assert list_runs(runs / "nowhere") == []


@pytest.mark.parametrize(
    ("reference", "found"),
    [
        ("last", "a/20260102T120000Z"),
        ("20260101", "a/20260101T000000Z"),
        ("20260102T12", "a/20260102T120000Z"),
        ("20260102T000000Z", "b/20260102T000000Z"),
    ],
)
def test_a_run_is_found_by_the_start_of_its_id_or_as_the_last(runs: Path, reference: str, found: str) -> None:
    assert find_run(reference, runs).path == runs / found


def test_a_run_is_found_by_its_path_wherever_it_is(runs: Path, tmp_path: Path) -> None:
    assert find_run(runs / "b/20260102T000000Z", tmp_path / "elsewhere").path == runs / "b/20260102T000000Z"
    assert find_run(str(runs / "b/20260102T000000Z")).id == "20260102T000000Z"


def test_an_ambiguous_start_names_what_it_could_be(runs: Path) -> None:
    with pytest.raises(ConfigError) as error:
        find_run("20260102", runs)
    assert str(error.value) == ("run '20260102' is ambiguous; newest: 20260102T000000Z, 20260102T120000Z (or: last)")


def test_an_unknown_run_names_what_is_there(runs: Path) -> None:
    with pytest.raises(ConfigError) as error:
        find_run("nothing", runs)
    assert str(error.value) == (
        "run 'nothing' is no run folder and no start of an id; "
        "newest: 20260101T000000Z, 20260102T000000Z, 20260102T120000Z (or: last)"
    )


def test_without_runs_the_place_is_named_and_what_makes_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        find_run("last", tmp_path / "runs")
    assert str(error.value) == f"run 'last': no runs in {tmp_path / 'runs'}; jaxtrain train makes one"


def test_two_runs_in_one_second_have_their_own_folders(tmp_path: Path) -> None:
    folders = [new_folder("x", tmp_path) for _ in range(3)]
    assert len({folder.id for folder in folders}) == 3
    assert all(stat.S_IMODE(folder.path.stat().st_mode) == 0o700 for folder in folders)
    assert sorted(folder.id for folder in folders) == [folder.id for folder in folders]


def test_a_folder_that_cannot_be_made_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"run folder '.*file/run' cannot be written: Not a directory"):
        RunFolder(tmp_path / "file/run").create()
    with pytest.raises(ConfigError, match="cannot be made: Not a directory"):
        new_folder("x", tmp_path / "file")


# ------------------------------------------------------------ truncate


def metrics(folder: RunFolder, rows: list[dict[str, Any]], tail: str = "") -> None:
    folder.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows) + tail)


def test_truncate_drops_what_a_resume_writes_again(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    train = [{"step": step, "train/loss": float(step)} for step in (1, 10, 20, 25, 30)]
    evals = [{"step": step, "eval/loss": float(step)} for step in (20, 25, 30)]
    metrics(folder, [*train[:3], evals[0], train[3], evals[1], train[4], evals[2], {"step": 30, "test/loss": 0.5}])
    folder.truncate(25, log_every=10, evaluate_every=20)
    assert folder.rows() == [*train[:3], evals[0]]


def test_truncate_keeps_the_rows_at_the_step_that_belong_to_the_schedule(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    train = [{"step": step, "train/loss": float(step)} for step in (1, 10, 20, 30)]
    metrics(folder, [*train[:3], {"step": 20, "eval/loss": 0.5}, train[3]])
    folder.truncate(20, log_every=10, evaluate_every=20)
    assert folder.rows() == [*train[:3], {"step": 20, "eval/loss": 0.5}]
    folder.truncate(20, log_every=10, evaluate_every=0)  # an evaluation that only the end of the run made
    assert folder.rows() == train[:3]
    folder.truncate(1, log_every=10, evaluate_every=0)
    assert folder.rows() == train[:1]


def test_truncate_drops_the_half_line_of_a_killed_process(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    metrics(folder, [{"step": 1, "train/loss": 1.0}], '{"step": 10, "train/l')
    folder.truncate(20, log_every=10, evaluate_every=0)
    assert folder.rows() == [{"step": 1, "train/loss": 1.0}]


def test_truncate_of_nothing_is_nothing(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.truncate(20, log_every=10, evaluate_every=0)
    assert folder.rows() == []


# ------------------------------------------------------------ journal


def test_the_journal_tells_the_resume_before_its_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny(tmp_path / "run").close()
    folder = RunFolder(tmp_path / "run")
    assert not folder.journal.exists()
    at_start: list[dict[str, Any]] = []
    start = Console.start

    def looking(self: Console, step: int) -> None:
        at_start.extend(json.loads(line) for line in folder.journal.read_text().splitlines())
        start(self, step)

    monkeypatch.setattr(Console, "start", looking)
    (folder.checkpoints / "000000024/manifest.json").unlink()  # as if it had been killed before
    jt.resume(folder.path, quiet=True, **{"checkpoint.keep_last": 5}).close()
    (line,) = at_start
    assert (line["event"], line["step"]) == ("resume", 16)
    assert line["changes"] == {"checkpoint.keep_last": [2, 5]}
    assert line["time"].endswith("+00:00")


def test_the_journal_is_strict_json(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.note("set", value=float("nan"), pair=(1, float("inf")))
    assert json.loads(folder.journal.read_text(), parse_constant=no_constant)["value"] == "NaN"


def test_all_files_of_a_run_have_their_names(tmp_path: Path) -> None:
    with tiny(tmp_path / "run", **{"log.tensorboard": True, "log.wrong_samples": 5}) as run:
        there = {path.name for path in run.path.iterdir()}
    named = {"config.yaml", "resolved.yaml", "env.json", "metrics.jsonl", "checkpoints", "samples", "report.html"}
    assert named | {"result.json", "run.log", "status.json"} <= there
    assert any(name.startswith("events.") for name in there)


# ------------------------------------------------------------ what the parent of a run sees


def test_the_newest_sealed_step_is_read_without_opening_it(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert folder.newest_sealed() is None
    for name in ("000000090", "000000100", "1000000000", ".quarantine-2000000000", ".trash-3000000000"):
        (folder.checkpoints / name).mkdir(parents=True)
        (folder.checkpoints / name / "manifest.json").write_text("{}")
    assert folder.newest_sealed() == 1000000000
    (folder.checkpoints / "1000000000/manifest.json").unlink()
    assert folder.newest_sealed() == 100


def test_a_run_that_begins_anew_keeps_its_journal_and_the_logs_of_its_processes(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.note("restart", step=None)
    for path in (folder.resolved, folder.log, tmp_path / "run.1.log"):
        path.write_text("text")
    folder.samples.mkdir()
    (folder.samples / "0.png").write_bytes(b"")
    for name in ("000000001", ".quarantine-000000002"):
        (folder.checkpoints / name).mkdir(parents=True)
    with folder.writing():
        folder.clear(all_of_it=False)
        assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", "checkpoints", "journal.jsonl", "run.1.log"]
        assert [path.name for path in folder.checkpoints.iterdir()] == [".quarantine-000000002"]
        folder.clear(all_of_it=True)
        assert [path.name for path in tmp_path.iterdir()] == [".lock"]
