"""Killed before any call that changes files: the newest step is whole, the one before or the new one, in bits."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from crash_driver import Forks, prepared, sweep

EVERY = 3


@pytest.fixture(scope="module")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    if shutil.which("gcc") is None:
        pytest.skip("no gcc: the shim that counts the calls cannot be built")
    with Forks(tmp_path_factory.mktemp("shim")) as server:
        yield server


@pytest.fixture(scope="module")
def counted(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    return prepared(forks, tmp_path_factory.mktemp("prepared"))


def test_killed_before_every_third_call_a_restart_finds_a_whole_step(
    forks: Forks, counted: tuple[Path, int], tmp_path: Path
) -> None:
    """No error, nothing set aside, right values, and the next saves work."""
    store, calls = counted
    assert calls > 80  # with those of Orbax's threads
    found, wrong = sweep(forks, tmp_path, store, range(1, calls + 1, EVERY))
    assert wrong == []
    assert found["killed"] >= 0.9 * len(range(1, calls + 1, EVERY))
    assert found["step 2"] > 5
    assert found["step 3"] > 0  # in the removal of step 1
    assert found["step 2"] + found["step 3"] == found["killed"] + found["ended"]


@pytest.mark.parametrize(
    ("arm", "said"),
    [("manifest_first", "AssertionError: ['checkpoint 3: "), ("unsealed", "manifest.json was changed")],
)
def test_without_the_seal_in_its_place_the_sweep_fails(
    arm: str, said: str, forks: Forks, counted: tuple[Path, int], tmp_path: Path
) -> None:
    """The control arms: a seal written first, and none asked for, leave a newest step that cannot be restored."""
    store, calls = counted
    middle = int(calls * 0.4)
    _, wrong = sweep(forks, tmp_path, store, range(middle, middle + 30, 15), arm)
    assert wrong
    assert said in wrong[0]
