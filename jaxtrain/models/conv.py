"""Convolutions and pooling as flax has them, written for XLA:CPU as products of matrices and shifted maxima.

Parameters, their names and the values are those of nnx.Conv and nnx.max_pool; other backends get exactly these.
benchmarks/conv.py has the times.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

_CACHED = 2**21
"""Elements of a product of a sequence with all taps, up to which it is faster."""
_WRITTEN_OUT = 64
"""Taps of a kernel for each channel up to which they are written out: each is a part of the program."""


class Conv(nnx.Conv):
    """nnx.Conv, channels last, by `convolve`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, conv_general_dilated=convolve, **kwargs)
        if self.padding == "CAUSAL" and jax.default_backend() == "cpu":
            # nnx.Conv pads the array, and the zeros would be multiplied.
            (taps,), (dilation,) = self.kernel_size, np.broadcast_to(self.kernel_dilation or 1, 1).tolist()
            self.padding = (((taps - 1) * dilation, 0),)


def convolve(
    x: jax.Array,
    kernel: jax.Array,
    strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    *,
    rhs_dilation: Sequence[int] | None = None,
    **rest: Any,
) -> jax.Array:
    """lax.conv_general_dilated for x [B, ..., C] and kernel [..., C / groups, out]. `rest`: its other arguments.

    On CPU three kinds are products of matrices, a fourth a sum of shifted arrays:
    - a map with fewer places than the kernel has taps, before or after it, where XLA swaps image and kernel;
    - a kernel of one tap;
    - a sequence by a few taps, as one product for all taps: for its gradients XLA turns the arrays around in memory.
      Up to what fits into a cache;
    - each channel by a kernel of its own.
    benchmarks/conv.py has what each kind is worth.
    """
    dilation = tuple(rhs_dilation or (1,) * (x.ndim - 2))
    if isinstance(padding, str):
        window = [(k - 1) * d + 1 for k, d in zip(kernel.shape[:-2], dilation, strict=True)]
        padding = lax.padtype_to_pads(x.shape[1:-1], window, strides, padding)
    axes = [Axis(*of) for of in zip(x.shape[1:-1], kernel.shape, strides, dilation, padding, strict=False)]
    groups, undilated = rest.get("feature_group_count", 1), all(d == 1 for d in rest.get("lhs_dilation") or ())
    form = product_form(x, kernel, axes, groups) if jax.default_backend() == "cpu" and undilated else None
    if form is not None:
        return form(x, kernel, axes, rest.get("precision"))
    return lax.conv_general_dilated(x, kernel, strides, padding, rhs_dilation=dilation, **rest)


