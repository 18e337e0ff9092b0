"""File systems of a test's own: mounted where this user may, and taken away again whatever happens."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def mounted(place: Path, *arguments: str) -> Iterator[Path]:
    """`mount ARGUMENTS place`. Skips the test where that is not allowed."""
    place.mkdir(exist_ok=True)
    try:
        done = subprocess.run(["mount", *arguments, str(place)], capture_output=True, text=True)
    except OSError as error:
        pytest.skip(f"no mount here: {error}")
    if done.returncode:
        pytest.skip(f"mounting is not allowed here (root only): {done.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)
