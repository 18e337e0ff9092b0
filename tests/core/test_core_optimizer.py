"""Each optimizer against its formula in numpy, its weight-decay mask, its types, and a problem it must learn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from core_helpers import make_batch, make_spec, start
from optax import contrib

from jaxtrain.config import schema
from jaxtrain.core.optimizer import OPTIMIZERS, decays, make_optimizer
from jaxtrain.core.step import make_train_step

Arrays = dict[str, np.ndarray]
KINDS = {
    "sgd": schema.Sgd,
    "momentum": schema.Momentum,
    "adam": schema.Adam,
    "adamw": schema.Adamw,
    "lion": schema.Lion,
    "muon": schema.Muon,
    "adafactor": schema.Adafactor,
    "lamb": schema.Lamb,
}
LR, DECAY, UPDATES = 0.05, 0.1, 3
SHAPES = {"dense.kernel": (6, 5), "dense.bias": (5,), "norm.scale": (5,), "embed.embedding": (7, 4)}


def arrays(seed: int, shapes: dict[str, tuple[int, ...]] = SHAPES) -> Arrays:
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def run(config: Any, params: Arrays, grads: list[Arrays], lr: float = LR) -> list[Arrays]:
    """The parameters after each update, as the step applies them: p - lr * direction."""
    optimizer = make_optimizer(config)
    state = optimizer.init({name: jnp.asarray(p) for name, p in params.items()})
    update, out = jax.jit(optimizer.update), []
    for grad in grads:
        direction, state = update(grad, state, params)
        params = {name: np.asarray(params[name] - lr * direction[name]) for name in params}
        out.append(params)
    return out


# ---------------------------------------------------------------- formulas, one array at a time


def adam_direction(m: Any, v: Any, g: Any, t: int, b1: float, b2: float, eps: float) -> tuple[Any, Any, Any]:
    m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
    return m / (1 - b1**t) / (np.sqrt(v / (1 - b2**t)) + eps), m, v


def by_hand(direction: Callable[..., tuple[Any, Any]]) -> Callable[[Arrays, list[Arrays]], list[Arrays]]:
    """`direction(memory, gradient, parameter, decay, update from 1) -> (direction, memory)`, in float64."""

    def go(params: Arrays, grads: list[Arrays]) -> list[Arrays]:
        now = {name: p.astype(np.float64) for name, p in params.items()}
        memory: dict[str, Any] = dict.fromkeys(params)
        out = []
        for t, grad in enumerate(grads, 1):
            for name in now:
                decay = DECAY if name == "dense.kernel" else 0.0
                d, memory[name] = direction(memory[name], grad[name].astype(np.float64), now[name], decay, t)
                now[name] = now[name] - LR * d
            out.append(dict(now))
        return out

    return go


def sgd(memory: Any, g: Any, p: Any, decay: float, t: int) -> Any:
    return g + decay * p, None


def momentum(memory: Any, g: Any, p: Any, decay: float, t: int) -> Any:
    m = 0.9 * (0 if memory is None else memory) + g + decay * p
    return m, m


def nesterov(memory: Any, g: Any, p: Any, decay: float, t: int) -> Any:
    g = g + decay * p
    m = 0.9 * (0 if memory is None else memory) + g
    return g + 0.9 * m, m


def adam(memory: Any, g: Any, p: Any, decay: float, t: int) -> Any:
    d, m, v = adam_direction(*(memory or (0, 0)), g, t, 0.9, 0.999, 1e-8)
    return d, (m, v)


def adamw(memory: Any, g: Any, p: Any, decay: float, t: int) -> Any:
    d, memory = adam(memory, g, p, decay, t)
    return d + decay * p, memory


def lion(memory: Any, g: Any, p: Any, decay: float, t: int) -> Any:
    m = 0 if memory is None else memory
    return np.sign(0.9 * m + 0.1 * g) + decay * p, 0.99 * m + 0.01 * g


def lamb(memory: Any, g: Any, p: Any, decay: float, t: int) -> Any:
    d, m, v = adam_direction(*(memory or (0, 0)), g, t, 0.9, 0.999, 1e-6)
    d = d + decay * p
    return d * np.linalg.norm(p) / np.linalg.norm(d), (m, v)


def adafactor(memory: Any, g: Any, p: Any, decay: float, t: int, factored: bool = False) -> Any:
    beta = 1 - t**-0.8
    if factored and g.ndim == 2:
        rows, columns = memory or (0, 0)
        rows = beta * rows + (1 - beta) * (g * g).mean(1)
        columns = beta * columns + (1 - beta) * (g * g).mean(0)
        d, memory = g / np.sqrt(np.outer(rows, columns) / rows.mean()), (rows, columns)
    else:
        memory = beta * (0 if memory is None else memory) + (1 - beta) * g * g
        d = g / np.sqrt(memory)
    return d / max(1.0, np.sqrt((d * d).mean())) + decay * p, memory


def adafactor_factored(memory: Any, g: Any, p: Any, decay: float, t: int) -> Any:
    return adafactor(memory, g, p, decay, t, factored=True)


CASES = {
    "sgd": (schema.Sgd(weight_decay=DECAY), sgd),
    "momentum": (schema.Momentum(weight_decay=DECAY), momentum),
    "momentum, nesterov": (schema.Momentum(weight_decay=DECAY, nesterov=True), nesterov),
    "adam": (schema.Adam(), adam),
    "adamw": (schema.Adamw(weight_decay=DECAY), adamw),
    "lion": (schema.Lion(weight_decay=DECAY), lion),
    "adafactor": (schema.Adafactor(weight_decay=DECAY), adafactor),
    "adafactor, factored": (schema.Adafactor(weight_decay=DECAY, min_dim_size_to_factor=4), adafactor_factored),
    "lamb": (schema.Lamb(weight_decay=DECAY), lamb),
}
GRADS = [arrays(seed) for seed in range(1, UPDATES + 1)]


@pytest.mark.parametrize("name", CASES)
def test_updates_equal_the_formula(name: str) -> None:
    config, direction = CASES[name]
    got, expected = run(config, arrays(0), GRADS), by_hand(direction)(arrays(0), GRADS)
    for ours, theirs in zip(got, expected, strict=True):
        for leaf in SHAPES:
            np.testing.assert_allclose(ours[leaf], theirs[leaf], rtol=2e-5, atol=2e-6, err_msg=leaf)


def test_the_formulas_differ_from_each_other_by_the_second_update() -> None:
    after = {name: by_hand(direction)(arrays(0), GRADS)[1]["dense.kernel"] for name, (_, direction) in CASES.items()}
    names = list(after)
    for i, left in enumerate(names):
        for right in names[i + 1 :]:
            assert np.abs(after[left] - after[right]).max() > 1e-3, (left, right)


def orthogonalised(x: np.ndarray) -> np.ndarray:
    """Five Newton-Schulz iterations with Jordan's coefficients."""
    wide = x.shape[0] <= x.shape[1]
    x = x if wide else x.T
    x = x / np.linalg.norm(x)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x if wide else x.T


