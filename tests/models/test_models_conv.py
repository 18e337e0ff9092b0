"""Convolutions and pooling in the form for XLA:CPU: values and gradients are those of lax and flax."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from models_helpers import convolutions_as_they_come, formula, primitives

from jaxtrain.models.conv import Conv, convolve, max_pool

# (image, kernel, strides, padding, dilation, whether it is a product)
CASES: dict[str, tuple[Any, ...]] = {
    "2x2 by 3x3": ((3, 2, 2, 4), (3, 3, 4, 5), (1, 1), [(1, 1)] * 2, (1, 1), True),
    "1x1 by 3x3": ((3, 1, 1, 4), (3, 3, 4, 5), (1, 1), "SAME", (1, 1), True),
    "4x4 to 2x2": ((3, 4, 4, 4), (3, 3, 4, 5), (2, 2), [(1, 1)] * 2, (1, 1), True),
    "4x3 by 5x5": ((2, 4, 3, 4), (5, 5, 4, 3), (1, 1), "SAME", (1, 1), True),
    "uneven padding, strides, dilations": ((3, 5, 4, 4), (3, 3, 4, 5), (1, 2), [(2, 1), (0, 3)], (2, 3), True),
    "taps on padding alone": ((2, 3, 2, 4), (3, 3, 4, 2), (1, 1), [(3, 3)] * 2, (3, 3), True),
    "one tap": ((3, 5, 4, 4), (1, 1, 4, 5), (1, 1), "VALID", (1, 1), True),
    "one tap, strided": ((3, 5, 4, 4), (1, 1, 4, 5), (2, 2), "SAME", (1, 1), True),
    "one tap, padded": ((2, 3, 3, 4), (1, 1, 4, 5), (1, 1), [(1, 0), (2, 1)], (1, 1), True),
    "8x8 by 3x3": ((2, 8, 8, 4), (3, 3, 4, 5), (1, 1), "SAME", (1, 1), False),
    "sequence": ((3, 12, 4), (3, 4, 6), (1,), "SAME", (1,), True),
    "sequence, causal, dilated": ((3, 12, 4), (3, 4, 6), (1,), [(8, 0)], (4,), True),
    "sequence, dilated beyond its end": ((3, 5, 4), (3, 4, 6), (1,), [(14, 0)], (7,), True),
    "sequence, one row of one channel": ((1, 9, 1), (5, 1, 1), (1,), "VALID", (2,), True),
    "sequence, strided": ((3, 12, 4), (3, 4, 6), (2,), "SAME", (1,), False),
    "sequence, long kernel": ((3, 12, 4), (7, 4, 6), (1,), "SAME", (1,), False),
    "no output": ((3, 2, 2, 4), (3, 3, 4, 5), (1, 1), "VALID", (1, 1), False),
}


def arrays(case: str, dtype: Any = jnp.float32) -> tuple[jax.Array, jax.Array]:
    image, kernel, *_ = CASES[case]
    return jnp.asarray(formula(image, 0.3, 1.0), dtype), jnp.asarray(formula(kernel, 1.1, 0.5), dtype)


def both(case: str) -> tuple[Any, Any]:
    """(ours, lax's), functions of (x, kernel)."""
    strides, padding, dilation = CASES[case][2:5]
    axes = "HW"[: len(strides)]
    numbers = (f"N{axes}C", f"{axes}IO", f"N{axes}C")

    def of(function: Any) -> Any:
        return lambda x, w: function(x, w, strides, padding, rhs_dilation=dilation, dimension_numbers=numbers)

    return of(convolve), of(lax.conv_general_dilated)


def close(actual: Any, expected: Any, tolerance: float = 1e-5) -> None:
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    size = float(jnp.abs(expected).max()) if expected.size else 1.0
    actual, expected = (np.asarray(array, np.float32) for array in (actual, expected))
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance * size)


@pytest.mark.parametrize("case", CASES)
def test_values_and_both_gradients_are_those_of_lax(case: str) -> None:
    ours, theirs = both(case)
    x, kernel = arrays(case)
    (y, back), (expected, their_back) = jax.vjp(ours, x, kernel), jax.vjp(theirs, x, kernel)
    close(y, expected)
    slope = jnp.asarray(formula(y.shape, 0.7, 1.0))
    for gradient, other in zip(back(slope), their_back(slope), strict=True):
        close(gradient, other)
    if y.size:  # the control: other values in the kernel are seen
        assert not np.allclose(y, theirs(x, 1.01 * kernel), rtol=1e-3, atol=1e-3 * float(jnp.abs(y).max()))


def test_the_taps_are_in_the_order_of_lax() -> None:
    """The control of the test above for the cases whose taps all see something."""
    for case in ("2x2 by 3x3", "4x4 to 2x2", "sequence, causal, dilated"):
        ours, theirs = both(case)
        x, kernel = arrays(case)
        turned = jnp.flip(kernel, range(kernel.ndim - 2))
        assert not np.allclose(ours(x, kernel), theirs(x, turned), atol=1e-2), case


