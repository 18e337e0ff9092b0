"""Compiled programs on disk: what this machine has compiled once is read the next time, and how long it took is known.

The folder is `$XDG_CACHE_HOME/jaxtrain` or `~/.cache/jaxtrain`. JAX_COMPILATION_CACHE_DIR names another one,
JAX_ENABLE_COMPILATION_CACHE=0 turns it off; both are jax's own.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import tempfile
from pathlib import Path

import jax

log = logging.getLogger("jaxtrain")
LIMIT = 2 << 30
"""Bytes; what was not used for longest is deleted beyond it, at the start of a process."""
_TIMES, _KEPT = "times.json", 1000


def folder() -> Path:
    """The user's cache folder."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "jaxtrain"


@functools.cache
def use() -> Path | None:
    """Point jax at the folder, once a process. None: it is off, or the folder cannot be written, which one line tells.

    A folder that is set already stays. Nothing happens to what has been compiled before.
    """
    if not jax.config.values["jax_enable_compilation_cache"]:
        return None
    chosen = jax.config.values["jax_compilation_cache_dir"]
    if chosen:
        return Path(chosen)
    path = folder()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
        trim(path, LIMIT)
    except OSError as error:
        log.info("compiled programs are not kept: %s", error)
        return None
    # With jax's own threshold of a second, none of the small programs around a step would be kept.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax.config.update("jax_compilation_cache_dir", str(path))
    return path


def trim(path: Path, limit: int) -> None:
    """Delete programs, the longest unused first, until at most `limit` bytes are left."""
    found = []
    for file in path.iterdir():
        with contextlib.suppress(OSError):
            state = file.stat()
            if file.is_file() and file.name != _TIMES:
                found.append((max(state.st_atime, state.st_mtime), state.st_size, file))
    total = sum(size for _, size, _ in found)
    for _, size, file in sorted(found):
        if total <= limit:
            return
        with contextlib.suppress(OSError):  # another process may be doing the same
            file.unlink()
            total -= size


def last_time(key: str) -> float | None:
    """Seconds that compiling `key` took when it was not there yet; None when that is not known."""
    path = use()
    value = _times(path).get(key) if path else None
    return float(value) if value is not None else None


def remember(key: str, seconds: float) -> None:
    """Keep how long compiling `key` took, if that is longer than what is known: a later time was one of reading."""
    path = use()
    if path is None:
        return
    times = _times(path)
    times[key] = max(seconds, times.pop(key, 0.0))
    text = json.dumps(dict(list(times.items())[-_KEPT:]))
    with contextlib.suppress(OSError):
        handle, name = tempfile.mkstemp(dir=path)
        with os.fdopen(handle, "w") as file:
            file.write(text)
        Path(name).replace(path / _TIMES)


def _times(path: Path) -> dict[str, float]:
    try:
        found = json.loads((path / _TIMES).read_text())
    except (OSError, ValueError):
        return {}
    good = isinstance(found, dict) and all(isinstance(v, int | float) for v in found.values())
    return found if good else {}
