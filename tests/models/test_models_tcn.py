"""The temporal convolutional network: against numpy, how far back it sees, rows and steps, padding, dropout."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models_helpers import (
    arrays_by_formula,
    count,
    formula,
    module_of,
    run_eval,
    run_train,
    sequences,
    tcn,
)
from models_numpy import tcn_in_numpy

from jaxtrain.config import schema
from jaxtrain.core.module import ModuleDef
from jaxtrain.models.tcn import Block

STEP = tcn(output="step")


@functools.cache
def made(config: schema.Tcn) -> tuple[ModuleDef, dict[str, Any], dict[str, Any], Any]:
    """(module for rows [8, 2] with 3 outputs each or for each step, params, model_state, outputs of x)."""
    module = module_of(config, (8, 2), 3 if config.output == "row" else 3 * 8)
    params, state = arrays_by_formula(module)
    forward = jax.jit(lambda p, x: module.bind(p, state, None)(x))
    return module, params, state, lambda x, p=params: np.asarray(forward(p, x))


# ---------------------------------------------------------------- what it computes


@pytest.mark.parametrize(
    "config",
    [
        tcn(norm="none", channels=(2, 5), kernel_size=2),
        tcn(norm="batch", channels=(4, 4, 3)),
        STEP,
        tcn(output="step", norm="none", kernel_size=1),
    ],
    ids=["none", "batch", "step", "one-tap"],
)
def test_it_computes_what_numpy_computes(config: schema.Tcn) -> None:
    _, params, state, forward = made(config)
    x = sequences(2)
    y = forward(x)
    np.testing.assert_allclose(y, tcn_in_numpy(x, params | state, config), rtol=2e-5, atol=2e-5)
    if config.kernel_size > 1:  # the control: other dilations, taps in the other order
        assert not np.allclose(y, tcn_in_numpy(x, params | state, config, growth=3), atol=1e-4)
        assert not np.allclose(y, tcn_in_numpy(x, params | state, config, reverse=True), atol=1e-4)


@pytest.mark.parametrize(
    ("features", "channels", "kernel", "norm"),
    [(2, (4, 6), 3, "layer"), (4, (4, 4, 8), 5, "none"), (1, (3,), 2, "batch"), (8, (8, 8), 2, "group")],
)
def test_number_of_parameters(features: int, channels: tuple[int, ...], kernel: int, norm: str) -> None:
    config = tcn(channels=channels, kernel_size=kernel, norm=norm)
    total, into = channels[-1] * 7 + 7, features
    for out in channels:
        beside = out if norm == "none" else 2 * out  # biases, or scale and bias of the norm
        total += kernel * into * out + beside + kernel * out * out + beside
        total += into * out + out if into != out else 0
        into = out
    module = module_of(config, (20, features), 7)
    assert count(module.params) == total
    changes = [i for i, (a, b) in enumerate(zip((features, *channels), channels, strict=False)) if a != b]
    assert [f"blocks.{i}.project.kernel" in module.params for i in range(len(channels))] == [
        i in changes for i in range(len(channels))
    ]


# ---------------------------------------------------------------- how far back it sees


@pytest.mark.parametrize("norm", ["none", "layer", "batch"])
@pytest.mark.parametrize("place", [0, 3, 7])
def test_a_changed_step_changes_no_output_before_it(norm: str, place: int) -> None:
    """By running statistics; in training a BatchNorm sees the whole batch, later steps too."""
    *_, forward = made(tcn(output="step", norm=norm))
    x = np.asarray(sequences(2)).copy()
    before = forward(x)
    x[:, place] += 0.5
    after = forward(x)
    np.testing.assert_array_equal(after[:, :place], before[:, :place])
    assert (np.abs(after - before).max((0, 2))[place:] > 1e-5).all()  # the control


@pytest.mark.parametrize(
    ("kernel", "blocks", "field"), [(1, 2, 1), (2, 1, 3), (3, 1, 5), (2, 2, 7), (3, 2, 13), (2, 3, 15), (4, 3, 43)]
)
def test_the_last_output_sees_one_plus_2_k_minus_1_times_2_to_the_n_minus_1_steps(
    kernel: int, blocks: int, field: int
) -> None:
    assert field == 1 + 2 * (kernel - 1) * (2**blocks - 1)
    steps = 50
    module = module_of(tcn(channels=(2,) * blocks, kernel_size=kernel, norm="none"), (steps, 2), 1)
    # Positive arrays and inputs: whatever is seen has a slope above zero.
    params = {name: np.abs(formula(p.shape, 0.4, 0.3)) + 0.1 for name, p in module.params.items()}

    def last(x: Any) -> Any:
        return module.bind(params, {}, None)(x)[0, 0]

    slope = np.asarray(jax.jit(jax.grad(last))(jnp.ones((1, steps, 2))))[0].min(-1)
    assert (slope > 0).tolist() == [t >= steps - field for t in range(steps)]
    assert (slope >= 0).all()


# ---------------------------------------------------------------- rows and steps


def test_a_row_gives_its_last_step_and_a_step_its_own() -> None:
    row, step = made(tcn()), made(STEP)
    assert {n: p.shape for n, p in row[0].params.items()} == {n: p.shape for n, p in step[0].params.items()}
    x = sequences(4)
    by_row, by_step = row[3](x), step[3](x)
    assert (by_row.shape, by_step.shape) == ((4, 3), (4, 8, 3))
    np.testing.assert_allclose(by_row, by_step[:, -1], rtol=1e-5, atol=1e-6)
    assert not np.allclose(by_row, by_step[:, 0], atol=1e-3)  # the control
    assert not np.allclose(by_row, by_step.mean(1), atol=1e-3)


@pytest.mark.parametrize(
    ("output", "outputs", "expected"), [("row", 8, (4, 8)), ("step", 8, (4, 8, 1)), ("step", 24, (4, 8, 3))]
)
@pytest.mark.parametrize("shape", [(8,), (8, 2)], ids=["T", "T-C"])
def test_outputs_are_those_of_a_row_or_shared_out_over_its_steps(
    shape: tuple[int, ...], output: str, outputs: int, expected: tuple[int, ...]
) -> None:
    module = module_of(tcn(output=output), shape, outputs)
    x = jax.ShapeDtypeStruct((4, *shape), np.float32)
    assert jax.eval_shape(lambda p, x: module.bind(p, {}, None)(x), module.params, x).shape == expected


def test_a_sequence_of_numbers_is_one_of_a_single_channel() -> None:
    flat, channel = module_of(tcn(), (8,)), module_of(tcn(), (8, 1))
    assert {n: p.shape for n, p in flat.params.items()} == {n: p.shape for n, p in channel.params.items()}
    assert tuple(flat.params["blocks.0.convs.0.kernel"].shape) == (3, 1, 4)
    params, _ = arrays_by_formula(flat)
    x = np.asarray(sequences(2, 8, 1))
    y = run_eval(flat, params, {}, x[..., 0])
    np.testing.assert_array_equal(y, run_eval(channel, params, {}, x))
    assert not np.allclose(y, run_eval(flat, params, {}, x[:, ::-1, 0]), atol=1e-3)  # the control: order counts


# ---------------------------------------------------------------- padding


def test_batch_norm_sees_the_real_rows_alone() -> None:
    module, params, state, _ = made(tcn(norm="batch"))
    mask = np.array([True, False, True, True, False])
    x = np.asarray(sequences(5)).copy()
    alone, after_alone = run_train(module, params, state, x[mask])
    x[~mask] = np.nan
    y, after = run_train(module, params, state, x, mask)
    np.testing.assert_allclose(y[mask], alone, rtol=1e-5, atol=1e-5)
    assert after.keys() == {f"blocks.{b}.norms.{i}.{s}" for b in (0, 1) for i in (0, 1) for s in ("mean", "var")}
    for name, value in after.items():
        np.testing.assert_allclose(value, after_alone[name], rtol=1e-5, atol=1e-6)
        assert not np.array_equal(value, state[name])
    unmasked, _ = run_train(module, params, state, x)
    assert np.isnan(unmasked[mask]).all()  # the control


# ---------------------------------------------------------------- dropout


def test_dropout_takes_whole_channels_of_a_row_and_each_convolution_its_own() -> None:
    """The first convolution gives ones, the second hands them on: the output is the product of both draws."""
    module = ModuleDef(lambda rngs: Block(tcn(norm="none", dropout=0.25, kernel_size=2), 64, 64, 1, rngs=rngs))
    params = {name: np.zeros(p.shape, np.float32) for name, p in module.params.items()}
    params["convs.0.bias"] = np.ones(64, np.float32)
    params["convs.1.kernel"] = np.stack([np.zeros((64, 64)), np.eye(64)]).astype(np.float32)
    x = np.zeros((64, 5, 64), np.float32)
    y, _ = run_train(module, params, {}, x)
    np.testing.assert_array_equal(y, np.broadcast_to(y[:, :1], y.shape))  # all steps alike
    np.testing.assert_allclose(np.unique(y), [0.0, 1 / 0.75**2], rtol=1e-6)
    # 4,096 draws: three standard errors are 0.0233. One draw for both would leave 0.75.
    assert (y[:, 0] > 0).mean() == pytest.approx(0.75**2, abs=0.0235)
    assert len({row.tobytes() for row in y}) == 64  # rows are dropped apart
    assert len({channel.tobytes() for channel in y[:, 0].T}) == 64  # and channels
    assert (run_eval(module, params, {}, x) == 1).all()
    params["convs.1.kernel"] *= 0
    params["convs.1.bias"] = np.ones(64, np.float32)
    second, _ = run_train(module, params, {}, x)
    assert (second[:, 0] > 0).mean() == pytest.approx(0.75, abs=0.0205)  # the second draw alone