@pytest.mark.parametrize("case", CASES)
def test_it_is_a_product_where_that_is_faster_and_only_on_cpu(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = both(case)
    x, kernel = arrays(case)

    def convolves() -> bool:
        return "conv_general_dilated" in primitives(
            jax.make_jaxpr(jax.grad(lambda *a: ours(*a).sum()))(x, kernel).jaxpr
        )

    assert convolves() is not CASES[case][-1]
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert convolves()
    # Other backends get the very program of lax, but for the numbers that a word for the padding stands for.
    if not isinstance(CASES[case][3], str):
        assert str(jax.make_jaxpr(lambda *a: ours(*a))(x, kernel)) == str(jax.make_jaxpr(theirs)(x, kernel))


def test_a_large_sequence_groups_and_a_dilated_image_are_left_to_lax() -> None:
    numbers = ("NHC", "HIO", "NHC")

    def convolves(rows: int, groups: int = 1, spread: int = 1) -> bool:
        x, kernel = jnp.zeros((rows, 128, 64)), jnp.zeros((3, 64 // groups, 64))
        options = {"feature_group_count": groups, "lhs_dilation": (spread,), "dimension_numbers": numbers}
        jaxpr = jax.make_jaxpr(lambda x, w: convolve(x, w, (1,), "SAME", **options))(x, kernel)
        return "conv_general_dilated" in primitives(jaxpr.jaxpr)

    assert not convolves(32)
    assert convolves(128)
    assert convolves(32, groups=2)
    assert convolves(32, spread=2)


@pytest.mark.parametrize("case", ["2x2 by 3x3", "one tap", "sequence, causal, dilated"])
def test_bf16_is_summed_in_fp32(case: str) -> None:
    ours, _ = both(case)
    x, kernel = arrays(case, jnp.bfloat16)
    wide = both(case)[1](x.astype(jnp.float32), kernel.astype(jnp.float32))
    y, back = jax.vjp(ours, x, kernel)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_array_equal(y, wide.astype(jnp.bfloat16))  # one rounding, at the end
    assert {g.dtype for g in back(jnp.ones_like(y))} == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.parametrize("dilation", [1, 3, (3,), None])
def test_a_causal_layer_has_the_arrays_and_the_values_of_flax(dilation: Any) -> None:
    ours, theirs = (
        kind(2, 5, (3,), kernel_dilation=dilation, padding="CAUSAL", rngs=nnx.Rngs(0)) for kind in (Conv, nnx.Conv)
    )
    own, other = (nnx.to_flat_state(nnx.state(layer, nnx.Param)) for layer in (ours, theirs))
    assert [(path, array[...].tobytes()) for path, array in own] == [(p, a[...].tobytes()) for p, a in other]
    x = jnp.asarray(formula((4, 11, 2), 0.2, 1.0))
    close(ours(x), theirs(x))
    assert not np.allclose(ours(x), theirs(x[:, ::-1]), atol=1e-3)  # the control


def test_a_layer_with_a_bias_strides_and_a_user_given_dtype_is_that_of_flax() -> None:
    options: dict[str, Any] = {"strides": 2, "padding": 1, "dtype": jnp.bfloat16}
    ours, theirs = (kind(3, 5, (3, 3), **options, rngs=nnx.Rngs(1)) for kind in (Conv, nnx.Conv))
    for layer in (ours, theirs):
        layer.bias[...] = jnp.arange(5.0)
    x = jnp.asarray(formula((4, 4, 4, 3), 0.2, 1.0))
    close(ours(x), theirs(x), 1e-2)
    assert ours(x).dtype == jnp.bfloat16


# (image, kernel, strides, padding, dilation)
DEPTHWISE: dict[str, tuple[Any, ...]] = {
    "3x3": ((2, 6, 5, 4), (3, 3, 1, 4), (1, 1), "SAME", (1, 1)),
    "strided": ((2, 7, 6, 4), (3, 3, 1, 4), (2, 2), [(1, 1)] * 2, (1, 1)),
    "uneven": ((2, 7, 6, 4), (2, 3, 1, 4), (3, 1), [(2, 0), (-1, 4)], (2, 3)),
    "one channel": ((2, 6, 5, 1), (3, 3, 1, 1), (1, 1), "VALID", (1, 1)),
    "sequence": ((3, 12, 5), (4, 1, 5), (1,), [(6, 0)], (2,)),
    "cut": ((3, 12, 5), (3, 1, 5), (1,), [(-2, -1)], (1,)),
}


@pytest.mark.parametrize("case", DEPTHWISE)
def test_a_kernel_for_each_channel_gives_the_values_and_gradients_of_lax(case: str) -> None:
    image, shape, strides, padding, dilation = DEPTHWISE[case]
    x, kernel = jnp.asarray(formula(image, 0.3, 1.0)), jnp.asarray(formula(shape, 1.1, 0.5))
    space = "HW"[: len(strides)]
    options = {
        "rhs_dilation": dilation,
        "feature_group_count": image[-1],
        "dimension_numbers": (f"N{space}C", f"{space}IO", f"N{space}C"),
    }

    def of(function: Any) -> Any:
        return lambda x, w: function(x, w, strides, padding, **options)

    (y, back), (expected, their_back) = (jax.vjp(of(f), x, kernel) for f in (convolve, lax.conv_general_dilated))
    close(y, expected)
    slope = jnp.asarray(formula(y.shape, 0.7, 1.0))
    for gradient, other in zip(back(slope), their_back(slope), strict=True):
        close(gradient, other)
    turned = of(convolve)(x, jnp.flip(kernel, range(kernel.ndim - 2)))
    assert not np.allclose(y, turned, atol=1e-3)  # the control
    convolves = "conv_general_dilated" in primitives(jax.make_jaxpr(of(convolve))(x, kernel).jaxpr)
    assert convolves is (image[-1] == 1)  # one group: a plain convolution
    half = of(convolve)(x.astype(jnp.bfloat16), kernel.astype(jnp.bfloat16))
    assert half.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(half, np.float32), y, rtol=0.02, atol=0.02)


# ---------------------------------------------------------------- pooling

# (image, window, stride, padding)
POOLS: list[tuple[Any, ...]] = [
    ((2, 8, 8, 3), 2, 2, "SAME"),
    ((2, 7, 5, 3), 2, 2, "SAME"),
    ((2, 8, 7, 3), 3, 2, 1),
    ((2, 16, 16, 3), 3, 2, 1),
    ((2, 6, 7, 3), 2, 3, 0),
    ((2, 9, 8, 3), 3, 1, "SAME"),
    ((2, 8, 8, 3), 5, 2, 2),
    ((2, 9, 9, 3), 4, 3, "VALID"),
    ((2, 1, 1, 3), 2, 2, "SAME"),
]


def flax_pool(x: Any, window: int, stride: int, padding: Any) -> Any:
    pairs = padding if isinstance(padding, str) else ((padding, padding),) * 2
    return nnx.max_pool(x, window_shape=(window, window), strides=(stride, stride), padding=pairs)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("case", POOLS, ids=str)
def test_pooling_and_its_gradient_are_those_of_flax_equal_ones_included(case: tuple[Any, ...], dtype: Any) -> None:
    shape, *how = case
    x = jnp.asarray(np.round(formula(shape, 0.4, 1.0)), dtype)  # whole numbers: many are equal
    (y, back), (expected, their_back) = (jax.vjp(lambda x, f=f: f(x, *how), x) for f in (max_pool, flax_pool))
    np.testing.assert_array_equal(y, expected)
    slope = jnp.asarray(np.round(8 * formula(y.shape, 0.9, 1.0)), dtype)  # whole numbers: sums are exact
    np.testing.assert_array_equal(back(slope)[0], their_back(slope)[0])
    assert back(slope)[0].dtype == dtype


def test_of_equal_ones_the_first_gets_the_gradient() -> None:
    x = jnp.asarray([[3.0, 3.0, 1.0, 2.0], [3.0, 0.0, 2.0, 2.0]])[None, :, :, None]
    gradient = jax.grad(lambda x: max_pool(x, 2, 2).sum())(x)
    np.testing.assert_array_equal(gradient[0, :, :, 0], [[1, 0, 0, 1], [0, 0, 0, 0]])
    halves = jax.grad(lambda x: jnp.maximum(x[:, :, ::2], x[:, :, 1::2]).sum())(x)  # the control
    assert float(halves[0, 0, 0, 0]) == 0.5


def test_pooling_shows_a_value_that_is_no_number() -> None:
    x = jnp.asarray(formula((1, 4, 4, 1), 0.4, 1.0)).at[0, 1, 1, 0].set(jnp.nan)
    y = max_pool(x, 2, 2)
    assert np.isnan(y[0, 0, 0, 0])
    assert np.isfinite(np.asarray(y).ravel()[1:]).all()


def test_pooling_is_flax_on_other_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    x = jnp.zeros((2, 8, 8, 3))
    names = [primitives(jax.make_jaxpr(jax.grad(lambda x: max_pool(x, 3, 2, 1).sum()))(x).jaxpr)]
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    names.append(primitives(jax.make_jaxpr(jax.grad(lambda x: max_pool(x, 3, 2, 1).sum()))(x).jaxpr))
    assert ["reduce_window_max" in each for each in names] == [False, True]


def test_models_use_both(monkeypatch: pytest.MonkeyPatch) -> None:
    from jaxtrain.models import cnn, resnet, tcn

    assert cnn.Conv is resnet.Conv is tcn.Conv is Conv
    assert cnn.max_pool is resnet.max_pool is max_pool
    convolutions_as_they_come(monkeypatch)
    jaxpr = jax.make_jaxpr(both("2x2 by 3x3")[0])(*arrays("2x2 by 3x3"))
    assert "conv_general_dilated" in primitives(jaxpr.jaxpr)  # the switch that benchmarks use
