"""Moments in 8 bits: what a code keeps of a value, that updates are those of the formula, and what a state weighs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from core_helpers import Affine, assert_bit_equal, bit_equal, make_batch, make_spec, spoil, start
from optax import contrib

from jaxtrain.config import schema
from jaxtrain.core import moments
from jaxtrain.core.moments import Blocks, dequantise, quantise
from jaxtrain.core.optimizer import make_optimizer
from jaxtrain.core.step import make_train_step

TOP, POWER = {"int8": 127, "uint8": 255}, {"int8": 2, "uint8": 4}
KINDS = {
    "momentum": schema.Momentum,
    "adam": schema.Adam,
    "adamw": schema.Adamw,
    "lion": schema.Lion,
    "muon": schema.Muon,
}
SHAPES = {"a.kernel": (256, 384), "a.bias": (384,), "b.kernel": (64, 63), "c.scale": (), "embed.embedding": (100, 64)}
"""One array that is kept in 8 bits; a vector, a matrix of 4,032 values, a scalar and an embedding that are not."""
TYPES = ("float32", "int8")


def arrays(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in SHAPES.items()}


def back(x: Any, dtype: str) -> np.ndarray:
    """What is read of an array after it was kept."""
    return np.asarray(dequantise(quantise(jnp.asarray(x, jnp.float32), dtype)))


# ---------------------------------------------------------------- one code


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_every_code_is_read_and_kept_as_itself(dtype: str) -> None:
    least = -127 if dtype == "int8" else 0
    codes = np.repeat(np.arange(least, TOP[dtype] + 1)[:, None], 128, 1)  # a block a row
    codes[:, 0] = TOP[dtype]
    scales = np.random.default_rng(0).lognormal(0, 5, (len(codes), 1)).astype(np.float32)
    blocks = Blocks(jnp.asarray(codes, dtype), jnp.asarray(scales))
    assert_bit_equal(quantise(dequantise(blocks), dtype), blocks)
    values = np.asarray(dequantise(blocks))
    by_hand = np.sign(codes) * np.abs(codes / TOP[dtype]) ** POWER[dtype] * scales.astype(np.float64)
    np.testing.assert_allclose(values, by_hand, rtol=1e-6)
    assert len(np.unique(values[:, 1] / scales[:, 0])) == len(codes)  # the control: no two codes are one value


# (shape, axis of the blocks, their size)
BLOCKINGS = [
    ((4096,), 0, 128),
    ((4099,), 0, 128),  # a prime: the last block has 3 values
    ((96, 96), 0, 96),
    ((64, 96), 1, 96),
    ((256, 384), 0, 128),  # along the shortest that holds a block
    ((384, 256), 1, 128),
    ((256, 256), 1, 128),
    ((200, 344), 0, 100),
    ((3, 3, 32, 64), 3, 64),
    ((2, 131, 40), 1, 128),  # padded in the middle
]
DRAWS = {
    "normal": lambda rng, shape: rng.normal(size=shape),
    "negative": lambda rng, shape: -rng.lognormal(0, 1, shape),
    "wide": lambda rng, shape: rng.normal(size=shape) * rng.lognormal(0, 8, shape),
}


def in_numpy(x: np.ndarray, axis: int, size: int) -> tuple[np.ndarray, list[tuple[Any, ...]]]:
    """The scale of each value, and the index of each block."""
    scales, where = np.zeros_like(x), []
    for begin in range(0, x.shape[axis], size):
        part = tuple(slice(begin, begin + size) if i == axis else slice(None) for i in range(x.ndim))
        scales[part] = np.abs(x[part]).max(axis, keepdims=True)
        where.append(part)
    return scales, where


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("dtype", ["int8", "uint8"])
@pytest.mark.parametrize(("shape", "axis", "size"), BLOCKINGS, ids=str)
def test_a_value_is_at_most_half_a_code_away(
    shape: tuple[int, ...], axis: int, size: int, dtype: str, draw: str
) -> None:
    x = DRAWS[draw](np.random.default_rng(0), shape).astype(np.float32)
    x = np.abs(x) if dtype == "uint8" else x
    kept, top, power = quantise(jnp.asarray(x), dtype), TOP[dtype], POWER[dtype]
    scales, where = in_numpy(x, axis, size)
    assert (kept.codes.shape, str(kept.codes.dtype)) == (shape, dtype)
    assert kept.scales.shape == tuple(len(where) if i == axis else n for i, n in enumerate(shape))
    place = (np.abs(x) / scales.astype(np.float64)) ** (1 / power)
    low, high = np.maximum(place - 0.5001 / top, 0), place + 0.5001 / top
    if dtype == "uint8":  # code 1 is the least
        high = np.maximum(high, 1.0001 / top)
    read = np.asarray(dequantise(kept))
    share = np.abs(read) / scales.astype(np.float64)
    assert (low**power * 0.99999 <= share).all()
    assert (share <= high**power * 1.00001).all()
    assert (np.sign(read) * np.sign(x) >= 0).all()
    assert (np.abs(read)[np.abs(x) == scales] == scales[np.abs(x) == scales]).all()  # the largest of a block is exact


def test_a_block_knows_nothing_of_its_neighbour() -> None:
    x = np.random.default_rng(0).normal(size=(128, 256)).astype(np.float32)
    spiked = x.copy()
    spiked[:, 3] *= 1e12  # of one column, which is one block

    def codes(x: np.ndarray) -> np.ndarray:
        return np.asarray(quantise(jnp.asarray(x), "int8").codes)[:, 4:]

    np.testing.assert_array_equal(codes(spiked), codes(x))
    spiked[7, 4:] *= 1e12  # the control: in the same blocks, little is left of the others
    assert (codes(spiked)[8:] == 0).all()


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_zeros_stay_zeros_and_so_does_what_is_no_normal_number(dtype: str) -> None:
    x = np.zeros((33, 128), np.float32)
    x[1, :] = 1e-40
    x[2, 5] = 3.0
    kept = quantise(jnp.asarray(x), dtype)
    assert np.asarray(kept.scales)[:3, 0].tolist() == [0.0, 0.0, 3.0]
    assert np.asarray(dequantise(kept)).tolist() == np.where(x == 3.0, x, 0.0).tolist()


def test_a_second_moment_above_zero_is_never_read_as_zero() -> None:
    x = np.full((32, 128), 1e-30, np.float32)
    x[:, 0] = 1.0
    x[:, 1] = 0.0
    read = back(x, "uint8")
    assert (read[:, 1] == 0.0).all()
    np.testing.assert_allclose(read[:, 2:], 255.0**-4, rtol=1e-6)
    assert (back(x, "int8")[:, 2:] == 0.0).all()  # the control: a first moment may vanish


# ---------------------------------------------------------------- updates


def kept_by_hand(x: np.ndarray, axis: int, size: int, dtype: str) -> np.ndarray:
    scales, _ = in_numpy(x, axis, size)
    code = np.rint(TOP[dtype] * (np.abs(x) / scales) ** (1 / POWER[dtype]))
    code = np.where(x > 0, np.maximum(code, 1), 0) if dtype == "uint8" else np.sign(x) * code
    return np.sign(code) * np.abs(code / TOP[dtype]) ** POWER[dtype] * scales


def test_adam_in_8_bits_equals_its_formula_with_moments_kept_by_hand() -> None:
    name, b1, b2 = "a.kernel", 0.9, 0.999
    config = schema.Adam(moment_dtype="int8")
    optimizer, exact = make_optimizer(config), make_optimizer(schema.Adam())
    params = arrays(0)
    state, full = optimizer.init(params), exact.init(params)
    m = v = np.zeros(SHAPES[name])
    for t in range(1, 5):
        gradients = arrays(t)
        direction, state = jax.jit(optimizer.update)(gradients, state, params)
        other, full = jax.jit(exact.update)(gradients, full, params)
        g = np.asarray(gradients[name], np.float64)
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        expected = m / (1 - b1**t) / (np.sqrt(v / (1 - b2**t)) + 1e-8)
        m, v = kept_by_hand(m, 0, 128, "int8"), kept_by_hand(v, 0, 128, "uint8")
        # A value on the border of two codes may fall to the other side in float32: a few of 98,304.
        assert np.isclose(np.asarray(direction[name]), expected, rtol=1e-4, atol=1e-5).mean() > 0.9998
        assert np.isclose(np.asarray(dequantise(state.mu[name])), m, rtol=1e-4).mean() > 0.9998
        assert np.isclose(np.asarray(dequantise(state.nu[name])), v, rtol=1e-4).mean() > 0.9998
        same = np.isclose(np.asarray(direction[name]), np.asarray(other[name]), rtol=1e-4, atol=1e-5).mean()
        assert same == 1.0 if t == 1 else same < 0.5  # the control: 8 bits are seen, from the second update on
        for small in set(SHAPES) - {name}:
            assert_bit_equal(direction[small], other[small])


@pytest.mark.parametrize("kind", KINDS)
def test_an_update_is_that_of_float32_on_the_moments_as_they_are_read(kind: str) -> None:
    params = arrays(0)
    ours, exact = make_optimizer(KINDS[kind](moment_dtype="int8")), make_optimizer(KINDS[kind]())
    _, state = ours.update(arrays(1), ours.init(params), params)
    read = jax.tree.map(
        lambda x: dequantise(x) if isinstance(x, Blocks) else x, state, is_leaf=lambda x: isinstance(x, Blocks)
    )
    direction, new = ours.update(arrays(2), state, params)
    expected, wanted = exact.update(arrays(2), read, params)
    assert_bit_equal(direction, expected)
    # The new moments are kept from what float32 has, and there are as many as the method has.
    kept = [x for x in jax.tree.leaves(new, is_leaf=lambda x: isinstance(x, Blocks)) if isinstance(x, Blocks)]
    large = [x for x in jax.tree.leaves(wanted) if x.shape == SHAPES["a.kernel"]]
    assert len(kept) == len(large) == (2 if "adam" in kind else 1)
    for blocks, moment in zip(kept, large, strict=True):
        assert_bit_equal(blocks, quantise(moment, str(blocks.codes.dtype)))
    _, straight = exact.update(arrays(1), exact.init(params), params)
    assert not bit_equal(direction, exact.update(arrays(2), straight, params)[0])  # the control


def muon_apart(noise: float) -> float:
    """Cosine between the 20th directions of muon in 8 bits and in 32, for gradients of rank 4 and some noise."""
    params, rng = {"kernel": jnp.zeros((128, 160))}, np.random.default_rng(0)
    base, directions = rng.normal(size=(128, 4)) @ rng.normal(size=(4, 160)), []
    for dtype in TYPES:
        optimizer, draw = make_optimizer(schema.Muon(moment_dtype=dtype)), np.random.default_rng(1)
        state, update = optimizer.init(params), jax.jit(optimizer.update)
        for _ in range(20):
            gradient = {"kernel": jnp.asarray(base + noise * draw.normal(size=base.shape), jnp.float32)}
            direction, state = update(gradient, state, params)
        directions.append(np.asarray(direction["kernel"], np.float64).ravel())
    a, b = directions
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


def test_muon_in_8_bits_goes_where_float32_goes() -> None:
    assert muon_apart(3.0) > 0.995
    # The control, and a limit: with little noise most directions are small, and are stretched with their rounding.
    assert 0.9 < muon_apart(0.3) < 0.97


def updates_apart(b2: float, updates: int) -> float:
    """The relative distance of Adam's directions in 8 bits from float32's, the last of so many.

    Gradients of unlike sizes: rows differ by a factor of up to 100, values in a row by another.
    """
    rng = np.random.default_rng(0)
    size = rng.lognormal(0, 1, (128, 1)) * rng.lognormal(0, 1, (128, 128))
    params = {"kernel": jnp.zeros((128, 128))}
    pair = [make_optimizer(schema.Adam(b2=b2, moment_dtype=dtype)) for dtype in ("float32", "int8")]
    states = [optimizer.init(params) for optimizer in pair]
    steps = [jax.jit(optimizer.update) for optimizer in pair]
    for _ in range(updates):
        gradient = {"kernel": jnp.asarray(size * rng.normal(size=size.shape), jnp.float32)}
        results = [step(gradient, state, params) for step, state in zip(steps, states, strict=True)]
        directions, states = zip(*results, strict=True)
    exact, ours = (np.asarray(d["kernel"]) for d in directions)
    return float(np.linalg.norm(ours - exact) / np.linalg.norm(exact))


def test_directions_stay_near_those_of_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    assert updates_apart(0.99, 200) < 0.08
    # The control: equal steps for both moments.
    monkeypatch.setattr(moments, "CODES", {"int8": (127, 0), "uint8": (255, 0)})
    assert updates_apart(0.99, 200) > 0.3


# ---------------------------------------------------------------- the state


def weight(tree: Any) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(tree))


def test_a_state_weighs_what_the_types_say() -> None:
    large = 256 * 384
    small = sum(int(np.prod(shape)) for name, shape in SHAPES.items() if name != "a.kernel")
    byte = large + 4 * large // 128  # codes, scales
    counter = 4
    expected = {
        "momentum": (4 * large, byte, 4 * small),
        "adam": (8 * large, 2 * byte, 8 * small + counter),
        "adamw": (8 * large, 2 * byte, 8 * small + counter),
        "lion": (4 * large, byte, 4 * small + counter),
    }
    for kind, (full, kept, rest) in expected.items():
        for dtype, wanted in (("float32", full), ("int8", kept)):
            state = make_optimizer(KINDS[kind](moment_dtype=dtype)).init(arrays(0))
            assert weight(state) == wanted + rest, (kind, dtype)
    muon = {dtype: weight(make_optimizer(schema.Muon(moment_dtype=dtype)).init(arrays(0))) for dtype in TYPES}
    assert muon["float32"] - muon["int8"] == 4 * large - byte
    assert expected["adamw"][1] / large == 2.0625  # bytes a parameter, in place of 8


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_holds_no_large_float_array_and_keeps_its_types(kind: str) -> None:
    optimizer, params = make_optimizer(KINDS[kind](moment_dtype="int8")), arrays(0)
    state = optimizer.init(params)
    _, after = jax.jit(optimizer.update)(arrays(1), state, params)
    large = [str(x.dtype) for x in jax.tree.leaves(after) if x.shape == SHAPES["a.kernel"]]
    assert large == {"adam": ["int8", "uint8"], "adamw": ["int8", "uint8"]}.get(kind, ["int8"])
    same = jax.tree.map(lambda x: (x.shape, x.dtype), state) == jax.tree.map(lambda x: (x.shape, x.dtype), after)
    assert same  # no second program
    float32 = make_optimizer(KINDS[kind]()).init(params)
    assert {str(x.dtype) for x in jax.tree.leaves(float32) if x.shape == SHAPES["a.kernel"]} == {"float32"}


def test_bfloat16_is_still_for_the_first_moment_only() -> None:
    state = make_optimizer(schema.Adamw(moment_dtype="bfloat16")).init(arrays(0))[0]
    assert {str(x.dtype) for x in state.mu.values()} == {"bfloat16"}
    assert {str(x.dtype) for x in state.nu.values()} == {"float32"}


def test_all_states_of_optimizers_with_a_type_are_known() -> None:
    seen = set()

    def look(node: Any) -> bool:
        seen.add(type(node))
        return False

    for make in KINDS.values():
        jax.tree.map(lambda x: x, make_optimizer(make()).init(arrays(0)), is_leaf=look)
    assert set(moments.MOMENTS) <= seen
    assert contrib.MuonState in seen


def wide(**changes: Any) -> Any:
    optimizer = make_optimizer(schema.Adamw(moment_dtype=changes.pop("dtype", "int8")))
    return make_spec(lambda rngs: Affine(rngs, 128, 64), optimizer=optimizer, schedule=lambda n: 0.01, **changes)


WIDE = make_batch(64, inputs=128, classes=64)


@pytest.mark.parametrize("branch", [False, True])
def test_a_bad_batch_leaves_the_codes_alone_and_a_donated_state_is_gone(branch: bool) -> None:
    spec = wide(branch=branch)
    step, state = jax.jit(make_train_step(spec), donate_argnums=0), start(spec)
    state, _ = step(state, WIDE)
    before = jax.tree.map(np.asarray, jax.tree.map(jnp.copy, state["opt_state"]))
    assert str(before[0].nu["dense.kernel"].codes.dtype) == "uint8"
    old = state
    state, metrics = step(state, spoil(WIDE))
    assert int(metrics["in_row"]) == 1
    assert_bit_equal(jax.tree.map(np.asarray, state["opt_state"]), before)
    assert old["opt_state"][0].mu["dense.kernel"].codes.is_deleted()
    state, _ = step(state, WIDE)
    assert not bit_equal(jax.tree.map(np.asarray, state["opt_state"]), before)  # the control
    assert step._cache_size() == 1
