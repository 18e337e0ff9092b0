"""Supervision: which ends are followed by a restart, after how long; and that a restarted run is the same run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from launch_helpers import ONE_DEVICE, arrays, rows

import jaxtrain as jt
from jaxtrain.launch.local import HandOn
from jaxtrain.launch.supervise import supervise

STEPS = 800
FLAGS = ["digits", "--model.kind=mlp", "--model.hidden=[16]", "--augment.shift=0", "--log.tensorboard=false"]
FLAGS += ["--log.every=100", "--evaluate.every=400", "--checkpoint.every=200", "--train.steps_per_dispatch=1"]
FLAGS += [f"--train.duration={STEPS}"]


# ------------------------------------------------------------ policy


class Runs:
    """A run that ends as told: (code, newest sealed step then) of each start."""

    def __init__(self, *ends: tuple[int, int | None], sealed: int | None = None) -> None:
        self.ends, self.sealed = list(ends), sealed
        self.starts: list[bool] = []
        self.said: list[str] = []
        self.notes: list[dict[str, object]] = []
        self.slept: list[float] = []

    def start(self, again: bool) -> tuple[int, str]:
        self.starts.append(again)
        code, self.sealed = self.ends.pop(0)
        return code, ""

    def note(self, event: str, **values: object) -> None:
        self.notes.append({"event": event, **values})

    def supervised(self, stopped: Callable[[], bool] = lambda: False) -> int:
        tell: dict[str, Any] = {"say": self.said.append, "note": self.note, "sleep": self.slept.append}
        return supervise(self.start, lambda: self.sealed, look="run.log", stopped=stopped, **tell)


@pytest.mark.parametrize("code", [0, 2, 78, 130, 3])
def test_an_end_that_would_come_again_is_the_end(code: int) -> None:
    runs = Runs((code, 10))
    assert runs.supervised() == code
    assert (runs.starts, runs.said, runs.notes, runs.slept) == ([False], [], [], [])


def test_an_exception_would_come_again_and_that_is_said() -> None:
    runs = Runs((1, 10))
    assert runs.supervised() == 1
    assert runs.said == ["not restarted: the run ended with 1, an error that would come again; look at run.log"]


@pytest.mark.parametrize("code", [70, -9, 137, 139, 134, -15])
def test_a_killed_process_is_started_again_after_a_second(code: int) -> None:
    runs = Runs((code, 10), (0, 20))
    assert runs.supervised() == 0
    assert (runs.starts, runs.slept) == ([False, True], [1.0])


def test_each_restart_is_told_and_noted() -> None:
    runs = Runs((137, None), (75, 30), (0, 40))
    assert runs.supervised() == 0
    assert runs.said == [
        "restart 1: the run ended with 137 (SIGKILL): this may pass; goes on in 1 s from the first step, as none is "
        "sealed",
        "restart 2: the run ended with 75: it has saved; goes on now from sealed step 30",
    ]
    first, second = runs.notes
    assert first == {
        "event": "restart",
        "step": None,
        "code": 137,
        "why": "the run ended with 137 (SIGKILL)",
        "seconds": 1.0,
    }
    assert second == {"event": "restart", "step": 30, "code": 75, "why": "the run ended with 75", "seconds": 0.0}


def test_pauses_double_up_to_a_minute_and_begin_anew_after_a_preemption() -> None:
    ends = [(70, step) for step in range(10, 100, 10)]
    runs = Runs(*ends, (75, 100), (70, 110), (-9, 120), (0, 130))
    assert runs.supervised() == 0
    assert runs.slept == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0, 0.0, 1.0, 2.0]


def test_three_restarts_in_a_row_without_a_newer_step_are_the_last() -> None:
    runs = Runs((70, 10), (70, 10), (70, 10), (-9, 10))
    assert runs.supervised() == 78
    assert runs.starts == [False, True, True, True]
    assert runs.slept == [1.0, 2.0, 4.0]
    assert runs.said[-1] == (
        "given up after 3 restarts without a newer step: the run ended with -9 (SIGKILL); at sealed step 10; "
        "look at run.log"
    )
    assert len(runs.notes) == 3


def test_preemptions_without_a_newer_step_end_as_well() -> None:
    runs = Runs(*[(75, None)] * 4)
    assert runs.supervised() == 78
    assert runs.slept == [0.0, 0.0, 0.0]


def test_a_newer_step_begins_the_count_anew() -> None:
    """Also one that is older than what was set aside as corrupt."""
    runs = Runs((70, 10), (70, 10), (70, 10), (70, 20), (70, 5), (70, 15), (70, 15), (70, 15), (70, 15), sealed=10)
    assert runs.supervised() == 78
    assert len(runs.starts) == 9


def test_a_run_that_was_told_to_stop_is_not_started_again() -> None:
    runs = Runs((75, 10))
    assert runs.supervised(stopped=lambda: bool(runs.starts)) == 75
    assert (runs.said, runs.slept) == ([], [])
    in_the_pause = Runs((-9, 10))
    assert in_the_pause.supervised(stopped=lambda: bool(in_the_pause.slept)) == 70
    assert in_the_pause.said[-1] == "not restarted: a signal came in the pause; the run ended with -9 (SIGKILL)"


def test_signals_wait_for_the_children_and_end_a_pause() -> None:
    class Child:
        def __init__(self) -> None:
            self.got: list[int] = []

        def send_signal(self, number: int) -> None:
            self.got.append(number)

    child: Any = Child()
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with HandOn() as signals:
        assert signals.first is None
        for number in (signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)
        begun = time.monotonic()
        signals.sleep(30.0)
        assert time.monotonic() - begun < 10.0
        signals.to([])
        assert sorted({signals.first, *signals._due}) == [signal.SIGINT, signal.SIGTERM]
        assert child.got == []
        signals.to([child])
        assert sorted(child.got) == [signal.SIGINT, signal.SIGTERM]
        signals.to([child])
        assert len(child.got) == 2
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


# ------------------------------------------------------------ processes


def begun(verb: str, folder: Path, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "jaxtrain", verb, *FLAGS, "--supervise", f"--run-dir={folder}", *more]
    return subprocess.Popen(command, env=ONE_DEVICE, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def until(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.005)


def sealed(folder: Path) -> Callable[[], bool]:
    return lambda: any(folder.glob("checkpoints/*/manifest.json"))


def children(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return sorted(psutil.Process(process.pid).children(), key=lambda child: child.pid)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "undisturbed"
    command = [sys.executable, "-m", "jaxtrain", "train", *FLAGS, "--quiet", f"--run-dir={folder}"]
    subprocess.run(command, env=ONE_DEVICE, check=True, capture_output=True, timeout=300)
    return folder


def test_a_run_that_is_killed_ends_as_if_nothing_had_happened(undisturbed: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    parent = begun("train", folder)
    until(sealed(folder), parent)
    (child,) = children(parent)
    child.kill()
    out, err = parent.communicate(timeout=120)
    assert parent.returncode == 0, err
    (line,) = [line for line in err.splitlines() if line.startswith("jaxtrain: ")]
    (note,) = [event for event in events(folder) if event["event"] == "restart"]
    step = note["step"]
    assert 0 < step < STEPS
    assert line == (
        f"jaxtrain: restart 1: process 0 ended with -9 (SIGKILL): this may pass; goes on in 1 s from sealed step {step}"
    )
    assert [event["step"] for event in events(folder) if event["event"] == "resume"] == [step]
    assert (note["code"], note["seconds"]) == (70, 1.0)
    # Results of the child alone, and the same run.
    assert [line.split()[0] for line in out.splitlines()[:-1]] == [f"test/{name}" for name in sorted(figures(folder))]
    assert out.splitlines()[-1] == str(folder)
    assert rows(folder) == rows(undisturbed)
    left, right = arrays(folder, STEPS), arrays(undisturbed, STEPS)
    assert left.keys() == right.keys()
    assert [name for name in left if left[name].tobytes() != right[name].tobytes()] == []


def events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]


def figures(folder: Path) -> dict[str, float]:
    return jt.load_run(folder).test


def test_a_signal_to_the_supervisor_saves_and_ends_and_a_resume_goes_on(undisturbed: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    parent = begun("train", folder, "--quiet")
    until(sealed(folder), parent)
    (child,) = children(parent)
    assert os.getpgid(child.pid) == child.pid != os.getpgid(parent.pid)  # what a terminal sends to all reaches it once
    parent.send_signal(signal.SIGTERM)
    _, err = parent.communicate(timeout=60)
    assert parent.returncode == 75, err
    assert "restart" not in err
    status = jt.load_run(folder).folder.read_status()
    assert status["state"] == "preempted"
    assert 0 < status["step"] == status["last_sealed"] < STEPS
    assert not (folder / "journal.jsonl").exists()

    refused = begun("train", folder)
    _, err = refused.communicate(timeout=60)
    assert refused.returncode == 2
    assert err == f"jaxtrain: run folder '{folder}' is used; go on with it: --resume=auto, or name another one\n"
    again = begun("train", folder, "--quiet", "--resume=auto")
    _, err = again.communicate(timeout=120)
    assert (again.returncode, err) == (0, "")
    assert rows(folder) == rows(undisturbed)


def jaxtrain(*arguments: str, place: Path, **more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "jaxtrain", *arguments]
    environment = {**ONE_DEVICE, **more}
    return subprocess.run(command, env=environment, cwd=place, capture_output=True, text=True, timeout=120)


def test_what_only_the_child_can_refuse_ends_at_once_and_leaves_nothing(tmp_path: Path) -> None:
    wrong = ["--mesh.data=3", "--quiet"]
    done = jaxtrain("train", "digits", "--supervise", *wrong, place=tmp_path)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert list(tmp_path.glob("runs/*/*")) == []


@pytest.mark.parametrize(
    ("flags", "environment", "line"),
    [
        (["--train.sed=3"], {}, "train.sed"),
        (["--overwrite"], {}, "--overwrite: not together with --supervise, which trains in a new or a resumed run"),
        ([], {"OMPI_COMM_WORLD_SIZE": "2"}, "--supervise: Open MPI has started this process as one of several"),
    ],
)
def test_what_cannot_be_supervised_is_one_line(
    flags: list[str], environment: dict[str, str], line: str, tmp_path: Path
) -> None:
    done = jaxtrain("train", "digits", "--supervise", *flags, place=tmp_path, **environment)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert line in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_supervisor_imports_no_jax() -> None:
    code = (
        "import sys, jaxtrain.cli.train, jaxtrain.cli.launch, jaxtrain.launch.supervise, jaxtrain.resuming\n"
        "assert not {'jax', 'numpy'} & sys.modules.keys(), 'jax'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert subprocess.run([sys.executable, "-c", "import numpy\n" + code], capture_output=True).returncode  # control
