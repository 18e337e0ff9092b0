"""jaxtrain checkpoints: the list, --verify, --diff, --prune, and what is refused."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_helpers import one_line, tree

from jaxtrain.checkpoint import files
from jaxtrain.config import dump, load
from jaxtrain.evaluate import checkpoints
from jaxtrain.evaluate.loaded import open_store
from jaxtrain.hooks.folder import RunFolder

OLD, NEW = "checkpoints/000000017", "checkpoints/000000020"


def flip(step: Path) -> Path:
    """Change one byte in the largest file of a step."""
    victim = max((p for p in (step / "state").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    raw = bytearray(victim.read_bytes())
    raw[len(raw) // 2] ^= 1
    victim.write_bytes(bytes(raw))
    return victim


def size(step: Path) -> str:
    return files.in_words(sum(p.stat().st_size for p in step.rglob("*") if p.is_file()))


# ------------------------------------------------------------ the list


def test_steps_are_listed_and_nothing_is_written(cli: Any, trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load(trained / "resolved.yaml", [("checkpoint.keep_last", 1), ("checkpoint.keep_best", 0)])
    (trained / "resolved.yaml").write_text(dump(config))
    for step, seconds in ((OLD, 0), (NEW, 86400)):
        os.utime(trained / step / "manifest.json", (seconds, seconds))
    loss = {row["step"]: f"{row['eval/loss']:.6g}" for row in RunFolder(trained).rows() if "eval/loss" in row}
    assert RunFolder(trained).read_result()["best"]["step"] == 20
    before = tree(trained)
    monkeypatch.chdir(trained.parents[2])
    for reference in (trained, "last", "202601"):
        answer = cli("checkpoints", reference)
        assert (answer.code, answer.err) == (0, "")
        assert [re.split(r"  +", line) for line in answer.results] == [
            ["step", "sealed (UTC)", "size", "eval/loss", "marks"],
            ["17", "1970-01-01 00:00:00", size(trained / OLD), loss[17], "would be pruned"],
            ["20", "1970-01-02 00:00:00", size(trained / NEW), loss[20], "last, best"],
        ]
    assert tree(trained) == before


def test_a_run_without_steps_is_one_line_and_what_was_set_aside_another(cli: Any, trained: Path) -> None:
    shutil.rmtree(trained / OLD)
    (trained / NEW).rename(trained / "checkpoints/.quarantine-000000020")
    none = f"no sealed steps in {trained / 'checkpoints'}"
    (trained / "checkpoints/.quarantine-000000020/why.txt").write_text("checkpoint 20: it was changed\n")
    answer = cli("checkpoints", trained)
    assert answer.results == [none, "set aside: .quarantine-000000020: checkpoint 20: it was changed"]
    assert answer.code == 0
    shutil.rmtree(trained / "checkpoints")
    for arguments, lines in (([], [none]), (["--verify"], [none]), (["--prune"], [none])):
        answer = cli("checkpoints", trained, *arguments)
        assert (answer.code, answer.results, answer.err) == (0, lines, "")
    missing = cli("checkpoints", trained, "--diff", "best", "last")
    assert (missing.code, missing.out) == (1, "")
    assert one_line(missing.err).endswith("no sealed checkpoint; the run ended before its first save")


# ------------------------------------------------------------ --verify


def test_verify_says_a_line_a_step(cli: Any, finished: Path) -> None:
    before = tree(finished)
    answer = cli("checkpoints", finished, "--verify")
    counts = {step: sum(p.is_file() for p in (finished / step).rglob("*")) - 1 for step in (OLD, NEW)}
    assert (answer.code, answer.err) == (0, "")
    assert answer.results == [
        f"step 17: intact, {counts[OLD]} files, 27 arrays",
        f"step 20: intact, {counts[NEW]} files, 27 arrays",
    ]
    assert tree(finished) == before


def test_verify_finds_a_flipped_byte_names_the_file_and_goes_on(cli: Any, trained: Path) -> None:
    victim = flip(trained / OLD)
    before = tree(trained)
    answer = cli("checkpoints", trained, "--verify")
    assert (answer.code, answer.err) == (1, "")
    assert answer.results[0] == f"checkpoint 17: {victim} was changed since it was sealed"
    assert answer.results[1].startswith("step 20: intact, ")
    assert len(answer.results) == 2
    assert tree(trained) == before  # nothing is set aside


# ------------------------------------------------------------ --diff


def test_diff_says_what_numpy_says(cli: Any, finished: Path) -> None:
    store = open_store(RunFolder(finished), load(finished / "resolved.yaml"))
    names = ["params.head.kernel", "step", "lr_scale", "guard.skipped"]
    a, b = store.arrays(store.get(17), names), store.arrays(store.get(20), names)
    before = tree(finished)
    answer = cli("checkpoints", finished, "--diff", "17", "last")
    said = dict(re.split(r"  +", line) for line in answer.results[1:-1])
    assert (answer.code, answer.err, answer.results[0]) == (1, "", "A: step 17, B: step 20")
    x, y = (arrays["params.head.kernel"].astype(np.float64) for arrays in (a, b))
    largest, relative = np.abs(x - y).max(), np.linalg.norm(x - y) / np.linalg.norm(x)
    figures = f"largest absolute difference {largest:.6g}, relative norm {relative:.6g}"
    assert said["params.head.kernel"] == f"differs: {figures}"
    assert said["step"] == f"differs: largest absolute difference 3, relative norm {3 / 17:.6g}"
    assert said["lr_scale"] == said["guard.skipped"] == "equal"
    equal = list(said.values()).count("equal")
    assert answer.results[-1] == f"27 arrays: {equal} equal, {27 - equal} differ"
    assert tree(finished) == before
    same = cli("checkpoints", finished, "--diff", "20", "best")
    assert (same.code, same.results[-1]) == (0, "27 arrays: 27 equal, 0 differ")


def test_diff_tells_new_nans_arrays_of_one_step_and_other_shapes(trained: Path) -> None:
    run = RunFolder(trained)
    store = open_store(run, load(run.resolved), keep_last=9)
    shutil.rmtree(run.checkpoints)
    one = {"x": np.float32([1, 2]), "nan": np.float32([1]), "shape": np.float32([1]), "old": np.float32([1])}
    two = {"x": np.float32([np.nan, 4]), "nan": np.float32([np.nan]), "shape": np.float32([[1]]), "new": one["old"]}
    for step, state in ((1, one), (2, two)):
        store.save(step, state, {})
        store.wait()
    store.close()
    text, equal = checkpoints.diff(run, 1, 2)
    assert not equal
    assert text.splitlines() == [
        "A: step 1, B: step 2",
        "nan    differs: 1 of 1 differences are not a number",
        "new    only in B",
        "old    only in A",
        "shape  other shape or dtype",
        "x      differs: largest absolute difference 2, relative norm 1; 1 of 2 differences are not a number",
        "5 arrays: 0 equal, 2 differ, 1 only in A, 1 only in B, 1 of another shape or dtype",
    ]


def test_diff_of_what_is_not_there_or_corrupt_is_one_line(cli: Any, trained: Path) -> None:
    answer = cli("checkpoints", trained, "--diff", "best", "7")
    assert (answer.code, answer.out) == (2, "")
    assert one_line(answer.err) == "checkpoint '7' is not there; allowed: best, last, 17, 20"
    victim = flip(trained / OLD)
    answer = cli("checkpoints", trained, "--diff", "17", "20")
    assert (answer.code, answer.out) == (78, "")
    assert one_line(answer.err) == f"checkpoint 17: {victim} was changed since it was sealed"


# ------------------------------------------------------------ --prune


def test_prune_removes_what_need_not_stay_and_a_dry_run_only_says_it(cli: Any, trained: Path) -> None:
    before, old = tree(trained), size(trained / OLD)
    fewer = ("--keep-last=1", "--keep-best=1")
    would = cli("checkpoints", trained, "--prune", "--dry-run", *fewer)
    assert (would.code, would.err) == (0, "")
    assert would.results == [
        f"step 17: would be removed, {old}",
        f"1 step would be removed, {old} would be freed; 1 kept",
    ]
    assert tree(trained) == before
    kept = cli("checkpoints", trained, "--prune")  # the run's own figures
    assert (kept.code, kept.results) == (0, ["nothing to remove: 2 steps, all kept"])
    done = cli("checkpoints", trained, "--prune", *fewer)
    assert (done.code, done.err) == (0, "")
    assert done.results == [f"step 17: removed, {old}", f"1 step removed, {old} freed; 1 kept"]
    gone = {name for name in before if name.startswith(OLD)} | {".lock"}
    after = tree(trained)
    assert {name: digest for name, digest in after.items() if name != ".lock"} == {
        name: digest for name, digest in before.items() if name not in gone
    }
    assert cli("checkpoints", trained, "--verify").code == 0


@pytest.mark.parametrize("dry", [[], ["--dry-run"]])
def test_prune_removes_nothing_when_the_newest_step_is_corrupt(cli: Any, trained: Path, dry: list[str]) -> None:
    victim = flip(trained / NEW)
    before = tree(trained / "checkpoints")
    answer = cli("checkpoints", trained, "--prune", "--keep-last=1", "--keep-best=0", *dry)
    assert (answer.code, answer.out) == (78, "")
    assert one_line(answer.err) == f"checkpoint 20: {victim} was changed since it was sealed"
    assert tree(trained / "checkpoints") == before


def test_prune_of_a_run_that_goes_on_is_refused_and_looking_is_not(cli: Any, trained: Path) -> None:
    prune = ("checkpoints", trained, "--prune", "--keep-last=1", "--keep-best=0")
    lock = files.Lock(trained / ".lock", "it")
    before = tree(trained)
    answer = cli(*prune)
    assert (answer.code, answer.out) == (2, "")
    assert one_line(answer.err).startswith(f"run folder {str(trained)!r} is in use by process {os.getpid()} on ")
    for looking in ([], ["--verify"], ["--diff", "20", "20"], ["--prune", "--dry-run"]):
        assert cli("checkpoints", trained, *looking).code == 0
    assert tree(trained) == before
    lock.release()
    assert cli(*prune).code == 0
    files.Lock(trained / ".lock", "it").release()  # it was given back


# ------------------------------------------------------------ usage


CONTRADICTIONS = [
    (["--verify", "--prune"], "--verify with --prune is not allowed; allowed: one of --verify, --diff, --prune"),
    (
        ["--diff", "1", "2", "--verify"],
        "--verify with --diff is not allowed; allowed: one of --verify, --diff, --prune",
    ),
    (["--keep-last=1"], "--keep-last without --prune is not allowed; add --prune, or leave it out"),
    (["--verify", "--dry-run"], "--dry-run without --prune is not allowed; add --prune, or leave it out"),
    (
        ["--keep-best=0", "--keep-last=3"],
        "--keep-last, --keep-best without --prune is not allowed; add --prune, or leave it out",
    ),
]


@pytest.mark.parametrize(("arguments", "line"), CONTRADICTIONS, ids=[" ".join(a) for a, _ in CONTRADICTIONS])
def test_options_that_contradict_each_other_are_refused(
    cli: Any, finished: Path, arguments: list[str], line: str
) -> None:
    answer = cli("checkpoints", finished, *arguments)
    assert (answer.code, answer.out) == (2, "")
    assert one_line(answer.err) == line


@pytest.mark.parametrize(("asked", "platforms"), [(None, "cpu"), ("cuda", "cuda")])
def test_it_looks_without_a_gpu_unless_one_is_asked_for(asked: str | None, platforms: str, finished: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    code = (
        "import sys; from jaxtrain.cli.main import main\n"
        "try: main(['checkpoints', sys.argv[1]])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "import jax; print(jax.config.jax_platforms)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(finished)],
        env=environment | ({"JAX_PLATFORMS": asked} if asked else {}),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == platforms
