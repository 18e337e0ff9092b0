"""From curves of a range test to a learning rate: how near, when refused, when stopped."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
from tune_helpers import ASSERTED, TUNED, Curve, Quadratic, flats, formulas, quadratic, quadratics, stopped, within

from jaxtrain.tune.lr_rules import AGREE, FEWEST, RULES, Stopper, StopRule, Suggestion, suggest, valley

FAMILIES = {"quadratic": quadratics, "formula": formulas}
LRS = np.geomspace(1e-6, 10, 141)
"""Twenty a decade, so that a tenth of one is another."""


@functools.cache
def answered(family: str) -> list[tuple[Curve, Suggestion]]:
    """200 curves of a seed that no constant was chosen on."""
    assert ASSERTED not in TUNED
    return [(curve, suggest(curve.lrs, curve.losses)) for curve in FAMILIES[family](ASSERTED, 200)]


def sigmoid(lrs: np.ndarray, centre: float, decades: float = 0.25) -> np.ndarray:
    return 1 / (1 + np.exp(-np.log10(lrs / centre) / decades))


def clean(lrs: np.ndarray = LRS) -> np.ndarray:
    """Without noise: from 2.3 to 0.3 around 1e-3, up again from 1e-1 on."""
    return (2.3 - 2 * sigmoid(lrs, 1e-3) + (lrs / 0.2) ** 3)[None]


@pytest.mark.parametrize("family", FAMILIES)
def test_95_percent_of_suggestions_are_within_5x_of_the_best_lr(family: str) -> None:
    found = [(suggestion.lr, curve.best) for curve, suggestion in answered(family) if suggestion.lr is not None]
    assert len(found) >= 100
    assert sum(within(lr, best) for lr, best in found) >= 0.95 * len(found)


@pytest.mark.parametrize("family", FAMILIES)
def test_at_most_15_percent_are_refused_at_noise_up_to_a_tenth(family: str) -> None:
    refused = [suggestion.lr is None for curve, suggestion in answered(family) if curve.noise <= 0.1]
    assert len(refused) >= 50
    assert sum(refused) <= 0.15 * len(refused)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_slope_over_linear_lr_is_wrong_on_the_same_curves(family: str) -> None:
    """The control: what a well-known trainer does, here even with the mean of the seeds."""
    off = []
    for curve, _ in answered(family):
        mean = curve.losses.mean(0)
        mean, lrs = mean[np.isfinite(mean)], curve.lrs[np.isfinite(mean)]
        off.append(lrs[np.argmin(np.gradient(mean, lrs))] / curve.best)
    assert np.mean([within(ratio, 1.0) for ratio in off]) <= 0.01
    assert np.median(off) < 1e-3


@pytest.mark.parametrize("heavy", [False, True])
def test_flat_curves_are_always_refused(heavy: bool) -> None:
    assert [suggest(curve.lrs, curve.losses).lr for curve in flats(ASSERTED, 200, heavy)] == [None] * 200


def test_the_best_lr_of_the_quadratic_is_what_training_shows() -> None:
    rng = np.random.default_rng(ASSERTED)
    model, best, steps = quadratic(rng)
    lrs = best * np.array([0.2, 0.5, 1.0, 2.0])
    trained = [np.mean(model.losses(np.full(steps + 1, lr), 200, rng)[:, -1]) for lr in lrs]
    np.testing.assert_allclose(trained, model.expected(lrs, steps), rtol=0.05)
    around = best * np.geomspace(0.05, 2, 200)
    assert within(around[np.argmin(model.expected(around, steps))], best, 1.03)
    assert 5 <= 2 / model.h.max() / best <= 20
    one = Quadratic(0.5, np.array([1.0]), np.array([4.0]), 0.0)
    assert one.expected(np.array([0.5]), 2).tolist() == [0.5 + 4.0 / 2 / 16]


def test_the_three_rules_of_a_curve_without_noise() -> None:
    suggestion = suggest(LRS, clean())
    # Its fall is centred at 1e-3, its least loss at 2.8e-2.
    assert suggestion.why == "the median of valley 3.5e-03, steepest 1.0e-03, minimum/10 2.8e-03"
    assert list(suggestion.rules) == list(RULES)
    assert suggestion.rules["minimum/10"] == LRS[np.argmin(clean())] / 10
    assert suggestion.lr == suggestion.rules["minimum/10"]


def test_the_smoothed_curve_ends_where_the_loss_diverges() -> None:
    smoothed = suggest(LRS, clean()).smoothed
    assert smoothed.shape == LRS.shape
    ended = np.isnan(smoothed)
    assert np.diff(ended).sum() == 1
    assert 0.2 < LRS[ended].min() < 0.4
    assert np.abs(smoothed - clean()[0])[LRS < 1e-2].max() < 0.04


def test_the_unit_of_the_loss_does_not_matter_and_that_of_the_lr_is_kept() -> None:
    curve = quadratics(ASSERTED, 1, (0.05, 0.05))[0]
    first = suggest(curve.lrs, curve.losses)
    assert first.lr is not None
    assert suggest(curve.lrs, curve.losses * 1024).lr == first.lr
    assert suggest(curve.lrs * 8, curve.losses).lr == pytest.approx(8 * first.lr)


def test_seeds_in_any_order_and_curves_that_nobody_stopped_give_the_same() -> None:
    with np.errstate(over="ignore"):
        whole = 2.3 - 2 * sigmoid(LRS, 1e-3) + np.exp((LRS / 0.1) ** 2)
    losses = whole + np.random.default_rng(0).normal(0, 0.02, (3, len(LRS)))
    cut = stopped(losses)
    assert np.isinf(losses).any()
    assert np.isnan(cut).any()
    assert suggest(LRS, cut).lr == suggest(LRS, losses).lr == suggest(LRS, cut[[2, 0, 1]]).lr is not None


def test_one_seed_of_three_that_breaks_off_early_does_not_end_the_curve() -> None:
    losses = np.tile(clean(), (3, 1))
    losses[0, LRS > 2e-4] = np.nan
    assert suggest(LRS, losses).lr == suggest(LRS, clean()).lr
    losses[1, LRS > 2e-4] = np.nan  # the control: two of three do
    assert np.isnan(suggest(LRS, losses).smoothed[LRS > 2e-4]).all()


def test_rules_that_disagree_are_no_suggestion_and_say_so() -> None:
    losses = (3.0 - sigmoid(LRS, 1e-5, 0.1) - sigmoid(LRS, 0.05, 0.7))[None] + np.maximum(LRS - 1, 0) ** 3
    suggestion = suggest(LRS, losses)
    assert suggestion.lr is None
    found = [value for value in suggestion.rules.values() if value is not None]
    assert len(found) == 3
    assert max(found) / min(found) > AGREE
    assert suggestion.why == (
        "no suggestion: the rules are 7,943.3x apart, more than 10x "
        "(valley 2.8e-03, steepest 1.0e-05, minimum/10 7.9e-02)"
    )


def test_a_fall_within_the_noise_is_refused_with_both_numbers() -> None:
    rng = np.random.default_rng(0)
    losses = 2.3 - 0.05 * sigmoid(LRS, 1e-3) + rng.normal(0, 0.1, (3, len(LRS)))
    suggestion = suggest(LRS, losses)
    assert suggestion.lr is None
    assert suggestion.rules == dict.fromkeys(RULES)
    said = "the curve is flat: the loss falls by 0.078, its noise needs 0.15 to be sure"
    assert suggestion.why == f"no suggestion: {said}"
    assert np.isfinite(suggestion.smoothed).all()
    quiet = 2.3 - 0.05 * sigmoid(LRS, 1e-3) + (LRS / 0.2) ** 3 + rng.normal(0, 0.002, (3, len(LRS)))
    assert suggest(LRS, quiet).lr is not None  # the control


def test_a_constant_loss_is_flat_and_rounding_is_no_fall() -> None:
    assert suggest(LRS, np.full((3, len(LRS)), 2.3)).why.startswith("no suggestion: the curve is flat")
    assert suggest(LRS, np.zeros((1, len(LRS)))).lr is None


@pytest.mark.parametrize("count", [0, 1, FEWEST - 1])
def test_too_few_losses_before_divergence_are_no_curve(count: int) -> None:
    losses = np.full((3, len(LRS)), np.nan)
    losses[:, :count] = 2.3
    suggestion = suggest(LRS, losses)
    assert suggestion.lr is None
    assert suggestion.why == (
        f"no suggestion: only {count} learning rates before divergence, 12 are needed: start lower or take more steps"
    )
    assert np.isnan(suggestion.smoothed).all()


def test_a_range_that_ends_within_the_fall_is_refused() -> None:
    short = LRS < 1.2e-3
    assert "the loss still falls at the largest lr 1.1e-03: end higher" in suggest(LRS[short], clean()[:, short]).why
    assert suggest(LRS[short], clean()[:, short]).lr is None


def test_a_range_that_begins_within_the_fall_is_refused() -> None:
    late = LRS > 2e-3
    suggestion = suggest(LRS[late], clean()[:, late])
    assert suggestion.lr is None
    assert "the loss falls from the smallest lr 2.2e-03 on: start lower" in suggestion.why


@pytest.mark.parametrize(
    ("lrs", "losses", "said"),
    [
        ([1.0, 2.0], [3.0, 3.0], r"losses \[2\] are not \[seeds, N\] of lrs \[2\]"),
        ([1.0, 2.0], [[3.0]], r"losses \[1, 1\] are not \[seeds, N\] of lrs \[2\]"),
        ([1.0, 1.0], [[3.0, 3.0]], "positive, finite and rising"),
        ([0.0, 1.0], [[3.0, 3.0]], "positive, finite and rising"),
        ([1.0, math.inf], [[3.0, 3.0]], "positive, finite and rising"),
    ],
)
def test_wrong_shapes_and_learning_rates_are_errors(lrs: list[float], losses: list[float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        suggest(np.array(lrs), np.array(losses))


@pytest.mark.parametrize(
    ("losses", "middle"),
    [([5], 0), ([5, 4, 3], 1), ([5, 4, 3, 9, 1], 2), ([1, 2, 3], 0), ([9, 1, 8, 7, 6, 2], 3), ([3, 3, 3], 0)],
)
def test_the_valley_is_the_middle_of_the_longest_descent(losses: list[int], middle: int) -> None:
    assert valley(np.array(losses)) == middle


def stops_at(losses: list[float], rule: StopRule | None = None) -> int | None:
    stopper = Stopper(rule)
    return next((i for i, loss in enumerate(losses) if stopper.diverged(loss)), None)


def test_a_test_stops_above_four_times_its_best_average() -> None:
    now = StopRule(decay=0.0, after=0)
    assert stops_at([2.0, 1.0, 3.9, 4.0, 4.1], now) == 4
    assert stops_at([-2.0, 3.9, 4.1], now) == 2  # 3 x 2 above -2
    assert stops_at([2.0, 1.0, 4.1], StopRule(factor=5.0, decay=0.0, after=0)) is None


def test_the_first_losses_do_not_stop_a_test_unless_they_are_not_finite() -> None:
    assert stops_at([1.0, *[100.0] * 20]) == 10
    assert stops_at([1.0, math.nan]) == 1
    assert stops_at([math.inf]) == 0


def test_one_bad_batch_does_not_stop_a_test_but_a_rise_does() -> None:
    assert stops_at([1.0] * 20 + [12.0] + [1.0] * 20) is None
    assert stops_at([1.0] * 20 + [12.0] * 20) == 21


def test_the_average_is_not_drawn_to_zero_at_the_start() -> None:
    """Uncorrected, the first average of a constant loss is a fifth of it, and the constant loss itself a divergence."""
    assert stops_at([2.3] * 100) is None
