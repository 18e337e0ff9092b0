"""Everything shown in README and docs runs, and says what they say it says. Blocks marked `setup` are .ci/run's."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[1]
PAGES = [REPO / "README.md", *sorted((REPO / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def _blocks(language: str, marked: str = "") -> list[tuple[str, str]]:
    found = []
    for page in PAGES:
        for number, (kind, mark, text) in enumerate(BLOCK.findall(page.read_text())):
            if kind == language and mark.strip() == marked:
                found.append((f"{page.name}-{number}", text))
    return found


def _environment() -> dict[str, str]:
    here = str(Path(sys.executable).parent)
    return {**os.environ, "PATH": here + os.pathsep + os.environ["PATH"], "PYTHONUNBUFFERED": "1"}


def _run(command: list[str], place: Path) -> str:
    done = subprocess.run(command, cwd=place, env=_environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stderr + done.stdout


def test_there_are_blocks_to_run() -> None:
    assert len(_blocks("sh")) >= 1
    assert len(_blocks("python")) >= 2
    assert len(_blocks("sh", "setup")) == 2


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("docs")


SHELL = [(f"{name}-{i}", line) for name, text in _blocks("sh") for i, line in enumerate(text.splitlines())]


def test_the_first_command_says_what_the_readme_shows(place: Path) -> None:
    said = _run(["jaxtrain", "train", "digits"], place)
    (_, shown) = _blocks("text")[0]
    lines = [_without_figures(line) for line in said.splitlines()]
    for line in shown.splitlines():
        assert _without_figures(line) in lines, line
    assert said.splitlines()[-1].startswith("runs/digits/")
    accuracy = re.search(r"^test/accuracy ([\d.]+)$", said, re.MULTILINE)
    assert accuracy
    assert float(accuracy[1]) >= 0.975


@pytest.mark.parametrize(("name", "line"), SHELL, ids=[name for name, _ in SHELL])
def test_each_command_runs(name: str, line: str, place: Path) -> None:
    _run(["bash", "-c", line], place)


@pytest.mark.parametrize(("name", "code"), _blocks("python"), ids=[name for name, _ in _blocks("python")])
def test_each_python_block_runs(name: str, code: str, place: Path) -> None:
    _run([sys.executable, "-c", code], place)


def _without_figures(line: str) -> str:
    return re.sub(r"\d[\d,.TZ]*", "#", line)