class Axis(NamedTuple):
    """One axis of a window that moves over an image: places, taps of the window, and how they meet."""

    size: int
    taps: int
    stride: int
    dilation: int
    padding: tuple[int, int]

    @property
    def out(self) -> int:
        return (self.size + sum(self.padding) - (self.taps - 1) * self.dilation - 1) // self.stride + 1

    def meets(self, tap: int) -> tuple[int, int, int]:
        """The outputs [first, last) that see the image, not its padding, by this tap; the place that the first sees."""
        shift = tap * self.dilation - self.padding[0]
        first = max(0, -(shift // self.stride))
        return first, min(self.out, (self.size - 1 - shift) // self.stride + 1), first * self.stride + shift


def product_form(x: jax.Array, kernel: jax.Array, axes: Sequence[Axis], groups: int) -> Callable[..., Any] | None:
    """How XLA:CPU computes this convolution fastest by products, or None: as it comes."""
    taps = math.prod(axis.taps for axis in axes)
    places, outputs = math.prod(axis.size for axis in axes), math.prod(axis.out for axis in axes)
    if outputs < 1 or groups > 1:
        each = kernel.shape[-2] == 1 and kernel.shape[-1] == x.shape[-1]
        return _by_shifts if outputs > 0 and each and taps <= _WRITTEN_OUT else None
    if taps == 1 or taps > min(places, outputs):
        return _by_products
    short = len(axes) == 1 and axes[0].stride == 1 and taps <= 5
    return _by_one_product if short and len(x) * places * taps * kernel.shape[-1] <= _CACHED else None


def _taps(axes: Sequence[Axis]) -> Iterator[tuple[int, ...]]:
    return itertools.product(*(range(axis.taps) for axis in axes))


def _by_products(x: jax.Array, kernel: jax.Array, axes: Sequence[Axis], precision: Any) -> jax.Array:
    """The sum over the taps: the part of x that outputs see by one, times its matrix [C, out]; in fp32."""
    count, (inputs, outputs) = math.prod(kernel.shape[:-2]), kernel.shape[-2:]
    # Split, not indexed: the gradient is then put together once, and not added up from `count` padded arrays.
    matrices = lax.split(kernel.reshape(count, inputs, outputs), (1,) * count)
    y: Any = jnp.zeros((len(x), *(axis.out for axis in axes), outputs), jnp.float32)
    for tap, matrix in zip(_taps(axes), matrices, strict=True):
        part, beside = _seen(x, axes, tap)
        if part.size == 0:  # the tap meets nothing but padding
            continue
        product = jnp.matmul(
            part.reshape(-1, inputs), matrix[0], precision=precision, preferred_element_type=jnp.float32
        )
        y += jnp.pad(product.reshape(*part.shape[:-1], outputs), beside)
    return y.astype(x.dtype)


def _by_one_product(x: jax.Array, kernel: jax.Array, axes: Sequence[Axis], precision: Any) -> jax.Array:
    """Every place of x times the matrices of all taps [C, taps x out]; outputs are sums of its shifted parts."""
    outputs = kernel.shape[-1]
    matrix = jnp.moveaxis(kernel, -2, 0).reshape(x.shape[-1], -1)
    z = jnp.matmul(x.reshape(-1, x.shape[-1]), matrix, precision=precision, preferred_element_type=jnp.float32)
    z = z.reshape(*x.shape[:-1], -1)
    y: Any = jnp.zeros((len(x), *(axis.out for axis in axes), outputs), jnp.float32)
    for i, tap in enumerate(_taps(axes)):
        part, beside = _seen(z[..., i * outputs : (i + 1) * outputs], axes, tap)
        if part.size:
            y += jnp.pad(part, beside)
    return y.astype(x.dtype)


def _by_shifts(x: jax.Array, kernel: jax.Array, axes: Sequence[Axis], precision: Any) -> jax.Array:
    """The sum over the taps: what outputs see by one, times its factor for each channel; in fp32."""
    nothing = jnp.zeros((), jnp.float32)
    padded = lax.pad(x.astype(jnp.float32), nothing, [(0, 0, 0), *((*axis.padding, 0) for axis in axes), (0, 0, 0)])
    strides = (1, *(axis.stride for axis in axes), 1)
    y: Any = 0.0
    for tap in _taps(axes):
        first = [i * axis.dilation for i, axis in zip(tap, axes, strict=True)]
        ends = [at + (axis.out - 1) * axis.stride + 1 for at, axis in zip(first, axes, strict=True)]
        part = lax.slice(padded, (0, *first, 0), (len(x), *ends, x.shape[-1]), strides)
        y += part * kernel[(*tap, 0)].astype(jnp.float32)
    return y.astype(x.dtype)


def _seen(x: jax.Array, axes: Sequence[Axis], tap: Sequence[int]) -> tuple[jax.Array, list[tuple[int, int]]]:
    """(the part of x that outputs see by a tap, how many outputs before and after it see padding on each axis)."""
    met = [axis.meets(i) for axis, i in zip(axes, tap, strict=True)]
    counts = [max(0, last - first) for first, last, _ in met]
    if not all(counts):
        return x[:0], []
    ends = [at + (n - 1) * axis.stride + 1 for axis, n, (_, _, at) in zip(axes, counts, met, strict=True)]
    strides = (1, *(axis.stride for axis in axes), 1)
    part = lax.slice(x, (0, *(at for *_, at in met), 0), (len(x), *ends, x.shape[-1]), strides)
    beside = [(first, axis.out - last) for axis, (first, last, _) in zip(axes, met, strict=True)]
    return part, [(0, 0), *beside, (0, 0)]


def max_pool(x: jax.Array, window: int, stride: int, padding: int | str = 0) -> jax.Array:
    """The largest of each window: [B, H, W, C] -> [B, out, out, C]. The gradient goes to the first of equal ones.

    On CPU by shifted maxima: XLA sorts out the places of the gradient by index arrays and a scatter, which takes longer
    (benchmarks/conv.py).
    """
    pairs: Any = padding if isinstance(padding, str) else ((padding, padding),) * 2
    if jax.default_backend() != "cpu":
        return nnx.max_pool(x, window_shape=(window, window), strides=(stride, stride), padding=pairs)
    if isinstance(pairs, str):
        pairs = tuple(lax.padtype_to_pads(x.shape[1:-1], (window, window), (stride, stride), pairs))
    return _pool(x, tuple(Axis(n, window, stride, 1, pair) for n, pair in zip(x.shape[1:-1], pairs, strict=True)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _pool(x: jax.Array, axes: tuple[Axis, ...]) -> jax.Array:
    y = jnp.full((len(x), *(axis.out for axis in axes), x.shape[-1]), -jnp.inf, x.dtype)
    for tap in _taps(axes):
        part, beside = _seen(x, axes, tap)
        if part.size:
            y = jnp.maximum(y, jnp.pad(part, beside, constant_values=-jnp.inf))
    return y


def _pool_forward(x: jax.Array, axes: tuple[Axis, ...]) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    y = _pool(x, axes)
    return y, (x, y)


def _pool_backward(axes: tuple[Axis, ...], kept: tuple[jax.Array, jax.Array], dy: jax.Array) -> tuple[jax.Array]:
    (x, y), (down, across) = kept, axes
    grid = _grid(x, axes)
    taken = jnp.zeros(y.shape, bool)
    # By the remainder of a place by the stride: what such places get is a sum of arrays shifted by whole strides.
    got: dict[tuple[int, int], Any] = {}
    for tap in _taps(axes):
        hit = (grid[_place(axes, tap)] == y) & ~taken
        taken |= hit
        whole, part = zip(*(divmod(i, axis.stride) for i, axis in zip(tap, axes, strict=True)), strict=True)
        beside = [(q, n - axis.out - q) for q, n, axis in zip(whole, grid.shape[1:5:2], axes, strict=True)]
        share = jnp.pad(jnp.where(hit, dy, 0), ((0, 0), *beside, (0, 0)))
        got[part] = got[part] + share if part in got else share
    nothing = jnp.zeros((len(x), *grid.shape[1:5:2], x.shape[-1]), dy.dtype)
    columns = [[got.get((i, j), nothing) for j in range(across.stride)] for i in range(down.stride)]
    dx = jnp.stack([jnp.stack(row, 3) for row in columns], 2)
    dx = dx.reshape(len(x), *(n * axis.stride for n, axis in zip(grid.shape[1:5:2], axes, strict=True)), x.shape[-1])
    # What no window reaches gets nothing; what lies in the padding is lost.
    cuts = [(-axis.padding[0], axis.size + axis.padding[0] - n) for n, axis in zip(dx.shape[1:3], axes, strict=True)]
    return (lax.pad(dx, jnp.zeros((), dx.dtype), [(0, 0, 0), *((*cut, 0) for cut in cuts), (0, 0, 0)]),)


_pool.defvjp(_pool_forward, _pool_backward)


def _grid(x: jax.Array, axes: tuple[Axis, ...]) -> jax.Array:
    """[B, H, W, C] -> [B, rows, stride, columns, stride, C], padded with -inf and cut to what windows reach."""
    rows = [axis.out + (axis.taps - 1) // axis.stride for axis in axes]
    cuts = [(a.padding[0], n * a.stride - a.padding[0] - a.size, 0) for n, a in zip(rows, axes, strict=True)]
    padded = lax.pad(x, jnp.array(-jnp.inf, x.dtype), [(0, 0, 0), *cuts, (0, 0, 0)])
    (down, across), (height, width) = axes, rows
    return padded.reshape(len(x), height, down.stride, width, across.stride, x.shape[-1])


def _place(axes: tuple[Axis, ...], tap: tuple[int, ...]) -> tuple[Any, ...]:
    """Where `_grid` holds what the outputs see by a tap."""
    place: list[Any] = [slice(None)]
    for i, axis in zip(tap, axes, strict=True):
        whole, part = divmod(i, axis.stride)
        place += [slice(whole, whole + axis.out), part]
    return tuple(place)
