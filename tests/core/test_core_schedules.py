"""Every kind of schedule against a closed formula of our own, and its counter: updates, not steps."""

from __future__ import annotations

from collections.abc import Callable
from math import cos, pi, sqrt
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from core_helpers import make_batch, make_spec, spoil, start, step_of

from jaxtrain.config import schema
from jaxtrain.core.schedules import SCHEDULES, make_schedule

PEAK, TOTAL, EPOCH = 0.2, 200, 25
COSINE = schema.Cosine(warmup=10, end_factor=0.01)


def rates(config: Any, updates: Any, *, peak: float = PEAK, total: int = TOTAL) -> np.ndarray:
    schedule = make_schedule(config, peak, total_steps=total, steps_per_epoch=EPOCH)
    return np.array([float(schedule(jnp.int32(n))) for n in updates])


def half_cosine(x: float) -> float:
    """1 at 0, 0 at 1."""
    return (1 + cos(pi * x)) / 2


def one_cycle(n: int) -> float:
    if n < 60:
        return PEAK * (0.04 + 0.96 * (1 - half_cosine(n / 60)))
    return PEAK * (0.001 + 0.999 * half_cosine(min((n - 60) / 140, 1)))


CASES: dict[str, tuple[Any, Callable[[int], float]]] = {
    "constant": (schema.Constant(), lambda n: PEAK),
    "linear": (schema.Linear(end_factor=0.1), lambda n: PEAK * (1 - 0.9 * min(n / 200, 1))),
    "cosine": (schema.Cosine(end_factor=0.1), lambda n: PEAK * (0.1 + 0.9 * half_cosine(min(n / 200, 1)))),
    "one_cycle": (schema.OneCycle(end_factor=0.001), one_cycle),
    "wsd": (schema.Wsd(end_factor=0.1), lambda n: PEAK * (1 - 0.9 * min(max(n - 160, 0) / 40, 1))),
    "exponential": (schema.Exponential(decay_factor=0.5), lambda n: PEAK * 0.5 ** (n / EPOCH)),
    "piecewise": (
        schema.Piecewise(boundaries=(100, "75%"), factors=(0.1, 0.5)),
        lambda n: PEAK * (1 if n < 100 else 0.1 if n < 150 else 0.05),
    ),
    "inverse_sqrt": (schema.InverseSqrt(timescale=20), lambda n: PEAK * sqrt(20 / (20 + n))),
}
UPDATES = (0, 1, 24, 25, 26, 59, 60, 61, 98, 99, 100, 101, 148, 149, 150, 151, 159, 160, 161, 199, 200, 260)


def test_every_kind_has_a_case() -> None:
    assert set(CASES) == set(SCHEDULES)


@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_schedule_equals_its_closed_formula(kind: str) -> None:
    config, formula = CASES[kind]
    np.testing.assert_allclose(rates(config, UPDATES), [formula(n) for n in UPDATES], rtol=2e-5, atol=1e-9)


def test_the_kinds_are_different_curves() -> None:
    curves = [tuple(np.round(rates(config, UPDATES), 6)) for config, _ in CASES.values()]
    assert len(set(curves)) == len(SCHEDULES)


@pytest.mark.parametrize("kind", [k for k in SCHEDULES if k != "one_cycle"])
def test_warmup_climbs_from_zero_in_a_straight_line_to_the_peak(kind: str) -> None:
    config, _ = CASES[kind]
    warm = rates(config.model_copy(update={"warmup": "10%"}), range(21))  # 10 % of 200 updates
    np.testing.assert_allclose(warm, PEAK * np.arange(21) / 20, rtol=1e-6)
    assert rates(config, [0])[0] == pytest.approx(PEAK)  # without warm-up


def test_decay_after_a_warmup_ends_at_the_end_of_the_run() -> None:
    for config in (schema.Linear(warmup=40, end_factor=0.1), schema.Cosine(warmup=40, end_factor=0.1)):
        end = rates(config, [40, 199, 200, 300])
        assert end[0] == pytest.approx(PEAK)
        assert end[1] > end[2] == pytest.approx(0.1 * PEAK)
        assert end[3] == end[2]
    stable = rates(schema.Wsd(warmup=40, decay=20), [40, 179, 180, 190, 200])
    np.testing.assert_allclose(stable, [PEAK, PEAK, PEAK, PEAK / 2, 0], atol=1e-8)


