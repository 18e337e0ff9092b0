"""What a step costs: closed formulas are the control, and where XLA's own count can be exact, XLA."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain.config import schema
from jaxtrain.core.cost import Cost, cost_of, flops, saved_bytes
from jaxtrain.core.module import ModuleDef
from jaxtrain.models import MODELS

B, I, H, O = 7, 3, 5, 2  # rows, inputs, hidden, outputs  # noqa: E741


def array(*shape: int, dtype: Any = jnp.float32) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


def dense(rows: int, *widths: int) -> int:
    """Operations of dense layers, forward."""
    return sum(2 * rows * i * o for i, o in pairwise(widths))


def xla(function: Callable[..., Any], *args: Any) -> int:
    """XLA's own count of the program as lowered: element-wise work included, loops once, padding left out."""
    return int(jax.jit(function).lower(*args).cost_analysis()["flops"])


# ---------------------------------------------------------------- products


def test_a_dense_layer_costs_two_operations_a_weight_and_row() -> None:
    assert flops(jnp.matmul, array(B, I), array(I, O)) == 2 * B * I * O


def test_concrete_and_abstract_arguments_cost_the_same_and_nothing_is_allocated() -> None:
    assert flops(jnp.matmul, jnp.ones((B, I)), np.ones((I, O), np.float32)) == 2 * B * I * O
    n = 10**7  # 364 TiB
    assert flops(jnp.matmul, array(n, n), array(n, n)) == 2 * n**3
    assert saved_bytes(lambda p, x: jnp.sum((x @ p["w"]) ** 2), {"w": array(n, n)}, array(n, n)) == 4 * n * n


@pytest.mark.parametrize(
    ("equation", "left", "right", "sizes"),
    [
        ("bik,bkj->bij", (B, 3, 4), (B, 4, 5), (B, 3, 4, 5)),
        ("ij,kj->ik", (3, 4), (5, 4), (3, 4, 5)),
        ("bhqd,bkhd->bhqk", (2, 3, 4, 5), (2, 6, 3, 5), (2, 3, 4, 5, 6)),
        ("i,j->ij", (3,), (4,), (3, 4)),
        ("abc,cba->", (2, 3, 4), (4, 3, 2), (2, 3, 4)),
    ],
)
def test_a_product_costs_twice_the_product_of_its_indices(equation: str, left: Any, right: Any, sizes: Any) -> None:
    assert flops(partial(jnp.einsum, equation), array(*left), array(*right)) == 2 * math.prod(sizes)


def test_a_product_under_vmap_costs_the_rows_times_more() -> None:
    one = lambda x, w: jnp.tanh(x @ w)  # noqa: E731
    assert flops(jax.vmap(one, (0, None)), array(B, I), array(I, O)) == 2 * B * I * O
    assert flops(jax.vmap(one), array(B, 4, I), array(B, I, O)) == 2 * B * 4 * I * O


def test_a_row_of_a_ragged_product_meets_one_group() -> None:
    groups = array(3, dtype=jnp.int32)
    assert flops(lax.ragged_dot, array(B, I), array(3, I, O), groups) == 2 * B * I * O
    loss = lambda x, w, n: jnp.sum(lax.ragged_dot(x, w, n) ** 2)  # noqa: E731
    both = jax.value_and_grad(loss, argnums=(0, 1))
    assert flops(both, array(B, I), array(3, I, O), groups) == 3 * 2 * B * I * O


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_attention_costs_its_two_products(kv_heads: int) -> None:
    rows, steps, heads, width = 2, 6, 4, 8
    q, k = array(rows, steps, heads, width), array(rows, steps, kv_heads, width)
    expected = 2 * 2 * rows * heads * steps * steps * width
    attend = partial(jax.nn.dot_product_attention, is_causal=True)
    assert flops(attend, q, k, k) == expected
    loss = lambda *qkv: jnp.sum(attend(*qkv) ** 2)  # noqa: E731
    assert flops(jax.value_and_grad(loss, argnums=(0, 1, 2)), q, k, k) == 3 * expected


def test_element_wise_work_counts_nothing_and_the_rest_is_what_xla_counts() -> None:
    x, a, b = array(B, I), array(I, H), array(H, O)
    assert flops(lambda x, a, b: x @ a @ b, x, a, b) == xla(lambda x, a, b: x @ a @ b, x, a, b)
    rectified = lambda x, a, b: jnp.maximum(x @ a, 0) @ b  # noqa: E731
    assert xla(rectified, x, a, b) - flops(rectified, x, a, b) == B * H  # one maximum an element
    assert flops(lambda x: jnp.sum(jnp.sin(x) * x), x) == 0


