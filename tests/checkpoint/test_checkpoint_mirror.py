"""The mirror: it is a run folder, holds only whole steps, gives them back, and never stops or slows a run."""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from checkpoint_helpers import META, abstract, files_of, same, saved, state_of, store_of
from mounts import mounted

import jaxtrain as jt
from jaxtrain import runner
from jaxtrain.checkpoint import Checkpoints, mirror
from jaxtrain.checkpoint.store import NothingIntact
from jaxtrain.config import load
from jaxtrain.hooks.control import Signals
from jaxtrain.hooks.folder import RunFolder
from jaxtrain.loop import Stop
from jaxtrain.resuming import absolute_paths, changes, check_resumable

TINY: dict[str, Any] = {
    "name": "tiny",
    "model": {"kind": "mlp", "hidden": [16]},
    "train": {"duration": 8, "global_batch_size": 64},
    "log": {"tensorboard": False, "wrong_samples": 0, "every": 2},
    "evaluate": {"every": 4},
    "checkpoint": {"every": 2},
}


def found_in(place: Path, **options: Any) -> Checkpoints:
    """The store of the run folder place/run, whose mirror is place/mirror/tiny/run; nothing is copied yet."""
    return store_of(place / "run/checkpoints", **({"name": "tiny", "mirror": str(place / "mirror")} | options))


def opened(place: Path, **options: Any) -> Checkpoints:
    """The same, as a run opens it: the mirror follows."""
    store = found_in(place, **options)
    store.sweep()
    return store


def save(store: Checkpoints, *steps: int) -> None:
    """States that hold step / 8."""
    for step in steps:
        store.save(step, state_of(step / 8), META)
        store.wait()


def mirrored(place: Path, *steps: int, **options: Any) -> Path:
    """A run folder with these steps, whose mirror has all of them; the mirror."""
    store = opened(place, **options)
    for step in steps:
        save(store, step)
        until(lambda step=step: step in steps_in(place / "mirror/tiny/run"))
    store.close()
    return place / "mirror/tiny/run"


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not true():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.005)


def steps_in(run: Path) -> list[int]:
    return [sealed.step for sealed in store_of(run / "checkpoints").steps()]


def intact(run: Path) -> list[int]:
    store = store_of(run / "checkpoints")
    for sealed in store.steps():
        store.verify_arrays(sealed)
    return steps_in(run)


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in files_of(folder)}


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def largest(step: Path) -> Path:
    return max((p for p in (step / "state").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def warnings(caplog: pytest.LogCaptureFixture, run: Path | None = None) -> list[str]:
    """All that were told; those of a run from its log, once it has one."""
    told = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING and r.name == "jaxtrain"]
    lines = (run / "run.log").read_text().splitlines() if run else []
    return told + [line.split(" WARNING ")[1] for line in lines if " WARNING " in line]


def train(run: Path, **overrides: Any) -> jt.Run:
    return jt.train(TINY, run_dir=run, quiet=True, **overrides)


def stop_at(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """The next runs behave as if Ctrl-C had come during `step`."""

    def after_step(self: Signals, now: int) -> Stop | None:
        return Stop("interrupted", "test", 130) if now == step else None

    monkeypatch.setattr(Signals, "after_step", after_step)


def bits(state: Any) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state)]


# ---------------------------------------------------------------- what is in it


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[bytes], list[dict[str, Any]]]:
    """A run of 8 steps with its mirror: where both are, its state, its rows."""
    place = tmp_path_factory.mktemp("whole")
    with train(place / "run", **{"checkpoint.mirror": place / "mirror"}) as run:
        return place, bits(run.state), without_time(run)


def test_a_mirror_is_a_run_folder_equal_bit_for_bit(whole: Any) -> None:
    run, copy = whole[0] / "run", whole[0] / "mirror/tiny/run"
    ours, theirs = contents(run), contents(copy)
    del ours[".lock"]
    assert theirs.pop(".mirror-of") == ours.pop(".run-id")
    assert theirs == ours
    assert {name.partition("/")[0] for name in ours} - {"checkpoints"} == set(mirror.FILES) - {"journal.jsonl"}
    assert steps_in(copy) == steps_in(run) == [6, 8]
    modes = {oct(path.stat().st_mode & 0o7777) for path in copy.rglob("*") if path.is_file()}
    assert modes == {"0o600"}
    folders = [copy.parent.parent, copy.parent, copy, *(path for path in copy.rglob("*") if path.is_dir())]
    assert {oct(path.stat().st_mode & 0o7777) for path in folders} == {"0o700"}


