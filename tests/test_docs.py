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


def blocks(page: Path) -> list[tuple[str, str, str]]:
    """(language, mark, text) of every block of a page, in order."""
    return [(kind, mark.strip(), text) for kind, mark, text in BLOCK.findall(page.read_text())]


def _environment() -> dict[str, str]:
    here = str(Path(sys.executable).parent)
    return {**os.environ, "PATH": here + os.pathsep + os.environ["PATH"], "PYTHONUNBUFFERED": "1"}


def run(command: list[str], place: Path) -> str:
    done = subprocess.run(command, cwd=place, env=_environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stderr + done.stdout


def run_page(page: Path, place: Path) -> int:
    """Every line of sh and every block of Python, in the order of the page, in one folder; how many there were."""
    count = 0
    for kind, mark, text in blocks(page):
        if mark == "setup":
            continue
        commands = {
            "sh": [["bash", "-c", line] for line in text.splitlines()],
            "python": [[sys.executable, "-c", text]],
        }
        for command in commands.get(kind, []):
            run(command, place)
            count += 1
    return count


def test_the_readme_runs(tmp_path: Path) -> None:
    assert run_page(PAGES[0], tmp_path) >= 10
    assert [mark for _, mark, _ in blocks(PAGES[0])].count("setup") == 2


def test_a_command_that_fails_fails_its_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```sh\nexit 3\n```\n")
    with pytest.raises(AssertionError):
        run_page(page, tmp_path)


def test_the_first_command_says_what_the_readme_shows(tmp_path: Path) -> None:
    said = run(["jaxtrain", "train", "digits"], tmp_path)
    shown = next(text for kind, _, text in blocks(PAGES[0]) if kind == "text")
    lines = [_without_figures(line) for line in said.splitlines()]
    for line in shown.splitlines():
        assert _without_figures(line) in lines, line
    assert said.splitlines()[-1].startswith("runs/digits/")
    accuracy = re.search(r"^test/accuracy ([\d.]+)$", said, re.MULTILINE)
    assert accuracy
    assert float(accuracy[1]) >= 0.975


def _without_figures(line: str) -> str:
    return re.sub(r"\d[\d,.TZ]*", "#", line)
