"""The cases of faults/ckpt_*: a full disk, other devices, another optimizer, a place that cannot be written.

ckpt_killed_save is in test_checkpoint_killed.py.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from mounts import mounted

import jaxtrain as jt
from jaxtrain.build import build
from jaxtrain.checkpoint import Checkpoints
from jaxtrain.config import load

TINY: dict[str, Any] = {
    "name": "tiny",
    "model": {"kind": "mlp", "hidden": [16]},
    "train": {"duration": 4, "global_batch_size": 64},
    "log": {"tensorboard": False, "wrong_samples": 0},
    "evaluate": {"every": 4},
}


LIMITED = (
    "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]),) * 2); del sys.argv[1]; "
    "from jaxtrain.cli.main import main; main()"
)
"""The command, in which a file that grows too large fails as on a full disk: Python ignores the signal."""


def limited(limit: int, *words: str) -> subprocess.CompletedProcess[str]:
    """`jaxtrain WORDS`, in which no file may have more bytes than `limit`."""
    return subprocess.run(
        [sys.executable, "-c", LIMITED, str(limit), *words],
        capture_output=True,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""},
        timeout=120,
    )


def what_is_there(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def intact(run: Path) -> list[int]:
    store = Checkpoints(run / "checkpoints", metric="loss", mode="min")
    for sealed in store.steps():
        store.verify_arrays(sealed)
    return [sealed.step for sealed in store.steps()]


def test_fault_ckpt_disk_full(tmp_path: Path) -> None:
    """Full in the middle of a save: the step before stays the newest, nothing half-written stays, a person is told."""
    run = tmp_path / "run"
    keys = {"model.hidden": [2048], "checkpoint.every": 4, "checkpoint.keep_last": 1}
    jt.train(TINY, run_dir=run, quiet=True, **keys).close()
    assert intact(run) == [4]
    full = limited(200_000, "resume", str(run), "--quiet", "--train.duration=12")
    assert full.returncode == 78, full.stderr
    said = (
        rf"jaxtrain: saving step 8 into {run}/checkpoints failed: .*too large.*; it needs [\d.]+ MB, \S+ .B are free; "
    )
    # At times a loop of Orbax that is closed already has a traceback of its own behind it.
    (line,) = [line for line in full.stderr.splitlines() if line.startswith("jaxtrain: ")]
    assert re.fullmatch(said + "the newest sealed step is 4", line), full.stderr
    assert "orbax/checkpoint" not in full.stderr  # its threads' tracebacks
    assert what_is_there(run) == ["000000004"]
    assert intact(run) == [4]
    assert json.loads((run / "status.json").read_text())["state"] == "failed"
    jt.resume(run, quiet=True, **{"train.duration": 12}).close()  # the control: it was the room alone
    assert intact(run)[-1] == 12


def test_fault_ckpt_disk_full_is_seen_before_anything_is_written(tmp_path: Path) -> None:
    """A tmpfs of 20 MiB, steps of 7 MB: the third has no room, and says so before it begins."""
    with mounted(tmp_path / "small", "-t", "tmpfs", "-o", "size=20m", "tmpfs") as small:
        run = small / "run"
        keys = {"model.hidden": [8192], "checkpoint.every": 2, "evaluate.every": 0, "train.duration": 8}
        said = (
            rf"^{run}/checkpoints: no room for a checkpoint: it needs \S+ MB, \S+ MB are free; the newest sealed step"
        )
        with pytest.raises(jt.NeedsPerson, match=said + " is 4; make room") as caught:
            jt.train(TINY, run_dir=run, quiet=True, **keys)
        assert caught.value.exit_code == 78
        assert what_is_there(run) == ["000000002", "000000004"]
        assert intact(run) == [2, 4]


def test_fault_ckpt_optimizer_changed(tmp_path: Path) -> None:
    """Both names are said; clipping may be added; what is restored has the types of a fresh state.

    The option that loads the weights alone does not exist yet.
    """
    run = tmp_path / "run"
    with jt.train(TINY, run_dir=run, quiet=True, **{"optimizer.kind": "adamw"}) as done:
        assert done.job is not None
        fresh = done.job.init()
        sealed, restored = Checkpoints(run / "checkpoints", metric="loss", mode="min").restore_newest(
            done.job.abstract_state
        ) or pytest.fail("nothing was restored")
    assert sealed.step == 4
    assert jax.tree.structure(restored) == jax.tree.structure(fresh)
    assert [type(part) for part in restored["opt_state"]] == [type(part) for part in fresh["opt_state"]]
    assert any(hasattr(part, "mu") for part in restored["opt_state"])
    with pytest.raises(jt.ConfigError) as refused:
        jt.resume(run, quiet=True, **{"optimizer.kind": "sgd"})
    assert refused.value.exit_code == 2
    assert str(refused.value) == (
        "optimizer.kind: a resume cannot change 'adamw' to 'sgd': the saved moments belong to the saved optimizer; "
        "train a new run with it instead"
    )
    clipped = {"optimizer.clip_norm": 0.5, "train.duration": 6}
    with jt.resume(run, quiet=True, **clipped) as longer:
        assert longer.state is not None
        assert int(longer.state["step"]) == 6


def on_devices(count: int, what: str, folder: Path) -> dict[str, Any]:
    worker = Path(__file__).with_name("devices_worker.py")
    flags = f"--xla_force_host_platform_device_count={count}"
    done = subprocess.run(
        [sys.executable, str(worker), what, str(folder)],
        capture_output=True,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
        timeout=240,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(lines[0][7:])
    return result


def test_fault_ckpt_other_devices(tmp_path: Path) -> None:
    """Saved on 8, restored on 8, 1, 2 and 4: every array in bits; the next five losses within 1e-5."""
    whole = on_devices(8, "train", tmp_path / "whole")
    (step,) = (tmp_path / "whole/checkpoints").glob("*6")
    leaves = json.loads((step / "manifest.json").read_text())["leaves"]
    assert (whole["restored"], whole["parts"]) == (leaves, 8)
    for later in (tmp_path / "whole/checkpoints").glob("*11"):
        shutil.rmtree(later)  # as if it had been stopped after step 6
    for count in (1, 2, 4):
        run = Path(shutil.copytree(tmp_path / "whole", tmp_path / str(count)))
        resumed = on_devices(count, "resume", run)
        assert (resumed["devices"], resumed["step"], resumed["parts"]) == (count, 6, count)
        assert resumed["restored"] == leaves
        assert list(resumed["losses"]) == [str(n) for n in range(1, 12)]
        ours, theirs = ([losses[str(n)] for n in range(7, 12)] for losses in (resumed["losses"], whole["losses"]))
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)
    assert max(abs(whole["losses"][str(n)] - whole["losses"][str(n + 1)]) for n in range(7, 11)) > 1e-3  # the control


def test_fault_ckpt_unwritable(tmp_path: Path) -> None:
    """A file, a place below a file, a read-only mount: said within ten seconds, before any step, in one line."""
    (tmp_path / "file").write_text("a file")
    begun = time.monotonic()
    with pytest.raises(jt.ConfigError) as below:
        jt.train(TINY, run_dir=tmp_path / "file/run", quiet=True)
    assert time.monotonic() - begun < 10
    assert below.value.exit_code == 2
    assert str(below.value) == f"run folder '{tmp_path}/file/run' cannot be written: Not a directory"
    with pytest.raises(jt.ConfigError, match=f"run folder '{tmp_path}/file' cannot be written: File exists"):
        jt.train(TINY, run_dir=tmp_path / "file", quiet=True)
    with mounted(tmp_path / "readonly", "-t", "tmpfs", "-o", "ro", "tmpfs") as place:
        words = f"run folder '{place}/run' cannot be written: Read-only file system"
        with pytest.raises(jt.ConfigError, match=words):
            jt.train(TINY, run_dir=place / "run", quiet=True)
    assert (tmp_path / "file").read_text() == "a file"
    assert build(load(TINY)).steps.total == 4  # the control: nothing else was wrong with it
