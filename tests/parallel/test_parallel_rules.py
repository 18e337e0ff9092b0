"""The rules of sharding, on a mesh without devices."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from jaxtrain.config import ConfigError, load, schema
from jaxtrain.core.module import ModuleDef
from jaxtrain.core.optimizer import make_optimizer
from jaxtrain.core.state import init_state
from jaxtrain.models import MODELS
from jaxtrain.parallel import mesh as meshes
from jaxtrain.parallel import rules


def mesh_of(**sizes: int) -> Any:
    return AbstractMesh(tuple(sizes.get(axis, 1) for axis in meshes.AXES), meshes.AXES)


def params_of(config: Any, shape: tuple[int, ...] = (16,), outputs: int = 20) -> dict[str, Any]:
    return ModuleDef(lambda rngs: MODELS[config.kind].make(config, shape, outputs, rngs=rngs)).params


GPT = schema.Gpt(layers=1, heads=4, kv_heads=2, width=64, bias=True, tie_embeddings=False)
MLP = schema.Mlp(hidden=(64, 32, 128))


def test_tensor_splits_columns_then_rows() -> None:
    specs = rules.parameter_specs("gpt", params_of(GPT), mesh_of(tensor=2))
    split = {name: spec for name, spec in specs.items() if spec != P()}
    block = "blocks.0."
    columns = {f"{block}{name}": P(None, "tensor") for name in ("attention.qkv.kernel", "hidden.gate.kernel")}
    columns |= {f"{block}hidden.up.kernel": P(None, "tensor"), "head.kernel": P(None, "tensor")}
    biases = {f"{block}{name}.bias": P("tensor") for name in ("attention.qkv", "hidden.gate", "hidden.up")}
    rows = {f"{block}{name}.kernel": P("tensor") for name in ("attention.out", "hidden.down")}
    assert split == columns | biases | rows | {"token_embed.embedding": P("tensor")}


def test_an_embedding_whose_vocabulary_does_not_divide_stays_whole() -> None:
    specs = rules.parameter_specs("gpt", params_of(GPT, outputs=65), mesh_of(tensor=2))
    assert specs["token_embed.embedding"] == specs["head.kernel"] == P()


def test_layers_of_an_mlp_alternate() -> None:
    specs = rules.parameter_specs("mlp", params_of(MLP), mesh_of(tensor=4))
    assert specs["layers.0.kernel"] == specs["layers.2.kernel"] == P(None, "tensor")
    assert specs["layers.0.bias"] == P("tensor")
    assert specs["layers.1.kernel"] == P("tensor")
    assert specs["layers.1.bias"] == specs["head.kernel"] == P()


def test_fsdp_splits_the_largest_axis_that_divides_and_is_free() -> None:
    specs = rules.parameter_specs("gpt", params_of(GPT), mesh_of(fsdp=4))
    assert specs["blocks.0.attention.qkv.kernel"] == P(None, "fsdp")  # 64 x 128
    assert specs["blocks.0.hidden.down.kernel"] == P("fsdp")  # 176 x 64
    assert specs["norm.scale"] == specs["blocks.0.hidden.up.bias"] == P()  # too small to be worth it
    both = rules.parameter_specs("gpt", params_of(GPT), mesh_of(fsdp=4, tensor=2))
    assert both["blocks.0.attention.qkv.kernel"] == P("fsdp", "tensor")
    assert both["blocks.0.attention.out.kernel"] == P("tensor", "fsdp")
    odd = {"a": jax.ShapeDtypeStruct((1023, 6), jnp.float32), "b": jax.ShapeDtypeStruct((1023, 8), jnp.float32)}
    assert rules.parameter_specs("custom", odd, mesh_of(fsdp=4)) == {"a": P(), "b": P(None, "fsdp")}


@pytest.mark.parametrize(
    "optimizer",
    [
        *(schema.Adamw(), schema.Muon(), schema.Lion(), schema.Lamb(), schema.Momentum(), schema.Adafactor()),
        *(schema.Adamw(moment_dtype="int8"), schema.Muon(moment_dtype="int8")),
    ],
    ids=lambda c: f"{c.kind} {getattr(c, 'moment_dtype', '')}".strip(),
)
def test_moments_and_averages_are_split_like_their_parameter(optimizer: Any) -> None:
    params, mesh = params_of(GPT), mesh_of(fsdp=2, tensor=2)
    specs = rules.parameter_specs("gpt", params, mesh)
    make = make_optimizer(optimizer)
    state = jax.eval_shape(lambda p: init_state(p, {}, make, ema=True, loss_scale=1.0), dict(params))
    shardings = rules.state_shardings(state, params, specs, mesh)
    big = 64 * 176 * 4
    for path, (leaf, sharding) in zip(
        (jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(state)),
        zip(jax.tree.leaves(state), jax.tree.leaves(shardings), strict=True),
        strict=True,
    ):
        held = np.prod(sharding.shard_shape(leaf.shape), dtype=int) * leaf.dtype.itemsize
        whole = np.prod(leaf.shape, dtype=int) * leaf.dtype.itemsize
        assert held == whole // 4 if whole == big else held <= whole, path
    names = [n for n in params if n.endswith("kernel")]
    assert all(shardings["ema"]["params"][n].spec == shardings["params"][n].spec == specs[n] for n in names)
    assert shardings["step"].spec == P()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"model.heads": 6, "model.kv_heads": 2, "model.width": 48, "mesh.tensor": 4},
            "mesh.tensor: 4 does not divide model.heads=6 and model.kv_heads=2; allowed: 1, 2",
        ),
        ({"mesh.context": 3}, "mesh.context: 3 does not divide data.block_size=16; allowed: 1, 2, 4, 8, 16"),
    ],
)
def test_what_does_not_divide_is_named_with_what_would(keys: dict[str, Any], message: str) -> None:
    config = load({"name": "t", "model": {"kind": "gpt"}, "data": {"kind": "text", "path": "x"}}, keys.items())
    with pytest.raises(ConfigError) as caught:
        rules.check(config, params_of(config.model), (16,))
    assert str(caught.value) == message


def test_a_kind_without_rules_refuses_tensor_and_one_without_tokens_context() -> None:
    cnn = load({"name": "t", "model": {"kind": "cnn"}, "data": {"kind": "digits"}}, {"mesh.tensor": 2}.items())
    with pytest.raises(
        ConfigError, match=r"mesh\.tensor: 2 needs rules, which model\.kind=cnn has not; allowed: 1, or"
    ):
        rules.check(cnn, {}, (8, 8, 1))
    mlp = load({"name": "t", "model": {"kind": "mlp"}, "data": {"kind": "digits"}}, {"mesh.context": 2}.items())
    with pytest.raises(ConfigError, match=r"model\.kind=mlp does not take; allowed: 1, or model\.kind gpt$"):
        rules.check(mlp, {}, (8, 8, 1))


def test_large_arrays_that_nothing_divides_are_named() -> None:
    mesh = mesh_of(fsdp=4)
    shapes = {"a": (1 << 10, 1 << 9), "b": ((1 << 10) + 1, (1 << 9) + 1), "c": (7, 7)}
    params = {n: jax.ShapeDtypeStruct(s, jnp.float32) for n, s in shapes.items()}
    specs = rules.parameter_specs("custom", params, mesh)
    split = rules.state_shardings(params, params, specs, mesh)
    laid = {n: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=split[n]) for n, p in params.items()}
    assert rules.large_and_whole(laid, mesh) == ["b"]
    assert rules.large_and_whole(laid, mesh_of(data=4)) == []
