"""Ends that nobody wanted: what a run leaves in crash/, and that a run that stands still is ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

LOSS = """
import os, time
import jax, jax.numpy as jnp, numpy as np
def call(step_ids):
    {body}
    return np.zeros((), np.float32)
def loss(model, batch):
    logs = jax.nn.log_softmax(model(batch["inputs"]))
    losses = -jnp.take_along_axis(logs, batch["targets"][:, None], 1)[:, 0]
    extra = jax.pure_callback(call, jax.ShapeDtypeStruct((), jnp.float32), batch["ids"])
    return losses.mean() + jax.lax.stop_gradient(extra) * 0
calls = 0
"""
COUNTED = "global calls; calls += 1\n    if calls == 6: {what}"


def begun(place: Path, body: str, *flags: str) -> subprocess.Popen[str]:
    place.mkdir()
    (place / "mine.py").write_text(LOSS.format(body=body))
    keys = ["--model.kind=mlp", "--model.hidden=[8]", "--augment.shift=0", "--log.tensorboard=false", "--log.every=1"]
    keys += ["--objective.kind=custom", f"--objective.target={place}/mine.py:loss", "--checkpoint.every=2"]
    keys += ["--train.steps_per_dispatch=1", "--evaluate.every=0"]
    command = [sys.executable, "-m", "jaxtrain", "train", "digits", f"--run-dir={place / 'run'}", "--quiet", *keys]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    return subprocess.Popen([*command, *flags], env=environment, stderr=subprocess.PIPE, text=True)


def crashes(place: Path) -> list[Path]:
    return sorted((place / "run/crash").glob("*"))


def test_an_error_in_a_step_leaves_its_traceback_stacks_and_rows(tmp_path: Path) -> None:
    process = begun(tmp_path / "a", COUNTED.format(what='raise ValueError("my own fault")'))
    _, said = process.communicate(timeout=120)
    assert process.returncode == 1, said
    (crash,) = crashes(tmp_path / "a")
    line = said.splitlines()[-1]
    assert line.startswith("jaxtrain: ")
    assert f"crash report: {crash}; --debug shows the traceback" in line
    assert "my own fault" in (crash / "traceback.txt").read_text()
    assert "Current thread" in (crash / "stacks.txt").read_text()
    about = json.loads((crash / "about.json").read_text())
    assert about["step"] in range(1, 10)
    assert len(about["ids"]) == 64
    assert {oct(p.stat().st_mode & 0o777) for p in crash.iterdir()} == {"0o600"}
    assert oct(crash.stat().st_mode & 0o777) == "0o700"


def test_a_run_that_stands_still_is_ended_with_its_stacks(tmp_path: Path) -> None:
    process = begun(tmp_path / "a", COUNTED.format(what="time.sleep(60)"), "--guard.stall_limit=2")
    since = time.monotonic()
    _, said = process.communicate(timeout=120)
    assert process.returncode == 70, said
    assert time.monotonic() - since < 45
    (crash,) = [path for path in crashes(tmp_path / "a") if path.is_dir()]
    line = said.splitlines()[-1]
    assert line.startswith("jaxtrain: no progress for 2 s after step ")
    assert line.endswith(f"(guard.stall_limit); stacks: {crash}")
    assert "in fit" in (crash / "stacks.txt").read_text()
    status = json.loads((tmp_path / "a/run/status.json").read_text())
    assert (status["state"], status["reason"].split(" after ")[0]) == ("failed", "no progress for 2 s")


def test_a_fault_in_native_code_leaves_its_stacks_and_an_orderly_end_nothing(tmp_path: Path) -> None:
    process = begun(tmp_path / "a", "time.sleep(0.05)")
    end = time.monotonic() + 60
    while not list((tmp_path / "a/run").glob("checkpoints/*/manifest.json")):
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.02)
    process.send_signal(signal.SIGSEGV)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGSEGV
    (fatal,) = crashes(tmp_path / "a")
    assert "Fatal Python error: Segmentation fault" in fatal.read_text()
    assert fatal.name == "fatal.0.txt"
    done = begun(tmp_path / "b", "pass", "--train.duration=4")
    _, said = done.communicate(timeout=60)
    assert done.returncode == 0, said
    assert not (tmp_path / "b/run/crash").exists()


def test_sigusr1_saves_and_ends_with_75(tmp_path: Path) -> None:
    process = begun(tmp_path / "a", "time.sleep(0.02)")
    end = time.monotonic() + 60
    while not list((tmp_path / "a/run").glob("checkpoints/*/manifest.json")):
        assert time.monotonic() < end
        time.sleep(0.02)
    process.send_signal(signal.SIGUSR1)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 75, said
    status = json.loads((tmp_path / "a/run/status.json").read_text())
    assert (status["state"], status["reason"], status["step"]) == ("preempted", "SIGUSR1", status["last_sealed"])
    assert crashes(tmp_path / "a") == []
