"""The step: one loss over the whole global batch however it is split, clipping, averages, windows, randomness."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from core_helpers import (
    Affine,
    Normed,
    as_float,
    assert_bit_equal,
    bit_equal,
    make_batch,
    make_spec,
    spoil,
    start,
    step_of,
)
from flax import nnx

from jaxtrain.config import schema
from jaxtrain.core.metrics import ClassMetrics, RegressionMetrics, merge
from jaxtrain.core.objectives import built_in_loss, make_objective, user_loss
from jaxtrain.core.optimizer import make_optimizer
from jaxtrain.core.state import init_state, weights_for_evaluation
from jaxtrain.core.step import make_eval_step, make_train_step

CLASSES = make_objective(schema.CrossEntropy())


def close(left: Any, right: Any, tolerance: float = 1e-6) -> bool:
    pairs = zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
    return all(np.allclose(a, b, rtol=tolerance, atol=tolerance) for a, b in pairs)


def distance(left: Any, right: Any) -> float:
    pairs = zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
    return max(float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in pairs)


def softmax_loss_and_gradient(kernel: Any, bias: Any, x: Any, y: Any, w: Any = 1.0) -> tuple[float, Any, Any]:
    """Weighted mean cross-entropy of an affine model and its gradient, in float64."""
    logits = x.astype(np.float64) @ kernel + bias
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    w = np.broadcast_to(w, len(x)) / np.broadcast_to(w, len(x)).sum()
    d = (p - np.eye(p.shape[1])[y]) * w[:, None]
    return float(-(w * np.log(p[np.arange(len(x)), y])).sum()), x.T.astype(np.float64) @ d, d.sum(0)


# ---------------------------------------------------------------- accumulation


@pytest.fixture(scope="module")
def forms() -> Any:
    """The same update over one batch of 16; over 4 of 4 in a loop, and written out; in lanes; by a branch."""
    adamw = make_optimizer(schema.Adamw(weight_decay=0.1))
    base = make_spec(optimizer=adamw, ema_decay=0.9, clip_norm=0.5)
    specs = {
        "whole": base,
        "scanned": dataclasses.replace(base, micro_batches=4),
        "unrolled": dataclasses.replace(base, micro_batches=4, unroll=True),
        "lanes": dataclasses.replace(base, lanes=4),
        "scanned lanes": dataclasses.replace(base, micro_batches=2, lanes=4),
        "branch": dataclasses.replace(base, branch=True),
    }
    return start(base), {name: step_of(spec) for name, spec in specs.items()}


def uneven(real: int) -> dict[str, Any]:
    """16 rows of which `real` count; the others repeat real rows with other targets, so that counting them shows."""
    batch = make_batch()
    mask = np.arange(16) < real
    rows = np.where(mask, np.arange(16), np.arange(16) % real)
    targets = np.where(mask, batch["targets"], (batch["targets"] + 1) % 3).astype(np.int32)
    return {**batch, "inputs": batch["inputs"][rows], "targets": targets, "mask": mask}


@pytest.mark.parametrize("real", [16, 13, 10, 3])
@pytest.mark.parametrize("form", ["scanned", "unrolled", "lanes", "scanned lanes", "branch"])
def test_accumulated_gradient_equals_full_batch(forms: Any, form: str, real: int) -> None:
    state, steps = forms
    whole, parts = steps["whole"](state, uneven(real)), steps[form](state, uneven(real))
    assert close(parts, whole)
    assert float(parts[1]["loss"]) == pytest.approx(float(whole[1]["loss"]), rel=1e-6)
    assert float(parts[1]["window/count"]) == real


def test_row_weights_are_divided_by_once_over_all_micro_batches(forms: Any) -> None:
    state, steps = forms
    batch = {**uneven(13), "weights": np.linspace(0.1, 3.0, 16).astype(np.float32)}
    whole, parts = steps["whole"](state, batch), steps["scanned"](state, batch)
    assert close(parts, whole)
    expected, kernel, bias = softmax_loss_and_gradient(
        np.asarray(state["params"]["dense.kernel"]),
        np.asarray(state["params"]["dense.bias"]),
        batch["inputs"][:13],
        batch["targets"][:13],
        batch["weights"][:13],
    )
    assert float(parts[1]["loss"]) == pytest.approx(expected, rel=1e-5)
    assert float(parts[1]["grad_norm"]) == pytest.approx(np.sqrt((kernel**2).sum() + (bias**2).sum()), rel=1e-5)


def test_micro_batches_take_every_nth_row_so_that_none_is_all_padding() -> None:
    def loss(model: Any, batch: Any) -> Any:
        ids = jnp.sum(batch["ids"]).astype(jnp.float32)
        return jnp.sum(model(batch["inputs"])), 1, {"ids": ids**2, "filled": jnp.any(batch["mask"])}

    spec = make_spec(loss=user_loss(loss), micro_batches=4)
    _, metrics = step_of(spec)(start(spec, sums=("ids", "filled")), uneven(4))
    strided, contiguous = np.arange(16).reshape(4, 4).T, np.arange(16).reshape(4, 4)
    assert float(metrics["window/ids"]) == (strided.sum(1) ** 2).sum() != (contiguous.sum(1) ** 2).sum()
    assert float(metrics["window/filled"]) == 4.0


def test_unrolled_and_scanned_accumulation_agree(forms: Any) -> None:
    state, steps = forms
    scanned = unrolled = state
    for seed in range(3):
        batch = make_batch(seed=seed)
        scanned, _ = steps["scanned"](scanned, batch)
        unrolled, _ = steps["unrolled"](unrolled, batch)
    assert close(scanned, unrolled)
    assert distance(scanned["params"], state["params"]) > 0.01


def test_padding_that_counted_would_change_the_update(forms: Any) -> None:
    state, steps = forms
    batch = uneven(10)
    right, _ = steps["scanned"](state, batch)
    wrong, _ = steps["scanned"](state, {**batch, "mask": np.ones(16, bool)})
    assert distance(right["params"], wrong["params"]) > 1e-3


def test_an_incomplete_batch_counts_with_its_own_rows(forms: Any) -> None:
    state, steps = forms
    batch = uneven(10)
    alone = {name: x[:10] if np.ndim(x) else x for name, x in batch.items()}
    padded, of_ten = steps["scanned"](state, batch), steps["whole"](state, alone)
    assert close(padded[0]["params"], of_ten[0]["params"])
    assert float(padded[1]["loss"]) == pytest.approx(float(of_ten[1]["loss"]), rel=1e-6)


@pytest.fixture(scope="module")
def accumulation_case(shared: Any) -> Any:
    folder = shared / "faults/loop_grad_accum"
    with np.load(folder / "data.npz") as data, np.load(folder / "expected.npz") as expected:
        return dict(data), dict(expected)


def in_micro_batches(x: np.ndarray, y: np.ndarray, sizes: Any) -> dict[str, Any]:
    """Rows so laid out that micro-batch u (rows u, u + n, ...) holds the u-th group, padded with its first row."""
    count, longest = len(sizes), max(sizes)
    rows, mask = np.zeros(count * longest, int), np.zeros(count * longest, bool)
    first = 0
    for u, size in enumerate(sizes):
        for j in range(longest):
            rows[j * count + u] = first + (j if j < size else 0)
            mask[j * count + u] = j < size
        first += size
    return {
        "inputs": x[rows],
        "targets": y[rows].astype(np.int32),
        "mask": mask,
        "ids": rows.astype(np.int32),
        "epoch": np.int32(0),
    }


bias_free = partial(Affine, use_bias=False)


@pytest.mark.parametrize("sizes", [(2, 7, 1, 6), (16,), (4, 4, 4, 4)])
def test_uneven_micro_batches_give_the_loss_gradient_and_update_of_all_rows(accumulation_case: Any, sizes: Any) -> None:
    data, expected = accumulation_case
    spec = make_spec(bias_free, micro_batches=len(sizes))
    state = start(spec, params={"dense.kernel": data["W"]})
    state, metrics = step_of(spec)(state, in_micro_batches(data["X"], data["y"], sizes))
    assert float(metrics["loss"]) == pytest.approx(1.31159564, rel=1e-5)
    assert float(metrics["grad_norm"]) == pytest.approx(0.53179547, rel=1e-5)
    after = data["W"] - 0.1 * expected["grad"]
    np.testing.assert_allclose(state["params"]["dense.kernel"], after, atol=1e-6)


def test_the_mean_of_the_micro_batch_means_is_another_loss_and_another_gradient(accumulation_case: Any) -> None:
    data, expected = accumulation_case
    ends = np.cumsum(data["micro_batch_sizes"])
    groups = np.split(np.arange(16), ends[:-1])
    parts = [softmax_loss_and_gradient(data["W"], 0.0, data["X"][g], data["y"][g]) for g in groups]
    assert np.mean([loss for loss, _, _ in parts]) == pytest.approx(1.04648140, rel=1e-5)
    wrong = np.mean([grad for _, grad, _ in parts], axis=0)
    assert np.linalg.norm(wrong) == pytest.approx(0.62064565, rel=1e-5)
    assert np.abs(0.1 * (wrong - expected["grad"])).max() > 1e-3  # far above the tolerance of the update


def test_clipping_acts_once_on_the_accumulated_gradient(accumulation_case: Any) -> None:
    data, expected = accumulation_case
    spec = make_spec(bias_free, micro_batches=4, clip_norm=0.1)
    state = start(spec, params={"dense.kernel": data["W"]})
    state, metrics = step_of(spec)(state, in_micro_batches(data["X"], data["y"], (2, 7, 1, 6)))
    assert float(metrics["grad_norm"]) == pytest.approx(0.53179547, rel=1e-5)  # before clipping
    moved = np.asarray(state["params"]["dense.kernel"]) - data["W"]
    np.testing.assert_allclose(moved, -0.1 * expected["grad"] * (0.1 / 0.53179547), atol=1e-6)
    # Control: each micro-batch clipped by itself.
    groups = np.split(np.arange(16), np.cumsum(data["micro_batch_sizes"])[:-1])
    grads = [softmax_loss_and_gradient(data["W"], 0.0, data["X"][g], data["y"][g])[1] for g in groups]
    clipped = [g * min(1.0, 0.1 / np.linalg.norm(g)) * len(rows) / 16 for g, rows in zip(grads, groups, strict=True)]
    assert np.abs(moved + 0.1 * sum(clipped)).max() > 1e-4


def test_a_gradient_below_the_limit_is_not_scaled_up(accumulation_case: Any) -> None:
    data, expected = accumulation_case
    spec = make_spec(bias_free, clip_norm=5.0)
    state = start(spec, params={"dense.kernel": data["W"]})
    state, _ = step_of(spec)(state, in_micro_batches(data["X"], data["y"], (16,)))
    np.testing.assert_allclose(state["params"]["dense.kernel"], data["W"] - 0.1 * expected["grad"], atol=1e-6)


def test_a_batch_of_padding_alone_moves_nothing() -> None:
    spec = make_spec(micro_batches=2)
    before = start(spec)
    after, metrics = step_of(spec)(before, {**make_batch(), "mask": np.zeros(16, bool)})
    assert_bit_equal(after["params"], before["params"])
    assert (float(metrics["loss"]), float(metrics["grad_norm"])) == (0.0, 0.0)
    assert int(after["guard"]["skipped"]) == 0


def test_a_missing_target_of_a_row_with_weight_zero_does_not_stop_the_update() -> None:
    loss = built_in_loss(make_objective(schema.Mse()), RegressionMetrics(1).train_sums, False)
    spec = make_spec(partial(Affine, outputs=1), loss=loss, micro_batches=2)
    before, step = start(spec, sums=("mae",)), step_of(spec)
    weights = (np.arange(16) != 5).astype(np.float32)
    clean = {**make_batch(), "targets": np.linspace(0, 1, 16, dtype=np.float32), "weights": weights}
    missing = {**clean, "targets": np.where(weights > 0, clean["targets"], np.nan).astype(np.float32)}
    with_it, without = step(before, clean)[0], step(before, missing)[0]
    assert int(without["updates"]) == 1
    assert close(with_it["params"], without["params"])
    assert distance(with_it["params"], before["params"]) > 1e-3


# ---------------------------------------------------------------- state


@pytest.mark.parametrize("eager", [False, True], ids=["init inside jit", "init outside jit"])
def test_the_state_is_donated(eager: bool) -> None:
    spec = make_spec(Normed, optimizer=make_optimizer(schema.Adamw()), ema_decay=0.9)

    def init() -> Any:
        return init_state(*spec.module.init(0), spec.optimizer, ema=True, loss_scale=1.0, sums=("accuracy",))

    state = init() if eager else jax.jit(init)()
    leaves = jax.tree.leaves(state)
    after, _ = jax.jit(make_train_step(spec), donate_argnums=0)(state, make_batch())
    assert all(x.is_deleted() for x in leaves)
    assert not any(x.is_deleted() for x in jax.tree.leaves(after))
    # Control: without donation the old state stays.
    _, _ = step_of(spec)(after, make_batch())
    assert not any(x.is_deleted() for x in jax.tree.leaves(after))


def test_the_state_keeps_its_types_so_that_there_is_one_program() -> None:
    spec = make_spec(Normed, optimizer=make_optimizer(schema.Adamw()), ema_decay=0.9, micro_batches=2)
    step, state = step_of(spec), start(spec)
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), state)
    for seed in range(3):
        state, _ = step(state, make_batch(seed=seed))
    assert jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), state) == shapes
    assert step._cache_size() == 1
    assert {str(state[name].dtype) for name in ("step", "updates", "data_offset")} == {"int32"}


def test_two_runs_of_one_seed_are_bit_equal_and_of_two_seeds_are_not() -> None:
    base = make_spec(Normed)

    def two_steps(spec: Any, step: Any) -> Any:
        state = start(spec)
        for n in range(2):
            state, _ = step(state, make_batch(seed=n))
        return state

    step = step_of(base)
    assert_bit_equal(two_steps(base, step), two_steps(base, step))
    other = dataclasses.replace(base, seed=1)
    assert not bit_equal(two_steps(other, step_of(other)), two_steps(base, step))


# ---------------------------------------------------------------- averages


def test_the_average_follows_min_of_decay_and_one_plus_n_over_ten_plus_n() -> None:
    spec = make_spec(Normed, ema_decay=0.15)
    step, state = step_of(spec), start(spec)
    assert_bit_equal(state["ema"], {"params": state["params"], "model_state": state["model_state"]})
    expected = jax.tree.map(lambda x: np.asarray(x, np.float64), state["ema"])
    decays = []
    for n in range(4):
        state, _ = step(state, make_batch(seed=n))
        decays.append(min(0.15, (1 + n) / (10 + n)))
        now = {"params": state["params"], "model_state": state["model_state"]}
        expected = jax.tree.map(lambda old, new, d=decays[-1]: d * old + (1 - d) * np.asarray(new), expected, now)
        assert close(state["ema"], expected)
    assert decays == [0.1, 0.15, 0.15, 0.15]  # both sides of the minimum
    assert distance(state["ema"]["params"], state["params"]) > 1e-4
    assert distance(state["ema"]["model_state"], state["model_state"]) > 1e-4
    assert_bit_equal(weights_for_evaluation(state), (state["ema"]["params"], state["ema"]["model_state"]))


def test_a_skipped_update_does_not_count_in_the_average() -> None:
    spec = make_spec(ema_decay=0.9)
    step, state = step_of(spec), start(spec)
    state, _ = step(state, make_batch(seed=0))
    skipped, _ = step(state, spoil(make_batch(seed=1)))
    assert_bit_equal(step(skipped, make_batch(seed=2))[0]["ema"], step(state, make_batch(seed=2))[0]["ema"])


def test_without_a_decay_there_is_no_average_and_the_weights_themselves_are_evaluated() -> None:
    spec = make_spec()
    state, _ = step_of(spec)(start(spec), make_batch())
    assert state["ema"] == {}
    assert_bit_equal(weights_for_evaluation(state), (state["params"], state["model_state"]))


# ---------------------------------------------------------------- windows


@pytest.fixture(scope="module")
def windowed() -> Any:
    """Seven steps with log.every = 3; the batch of step 4 is bad."""
    spec = make_spec(log_every=3)
    step, state = step_of(spec), start(spec)
    rows = []
    for n in range(7):
        batch = uneven(10 + n)
        state, metrics = step(state, spoil(batch) if n == 4 else batch)
        rows.append({name: float(x) for name, x in metrics.items()})
    return rows


def test_window_sums_start_again_at_multiples_of_log_every(windowed: Any) -> None:
    assert [row["window/count"] for row in windowed] == [10, 21, 33, 13, 13, 28, 16]
    assert windowed[2]["window/count"] != 10 + 11 + 12 + 13  # what a reset one step late would have


def test_a_skipped_step_adds_to_the_skips_of_its_window_and_to_nothing_else(windowed: Any) -> None:
    assert [row["window/skipped"] for row in windowed] == [0, 0, 0, 0, 1, 1, 0]
    assert windowed[4]["window/loss"] == windowed[3]["window/loss"]
    assert windowed[4]["window/accuracy"] == windowed[3]["window/accuracy"]
    assert np.isnan(windowed[4]["loss"])


def test_the_loss_of_a_window_is_its_sum_over_rows_divided_once(windowed: Any) -> None:
    rows = windowed[:3]
    total = sum(row["loss"] * count for row, count in zip(rows, (10, 11, 12), strict=True))
    mean = rows[2]["window/loss"] / rows[2]["window/weight"]
    assert mean == pytest.approx(total / 33, rel=1e-6)
    assert mean != pytest.approx(np.mean([row["loss"] for row in rows]), rel=1e-4)  # the mean of batch means


def test_the_accuracy_of_a_window_counts_its_real_rows(windowed: Any) -> None:
    spec = make_spec()
    state = start(spec)
    x, y = uneven(10)["inputs"][:10], uneven(10)["targets"][:10]
    logits = x @ np.asarray(state["params"]["dense.kernel"]) + np.asarray(state["params"]["dense.bias"])
    assert windowed[0]["window/accuracy"] == (logits.argmax(1) == y).sum()


def test_a_users_metric_cannot_take_the_place_of_the_loss_of_the_window() -> None:
    def loss(model: Any, batch: Any) -> Any:
        each = jnp.square(model(batch["inputs"])).sum(-1)
        return jnp.sum(each), batch["mask"].sum(), {"loss": jnp.float32(1e6)}

    spec = make_spec(loss=user_loss(loss))
    try:
        _, metrics = step_of(spec)(start(spec, sums=("loss",)), make_batch())
    except ValueError:
        return  # refused: as good
    assert float(metrics["window/loss"]) == pytest.approx(16 * float(metrics["loss"]), rel=1e-6)


# ---------------------------------------------------------------- randomness

WIDTH = 4


class Coded(nnx.Module):
    """Two dropouts over WIDTH features each, times a weight: what they keep can be read from the output."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.weight = nnx.Param(jnp.ones(()))
        self.first = nnx.Dropout(0.5, rngs=rngs)
        self.second = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.concatenate([self.first(x), self.second(x)], -1) * self.weight