def test_a_piecewise_boundary_is_counted_from_the_start_of_the_run_and_not_of_the_decay() -> None:
    config = schema.Piecewise(warmup=20, boundaries=(100,), factors=(0.1,))
    np.testing.assert_allclose(rates(config, [20, 98, 99, 100, 101]), PEAK * np.array([1, 1, 1, 0.1, 0.1]), rtol=1e-6)


def test_piecewise_with_another_count_of_factors_is_refused() -> None:
    with pytest.raises(ValueError):
        rates(schema.Piecewise(boundaries=(10, 20), factors=(0.1,)), [0])


def test_rates_equal_the_expected_curve_of_the_resume_case(shared: Any) -> None:
    table = np.loadtxt(shared / "faults/loop_lr_resume/lr_expected.csv", delimiter=",", skiprows=1)
    np.testing.assert_allclose(rates(COSINE, table[:, 0].astype(int), peak=0.1, total=100), table[:, 1], rtol=1e-5)
    stated = [0.0, 0.05, 0.1, 0.07959537, 0.07818005, 0.00103015, 0.001]
    np.testing.assert_allclose(rates(COSINE, [0, 5, 10, 37, 38, 99, 100], peak=0.1, total=100), stated, rtol=1e-5)
    # Control: decaying over all 100 updates instead of the 90 after the warm-up.
    longer = rates(schema.Cosine(end_factor=0.01), [37], peak=0.1, total=100)
    assert longer[0] != pytest.approx(0.07959537, rel=1e-2)


# ---------------------------------------------------------------- through the step


@pytest.fixture(scope="module")
def accumulating() -> Any:
    """4 micro-batches an update on the curve of the resume case."""
    schedule = make_schedule(COSINE, 0.1, total_steps=100, steps_per_epoch=10)
    spec = make_spec(schedule=schedule, micro_batches=4)
    return spec, step_of(spec)


def lrs(step: Any, state: Any, batches: list[Any]) -> tuple[Any, list[float]]:
    seen = []
    for batch in batches:
        state, metrics = step(state, batch)
        seen.append(float(metrics["lr"]))
    return state, seen


def test_accumulation_moves_the_schedule_once_an_update(accumulating: Any) -> None:
    spec, step = accumulating
    state, seen = lrs(step, start(spec), [make_batch()] * 12)
    np.testing.assert_allclose(seen, rates(COSINE, range(12), peak=0.1, total=100), rtol=1e-6)
    assert seen[3] != pytest.approx(float(rates(COSINE, [12], peak=0.1, total=100)[0]))  # once a micro-batch
    assert int(state["updates"]) == 12


def test_a_skipped_update_does_not_move_the_schedule(accumulating: Any) -> None:
    spec, step = accumulating
    good, bad = make_batch(), spoil(make_batch())
    state, seen = lrs(step, start(spec), [good, good, bad, bad, good, good])
    np.testing.assert_allclose(seen, [0.0, 0.01, 0.02, 0.02, 0.02, 0.03], rtol=1e-6)
    assert (int(state["step"]), int(state["updates"])) == (6, 4)


def test_a_resumed_count_of_updates_goes_on_along_the_curve(accumulating: Any) -> None:
    spec, step = accumulating
    resumed = {**start(spec), "step": jnp.int32(50), "updates": jnp.int32(37)}
    _, seen = lrs(step, resumed, [make_batch()] * 2)
    np.testing.assert_allclose(seen, [0.07959537, 0.07818005], rtol=1e-5)


def test_lr_scale_multiplies_the_schedule(accumulating: Any) -> None:
    spec, step = accumulating
    scaled = {**start(spec), "updates": jnp.int32(37), "lr_scale": jnp.float32(0.5)}
    _, seen = lrs(step, scaled, [make_batch()])
    assert seen[0] == pytest.approx(0.07959537 / 2, rel=1e-5)
