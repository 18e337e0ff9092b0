"""The bridge to nnx: names, values, training and evaluation form, and randomness that no checkpoint needs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from core_helpers import Affine, Normed, assert_bit_equal
from flax import nnx

from jaxtrain.core.module import ModuleDef
from jaxtrain.core.rng import STREAMS, stream_key


class Stack(nnx.Module):
    """A list of layers, a parameter of its own, statistics and two dropouts."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(11)])
        self.value = nnx.Param(jnp.full(4, 2.0))  # a name that flax uses too
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        for layer in self.layers:
            x = layer(x)
        return self.drop(self.norm(x) * self.value)


class Masks(nnx.Module):
    """Two dropouts over ones: [B, D] -> [B, 2 D], 2 where kept."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Dropout(0.5, rngs=rngs)
        self.second = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.concatenate([self.first(x), self.second(x)], -1)


class Ensemble(nnx.Module):
    """Three dropouts made by nnx.vmap: their keys are one array [3]."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        make = nnx.split_rngs(splits=3)(nnx.vmap(lambda rngs: nnx.Dropout(0.5, rngs=rngs)))
        self.drops = make(rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return nnx.vmap(lambda drop, x: drop(x), in_axes=(0, None))(self.drops, x)


@pytest.fixture(scope="module")
def stack() -> ModuleDef:
    return ModuleDef(Stack)


@pytest.fixture(scope="module")
def masks() -> ModuleDef:
    return ModuleDef(Masks)


def test_arrays_are_named_by_their_path(stack: ModuleDef) -> None:
    layers = {f"layers.{i}.{part}" for i in range(11) for part in ("kernel", "bias")}
    assert set(stack.params) == layers | {"value", "norm.scale", "norm.bias"}
    assert set(stack.model_state) == {"norm.mean", "norm.var"}
    assert stack.params["layers.10.kernel"].shape == (4, 4)
    assert stack.name == "Stack"


def test_nothing_random_is_a_parameter_or_a_statistic(stack: ModuleDef) -> None:
    params, model_state = stack.init(0)
    assert not [name for name in (*params, *model_state) if "rng" in name.lower()]
    assert list(params) == list(stack.params)
    shapes = {name: (x.shape, x.dtype) for name, x in (params | model_state).items()}
    assert shapes == {name: (x.shape, x.dtype) for name, x in (stack.params | stack.model_state).items()}


def test_a_module_without_statistics_has_empty_model_state() -> None:
    assert ModuleDef(Affine).model_state == {}
    assert set(ModuleDef(Affine).params) == {"dense.kernel", "dense.bias"}


def test_whether_the_mask_is_taken_is_read_from_the_call(stack: ModuleDef, masks: ModuleDef) -> None:
    assert stack.takes_mask
    assert not masks.takes_mask


def test_init_is_the_module_made_with_the_init_stream_of_the_seed(stack: ModuleDef) -> None:
    by_hand = Stack(nnx.Rngs(stream_key(7, "init")))
    params, _ = jax.jit(stack.init, static_argnums=0)(7)
    for i in (0, 10):
        np.testing.assert_allclose(params[f"layers.{i}.kernel"], by_hand.layers[i].kernel[...], rtol=1e-6)
    other, _ = stack.init(8)
    assert np.abs(np.asarray(params["layers.0.kernel"] - other["layers.0.kernel"])).max() > 0.1


def test_what_is_bound_is_what_is_extracted(stack: ModuleDef) -> None:
    params, model_state = stack.init(0)
    params = {name: x + i for i, (name, x) in enumerate(params.items())}  # each array is told from its neighbour
    model_state = {"norm.mean": jnp.full(4, 3.0), "norm.var": jnp.full(4, 5.0)}
    assert_bit_equal(stack.extract(stack.bind(params, model_state, jax.random.key(0))), (params, model_state))
    assert_bit_equal(stack.extract(stack.bind(params, model_state, None)), (params, model_state))


def test_sorted_arrays_as_jit_returns_them_bind_to_their_names(stack: ModuleDef) -> None:
    params, model_state = stack.init(0)
    backwards = dict(sorted(params.items(), reverse=True))
    module = stack.bind(backwards, model_state, None)
    np.testing.assert_array_equal(module.layers[2].kernel[...], params["layers.2.kernel"])
    np.testing.assert_array_equal(module.layers[10].kernel[...], params["layers.10.kernel"])


def test_training_form_uses_the_batch_and_evaluation_form_the_running_statistics() -> None:
    module_def = ModuleDef(Normed)
    params, model_state = module_def.init(0)
    x = jnp.asarray(np.random.default_rng(0).normal(3, 2, (8, 5)), jnp.float32)
    hidden = x @ params["first.kernel"]

    def by_hand(mean: Any, var: Any) -> Any:
        return (hidden - mean) / jnp.sqrt(var + 1e-5) @ params["last.kernel"]

    training = module_def.bind(params, model_state, jax.random.key(0))
    np.testing.assert_allclose(training(x), by_hand(hidden.mean(0), hidden.var(0)), rtol=1e-4, atol=1e-4)
    _, after = module_def.extract(training)
    np.testing.assert_allclose(after["norm.mean"], 0.01 * hidden.mean(0), rtol=1e-4)
    np.testing.assert_allclose(after["norm.var"], 0.99 + 0.01 * hidden.var(0), rtol=1e-4)

    evaluation = module_def.bind(params, model_state, None)
    np.testing.assert_allclose(evaluation(x), by_hand(0.0, 1.0), rtol=1e-4, atol=1e-4)
    assert_bit_equal(module_def.extract(evaluation)[1], model_state)


def test_binding_twice_does_not_share_state() -> None:
    module_def = ModuleDef(Normed)
    params, model_state = module_def.init(0)
    module_def.bind(params, model_state, jax.random.key(0))(jnp.ones((4, 5)))
    assert_bit_equal(module_def.extract(module_def.bind(params, model_state, None))[1], model_state)


# ---------------------------------------------------------------- randomness


def kept(module_def: ModuleDef, key: Any) -> np.ndarray:
    """[2, 64] bool: what the two dropouts keep."""
    out = np.asarray(module_def.bind({}, {}, key)(jnp.ones((1, 64))))
    assert set(np.unique(out)) <= {0.0, 1.0, 2.0}
    return out.reshape(2, 64) > 0


def test_two_dropouts_of_one_module_have_different_masks(masks: ModuleDef) -> None:
    first, second = kept(masks, jax.random.key(0))
    assert 10 < (first != second).sum() < 54
    assert 10 < first.sum() < 54


def test_the_same_key_repeats_the_masks_and_another_key_does_not(masks: ModuleDef) -> None:
    one = kept(masks, jax.random.key(0))
    np.testing.assert_array_equal(one, kept(masks, jax.random.key(0)))
    assert 20 < (one != kept(masks, jax.random.key(1))).sum() < 108


def test_evaluation_form_drops_nothing(masks: ModuleDef) -> None:
    out = np.asarray(masks.bind({}, {}, None)(jnp.ones((1, 64))))
    np.testing.assert_array_equal(out, np.ones((1, 128)))


def test_dropouts_stacked_by_vmap_get_a_key_each() -> None:
    module_def = ModuleDef(Ensemble)
    out = np.asarray(module_def.bind({}, {}, jax.random.key(0))(jnp.ones((1, 64)))).reshape(3, 64) > 0
    for left, right in ((0, 1), (0, 2), (1, 2)):
        assert 10 < (out[left] != out[right]).sum() < 54


def test_streams_and_counters_give_keys_of_their_own() -> None:
    keys = [
        stream_key(seed, stream, *at)
        for seed in (0, 1)
        for stream in STREAMS
        for at in ((), (0,), (1,), (0, 1), (1, 0))
    ]
    assert len({tuple(np.asarray(jax.random.key_data(k)).tolist()) for k in keys}) == len(keys)
    again = stream_key(1, "module", jnp.int32(1), 0)
    assert jax.random.key_data(again).tolist() == jax.random.key_data(stream_key(1, "module", 1, 0)).tolist()