def code(model: Any, batch: Any) -> Any:
    """The masks as bits of one number: kept elements are 2, so element j of row r adds 2 * 2^j * input."""
    out = jax.lax.stop_gradient(model(batch["inputs"]))
    bits = jnp.sum(out * 2.0 ** jnp.arange(2 * WIDTH)) / 2
    return bits + 0.0 * model.weight[...], 1, {"bits": bits}


@pytest.fixture(scope="module", params=["micro_batches", "lanes"])
def coded(request: Any) -> Any:
    """(step, state, masks): masks(state) -> bits of [micro-batch][dropout] in the next step."""
    spec = make_spec(Coded, loss=user_loss(code), **{request.param: 2}, log_every=1)
    step = step_of(spec)
    inputs = np.ones((2, WIDTH), np.float32)
    inputs[1] = 2.0**10  # the second micro-batch is read from the higher bits
    batch = {
        "inputs": inputs,
        "targets": np.zeros(2, np.int32),
        "mask": np.ones(2, bool),
        "ids": np.arange(2, dtype=np.int32),
        "epoch": np.int32(0),
    }

    def masks(state: Any) -> tuple[Any, list[list[int]]]:
        state, metrics = step(state, batch)
        bits = int(metrics["window/bits"])
        return state, [[b % 2**WIDTH, b >> WIDTH] for b in (bits % 2**10, bits >> 10)]

    return masks, start(spec, sums=("bits",))


