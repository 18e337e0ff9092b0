"""The bridge between an `nnx.Module` and plain dicts of arrays.

A module is split once, abstractly, into two graph definitions (training and evaluation form) and the names of its
arrays. Inside jit `bind` puts arrays and random keys back into a fresh module. In: a function `make(rngs)`.
Out: `params` and `model_state`, flat dicts {"layers.0.kernel": array}. RNG state is split off: it is derived anew in
every step from (seed, step), so it never needs saving.
"""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.core.rng import stream_key

Arrays = dict[str, jax.Array]
Make = Callable[[nnx.Rngs], nnx.Module]


class ModuleDef:
    """A module without its arrays. Holds shapes only; `init` and `bind` are for use inside jit.

    params, model_state: {name: ShapeDtypeStruct}, in the order in which flax flattens them.
    takes_mask: whether `__call__` has a parameter `mask` ([B] bool: real rows), as masked BatchNorm needs.
    """

    def __init__(self, make: Make) -> None:
        self._make = make
        module = nnx.eval_shape(lambda: make(nnx.Rngs(jax.random.key(0))))
        module.eval()  # type: ignore[no-untyped-call]
        self._eval_graph = _split(module)[0]
        module.train()  # type: ignore[no-untyped-call]
        self._train_graph, params, rngs, rest = _split(module)
        self.params, self._params_tree = _flatten(params)
        self.model_state, self._rest_tree = _flatten(rest)
        self._rngs, self._rngs_tree = _flatten(rngs)
        self.takes_mask = "mask" in inspect.signature(type(module).__call__).parameters
        self.name = type(module).__name__

    def init(self, seed: int) -> tuple[Arrays, Arrays]:
        """Fresh (params, model_state) of `seed`."""
        module = self._make(nnx.Rngs(stream_key(seed, "init")))
        return self.extract(module)

    def extract(self, module: nnx.Module) -> tuple[Arrays, Arrays]:
        """The (params, model_state) that a module holds."""
        _, params, _, rest = _split(module)
        return _flatten(params)[0], _flatten(rest)[0]

    def bind(self, params: Arrays, model_state: Arrays, key: jax.Array | None) -> Any:
        """A module with these arrays: in training form with random keys from `key`, in evaluation form without."""
        graph = self._eval_graph if key is None else self._train_graph
        return nnx.merge(
            graph,
            self._params_tree.unflatten([params[name] for name in self.params]),
            self._rngs_tree.unflatten(self._random_leaves(jax.random.key(0) if key is None else key)),
            self._rest_tree.unflatten([model_state[name] for name in self.model_state]),
        )

    def _random_leaves(self, key: jax.Array) -> list[jax.Array]:
        leaves = []
        for name, leaf in self._rngs.items():
            if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                # By name, so that two dropouts of one module never share a mask.
                own = jax.random.fold_in(key, zlib.crc32(name.encode()) & 0x7FFFFFFF)
                leaves.append(jax.random.split(own, leaf.shape) if leaf.shape else own)
            else:
                leaves.append(jnp.zeros(leaf.shape, leaf.dtype))
        return leaves


def _split(module: nnx.Module) -> tuple[Any, Any, Any, Any]:
    parts: Any = nnx.split(module, nnx.Param, nnx.RngState, ...)
    graph, params, rngs, rest = parts
    return graph, params, rngs, rest


def name_of(path: Any) -> str:
    """The dotted name of an array by its path in a state."""
    parts = [str(getattr(p, "key", getattr(p, "idx", getattr(p, "name", p)))) for p in path]
    return ".".join(parts[:-1] if parts and parts[-1] == "value" else parts)  # the Variable's own slot


def _flatten(state: Any) -> tuple[dict[str, Any], Any]:
    paths, tree = jax.tree_util.tree_flatten_with_path(state)
    named = {}
    for path, leaf in paths:
        named[name_of(path)] = leaf
    if len(named) != len(paths):
        raise ValueError("two arrays of the module have one name; names of submodules must not contain dots")
    return named, tree