def test_the_names_of_the_small_files_are_those_of_the_run_folder(tmp_path: Path) -> None:
    """A file that a run folder gets is mirrored, or it is said here why not."""
    folders = {"checkpoints", "samples", "crash"}
    names = {path.name for path in vars(RunFolder(tmp_path / "run")).values()} - {"run"} - folders
    assert names == set(mirror.FILES)


def test_the_mirror_follows_what_the_run_removes_and_what_it_changes(tmp_path: Path) -> None:
    run = tmp_path / "run"
    store = opened(tmp_path, keep_last=2, keep_best=0)
    copy = tmp_path / "mirror/tiny/run"
    (run / "result.json").write_text("1")
    (run / "metrics.jsonl").write_text("1\n")
    save(store, 1)
    until(lambda: steps_in(copy) == [1])
    assert (copy / "result.json").read_text() == "1"
    (run / "result.json").unlink()
    (run / "metrics.jsonl").write_text("1\n2\n")
    for step, there in ((2, [1, 2]), (3, [2, 3]), (4, [3, 4])):
        save(store, step)
        until(lambda there=there: steps_in(copy) == there)
    (run / "metrics.jsonl").unlink()  # lost: what the mirror has of it stays
    (run / "status.json").write_text("{}")  # after the last step
    store.close()
    assert intact(copy) == [3, 4]
    assert files_of(copy)[:1] == [".mirror-of"]
    assert {p.name for p in copy.iterdir()} == {".mirror-of", "checkpoints", "metrics.jsonl", "status.json"}
    assert (copy / "metrics.jsonl").read_text() == "1\n2\n"


def test_nothing_goes_from_the_mirror_before_a_newer_step_is_verified_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"keep_last": 1, "keep_best": 0}
    copy = mirrored(tmp_path, 1, 2, **options)
    assert steps_in(copy) == [2]
    real = shutil.copyfile

    def damaging(source: Any, target: Any) -> Any:
        real(source, target)
        if "/state/" in str(target):
            flip(Path(target))

    monkeypatch.setattr(shutil, "copyfile", damaging)
    store = opened(tmp_path, **options)
    save(store, 3, 4)
    store.close()
    assert (steps_in(tmp_path / "run"), intact(copy)) == ([4], [2])
    monkeypatch.undo()
    store = opened(tmp_path, **options)  # the control: a sound copy, and 2 goes
    store.close()
    assert intact(copy) == [4]


def test_a_step_of_the_mirror_that_is_damaged_there_is_copied_again(tmp_path: Path) -> None:
    copy = mirrored(tmp_path, 1, 2)
    flip(largest(copy / "checkpoints/000000002"))
    (copy / "checkpoints/.copy-000000001").mkdir()  # of a process that was killed
    opened(tmp_path).close()
    assert intact(copy) == [1, 2]
    assert sorted(p.name for p in (copy / "checkpoints").iterdir()) == ["000000001", "000000002"]


# ---------------------------------------------------------------- the way back


def test_a_flipped_bit_in_the_run_folder_costs_no_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    copy = mirrored(tmp_path, 1, 2)
    steps = tmp_path / "run/checkpoints"
    before = contents(steps / "000000002")
    flip(largest(steps / "000000002"))
    shutil.copytree(steps, tmp_path / "alone/checkpoints")
    noted: list[tuple[str, str]] = []
    found = found_in(tmp_path).restore_newest(abstract(state_of()), lambda *said: noted.append(said))
    assert found is not None
    assert found[0].step == 2
    assert same(found[1], state_of(2 / 8))
    assert contents(steps / "000000002") == before
    assert {oct(p.stat().st_mode & 0o777) for p in (steps / "000000002").rglob("*")} == {"0o600", "0o700"}
    said = f"step 2 is taken from the mirror {copy}: the newest intact one here is 1"
    assert [event for event, _ in noted] == ["quarantine", "mirror"]
    assert noted[1][1] == said
    assert warnings(caplog)[1:] == [said]
    assert sorted(p.name for p in steps.iterdir()) == [".quarantine-000000002", "000000001", "000000002"]
    alone = store_of(tmp_path / "alone/checkpoints").restore_newest(abstract(state_of()))  # the control
    assert alone is not None
    assert alone[0].step == 1


def test_the_mirror_is_asked_for_newer_steps_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    mirrored(tmp_path, 1, 2)
    store = found_in(tmp_path)
    found = store.restore_newest(abstract(state_of()))
    assert found is not None
    assert (found[0].step, warnings(caplog)) == (2, [])


