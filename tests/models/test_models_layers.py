"""Initialisers, activations, normalisation by name, dropout, stochastic depth, rematerialisation."""

from __future__ import annotations

from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from models_helpers import (
    OUTPUTS,
    SMALL,
    allowed,
    arrays_by_formula,
    cnn,
    convolutions_as_they_come,
    formula,
    fresh,
    gpt,
    images,
    inputs_of,
    mlp,
    module_of,
    primitives,
    resnet,
    run_eval,
    run_train,
    tcn,
)

from jaxtrain.config import fields
from jaxtrain.core.module import ModuleDef
from jaxtrain.models import MODELS
from jaxtrain.models import gpt as gpt_model
from jaxtrain.models import tcn as tcn_model
from jaxtrain.models.layers import ACTIVATIONS, INITIALISERS, NORMS, Dense, LayerNorm, RMSNorm, call_block
from jaxtrain.models.resnet import Block

FAN_IN, FAN_OUT = 300, 200

# ---------------------------------------------------------------- initialisers

# name: (standard deviation, largest absolute value); a normal is cut at two of its own deviations.
CUT = 2.0 / 0.87962566103423978
STATISTICS = {
    "he_normal": ((2 / FAN_IN) ** 0.5, CUT * (2 / FAN_IN) ** 0.5),
    "xavier_normal": ((2 / (FAN_IN + FAN_OUT)) ** 0.5, CUT * (2 / (FAN_IN + FAN_OUT)) ** 0.5),
    "lecun_normal": ((1 / FAN_IN) ** 0.5, CUT * (1 / FAN_IN) ** 0.5),
    "he_uniform": ((2 / FAN_IN) ** 0.5, (6 / FAN_IN) ** 0.5),
    "xavier_uniform": ((2 / (FAN_IN + FAN_OUT)) ** 0.5, (6 / (FAN_IN + FAN_OUT)) ** 0.5),
    "lecun_uniform": ((1 / FAN_IN) ** 0.5, (3 / FAN_IN) ** 0.5),
    "truncated_normal": (0.02 * 0.87962566103423978, 0.04),
}


@pytest.fixture(scope="module")
def kernels() -> dict[str, np.ndarray]:
    """The kernel [300, 200] of each initialiser, through a real model."""
    made = {}
    for name in INITIALISERS:
        params, _ = fresh(module_of(mlp(hidden=(FAN_OUT,), init=name), shape=(FAN_IN,)))
        made[name] = np.asarray(params["layers.0.kernel"], np.float64)
    return made


def test_table_and_config_name_the_same_initialisers_activations_and_norms() -> None:
    assert set(get_args(fields.Initialiser)) == INITIALISERS.keys() == {*STATISTICS, "orthogonal", "zeros"}
    assert set(get_args(fields.Activation)) == ACTIVATIONS.keys()
    assert set(get_args(fields.Norm)) == NORMS.keys()


@pytest.mark.parametrize("name", STATISTICS)
def test_initialiser_has_the_deviation_and_the_bound_of_its_definition(
    name: str, kernels: dict[str, np.ndarray]
) -> None:
    kernel, (sd, bound) = kernels[name], STATISTICS[name]
    # 60,000 numbers: the standard error of a deviation is about 0.3 %, of the mean 0.4 % of it.
    assert kernel.std() == pytest.approx(sd, rel=0.01)
    assert abs(kernel.mean()) < 0.015 * sd
    assert bound * 0.995 < np.abs(kernel).max() <= bound * (1 + 1e-6)
    others = {other for other, (value, _) in STATISTICS.items() if abs(value / sd - 1) > 0.02}
    assert all(kernel.std() != pytest.approx(STATISTICS[o][0], rel=0.01) for o in others)  # the control


@pytest.mark.parametrize("kind", ["normal", "uniform"])
def test_a_uniform_is_flat_and_a_normal_is_not(kind: str, kernels: dict[str, np.ndarray]) -> None:
    kernel = kernels[f"he_{kind}"]
    inner = float((np.abs(kernel) < np.abs(kernel).max() / 2).mean())
    # Half of a uniform lies within half of its bound; of a normal cut at 2 deviations 0.6827 / 0.9545.
    assert inner == pytest.approx(0.5 if kind == "uniform" else 0.6827 / 0.9545, abs=0.01)


