"""Killed before a file-system call of a save or a deletion; every call is swept in benchmarks/proofs/call_sweep.py."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path

import pytest

PROOF = Path(__file__).resolve().parents[2] / "benchmarks/proofs/call_sweep.py"


@pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc: the library that counts calls cannot be built")
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="LD_PRELOAD is Linux's")
def test_wherever_a_save_is_killed_the_newest_sealed_step_is_whole(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("call_sweep", PROOF)
    assert spec is not None
    assert spec.loader is not None
    proof = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(proof)
    found = proof.sweep(tmp_path, int(os.environ.get("JAXTRAIN_EVERY_CALL", "5")))
    assert found["calls"] > 60  # Orbax's and ours: each file opened, written, synced, renamed
    assert found["killed"] == len(range(1, found["calls"] + 1, found["every"]))
    assert found["lost"] == []
    assert found["steps"].keys() == {2, 3}  # before the seal and after it
    # The control: without seals, half-written steps would be taken.
    assert len(found["unsealed"]) >= 3