def test_a_damaged_step_of_the_mirror_is_passed_over_and_without_any_a_person_is_needed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    copy = mirrored(tmp_path, 1, 2)
    shutil.rmtree(tmp_path / "run/checkpoints/000000001")
    flip(largest(tmp_path / "run/checkpoints/000000002"))
    flip(largest(copy / "checkpoints/000000002"))
    store = found_in(tmp_path)
    found = store.restore_newest(abstract(state_of()))
    assert found is not None
    assert found[0].step == 1
    assert same(found[1], state_of(1 / 8))
    assert warnings(caplog)[1:] == [
        f"step 2 of the mirror is not taken: the copy of {copy}/checkpoints/000000002 is not what was sealed",
        f"step 1 is taken from the mirror {copy}: none here is intact",
    ]
    flip(largest(tmp_path / "run/checkpoints/000000001"))
    flip(largest(copy / "checkpoints/000000001"))
    with pytest.raises(NothingIntact, match=f"none of 1 checkpoints is intact, and there is none in the mirror {copy}"):
        store.restore_newest(abstract(state_of()))
    assert [p.name for p in store.folder.iterdir() if not p.name.startswith(".quarantine-")] == []


def test_a_run_whose_checkpoints_are_gone_ends_as_if_they_were_not(
    whole: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the mirror, as an automatic resume does; and the mirror itself, as a run."""
    _, wanted, rows = whole
    mirrors = {"checkpoint.mirror": tmp_path / "mirror"}
    ways: dict[str, Callable[[Path], jt.Run]] = {
        "auto": lambda run: train(run, auto_resume=True, **mirrors),
        "the-mirror": lambda run: jt.resume(tmp_path / "mirror/tiny/the-mirror", quiet=True),
    }
    for name, go_on in ways.items():
        with monkeypatch.context() as patched:
            stop_at(patched, 5)
            train(tmp_path / name, **mirrors).close()
        shutil.rmtree(tmp_path / name / "checkpoints")
        with go_on(tmp_path / name) as resumed:
            assert (resumed.exit_code, bits(resumed.state), without_time(resumed)) == (0, wanted, rows)
            events = [json.loads(line) for line in (resumed.path / "journal.jsonl").read_text().splitlines()]
        assert [e["event"] for e in events] == [*(["mirror"] if name != "the-mirror" else []), "resume"]
        assert steps_in(resumed.path) == [6, 8]
        copy = tmp_path / "mirror/tiny" / (name if name != "the-mirror" else "the-mirror-2")
        assert contents(copy / "checkpoints") == contents(resumed.path / "checkpoints")
    shutil.rmtree(tmp_path / "auto/checkpoints")
    with pytest.raises(NothingIntact, match="its checkpoints are gone"):  # the control
        jt.resume(tmp_path / "auto", quiet=True, **{"checkpoint.mirror": None})


def without_time(run: jt.Run) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in run.metrics()]


# ---------------------------------------------------------------- whose it is


def test_another_run_of_that_name_finds_no_steps_there_and_touches_none(tmp_path: Path) -> None:
    """--overwrite in the same folder, or a folder of the same name elsewhere: never one run's step in another."""
    copy = mirrored(tmp_path, 1, 20)
    before = contents(copy)
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "run").mkdir()
    assert found_in(tmp_path).restore_newest(abstract(state_of())) is None
    store = opened(tmp_path)
    save(store, 3)
    store.close()
    assert contents(copy) == before
    assert intact(copy.with_name("run-2")) == [3]
    shutil.rmtree(tmp_path / "run/checkpoints")
    found = found_in(tmp_path).restore_newest(abstract(state_of()))
    assert found is not None
    assert found[0].step == 3


def test_a_mirror_that_goes_on_is_a_run_of_its_own(tmp_path: Path) -> None:
    """The first one may be alive after all: neither writes into the other."""
    copy = mirrored(tmp_path, 1, 2)
    heir = store_of(copy / "checkpoints", name="tiny", mirror=str(tmp_path / "mirror"))
    heir.sweep()
    save(heir, 3)
    heir.close()
    assert steps_in(copy) == steps_in(copy.with_name("run-2")) == [1, 2, 3]
    store = opened(tmp_path)
    save(store, 9)
    store.close()
    assert steps_in(copy) == [1, 2, 3]
    assert intact(copy.with_name("run-3")) == [1, 2, 9]