def test_orthogonal_kernels_keep_lengths(kernels: dict[str, np.ndarray]) -> None:
    gram = kernels["orthogonal"].T @ kernels["orthogonal"]
    np.testing.assert_allclose(gram, np.eye(FAN_OUT), atol=1e-5)
    other = kernels["he_normal"].T @ kernels["he_normal"]
    assert not np.allclose(other, np.eye(FAN_OUT), atol=0.1)


def test_zeros_are_zeros(kernels: dict[str, np.ndarray]) -> None:
    assert (kernels["zeros"] == 0).all()
    assert all((kernel != 0).any() for name, kernel in kernels.items() if name != "zeros")


@pytest.mark.parametrize(
    "config",
    [
        mlp(norm="batch", init="zeros"),
        cnn(init="zeros"),
        resnet(init="zeros"),
        gpt(layers=1, bias=True, norm="layer"),
        tcn(norm="batch", init="zeros"),
    ],
    ids=["mlp", "cnn", "resnet", "gpt", "tcn"],
)
def test_biases_start_at_zero_scales_at_one_statistics_at_zero_and_one(config: Any) -> None:
    params, state = fresh(module_of(config))
    starts = {"bias": 0.0, "mean": 0.0, "scale": 1.0, "var": 1.0}
    seen = set()
    for name, value in (params | state).items():
        last = name.rpartition(".")[2]
        if last in starts:
            assert (np.asarray(value) == starts[last]).all(), name
            seen.add(last)
    assert "scale" in seen
    assert ("var" in seen) is (config.norm == "batch")


def test_fan_in_of_a_convolution_counts_its_window() -> None:
    for features in (16, 32):
        kernel = np.asarray(INITIALISERS["he_uniform"](jax.random.key(0), (3, 3, features, 32)))
        assert np.abs(kernel).max() == pytest.approx((6 / (9 * features)) ** 0.5, rel=0.01)


def test_the_seed_decides_the_arrays() -> None:
    module = module_of(mlp())
    a, b, c = (np.asarray(fresh(module, seed)[0]["head.kernel"]) for seed in (0, 0, 1))
    assert a.tobytes() == b.tobytes() != c.tobytes()


def test_no_two_layers_begin_with_the_same_kernel() -> None:
    params, _ = fresh(module_of(mlp(hidden=(16, 16, 16)), shape=(16,), outputs=16))
    kernels = [np.asarray(v).tobytes() for n, v in params.items() if n.endswith("kernel")]
    assert len(set(kernels)) == len(kernels) == 4


# ---------------------------------------------------------------- activations


def _gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3)))


