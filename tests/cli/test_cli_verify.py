"""jaxtrain verify-resume with real runs: a sound one passes, what is wrong is told, Ctrl-C ends all."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from cli_helpers import one_line

MINE = """
import jax
import jax.numpy as jnp
from flax import nnx


class Net(nnx.Module):
    def __init__(self, width, *, rngs):
        self.hidden = nnx.Linear(6, width, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.head = nnx.Linear(width, 1, rngs=rngs)

    def __call__(self, x):
        return self.head(self.dropout(jax.nn.relu(self.hidden(x))))


def loss(model, batch):
    return jnp.mean((model(batch["inputs"]) - batch["targets"].reshape(-1, 1)) ** 2)

"""
CONFIG = """
name: own
model: {kind: custom, target: mine.py:Net, args: {width: 4}}
objective: {kind: custom, target: mine.py:loss}
data: {kind: arrays, path: own.npz, test_fraction: 0}
schedule: {warmup: 1}
train: {global_batch_size: 16, ema_decay: 0.9}
evaluate: {every: 3}
early_stopping: {patience: 1, min_delta: 1e9}
checkpoint: {mirror: backup}
"""


@pytest.fixture
def own(cli: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The command in a folder with a model, a loss and data of one's own, and an empty one for temporary files."""
    values = np.random.default_rng(0).normal(size=(96, 7)).astype(np.float32)
    np.savez("own.npz", inputs=values[:, :6], targets=values[:, 6])
    Path("mine.py").write_text(MINE)
    Path("own.yaml").write_text(CONFIG)
    Path("temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(Path("temporary").resolve()))
    return cli


def test_a_sound_run_on_two_devices_passes(own: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
    answer = own("verify-resume", "own.yaml", "--steps=12")
    found = re.fullmatch(
        r"PASS 12 steps, killed after step (\d+) \(kill -9\), resumed from step (\d+): (\d+) arrays equal at each of "
        r"12 sealed steps, 16 rows of metrics equal, digest [0-9a-f]{16}\n",
        answer.out,
    )
    assert answer.code == 0, answer
    assert found, answer
    assert int(found[1]) % 5  # an epoch has 5 steps
    assert 6 == int(found[1]) <= int(found[2]) < 12
    assert int(found[3]) > 20
    assert answer.err.splitlines() == [
        "training 12 steps undisturbed",
        "training 12 steps, to be killed after step 6",
        f"killed after step 6; resuming from step {found[2]}",
    ]
    assert sorted(os.listdir()) == ["mine.py", "own.npz", "own.yaml", "temporary"]  # and no backup of such runs
    assert os.listdir("temporary") == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["digits", "--train.sed=3"], "unknown key train.sed; did you mean train.seed?"),
        (["digits", "--steps=1"], "greater than or equal to 2"),
        (["digits", "--steps=4", "--every=4"], "--every: 4 saves no step before the last, 4; allowed: 1 to 3"),
    ],
)
def test_what_is_wrong_is_one_line_before_anything_runs(cli: Any, arguments: list[str], words: str) -> None:
    answer = cli("verify-resume", *arguments)
    assert (answer.code, answer.out) == (2, "")
    assert words in one_line(answer.err)


def test_what_only_the_data_show_to_be_wrong_is_the_childs_line(own: Any) -> None:
    answer = own("verify-resume", "own.yaml", "--quiet", "--data.path=gone.npz")
    assert (answer.code, answer.out) == (2, "")
    assert "gone.npz" in one_line(answer.err)
    assert os.listdir("temporary") == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_child_and_removes_the_folder(number: int, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "jaxtrain", "verify-resume", "digits", "--quiet"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, env=environment, text=True, stderr=subprocess.PIPE, cwd=tmp_path) as parent:
        until = time.monotonic() + 60
        while not (children := psutil.Process(parent.pid).children()):
            assert parent.poll() is None
            assert time.monotonic() < until
            time.sleep(0.01)
        time.sleep(0.2)
        assert list(tmp_path.glob("jaxtrain-verify-resume-*"))
        parent.send_signal(number)
        parent.communicate(timeout=60)
    assert parent.returncode == 130
    assert not any(child.is_running() for child in children)
    assert list(tmp_path.iterdir()) == []
