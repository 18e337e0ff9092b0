"""kill -9 at random moments of a run that saves each step: nobody has to tidy up, and the end is the same."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path

import jax.numpy as jnp
import pytest
from checkpoint_helpers import META, abstract, same, saved, state_of, store_of
from kill_driver import STEPS, outcome, start, sweep, to_its_end

KILLS = 15


def test_fault_ckpt_killed_save(tmp_path: Path) -> None:
    """Each restart goes on at the newest complete step; state, metrics and result are those without a kill."""
    seed = int(os.environ.get("JAXTRAIN_KILL_SEED", random.SystemRandom().randrange(10**6)))
    print(f"JAXTRAIN_KILL_SEED={seed}")
    to_its_end(start(tmp_path / "whole"))
    whole = outcome(tmp_path / "whole")
    done = sweep(tmp_path, KILLS, seed, whole)
    print("\n".join(done.log))
    assert (whole["step"], done.kills) == (STEPS, KILLS)
    assert len(done.resumed) >= KILLS // 2
    assert len({row["step"] for row in whole["metrics"]}) == STEPS


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    """Steps 1 and 2, and what a kill in the save of step 3 leaves: its files without the seal."""
    saved(tmp_path, {1: 1.0, 2: 2.0, 3: 3.0}).close()
    (tmp_path / "000000003/manifest.json").unlink()
    return tmp_path


def test_a_left_over_step_is_named_and_does_not_stop_the_save_of_that_step(
    killed: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = store_of(killed)
    store.sweep()
    assert f"{killed}/000000003" in caplog.text
    assert [record.levelname for record in caplog.records] == ["WARNING"]  # seen also before run.log is open
    shutil.copytree(killed / "000000002", killed / "000000003")
    (killed / "000000003/manifest.json").unlink()
    store.save(3, state_of(9.0), META)  # also without a sweep
    store.wait()
    found = store.restore_newest(abstract(state_of()))
    assert found is not None
    assert (found[0].step, same(found[1], state_of(9.0))) == (3, True)
    store.close()


def test_a_stale_seal_does_not_make_a_half_written_step_complete(killed: Path) -> None:
    """That of another step, and that of another save of the same step: both steps hold the same files but one."""
    for stale in ("other step", "other save"):
        step = killed / "000000003"
        if stale == "other step":
            shutil.copy(killed / "000000002/manifest.json", step)
        else:
            store = store_of(killed / "elsewhere")
            store.save(3, {"x": jnp.zeros(2)}, META)
            store.close()
            shutil.copytree(killed / "000000002", step)
            (step / "manifest.json").write_text((killed / "elsewhere/000000003/manifest.json").read_text())
            assert json.loads((step / "manifest.json").read_text())["step"] == 3
        store = store_of(killed)
        found = store.restore_newest(abstract(state_of()))
        assert found is not None
        assert (found[0].step, same(found[1], state_of(2 / 8))) == (2, True)
        assert not step.exists()