def test_dropout_differs_between_layers_micro_batches_and_steps(coded: Any) -> None:
    masks, state = coded
    seen = []
    for _ in range(8):
        state, bits = masks(state)
        seen.append(bits)
    drawn = np.array(seen)  # [step, micro-batch, layer]
    assert ((drawn >= 0) & (drawn < 2**WIDTH)).all()
    # Independent draws of 4 bits agree once in 16: eight in a row never.
    assert (drawn[:, :, 0] != drawn[:, :, 1]).any(0).all()
    assert (drawn[:, 0] != drawn[:, 1]).any(0).all()
    for micro in range(2):
        for layer in range(2):
            assert len(set(drawn[:, micro, layer])) > 3


def test_the_same_step_repeats_its_dropout(coded: Any) -> None:
    masks, state = coded
    for _ in range(3):
        state, _ = masks(state)
    _, first = masks(state)
    _, again = masks(state)
    resumed = {**coded[1], "step": jnp.int32(3)}  # nothing but the number of the step decides
    assert first == again == masks(resumed)[1]
    assert masks({**resumed, "step": jnp.int32(4)})[1] != first


def image_spec(**changes: Any) -> Any:
    class Pixels(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.weight = nnx.Param(jnp.ones(()))

        def __call__(self, x: jax.Array) -> jax.Array:
            return x * self.weight

    def places(model: Any, batch: Any) -> Any:
        """Where the ink is, as one number: the sum of position times value."""
        x = model(batch["inputs"])[..., 0]
        return jnp.sum(x * jnp.arange(25.0).reshape(5, 5)), 1, {}

    return make_spec(Pixels, loss=user_loss(places), preprocess=lambda x: as_float(x) / 2, **changes)


def test_augmentation_is_drawn_anew_at_each_step_and_only_in_training() -> None:
    image = np.zeros((1, 5, 5, 1), np.uint8)
    image[0, 2, 2, 0] = 2  # one pixel, 1.0 after preprocessing, at place 12
    batch = {**make_batch(1), "inputs": image}
    spec = image_spec(augment=schema.Augment(shift=1), schedule=lambda n: 0.0)
    step, state = step_of(spec), start(spec, sums=())
    evaluated = jax.jit(make_eval_step(spec, None, None))(state["params"], {}, batch)
    assert float(evaluated["loss_sum"]) == 12.0
    places = []
    for _ in range(12):
        state, metrics = step(state, batch)
        places.append(float(metrics["loss"]))
    assert set(places) <= {6.0, 7.0, 8.0, 11.0, 12.0, 13.0, 16.0, 17.0, 18.0}
    assert len(set(places)) > 3
    resumed = {**start(spec, sums=()), "step": jnp.int32(5)}
    assert float(step(resumed, batch)[1]["loss"]) == places[5]
    off = image_spec(schedule=lambda n: 0.0)
    assert float(step_of(off)(start(off, sums=()), batch)[1]["loss"]) == 12.0


# ---------------------------------------------------------------- evaluation


def test_evaluation_is_unweighted_and_counts_real_rows() -> None:
    spec = make_spec(Normed)
    params, model_state = spec.module.init(0)
    batch = {**uneven(13), "weights": np.linspace(0.1, 3.0, 16).astype(np.float32)}
    batch["inputs"] = np.where(batch["mask"][:, None], batch["inputs"], np.nan).astype(np.float32)
    metrics = ClassMetrics(3, 2)
    result = jax.jit(make_eval_step(spec, CLASSES, metrics))(params, model_state, batch)
    total = merge(None, jax.device_get(result))
    hidden = batch["inputs"][:13] @ np.asarray(params["first.kernel"]) / np.sqrt(1 + 1e-5)  # fresh statistics: 0 and 1
    loss, _, _ = softmax_loss_and_gradient(np.asarray(params["last.kernel"]), 0.0, hidden, batch["targets"][:13])
    assert int(total["loss_count"]) == 13
    assert float(total["loss_sum"]) / 13 == pytest.approx(loss, rel=1e-5)
    logits = hidden @ np.asarray(params["last.kernel"])
    assert metrics.finalise(total)[0]["accuracy"] == np.mean(logits.argmax(1) == batch["targets"][:13])
    assert total["confusion"].sum() == 13


def test_evaluation_of_a_users_loss_gives_its_sum_count_and_metric_sums() -> None:
    def loss(model: Any, batch: Any) -> Any:
        real = batch["mask"]
        return jnp.sum(jnp.where(real, 2.0, 0.0)), real.sum(), {"ones": real.sum()}

    spec = make_spec(loss=user_loss(loss))
    params, model_state = spec.module.init(0)
    result = make_eval_step(spec, None, None)(params, model_state, uneven(13))
    assert {name: float(x) for name, x in result.items()} == {"loss_sum": 26.0, "loss_count": 13.0, "sum_ones": 13.0}


# ---------------------------------------------------------------- the update itself


def test_an_update_subtracts_rate_times_direction() -> None:
    spec = make_spec(optimizer=optax.identity(), schedule=lambda n: 0.25)
    before, batch = start(spec), make_batch()
    after, metrics = step_of(spec)(before, batch)
    kernel, bias = (np.asarray(before["params"][f"dense.{name}"], np.float64) for name in ("kernel", "bias"))
    loss, dk, db = softmax_loss_and_gradient(kernel, bias, batch["inputs"], batch["targets"])
    np.testing.assert_allclose(after["params"]["dense.kernel"], kernel - 0.25 * dk, atol=1e-6)
    np.testing.assert_allclose(after["params"]["dense.bias"], bias - 0.25 * db, atol=1e-6)
    assert float(metrics["loss"]) == pytest.approx(loss, rel=1e-6)
    assert float(metrics["lr"]) == 0.25
