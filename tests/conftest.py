"""Fixtures of all tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder with fault cases and data, kept outside the repository. On CI its absence is a failure."""
    path = Path(os.environ.get("JAXTRAIN_SHARED", REPO.parent / "shared"))
    if not path.is_dir():
        reason = f"no shared folder at {path}: set JAXTRAIN_SHARED to the folder that holds faults/ and data/"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    return path
