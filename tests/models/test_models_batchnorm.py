"""BatchNorm over real rows: what is padded is not seen."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from models_helpers import SMALL, allowed, arrays_by_formula, formula, mlp, module_of, run_eval, run_train

from jaxtrain.build import build
from jaxtrain.config import load
from jaxtrain.core.module import ModuleDef
from jaxtrain.data.sources import ArraySource
from jaxtrain.models.layers import BatchNorm

MASK = np.array([True, False, True, True, False])
SHAPES = [(5, 3), (5, 4, 4, 3)]


def norm() -> tuple[ModuleDef, dict[str, Any], dict[str, Any]]:
    module = ModuleDef(lambda rngs: BatchNorm(3, rngs=rngs))
    return module, *arrays_by_formula(module)


def rows(shape: tuple[int, ...]) -> np.ndarray:
    return formula(shape, 0.7, 2.0) + np.float32(1.5)


@pytest.mark.parametrize("shape", SHAPES)
def test_without_a_mask_it_is_the_batch_norm_of_flax(shape: tuple[int, ...]) -> None:
    module, params, state = norm()
    theirs = nnx.BatchNorm(3, momentum=0.9, epsilon=1e-5, use_fast_variance=False, rngs=nnx.Rngs(0))
    theirs.scale[...], theirs.bias[...] = params["scale"], params["bias"]
    theirs.mean[...], theirs.var[...] = state["mean"], state["var"]
    expected = theirs(rows(shape))
    y, after = run_train(module, params, state, rows(shape))
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(after["mean"], theirs.mean[...], rtol=1e-6)
    np.testing.assert_allclose(after["var"], theirs.var[...], rtol=1e-6)
    theirs.eval()
    evaluated = run_eval(module, params, after, rows(shape))
    np.testing.assert_allclose(evaluated, theirs(rows(shape)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("garbage", [0.0, 1e6, np.nan, np.inf])
@pytest.mark.parametrize("shape", SHAPES)
def test_padded_garbage_moves_no_real_row_and_no_statistic(shape: tuple[int, ...], garbage: float) -> None:
    module, params, state = norm()
    x = rows(shape)
    alone, after_alone = run_train(module, params, state, x[MASK])
    spoilt = x.copy()
    spoilt[~MASK] = garbage
    y, after = run_train(module, params, state, spoilt, MASK)
    np.testing.assert_allclose(y[MASK], alone, rtol=1e-6, atol=1e-6)
    for name in ("mean", "var"):
        np.testing.assert_allclose(after[name], after_alone[name], rtol=1e-6)
    unmasked, _ = run_train(module, params, state, spoilt)
    assert not np.allclose(unmasked[MASK], alone, atol=1e-3)  # the control: without a mask the garbage shows


@pytest.mark.parametrize("shape", SHAPES)
def test_statistics_move_by_a_tenth_towards_those_of_the_real_rows(shape: tuple[int, ...]) -> None:
    module, params, state = norm()
    x, axes = rows(shape)[MASK].astype(np.float64), tuple(range(len(shape) - 1))
    _, after = run_train(module, params, state, rows(shape), MASK)
    np.testing.assert_allclose(after["mean"], 0.9 * state["mean"] + 0.1 * x.mean(axes), rtol=1e-5)
    np.testing.assert_allclose(after["var"], 0.9 * state["var"] + 0.1 * x.var(axes), rtol=1e-5)


@pytest.mark.parametrize("fill", [1.0, np.nan])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_call_without_a_real_row_leaves_the_statistics_alone(shape: tuple[int, ...], fill: float) -> None:
    module, params, state = norm()
    x = np.full(shape, fill, np.float32) if np.isnan(fill) else rows(shape)
    y, after = run_train(module, params, state, x, np.zeros(5, bool))
    assert {n: v.tobytes() for n, v in after.items()} == {n: v.tobytes() for n, v in state.items()}
    if not np.isnan(fill):
        np.testing.assert_allclose(y, run_eval(module, params, state, x), rtol=1e-6)  # by the running statistics
    one = np.arange(5) == 0
    _, moved = run_train(module, params, state, rows(shape), one)
    assert moved["mean"].tobytes() != state["mean"].tobytes()  # the control


def test_variance_keeps_its_digits_far_from_zero() -> None:
    """E[x^2] - E[x]^2 in fp32 at 10,000 +- 0.1 is off by more than the variance itself."""
    module, params, state = norm()
    x = np.float32(10_000) + np.float32(0.125) * np.array([[1, -1, 1]] * 4 + [[-1, 1, -1]] * 4, np.float32)
    _, after = run_train(module, params, state, x)
    np.testing.assert_allclose(after["var"], 0.9 * state["var"] + 0.1 * 0.125**2, rtol=1e-4)
    fast = np.square(x).mean(0) - np.square(x.mean(0))
    assert not np.allclose(fast, 0.125**2, rtol=0.5)  # the control


def test_statistics_are_fp32_and_outputs_of_the_type_of_the_inputs() -> None:
    module, params, state = norm()
    y, after = run_train(module, params, state, jnp.asarray(rows((5, 3)), jnp.bfloat16), MASK)
    assert y.dtype == jnp.bfloat16
    assert after["mean"].dtype == after["var"].dtype == np.float32


def test_evaluation_uses_the_running_statistics_and_leaves_them_alone() -> None:
    module, params, state = norm()
    x = rows((5, 3))
    expected = (x - state["mean"]) / np.sqrt(state["var"] + 1e-5) * params["scale"] + params["bias"]
    np.testing.assert_allclose(run_eval(module, params, state, x), expected, rtol=1e-5, atol=1e-6)
    trained, _ = run_train(module, params, state, x)
    assert not np.allclose(trained, expected, atol=1e-2)  # the control


def test_no_gradient_flows_through_the_running_statistics() -> None:
    module, params, state = norm()

    def after(x: Any) -> Any:
        model = module.bind(params, state, jax.random.key(0))
        model(x)
        return jnp.sum(model.mean[...]) + jnp.sum(model.var[...])

    assert (np.asarray(jax.grad(after)(jnp.asarray(rows((5, 3))))) == 0).all()


def test_the_mask_reaches_every_norm_of_a_model() -> None:
    module = module_of(mlp(norm="batch", hidden=(6, 5)), shape=(4,))
    params, state = arrays_by_formula(module)
    x = formula((5, 4), 0.2, 1.0)
    spoilt = x.copy()
    spoilt[~MASK] = np.nan
    alone, after_alone = run_train(module, params, state, x[MASK])
    y, after = run_train(module, params, state, spoilt, MASK)
    np.testing.assert_allclose(y[MASK], alone, rtol=1e-5, atol=1e-5)
    assert after.keys() == {f"norms.{i}.{s}" for i in (0, 1) for s in ("mean", "var")}
    for name, value in after.items():
        np.testing.assert_allclose(value, after_alone[name], rtol=1e-5, atol=1e-6)


def source(n: int) -> ArraySource:
    inputs = formula((n, 4), 0.4, 1.0)
    targets = (inputs[:, 0] > inputs[:, 1]).astype(np.int64)
    return ArraySource("made", inputs, targets, split=np.zeros(n, np.int8))


def test_fault_loop_small_dataset_65_rows_batch_64_with_batch_norm_stay_finite() -> None:
    """The last batch is 1 real row, dealt to 4 micro-batches of which 3 are all padding."""
    config = load(
        {
            "model": {"kind": "mlp", "hidden": [8], "norm": "batch"},
            "train": {"duration": 6, "global_batch_size": 64, "micro_batch_size": 16},
            "log": {"every": 1},
        }
    )
    job = build(config, source=source(65))
    state, feeder = job.init(), job.feeder()
    counts, stats = [], []
    for position in range(6):
        state, metrics = job.advance(state, feeder(position))
        counts.append(float(metrics["window/count"]))
        stats.append(np.asarray(state["model_state"]["norms.0.var"]))
        assert np.isfinite(float(metrics["loss"]))
        assert np.isfinite(float(metrics["grad_norm"]))
    assert counts == [64, 1, 64, 1, 64, 1]
    assert int(state["updates"]) == 6
    assert int(state["guard"]["skipped"]) == 0
    assert all(np.isfinite(np.asarray(leaf)).all() for leaf in jax.tree.leaves(state))
    # One micro-batch of one row (variance 0) moved the statistics once; the three empty ones did not.
    np.testing.assert_allclose(stats[1], 0.9 * stats[0], rtol=1e-5)


def test_every_kind_that_can_have_a_batch_norm_takes_a_mask() -> None:
    for kind, make in SMALL.items():
        assert module_of(make()).takes_mask is ("batch" in allowed(kind, "norm")), kind
    assert {kind for kind in SMALL if "batch" not in allowed(kind, "norm")} == {"gpt"}