@pytest.mark.parametrize("shape", [(6, 5), (3, 8), (2, 2, 3, 4)])
def test_muon_orthogonalises_matrices_and_kernels(shape: tuple[int, ...]) -> None:
    shapes = {"kernel": shape}
    grads = [arrays(seed, shapes) for seed in (1, 2)]
    got = run(schema.Muon(weight_decay=DECAY), arrays(0, shapes), grads)
    p = arrays(0, shapes)["kernel"].astype(np.float64).reshape(-1, shape[-1])
    m = np.zeros_like(p)
    for t, grad in enumerate(grads, 1):
        g = grad["kernel"].astype(np.float64).reshape(p.shape)
        m = 0.95 * m + 0.05 * g
        ahead = 0.95 * m / (1 - 0.95 ** (t + 1)) + 0.05 * g / (1 - 0.95**t)  # Nesterov, without the bias of zero
        d = orthogonalised(ahead) * np.sqrt(max(1.0, p.shape[1] / p.shape[0]))
        p = p - LR * (d + DECAY * p)
        np.testing.assert_allclose(got[t - 1]["kernel"].reshape(p.shape), p, rtol=1e-3, atol=1e-4)
    singular = np.linalg.svd(orthogonalised(ahead), compute_uv=False)
    assert 0.6 < singular.min() <= singular.max() < 1.3
    assert np.linalg.cond(ahead) > 1.5  # control: what goes in is not orthogonal


def test_muon_leaves_all_that_is_no_matrix_to_the_adam_of_optax_at_its_own_rate() -> None:
    got = run(schema.Muon(weight_decay=DECAY, adam_lr_factor=0.3), arrays(0), GRADS)
    vectors = [name for name in SHAPES if name != "dense.kernel"]
    by_optax = contrib.muon(
        LR,
        adam_learning_rate=0.3 * LR,
        muon_weight_dimension_numbers=dict.fromkeys(vectors),
    )
    params = {name: arrays(0)[name] for name in vectors}
    state = by_optax.init(params)
    for grads, ours in zip(GRADS, got, strict=True):
        updates, state = by_optax.update({name: grads[name] for name in vectors}, state, params)
        params = optax.apply_updates(params, updates)
        for name in vectors:
            np.testing.assert_allclose(ours[name], params[name], rtol=2e-5, atol=2e-6)
    assert np.abs(got[0]["dense.bias"] - run(schema.Muon(), arrays(0), GRADS)[0]["dense.bias"]).max() > 1e-3


# ---------------------------------------------------------------- weight decay


