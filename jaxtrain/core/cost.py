"""What a step costs, counted from the traced program: floating-point operations, and bytes kept for the backward pass.

In: a function and its arguments, abstract (`jax.ShapeDtypeStruct`) or real. Out: whole numbers. Nothing is compiled or
run and no array is made. XLA's `cost_analysis` is not used: it counts the body of a loop once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import Jaxpr, JaxprEqn, Literal


@dataclass(frozen=True)
class Cost:
    """One batch of `rows` rows, over all devices.

    forward_flops: operations of the loss alone. step_flops: of the loss and its gradient, recomputation included;
    the optimizer, which is element-wise, is not in it. saved_bytes: kept from the forward for the backward pass.
    """

    rows: int
    forward_flops: int
    step_flops: int
    saved_bytes: int


def cost_of(loss: Callable[..., Any], params: Any, *args: Any, rows: int) -> Cost:
    """The cost of `loss(params, *args) -> scalar`, differentiated in `params`. `rows`: the rows that `args` hold."""
    return Cost(
        rows=rows,
        forward_flops=flops(loss, params, *args),
        step_flops=flops(jax.value_and_grad(loss), params, *args),
        saved_bytes=saved_bytes(loss, params, *args),
    )


def flops(function: Callable[..., Any], *args: Any) -> int:
    """Operations of the matrix products and convolutions of `function(*args)`: 2 for each multiply-add.

    Element-wise work, sums, sorting, FFTs and matrix factorisations count nothing: the first two are bound by memory,
    not by arithmetic, and the peak of a device is stated for products. So this is what utilisation is measured by.

    - product [B, M, K] x [B, K, N]: 2 B M K N. A ragged one: each row meets one group.
    - convolution: 2 x batch x outputs x inputs of one group x, for each axis of `x` positions, a kernel of `w` taps
      and `y` output positions, min(w y, w x, x y). That is w y as published counts have it, taps on the padding
      included, unless fewer pairs can exist: zeros that a dilated input is filled with are not multiplied, nor is
      more padding than input. Input, kernel and output change places in the gradients, so each of the two gradients
      costs what the forward costs, whatever the stride, padding, dilation and groups.
    - `scan`, and `fori_loop` of constant bounds: body x length. `while`: its body once, for the length is not known.
    - `cond` and `switch`: the dearest branch (where `vmap` makes jax run every branch, all of them).
    - `shard_map`: the work of all shards. A Pallas kernel: its body x grid. Kernels without a traced body (cuDNN
      attention, foreign calls) count nothing.
    - Everything else that holds a program (jit, remat, custom derivatives): that program. Dead code counts too.
    """
    return flops_of(jax.make_jaxpr(function)(*args))


def flops_of(program: Any) -> int:
    """`flops` of a program that is traced already (a Jaxpr, closed or not)."""
    return _flops(_body(program))


def saved_bytes(function: Callable[..., Any], params: Any, *args: Any) -> int:
    """Bytes that the backward pass of `function(params, *args)`, differentiated in `params`, keeps from the forward.

    These are the residuals of `jax.vjp`, each array once. Not counted: `params`, `args` and arrays that the function
    closes over (they are there anyway), and what depends on none of them (a causal mask). An array that is only
    reshaped, transposed or broadcast counts at its source. Copies of params in another dtype do count. What `jax.jit`
    compiles may keep less, by computing element-wise work again, and needs working memory besides.
    """

    def residuals(params: Any, *args: Any) -> Any:
        # The pullback is a pytree: its leaves are what it keeps.
        return jax.vjp(lambda p: function(p, *args), params)[1]

    program = _body(jax.make_jaxpr(residuals)(params, *args))
    return sum(source.size for source in set(_sources(program, [_Source(0) for _ in program.invars])))


# ---------------------------------------------------------------- operations


def _flops(program: Jaxpr) -> int:
    return sum(_flops_of(eqn) for eqn in program.eqns)


def _flops_of(eqn: JaxprEqn) -> int:
    name = eqn.primitive.name
    if name in _MULTIPLY_ADDS:
        return 2 * _MULTIPLY_ADDS[name](eqn)
    inner = [_flops(program) for program in _programs(eqn)]
    return max(inner) if name == "cond" else sum(inner) * _repeats(eqn)


def _programs(eqn: JaxprEqn) -> Iterator[Jaxpr]:
    if eqn.primitive.name == "custom_linear_solve":  # it carries four programs and runs one
        return _inside(eqn.params["jaxprs"].solve)
    return _inside(list(eqn.params.values()))


def _inside(value: Any) -> Iterator[Jaxpr]:
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from _inside(item)
    elif isinstance(program := _body(value), Jaxpr):
        yield program


def _body(value: Any) -> Any:
    """The Jaxpr of a ClosedJaxpr (one class from jax 0.12 on) or of a primitive that is an object; else the value."""
    return getattr(value, "jaxpr", value)


def _repeats(eqn: JaxprEqn) -> int:
    match eqn.primitive.name:
        case "scan":
            return int(eqn.params["length"])
        case "shard_map":
            return math.prod(eqn.params["mesh"].shape[axis] for axis in eqn.params["newly_manual_axes"])
        case "pallas_call":
            return math.prod(n for n in eqn.params["grid_mapping"].grid if isinstance(n, int))
    return 1


def _product(eqn: JaxprEqn) -> int:
    """Every element of the left side meets every column of the right: neither contracted, nor batch, nor group."""
    left, right, *_ = map(_shape, eqn.invars)
    ragged = eqn.params.get("ragged_dot_dimension_numbers")
    (_, contracted), (_, batch) = ragged.dot_dimension_numbers if ragged else eqn.params["dimension_numbers"]
    met = {*contracted, *batch, *(ragged.rhs_group_dimensions if ragged else ())}
    return math.prod(left) * math.prod(n for axis, n in enumerate(right) if axis not in met)


def _convolution(eqn: JaxprEqn) -> int:
    shapes = map(_shape, (*eqn.invars, *eqn.outvars))
    specs = eqn.params["dimension_numbers"]
    # [batch, inputs, ...], [outputs, inputs of one group, ...], [batch, outputs, ...]
    left, kernel, out = ([shape[axis] for axis in spec] for shape, spec in zip(shapes, specs, strict=True))
    pairs = (min(w * y, w * x, x * y) for x, w, y in zip(left[2:], kernel[2:], out[2:], strict=True))
    return math.prod((*out[:2], kernel[1], *pairs))


def _shape(atom: Any) -> tuple[int, ...]:
    return tuple(atom.aval.shape)


_MULTIPLY_ADDS: dict[str, Callable[[JaxprEqn], int]] = {
    "dot_general": _product,
    "ragged_dot_general": _product,
    "conv_general_dilated": _convolution,
}

# ---------------------------------------------------------------- bytes


@dataclass(frozen=True, eq=False)
class _Source:
    """An array that the program makes, in bytes; 0 for one that is there anyway. Two are equal if they are one."""

    size: int


_CONSTANT = _Source(0)

# The i-th output is the i-th input with its elements moved or repeated: XLA does that where the array is read.
_VIEWS = {
    *("reshape", "squeeze", "transpose", "broadcast_in_dim", "copy", "stop_gradient"),
    *("name", "reduce_precision", "optimization_barrier", "sharding_constraint"),
}
# Written out by XLA where they are called, so what happens inside is seen by the caller. Loops are not.
_CALLS = {"jit", "closed_call", "remat2", "custom_jvp_call", "custom_vjp_call"}


def _sources(program: Jaxpr, given: Sequence[_Source]) -> list[_Source]:
    """For each output the array that it comes from, if those of the inputs are `given`."""
    known: dict[Any, _Source] = dict(zip(program.invars, given, strict=True))
    known |= {var: _Source(0) for var in program.constvars}

    def read(atoms: Sequence[Any]) -> list[_Source]:
        return [_CONSTANT if isinstance(atom, Literal) else known[atom] for atom in atoms]

    for eqn in program.eqns:
        known.update(zip(eqn.outvars, _made(eqn, read(eqn.invars)), strict=True))
    return read(program.outvars)


def _made(eqn: JaxprEqn, sources: list[_Source]) -> list[_Source]:
    name = eqn.primitive.name
    if name in _VIEWS:
        return sources[: len(eqn.outvars)]
    if name in _CALLS:
        return _sources(next(_programs(eqn)), sources)
    # A random mask is kept even if its seed is a number in the program.
    if all(source is _CONSTANT for source in sources) and not name.startswith("random_"):
        return [_CONSTANT for _ in eqn.outvars]
    return [_Source(_size(var.aval)) for var in eqn.outvars]


def _size(aval: Any) -> int:
    return math.prod(aval.shape) * int(aval.dtype.itemsize) if hasattr(aval, "dtype") else 0  # a token is no array
