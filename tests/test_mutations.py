"""Each test named in mutations.py fails when the product line it depends on is patched."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from mutations import MUTATIONS, Mutation

import jaxtrain
from jaxtrain.config import shipped

TESTS = Path(__file__).resolve().parent
PACKAGE = Path(jaxtrain.__file__).parent
FAILED = 1  # pytest's exit code for "some tests failed"; 2 to 5 mean that they could not run


def _copy(place: Path) -> Path:
    copy = place / "jaxtrain"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(next(iter(shipped().values())).parent, copy / "configs", dirs_exist_ok=True)
    return copy


def _python(place: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Python in a folder with a copy of the package, which comes before any installed one."""
    environment = {**os.environ, "PYTHONPATH": str(place), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, timeout=300)


def _pytest(place: Path, *tests: str) -> subprocess.CompletedProcess[str]:
    settings = ["-c", str(TESTS.parent / "pyproject.toml"), "-p", "no:cacheprovider", "-x", "-n", "0"]
    return _python(place, "-m", "pytest", *settings, *(str(TESTS / test) for test in tests))


@pytest.mark.mutation
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: f"{m.file}-{m.new[:30]}")
def test_the_test_sees_the_patched_line(mutation: Mutation, tmp_path: Path) -> None:
    patched = _copy(tmp_path) / mutation.file
    source = patched.read_text()
    assert source.count(mutation.old) == 1, f"{mutation.file} no longer holds this once: {mutation.old}"
    patched.write_text(source.replace(mutation.old, mutation.new))
    done = _pytest(tmp_path, mutation.test)
    assert done.returncode == FAILED, done.stdout[-2000:] + done.stderr[-2000:]


def test_the_copy_is_what_is_tested_and_without_a_patch_it_passes(tmp_path: Path) -> None:
    """The control: it is the patch that fails, not the copying."""
    copy = _copy(tmp_path)
    said = _python(tmp_path, "-c", "import jaxtrain; print(jaxtrain.__file__)").stdout
    assert Path(said.strip()).parent == copy
    done = _pytest(tmp_path, "core/test_core_guard.py", "hooks/test_hooks_control.py", "data/test_data_order.py")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