def test_matrices_and_kernels_decay_and_biases_norms_and_embeddings_do_not() -> None:
    shapes = SHAPES | {
        "conv.kernel": (3, 3, 2, 4),
        "temperature": (),
        "pos_embed": (9, 4),
        "blocks.0.attn.kernel": (4, 4),
    }
    params = arrays(0, {n: s for n, s in shapes.items() if s}) | {"temperature": np.float32(1.0)}
    assert decays(params) == {
        "dense.kernel": True,
        "conv.kernel": True,
        "blocks.0.attn.kernel": True,
        "dense.bias": False,
        "norm.scale": False,
        "embed.embedding": False,
        "temperature": False,
        "pos_embed": False,
    }


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "adam"])
def test_without_a_gradient_only_decaying_arrays_move(kind: str) -> None:
    params, zero = arrays(0), {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    after = run(KINDS[kind](weight_decay=DECAY), params, [zero])[0]
    shrink = 1 - LR if kind == "lamb" else 1 - LR * DECAY  # lamb scales the step to the norm of the array
    np.testing.assert_allclose(after["dense.kernel"], shrink * params["dense.kernel"], rtol=1e-5)
    for name in ("dense.bias", "norm.scale", "embed.embedding"):
        np.testing.assert_array_equal(after[name], params[name])
    off = run(KINDS[kind](weight_decay=0.0), params, [zero])[0]
    np.testing.assert_array_equal(off["dense.kernel"], params["dense.kernel"])


# ---------------------------------------------------------------- types


def dtypes_of(state: Any) -> list[str]:
    return sorted(str(x.dtype) for x in jax.tree.leaves(state) if x.ndim and jnp.issubdtype(x.dtype, jnp.floating))


@pytest.mark.parametrize("kind", ["momentum", "adam", "adamw", "lion", "muon"])
def test_moment_dtype_is_the_type_of_the_first_moments(kind: str) -> None:
    params = {name: jnp.asarray(p) for name, p in arrays(0).items()}

    def states(dtype: str) -> tuple[Any, Any, Any]:
        optimizer = make_optimizer(KINDS[kind](moment_dtype=dtype))
        before = optimizer.init(params)
        direction, after = jax.jit(optimizer.update)(GRADS[0], before, params)
        return before, after, direction

    before, after, _ = states("float32")
    assert set(dtypes_of(before)) == set(dtypes_of(after)) == {"float32"}
    before, after, direction = states("bfloat16")
    assert dtypes_of(before).count("bfloat16") == len(SHAPES)
    # The state keeps its types from update to update: no second program.
    assert jax.tree.map(lambda x: x.dtype, before) == jax.tree.map(lambda x: x.dtype, after)
    new = jax.tree.map(lambda p, d: (p - LR * d).astype(p.dtype), params, direction)
    assert {str(p.dtype) for p in new.values()} == {"float32"}


@pytest.mark.parametrize("kind", KINDS)
def test_the_state_of_an_optimizer_keeps_its_shapes_and_types(kind: str) -> None:
    params = {name: jnp.asarray(p) for name, p in arrays(0).items()}
    optimizer = make_optimizer(KINDS[kind]())
    before = jax.eval_shape(optimizer.init, params)
    direction, after = jax.eval_shape(optimizer.update, params, before, params)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), before) == jax.tree.map(lambda x: (x.shape, x.dtype), after)
    assert {name: d.shape for name, d in direction.items()} == SHAPES


# ---------------------------------------------------------------- learning

BATCH = make_batch(64)
RATES = {
    "sgd": 0.5,
    "momentum": 0.1,
    "adam": 0.1,
    "adamw": 0.1,
    "lion": 0.05,
    "muon": 0.1,
    "adafactor": 0.1,
    "lamb": 0.1,
}


def losses(kind: str, lr: float) -> tuple[np.ndarray, Any]:
    """40 updates through the step, in one program."""
    spec = make_spec(optimizer=make_optimizer(KINDS[kind]()), schedule=lambda n: lr)
    step = make_train_step(spec)

    def body(state: Any, _: None) -> Any:
        state, metrics = step(state, {name: jnp.asarray(x) for name, x in BATCH.items()})
        return state, metrics["loss"]

    state, seen = jax.jit(lambda s: jax.lax.scan(body, s, None, length=40))(start(spec))
    return np.asarray(seen), state


def test_every_kind_of_optimizer_is_tested() -> None:
    assert set(KINDS) == set(RATES) == set(OPTIMIZERS)
    assert {name.split(",")[0] for name in CASES} | {"muon"} == set(OPTIMIZERS)


@pytest.mark.parametrize("kind", KINDS)
def test_an_optimizer_learns_a_separable_problem(kind: str) -> None:
    seen, state = losses(kind, RATES[kind])
    assert seen[0] > 1.0
    assert seen[-1] < 0.45
    assert {str(p.dtype) for p in state["params"].values()} == {"float32"}


def test_a_rate_of_zero_learns_nothing() -> None:
    seen, _ = losses("adamw", 0.0)
    assert seen[0] == seen[-1] > 1.0
