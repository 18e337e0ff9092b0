"""RESULTS.md is what its raw files say, and no figure is older than the rooms it depends on."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import mean, median
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
RAW = sorted((BENCHMARKS / "raw").glob("*.json"))
sys.path.insert(0, str(BENCHMARKS))
import record  # noqa: E402
from record import page, rooms_digest  # noqa: E402


def test_results_page_is_what_the_scripts_wrote() -> None:
    assert RAW
    assert (BENCHMARKS / "RESULTS.md").read_text() == page()


def test_figures_of_another_machine_stay_and_those_of_this_one_are_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "RAW", tmp_path)
    monkeypatch.setattr(record, "PAGE", tmp_path / "RESULTS.md")
    for figure, processor in enumerate(["one", "two", "one", "one"]):
        monkeypatch.setattr(record, "_processor", lambda processor=processor: processor)
        record.record("speed", "Speed", [f"figure {figure}"], {}, ["loop.py"])
    entry = json.loads((tmp_path / "speed.json").read_text())
    assert (entry["lines"], [e["lines"] for e in entry["earlier"]]) == (["figure 3"], [["figure 1"]])
    text = (tmp_path / "RESULTS.md").read_text()
    assert [n for n in range(4) if f"figure {n}" in text] == [1, 3]
    assert text.index("figure 3") < text.index("Recorded before (two") < text.index("figure 1")


@pytest.mark.parametrize("path", RAW, ids=lambda p: p.stem)
def test_figures_are_not_older_than_their_rooms(path: Path) -> None:
    entry = json.loads(path.read_text())
    assert rooms_digest(entry["rooms"]) == entry["rooms_sha256"], (
        f"{', '.join(entry['rooms'])} changed since {path.name} was measured; run again: {entry['command']}"
    )


def _of_jaxtrain(entry: dict[str, Any], arm: str) -> list[float]:
    """jaxtrain's time over that of an arm of gpt_speed.py, for each round."""
    runs = entry["raw"]["runs"]
    assert {len(own) for own in runs.values()} == {5}
    return [ours["step"] / theirs["step"] for ours, theirs in zip(runs["jaxtrain"], runs[arm], strict=True)]


def test_the_readme_says_of_speed_what_was_measured_and_no_loop_by_hand_is_faster() -> None:
    """Recorded on quiet machines; nothing is timed here. PyTorch's place depends on the processor: both are said."""
    newest = json.loads((BENCHMARKS / "raw" / "gpt_speed.json").read_text())
    readme = " ".join((BENCHMARKS.parent / "README.md").read_text().split())
    hand = _of_jaxtrain(newest, "hand")
    assert median(hand) <= 1.02
    assert f"same tricks ({median(hand):.2f}; {min(hand):.2f} to {max(hand):.2f})" in readme
    said = []
    for entry in (newest, *newest["earlier"]):
        own = _of_jaxtrain(entry, "torch")
        said.append(f"{median(own):.2f} of the time that PyTorch takes ({min(own):.2f} to {max(own):.2f})")
    assert all(sentence in readme for sentence in said), said
    peers = json.loads((BENCHMARKS / "raw" / "peers.json").read_text())["raw"]["runs"]

    def times(network: str, arm: str) -> float:
        pairs = zip(peers[network][arm], peers[network]["jaxtrain"], strict=True)
        return median(theirs["step"] / ours["step"] for theirs, ours in pairs)

    lightning, keras = times("tiny_mlp", "Lightning"), times("tiny_mlp", "Keras fit")
    assert f"Lightning {lightning:.1f} times as long and Keras' `fit` {keras:.1f} times" in readme
    torch, keras = times("resnet18", "PyTorch by hand"), times("resnet18", "Keras fit")
    assert keras >= 2
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
