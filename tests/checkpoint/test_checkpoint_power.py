"""The power is cut: the disk as it is without what still waits in memory, at every sync and rename of a save.

An ext4 image is mounted; its file holds only what the file system has written out. A copy of it is what a machine
finds when it starts again, the journal of the file system included. Root only.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoint_helpers import META, abstract, same, state_of, store_of
from mounts import mounted

from jaxtrain.checkpoint import files
from jaxtrain.config import NeedsPerson

OPTIONS = ("-o", "loop,commit=300")
"""Nothing is written out because time has passed: only what is asked for."""


def image(tmp_path: Path) -> Path:
    path = tmp_path / "disk.img"
    with path.open("wb") as file:
        file.truncate(32 * 2**20)
    if shutil.which("mkfs.ext4") is None or os.geteuid() != 0:
        pytest.skip("no mkfs.ext4, or not root: no image can be made and mounted")
    subprocess.run(["mkfs.ext4", "-q", str(path)], check=True)
    return path


def after_the_cut(disk: Path, place: Path) -> tuple[int, bool]:
    """(The newest step that a restart restores from a copy of the disk, whether all was whole and right)."""
    with mounted(place, *OPTIONS, str(disk)):
        store = store_of(place / "checkpoints")
        aside: list[str] = []
        store.sweep()
        try:
            found = store.restore_newest(abstract(state_of()), lambda _, why: aside.append(why))
        except NeedsPerson:  # steps, and none of them whole
            return 0, False
        if found is None:
            return 0, aside == []
        return found[0].step, aside == [] and same(found[1], state_of(found[0].step / 8))


def cut_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, tuple[int, bool]]]:
    """[(the newest step that was sealed when the power went, what a restart finds)] over the save of step 2."""
    disk = image(tmp_path)
    copies: list[tuple[int, Path]] = []
    with mounted(tmp_path / "disk", *OPTIONS, str(disk)) as place:
        store = store_of(place / "checkpoints", keep_last=1, keep_best=0)
        store.save(1, state_of(1 / 8), META)
        store.wait()

        def cut() -> None:
            sealed = store.steps()[-1].step
            copies.append((sealed, Path(shutil.copy(disk, tmp_path / f"copy-{len(copies)}.img"))))

        def before(real: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any, **options: Any) -> Any:
                cut()
                return real(*arguments, **options)

            return call

        with monkeypatch.context() as patched:
            for name in ("fsync", "replace", "rename"):
                patched.setattr(os, name, before(getattr(os, name)))
            store.save(2, state_of(2 / 8), META)
            store.wait()
        cut()
        store.close()
    found = []
    for sealed, copy in copies:
        found.append((sealed, after_the_cut(copy, tmp_path / "restarted")))
        copy.unlink()
    return found


def test_a_power_cut_at_any_sync_of_a_save_leaves_a_whole_newest_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = cut_everywhere(tmp_path, monkeypatch)
    assert len(found) > 20
    assert all(whole for _, (_, whole) in found), found
    assert {step for _, (step, _) in found} == {1, 2}
    assert found[-1] == (2, (2, True))  # what was called sealed is there after the cut


def test_without_syncs_the_power_cut_loses_what_was_called_sealed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control arm."""
    monkeypatch.setattr(files, "fsync_tree", lambda folder: None)
    monkeypatch.setattr(files, "fsync", lambda path: None)
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    found = cut_everywhere(tmp_path, monkeypatch)
    assert found[-1][0] == 2  # called sealed
    assert found[-1][1] != (2, True), found
