"""The range test runs on states of its own, gives the same curve twice, ends where it diverges, leaves no trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.config import ConfigError, RunConfig, load
from jaxtrain.tune.range_test import RangeTest, range_test, write

TINY: dict[str, Any] = {
    "name": "tiny",
    "model": {"kind": "mlp", "hidden": [32]},
    "augment": {"shift": 0},
    "optimizer": {"kind": "adamw"},
    "train": {"duration": 20, "global_batch_size": 64},
    "evaluate": {"every": 10},
    "log": {"every": 1, "tensorboard": False},
}


@pytest.fixture(scope="module")
def config() -> RunConfig:
    return load(TINY)


@pytest.fixture(scope="module")
def test(config: RunConfig) -> RangeTest:
    return range_test(config, steps=100, seeds=2, high=100.0)


def test_the_loss_stands_falls_and_ends_where_it_diverges(test: RangeTest) -> None:
    first = test.losses[:, :20]
    assert np.abs(first.mean(1) - np.log(10)).max() < 1.0  # ten classes, nothing learnt yet
    assert np.nanmin(test.losses, 1).max() < 1.0
    ended = np.isnan(test.losses).argmax(1)
    assert (ended > 50).all()
    for row, end in zip(test.losses, ended, strict=True):
        assert np.isnan(row[end:]).all()
        assert np.isfinite(row[:end]).all()
    assert test.seeds == (0, 1)
    assert (test.losses[0, :20] != test.losses[1, :20]).all()


def test_the_suggestion_is_one_that_trains_digits(test: RangeTest) -> None:
    assert test.suggestion.lr is not None, test.suggestion.why
    assert 1e-3 < test.suggestion.lr < 0.1


def test_fault_loop_lr_finder_training_is_the_same_with_and_without_and_so_is_a_second_search(
    config: RunConfig, test: RangeTest, tmp_path: Path
) -> None:
    def trained(place: Path) -> tuple[str, list[Any]]:
        with jt.train(config, run_dir=place, quiet=True) as run:
            rows = [{k: v for k, v in row.items() if not k.startswith("time/")} for row in run.metrics()]
            (seal,) = place.glob("checkpoints/*20/manifest.json")
            step = json.loads(seal.read_text())
            return json.dumps(step["leaves"], sort_keys=True), rows

    before = trained(tmp_path / "before")
    again = range_test(config, steps=100, seeds=2, high=100.0)
    np.testing.assert_array_equal(again.losses, test.losses)
    assert again.suggestion.rules == test.suggestion.rules
    assert trained(tmp_path / "after") == before
    assert load(TINY) == config


def test_a_search_that_diverges_at_once_has_no_suggestion(config: RunConfig) -> None:
    keys = [("optimizer", {"kind": "sgd", "clip_norm": 0})]
    found = range_test(load(config, keys), low=1e6, high=1e9, steps=20, seeds=1)
    assert found.suggestion.lr is None
    assert found.suggestion.why.startswith("no suggestion: only ")
    assert np.isnan(found.losses).any()


def test_the_files_hold_the_curve_and_a_picture(test: RangeTest, tmp_path: Path) -> None:
    data, picture = write(test, tmp_path / "new", "tiny")
    found = json.loads(data.read_text())
    assert found["lr"] == test.suggestion.lr
    assert [[v is None for v in row] for row in found["losses"]] == np.isnan(test.losses).tolist()
    assert found["losses"][0][:5] == test.losses[0, :5].tolist()
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 10_000


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (1.0, 1.0), (1.0, 0.1), (float("nan"), 1.0)])
def test_what_is_no_range_is_refused(config: RunConfig, low: float, high: float) -> None:
    with pytest.raises(ConfigError, match="are no range; allowed: 0 < low < high"):
        range_test(config, low=low, high=high)