# ---------------------------------------------------------------- convolutions


def convolve(x: Any, w: Any, stride: int = 1, padding: Any = "SAME", **options: Any) -> jax.Array:
    """x: [B, spatial..., C], w: [taps..., C / groups, out]."""
    space = "HW"[: x.ndim - 2]
    numbers = (f"N{space}C", f"{space}IO", f"N{space}C")
    return lax.conv_general_dilated(x, w, (stride,) * len(space), padding, dimension_numbers=numbers, **options)


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("stride", [1, 2])
def test_a_convolution_costs_output_times_taps_times_inputs_of_a_group(groups: int, stride: int) -> None:
    x, w = array(B, 8, 6, 4), array(3, 5, 4 // groups, 12)
    cost = flops(partial(convolve, stride=stride, feature_group_count=groups), x, w)
    assert cost == 2 * B * (8 // stride) * (6 // stride) * 3 * 5 * (4 // groups) * 12


def test_taps_on_the_padding_count_and_without_padding_the_count_is_that_of_xla() -> None:
    x, w = array(B, 8, 8, 4), array(3, 3, 4, 6)
    assert flops(convolve, x, w) == 2 * B * 8 * 8 * 9 * 4 * 6
    assert xla(convolve, x, w) == 2 * B * 22 * 22 * 4 * 6  # an axis of 8 has 24 pairs, 2 of them on the padding
    for stride in (1, 2, 3):
        valid = partial(convolve, stride=stride, padding="VALID")
        assert flops(valid, x, w) == xla(valid, x, w)


def test_a_batch_of_kernels_costs_one_convolution_each() -> None:
    x, w = array(B, 4, 8, 8, 2), array(B, 3, 3, 2, 6)
    assert flops(jax.vmap(convolve), x, w) == B * flops(convolve, array(4, 8, 8, 2), array(3, 3, 2, 6))
    batch_groups = partial(convolve, batch_group_count=2)
    assert flops(batch_groups, array(4, 8, 8, 2), array(3, 3, 2, 6)) == 2 * 2 * 8 * 8 * 9 * 2 * 6


def test_zeros_between_the_inputs_of_a_transposed_convolution_are_not_multiplied() -> None:
    upsample = lambda x, w: lax.conv_transpose(x, w, (2, 2), "SAME")  # noqa: E731
    x, w = array(B, 4, 4, 3), array(3, 3, 3, 5)
    assert jax.eval_shape(upsample, x, w).shape == (B, 8, 8, 5)
    assert flops(upsample, x, w) == 2 * B * 4 * 4 * 9 * 3 * 5  # each input meets each tap


def pulled_back(forward: Callable[..., Any], *args: Any) -> int:
    """Operations of a function and of the gradients of all its arguments."""
    return flops(lambda y, *args: jax.vjp(forward, *args)[1](y), jax.eval_shape(forward, *args), *args)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("padding", ["SAME", "VALID", "CAUSAL"])
@pytest.mark.parametrize("dilation", [1, 2])
@pytest.mark.parametrize("stride", [1, 2, 3])
def test_each_gradient_of_a_convolution_costs_one_forward(
    stride: int, dilation: int, padding: Any, groups: int
) -> None:
    for size, taps in ((7, 3), (8, 3), (8, 2), (9, 1), (5, 3)):
        pad = (((taps - 1) * dilation, 0),) if padding == "CAUSAL" else padding
        forward = partial(convolve, stride=stride, padding=pad, rhs_dilation=(dilation,), feature_group_count=groups)
        x, w = array(B, size, 4), array(taps, 4 // groups, 6)
        y = jax.eval_shape(forward, x, w)
        cost = flops(forward, x, w)
        assert cost == 2 * B * y.shape[1] * taps * (4 // groups) * 6
        assert pulled_back(forward, x, w) == 3 * cost


def test_the_gradients_cost_the_same_on_a_map_smaller_than_its_kernel() -> None:
    x, w = array(B, 2, 2, 3), array(5, 5, 3, 4)
    cost = flops(convolve, x, w)
    assert cost == 2 * B * (2 * 2) ** 2 * 3 * 4  # 4 pairs of input and output an axis, not 2 x 5
    assert pulled_back(convolve, x, w) == 3 * cost


# ---------------------------------------------------------------- programs in programs


def repeat(x: Any, w: Any, *, length: int, unrolled: bool) -> Any:
    if unrolled:
        for _ in range(length):
            x = jnp.tanh(x @ w)
        return x
    return lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, length=length)[0]


def test_a_scan_costs_what_it_costs_unrolled_and_xla_counts_its_body_once() -> None:
    rolled, unrolled = (partial(repeat, length=6, unrolled=form) for form in (False, True))
    x, w = array(B, H), array(H, H)
    assert flops(rolled, x, w) == flops(unrolled, x, w) == 6 * 2 * B * H * H
    assert xla(rolled, x, w) < 2 * flops(rolled, x, w) / 6
    losses = [lambda w, x, form=form: jnp.sum(form(x, w)) for form in (rolled, unrolled)]
    # The first input is not differentiated; a loop does not know which pass is the first.
    step, step_unrolled = (flops(jax.value_and_grad(loss), w, x) for loss in losses)
    assert step_unrolled == 3 * 6 * 2 * B * H * H - 2 * B * H * H
    assert step == 3 * 6 * 2 * B * H * H


def test_scans_in_scans_multiply() -> None:
    inner = partial(repeat, length=3, unrolled=False)
    nested = lambda x, w: lax.scan(lambda c, _: (inner(c, w), None), x, length=4)[0]  # noqa: E731
    assert flops(nested, array(B, H), array(H, H)) == 12 * 2 * B * H * H


def test_a_loop_of_known_bounds_counts_each_pass_and_a_loop_of_unknown_bounds_counts_one() -> None:
    def loop(bound: Any, x: Any, w: Any) -> Any:
        return lax.fori_loop(0, bound, lambda i, c: c @ w, x)

    x, w = array(B, H), array(H, H)
    assert flops(partial(loop, 5), x, w) == 5 * 2 * B * H * H
    assert flops(loop, array(dtype=jnp.int32), x, w) == 2 * B * H * H


def test_a_condition_costs_its_dearest_branch_and_under_vmap_all_of_them() -> None:
    cheap, dear = (lambda x, w: x @ w), (lambda x, w: x @ w @ w)

    def choose(index: Any, x: Any, w: Any) -> Any:
        return lax.switch(index, [cheap, dear, lambda x, w: x], x, w)

    x, w = array(B, H), array(H, H)
    assert flops(choose, array(dtype=jnp.int32), x, w) == 2 * 2 * B * H * H
    each = jax.vmap(choose, (0, None, None))
    assert flops(each, array(4, dtype=jnp.int32), x, w) == 4 * 3 * 2 * B * H * H


def test_calls_are_looked_into() -> None:
    @jax.custom_jvp
    def with_jvp(x: Any, w: Any) -> Any:
        return x @ w

    with_jvp.defjvp(lambda primals, tangents: (with_jvp(*primals), tangents[0] @ primals[1]))

    @jax.custom_vjp
    def with_vjp(x: Any, w: Any) -> Any:
        return x @ w

    with_vjp.defvjp(lambda x, w: (x @ w, (x, w)), lambda kept, g: (g @ kept[1].T, kept[0].T @ g))
    x, w = array(B, H), array(H, H)
    for wrapped in (jax.jit(jnp.matmul), jax.checkpoint(jnp.matmul), with_jvp, with_vjp, jax.jit(jax.jit(with_vjp))):
        assert flops(wrapped, x, w) == 2 * B * H * H
    assert flops(jax.grad(lambda x, w: jnp.sum(with_vjp(x, w) ** 2), argnums=(0, 1)), x, w) == 3 * 2 * B * H * H


def test_a_linear_solve_does_not_count_the_products_that_only_its_gradient_may_run() -> None:
    assert flops(jnp.linalg.solve, array(3, 3), array(3)) == 0


def test_shards_and_the_cells_of_a_grid_add_up_to_the_whole_product() -> None:
    mesh = AbstractMesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    specs: Any = {"in_specs": (P("data"), P(None, "model")), "out_specs": P("data", "model")}
    assert flops(jax.shard_map(jnp.matmul, mesh=mesh, **specs), array(8, 3), array(3, 6)) == 2 * 8 * 3 * 6

    def kernel(x: Any, w: Any, out: Any) -> None:
        out[...] = x[...] @ w[...]

    tiled = pl.pallas_call(
        kernel,
        out_shape=array(16, 8),
        grid=(2,),
        in_specs=[pl.BlockSpec((8, 4), lambda i: (i, 0)), pl.BlockSpec((4, 8), lambda i: (0, 0))],
        out_specs=pl.BlockSpec((8, 8), lambda i: (i, 0)),
    )
    assert flops(tiled, array(16, 4), array(4, 8)) == 2 * 16 * 4 * 8


# ---------------------------------------------------------------- what the backward pass keeps

LAYERS = {"a": array(I, H), "b": array(H, O), "bias": array(H)}


def two_layers(params: Any, x: Any) -> Any:
    return jnp.sum((jax.nn.relu(x @ params["a"] + params["bias"]) @ params["b"]) ** 2)


def test_two_layers_keep_the_sign_the_hidden_features_and_the_derivative_of_the_square() -> None:
    # For a: where relu was open (bool [B, H]); for b: relu's output [B, H]; of y^2: 2 y [B, O]. The inputs and b,
    # which the gradients need too, are arguments; relu's zeros are made where they are read.
    expected = B * H * 1 + B * H * 4 + B * O * 4
    assert saved_bytes(two_layers, LAYERS, array(B, I)) == expected
    assert saved_bytes(jax.jit(two_layers), LAYERS, array(B, I)) == expected


def test_arguments_constants_and_views_of_them_are_not_kept_anew() -> None:
    x = np.ones((B, I), np.float32)
    linear = lambda p, x: jnp.sum(x.reshape(-1, I) @ p["w"])  # noqa: E731
    assert saved_bytes(linear, {"w": array(I, O)}, array(B, 1, I)) == 0
    assert saved_bytes(lambda p: jnp.sum(x @ p["w"]), {"w": array(I, O)}) == 0
    causal = lambda p: jnp.sum(jnp.where(jnp.tril(jnp.ones((H, H), bool)), p["w"], 0.0))  # noqa: E731
    assert saved_bytes(causal, {"w": array(H, H)}) == 0
    # Control: one element-wise step makes the input another array, and a mask of the input is data.
    assert saved_bytes(lambda p, x: jnp.sum(jnp.sin(x) @ p["w"]), {"w": array(I, O)}, array(B, I)) == B * I * 4
    assert saved_bytes(lambda p: jnp.sum(jnp.sin(x) @ p["w"]), {"w": array(I, O)}) == B * I * 4
    masked = lambda p, x: jnp.sum(jnp.where(x > 0, p["w"], 0.0))  # noqa: E731
    assert saved_bytes(masked, {"w": array(H, H)}, array(H, H)) == H * H


def test_an_array_that_two_gradients_need_is_kept_once_and_a_broadcast_one_at_its_size() -> None:
    def shared(p: Any, x: Any) -> Any:
        h = jnp.sin(x)
        return jnp.sum(h @ p["a"]) + jnp.sum(h.T.reshape(I, B, 1).squeeze(-1).T @ p["b"])

    assert saved_bytes(shared, {"a": array(I, O), "b": array(I, H)}, array(B, I)) == B * I * 4
    scaled = lambda p, x: jnp.sum(p["w"] * jnp.broadcast_to(jnp.sum(x, 0), (B, I)))  # noqa: E731
    assert saved_bytes(scaled, {"w": array(B, I)}, array(B, I)) == I * 4


ONE_DEVICE = NamedSharding(jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,)), P())
PASSED_ON: dict[str, Callable[[Any], Any]] = {
    "copied": jnp.copy,
    "named": lambda x: checkpoint_name(x, "x"),
    "stopped": lax.stop_gradient,
    "fenced": lax.optimization_barrier,
    "rounded": lambda x: lax.reduce_precision(x, 8, 23),  # how jax.checkpoint marks what its policy keeps
    "placed": lambda x: lax.with_sharding_constraint(x, ONE_DEVICE),
}


@pytest.mark.parametrize("how", PASSED_ON)
def test_an_array_passed_on_as_it_is_stays_one_array(how: str) -> None:
    def both(p: Any, x: Any) -> Any:
        h = jnp.sin(x)
        return jnp.sum(h @ p["a"]) + jnp.sum(PASSED_ON[how](h) @ p["b"]) + jnp.sum(PASSED_ON[how](x) @ p["a"])

    assert saved_bytes(both, {"a": array(I, O), "b": array(I, H)}, array(B, I)) == B * I * 4


def test_a_random_mask_is_kept_wherever_its_key_comes_from() -> None:
    def dropped(key: Any, p: Any, x: Any) -> Any:
        return jnp.sum(jnp.where(jax.random.bernoulli(key(), 0.5, (B, O)), x @ p["w"], 0.0))

    for key in (partial(jax.random.key, 0), lambda key=jax.random.key(0): key):
        assert saved_bytes(partial(dropped, key), {"w": array(I, O)}, array(B, I)) == B * O


def test_a_copy_of_the_weights_in_bf16_is_kept() -> None:
    half = lambda p, x: jnp.sum((x @ p["a"].astype(jnp.bfloat16)) @ p["b"].astype(jnp.bfloat16))  # noqa: E731
    params = {"a": array(I, H), "b": array(H, O)}
    assert saved_bytes(half, params, array(B, I, dtype=jnp.bfloat16)) == 2 * (B * H + H * O)


def stacked(params: Any, x: Any, *, wrap: Callable[[Any], Any], rolled: bool) -> Any:
    """Four blocks of two dense layers of width H with relu; the sum is linear, so it keeps nothing itself."""

    @wrap
    def block(x: Any, w: Any) -> Any:
        return jax.nn.relu(jax.nn.relu(x @ w) @ w)

    if rolled:
        return jnp.sum(lax.scan(lambda c, w: (block(c, w), None), x, params["w"])[0])
    for w in params["w"]:
        x = block(x, w)
    return jnp.sum(x)


@pytest.mark.parametrize("rolled", [False, True])
def test_remat_keeps_only_the_inputs_of_blocks_and_costs_one_more_forward(rolled: bool) -> None:
    params, x, map_ = {"w": array(4, H, H)}, array(B, H), B * H
    plain, remat = (
        cost_of(partial(stacked, wrap=wrap, rolled=rolled), params, x, rows=B)
        for wrap in (lambda block: block, jax.checkpoint)
    )
    assert plain.forward_flops == remat.forward_flops == 8 * 2 * B * H * H
    assert remat.step_flops - plain.step_flops == plain.forward_flops
    # A loop stacks the inputs of all blocks; written out, that of the first is the argument.
    inputs = (4 if rolled else 3) * map_ * 4
    slices = 0 if rolled else 4 * H * H * 4  # written out, each block's weights are a slice: an array of its own
    assert remat.saved_bytes == inputs + slices
    # Without remat also: two signs and the features between the two products.
    assert plain.saved_bytes == inputs + slices + 4 * (2 * map_ + map_ * 4)


def test_remat_does_not_repeat_a_product_that_no_gradient_reads() -> None:
    remat = jax.checkpoint(lambda p, x: jax.nn.relu(x @ p["a"] + p["bias"]) @ p["b"])
    loss = lambda p, x: jnp.sum(remat(p, x) ** 2)  # noqa: E731
    plain, again = (flops(jax.value_and_grad(f), LAYERS, array(B, I)) for f in (two_layers, loss))
    assert again - plain == dense(B, I, H)


def test_a_policy_that_keeps_products_repeats_none() -> None:
    policy = jax.checkpoint_policies.checkpoint_dots
    costs = [
        cost_of(partial(stacked, wrap=wrap, rolled=False), {"w": array(4, H, H)}, array(B, H), rows=B)
        for wrap in (lambda block: block, partial(jax.checkpoint, policy=policy), jax.checkpoint)
    ]
    plain, dots, full = costs
    assert dots.step_flops == plain.step_flops < full.step_flops
    assert dots.saved_bytes > full.saved_bytes


# ---------------------------------------------------------------- shipped models


def module_of(config: Any, shape: tuple[int, ...], outputs: int) -> ModuleDef:
    return ModuleDef(lambda rngs: MODELS[config.kind].make(config, shape, outputs, rngs=rngs))


def model_cost(config: Any, shape: tuple[int, ...], outputs: int, rows: int = B) -> Cost:
    """Cross-entropy of a model in training form; only the parameters are differentiated."""
    module = module_of(config, shape, outputs)

    def loss(params: Any, model_state: Any, key: Any, x: Any, y: Any) -> Any:
        logits = module.bind(params, model_state, key)(x)
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, y))

    key = jax.eval_shape(lambda: jax.random.key(0))
    batch = array(rows, *shape), array(rows, dtype=jnp.int32)
    return cost_of(loss, module.params, module.model_state, key, *batch, rows=rows)


