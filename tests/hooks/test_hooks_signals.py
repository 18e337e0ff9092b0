"""Signals of a real process: Ctrl-C saves and ends with 130, a resume goes on; a second signal ends at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hooks_helpers import strict_rows, untimed

import jaxtrain as jt
from jaxtrain.hooks.control import TOGETHER, Signals
from jaxtrain.hooks.folder import RunFolder
from jaxtrain.loop import Stop
from jaxtrain.parallel.environment import HANDED_ON

KEYS: dict[str, Any] = {
    "model.kind": "mlp",
    "model.hidden": [16],
    "augment.shift": 0,
    "train.duration": 3000,
    "evaluate.every": 500,
    "log.every": 50,
    "log.tensorboard": False,
}


def until(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < end
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)


def test_ctrl_c_saves_and_a_resume_ends_as_if_nothing_had_happened(tmp_path: Path, compiled: str) -> None:
    folder = RunFolder(tmp_path / "run")
    flags = [f"--{key}={value}" for key, value in KEYS.items()]
    process = subprocess.Popen(
        [sys.executable, "-m", "jaxtrain", "train", "digits", *flags, f"--run-dir={folder.path}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "JAX_COMPILATION_CACHE_DIR": compiled, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"},
    )
    until(lambda: folder.metrics.exists() and len(folder.rows()) > 3, process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert out.splitlines() == [str(folder.path)]
    assert "stopping after this step and saving; a second signal ends at once" in err
    assert err.splitlines()[-1] == "interrupted: Ctrl-C"
    assert "Traceback" not in err
    status = folder.read_status()
    assert (status["state"], status["reason"]) == ("interrupted", "Ctrl-C")
    assert 0 < status["step"] < 3000
    assert status["last_sealed"] == status["step"]

    with jt.resume(folder.path, quiet=True) as resumed:
        assert resumed.exit_code == 0
        figures, rows = resumed.test, strict_rows(folder.metrics)
    with jt.train("digits", run_dir=tmp_path / "whole", quiet=True, **KEYS) as whole:
        assert figures == whole.test
        assert untimed(rows) == untimed(strict_rows(whole.folder.metrics))


def test_a_second_signal_ends_at_once() -> None:
    """A process that would not look at its first signal for a minute."""
    code = (
        "import time; from jaxtrain.hooks.control import Signals; s = Signals(); s.install(); print('up', flush=True)\n"
        "end = time.monotonic() + 60\n"
        "while time.monotonic() < end: time.sleep(0.05); s.pending() and print('seen', flush=True)"
    )
    cases = {signal.SIGINT: 130, signal.SIGTERM: 75, signal.SIGUSR1: 75}
    processes = {
        number: subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for number in cases
    }
    for number, process in processes.items():
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.send_signal(number)
        assert process.stdout.readline() == "seen\n"  # the control arm: one signal does not end it
        process.send_signal(number)
        process.communicate(timeout=20)
        assert process.returncode == cases[number]


def test_sigusr1_is_a_preemption_with_its_own_name() -> None:
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # unhandled it would end this process
    signals = Signals()
    signals.install()
    try:
        assert signals.pending() is None
        os.kill(os.getpid(), signal.SIGUSR1)
        assert signals.pending() == Stop("preempted", "SIGUSR1", 75)
    finally:
        signals.restore()
        assert signal.signal(signal.SIGUSR1, before) == signal.SIG_IGN


def test_signals_that_a_parent_hands_on_are_one_for_a_second() -> None:
    """A terminal, `timeout` and Slurm reach parent and child; the save must survive that."""
    code = (
        "import time; from jaxtrain.hooks.control import Signals; s = Signals(); s.install(); print('up', flush=True)\n"
        "end = time.monotonic() + 60\n"
        "while time.monotonic() < end: time.sleep(0.05); s.pending() and print('seen', flush=True)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env={**os.environ, HANDED_ON: "1"}
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "seen\n"
    since = time.monotonic()
    process.send_signal(signal.SIGTERM)
    while time.monotonic() < since + TOGETHER:
        assert process.stdout.readline() == "seen\n"
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)
    assert process.returncode == 75
