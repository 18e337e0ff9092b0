"""Objectives against the formulas written out in numpy (float64)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from core_helpers import make_batch

from jaxtrain.config import schema
from jaxtrain.core.objectives import (
    align,
    built_in_loss,
    call_model,
    make_objective,
    over_elements,
    row_weights,
    user_loss,
)

RNG = np.random.default_rng(0)
LOGITS = (2 * RNG.normal(size=(12, 4))).astype(np.float32)
LABELS = RNG.integers(0, 4, 12).astype(np.int32)
LOG_P = LOGITS.astype(np.float64) - np.log(np.exp(LOGITS.astype(np.float64)).sum(1, keepdims=True))
OWN = LOG_P[np.arange(12), LABELS]
TABLE = np.array([0.5, 1.0, 2.0, 4.0])


def elements(config: Any, outputs: np.ndarray, targets: np.ndarray, weights: Any = None) -> tuple[Any, Any]:
    loss, weight = make_objective(config, weights).elements(jnp.asarray(outputs), jnp.asarray(targets))
    return np.asarray(loss, np.float64), np.asarray(weight, np.float64)


def no_sums(outputs: Any, targets: Any, mask: Any) -> dict[str, Any]:
    return {}


def identity(inputs: jax.Array) -> jax.Array:
    return inputs


# ---------------------------------------------------------------- cross-entropy


def test_cross_entropy_is_minus_log_of_the_softmax() -> None:
    loss, weight = elements(schema.CrossEntropy(), LOGITS, LABELS)
    np.testing.assert_allclose(loss, -OWN, rtol=1e-5)
    np.testing.assert_array_equal(weight, np.ones(12))


def test_label_smoothing_is_cross_entropy_with_a_smoothed_target() -> None:
    target = 0.9 * np.eye(4)[LABELS] + 0.1 / 4
    expected = -(target * LOG_P).sum(1)
    loss, _ = elements(schema.CrossEntropy(label_smoothing=0.1), LOGITS, LABELS)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    off, _ = elements(schema.CrossEntropy(), LOGITS, LABELS)
    assert np.abs(off - expected).min() > 1e-3


def test_focal_loss_is_one_minus_p_to_the_gamma_times_cross_entropy() -> None:
    expected = (1 - np.exp(OWN)) ** 2 * -OWN
    loss, _ = elements(schema.CrossEntropy(focal_gamma=2.0), LOGITS, LABELS)
    np.testing.assert_allclose(loss, expected, rtol=1e-4)
    off, _ = elements(schema.CrossEntropy(), LOGITS, LABELS)
    assert np.abs(off - expected).min() > 1e-3


@pytest.mark.parametrize("gamma", [0.5, 1.0, 2.0])
def test_focal_loss_keeps_its_gradient_finite_where_the_model_is_sure(gamma: float) -> None:
    objective = make_objective(schema.CrossEntropy(focal_gamma=gamma))
    sure = jnp.array([[200.0, 0.0], [20.0, 0.0], [0.0, 0.0]])
    target = jnp.zeros(3, jnp.int32)
    loss, grad = jax.value_and_grad(lambda o: objective.elements(o, target)[0].sum())(sure)
    assert float(loss) == pytest.approx(0.5**gamma * np.log(2), rel=1e-4)
    assert np.isfinite(np.asarray(grad)).all()


def test_class_weights_multiply_the_loss_and_the_divisor() -> None:
    loss, weight = elements(schema.CrossEntropy(), LOGITS, LABELS, tuple(TABLE))
    np.testing.assert_allclose(loss, -OWN, rtol=1e-5)
    np.testing.assert_array_equal(weight, TABLE[LABELS])

    batch = {"inputs": LOGITS, "targets": LABELS, "mask": np.ones(12, bool)}
    fn = built_in_loss(make_objective(schema.CrossEntropy(), tuple(TABLE)), no_sums, takes_mask=False)
    total, divisor, _ = fn(identity, batch)
    w = TABLE[LABELS]
    assert float(total / divisor) == pytest.approx((w * -OWN).sum() / w.sum(), rel=1e-5)
    assert float(total / divisor) != pytest.approx((w * -OWN).mean(), rel=1e-2)  # divided by rows
    assert float(total / divisor) != pytest.approx(-OWN.mean(), rel=1e-2)  # without class weights


def test_the_evaluation_loss_has_neither_smoothing_nor_focus_nor_weights() -> None:
    config = schema.CrossEntropy(label_smoothing=0.2, focal_gamma=2.0)
    plain = make_objective(config, tuple(TABLE)).plain(jnp.asarray(LOGITS), jnp.asarray(LABELS))
    np.testing.assert_allclose(plain, -OWN, rtol=1e-5)


# ---------------------------------------------------------------- binary


def test_binary_loss_is_the_cross_entropy_of_the_sigmoid() -> None:
    outputs, targets = LOGITS[:, :3], (RNG.random((12, 3)) < 0.4).astype(np.int32)
    p = 1 / (1 + np.exp(-outputs.astype(np.float64)))
    loss, weight = elements(schema.Binary(), outputs, targets)
    np.testing.assert_allclose(loss, -(targets * np.log(p) + (1 - targets) * np.log(1 - p)), rtol=1e-5)
    np.testing.assert_array_equal(weight, np.ones((12, 3)))


def test_binary_smoothing_moves_targets_towards_one_half_and_weights_stay_with_the_label() -> None:
    outputs, targets = LOGITS[:, 0], np.array([0, 1] * 6, np.int32)
    p = 1 / (1 + np.exp(-outputs.astype(np.float64)))
    smooth = np.where(targets == 1, 0.9, 0.1)
    expected = -(smooth * np.log(p) + (1 - smooth) * np.log(1 - p))
    loss, weight = elements(schema.Binary(label_smoothing=0.2, positive_weight=3.0), outputs, targets)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    np.testing.assert_array_equal(weight, np.where(targets == 1, 3.0, 1.0))
    off, flat = elements(schema.Binary(), outputs, targets)
    assert np.abs(off - expected).max() > 0.1
    assert flat.max() == 1.0


# ---------------------------------------------------------------- regression


@pytest.mark.parametrize(
    ("config", "formula"),
    [
        (schema.Mse(), lambda e: e**2),
        (schema.Mae(), np.abs),
        (schema.Huber(delta=0.7), lambda e: np.where(np.abs(e) <= 0.7, e**2 / 2, 0.7 * (np.abs(e) - 0.35))),
    ],
)
def test_regression_losses_equal_their_formulas(config: Any, formula: Any) -> None:
    outputs, targets = LOGITS, RNG.normal(size=LOGITS.shape).astype(np.float32)
    error = outputs.astype(np.float64) - targets
    loss, weight = elements(config, outputs, targets)
    np.testing.assert_allclose(loss, formula(error), rtol=1e-5, atol=1e-7)
    np.testing.assert_array_equal(weight, np.ones(LOGITS.shape))
    np.testing.assert_allclose(make_objective(config).plain(outputs, targets), formula(error), rtol=1e-5, atol=1e-7)


def test_huber_bends_at_its_delta() -> None:
    error = np.array([0.5, 1.0, 1.5, 3.0], np.float32)
    small, _ = elements(schema.Huber(delta=1.0), error, np.zeros(4, np.float32))
    large, _ = elements(schema.Huber(delta=2.0), error, np.zeros(4, np.float32))
    np.testing.assert_allclose(small, [0.125, 0.5, 1.0, 2.5], rtol=1e-6)
    np.testing.assert_allclose(large, [0.125, 0.5, 1.125, 4.0], rtol=1e-6)


# ---------------------------------------------------------------- rows, masks, weights


def test_the_loss_is_the_weighted_sum_over_real_rows() -> None:
    mask = np.array([True] * 9 + [False] * 3)
    weights = np.linspace(0.5, 2.0, 12).astype(np.float32)
    batch = {"inputs": LOGITS, "targets": LABELS, "mask": mask, "weights": weights}
    total, divisor, _ = built_in_loss(make_objective(schema.CrossEntropy()), no_sums, False)(identity, batch)
    assert float(total) == pytest.approx((weights * -OWN)[:9].sum(), rel=1e-5)
    assert float(divisor) == pytest.approx(weights[:9].sum(), rel=1e-6)
    assert float(total) != pytest.approx((weights * -OWN).sum(), rel=1e-2)
    np.testing.assert_allclose(row_weights(batch), weights * mask)


def test_row_weights_reach_every_token_of_their_row() -> None:
    logits = RNG.normal(size=(3, 5, 4)).astype(np.float32)
    labels = RNG.integers(0, 4, (3, 5)).astype(np.int32)
    batch = {"inputs": logits, "targets": labels, "mask": np.array([True, True, False])}
    total, divisor, _ = built_in_loss(make_objective(schema.CrossEntropy()), no_sums, False)(identity, batch)
    each, _ = elements(schema.CrossEntropy(), logits, labels)
    assert float(total) == pytest.approx(each[:2].sum(), rel=1e-5)
    assert float(divisor) == 10.0
    assert over_elements(np.array([1.0, 2.0, 3.0]), labels).tolist() == [[1.0] * 5, [2.0] * 5, [3.0] * 5]


def nan_in_padding(where: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A regression batch of 3 real rows and 1 masked row that holds NaN, and the same with a harmless masked row."""
    clean = {
        "inputs": np.array([1.0, 2.0, 3.0, 0.0], np.float32),
        "targets": np.array([1.0, 1.0, 1.0, 0.0], np.float32),
        "mask": np.array([True, True, True, False]),
    }
    dirty = {**clean, where: np.where(clean["mask"], clean[where], np.nan).astype(np.float32)}
    return clean, dirty


