"""verify-resume: what is compared, how a run is killed, and whom a difference is put down to. Runs here are scripts."""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxtrain.config import ConfigError, NeedsPerson, UserError, load
from jaxtrain.hooks.folder import RunFolder
from jaxtrain.launch import proof
from jaxtrain.launch.same import first_difference, seen

CHILD = (sys.executable, "-S", "-E", str(Path(__file__).parent / "proof_child.py"))
CONFIG = load("digits")
DIGEST = r"[0-9a-f]{16}"


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary folders are made."""
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    return place


class Proved:
    """What `prove` gave of runs that go `way`."""

    def __init__(self, way: str = "well", **options: Any) -> None:
        self.said: list[str] = []
        command = ["train", way]
        self.passed, self.line = proof.prove(command, CONFIG, **options, say=self.said.append, program=CHILD)


# ------------------------------------------------------------ what is compared


def fabricate(folder: Path, change: Callable[[int, dict[str, Any], dict[str, Any], dict[str, Any]], Any]) -> RunFolder:
    """A run of 10 steps; change(step, leaves, meta, row) of each before it is written."""
    run = RunFolder(folder)
    lines = []
    for step in range(1, 11):
        leaves = {n: {"shape": [2], "dtype": "float32", "sha256": f"{n}{step}" * 16} for n in ("step", "params.w")}
        meta = {"data": "d", "hooks": {"Saver": {"value": 0.5, "step": step}}, "evaluation": {"loss": "NaN"}}
        row = {"step": step, "epoch": step / 4, "train/loss": "NaN", "time/step": len(str(folder))}
        change(step, leaves, meta, row)
        lines.append(json.dumps(row) + "\n")
        path = run.checkpoints / f"{step:09d}"
        path.mkdir(parents=True)
        (path / "meta.json").write_text(json.dumps(meta))
        if leaves:
            (path / "manifest.json").write_text(json.dumps({"step": step, "leaves": leaves}))
    run.metrics.write_text("".join(lines))
    return run


CHANGES: dict[str, tuple[Callable[..., Any], str | None]] = {
    "nothing": (lambda step, leaves, meta, row: None, None),
    "the clock": (lambda step, leaves, meta, row: row.update({"time/step": -1.0, "time/mfu": 2.0}), None),
    "an array": (
        lambda step, leaves, meta, row: leaves["params.w"].update(sha256="f" * 64) if step == 7 else None,
        "step 7: array params.w differs: one params.w7params. (float32[2]), two ffffffffffffffff (float32[2])",
    ),
    "a type": (
        lambda step, leaves, meta, row: leaves["step"].update(dtype="int32") if step == 7 else None,
        "step 7: array step differs: one step7step7step7s (float32[2]), two step7step7step7s (int32[2])",
    ),
    "an array that is gone": (
        lambda step, leaves, meta, row: leaves.pop("params.w") if step == 7 else None,
        "step 7: the number of arrays differs (and 1 more at this step): one 2, two 1",
    ),
    "a step that is not sealed": (
        lambda step, leaves, meta, row: leaves.clear() if step == 7 else None,
        "step 7: the number of arrays differs (and 5 more at this step): one 2, two not there",
    ),
    "what a hook keeps": (
        lambda step, leaves, meta, row: meta["hooks"]["Saver"].update(value=0.25) if step == 7 else None,
        'step 7: hooks.Saver in meta.json differs: one {"value": 0.5, "step": 7}, two {"value": 0.25, "step": 7}',
    ),
    "a figure": (
        lambda step, leaves, meta, row: row.update({"train/loss": 1.5}) if step == 7 else None,
        "step 7: train/loss in metrics.jsonl differs: one NaN, two 1.5",
    ),
    "a row twice": (
        lambda step, leaves, meta, row: row.update(step=6, epoch=6 / 4) if step == 7 else None,
        "step 6: epoch in metrics.jsonl differs (and 1 more at this step): one 1.5, two [1.5, 1.5]",
    ),
}


@pytest.mark.parametrize("what", CHANGES)
def test_the_first_difference_is_named(what: str, tmp_path: Path) -> None:
    change, words = CHANGES[what]
    one, two = fabricate(tmp_path / "one", CHANGES["nothing"][0]), fabricate(tmp_path / "other", change)
    found = first_difference(seen(one), seen(two))
    assert (found and found.words("one", "two")) == words


# ------------------------------------------------------------ the verdict


def test_equal_runs_pass_and_nothing_is_left(temporary: Path) -> None:
    proved = Proved()
    sealed = re.fullmatch(
        r"PASS 20 steps, killed after step 10 \(kill -9\), resumed from step (\d+): 3 arrays equal at each of 20 "
        rf"sealed steps, 20 rows of metrics equal, digest {DIGEST}",
        proved.line,
    )
    assert proved.passed
    assert sealed, proved.line
    assert 10 <= int(sealed[1]) < 20
    assert proved.said == [
        "training 20 steps undisturbed",
        "training 20 steps, to be killed after step 10",  # 9 is the end of an epoch
        f"killed after step 10; resuming from step {sealed[1]}",
    ]
    assert list(temporary.iterdir()) == []


def test_length_distance_and_kill_are_as_asked_and_the_runs_are_kept(tmp_path: Path) -> None:
    proved = Proved(steps=14, every=3, kill_after=6, keep=tmp_path / "kept")
    assert re.match(
        r"PASS 14 steps, killed after step 6 .*: 3 arrays equal at each of 5 sealed steps, 14 r", proved.line
    )
    for name in ("undisturbed", "resumed"):
        assert sorted(seen(RunFolder(tmp_path / "kept" / name))) == list(range(1, 15))


def test_a_kill_before_the_first_evaluation_is_said() -> None:
    proved = Proved("evaluates-late", kill_after=1)
    assert proved.passed
    assert proved.said[-1] == (
        "note: no evaluation before the kill; --evaluate.every=STEPS puts what hooks keep of one to the test, too"
    )


def test_a_resume_that_differs_is_named_with_its_step_and_array(temporary: Path) -> None:
    proved = Proved("unsound")
    found = re.fullmatch(
        rf"FAIL step (\d+): array params.a differs \(and 1 more at this step\): undisturbed {DIGEST} \(float32\[2\]\), "
        rf"resumed {DIGEST} \(float32\[2\]\); killed after step 10 \(kill -9\), resumed from step (\d+); two "
        r"undisturbed runs are equal; the runs are kept in (.*)",
        proved.line,
    )
    assert not proved.passed
    assert found, proved.line
    assert int(found[1]) == int(found[2]) + 1
    assert proved.said[-1] == f"step {found[1]} differs; training 20 steps undisturbed again"
    (kept,) = temporary.iterdir()
    assert str(kept) == found[3]
    assert {path.name for path in kept.iterdir()} >= {"undisturbed", "resumed", "undisturbed-again", "resumed.log"}


def test_a_hook_that_forgets_is_found() -> None:
    assert re.match(
        r"FAIL step \d+: hooks.Saver in meta.json differs: undisturbed .*, resumed .*", Proved("forgets").line
    )


def test_a_machine_that_is_not_deterministic_is_not_the_resumes_fault() -> None:
    proved = Proved("chance")
    assert not proved.passed
    assert re.match(
        r"FAIL this machine or config is not deterministic: two undisturbed runs differ first at step 1: array "
        rf"params.a differs \(and 1 more at this step\): one {DIGEST} .*, the other {DIGEST} .*; on a GPU set "
        r"XLA_FLAGS=--xla_gpu_deterministic_ops=true; the runs are kept in ",
        proved.line,
    ), proved.line


def test_a_run_that_begins_anew_does_not_pass() -> None:
    line = Proved("anew").line
    assert re.match(r"FAIL killed after step 10 \(kill -9\): the run began anew, and did not go on from step 1\d", line)


COUNTING = """
import itertools

