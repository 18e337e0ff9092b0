"""Files that are there whole or not at all."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jaxtrain.checkpoint import files
from jaxtrain.config import ConfigError


def test_write_json_replaces_the_file_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    files.write_json(path, {"step": 1})
    files.write_json(path, {"step": 2, "word": "ä"})
    assert files.read_json(path) == {"step": 2, "word": "ä"}
    assert os.listdir(tmp_path) == ["status.json"]


@pytest.mark.parametrize("where", ["replace", "fsync"])
def test_a_crash_in_between_leaves_the_old_file(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "status.json"
    files.write_json(path, {"step": 1})

    def crash(*arguments: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(os, where, crash)
    with pytest.raises(OSError, match="No space left"):
        files.write_json(path, {"step": 2})
    monkeypatch.undo()
    assert files.read_json(path) == {"step": 1}
    assert os.listdir(tmp_path) == ["status.json"]  # no temporary file stays behind
    files.write_json(path, {"step": 2})  # the control
    assert files.read_json(path) == {"step": 2}


def test_the_old_file_is_whole_until_the_new_one_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the moment of the rename the new text is written and synced, under another name."""
    path = tmp_path / "a.txt"
    files.write_text(path, "old")
    seen = []
    rename, sync = os.replace, os.fsync
    monkeypatch.setattr(os, "fsync", lambda handle: (seen.append("sync"), sync(handle))[1])

    def look(source: str, target: Path) -> None:
        seen.append((Path(source).read_text(), Path(target).read_text()))
        rename(source, target)

    monkeypatch.setattr(os, "replace", look)
    files.write_text(path, "new")
    assert seen == ["sync", ("new", "old"), "sync"]  # the file before, its folder after


def test_json_is_strict(tmp_path: Path) -> None:
    with pytest.raises(ValueError):
        files.write_json(tmp_path / "a.json", {"loss": float("nan")})
    assert os.listdir(tmp_path) == []


def test_digests_name_every_file_below_with_size_and_sha256(tmp_path: Path) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/b/c.bin").write_bytes(b"123")
    (tmp_path / "skip.json").write_bytes(b"4")
    (tmp_path / ".hidden").write_bytes(b"")
    assert files.digests(tmp_path, frozenset({"skip.json"})) == {
        "a/b/c.bin": {"size": 3, "sha256": hashlib.sha256(b"123").hexdigest()},
        ".hidden": {"size": 0, "sha256": hashlib.sha256(b"").hexdigest()},
    }


def test_fsync_tree_syncs_every_file_every_folder_and_the_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "step/state").mkdir(parents=True)
    (tmp_path / "step/state/x").write_bytes(b"1")
    (tmp_path / "step/meta.json").write_bytes(b"2")
    synced: list[str] = []
    monkeypatch.setattr(files, "fsync", lambda path: synced.append(path.relative_to(tmp_path.parent).as_posix()))
    files.fsync_tree(tmp_path / "step")
    top = tmp_path.name
    assert set(synced) == {top, *(f"{top}/{name}" for name in ("step", "step/state", "step/state/x", "step/meta.json"))}
    assert synced.index(f"{top}/step/state/x") < synced.index(f"{top}/step") < synced.index(top)


def test_one_holder_at_a_time_and_the_system_takes_the_lock_of_the_dead_back(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    holder = subprocess.Popen(
        [sys.executable, "-c", "import sys, time; from pathlib import Path; from jaxtrain.checkpoint import files\n"
         "kept = files.Lock(Path(sys.argv[1]), 'it'); print('held', flush=True); time.sleep(60)", str(path)],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(ConfigError) as caught:
        files.Lock(path, "run folder 'x'")
    said = (
        f"run folder 'x' is in use by process {holder.pid} on {platform.node()}; wait for it to end, or stop it first"
    )
    assert str(caught.value) == said
    holder.kill()
    holder.communicate()
    with pytest.raises(ConfigError, match=r"^it cannot be written: Not a directory$"):
        files.Lock(path / "below", "it")
    mine = files.Lock(path, "it")
    with pytest.raises(ConfigError, match=f"process {os.getpid()} on"):
        files.Lock(path, "it")
    mine.release()
    files.Lock(path, "it").release()
    assert path.read_text() == f"process {os.getpid()} on {platform.node()}"


def test_a_folder_is_removed_out_of_sight_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "step").mkdir()
    (tmp_path / ".trash-step").mkdir()  # of one that was killed while it was being removed
    (tmp_path / ".trash-step/file").write_bytes(b"1")
    seen: list[list[str]] = []
    real = shutil.rmtree
    monkeypatch.setattr(shutil, "rmtree", lambda path, **o: (seen.append(os.listdir(tmp_path)), real(path, **o)))
    files.remove(tmp_path / "step")
    assert [sorted(names) for names in seen] == [[".trash-step", "step"], [".trash-step"]]
    assert os.listdir(tmp_path) == []
