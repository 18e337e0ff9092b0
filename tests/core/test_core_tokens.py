"""Language models: figures and losses of tokens, under masks [B] and [B, T], and the step with a tiny transformer."""

from __future__ import annotations

import functools
import math
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from core_helpers import make_spec, start, step_of

from jaxtrain.config import schema
from jaxtrain.core.metrics import METRICS, TokenMetrics, best_is, merge
from jaxtrain.core.objectives import built_in_loss, make_objective, over_elements, row_weights
from jaxtrain.core.step import make_eval_step
from jaxtrain.models.gpt import Gpt

VOCABULARY, BLOCK = 7, 6
METRIC = TokenMetrics()
UPDATE = jax.jit(METRIC.update)
CROSS_ENTROPY = make_objective(schema.CrossEntropy())


def log_p(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    return wide - np.log(np.exp(wide).sum(-1, keepdims=True))


def own(logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Negative log-likelihood of each token, float64, [B, T]."""
    return -np.take_along_axis(log_p(logits), targets[..., None], -1)[..., 0]


def text(rows: int, seed: int = 0, vocabulary: int = VOCABULARY) -> tuple[np.ndarray, np.ndarray]:
    """Logits [B, T, V] and targets [B, T], half of which the logits have right."""
    rng = np.random.default_rng(seed)
    logits = (2 * rng.normal(size=(rows, BLOCK, vocabulary))).astype(np.float32)
    drawn = rng.integers(0, vocabulary, (rows, BLOCK))
    return logits, np.where(rng.random((rows, BLOCK)) < 0.5, logits.argmax(-1), drawn).astype(np.int32)


def figures(*batches: tuple[np.ndarray, np.ndarray, np.ndarray]) -> dict[str, float]:
    """Through jit, merged on the host as an evaluation does."""
    total = None
    for batch in batches:
        total = merge(total, UPDATE(*batch))
    assert total is not None
    found, details = METRIC.finalise(total)
    assert details == {}
    return found


def padded(targets: np.ndarray, real: int) -> np.ndarray:
    """[B, T]: the first `real` tokens of all the rows, as the last windows of a text have them."""
    return (np.arange(targets.size) < real).reshape(targets.shape)


# ---------------------------------------------------------------- figures


def test_uneven_batches_of_tokens_give_the_figures_of_all_tokens() -> None:
    batches = []
    for seed, (rows, real) in enumerate(((4, 24), (4, 24), (4, 15), (1, 1))):
        logits, targets = text(rows, seed)
        batches.append((logits, targets, padded(targets, real)))
    nll = np.concatenate([own(logits, targets)[mask] for logits, targets, mask in batches])
    right = np.concatenate([(logits.argmax(-1) == targets)[mask] for logits, targets, mask in batches])
    assert len(nll) == 64
    found = figures(*batches)
    assert found.keys() == set(METRIC.names) == {"perplexity", "accuracy"}
    assert found["perplexity"] == pytest.approx(math.exp(nll.mean()), rel=1e-6)
    assert found["accuracy"] == right.mean()
    # The controls: a mean of the batches' figures, and of their perplexities.
    each = [figures(batch) for batch in batches]
    assert np.mean([e["accuracy"] for e in each]) != pytest.approx(found["accuracy"], rel=1e-3)
    assert np.mean([e["perplexity"] for e in each]) != pytest.approx(found["perplexity"], rel=1e-2)


def test_perplexity_is_that_of_a_fair_die_when_nothing_is_known() -> None:
    targets = np.arange(12, dtype=np.int32).reshape(2, 6) % VOCABULARY
    even = np.zeros((2, BLOCK, VOCABULARY), np.float32)
    everything = np.ones((2, BLOCK), bool)
    assert figures((even, targets, everything))["perplexity"] == pytest.approx(VOCABULARY, rel=1e-6)
    sure = 50 * np.eye(VOCABULARY, dtype=np.float32)[targets]
    assert figures((sure, targets, everything)) == {"perplexity": 1.0, "accuracy": 1.0}


def test_a_mask_of_rows_is_one_of_all_their_tokens() -> None:
    logits, targets = text(4)
    rows = np.array([True, False, True, False])
    spread = np.broadcast_to(rows[:, None], (4, BLOCK)).copy()
    by_row, by_token = (UPDATE(logits, targets, m) for m in (rows, spread))
    assert {n: float(v) for n, v in by_row.items()} == {n: float(v) for n, v in by_token.items()}
    assert int(by_row["tokens"]) == 12
    assert float(by_row["nll"]) == pytest.approx(own(logits, targets)[rows].sum(), rel=1e-5)
    assert float(by_row["nll"]) != pytest.approx(own(logits, targets).sum(), rel=1e-2)  # the control
    sums = [METRIC.train_sums(logits, targets, m) for m in (rows, spread)]
    right = int((logits.argmax(-1) == targets)[rows].sum())
    assert [(float(s["accuracy"]), float(s["count"])) for s in sums] == [(right, 12.0)] * 2


def test_what_fills_up_the_last_window_does_not_count() -> None:
    logits, targets = text(3)
    mask = padded(targets, 14)
    found = figures((logits, targets, mask))
    other, strange = logits.copy(), targets.copy()
    other[~mask], strange[~mask] = np.nan, -1
    assert figures((other, strange, mask)) == found
    op_by_op, _ = METRIC.finalise(merge(None, METRIC.update(other, strange, mask)))  # XLA makes NaN * 0 a select
    assert op_by_op == pytest.approx(found, rel=1e-6)
    sums = METRIC.train_sums(other, strange, mask)
    assert float(sums["accuracy"]) == pytest.approx(14 * found["accuracy"], rel=1e-6)
    other[~mask] = 0.0
    assert figures((other, targets, np.ones_like(mask))) != found  # the control


def test_counts_of_many_batches_are_integers_and_their_likelihoods_float64() -> None:
    logits, targets = text(2)
    state = UPDATE(logits, targets, np.ones(2, bool))
    total = merge(merge(None, state), state)
    assert {name: value.dtype for name, value in total.items()} == {
        "nll": np.float64,
        "right": np.int64,
        "tokens": np.int64,
    }
    assert int(total["tokens"]) == 24


def test_a_hopeless_model_has_an_infinite_perplexity_and_no_warning() -> None:
    logits = np.zeros((1, BLOCK, VOCABULARY), np.float32)
    logits[..., 1] = 2000.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = figures((logits, np.zeros((1, BLOCK), np.int32), np.ones((1, BLOCK), bool)))
    assert found == {"perplexity": math.inf, "accuracy": 0.0}


def test_no_token_at_all_divides_by_nothing() -> None:
    logits, targets = text(2)
    assert figures((logits, targets, np.zeros(2, bool)))["accuracy"] == 0.0


def test_a_low_perplexity_and_a_high_accuracy_are_better() -> None:
    assert (best_is("perplexity"), best_is("accuracy")) == ("min", "max")
    assert METRICS["tokens"](65, 5) == METRIC


# ---------------------------------------------------------------- the loss


def no_model(inputs: Any) -> Any:
    return inputs


def loss_of(batch: dict[str, Any], objective: Any = CROSS_ENTROPY) -> tuple[float, float, dict[str, Any]]:
    total, weight, sums = built_in_loss(objective, METRIC.train_sums, False)(no_model, batch)
    return float(total), float(weight), {name: float(value) for name, value in sums.items()}


def test_a_mask_of_tokens_and_weights_of_rows_give_the_weighted_sum_over_real_tokens() -> None:
    logits, targets = text(3)
    mask, weights = padded(targets, 14), np.array([0.5, 2.0, 3.0], np.float32)
    batch = {"inputs": logits, "targets": targets, "mask": mask, "weights": weights}
    w = mask * weights[:, None]
    np.testing.assert_array_equal(row_weights(batch), w)
    assert w.sum() == 6 * 0.5 + 6 * 2.0 + 2 * 3.0
    nll = own(logits, targets)
    total, weight, sums = loss_of(batch)
    assert total == pytest.approx((w * nll).sum(), rel=1e-5)
    assert weight == 21.0
    assert sums == {"accuracy": float((logits.argmax(-1) == targets)[mask].sum()), "count": 14.0}
    # The controls: without weights, without the mask, weights along the tokens.
    for other in (mask, np.broadcast_to(weights[:, None], mask.shape), mask * np.resize(weights, BLOCK)):
        assert total / weight != pytest.approx((other * nll).sum() / other.sum(), rel=1e-3)


def test_weights_of_classes_count_for_each_token() -> None:
    logits, targets = text(3)
    table = tuple(np.linspace(0.5, 3.5, VOCABULARY))
    mask, weights = padded(targets, 14), np.array([0.5, 2.0, 3.0], np.float32)
    batch = {"inputs": logits, "targets": targets, "mask": mask, "weights": weights}
    total, weight, _ = loss_of(batch, make_objective(schema.CrossEntropy(), table))
    w = mask * weights[:, None] * np.array(table)[targets]
    assert total == pytest.approx((w * own(logits, targets)).sum(), rel=1e-5)
    assert weight == pytest.approx(w.sum(), rel=1e-6)
    assert weight != pytest.approx(loss_of(batch)[1], rel=1e-2)  # the control


def test_label_smoothing_is_over_the_vocabulary() -> None:
    logits, targets = text(3)
    mask = padded(targets, 14)
    batch = {"inputs": logits, "targets": targets, "mask": mask}
    total, weight, _ = loss_of(batch, make_objective(schema.CrossEntropy(label_smoothing=0.1)))
    wanted = 0.9 * np.eye(VOCABULARY)[targets] + 0.1 / VOCABULARY
    assert total == pytest.approx(-(wanted * log_p(logits)).sum(-1)[mask].sum(), rel=1e-5)
    assert weight == 14.0
    assert total != pytest.approx(loss_of(batch)[0], rel=1e-2)  # the control


@pytest.mark.parametrize("where", ["outputs", "targets"])
def test_nothing_under_the_mask_of_tokens_reaches_loss_or_gradient(where: str) -> None:
    logits, targets = text(3)
    mask = padded(targets, 14)
    spoilt, strange = logits.copy(), targets.copy()
    if where == "outputs":
        spoilt[~mask] = np.nan
    else:
        strange[~mask] = -100

    def of(outputs: np.ndarray, targets: np.ndarray, mask: np.ndarray) -> tuple[float, np.ndarray]:
        batch = {"inputs": outputs, "targets": targets, "mask": mask}
        loss = built_in_loss(CROSS_ENTROPY, METRIC.train_sums, False)
        call = jax.jit(jax.value_and_grad(lambda bias: loss(lambda x: x + bias, batch)[0]))
        total, slope = call(jnp.zeros(VOCABULARY))
        return float(total), np.asarray(slope)

    total, slope = of(spoilt, strange, mask)
    assert total == pytest.approx(own(logits, targets)[mask].sum(), rel=1e-5)
    expected = (np.exp(log_p(logits)) - np.eye(VOCABULARY)[targets])[mask].sum(0)
    np.testing.assert_allclose(slope, expected, rtol=1e-4, atol=1e-5)
    total, slope = of(spoilt, strange, np.ones_like(mask))  # the control
    assert np.isnan(slope).all() if where == "outputs" else not np.allclose(slope, expected, atol=0.1)


def test_a_value_for_each_token_is_spread_over_what_is_behind_it() -> None:
    mask = padded(np.zeros((2, 3)), 4)
    spread = over_elements(jnp.asarray(mask), jnp.zeros((2, 3, 4)))
    assert spread.shape == (2, 3, 4)
    np.testing.assert_array_equal(spread, np.repeat(mask[..., None], 4, -1))
    by_row = over_elements(jnp.asarray(mask[:, 0]), jnp.zeros((2, 3, 4)))
    np.testing.assert_array_equal(by_row, np.broadcast_to(mask[:, :1, None], (2, 3, 4)))


# ---------------------------------------------------------------- the step with a tiny transformer


def tiny(rngs: Any, **changes: Any) -> Gpt:
    config = schema.Gpt(**({"layers": 1, "heads": 2, "width": 8, "init_sd": 0.3} | changes))
    return Gpt(config, (BLOCK,), VOCABULARY, rngs=rngs)


def token_spec(**changes: Any) -> Any:
    loss = built_in_loss(CROSS_ENTROPY, METRIC.train_sums, False)
    return make_spec(tiny, **({"loss": loss, "preprocess": lambda x: x.astype(jnp.int32)} | changes))


def token_batch(real: int = 8 * BLOCK) -> dict[str, Any]:
    """8 rows of which the first `real` tokens count."""
    rng = np.random.default_rng(3)
    window = rng.integers(0, VOCABULARY, (8, BLOCK + 1)).astype(np.uint8)
    return {
        "inputs": window[:, :-1],
        "targets": window[:, 1:].astype(np.int32),
        "mask": padded(window[:, 1:], real),
        "ids": np.arange(8, dtype=np.int32),
        "epoch": np.int32(0),
    }


def distance(left: Any, right: Any) -> float:
    pairs = zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
    return max(float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in pairs)


@pytest.fixture(scope="module")
def token_forms() -> Any:
    """One update by 8 rows at once, by 4 times 2 in a loop, and by 2 times 4 written out."""
    specs = {
        "whole": token_spec(),
        "scanned": token_spec(micro_batches=4),
        "unrolled": token_spec(micro_batches=2, unroll=True),
    }
    return start(specs["whole"]), {name: step_of(spec) for name, spec in specs.items()}


@functools.cache
def forward() -> Any:
    """(params, tokens) -> logits of the tiny transformer."""
    module = token_spec().module
    call = jax.jit(lambda p, x: module.bind(p, {}, None)(x.astype(jnp.int32)))
    return lambda params, x: np.asarray(call(params, x))


@pytest.mark.parametrize("real", [48, 29, 5])
@pytest.mark.parametrize("form", ["scanned", "unrolled"])
def test_accumulated_gradient_of_tokens_equals_full_batch(token_forms: Any, form: str, real: int) -> None:
    """29 tokens are 4 whole rows and 5 of a fifth; 5 leave all micro-batches but the first without any."""
    state, steps = token_forms
    batch = token_batch(real) | {"weights": np.linspace(0.5, 2.0, 8).astype(np.float32)}
    (whole, figures_), (parts, others) = steps["whole"](state, batch), steps[form](state, batch)
    assert distance(parts["params"], whole["params"]) < 2e-6
    assert distance(whole["params"], state["params"]) > 0.01  # it moved
    for name in ("loss", "grad_norm"):
        assert float(others[name]) == pytest.approx(float(figures_[name]), rel=1e-5)
    weight = (batch["mask"] * batch["weights"][:, None]).sum()
    assert float(others["window/weight"]) == pytest.approx(weight, rel=1e-6)
    if real == 29:  # the control: tokens that should not count
        wrong, _ = steps[form](state, batch | {"mask": np.ones((8, BLOCK), bool)})
        assert distance(wrong["params"], whole["params"]) > 1e-3


def test_the_loss_of_a_step_is_the_mean_over_real_tokens(token_forms: Any) -> None:
    state, steps = token_forms
    batch = token_batch(29)
    _, metrics = steps["scanned"](state, batch)
    logits = forward()(state["params"], batch["inputs"])
    nll = own(logits, batch["targets"])
    assert float(metrics["loss"]) == pytest.approx(nll[batch["mask"]].mean(), rel=1e-5)
    assert float(metrics["loss"]) != pytest.approx(nll.mean(), rel=1e-3)  # the control
    right = (logits.argmax(-1) == batch["targets"])[batch["mask"]].sum()
    assert float(metrics["window/accuracy"]) == right
    assert float(metrics["window/count"]) == 29.0


def test_tokens_that_do_not_count_have_no_part_in_the_update(token_forms: Any) -> None:
    state, steps = token_forms
    batch = token_batch(29)
    other = batch["targets"].copy()
    other[~batch["mask"]] = (other[~batch["mask"]] + 1) % VOCABULARY

    def moved(mask: np.ndarray) -> float:
        one, two = (steps["whole"](state, batch | {"targets": t, "mask": mask})[0] for t in (batch["targets"], other))
        return distance(one["params"], two["params"])

    assert moved(batch["mask"]) == 0.0
    assert moved(np.ones((8, BLOCK), bool)) > 1e-3  # the control


def test_evaluation_counts_tokens_and_its_loss_is_the_log_of_its_perplexity() -> None:
    spec = token_spec()
    state = start(spec)
    evaluate = jax.jit(make_eval_step(spec, CROSS_ENTROPY, METRIC))
    total, nll = None, []
    for real in (48, 29):
        batch = token_batch(real)
        total = merge(total, evaluate(state["params"], {}, batch))
        logits = forward()(state["params"], batch["inputs"])
        nll.append(own(logits, batch["targets"])[batch["mask"]])
    assert total is not None
    every = np.concatenate(nll)
    assert (int(total["loss_count"]), int(total["tokens"]), len(every)) == (77, 77, 77)
    assert float(total["loss_sum"]) == pytest.approx(every.sum(), rel=1e-5)
    found, _ = METRIC.finalise(total)
    assert found["perplexity"] == pytest.approx(math.exp(total["loss_sum"] / total["loss_count"]), rel=1e-6)
    assert np.mean([part.mean() for part in nll]) != pytest.approx(every.mean(), rel=1e-4)  # the control