@pytest.mark.parametrize("where", ["inputs", "targets"])
def test_a_nan_in_a_masked_row_does_not_reach_the_loss(where: str) -> None:
    clean, dirty = nan_in_padding(where)
    fn = built_in_loss(make_objective(schema.Mse()), no_sums, False)
    for batch in (clean, dirty):
        total, divisor, _ = fn(identity, batch)
        assert (float(total), float(divisor)) == (5.0, 3.0)
    unmasked, _, _ = fn(identity, {**dirty, "mask": np.ones(4, bool)})
    assert np.isnan(float(unmasked))


@pytest.mark.parametrize("where", ["inputs", "targets"])
def test_a_nan_in_a_masked_row_does_not_reach_the_gradient(where: str) -> None:
    _, dirty = nan_in_padding(where)
    fn = built_in_loss(make_objective(schema.Mse()), no_sums, False)
    grad = jax.grad(lambda bias: fn(lambda x: x + bias, dirty)[0])(jnp.float32(0.0))
    assert float(grad) == 6.0  # 2 * (0 + 1 + 2)


def test_a_nan_target_of_a_row_with_weight_zero_does_not_reach_the_gradient() -> None:
    _, dirty = nan_in_padding("targets")
    batch = {**dirty, "mask": np.ones(4, bool), "weights": np.array([1, 1, 1, 0], np.float32)}
    fn = built_in_loss(make_objective(schema.Mse()), no_sums, False)
    total, grad = jax.value_and_grad(lambda bias: fn(lambda x: x + bias, batch)[0])(jnp.float32(0.0))
    assert (float(total), float(grad)) == (5.0, 6.0)


