"""Each test named in mutations.py fails when the product line it depends on is patched."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE

import pytest
from mutations import MUTATIONS, Mutation

import jaxtrain
from jaxtrain.config import shipped

TESTS = Path(__file__).resolve().parent
PACKAGE = Path(jaxtrain.__file__).parent
Server = subprocess.Popen[str]
FAILED = 1  # pytest's exit code for "some tests failed"; 2 to 5 mean that they could not run


def _copy(place: Path) -> Path:
    copy = place / "jaxtrain"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(next(iter(shipped().values())).parent, copy / "configs", dirs_exist_ok=True)
    return copy


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A process that forks; it starts in an empty folder, and no path of ours comes before that of a copy."""
    if not hasattr(os, "fork") or not Path("/proc/self/task").is_dir():
        pytest.skip("mutations are tested in forks of a process whose threads /proc counts: only on Linux")
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "OPENBLAS_NUM_THREADS": "1"}
    environment.pop("PYTHONPATH", None)
    command = [sys.executable, "-P", str(TESTS / "mutation_server.py")]
    empty = tmp_path_factory.mktemp("server")
    with subprocess.Popen(command, cwd=empty, env=environment, stdin=PIPE, stdout=PIPE, text=True) as process:
        yield process


def _pytest(server: Server, place: Path, *tests: str) -> tuple[int, str]:
    """The exit code of pytest in a folder with a copy of the package, and what it said."""
    print(json.dumps([str(place), *(str(TESTS / test) for test in tests)]), file=server.stdin, flush=True)
    assert server.stdout is not None
    answer = server.stdout.readline()
    assert answer, f"the server ended: {server.wait(10)}"
    return int(answer), (place / "said.txt").read_text(errors="replace")[-4000:]


@pytest.mark.mutation
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: f"{m.file}-{m.new[:30]}")
def test_the_test_sees_the_patched_line(mutation: Mutation, server: Server, tmp_path: Path) -> None:
    patched = _copy(tmp_path) / mutation.file
    source = patched.read_text()
    assert source.count(mutation.old) == 1, f"{mutation.file} no longer holds this once: {mutation.old}"
    patched.write_text(source.replace(mutation.old, mutation.new))
    code, said = _pytest(server, tmp_path, mutation.test)
    assert code == FAILED, said


WHICH = """
def test_which():
    import subprocess, sys, jaxtrain
    code = "import jaxtrain; print(jaxtrain.__file__, end='')"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == jaxtrain.__file__ == "{}/__init__.py"
"""


def test_the_copy_is_what_is_tested_and_without_a_patch_it_passes(server: Server, tmp_path: Path) -> None:
    """The control: it is the patch that fails, not the copying or the forking."""
    which = tmp_path / "test_which.py"
    which.write_text(WHICH.format(_copy(tmp_path)))
    tests = (str(which), "core/test_core_guard.py", "hooks/test_hooks_control.py", "data/test_data_order.py")
    code, said = _pytest(server, tmp_path, *tests)
    assert code == 0, said
