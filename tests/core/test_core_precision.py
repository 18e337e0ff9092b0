"""bf16 and fp16: what is cast, what stays fp32, and how the fp16 loss scale is found."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from core_helpers import Affine, assert_bit_equal, make_batch, make_spec, spoil, start, step_of

from jaxtrain.config import schema
from jaxtrain.core.metrics import RegressionMetrics
from jaxtrain.core.objectives import built_in_loss, make_objective
from jaxtrain.core.optimizer import make_optimizer
from jaxtrain.core.precision import GROWTH_INTERVAL, PRECISIONS, cast_floats, next_scale

KEPT = ("params", "opt_state", "model_state", "ema", "updates")


def test_casting_leaves_integers_and_booleans_alone() -> None:
    tree = {"x": jnp.ones(2), "ids": jnp.arange(3), "mask": jnp.ones(2, bool), "half": jnp.ones(1, jnp.bfloat16)}
    cast = cast_floats(tree, jnp.float16)
    assert {name: str(x.dtype) for name, x in cast.items()} == {
        "x": "float16",
        "ids": "int32",
        "mask": "bool",
        "half": "float16",
    }
    # Control: ids above 2048 would not survive a cast to fp16.
    assert int(jnp.int32(2049).astype(jnp.float16)) != 2049


# ---------------------------------------------------------------- the scale as a rule


def scale_after(scale: float, good: int, finite: bool) -> tuple[float, int]:
    value, count = next_scale(jnp.float32(scale), jnp.int32(good), jnp.bool_(finite))
    assert (value.dtype, count.dtype) == (jnp.float32, jnp.int32)
    return float(value), int(count)


def test_the_scale_halves_on_overflow_and_starts_counting_again() -> None:
    assert scale_after(1024.0, 7, finite=False) == (512.0, 0)
    assert scale_after(1024.0, 7, finite=True) == (1024.0, 8)


def test_the_scale_doubles_after_two_thousand_clean_updates() -> None:
    assert GROWTH_INTERVAL == 2000
    assert scale_after(1024.0, 1998, finite=True) == (1024.0, 1999)
    assert scale_after(1024.0, 1999, finite=True) == (2048.0, 0)
    assert scale_after(1024.0, 1999, finite=False) == (512.0, 0)


def test_the_scale_never_falls_below_one() -> None:
    assert scale_after(2.0, 0, finite=False) == (1.0, 0)
    assert scale_after(1.0, 0, finite=False) == (1.0, 0)


def test_the_scale_never_grows_to_infinity() -> None:
    scale, _ = scale_after(2.0**127, 1999, finite=True)
    assert np.isfinite(scale)  # infinity halved is infinity: the run would skip for ever


def test_only_fp16_scales_the_loss() -> None:
    assert {name: p.scales_loss for name, p in PRECISIONS.items()} == {"fp32": False, "bf16": False, "fp16": True}


# ---------------------------------------------------------------- fp16 through the step


@pytest.fixture(scope="module")
def half() -> Any:
    """One weight w, one row x = 1, target -100, mse: the scaled cotangent is 200 * scale, and fp16 ends at 65504."""
    loss = built_in_loss(make_objective(schema.Mse()), RegressionMetrics(1).train_sums, False)
    make = partial(Affine, inputs=1, outputs=1, use_bias=False)
    spec = make_spec(
        make, loss=loss, precision=PRECISIONS["fp16"], ema_decay=0.9, optimizer=make_optimizer(schema.Momentum())
    )
    batch = {
        "inputs": np.ones((1, 1), np.float32),
        "targets": np.full(1, -100.0, np.float32),
        "mask": np.ones(1, bool),
        "ids": np.zeros(1, np.int32),
        "epoch": np.int32(0),
    }
    return spec, step_of(spec), batch


def fresh(spec: Any, **loss_scale: Any) -> Any:
    state = start(spec, sums=("mae",), params={"dense.kernel": np.zeros((1, 1), np.float32)})
    return {**state, "loss_scale": {**state["loss_scale"], **loss_scale}}


def test_overflows_halve_the_scale_until_the_gradient_fits_and_change_nothing_else(half: Any) -> None:
    spec, step, batch = half
    first = state = fresh(spec)
    scales = [float(state["loss_scale"]["scale"])]
    for _ in range(7):  # 200 * 2**9 > 65504 > 200 * 2**8
        state, _ = step(state, batch)
        scales.append(float(state["loss_scale"]["scale"]))
        assert_bit_equal({k: state[k] for k in KEPT}, {k: first[k] for k in KEPT})
    assert scales == [2.0**n for n in range(15, 7, -1)]
    assert (int(state["step"]), int(state["updates"])) == (7, 0)

    state, metrics = step(state, batch)
    assert int(state["updates"]) == 1
    assert float(metrics["grad_norm"]) == pytest.approx(200.0, rel=1e-6)  # unscaled
    assert float(state["params"]["dense.kernel"][0, 0]) == pytest.approx(-20.0, rel=1e-6)
    assert float(metrics["loss_scale"]) == 256.0


def test_overflows_are_no_skips(half: Any) -> None:
    spec, step, batch = half
    state = fresh(spec)
    for _ in range(7):
        state, metrics = step(state, batch)
    assert (int(state["guard"]["skipped"]), int(state["guard"]["in_row"])) == (0, 0)
    assert (float(metrics["window/overflow"]), float(metrics["window/skipped"])) == (7.0, 0.0)


def test_a_non_finite_update_at_the_smallest_scale_is_a_skip(half: Any) -> None:
    spec, step, batch = half
    batch = {**batch, "inputs": np.full((1, 1), np.nan, np.float32)}
    state = fresh(spec, scale=jnp.float32(2.0))
    state, metrics = step(state, batch)
    assert (int(state["guard"]["skipped"]), float(metrics["window/overflow"])) == (0, 1.0)
    assert float(state["loss_scale"]["scale"]) == 1.0
    for n in (1, 2):
        state, metrics = step(state, batch)
        assert (int(state["guard"]["skipped"]), int(state["guard"]["in_row"])) == (n, n)
        assert (float(metrics["window/overflow"]), float(metrics["window/skipped"])) == (1.0, n)
        assert float(state["loss_scale"]["scale"]) == 1.0


def test_the_scale_grows_inside_the_step_and_leaves_the_gradient_as_it_is(half: Any) -> None:
    spec, step, batch = half
    state, metrics = step(fresh(spec, scale=jnp.float32(64.0), good=jnp.int32(1999)), batch)
    assert (float(state["loss_scale"]["scale"]), int(state["loss_scale"]["good"])) == (128.0, 0)
    assert float(metrics["grad_norm"]) == pytest.approx(200.0, rel=1e-6)
    state, _ = step(state, batch)
    assert (float(state["loss_scale"]["scale"]), int(state["loss_scale"]["good"])) == (128.0, 1)


# ---------------------------------------------------------------- what is computed in what


@pytest.fixture(scope="module")
def specs() -> Any:
    adamw = make_optimizer(schema.Adamw())
    return {
        name: make_spec(precision=PRECISIONS[name], optimizer=adamw, schedule=lambda n: 0.01) for name in PRECISIONS
    }


@pytest.mark.parametrize(("name", "token"), [("bf16", "bf16"), ("fp16", "f16")])
def test_the_program_multiplies_in_the_small_type_and_keeps_state_in_fp32(specs: Any, name: str, token: str) -> None:
    spec = specs[name]
    state, step = start(spec), step_of(spec)
    program = step.lower(state, make_batch()).as_text()
    products = [line for line in program.splitlines() if "dot_general" in line]
    assert products
    assert all(f"x{token}>" in line for line in products)
    after, metrics = step(state, make_batch())
    for part in ("params", "opt_state"):
        types = {str(x.dtype) for x in jax.tree.leaves(after[part]) if jnp.issubdtype(x.dtype, jnp.floating)}
        assert types == {"float32"}
    assert metrics["loss"].dtype == metrics["grad_norm"].dtype == jnp.float32


def test_an_fp32_program_contains_no_small_type(specs: Any) -> None:
    spec = specs["fp32"]
    program = step_of(spec).lower(start(spec), make_batch()).as_text()
    assert "bf16" not in program
    assert "xf16>" not in program


def test_small_types_take_nearly_the_same_first_step_as_fp32(specs: Any) -> None:
    batch = make_batch()
    seen = {name: step_of(spec)(start(spec), batch) for name, spec in specs.items()}
    full = float(seen["fp32"][1]["grad_norm"])
    for name, tolerance in (("bf16", 2e-2), ("fp16", 2e-3)):
        assert float(seen[name][1]["grad_norm"]) == pytest.approx(full, rel=tolerance)
        assert float(seen[name][1]["grad_norm"]) != full
    assert "loss_scale" not in seen["bf16"][1]


def test_fp32_has_no_overflow_that_is_not_a_skip(specs: Any) -> None:
    spec = specs["fp32"]
    state, metrics = step_of(spec)(start(spec), spoil(make_batch()))
    assert (float(metrics["window/overflow"]), float(metrics["window/skipped"])) == (0.0, 1.0)
    assert float(state["loss_scale"]["scale"]) == 1.0