def conv(rows: int, side: int, kernel: int, into: int, out: int) -> int:
    return 2 * rows * side * side * kernel * kernel * into * out


@pytest.mark.parametrize("norm", ["none", "batch"])
def test_a_step_of_an_mlp_is_three_forwards_less_the_gradient_of_its_inputs(norm: str) -> None:
    cost = model_cost(schema.Mlp(hidden=(16, 12), norm=norm, dropout=0.1), (4, 4, 1), 3)
    assert cost.forward_flops == dense(B, 16, 16, 12, 3)
    assert cost.step_flops == 3 * cost.forward_flops - dense(B, 16, 16)
    assert cost.rows == B


def test_a_cnn_costs_its_convolutions_and_dense_layers() -> None:
    cost = model_cost(schema.Cnn(channels=(4, 6), dense=(10,)), (9, 9, 2), 3)
    first = conv(B, 9, 3, 2, 4)
    assert cost.forward_flops == first + conv(B, 5, 3, 4, 6) + dense(B, 3 * 3 * 6, 10, 3)  # 9 -> 5 -> 3 by pooling
    assert cost.step_flops == 3 * cost.forward_flops - first


def test_a_resnet_costs_its_convolutions_its_shortcuts_and_its_head() -> None:
    cost = model_cost(schema.Resnet(depth=8, width=4), (16, 16, 3), 10)
    stem = conv(B, 16, 3, 3, 4)
    blocks = 2 * conv(B, 16, 3, 4, 4)
    for side, width in ((8, 8), (4, 16)):
        blocks += conv(B, side, 3, width // 2, width) + conv(B, side, 3, width, width)
        blocks += conv(B, side, 1, width // 2, width)
    assert cost.forward_flops == stem + blocks + dense(B, 16, 10)
    assert cost.step_flops == 3 * cost.forward_flops - stem


def test_resnet_50_has_its_published_four_billion_multiply_adds() -> None:
    module = module_of(schema.Resnet(depth=50, width=64), (224, 224, 3), 1000)
    run = lambda params, state, x: module.bind(params, state, None)(x)  # noqa: E731
    cost = flops(run, module.params, module.model_state, array(1, 224, 224, 3))
    # torchvision's model card: 4.09 G multiply-adds, stride on the 3x3, as here.
    assert round(cost / 2e9, 2) == 4.09


def test_remat_of_a_resnet_repeats_its_blocks_and_keeps_less() -> None:
    plain, remat = (
        model_cost(schema.Resnet(depth=8, width=4, remat=form), (16, 16, 3), 10) for form in ("none", "full")
    )
    stem_and_head = conv(B, 16, 3, 3, 4) + dense(B, 16, 10)
    assert remat.step_flops - plain.step_flops == plain.forward_flops - stem_and_head
    assert remat.saved_bytes < plain.saved_bytes / 2


def test_cost_grows_with_the_rows() -> None:
    config = schema.Mlp(hidden=(16, 12))
    one, two = (model_cost(config, (8,), 3, rows) for rows in (B, 2 * B))
    assert (two.forward_flops, two.step_flops) == (2 * one.forward_flops, 2 * one.step_flops)
    per_row = (two.saved_bytes - one.saved_bytes) // B
    assert per_row >= (16 + 12) * (1 + 4)  # of each hidden layer at least the sign and the features
    assert one.saved_bytes - B * per_row < 100  # the rest are scalars and the like


def test_a_users_own_module_is_counted_as_any_other() -> None:
    class Tower(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.layers = nnx.List(nnx.Linear(H, H, rngs=rngs) for _ in range(3))

        def __call__(self, x: Any) -> Any:
            for layer in self.layers:
                x = nnx.remat(lambda layer, x: nnx.relu(layer(x)))(layer, x)
            return x

    module = ModuleDef(Tower)
    loss = lambda params, x: jnp.sum(module.bind(params, {}, None)(x))  # noqa: E731
    cost = cost_of(loss, module.params, array(B, H), rows=B)
    layer = dense(B, H, H)
    assert cost == Cost(
        rows=B,
        forward_flops=3 * layer,
        step_flops=(3 + 3 + 3 + 2) * layer,  # forward, again, weights, inputs of all but the first
        saved_bytes=2 * B * H * 4,  # the inputs of all but the first
    )
