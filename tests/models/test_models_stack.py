"""A stack of blocks: the same network as block after block, in a program that does not grow with the depth."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models_helpers import arrays_apart, gpt, module_of, tokens

from jaxtrain.config import schema
from jaxtrain.core.module import ModuleDef
from jaxtrain.core.optimizer import decays, make_optimizer

FORMS = [{}, {"remat": "full"}, {"positions": "learned", "norm": "layer", "activation": "gelu", "bias": True}]


def unstacked(params: dict[str, Any]) -> dict[str, Any]:
    """The arrays of a stack as those of single blocks."""
    out = {}
    for name, x in params.items():
        if name.startswith("blocks.stacked."):
            out |= {f"blocks.{i}.{name.removeprefix('blocks.stacked.')}": block for i, block in enumerate(x)}
        else:
            out[name] = x
    return out


def pair(**changes: Any) -> tuple[ModuleDef, ModuleDef, dict[str, Any]]:
    stacked, plain = module_of(gpt(scan_layers=True, layers=3, **changes)), module_of(gpt(layers=3, **changes))
    return stacked, plain, arrays_apart(stacked)


def gradients(module: ModuleDef, params: dict[str, Any], x: Any) -> tuple[Any, dict[str, Any]]:
    def loss(params: dict[str, Any]) -> Any:
        logits = module.bind(params, {}, None)(x)
        return jnp.sum(jnp.sin(logits)), logits

    grads, logits = jax.jit(jax.grad(loss, has_aux=True))(params)
    return np.asarray(logits), grads


@pytest.mark.parametrize("changes", FORMS, ids=["plain", "remat", "learned"])
def test_outputs_and_gradients_are_those_of_block_after_block(changes: dict[str, Any]) -> None:
    stacked, plain, params = pair(**changes)
    single = unstacked(params)
    assert single.keys() == plain.params.keys()
    x = tokens(2, 8)
    logits, grads = gradients(stacked, params, x)
    wanted, wanted_grads = gradients(plain, single, x)
    np.testing.assert_allclose(logits, wanted, rtol=1e-5, atol=1e-6)
    for name, found in unstacked(grads).items():
        scale = np.abs(wanted_grads[name]).max()
        np.testing.assert_allclose(found, wanted_grads[name], rtol=1e-4, atol=1e-5 * scale, err_msg=name)
    turned = {name: x[::-1] if "stacked" in name else x for name, x in params.items()}  # the control: their order
    assert not np.allclose(gradients(stacked, turned, x)[0], wanted, atol=1e-3)


def test_every_block_has_first_weights_of_its_own() -> None:
    module = module_of(gpt(scan_layers=True, layers=3, width=64, heads=4))
    kernel = np.asarray(jax.jit(lambda: module.init(0)[0]["blocks.stacked.attention.qkv.kernel"])())
    assert kernel.shape == (3, 64, 192)
    assert kernel.std((1, 2)) == pytest.approx([0.02] * 3, rel=0.05)
    assert np.abs(np.corrcoef(kernel.reshape(3, -1))[np.triu_indices(3, 1)]).max() < 0.05


def test_every_block_drops_for_itself() -> None:
    """Where every block adds the same, two blocks that drop alike would drop the same places."""
    module = module_of(gpt(scan_layers=True, dropout=0.5, width=64, heads=4))
    keys = [x for name, x in zip(module._rngs, module._random_leaves(jax.random.key(1)), strict=True) if "key" in name]
    stacked = [key for key in keys if key.ndim == 1]
    assert [key.shape for key in stacked] == [(2,)]
    data = jax.random.key_data(stacked[0])
    assert not np.array_equal(data[0], data[1])
    params = arrays_apart(module)
    forward = jax.jit(lambda key: module.bind(params, {}, key)(tokens(2, 8)))
    assert not np.allclose(forward(jax.random.key(1)), forward(jax.random.key(2)), atol=1e-3)


def test_decoding_gives_what_the_whole_text_gives() -> None:
    stacked, _, params = pair()
    x = tokens(2, 8)
    model = stacked.bind(params, {}, None)
    first, cache = model.decode(x[:, :5], model.empty_cache(2), 0)
    second, cache = model.decode(x[:, 5:], cache, 5)
    assert [part.shape for part in cache] == [(3, 2, 8, 2, 4)] * 2
    np.testing.assert_allclose(jnp.concatenate([first, second], 1), model(x), rtol=1e-5, atol=1e-5)
    forgotten, _ = model.decode(x[:, 5:], model.empty_cache(2), 5)  # the control
    assert not np.allclose(forgotten, second, atol=1e-3)


def test_the_program_does_not_grow_with_the_depth() -> None:
    def size(**changes: Any) -> int:
        module = module_of(gpt(**changes))
        traced = jax.jit(lambda p, x: module.bind(p, {}, None)(x)).lower(module.params, tokens(2, 8))
        return len(traced.as_text().splitlines())

    assert size(scan_layers=True, layers=8) == size(scan_layers=True, layers=2)
    assert size(layers=8) > 2.5 * size(layers=2)


def test_norms_and_biases_of_a_stack_do_not_decay_and_its_kernels_do() -> None:
    stacked, plain, _ = pair(bias=True, norm="layer", positions="learned", tie_embeddings=False)
    single = decays(plain.params)
    for name, taken in decays(stacked.params).items():
        assert taken == single[name.replace("stacked", "0")], name


@pytest.mark.parametrize("kind", ["adamw", "muon", "lion"])
def test_an_update_of_a_stack_is_that_of_its_blocks(kind: str) -> None:
    config = {"adamw": schema.Adamw, "muon": schema.Muon, "lion": schema.Lion}[kind](weight_decay=0.1)
    stacked, plain, params = pair()
    x = tokens(2, 8)

    def updated(module: ModuleDef, params: dict[str, Any]) -> dict[str, Any]:
        grads = gradients(module, params, x)[1]
        optimizer = make_optimizer(config)
        return jax.jit(lambda g, p: optimizer.update(g, optimizer.init(p), p)[0])(grads, params)

    wanted = updated(plain, unstacked(params))
    for name, found in unstacked(updated(stacked, params)).items():
        np.testing.assert_allclose(found, wanted[name], rtol=1e-3, atol=1e-4, err_msg=name)
