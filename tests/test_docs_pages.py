"""Each page of docs/ runs from its first block to its last, in a folder of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_docs import PAGES, blocks, run_page


@pytest.mark.parametrize("page", PAGES[1:], ids=lambda p: p.stem)
def test_a_page_runs(page: Path, tmp_path: Path) -> None:
    assert run_page(page, tmp_path) >= 2


def test_every_page_is_linked_from_the_readme() -> None:
    readme = PAGES[0].read_text()
    assert len(PAGES) > 5
    assert [page.name for page in PAGES[1:] if f"(docs/{page.name})" not in readme] == []


def test_pages_show_commands_and_python_only() -> None:
    assert {kind for page in PAGES for kind, _, _ in blocks(page)} <= {"sh", "python", "text"}