def test_a_resume_may_change_the_mirror_which_is_kept_as_an_absolute_path(
    whole: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = load(whole[0] / "run/resolved.yaml")
    assert before.checkpoint.mirror == str(whole[0] / "mirror")
    monkeypatch.chdir(tmp_path)
    after = absolute_paths(load(before, [("checkpoint.mirror", "../b")]))
    assert after.checkpoint.mirror == str(tmp_path.parent / "b")
    check_resumable(changes(before, after))


@pytest.mark.parametrize("where", ["run", "run/checkpoints", "run/../run/a"])
def test_a_mirror_in_the_run_folder_is_refused_before_anything_is_done(where: str, tmp_path: Path) -> None:
    place = tmp_path / where
    said = (
        f"checkpoint.mirror: '{place.resolve()}' lies in the run folder '{tmp_path}/run' and would be lost with it; "
        "allowed: a folder outside, best on another disk"
    )
    with pytest.raises(jt.ConfigError) as caught:
        train(tmp_path / "run", **{"checkpoint.mirror": place})
    assert (str(caught.value), caught.value.exit_code) == (said, 2)
    assert list(tmp_path.iterdir()) == []
    saved(tmp_path / "run/checkpoints", {1: 1.0}).close()
    (tmp_path / "run/resolved.yaml").write_text("")
    with pytest.raises(jt.ConfigError, match="lies in the run folder"):
        train(tmp_path / "run", overwrite=True, **{"checkpoint.mirror": place})
    assert steps_in(tmp_path / "run") == [1]


def test_a_mirror_where_the_runs_are_is_refused(whole: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    said = r"checkpoint\.mirror: '.*/runs' is where the run itself goes"
    with pytest.raises(jt.ConfigError, match=said):
        jt.train(TINY, quiet=True, **{"checkpoint.mirror": "runs"})
    assert list(tmp_path.iterdir()) == []
    run = shutil.copytree(whole[0] / "run", tmp_path / "runs/tiny/run")
    with pytest.raises(jt.ConfigError, match=said):
        jt.resume(run, quiet=True, **{"checkpoint.mirror": "runs"})


# ---------------------------------------------------------------- when it does not work


def taken_away(place: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The mirror goes while its first step is being copied."""
    real = mirror.copy_step

    def taking(*arguments: Any) -> Any:
        if place.is_dir():
            place.rename(place.with_name("away"))
        return real(*arguments)

    monkeypatch.setattr(mirror, "copy_step", taking)
    return contextlib.nullcontext()


BROKEN: dict[str, tuple[Any, str]] = {
    "full": (lambda place, _: mounted(place, "-t", "tmpfs", "-o", "size=48k", "tmpfs"), "No space left on device"),
    "read-only": (lambda place, _: mounted(place, "-t", "tmpfs", "-o", "ro", "tmpfs"), "Read-only file system"),
    "taken-away": (taken_away, "No such file or directory"),
    "nowhere": (lambda place, _: contextlib.nullcontext(place.parent.rmdir()), "No such file or directory"),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_mirror_costs_two_lines_and_nothing_else(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    breaks, why = BROKEN[how]
    run, place = tmp_path / "run", tmp_path / "disk/mirror"
    place.parent.mkdir()
    with breaks(place, monkeypatch):
        with train(run, **{"checkpoint.mirror": place}) as done:
            assert done.exit_code == 0
        assert steps_in(place / "tiny/run") == []
    assert intact(run) == [6, 8]
    assert (run / "report.html").is_file()
    assert warnings(caplog, run) == [
        f"the mirror {place}/tiny/run fails: {why}; training goes on, the next save tries again",
        f"step 8 is not in the mirror {place}/tiny/run",
    ]


def test_a_mirror_that_comes_back_is_told_and_has_all_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is not made anew meanwhile: where a disk was mounted there is only an empty folder now."""
    store, place = opened(tmp_path), tmp_path / "mirror"
    save(store, 1)
    until(lambda: steps_in(place / "tiny/run") == [1])
    place.rename(tmp_path / "away")
    place.mkdir()
    for step in (2, 3):
        save(store, step)
        until(lambda: len(warnings(caplog)) == 1 and not asked(store))
    assert warnings(caplog) == [
        f"the mirror {place}/tiny/run fails: it is gone; training goes on, the next save tries again"
    ]
    assert list(place.iterdir()) == []
    place.rmdir()
    (tmp_path / "away").rename(place)
    save(store, 4)
    until(lambda: len(warnings(caplog)) == 2)
    assert warnings(caplog)[1] == f"the mirror {place}/tiny/run works again"
    store.close()
    assert intact(place / "tiny/run") == [1, 2, 3, 4]
    assert len(warnings(caplog)) == 2


def asked(store: Checkpoints) -> bool:
    assert store._mirror is not None
    return store._mirror._due.is_set()


def test_a_copy_that_differs_is_never_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One bit in one file, and no error: only the comparison after the copy can see it."""
    real, run = shutil.copyfile, tmp_path / "run"

    def damaging(source: Any, target: Any) -> None:
        real(source, target)
        if target == tmp_path / "mirror/tiny/run/checkpoints/.copy-000000001/meta.json":
            flip(Path(target))

    monkeypatch.setattr(shutil, "copyfile", damaging)
    store = opened(tmp_path)
    save(store, 1)
    store.close()
    steps = tmp_path / "mirror/tiny/run/checkpoints"
    assert list(steps.iterdir()) == []
    assert warnings(caplog) == [
        f"the mirror {tmp_path}/mirror/tiny/run fails: the copy of {run}/checkpoints/000000001 is not what was sealed; "
        "training goes on, the next save tries again",
        f"step 1 is not in the mirror {tmp_path}/mirror/tiny/run",
    ]
    monkeypatch.setattr(shutil, "copyfile", real)
    opened(tmp_path).close()  # the control
    assert contents(steps) == contents(run / "checkpoints")


@pytest.mark.parametrize(("keep_last", "order", "there"), [(99, [1, 4, 3, 2], [1, 2, 3, 4]), (1, [1, 4], [4])])
def test_one_step_waits_for_a_slow_mirror_and_it_is_the_newest(
    keep_last: int, order: list[int], there: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that the run still has follow when there is time."""
    go, copied, real = threading.Event(), [], mirror.copy_step

    def slow(sealed: Any, into: Path) -> Any:
        copied.append(sealed.step)
        assert go.wait(20)
        return real(sealed, into)

    monkeypatch.setattr(mirror, "copy_step", slow)
    store = opened(tmp_path, keep_last=keep_last, keep_best=0)
    save(store, 1)
    until(lambda: copied == [1])
    save(store, 2, 3, 4)  # comes back while the mirror is held
    assert copied == [1]
    go.set()
    store.close()
    assert copied == order
    assert intact(tmp_path / "mirror/tiny/run") == there


def test_the_end_of_a_run_waits_so_long_and_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    go, real, before = threading.Event(), mirror.copy_step, set(threading.enumerate())
    monkeypatch.setattr(mirror, "WAIT", 0.3)
    monkeypatch.setattr(mirror, "copy_step", lambda *arguments: (go.wait(20), real(*arguments))[1])
    begun = time.monotonic()
    with train(tmp_path / "run", **{"checkpoint.mirror": tmp_path / "mirror"}) as done:
        assert done.exit_code == 0
    assert time.monotonic() - begun < 15
    assert intact(tmp_path / "run") == [6, 8]
    assert warnings(caplog, tmp_path / "run") == [
        f"step 8 is not in the mirror {tmp_path}/mirror/tiny/run: it is not done after 0.3 s"
    ]
    looked = mirror.Mirror(tmp_path / "mirror/tiny/run", tmp_path / "run")
    monkeypatch.setattr(looked, "_places", lambda: iter([tmp_path][go.wait(20) :]))
    assert looked.bring_back(-1) is None
    assert warnings(caplog) == [
        f"the mirror {tmp_path}/mirror/tiny/run does not answer within 0.3 s: resuming without it"
    ]
    go.set()
    for thread in set(threading.enumerate()) - before:
        thread.join(20)


STUCK = """
import sys, threading, pathlib
sys.path.insert(0, sys.argv[2])
from checkpoint_helpers import META, state_of, store_of
from jaxtrain.checkpoint import files, mirror
mirror.WAIT, read, place = 0.2, files._digest, sys.argv[1]
files._digest = lambda path: threading.Event().wait() if "mirror" in path.parts else read(path)
store = store_of(pathlib.Path(place, "run/checkpoints"), name="tiny", mirror=place + "/mirror")
store.sweep()
store.save(1, state_of(), META)
store.close()
"""


def test_a_stuck_mirror_does_not_hold_the_process(tmp_path: Path) -> None:
    """Stuck where it reads its copy: threads of a pool would be waited for at the end of Python."""
    here = str(Path(__file__).parent)
    done = subprocess.run(
        [sys.executable, "-c", STUCK, str(tmp_path), here], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.endswith(f"step 1 is not in the mirror {tmp_path}/mirror/tiny/run: it is not done after 0.2 s\n")
    assert intact(tmp_path / "run") == [1]


def test_a_dry_run_leaves_nothing_in_the_mirror(tmp_path: Path) -> None:
    runner.dry_run({**TINY, "checkpoint": {"mirror": str(tmp_path / "mirror")}}, quiet=True)
    assert list(tmp_path.iterdir()) == []
