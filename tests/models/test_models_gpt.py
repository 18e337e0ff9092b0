"""The transformer: against numpy, what a token sees, its numbers of parameters, its first weights, its cache."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models_helpers import (
    arrays_apart,
    count,
    formula,
    fresh,
    gpt,
    module_of,
    run_eval,
    run_train,
    tokens,
)
from models_numpy import gelu, gpt_in_numpy, silu

from jaxtrain.config import ConfigError, load, schema
from jaxtrain.core.module import ModuleDef
from jaxtrain.core.optimizer import decays
from jaxtrain.core.precision import cast_floats
from jaxtrain.models.gpt import Block, Hidden, rotate

LEARNED = gpt(positions="learned", norm="layer", activation="gelu", bias=True)
ROTARY = gpt(heads=4, kv_heads=2, width=16, tie_embeddings=False)
FORMS = pytest.mark.parametrize(
    "config",
    [
        LEARNED,
        ROTARY,
        gpt(heads=4, kv_heads=1, width=8, positions="learned", activation="swiglu"),
        gpt(norm="layer", activation="gelu", tie_embeddings=False, bias=True),
    ],
    ids=["learned", "rotary-grouped", "learned-one-kv-head", "rotary-bias"],
)


@functools.cache
def made(config: schema.Gpt, block_size: int = 8) -> tuple[ModuleDef, dict[str, Any]]:
    module = module_of(config, (block_size,))
    return module, arrays_apart(module)


@functools.cache
def called(config: schema.Gpt, block_size: int) -> Any:
    module, params = made(config, block_size)
    forward = jax.jit(lambda p, x: module.bind(p, {}, None)(x))
    return lambda x, params=params: np.asarray(forward(params, x))


def outputs(config: schema.Gpt, x: Any, block_size: int = 8) -> np.ndarray:
    return called(config, block_size)(x)


# ---------------------------------------------------------------- what it computes


@FORMS
def test_it_computes_what_numpy_computes(config: schema.Gpt) -> None:
    x, params = tokens(2), made(config)[1]
    y = outputs(config, x)
    assert y.shape == (2, 8, 5)
    np.testing.assert_allclose(y, gpt_in_numpy(x, params, config), rtol=2e-5, atol=2e-5)
    wrong: list[dict[str, Any]] = [{"causal": False}, {"scale": 2.0}]
    wrong += [{"first_place": 1}] if config.positions == "rotary" else []
    wrong += [{"neighbours_share": False}] if config.kv_heads == 2 else []
    wrong += [{"gate_is_gate": False}] if config.activation == "swiglu" else []
    for change in wrong:  # the control: each part shows
        assert not np.allclose(y, gpt_in_numpy(x, params, config, **change), atol=1e-3), change


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_the_hidden_layer_is_its_formula(activation: str) -> None:
    config = gpt(activation=activation, mlp_width=6)
    module = ModuleDef(lambda rngs: Hidden(config, rngs=rngs))
    params = arrays_apart(module, 1.0)
    x = formula((2, 3, 8), 0.2, 1.0)
    up = x.astype(np.float64) @ params["up.kernel"]
    assert ("gate.kernel" in params) is (activation == "swiglu")
    gate = x.astype(np.float64) @ params.get("gate.kernel", params["up.kernel"])
    forms = {
        "gelu": gelu(up),
        "gelu by the error function": up * np.vectorize(lambda v: 0.5 * (1 + math.erf(v / 2**0.5)))(up),
        "swiglu": silu(gate) * up,
        "swapped": gate * silu(up) if activation == "swiglu" else silu(up),
        "geglu": gelu(gate) * up,
        "ungated": silu(up),
    }
    y = run_eval(module, params, {}, x)
    for name, value in forms.items():
        close = np.allclose(y, value @ params["down.kernel"], rtol=2e-5, atol=2e-5)
        assert close is (name == activation), name


@pytest.mark.parametrize(
    ("width", "activation", "mlp_width", "expected"),
    [
        (128, "gelu", None, 512),
        (128, "swiglu", None, 344),  # 341.3 in whole 8s
        (96, "swiglu", None, 256),
        (4, "swiglu", None, 16),
        (128, "gelu", 100, 100),
        (128, "swiglu", 100, 100),
    ],
)
def test_width_of_the_hidden_layer(width: int, activation: str, mlp_width: int | None, expected: int) -> None:
    module = module_of(gpt(width=width, activation=activation, mlp_width=mlp_width))
    assert tuple(module.params["blocks.0.hidden.down.kernel"].shape) == (expected, width)
    inner = {n.split(".")[3]: tuple(p.shape) for n, p in module.params.items() if n.startswith("blocks.0.hidden.")}
    names = ("gate", "up") if activation == "swiglu" else ("up",)
    assert inner == dict.fromkeys(names, (width, expected)) | {"down": (expected, width)}


# ---------------------------------------------------------------- what a token sees


@pytest.mark.parametrize("config", [LEARNED, ROTARY], ids=["learned", "rotary"])
@pytest.mark.parametrize("place", [0, 3, 7])
def test_a_changed_token_changes_no_output_before_it_and_every_one_from_it_on(config: schema.Gpt, place: int) -> None:
    x = np.asarray(tokens(2)).copy()
    before = outputs(config, x)
    x[:, place] = (x[:, place] + 1) % 5
    after = outputs(config, x)
    np.testing.assert_array_equal(after[:, :place], before[:, :place])
    moved = np.abs(after - before).max((0, 2))
    assert (moved[place:] > 1e-4).all()  # the control


def test_a_text_shorter_than_the_block_is_the_beginning_of_a_longer_one() -> None:
    for config in (LEARNED, ROTARY):
        x = tokens(2)
        np.testing.assert_allclose(outputs(config, x[:, :3]), outputs(config, x)[:, :3], rtol=1e-5, atol=1e-5)
        assert not np.allclose(outputs(config, x[:, 1:4]), outputs(config, x)[:, 1:4], atol=1e-3)  # the control


def test_rows_do_not_see_each_other() -> None:
    x = np.asarray(tokens(2)).copy()
    before = outputs(ROTARY, x)
    x[0] = (x[0] + 1) % 5
    after = outputs(ROTARY, x)
    np.testing.assert_array_equal(after[1], before[1])
    assert not np.allclose(after[0], before[0], atol=1e-3)  # the control


# ---------------------------------------------------------------- rotary positions


def queries_and_keys() -> tuple[jax.Array, jax.Array]:
    return jnp.asarray(formula((1, 6, 2, 8), 0.1, 1.0)), jnp.asarray(formula((1, 6, 2, 8), 0.9, 1.0))


def products(q: Any, k: Any) -> np.ndarray:
    return np.einsum("bqhd,bkhd->bhqk", np.asarray(q, np.float64), np.asarray(k, np.float64))


@pytest.mark.parametrize("shift", [1, 37, 500])
def test_rotary_products_depend_on_the_distance_alone(shift: int) -> None:
    (q, k), places = queries_and_keys(), jnp.arange(6)
    here = products(rotate(q, places), rotate(k, places))
    moved = products(rotate(q, places + shift), rotate(k, places + shift))
    np.testing.assert_allclose(moved, here, atol=2e-4 if shift == 500 else 2e-5)
    one_side = products(rotate(q, places + shift), rotate(k, places))
    assert not np.allclose(one_side, here, atol=0.1)  # the control
    assert not np.allclose(products(q, k), here, atol=0.1)


def test_rotary_turns_pairs_of_the_two_halves_and_keeps_lengths() -> None:
    q, _ = queries_and_keys()
    places = jnp.array([0, 1, 2, 5, 9, 100])
    turned = np.asarray(rotate(q, places))
    z = np.asarray(q[..., :4]) + 1j * np.asarray(q[..., 4:])
    angle = np.asarray(places)[:, None] * np.array([1.0, 0.1, 0.01, 0.001])  # 10,000^(-i/4)
    expected = z * np.exp(1j * angle)[None, :, None]
    np.testing.assert_allclose(turned[..., :4], expected.real, atol=2e-5)
    np.testing.assert_allclose(turned[..., 4:], expected.imag, atol=2e-5)
    np.testing.assert_array_equal(turned[:, 0], q[:, 0])
    np.testing.assert_allclose(np.linalg.norm(turned, axis=-1), np.linalg.norm(q, axis=-1), rtol=1e-5)
    neighbours = np.asarray(q[..., ::2]) + 1j * np.asarray(q[..., 1::2])  # the control: the other convention
    assert not np.allclose(turned[..., ::2], (neighbours * np.exp(1j * angle)[None, :, None]).real, atol=0.1)


def test_angles_are_fp32_under_bfloat16() -> None:
    """Place 1001 does not exist in bfloat16: it would be turned as place 1000."""
    q = queries_and_keys()[0].astype(jnp.bfloat16)
    place = jnp.full(6, 1001)
    turned = rotate(q, place)
    assert turned.dtype == jnp.bfloat16
    exact, rounded = (np.asarray(rotate(q.astype(jnp.float32), p)) for p in (place, jnp.full(6, 1000)))
    np.testing.assert_allclose(np.asarray(turned, np.float32), exact, atol=0.02)
    assert not np.allclose(exact, rounded, atol=0.3)  # the control
    assert float(jnp.bfloat16(1001)) == 1000.0


# ---------------------------------------------------------------- numbers of parameters


def parameters(c: schema.Gpt, block: int, vocabulary: int) -> int:
    """By the formula."""
    d, head = c.width, c.width // c.heads
    kv = (c.kv_heads or c.heads) * head
    hidden = c.mlp_width or (4 * d if c.activation == "gelu" else math.ceil(d / 3) * 8)
    up = hidden * (2 if c.activation == "swiglu" else 1)
    bias = int(c.bias)
    norm = d * (1 + (c.norm == "layer" and c.bias))
    dense = lambda i, o: i * o + bias * o  # noqa: E731
    block_size = 2 * norm + dense(d, d + 2 * kv) + dense(d, d) + dense(d, up) + dense(hidden, d)
    total = vocabulary * d + c.layers * block_size + norm
    total += block * d if c.positions == "learned" else 0
    return total + (0 if c.tie_embeddings else dense(d, vocabulary))


SIZES = {
    # Radford et al. 2019, "124M": the sum that every reimplementation gives.
    "gpt2": (
        {"layers": 12, "heads": 12, "width": 768, "positions": "learned", "norm": "layer", "activation": "gelu"}
        | {"bias": True},
        (1024, 50257),
        124_439_808,
    ),
    # Zhang et al. 2024, "TinyLlama 1.1B".
    "tinyllama": (
        {"layers": 22, "heads": 32, "kv_heads": 4, "width": 2048, "mlp_width": 5632, "tie_embeddings": False},
        (2048, 32000),
        1_100_048_384,
    ),
    "default": ({"layers": 4, "heads": 4, "width": 128}, (64, 65), 800_000),
    "grouped": ({"kv_heads": 1, "bias": True, "norm": "layer"}, (8, 5), None),
    "untied": ({"tie_embeddings": False, "bias": True}, (8, 5), None),
}


@pytest.mark.parametrize("name", SIZES)
def test_number_of_parameters(name: str) -> None:
    fields, (block, vocabulary), known = SIZES[name]
    config = gpt(**fields)
    found = count(module_of(config, (block,), vocabulary).params)
    assert found == parameters(config, block, vocabulary)
    assert known is None or found == known


def test_a_rotary_model_has_no_table_of_places_and_a_learned_one_has_a_row_for_each() -> None:
    assert not [name for name in made(ROTARY)[0].params if "position" in name]
    assert tuple(made(LEARNED, 12)[0].params["position_embed.embedding"].shape) == (12, 8)


@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("bias", [False, True])
def test_biases_are_in_every_dense_layer_and_layer_norm_or_nowhere(norm: str, bias: bool) -> None:
    module = module_of(gpt(norm=norm, bias=bias, layers=1, tie_embeddings=False))
    found = {name.removesuffix(".bias") for name in module.params if name.endswith("bias")}
    dense = {name.removesuffix(".kernel") for name in module.params if name.endswith("kernel")}
    norms = {name.removesuffix(".scale") for name in module.params if name.endswith("scale")}
    assert (len(dense), len(norms)) == (6, 3)
    assert found == ((dense | (norms if norm == "layer" else set())) if bias else set())


# ---------------------------------------------------------------- groups of heads


def test_as_many_kv_heads_as_heads_is_the_same_as_none() -> None:
    one, other = made(gpt(kv_heads=2)), made(gpt())
    assert {n: p.shape for n, p in one[0].params.items()} == {n: p.shape for n, p in other[0].params.items()}
    np.testing.assert_array_equal(outputs(gpt(kv_heads=2), tokens(2)), outputs(gpt(), tokens(2)))
    fewer = {n: p.shape for n, p in made(gpt(kv_heads=1))[0].params.items()}
    differ = {n for n, p in other[0].params.items() if fewer[n] != p.shape}
    assert differ == {"blocks.0.attention.qkv.kernel", "blocks.1.attention.qkv.kernel"}  # the control


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_shared_kv_heads_are_full_attention_with_the_shared_heads_written_out(kv_heads: int) -> None:
    grouped, full = gpt(heads=4, kv_heads=kv_heads), gpt(heads=4)
    params = made(grouped)[1]

    def written_out(group_by: Any) -> dict[str, Any]:
        wide = dict(params)
        for i in range(2):
            name = f"blocks.{i}.attention.qkv.kernel"
            groups = params[name].reshape(8, kv_heads, 4 // kv_heads + 2, 2)
            q, k, v = groups[:, :, :-2].reshape(8, 4, 2), groups[:, :, -2], groups[:, :, -1]
            wide[name] = np.stack([q, group_by(k), group_by(v)], 2).reshape(8, -1)
        return wide

    y, forward = outputs(grouped, tokens(2)), called(full, 8)
    repeated = written_out(lambda x: np.repeat(x, 4 // kv_heads, 1))
    np.testing.assert_allclose(y, forward(tokens(2), repeated), rtol=1e-5, atol=1e-5)
    if kv_heads == 2:  # the control: neighbouring heads share, not every second one
        tiled = forward(tokens(2), written_out(lambda x: np.tile(x, (1, 2, 1))))
        assert not np.allclose(y, tiled, atol=1e-3)


# ---------------------------------------------------------------- embeddings


def test_tied_embeddings_are_one_array_whose_gradient_has_both_parts() -> None:
    tied, untied = module_of(gpt(layers=1)), module_of(gpt(layers=1, tie_embeddings=False))
    assert set(untied.params) - set(tied.params) == {"head.kernel"}
    params = arrays_apart(tied)
    table = params["token_embed.embedding"]

    def gradients(module: ModuleDef, params: Any) -> Any:
        def loss(p: Any) -> Any:
            y = module.bind(p, {}, None)(tokens())
            return jnp.sum(jnp.sin(y)), y

        return jax.jit(jax.grad(loss, has_aux=True))(params)

    grads, y = gradients(tied, params)
    apart, same = gradients(untied, params | {"head.kernel": table.T})
    np.testing.assert_allclose(y, same, rtol=1e-5, atol=1e-5)
    as_input, as_output = apart["token_embed.embedding"], apart["head.kernel"].T
    np.testing.assert_allclose(grads["token_embed.embedding"], as_input + as_output, rtol=1e-4, atol=1e-4)
    assert min(float(np.abs(as_input).max()), float(np.abs(as_output).max())) > 0.1  # neither is nothing


# ---------------------------------------------------------------- the first weights


def test_first_weights_have_the_sd_of_the_config_and_last_layers_of_branches_less() -> None:
    config = gpt(layers=3, width=256, heads=2, init_sd=0.05, positions="learned", tie_embeddings=False)
    params, _ = fresh(module_of(config, (256,), 256))
    for name, value in params.items():
        x = np.asarray(value, np.float64)
        if name.endswith("scale"):
            assert (x == 1).all()
            continue
        last = name.endswith(("attention.out.kernel", "hidden.down.kernel"))
        # 65,536 numbers or more: the standard error of a deviation is 0.28 %.
        assert x.std() == pytest.approx(0.05 / math.sqrt(6) if last else 0.05, rel=0.0125), name
        assert abs(x.mean()) < 4 * x.std() / math.sqrt(x.size), name
        assert np.abs(x).max() > 3.5 * x.std(), name  # a normal, not one that is cut at two deviations
    lasts = [name for name in params if name.endswith(("out.kernel", "down.kernel"))]
    assert len(lasts) == 2 * 3


def test_the_first_loss_is_that_of_knowing_nothing() -> None:
    """Against targets that no model can know."""
    module = module_of(gpt(layers=1, width=64), (32,), 50)
    params = jax.tree.map(np.asarray, fresh(module, 1)[0])
    rng = np.random.default_rng(0)
    x, targets = rng.integers(0, 50, (2, 8, 32)).astype(np.int32)
    forward = jax.jit(lambda p: jax.nn.log_softmax(module.bind(p, {}, None)(x)))

    def loss(p: Any) -> float:
        return -float(np.take_along_axis(np.asarray(forward(p)), targets[..., None], -1).mean())

    assert loss(params) == pytest.approx(math.log(50), abs=0.05)
    wide = {name: x if name.endswith("scale") else 25 * x for name, x in params.items()}  # init_sd = 0.5
    assert loss(wide) > math.log(50) + 1.0  # the control


# ---------------------------------------------------------------- dropout


def test_both_branches_of_a_block_are_dropped_apart_and_scaled() -> None:
    """Each branch gives 1 for everything: the sum is that of two draws of 0 or 1 / (1 - p)."""
    config = gpt(dropout=0.25, bias=True, width=64)
    module = ModuleDef(lambda rngs: Block(config, rngs=rngs))
    params = {name: np.zeros(p.shape, np.float32) for name, p in module.params.items()}
    params |= {name: np.ones(64, np.float32) for name in ("attention.out.bias", "hidden.down.bias")}
    x = np.zeros((8, 20, 64), np.float32)
    y, _ = run_train(module, params, {}, x)
    one = np.float32(1 / 0.75)
    assert np.unique(y).tolist() == [0.0, one, 2 * one]
    # 10,240 draws: three standard errors of a share near 0.4 are 0.0146. One mask for both would give no `one`.
    for value, share in ((0.0, 0.0625), (one, 0.375), (2 * one, 0.5625)):
        assert (y == value).mean() == pytest.approx(share, abs=0.0148)
    assert (run_eval(module, params, {}, x) == 2).all()


def test_embeddings_are_dropped() -> None:
    config = gpt(layers=1, dropout=0.25, tie_embeddings=False, width=64)
    module = module_of(config, (32,), 64)
    params = {name: np.zeros(p.shape, np.float32) for name, p in module.params.items()}
    params |= {"head.kernel": np.eye(64, dtype=np.float32), "norm.scale": np.ones(64, np.float32)}
    params["token_embed.embedding"] = np.ones((64, 64), np.float32)
    x = tokens(8, 32)
    y, _ = run_train(module, params, {}, x)
    assert (y == 0).mean() == pytest.approx(0.25, abs=0.0102)  # 16,384 draws
    assert (run_eval(module, params, {}, x) > 0.99).all()


# ---------------------------------------------------------------- a few tokens at a time

CACHED = pytest.mark.parametrize(
    "config", [LEARNED, ROTARY, gpt(heads=4, kv_heads=1)], ids=["learned", "rotary-grouped", "rotary-one-kv-head"]
)


@functools.cache
def decoder(config: schema.Gpt) -> Any:
    """(decode of a model for 12 tokens, an empty cache for 2 rows, its arrays)."""
    module, params = made(config, 12)

    @jax.jit
    def decode(p: Any, x: Any, cache: Any, at: Any) -> Any:
        return module.bind(p, {}, None).decode(x, cache, at)

    return decode, module.bind(params, {}, None).empty_cache(2), params


def in_pieces(config: schema.Gpt, x: Any, sizes: tuple[int, ...], cache: Any = None) -> tuple[np.ndarray, Any]:
    decode, empty, params = decoder(config)
    cache, parts, at = empty if cache is None else cache, [], 0
    for size in sizes:
        logits, cache = decode(params, x[:, at : at + size], cache, at)
        parts.append(np.asarray(logits))
        at += size
    return np.concatenate(parts, 1), cache


@CACHED
@pytest.mark.parametrize("sizes", [(4, 1, 1, 4, 1, 1), (1,) * 12, (4, 4, 4)], ids=["mixed", "ones", "fours"])
def test_decoding_in_pieces_gives_what_the_whole_text_gives(config: schema.Gpt, sizes: tuple[int, ...]) -> None:
    x = tokens(2, 12)
    whole = outputs(config, x, 12)
    y, _ = in_pieces(config, x, sizes)
    np.testing.assert_allclose(y, whole, rtol=1e-5, atol=1e-5)
    decode, empty, params = decoder(config)
    forgotten, _ = decode(params, x[:, 8:], empty, 8)  # the control: without what came before
    assert not np.allclose(forgotten, whole[:, 8:], atol=1e-3)


@CACHED
def test_decoding_at_another_place_gives_something_else(config: schema.Gpt) -> None:
    x = tokens(2, 12)
    decode, _, params = decoder(config)
    cache = in_pieces(config, x, (4, 4))[1]
    wrong, _ = decode(params, x[:, 8:], cache, 7)
    after, _ = decode(params, x[:, 8:], cache, 8)
    np.testing.assert_allclose(after, outputs(config, x, 12)[:, 8:], rtol=1e-5, atol=1e-5)
    assert not np.allclose(wrong, after, atol=1e-3)


@CACHED
def test_what_lies_behind_in_the_cache_is_never_seen(config: schema.Gpt) -> None:
    """A cache full of something else, and a beginning that was filled up to a longer one."""
    x = np.asarray(tokens(2, 12))
    empty = decoder(config)[1]
    full = jax.tree.map(lambda c: 5.0 + c, empty)
    sizes = (4, 1, 1)
    np.testing.assert_array_equal(in_pieces(config, x, sizes, full)[0], in_pieces(config, x, sizes)[0])
    decode, _, params = decoder(config)
    padded = np.concatenate([x[:, :2], (x[:, 2:4] + 1) % 5], 1)  # two tokens, and two that are not of the text
    _, cache = decode(params, padded, empty, 0)
    whole = outputs(config, x, 12)
    for at in range(2, 6):
        logits, cache = decode(params, x[:, at : at + 1], cache, at)
        np.testing.assert_allclose(logits[:, 0], whole[:, at], rtol=1e-5, atol=1e-5)
    logits, _ = decode(params, x[:, 4:5], decode(params, padded, empty, 0)[1], 4)
    assert not np.allclose(logits[:, 0], whole[:, 4], atol=1e-3)  # the control: there they are seen


def test_a_cache_has_the_heads_of_keys_and_the_length_of_the_block() -> None:
    module, params = made(ROTARY, 12)
    model = module.bind(params, {}, None)
    cache = model.empty_cache(3, jnp.bfloat16)
    assert [(k.shape, v.shape) for k, v in cache] == [((3, 12, 2, 4), (3, 12, 2, 4))] * 2
    assert {x.dtype for x in jax.tree.leaves(cache)} == {jnp.dtype("bfloat16")}
    assert model.empty_cache(1)[0][0].dtype == jnp.float32
    assert not any(np.asarray(x, np.float32).any() for x in jax.tree.leaves(cache))
    y, after = in_pieces(ROTARY, tokens(2, 12), (4,))
    assert y.shape == (2, 4, 5)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == jax.tree.map(
        lambda x: (x.shape, x.dtype), decoder(ROTARY)[1]
    )
    for kept in jax.tree.leaves(after):
        filled = np.abs(np.asarray(kept)).max((0, 2, 3)) > 0
        assert filled.tolist() == [True] * 4 + [False] * 8


# ---------------------------------------------------------------- bfloat16


@pytest.mark.parametrize("config", [LEARNED, ROTARY], ids=["learned", "rotary"])
def test_bfloat16_is_close_to_fp32_in_call_and_decode(config: schema.Gpt) -> None:
    module, params = made(config)
    half = cast_floats(jax.tree.map(jnp.asarray, params), jnp.bfloat16)
    exact = outputs(config, tokens(2))

    def both(p: Any, x: Any) -> Any:
        model = module.bind(p, {}, None)
        y = model(x)
        first, cache = model.decode(x[:, :5], model.empty_cache(2, jnp.bfloat16), 0)
        second, _ = model.decode(x[:, 5:], cache, 5)
        return y, jnp.concatenate([first, second], 1)

    y, decoded = jax.jit(both)(half, tokens(2))
    assert y.dtype == decoded.dtype == jnp.bfloat16
    scale = np.abs(exact).max()
    for found in (y, decoded):
        error = np.abs(np.asarray(found, np.float64) - exact)
        assert error.max() < 0.05 * scale
        assert error.max() > 1e-4 * scale  # the control: it is another arithmetic


# ---------------------------------------------------------------- weight decay


def test_weight_decay_takes_every_dense_kernel_and_nothing_else() -> None:
    module = module_of(gpt(bias=True, norm="layer", positions="learned", tie_embeddings=False))
    mask = decays(module.params)
    taken = {name for name, yes in mask.items() if yes}
    parts = ("attention.qkv", "attention.out", "hidden.gate", "hidden.up", "hidden.down")
    assert taken == {f"blocks.{i}.{part}.kernel" for i in range(2) for part in parts} | {"head.kernel"}
    left = set(mask) - taken
    assert {"token_embed.embedding", "position_embed.embedding", "norm.scale", "blocks.0.attention.qkv.bias"} <= left
    assert {name.rpartition(".")[2] for name in left} == {"embedding", "scale", "bias"}


# ---------------------------------------------------------------- configs that cannot be


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"heads": 3}, "model.heads: 3 does not divide model.width 128"),
        ({"heads": 4, "kv_heads": 3}, "model.kv_heads: 3 does not divide model.heads 4"),
        ({"heads": 4, "kv_heads": 8}, "model.kv_heads: 8 does not divide model.heads 4"),
        (
            {"heads": 4, "width": 12},
            "model.heads: 4 heads of 3 features each; model.positions=rotary needs an even number",
        ),
    ],
)
def test_heads_that_do_not_fit_are_refused_in_one_line(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load({"model": {"kind": "gpt", **fields}})
    assert str(caught.value) == message


@pytest.mark.parametrize(
    "fields",
    [{"heads": 2}, {"heads": 4, "kv_heads": 2}, {"kv_heads": 1}, {"heads": 4, "width": 12, "positions": "learned"}],
)
def test_heads_that_fit_are_taken(fields: dict[str, Any]) -> None:
    """The control of the test above; an odd head is none the worse for learned places."""
    config = load({"model": {"kind": "gpt", **fields}}).model
    assert isinstance(config, schema.Gpt)
    module = module_of(config, (8,), 5)
    out = jax.eval_shape(lambda p, x: module.bind(p, {}, None)(x), module.params, tokens(2))
    assert out.shape == (2, 8, 5)


@pytest.mark.parametrize("field", ["layers", "heads", "kv_heads", "width", "mlp_width", "init_sd"])
def test_nothing_of_a_size_of_zero_is_taken(field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load({"model": {"kind": "gpt", field: 0}})
    assert str(caught.value).startswith(f"model.{field}: 0 is not valid")
    assert "\n" not in str(caught.value)
