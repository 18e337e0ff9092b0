"""SIGKILL at random moments of a run; the same in 200 kills is benchmarks/proofs/kill_sweep.py."""

from __future__ import annotations

import importlib.util
import os
import time
from pathlib import Path

import pytest

from jaxtrain.hooks.folder import RunFolder

PROOF = Path(__file__).resolve().parents[2] / "benchmarks/proofs/kill_sweep.py"


def test_a_run_that_is_killed_again_and_again_ends_bit_for_bit_as_an_undisturbed_one(
    tmp_path: Path, compiled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = importlib.util.spec_from_file_location("kill_sweep", PROOF)
    assert spec is not None
    assert spec.loader is not None
    proof = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(proof)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    kills = int(os.environ.get("JAXTRAIN_KILLS", "15"))
    found = proof.sweep(kills, time.time_ns() % 2**32, tmp_path)
    assert found["kills"] == kills
    assert (found["lost"], found["wrong"], found["by_hand"]) == ([], [], 0), found
    # The control: what is compared tells one state from another.
    other = RunFolder(tmp_path / "killed-1").checkpoints
    steps = sorted(path.name for path in other.glob("[0-9]*"))
    wanted = proof.outcome(tmp_path / "undisturbed")
    assert steps[-1] == f"{proof.STEPS:09d}"
    (other / steps[-1] / "manifest.json").unlink()
    assert proof.outcome(tmp_path / "killed-1") != wanted
