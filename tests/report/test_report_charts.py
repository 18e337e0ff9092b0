"""Curves: thinning keeps spikes, NaN makes gaps, axes are round."""

from __future__ import annotations

import re

import numpy as np
import pytest

from jaxtrain.report.charts import Line, Marks, chart, log_ticks, means, thin, tick_text, ticks
from jaxtrain.report.record import Series


def series(values: list[float] | np.ndarray, name: str = "train/loss") -> Series:
    return Series(name, np.arange(1, len(values) + 1, dtype=np.float64), np.asarray(values, np.float64))


def drawn(values: list[float] | np.ndarray, **options: object) -> str:
    marks = Marks(first=0, last=len(values), **options)  # type: ignore[arg-type]
    return chart("loss", [Line(series(values), "train/loss", "train")], marks)


def curve(svg: str) -> str:
    found = re.search(r'class="curve train" d="([^"]*)"', svg)
    assert found
    return found.group(1)


def test_thinning_keeps_the_only_spike_of_a_hundred_thousand_rows() -> None:
    values = np.ones(100_000)
    values[51_234], values[70_001] = 9.0, -4.0
    kept = thin(series(values))
    assert len(kept.steps) <= 2 * 300 + 2
    assert (kept.values.max(), kept.values.min()) == (9.0, -4.0)
    assert kept.at(51_235) == 9.0
    assert (kept.steps[0], kept.steps[-1]) == (1, 100_000)
    assert (np.diff(kept.steps) > 0).all()
    short = series(np.ones(600))
    assert thin(short) is short


def test_a_thinned_curve_is_the_mean_on_a_pale_line_of_extremes() -> None:
    values = np.tile([0.0, 2.0], 50_000)
    middle = means(series(values))
    assert len(middle.steps) == 300
    np.testing.assert_allclose(middle.values, 1.0, atol=0.01)
    assert drawn(values).count('class="curve') == 2
    assert drawn(values[:600]).count('class="curve') == 1


def test_a_long_stretch_of_nan_stays_a_gap_when_thinned() -> None:
    values = np.ones(10_000)
    values[4_000:6_000] = np.nan
    kept = thin(series(values))
    assert np.isnan(kept.values).any()
    assert kept.steps[~np.isnan(kept.values)].tolist().count(5_000.0) == 0


def test_nan_breaks_the_line_and_a_lone_value_is_a_dot() -> None:
    path = curve(drawn([1.0, 2.0, np.nan, 3.0, np.nan, 4.0, 5.0]))
    assert path.count("M") == 3
    assert path.count("L") == 2
    assert curve(drawn([1.0, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0])).count("M") == 1


@pytest.mark.parametrize(
    "values",
    [
        [1.0],
        [2.0, 2.0],
        [0.0],
        [-3.0, 5.0],
        [1e-9, 1e9],
        [1e300, 1.5e300],
        [5e-324, 1.0],
        [-1e308, 1e308],
        [1e-14, 3e-14],
    ],
)
def test_any_range_is_drawn_inside_the_frame(values: list[float]) -> None:
    svg = drawn(values)
    numbers = [float(x) for x in re.findall(r"[-\d.]+", curve(svg).replace("h0", ""))]
    assert all(70 <= x <= 506 for x in numbers[::2])
    assert all(31.9 <= y <= 246.1 for y in numbers[1::2])
    rules = [float(y) for y in re.findall(r'class="grid" d="M70 ([-\d.]+)H', svg)]
    assert len(rules) == len(set(rules)) >= 2
    assert all(31.9 <= y <= 246.1 for y in rules)
    assert "nan" not in svg
    assert "inf" not in svg


def test_nothing_finite_draws_nothing() -> None:
    assert drawn([np.nan, np.nan]) == ""
    assert chart("loss", [], Marks(0, 10)) == ""


def test_a_wide_positive_range_is_logarithmic_and_says_so() -> None:
    assert "loss (log)" in drawn([100.0, 0.1])
    assert "(log)" not in drawn([2.0, 1.0])
    assert "(log)" not in drawn([100.0, 0.0])


def test_best_events_and_skipped_steps_are_marked() -> None:
    svg = drawn([1.0, 2.0, 3.0, 4.0], best=2, events=((3, "resume<"),), skipped=(1, 4))
    assert "best step 2" in svg
    assert "resume&lt;" in svg
    assert svg.count("v-9") == 2
    bare = drawn([1.0, 2.0, 3.0, 4.0])
    assert "best" not in bare
    assert "skipped" not in bare
    assert "event" not in bare


def test_ticks_are_round_and_cover_the_range() -> None:
    assert ticks(0.0, 680.0) == [0.0, 200.0, 400.0, 600.0, 800.0]
    assert ticks(0.0, 0.003) == [0.0, 0.001, 0.002, 0.003]
    assert log_ticks(0.02, 4.0) == [0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0]
    assert log_ticks(0.9e-6, 1.0) == [1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1.0]
    assert [tick_text(v) for v in (0.0, 0.001, 1e-5, 5000.0, 10_000.0, 2.5e6)] == [
        "0",
        "0.001",
        "1e-5",
        "5000",
        "10k",
        "2.5M",
    ]
