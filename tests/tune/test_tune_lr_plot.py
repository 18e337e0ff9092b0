"""The picture of a range test."""

from __future__ import annotations

import sys
import warnings
from io import BytesIO

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image
from tune_helpers import Curve, flats, quadratics

from jaxtrain.tune.lr_plot import figure
from jaxtrain.tune.lr_rules import RULES, suggest

NOTHING = np.full((3, 40), np.nan)
BROKEN = np.where(np.arange(40) < 8, 2.0, 1e305)[None]


def drawn(curve: Curve) -> Figure:
    return figure(curve.lrs, curve.losses, suggest(curve.lrs, curve.losses))


def labels(picture: Figure) -> list[str]:
    return [text.get_text() for text in picture.legends[0].get_texts()]


def test_a_suggestion_is_drawn_with_its_rules_seeds_and_smoothed_mean() -> None:
    curve = quadratics(1, 1, (0.05, 0.05))[0]
    suggestion = suggest(curve.lrs, curve.losses)
    assert suggestion.lr is not None
    picture = drawn(curve)
    axes = picture.axes[0]
    assert axes.get_xscale() == "log"
    named = [f"{name} {suggestion.rules[name]:.1e}" for name in RULES]
    assert labels(picture) == ["3 seeds", "smoothed mean", f"suggestion {suggestion.lr:.1e}", *named]
    assert axes.get_title().replace("\n", " ") == f"suggestion: {suggestion.lr:.1e}, {suggestion.why}"
    upright = [line.get_xdata()[0] for line in axes.lines if len(line.get_xdata()) == 2]
    assert upright == [suggestion.lr, *suggestion.rules.values()]
    np.testing.assert_array_equal(axes.lines[3].get_ydata(), suggestion.smoothed)
    assert axes.lines[3].get_linewidth() > 2 * axes.lines[0].get_linewidth()


def test_a_refusal_is_the_title_and_has_no_lines() -> None:
    picture = drawn(flats(1, 1)[0])
    assert picture.axes[0].get_title().startswith("no suggestion: the curve is flat")
    assert labels(picture) == ["3 seeds", "smoothed mean"]


def test_the_fall_fills_the_picture_however_high_the_loss_diverges() -> None:
    curve = quadratics(1, 1, (0.02, 0.02))[0]
    end = int(np.argmax(np.isnan(curve.losses).any(0)))
    losses = curve.losses.copy()
    losses[:, end:] = 1e300
    suggestion = suggest(curve.lrs, losses)
    low, high = figure(curve.lrs, losses, suggestion).axes[0].get_ylim()
    fall = suggestion.smoothed[0] - np.nanmin(suggestion.smoothed)
    assert fall < high - low < 2 * fall
    assert low < np.nanmin(suggestion.smoothed)
    assert suggestion.smoothed[0] < high


@pytest.mark.parametrize("losses", [NOTHING, np.full((1, 40), 2.0), np.zeros((2, 40)), -np.ones((1, 40)), BROKEN])
def test_any_losses_are_drawn_without_a_warning_and_without_pyplot(losses: np.ndarray) -> None:
    had = "matplotlib.pyplot" in sys.modules
    written = BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lrs = np.geomspace(1e-7, 1, 40)
        figure(lrs, losses, suggest(lrs, losses)).savefig(written)
    assert Image.open(written).size == (880, 550)
    assert ("matplotlib.pyplot" in sys.modules) == had
