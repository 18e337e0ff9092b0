"""Fixtures of all tests."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile

if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    # One cache for the whole session, child processes too: most of a test's time is compiling the same programs.
    _CACHE = tempfile.mkdtemp(prefix="jaxtrain-test-cache-")
    atexit.register(shutil.rmtree, _CACHE, ignore_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _CACHE
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

import os
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[1]


LONGEST = [
    "test_docs_pages",
    "test_mutations",
    "test_parallel_sharding",
    "test_launch_peers",
    "test_launch_local",
    "test_docs",
    "test_run_names",
    "test_launch_cluster",
    "test_notebooks",
    "test_checkpoint_killed",
    "test_parallel_offload",
    "test_cli_verify",
    "test_run_every_field",
    "test_checkpoint_faults",
    "test_launch_supervise",
    "test_hardware_compile_cache",
]
"""Files that take a minute and more, the longest first: begun last, one would keep a single worker busy at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {name: i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(place)))


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


@pytest.fixture(scope="session")
def compiled() -> str:
    """Where compiled programs of this session are kept."""
    return os.environ["JAX_COMPILATION_CACHE_DIR"]
