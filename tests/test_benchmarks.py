"""RESULTS.md is what its raw files say, and no figure is older than the rooms it depends on."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
RAW = sorted((BENCHMARKS / "raw").glob("*.json"))
sys.path.insert(0, str(BENCHMARKS))
from record import page, rooms_digest  # noqa: E402


def test_results_page_is_what_the_scripts_wrote() -> None:
    assert RAW
    assert (BENCHMARKS / "RESULTS.md").read_text() == page()


@pytest.mark.parametrize("path", RAW, ids=lambda p: p.stem)
def test_figures_are_not_older_than_their_rooms(path: Path) -> None:
    entry = json.loads(path.read_text())
    assert rooms_digest(entry["rooms"]) == entry["rooms_sha256"], (
        f"{', '.join(entry['rooms'])} changed since {path.name} was measured; run again: {entry['command']}"
    )


def test_a_step_of_a_small_gpt_is_no_slower_than_pytorch_and_a_loop_by_hand() -> None:
    """Recorded on a quiet machine; nothing is timed here."""
    runs = json.loads((BENCHMARKS / "raw" / "gpt_speed.json").read_text())["raw"]["runs"]
    steps = {arm: [run["step"] for run in own] for arm, own in runs.items()}
    assert {len(own) for own in steps.values()} == {5}
    ratios = {arm: [a / b for a, b in zip(steps["jaxtrain"], own, strict=True)] for arm, own in steps.items()}
    torch, hand = (median(ratios[arm]) for arm in ("torch", "hand"))
    assert torch <= 1.0
    assert hand <= 1.02
    spread = {arm: f"{min(own):.2f} to {max(own):.2f}" for arm, own in ratios.items()}
    readme = (BENCHMARKS.parent / "README.md").read_text()
    assert f"takes {torch:.2f} of the time that PyTorch takes ({spread['torch']})" in readme
    assert f"same tricks ({hand:.2f}; {spread['hand']})" in readme


def test_digits_accuracy_holds_on_every_seed() -> None:
    runs = json.loads((BENCHMARKS / "raw" / "digits_seeds.json").read_text())["raw"]["runs"]
    figures = [run["test_accuracy"] for run in runs]
    assert len(figures) == 5
    assert sum(figures) / 5 >= 0.985
    assert min(figures) >= 0.97
    assert f"{min(figures):.3f} to {max(figures):.3f}" in (BENCHMARKS.parent / "README.md").read_text()