import jax
import numpy as np
from jax.experimental import io_callback

CALLS = itertools.count()


def loss(model, batch):
    calls = io_callback(lambda: np.float32(next(CALLS)), jax.ShapeDtypeStruct((), np.float32))
    return (model(batch["inputs"]) ** 2).mean() * (1 + calls)
"""


def test_a_loss_that_counts_its_calls_in_python_is_found(tmp_path: Path) -> None:
    """Real runs: what no checkpoint holds cannot come back."""
    (tmp_path / "mine.py").write_text(COUNTING)
    np.savez(tmp_path / "rows.npz", inputs=np.eye(16, dtype=np.float32), targets=np.ones(16, np.float32))
    keys = {"data.kind": "arrays", "data.path": tmp_path / "rows.npz", "data.validation_fraction": 0}
    keys |= {"data.test_fraction": 0, "train.global_batch_size": 8, "model.hidden": [], "augment.shift": 0}
    keys |= {"model.kind": "mlp", "objective.kind": "custom", "objective.target": f"{tmp_path}/mine.py:loss"}
    flags = [f"--{key}={value}" for key, value in keys.items()]
    passed, line = proof.prove(["train", "digits", *flags, "--quiet"], CONFIG, steps=5, kill_after=2)
    found = re.fullmatch(
        r"FAIL step (\d): array (\S+) differs \(and \d+ more at this step\): undisturbed (\S+) .*, resumed (\S+) .*; "
        r"killed after step 2 \(kill -9\), resumed from step (\d); two undisturbed runs are equal; the runs are .*",
        line,
    )
    assert not passed
    assert found, line
    assert int(found[1]) == int(found[5]) + 1
    assert found[2].startswith("opt_state.")
    assert found[3] != found[4]


# ------------------------------------------------------------ the kill


def test_a_run_that_had_ended_before_the_kill_is_killed_earlier() -> None:
    proved = Proved("fast-once")
    assert proved.passed
    assert proved.said[1:4] == [
        "training 20 steps, to be killed after step 10",
        "the run had ended before it was killed after step 10; trying again",
        "training 20 steps, to be killed after step 5",
    ]


@pytest.mark.parametrize(("asked", "tried"), [(None, [10, 5, 2]), (7, [7, 7, 7])])
def test_a_run_that_is_always_faster_is_given_up(asked: int | None, tried: list[int], temporary: Path) -> None:
    said: list[str] = []
    with pytest.raises(UserError) as given_up:
        proof.prove(["train", "fast"], CONFIG, kill_after=asked, say=said.append, program=CHILD)
    assert str(given_up.value) == (
        f"the run ended before it could be killed after step {tried[-1]} (3 tries): its steps are too short; "
        "take more of them: --steps 80"
    )
    assert [int(line.split()[-1]) for line in said if "to be killed" in line] == tried
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize(
    ("way", "code", "words"),
    [
        ("refused", 2, "train.sed: no such key"),
        ("lost", 78, "the run 'resumed' ended with 78: no room for a checkpoint"),
    ],
)
def test_a_run_that_fails_of_itself_gives_its_code_and_its_last_line(
    way: str, code: int, words: str, temporary: Path
) -> None:
    with pytest.raises(proof.ChildFailed) as failed:
        Proved(way)
    assert (str(failed.value), failed.value.exit_code) == (words, code)
    assert list(temporary.iterdir()) == []


# ------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("free", "hint"),
    [(3000, r"save less often: --every (\d+), or name another folder: --keep PATH"), (10, "name another folder: .*")],
)
def test_a_disk_without_room_for_all_steps_is_told_after_the_first(
    free: int, hint: str, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(proof.shutil, "disk_usage", lambda path: usage(free))
    with pytest.raises(NeedsPerson) as full:
        Proved()
    found = re.fullmatch(
        r"20 checkpoints of (\d+) B in each of two runs need \S+ kB, \S+ k?B are free in "
        rf"{temporary}/jaxtrain-verify-resume-\w+; {hint}",
        str(full.value),
    )
    assert found, full.value
    if free > 1000:  # as many as fit
        saves = -(-20 // int(found[2]))
        assert 2 * saves * int(found[1]) <= free + int(found[1])
    assert list(temporary.iterdir()) == []


def test_much_to_save_is_told_beforehand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "LARGE", 1000)
    assert re.fullmatch(r"20 checkpoints of \d+ B in each of two runs need .* kB, .* are free", Proved().said[1])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"steps": 10, "every": 10}, "--every: 10 saves no step before the last, 10; allowed: 1 to 9"),
        ({"steps": 10, "kill_after": 10}, "--kill-after: 10 is no step that is saved before the last; allowed: 1 to 9"),
        (
            {"steps": 10, "every": 3, "kill_after": 4},
            "--kill-after: 4 is no step that is saved before the last; allowed: 3, 6, ... below 10",
        ),
    ],
)
def test_figures_that_do_not_fit_together_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Proved(**options)
    assert str(refused.value) == words


def test_a_run_of_one_step_a_used_folder_and_one_of_several_processes_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="--steps: a run of 1 cannot be killed on its way; at least 2 are needed"):
        proof.prove(["train", "well"], load("digits", [("train.duration", 1)]), program=CHILD)
    with pytest.raises(ConfigError, match=r"--keep: folder '.*' is not empty; name another one"):
        Proved(keep=Path(__file__).parent)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    with pytest.raises(ConfigError, match="verify-resume: Slurm has started this process as one of several"):
        Proved()


def test_the_length_is_that_of_the_config_where_it_is_shorter() -> None:
    assert proof.shorten(load("digits", [("train.duration", 8)]), None, 1, None).steps == 8
    assert proof.shorten(load("digits", [("train.duration", 800)]), None, 1, None).steps == 20