def test_the_mask_is_given_to_models_that_take_it() -> None:
    batch = {"inputs": np.ones((3, 2), np.float32), "mask": np.array([True, False, True])}

    def model(inputs: jax.Array, mask: Any = None) -> jax.Array:
        return inputs * (1.0 if mask is None else jnp.asarray(mask)[:, None])

    assert call_model(model, batch, takes_mask=True).tolist() == [[1, 1], [0, 0], [1, 1]]
    assert call_model(model, batch, takes_mask=False).tolist() == [[1, 1]] * 3


def test_outputs_are_fp32_whatever_the_model_computes_in() -> None:
    batch = {"inputs": jnp.ones((3, 2), jnp.bfloat16), "mask": np.ones(3, bool)}
    assert call_model(identity, batch, takes_mask=False).dtype == jnp.float32


def test_training_sums_come_from_the_aligned_outputs() -> None:
    batch = {"inputs": np.ones((4, 1), np.float32), "targets": np.zeros(4, np.float32), "mask": np.ones(4, bool)}

    def sums(outputs: Any, targets: Any, mask: Any) -> dict[str, Any]:
        return {"elements": jnp.sum(jnp.abs(outputs - targets))}  # 16, were outputs still [4, 1]

    total, divisor, extra = built_in_loss(make_objective(schema.Mse()), sums, False)(identity, batch)
    assert (float(total), float(divisor), float(extra["elements"])) == (4.0, 4.0, 4.0)


