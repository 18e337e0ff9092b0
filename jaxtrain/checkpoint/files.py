"""Files that survive a power cut: atomic writes, fsync of files and folders, digests; and who may write and read."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from jaxtrain.config.errors import ConfigError

THREADS = 2
"""That read and digest files at once: sha256 leaves Python's lock alone, and one thread does about 1 GB/s."""


def fsync(path: Path) -> None:
    """Force a file or a folder's entries to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def fsync_tree(folder: Path) -> None:
    """Every file and folder below `folder`, it and its parent."""
    for path in sorted(folder.rglob("*")):
        fsync(path)
    fsync(folder)
    fsync(folder.parent)


def make_private(folder: Path) -> None:
    """Only the owner may read and write what is in `folder`, and it."""
    folder.chmod(0o700)
    for path in folder.rglob("*"):
        path.chmod(0o700 if path.is_dir() else 0o600)


def write_text(path: Path, text: str) -> None:
    """Replace `path` by `text` in one step: written aside, synced, renamed, synced."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    fsync(path.parent)


def write_json(path: Path, value: Any) -> None:
    """As `write_text`, strict JSON."""
    write_text(path, json_text(value))


def json_text(value: Any) -> str:
    """Strict JSON as it is written here."""
    return json.dumps(value, indent=1, allow_nan=False)


def read_json(path: Path) -> Any:
    """The JSON value in a file."""
    return json.loads(path.read_text(encoding="utf-8"))


def digests(folder: Path, skip: frozenset[str] = frozenset(), threads: int = THREADS) -> dict[str, dict[str, Any]]:
    """{relative path: {"size", "sha256"}} of every file below `folder`. threads: 1 is the caller's own."""
    found = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    wanted = {name: path for name, path in found.items() if name not in skip}
    if threads == 1:
        return {name: _digest(path) for name, path in wanted.items()}
    with ThreadPoolExecutor(threads) as pool:
        return dict(zip(wanted, pool.map(_digest, wanted.values()), strict=True))


def _digest(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"size": os.fstat(file.fileno()).st_size, "sha256": digest}


def size_of(folder: Path) -> int:
    """Bytes of all files below `folder`."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def in_words(nbytes: float) -> str:
    """A size in the unit that fits it: "12.3 MB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.4g} TB"


def remove(folder: Path) -> None:
    """Remove a folder that others may list: renamed out of sight first, so that it is there whole or not at all."""
    trash = folder.parent / f".trash-{folder.name}"
    shutil.rmtree(trash, ignore_errors=True)  # of one that could not be removed to its end
    folder.rename(trash)
    shutil.rmtree(trash, ignore_errors=True)


class Lock:
    """One writer at a time: a lock on a file, which the system takes back when its holder ends, however it ends."""

    def __init__(self, path: Path, what: str) -> None:
        """Raises ConfigError naming the holder of `what`, or why nobody can write there."""
        try:
            self._file = path.open("a+b")
        except OSError as error:
            raise ConfigError(f"{what} cannot be written: {error.strerror}") from None
        with contextlib.suppress(ImportError):  # Windows has no such lock
            import fcntl

            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                self._file.seek(0)
                holder = self._file.read(200).decode(errors="replace").strip() or "another process"
                self._file.close()
                raise ConfigError(f"{what} is in use by {holder}; wait for it to end, or stop it first") from None
        self._file.truncate(0)
        self._file.write(f"process {os.getpid()} on {platform.node()}".encode())
        self._file.flush()

    def release(self) -> None:
        """Let others have it."""
        self._file.close()
