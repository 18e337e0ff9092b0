"""RESULTS.md is what its raw files say, and no figure is older than the rooms it depends on."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import mean, median

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


def test_the_readme_says_of_speed_what_was_measured_and_no_loop_by_hand_is_faster() -> None:
    """Recorded on a quiet machine; nothing is timed here. PyTorch is faster where it was, and the README says so."""
    runs = json.loads((BENCHMARKS / "raw" / "gpt_speed.json").read_text())["raw"]["runs"]
    steps = {arm: [run["step"] for run in own] for arm, own in runs.items()}
    assert {len(own) for own in steps.values()} == {5}
    ratios = {arm: [a / b for a, b in zip(steps["jaxtrain"], own, strict=True)] for arm, own in steps.items()}
    torch, hand = (median(ratios[arm]) for arm in ("torch", "hand"))
    assert hand <= 1.02
    spread = {arm: f"{min(own):.2f} to {max(own):.2f}" for arm, own in ratios.items()}
    readme = (BENCHMARKS.parent / "README.md").read_text()
    assert f"takes {torch:.2f} of the time that PyTorch takes ({spread['torch']})" in readme
    assert f"same tricks ({hand:.2f}; {spread['hand']})" in readme
    peers = json.loads((BENCHMARKS / "raw" / "peers.json").read_text())["raw"]["runs"]

    def times(network: str, arm: str) -> float:
        pairs = zip(peers[network][arm], peers[network]["jaxtrain"], strict=True)
        return median(theirs["step"] / ours["step"] for theirs, ours in pairs)

    readme = " ".join(readme.split())
    lightning, keras = times("tiny_mlp", "Lightning"), times("tiny_mlp", "Keras fit")
    assert f"Lightning {lightning:.1f} times as long and Keras' `fit` {keras:.1f} times" in readme
    torch, keras = times("resnet18", "PyTorch by hand"), times("resnet18", "Keras fit")
    assert min(torch, keras) >= 1
    assert f"resnet-18 takes PyTorch {torch:.1f} times as long and Keras' `fit` {keras:.1f} times" in readme


def test_digits_accuracy_holds_on_every_seed() -> None:
    runs = json.loads((BENCHMARKS / "raw" / "digits_seeds.json").read_text())["raw"]["runs"]
    figures = [run["test_accuracy"] for run in runs]
    assert len(figures) == 5
    assert sum(figures) / 5 >= 0.985
    assert min(figures) >= 0.97
    assert f"{min(figures):.3f} to {max(figures):.3f}" in (BENCHMARKS.parent / "README.md").read_text()


def test_readme_and_configs_say_the_accuracies_that_were_measured() -> None:
    def figures(name: str) -> list[float]:
        raw = json.loads((BENCHMARKS / "raw" / f"seeds_{name}.json").read_text())["raw"]
        return [run["figure"] for run in raw["runs"]]

    readme = " ".join((BENCHMARKS.parent / "README.md").read_text().split())
    mnist, images = figures("mnist"), figures("images")
    assert f"MNIST {mean(mnist):.4f} test accuracy" in readme
    assert f"Sign Language Digits {mean(images):.3f} (random split)" in readme
    assert f"tiny Shakespeare {mean(figures('shakespeare')):.2f} nats" in readme
    for name, own, digits in (("mnist", mnist, 4), ("images", images, 3)):
        head = (BENCHMARKS.parent / "configs" / f"{name}.yaml").read_text()
        said = f"{mean(own):.{digits}f} (3 seeds, {min(own):.{digits}f} to {max(own):.{digits}f})"
        assert len(own) == 3
        assert said in head
