"""Files that survive a power cut: atomic writes, fsync of files and folders, digests."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any


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
    write_text(path, json.dumps(value, indent=1, allow_nan=False))


def read_json(path: Path) -> Any:
    """The JSON value in a file."""
    return json.loads(path.read_text(encoding="utf-8"))


def digests(folder: Path, skip: frozenset[str] = frozenset()) -> dict[str, dict[str, Any]]:
    """{relative path: {"size", "sha256"}} of every file below `folder`."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name not in skip:
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            found[name] = {"size": path.stat().st_size, "sha256": digest}
    return found