IN_NUMPY = {
    "relu": lambda x: np.maximum(x, 0),
    "gelu": _gelu,
    "silu": lambda x: x / (1 + np.exp(-x)),
    "tanh": np.tanh,
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation_is_its_formula_inside_a_model(name: str) -> None:
    module = module_of(mlp(hidden=(9,), activation=name), shape=(9,), outputs=9)
    params = {
        n: np.eye(9, dtype=np.float32) if p.ndim == 2 else np.zeros(9, np.float32) for n, p in module.params.items()
    }
    x = np.linspace(-4, 4, 9).reshape(1, 9)
    y = run_eval(module, params, {}, x.astype(np.float32))
    np.testing.assert_allclose(y, IN_NUMPY[name](x), rtol=1e-5, atol=1e-6)
    for other in IN_NUMPY.keys() - {name}:
        assert not np.allclose(y, IN_NUMPY[other](x), atol=1e-3)


@pytest.mark.parametrize("kind", MODELS)
def test_every_kind_uses_the_activation_of_its_config(kind: str) -> None:
    def outputs(name: str) -> np.ndarray:
        module = module_of(SMALL[kind](activation=name))
        return run_eval(module, *arrays_by_formula(module), inputs_of(kind, 2))

    names = ("gelu", "swiglu") if kind == "gpt" else ("relu", "tanh")  # each formula of gpt: test_models_gpt.py
    assert set(allowed(kind, "activation")) == (set(names) if kind == "gpt" else ACTIVATIONS.keys())
    one, other = (outputs(name) for name in names)
    assert not np.allclose(one, other, atol=1e-3)


# ---------------------------------------------------------------- normalisation


def normalised(name: str, x: np.ndarray) -> np.ndarray:
    norm = NORMS[name](x.shape[-1], nnx.Rngs(0))
    return np.asarray(norm(jnp.asarray(x), None))


@pytest.mark.parametrize("shape", [(5, 8), (3, 4, 4, 8)])
def test_norms_are_their_formulas(shape: tuple[int, ...]) -> None:
    x = formula(shape, 0.1, 2.0) + np.arange(8, dtype=np.float32)
    wide = x.astype(np.float64)

    def standardised(axes: tuple[int, ...], values: np.ndarray, epsilon: float) -> np.ndarray:
        mean, var = values.mean(axes, keepdims=True), values.var(axes, keepdims=True)
        return (values - mean) / np.sqrt(var + epsilon)

    rows = tuple(range(1, len(shape) - 1))
    groups = wide.reshape(*shape[:-1], 2, 4)  # 8 channels: 2 groups of 4
    group = standardised((*rows, len(shape)), groups, 1e-6).reshape(shape)
    expected = {
        "batch": standardised(tuple(range(len(shape) - 1)), wide, 1e-5),
        "layer": standardised((len(shape) - 1,), wide, 1e-6),
        "group": group,
        "none": wide,
    }
    for name, value in expected.items():
        y = normalised(name, x)
        np.testing.assert_allclose(y, value, rtol=1e-4, atol=1e-4, err_msg=name)
        for other in expected.keys() - {name}:
            assert not np.allclose(y, expected[other], atol=1e-2), (name, other)  # the control


@pytest.mark.parametrize(
    ("features", "groups"), [(1, 1), (3, 1), (6, 1), (8, 2), (12, 2), (16, 4), (64, 16), (128, 32), (512, 32), (96, 16)]
)
def test_group_norm_has_32_groups_or_as_many_as_leave_4_channels_in_each(features: int, groups: int) -> None:
    norm: Any = NORMS["group"](features, nnx.Rngs(0))
    assert norm.norm.num_groups == groups
    assert features % groups == 0


def test_every_kind_allows_the_norms_of_the_table_but_gpt() -> None:
    others = set(MODELS) - {"gpt"}
    assert all(set(allowed(kind, "norm")) == NORMS.keys() for kind in others)
    assert set(allowed("gpt", "norm")) == {"layer", "rms"}


@pytest.mark.parametrize(("kind", "norm"), [(kind, norm) for kind in MODELS for norm in allowed(kind, "norm")])
def test_every_kind_takes_every_norm_that_it_allows(kind: str, norm: str) -> None:
    module = module_of(SMALL[kind](norm=norm))
    assert bool(module.model_state) is (norm == "batch")
    assert any(name.endswith("scale") for name in module.params) is (norm != "none")
    shape = jax.eval_shape(
        lambda p, s, x: module.bind(p, s, None)(x), module.params, module.model_state, inputs_of(kind, 2)
    )
    assert shape.shape == (2, *OUTPUTS[kind])


@pytest.mark.parametrize(("norm", "alone"), [("batch", False), ("group", True), ("layer", True), ("none", True)])
def test_in_training_only_batch_norm_lets_rows_see_each_other(norm: str, alone: bool) -> None:
    module = module_of(mlp(norm=norm))
    params, state = arrays_by_formula(module)
    x = np.asarray(images(4)).copy()
    y, _ = run_train(module, params, state, x)
    x[3] *= 2.0
    moved, _ = run_train(module, params, state, x)
    assert np.allclose(y[:3], moved[:3], atol=1e-6) is alone
    assert np.allclose(
        run_eval(module, params, state, x)[:3], run_eval(module, params, state, np.asarray(images(4)))[:3]
    )


# ---------------------------------------------------------------- dropout and stochastic depth

P = 0.3


def passing(dropout: float) -> tuple[ModuleDef, dict[str, np.ndarray]]:
    """An mlp whose output is its dropped hidden layer, and that layer is all ones."""
    module = module_of(mlp(hidden=(512,), dropout=dropout), shape=(4,), outputs=512)
    params = {
        "layers.0.kernel": np.zeros((4, 512), np.float32),
        "layers.0.bias": np.ones(512, np.float32),
        "head.kernel": np.eye(512, dtype=np.float32),
        "head.bias": np.zeros(512, np.float32),
    }
    return module, params


def test_dropout_zeroes_its_share_and_scales_the_rest() -> None:
    module, params = passing(P)
    x = np.zeros((40, 4), np.float32)
    y, _ = run_train(module, params, {}, x)
    assert np.unique(y).tolist() == [0.0, np.float32(1 / (1 - P))]
    # 20,480 draws: three standard errors are 0.0096.
    assert (y == 0).mean() == pytest.approx(P, abs=0.0097)
    assert y.mean() == pytest.approx(1.0, abs=0.0137)
    assert len({row.tobytes() for row in y}) == 40  # rows are dropped apart
    again, _ = run_train(module, params, {}, x)
    other, _ = run_train(module, params, {}, x, key=1)
    assert y.tobytes() == again.tobytes() != other.tobytes()


def test_dropout_is_off_in_evaluation_and_at_zero() -> None:
    x = np.zeros((3, 4), np.float32)
    module, params = passing(P)
    assert (run_eval(module, params, {}, x) == 1).all()
    module, params = passing(0.0)
    assert (run_train(module, params, {}, x)[0] == 1).all()


@pytest.mark.parametrize("kind", MODELS)
def test_every_kind_drops_in_training_only(kind: str) -> None:
    def outputs(dropout: float) -> tuple[np.ndarray, np.ndarray]:
        # Without the statistics of a batch, by which training differs in any case.
        module = module_of(SMALL[kind](dropout=dropout, norm="layer" if kind == "gpt" else "none"))
        params, state = arrays_by_formula(module)
        x = inputs_of(kind)
        return run_train(module, params, state, x)[0], run_eval(module, params, state, x)

    train, evaluated = outputs(0.5)
    assert not np.allclose(train, evaluated, atol=1e-4)
    train, evaluated = outputs(0.0)
    np.testing.assert_allclose(train, evaluated, rtol=1e-5, atol=1e-6)


def block(drop: float) -> tuple[ModuleDef, dict[str, Any]]:
    module = ModuleDef(lambda rngs: Block(resnet(norm="none"), 4, 4, 1, drop, rngs))
    return module, arrays_by_formula(module)[0]


def test_stochastic_depth_drops_the_whole_branch_of_a_row_and_keeps_its_shortcut() -> None:
    x = np.abs(formula((64, 4, 4, 4), 0.3, 1.0))  # not negative: the last activation leaves a shortcut as it is
    module, params = block(0.5)
    y, _ = run_train(module, params, {}, x)
    whole, params_ = block(0.0)
    evaluated = run_eval(module, params, {}, x)
    np.testing.assert_array_equal(evaluated, run_train(whole, params_, {}, x)[0])  # off in evaluation
    dropped = np.array([np.array_equal(y[i], x[i]) for i in range(64)])
    # By hand: branch of the block without its last activation, scaled by 1 / (1 - 0.5).
    branch = jax.lax.conv_general_dilated(
        np.maximum(_conv(x, params["convs.0.kernel"]) + params["convs.0.bias"], 0),
        params["convs.1.kernel"],
        (1, 1),
        ((1, 1), (1, 1)),
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    kept = np.maximum(x + 2.0 * np.asarray(branch + params["convs.1.bias"]), 0)
    np.testing.assert_allclose(y[~dropped], kept[~dropped], rtol=1e-4, atol=1e-4)
    assert 18 <= dropped.sum() <= 46  # 32 expected, a deviation is 4
    assert not np.allclose(kept[dropped], x[dropped], atol=1e-3)


def _conv(x: np.ndarray, kernel: np.ndarray) -> np.ndarray:
    dims = ("NHWC", "HWIO", "NHWC")
    return np.asarray(jax.lax.conv_general_dilated(x, kernel, (1, 1), ((1, 1), (1, 1)), dimension_numbers=dims))


def test_stochastic_depth_rises_linearly_to_the_last_block() -> None:
    model = resnet_module(0.3)
    assert [b.drop_path.rate for b in model.blocks] == pytest.approx([0.1, 0.2, 0.3])
    deep = resnet_module(0.2, depth=20)
    assert [b.drop_path.rate for b in deep.blocks] == pytest.approx([0.2 * (i + 1) / 9 for i in range(9)])
    assert [b.drop_path.rate for b in resnet_module(0.0).blocks] == [0.0, 0.0, 0.0]


def resnet_module(share: float, depth: int = 8) -> Any:
    config = resnet(stochastic_depth=share, depth=depth)
    return nnx.eval_shape(lambda: MODELS["resnet"].make(config, (8, 8, 1), 3, rngs=nnx.Rngs(0)))


def test_two_blocks_of_one_model_are_dropped_apart() -> None:
    """Each dropout has a key of its own name."""
    module = module_of(resnet(stochastic_depth=0.5, norm="none"))

    def masks(params: Any, x: Any) -> Any:
        model = module.bind(params, {}, jax.random.key(0))
        ones = jnp.ones((64, 1, 1, 1))
        return [b.drop_path(ones).reshape(-1) > 0 for b in model.blocks[1:]]

    first, second = jax.jit(masks)(arrays_by_formula(module)[0], images(2))
    assert (np.asarray(first) != np.asarray(second)).sum() > 10


# ---------------------------------------------------------------- dense


def dense_pair() -> tuple[ModuleDef, ModuleDef, dict[str, Any], Any]:
    """Ours, that of flax, arrays for both, [B, T, D]."""
    ours = ModuleDef(lambda rngs: Dense(6, 5, rngs=rngs))
    theirs = ModuleDef(lambda rngs: nnx.Linear(6, 5, rngs=rngs))
    params, _ = arrays_by_formula(ours)
    return ours, theirs, params, formula((2, 3, 6), 0.4, 1.0)


def test_dense_is_the_linear_layer_of_flax_in_values_and_gradients() -> None:
    ours, theirs, params, x = dense_pair()
    assert ours.params.keys() == theirs.params.keys() == {"kernel", "bias"}

    def of(module: ModuleDef) -> Any:
        def loss(p: Any, x: Any) -> Any:
            y = module.bind(p, {}, None)(x)
            return jnp.sum(jnp.sin(y)), y

        return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(params, x)

    (_, y), (grads, by_input) = of(ours)
    (_, expected), (other_grads, by_their_input) = of(theirs)
    assert y.shape == (2, 3, 5)
    np.testing.assert_allclose(y, x.astype(np.float64) @ params["kernel"] + params["bias"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(y, expected, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(by_input, by_their_input, rtol=1e-5, atol=1e-6)
    for name in ("kernel", "bias"):
        np.testing.assert_allclose(grads[name], other_grads[name], rtol=1e-5, atol=1e-6)
    one_row = run_eval(ours, params, {}, x[0, 0][None])
    np.testing.assert_allclose(one_row, expected[0, 0][None], rtol=1e-6, atol=1e-6)


def test_dense_multiplies_matrices_where_flax_keeps_the_rows_apart() -> None:
    ours, theirs, params, x = dense_pair()

    def ranks(module: ModuleDef) -> set[int]:
        def loss(p: Any) -> Any:
            return jnp.sum(jnp.sin(module.bind(p, {}, None)(x)))

        jaxpr = jax.make_jaxpr(jax.grad(loss))(params).jaxpr
        products = [e for e in jaxpr.eqns if e.primitive.name == "dot_general"]
        assert len(products) == 2  # forward, and the gradient of the kernel
        return {value.aval.ndim for e in products for value in e.invars}

    assert ranks(ours) == {2}
    assert 3 in ranks(theirs)  # the control


# ---------------------------------------------------------------- rematerialisation


class OneBlock(nnx.Module):
    """One residual block, called as the models call theirs; all of them drop something, two have BatchNorm."""

    def __init__(self, kind: str, remat: str, rngs: nnx.Rngs) -> None:
        self.block = {
            "resnet": lambda: Block(resnet(), 3, 4, 2, 0.3, rngs),
            "gpt": lambda: gpt_model.Block(gpt(dropout=0.3, kv_heads=1), rngs=rngs),
            "tcn": lambda: tcn_model.Block(tcn(dropout=0.3, norm="batch"), 2, 4, 2, rngs=rngs),
        }[kind]()
        self.remat = remat

    def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        return call_block(self.block, x, mask, self.remat)


REMATS = ("none", "full", "dots")
BLOCK_INPUTS = {"resnet": (4, 8, 8, 3), "gpt": (4, 6, 8), "tcn": (4, 6, 2)}


def gradient_of(module: ModuleDef, x: Any) -> Any:
    """(function of params -> ((loss, statistics after), gradients), params, statistics before)."""
    params, state = jax.tree.map(jnp.asarray, arrays_by_formula(module))
    mask = {"mask": jnp.array([True, True, True, False])} if module.takes_mask else {}

    def loss(p: Any) -> Any:
        model = module.bind(p, state, jax.random.key(0))
        y = model(x, **mask)
        return jnp.sum(jnp.square(y)), module.extract(model)[1]

    return jax.value_and_grad(loss, has_aux=True), params, state


@pytest.fixture(scope="module", params=BLOCK_INPUTS)
def remats(request: Any) -> dict[str, Any]:
    """Loss, gradients and statistics of one kind of block under each setting."""
    found = {}
    for remat in REMATS:
        module = ModuleDef(lambda rngs, remat=remat: OneBlock(request.param, remat, rngs))
        grad, params, state = gradient_of(module, formula(BLOCK_INPUTS[request.param], 0.5, 1.0))
        (value, after), grads = jax.jit(grad)(params)
        found[remat] = (float(value), {"grads": grads, "after": after}, state)
    return found


@pytest.mark.parametrize("remat", ["full", "dots"])
def test_remat_changes_no_loss_no_gradient_and_no_statistics(remat: str, remats: dict[str, Any]) -> None:
    (plain, arrays, before), (loss, others, _) = remats["none"], remats[remat]
    assert loss == pytest.approx(plain, rel=1e-6)
    for part in ("grads", "after"):
        for name, value in arrays[part].items():
            close = 1e-5 * float(np.abs(value).max())
            np.testing.assert_allclose(others[part][name], value, rtol=1e-4, atol=close, err_msg=f"{part} {name}")
    moved = [n for n, x in before.items() if not np.array_equal(x, others["after"][n])]
    assert sorted(moved) == sorted(before)  # every statistic was updated


# kind: (what a product is called, how many of them the backward pass of `full` computes again)
PRODUCTS = {
    "cnn": ("conv_general_dilated", 2),
    "resnet": ("conv_general_dilated", 8),
    "gpt": ("dot_general", 2 * 6),  # of two blocks all but the last: no gradient needs what it gives
    "tcn": ("conv_general_dilated", 4),
}


@pytest.mark.parametrize("kind", PRODUCTS)
def test_remat_is_in_the_program_only_when_it_is_on_and_dots_keeps_products(kind: str, monkeypatch: Any) -> None:
    convolutions_as_they_come(monkeypatch)
    names = {}
    for remat in REMATS:
        grad, params, _ = gradient_of(module_of(SMALL[kind](remat=remat)), inputs_of(kind))
        names[remat] = primitives(jax.make_jaxpr(grad)(params).jaxpr)
    on = [any("remat" in name or name == "checkpoint" for name in names[remat]) for remat in REMATS]
    assert on == [False, True, True]
    product, inside = PRODUCTS[kind]
    products = {remat: names[remat].count(product) for remat in REMATS}
    assert products["dots"] == products["none"]
    assert products["full"] == products["none"] + inside


# ---------------------------------------------------------------- normalisation of a row


@pytest.mark.parametrize("shape", [(3, 8), (2, 5, 8), (2, 3, 4, 8)])
@pytest.mark.parametrize(("own", "of_flax"), [(LayerNorm, nnx.LayerNorm), (RMSNorm, nnx.RMSNorm)])
def test_norms_of_rows_and_their_gradients_are_those_of_flax(shape: tuple[int, ...], own: Any, of_flax: Any) -> None:
    ours, theirs = own(8, rngs=nnx.Rngs(0)), of_flax(8, rngs=nnx.Rngs(0), use_fast_variance=False)
    for norm in (ours, theirs):
        norm.scale[...] = jnp.asarray(formula((8,), 0.5, 1.0))
        if own is LayerNorm:
            norm.bias[...] = jnp.asarray(formula((8,), 0.3, 1.0))
    x, slope = jnp.asarray(formula(shape, 0.9, 2.0)) + 0.5, jnp.asarray(formula(shape, 0.7, 1.0))

    def loss(norm: Any, x: jax.Array) -> jax.Array:
        return jnp.sum(slope * norm(x))

    found, expected = (nnx.value_and_grad(loss, argnums=(0, 1))(norm, x) for norm in (ours, theirs))
    left, right = jax.tree.leaves(found), jax.tree.leaves(expected)
    assert len(left) == len(right) == (4 if own is LayerNorm else 3)
    for a, b in zip(left, right, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    half = ours(x.astype(jnp.bfloat16))
    assert half.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(half, np.float32), ours(x), rtol=0.05, atol=0.05)
    gradient = jax.grad(lambda x: jnp.sum(ours(x).astype(jnp.float32)))(x.astype(jnp.bfloat16))
    assert gradient.dtype == jnp.bfloat16


def test_a_row_far_from_zero_keeps_its_digits() -> None:
    x = jnp.asarray(formula((2, 64), 0.9, 1.0)) + 3000.0
    exact = np.asarray(x, np.float64)
    exact = (exact - exact.mean(-1, keepdims=True)) / np.sqrt(exact.var(-1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(LayerNorm(64, rngs=nnx.Rngs(0))(x), exact, atol=1e-3)
    assert np.abs(nnx.LayerNorm(64, rngs=nnx.Rngs(0))(x) - exact).max() > 0.01  # the control: E[x^2] - E[x]^2