# ---------------------------------------------------------------- shapes


def test_a_single_output_column_is_dropped_where_targets_have_none() -> None:
    column = jnp.ones((6, 1))
    assert align(column, jnp.ones(6), "regression").shape == (6,)
    assert align(column, jnp.ones(6), "binary").shape == (6,)
    assert align(column, jnp.ones((6, 1)), "regression").shape == (6, 1)
    assert align(column, jnp.ones(6, jnp.int32), "classes").shape == (6, 1)


@pytest.mark.parametrize(
    ("outputs", "targets", "task"),
    [
        ((6, 2), (6,), "regression"),
        ((6,), (6, 1), "regression"),
        ((6, 3), (6, 2), "binary"),
        ((6,), (6,), "classes"),
        ((6, 5, 3), (6,), "classes"),
    ],
)
def test_shapes_that_do_not_belong_together_are_refused_with_both_shapes(
    outputs: tuple[int, ...], targets: tuple[int, ...], task: str
) -> None:
    with pytest.raises(ValueError) as error:
        align(jnp.zeros(outputs), jnp.zeros(targets), task)
    assert str(outputs) in str(error.value)
    assert str(targets) in str(error.value)
    assert task in str(error.value)


# ---------------------------------------------------------------- the user's own loss


def masked_batch() -> dict[str, Any]:
    return {**make_batch(8), "mask": np.array([True] * 5 + [False] * 3)}


def test_a_users_scalar_counts_as_a_mean_over_the_real_rows() -> None:
    total, count, sums = user_loss(lambda model, batch: jnp.float32(0.25))(identity, masked_batch())
    assert (float(total), float(count), sums) == (1.25, 5.0, {})


def test_a_users_sum_count_and_metrics_are_taken_as_they_are() -> None:
    def loss(model: Any, batch: Any) -> Any:
        return jnp.float32(6.0), 4, {"hits": jnp.int32(3)}

    total, count, sums = user_loss(loss)(identity, masked_batch())
    assert (float(total), float(count), float(sums["hits"])) == (6.0, 4.0, 3.0)
    assert {x.dtype for x in (total, count, sums["hits"])} == {jnp.dtype("float32")}


@pytest.mark.parametrize("result", [(1.0, 2), (1.0, 2, {}, 3)])
def test_a_users_tuple_of_another_length_is_refused(result: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match=rf"{len(result)} values; allowed: a scalar or \(sum, count, metrics\)"):
        user_loss(lambda model, batch: result)(identity, masked_batch())


@pytest.mark.parametrize("tuple_form", [False, True])
def test_a_users_loss_that_is_no_scalar_is_refused_with_its_shape(tuple_form: bool) -> None:
    each = jnp.ones(8)
    result = (each, 8, {}) if tuple_form else each
    with pytest.raises(ValueError, match=r"shape \(8,\); a scalar is needed"):
        user_loss(lambda model, batch: result)(identity, masked_batch())
