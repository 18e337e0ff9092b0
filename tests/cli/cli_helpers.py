"""What the tests of the command share."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

TINY = ("--model.kind=mlp", "--model.hidden=[16]", "--augment.shift=0", "--log.tensorboard=false")
"""Flags that make `digits` a matter of a second, with --train.duration=20."""
SHORT = (*TINY, "--train.duration=20")


def tree(folder: Path) -> dict[str, str]:
    """{path: digest} of everything below a folder."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
        for path in sorted(folder.rglob("*"))
    }


def process(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`jaxtrain ARGUMENTS` as a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "jaxtrain", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=120,
    )


def one_line(text: str) -> str:
    """The only line of `text`."""
    lines = text.splitlines()
    assert len(lines) == 1, text
    assert lines[0].startswith("jaxtrain: ")
    return lines[0].removeprefix("jaxtrain: ")
