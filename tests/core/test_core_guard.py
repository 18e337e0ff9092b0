"""A non-finite update changes nothing but the counters, and training goes on."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from core_helpers import Normed, assert_bit_equal, bit_equal, make_batch, make_spec, spoil, start, step_of

from jaxtrain.config import schema
from jaxtrain.core import guard
from jaxtrain.core.objectives import user_loss
from jaxtrain.core.optimizer import make_optimizer

KEPT = ("params", "opt_state", "model_state", "ema", "updates", "lr_scale", "data_offset", "loss_scale")


# ---------------------------------------------------------------- the rules


@pytest.mark.parametrize(
    ("loss", "norm", "expected"),
    [(1.0, 2.0, True), (np.nan, 2.0, False), (1.0, np.nan, False), (np.inf, 2.0, False), (1.0, np.inf, False)],
)
def test_an_update_is_finite_when_loss_and_norm_are(loss: float, norm: float, expected: bool) -> None:
    assert bool(guard.is_finite(jnp.float32(loss), jnp.float32(norm))) is expected


def test_keeping_takes_all_of_the_old_or_all_of_the_new() -> None:
    old = {"a": jnp.array([1.0, 2.0]), "n": jnp.int32(3), "h": jnp.ones(1, jnp.bfloat16)}
    new = {"a": jnp.array([np.nan, 5.0]), "n": jnp.int32(4), "h": jnp.zeros(1, jnp.bfloat16)}
    assert_bit_equal(guard.keep(jnp.bool_(False), new, old), old)
    assert_bit_equal(guard.keep(jnp.bool_(True), new, old), new)
    # Control: a product with 0 keeps the NaN.
    assert np.isnan(np.asarray(0.0 * new["a"] + 1.0 * old["a"])).any()


@pytest.mark.parametrize(
    ("finite", "real", "expected"),
    [
        (True, True, {"skipped": 5, "in_row": 0}),
        (False, True, {"skipped": 6, "in_row": 3}),
        (False, False, {"skipped": 5, "in_row": 2}),  # an fp16 overflow: neither a skip nor the end of a row of skips
    ],
)
def test_counters_count_real_skips(finite: bool, real: bool, expected: dict[str, int]) -> None:
    before = {"skipped": jnp.int32(5), "in_row": jnp.int32(2)}
    after = guard.count(before, jnp.bool_(finite), jnp.bool_(real))
    assert {name: int(x) for name, x in after.items()} == expected
    assert {x.dtype for x in after.values()} == {jnp.dtype("int32")}


# ---------------------------------------------------------------- through the step


def normed(**changes: Any) -> Any:
    """All that a step can change: statistics, moments, averages."""
    return make_spec(Normed, optimizer=make_optimizer(schema.Adamw()), ema_decay=0.5, **changes)


def test_a_branch_takes_all_of_the_old_or_all_of_the_new() -> None:
    old = {"a": jnp.array([1.0, 2.0]), "n": jnp.int32(3)}
    new = {"a": jnp.array([np.nan, 5.0]), "n": jnp.int32(4)}
    for finite, wanted in ((False, old), (True, new)):
        given = jax.jit(lambda finite: guard.apply(finite, lambda old: new, old, branch=True))(jnp.bool_(finite))
        assert_bit_equal(given, wanted)


@pytest.fixture(
    scope="module",
    params=[{}, {"micro_batches": 4}, {"branch": True}, {"branch": True, "micro_batches": 4}],
    ids=["whole", "accumulated", "branch", "branch-accumulated"],
)
def trained(request: Any) -> Any:
    """(step, state after two good updates)."""
    spec = normed(**request.param)
    step, state = step_of(spec), start(spec)
    for seed in (1, 2):
        state, _ = step(state, make_batch(seed=seed))
    return step, state


def bad(kind: str) -> dict[str, Any]:
    batch = spoil(make_batch(seed=3))
    if kind == "infinity":
        batch["inputs"] = np.where(np.isnan(batch["inputs"]), np.inf, batch["inputs"])
    return batch


@pytest.mark.parametrize("kind", ["nan", "infinity"])
def test_a_bad_batch_leaves_everything_bit_equal_and_is_counted(trained: Any, kind: str) -> None:
    step, before = trained
    after, metrics = step(before, bad(kind))
    assert_bit_equal({k: after[k] for k in KEPT}, {k: before[k] for k in KEPT})
    assert (int(after["step"]), int(after["updates"])) == (3, 2)
    assert (int(after["guard"]["skipped"]), int(after["guard"]["in_row"]), int(metrics["in_row"])) == (1, 1, 1)
    assert not np.isfinite(float(metrics["loss"]))  # the metrics do not hide it
    # Control: a good batch changes each part.
    good, _ = step(before, make_batch(seed=3))
    for part in ("params", "opt_state", "model_state", "ema", "updates"):
        assert not bit_equal(good[part], before[part]), part


def test_training_goes_on_with_the_next_batch_as_if_the_bad_one_had_not_been(trained: Any) -> None:
    step, before = trained
    skipped, _ = step(before, bad("nan"))
    skipped, _ = step(skipped, bad("nan"))
    assert int(skipped["guard"]["in_row"]) == 2
    after, _ = step(skipped, make_batch(seed=4))
    direct, _ = step(before, make_batch(seed=4))
    assert_bit_equal({k: after[k] for k in KEPT}, {k: direct[k] for k in KEPT})
    assert (int(after["step"]), int(after["updates"])) == (5, 3)
    assert {name: int(x) for name, x in after["guard"].items()} == {"skipped": 2, "in_row": 0}


def test_without_the_guard_a_bad_batch_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "keep", lambda finite, new, old: new)
    spec = normed()
    step, state = step_of(spec), start(spec)
    state, _ = step(state, bad("nan"))
    state, metrics = step(state, make_batch(seed=4))
    assert np.isnan(float(metrics["loss"]))
    for part in ("params", "opt_state", "model_state", "ema"):
        leaves = [x for x in jax.tree.leaves(state[part]) if jnp.issubdtype(x.dtype, jnp.floating)]
        assert any(np.isnan(np.asarray(x)).any() for x in leaves), part


def test_a_gradient_that_is_nan_under_a_finite_loss_is_skipped() -> None:
    def loss(model: Any, batch: Any) -> Any:
        return jnp.sqrt(jnp.sum(jnp.square(model(batch["inputs"]) * 0.0)))  # the root has no slope at 0

    spec = make_spec(loss=user_loss(loss))
    before = start(spec, sums=())
    after, metrics = step_of(spec)(before, make_batch())
    assert float(metrics["loss"]) == 0.0
    assert np.isnan(float(metrics["grad_norm"]))
    assert_bit_equal(after["params"], before["params"])
    assert int(after["guard"]["skipped"]) == 1
