"""Two processes, of which one dies or stands still: the other ends soon, with 70 and one line (dist_peer_dies).

Under the supervisor both go on, and six faults later the run has ended as an undisturbed one does.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from launch_helpers import ONE_DEVICE, arrays, rows

from jaxtrain.launch.local import free_port

FLAGS = ["digits", "--model.kind=mlp", "--model.hidden=[16]", "--augment.shift=0", "--train.steps_per_dispatch=1"]
FLAGS += ["--log.every=10", "--evaluate.every=0", "--log.tensorboard=false", "--quiet"]
LIMIT = 20.0
"""Seconds after which the other has ended. Two of them are the machine's; those of guard.stall_limit come on top."""
STEPS, EVERY = 1200, 20
FAILS_IN_FIRST = """
import sys
from jaxtrain.checkpoint import Checkpoints
from jaxtrain.cli.main import main
from jaxtrain.parallel import processes
save = Checkpoints.save
def failing(self, step, state, meta):
    if step > 20 and processes.is_first():
        raise RuntimeError("only in the first")
    save(self, step, state, meta)
Checkpoints.save = failing
main(sys.argv[1:])
"""


def until(condition: Callable[[], bool], *all_of_them: subprocess.Popen[str]) -> None:
    end = time.monotonic() + 180
    while not condition():
        assert all(p.poll() is None for p in all_of_them), [p.communicate()[1][-2000:] for p in all_of_them]
        assert time.monotonic() < end
        time.sleep(0.002)


def sealed(folder: Path) -> list[int]:
    return sorted(int(path.parent.name) for path in folder.glob("checkpoints/[0-9]*/manifest.json"))


@contextmanager
def pair(
    folder: Path, *more: str, program: tuple[str, ...] = ("-m", "jaxtrain")
) -> Iterator[list[subprocess.Popen[str]]]:
    """Two processes without a launcher that would end one when the other has ended, both in training."""
    there = {"JAXTRAIN_COORDINATOR": f"127.0.0.1:{free_port()}", "JAXTRAIN_PROCESSES": "2"}
    flags = ["train", *FLAGS, "--train.duration=1000000", f"--checkpoint.every={EVERY}", f"--run-dir={folder}", *more]
    both = [
        subprocess.Popen(
            [sys.executable, *program, *flags],
            env={**ONE_DEVICE, **there, "JAXTRAIN_PROCESS": str(number)},
            text=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        for number in range(2)
    ]
    try:
        until(lambda: bool(sealed(folder)), *both)
        yield both
    finally:
        for process in both:
            process.kill()
            process.wait()


@pytest.mark.parametrize("number", [0, 1], ids=["coordinator", "worker"])
def test_fault_dist_peer_dies_a_killed_process_ends_the_other(number: int, tmp_path: Path) -> None:
    with pair(tmp_path / "run") as both:
        both[number].kill()
        _, err = both[1 - number].communicate(timeout=LIMIT)
    assert both[1 - number].returncode == 70
    assert err.splitlines()[-1].startswith("jaxtrain: another process has failed or is lost: ")
    assert err.splitlines()[-1].endswith("; restart them all")
    assert "Traceback" not in err


def test_fault_dist_peer_dies_a_stopped_process_ends_the_other(tmp_path: Path) -> None:
    with pair(tmp_path / "run", "--guard.stall_limit=4s") as both:
        both[1].send_signal(signal.SIGSTOP)
        _, err = both[0].communicate(timeout=LIMIT + 4)
    assert both[0].returncode == 70
    (crash,) = [path for path in (tmp_path / "run/crash").iterdir() if path.is_dir()]
    said = re.fullmatch(
        r"jaxtrain: no progress for 4 s after step (\d+) \(guard\.stall_limit\); stacks: (.*)", err.splitlines()[-1]
    )
    assert said is not None, err
    assert int(said[1]) >= EVERY
    assert said[2] == str(crash)
    assert re.search(r"loop\.py\W+line \d+ in fit\n", (crash / "stacks.txt").read_text())


def test_fault_dist_peer_dies_an_error_of_one_ends_both(tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text(FAILS_IN_FIRST)
    with pair(tmp_path / "run", program=(str(tmp_path / "fails.py"),)) as both:
        said = [process.communicate(timeout=LIMIT + 5)[1].splitlines() for process in both]
    assert [process.returncode for process in both] == [1, 70]
    assert "only in the first" in said[0][-1]
    assert said[1][-1].startswith("jaxtrain: another process has failed or is lost: ")
    assert sealed(tmp_path / "run") == [EVERY]


def test_six_faults_of_two_processes_change_nothing(tmp_path: Path) -> None:
    """Kill the worker, kill the coordinator, SIGTERM each, stop one, SIGKILL during a save."""
    flags = [*FLAGS, f"--train.duration={STEPS}", f"--checkpoint.every={EVERY}", "--guard.stall_limit=3s"]
    command = [sys.executable, "-m", "jaxtrain", "launch", "--processes=2", *flags]
    subprocess.run([*command, f"--run-dir={tmp_path / 'calm'}"], env=ONE_DEVICE, check=True, timeout=300)
    folder, ports, restarts = tmp_path / "run", [], []
    parent = subprocess.Popen(
        [*command, "--supervise", f"--run-dir={folder}"], env=ONE_DEVICE, text=True, stderr=subprocess.PIPE
    )
    try:
        for number, what in [(1, "KILL"), (0, "KILL"), (1, "TERM"), (0, "TERM"), (1, "STOP"), (0, "KILL")]:
            newest = max(sealed(folder), default=0)
            until(lambda newest=newest: max(sealed(folder), default=0) > newest, parent)  # type: ignore[misc]
            children = sorted(psutil.Process(parent.pid).children(), key=lambda child: child.pid)
            ports.append(children[0].environ()["JAXTRAIN_COORDINATOR"])
            if len(ports) == 6:
                until(lambda: saving(folder), parent)
            children[number].send_signal(getattr(signal, f"SIG{what}"))
            until(lambda: len(restarted(folder)) == len(ports), parent)
        _, err = parent.communicate(timeout=120)
    finally:
        parent.kill()
        parent.wait()
    restarts = restarted(folder)
    assert parent.returncode == 0, err
    assert [event["code"] for event in restarts] == [70, 70, 75, 75, 70, 70]
    assert [event["why"][:9] for event in restarts if event["code"] == 70][:2] == ["process 1", "process 0"]
    assert len(set(ports)) == 6  # a port of its own for each start
    steps = [event["step"] for event in restarts]
    assert sorted(set(steps)) == steps, "each has gone on from a newer step"
    assert 0 < steps[0] < steps[-1] < STEPS
    assert rows(folder) == rows(tmp_path / "calm")
    left, right = arrays(folder, STEPS), arrays(tmp_path / "calm", STEPS)
    assert left.keys() == right.keys()
    assert [name for name in left if left[name].tobytes() != right[name].tobytes()] == []


def saving(folder: Path) -> bool:
    """Whether a step is there that is not sealed yet."""
    return any(not (path / "manifest.json").exists() for path in folder.glob("checkpoints/[0-9]*") if path.is_dir())


def restarted(folder: Path) -> list[dict[str, object]]:
    lines = (folder / "journal.jsonl").read_text().splitlines() if (folder / "journal.jsonl").exists() else []
    return [event for event in map(json.loads, lines) if event["event"] == "restart"]
