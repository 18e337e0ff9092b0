"""The notebooks run as they are, in a fresh folder, and are stored with their output.

JAXTRAIN_UPDATE_NOTEBOOKS=1 pytest tests/test_notebooks.py    runs them and stores the new output.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import KernelManager
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).resolve().parents[1] / "notebooks").glob("*.ipynb"))
UPDATE = os.environ.get("JAXTRAIN_UPDATE_NOTEBOOKS") == "1"


def read(path: Path) -> Any:
    return nbformat.read(path, as_version=4)


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def run(notebook: Any, place: Path) -> Any:
    """Every cell, in a kernel of this very interpreter whose folder is `place`."""
    manager = KernelManager()
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    manager._kernel_spec = KernelSpec(argv=command, display_name="this", language="python")
    try:
        NotebookClient(notebook, km=manager, timeout=300, resources={"metadata": {"path": str(place)}}).execute()
    finally:
        manager.shutdown_kernel(now=True)
    return notebook


def words(cell: Any) -> str:
    """What a cell says, as plain text."""
    parts = [o.get("text", "") or o.get("data", {}).get("text/plain", "") for o in cell.outputs]
    return "\n".join(parts)


def test_there_are_notebooks() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["01_quickstart", "02_your_own_model", "03_language_model"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_notebook_is_stored_as_it_ran(path: Path) -> None:
    cells = code_cells(read(path))
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert {output.output_type for output in outputs} <= {"display_data", "execute_result", "stream"}
    assert not [output for output in outputs if output.get("name") == "stderr"]
    assert any("test: " in words(cell) for cell in cells)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_notebook_runs(path: Path, tmp_path: Path) -> None:
    stored, now = read(path), run(read(path), tmp_path)
    for old, new in zip(code_cells(stored), code_cells(now), strict=True):
        assert UPDATE or [o.output_type for o in new.outputs] == [o.output_type for o in old.outputs], new.source
    training = next(cell for cell in code_cells(now) if ".fit()" in cell.source or "jt.train(" in cell.source)
    assert [output.output_type for output in training.outputs].count("display_data") == 1  # progress is one display
    if UPDATE:
        for cell in now.cells:
            cell.metadata.pop("execution", None)  # times of execution, which change each time
        nbformat.write(now, path)


def test_the_quickstart_reaches_what_it_promises(tmp_path: Path) -> None:
    cells = code_cells(read(NOTEBOOKS[0]))
    assert float(words(cells[1]).strip("(").split(",")[0]) >= 0.97
    assert sum("image/png" in output.get("data", {}) for cell in cells for output in cell.outputs) == 3


def test_a_cell_that_fails_fails_the_test(tmp_path: Path) -> None:
    from nbclient.exceptions import CellExecutionError

    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1 / 0")])
    with pytest.raises(CellExecutionError, match="ZeroDivisionError"):
        run(notebook, tmp_path)
