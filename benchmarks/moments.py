"""Moments in 8 bits against float32: directions on the same gradients, accuracy and loss on the same seeds, bytes.

    python benchmarks/moments.py ../shared/data/tinyshakespeare/input.txt

Bounds that were set before the first run: mean accuracy on digits at most 0.005 apart; loss on Shakespeare at most 2 %.
"""

from __future__ import annotations

import math
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from record import record

import jaxtrain as jt
from jaxtrain.build import build
from jaxtrain.config import load, schema
from jaxtrain.core import moments
from jaxtrain.core.optimizer import make_optimizer
from jaxtrain.core.step import gradients

UPDATES = (200, 2000)
TYPES = ("float32", "bfloat16", "int8")
DIGITS, SHAKESPEARE = range(5), [("adamw", 0), ("adamw", 1), ("muon", 0)]
KEYS = {"adamw": {}, "muon": {"optimizer.kind": "muon", "optimizer.peak_lr": 0.02, "optimizer.b2": 0.99}}
Values = Callable[[jax.Array], jax.Array]


def table(signed: bool) -> Values:
    """The nearest value of a dynamic table as in the paper: seven powers of ten, each with twice the steps before."""
    values = [0.0, 1.0]
    for power in range(7):
        edges = np.linspace(0.1, 1.0, 2 ** (power + (0 if signed else 1)) + 1)
        values += list(10.0 ** (power - 6) * (edges[:-1] + edges[1:]) / 2)
    if signed:
        values += [-x for x in values[2:]]
    known = jnp.asarray(sorted(values), jnp.float32)
    borders = (known[1:] + known[:-1]) / 2
    return lambda x: known[jnp.searchsorted(borders, x)]


def by_table(x: jax.Array, dtype: str) -> jax.Array:
    """An array as it is read after it was kept by the table, in the blocks of core/moments.py."""
    axis, size = moments._blocking(x.shape)
    blocks = moments._split(x, axis, size)
    scales = jnp.max(jnp.abs(blocks), axis + 1, keepdims=True)
    share = blocks / jnp.where(scales > 0.0, scales, 1.0)
    return moments._join(table(dtype == "int8")(share) * scales, axis, x.shape)


def by_codes(roots: dict[str, int]) -> Callable[[jax.Array, str], jax.Array]:
    """As it is read after it was kept by `quantise`, with so many roots for each type."""
    codes = {dtype: (moments.CODES[dtype][0], roots[dtype]) for dtype in roots}

    def kept(x: jax.Array, dtype: str) -> jax.Array:
        with mock.patch.object(moments, "CODES", codes):  # while it is traced
            return moments.dequantise(moments.quantise(x, dtype))

    return kept


ARMS: dict[str, Callable[[jax.Array, str], jax.Array]] = {
    "as in core/moments.py": by_codes({"int8": 1, "uint8": 2}),
    "a table as in the paper": by_table,
    "equal steps of m and sqrt(v)": by_codes({"int8": 0, "uint8": 1}),
    "equal steps of m and v": by_codes({"int8": 0, "uint8": 0}),
}


def longest(shape: tuple[int, ...]) -> tuple[int, int]:
    """(axis, size) of blocks along the other axis: at most `BLOCK` values of the longest."""
    axis = max(range(len(shape)), key=lambda i: shape[i])
    return axis, next(size for size in range(moments.BLOCK, 0, -1) if shape[axis] % size == 0)


AXES = {"shortest": moments._blocking, "longest": longest}


def apart(text: str) -> dict[str, dict[int, float]]:
    """{arm: {updates: relative distance of the direction from Adam's in float32}} along one run in float32."""
    tree = {
        "name": "apart",
        "model": {"kind": "gpt", "layers": 2, "heads": 4, "width": 128},
        "data": {"kind": "text", "path": text, "block_size": 64},
        "optimizer": {"kind": "adamw", "peak_lr": 1e-3},
        "train": {"duration": UPDATES[-1], "global_batch_size": 12},
    }
    job = build(load(tree))
    adam, state, feeder, batches = make_optimizer(schema.Adam()), job.init(), job.feeder(), job.host_batches()
    large = [n for n, x in state["params"].items() if x.size >= moments.SMALL and "embed" not in n]

    @jax.jit
    def follow(shadows: Any, state: Any, batch: Any) -> Any:
        found = gradients(job.spec, state, batch)
        factor = jnp.minimum(1.0, 1.0 / (optax.tree.norm(found) + 1e-6))
        clipped = {name: found[name] * factor for name in large}
        exact, shadows["exact"] = adam.update(clipped, shadows["exact"])
        distances = {}
        for name, kept in ARMS.items():
            direction, new = adam.update(clipped, shadows[name])
            mu, nu = ({n: kept(x, t) for n, x in old.items()} for old, t in ((new.mu, "int8"), (new.nu, "uint8")))
            shadows[name] = new._replace(mu=mu, nu=nu)
            difference = optax.tree.norm(jax.tree.map(jnp.subtract, direction, exact))
            distances[name] = difference / optax.tree.norm(exact)
        return shadows, distances

    zero = {name: jnp.zeros(state["params"][name].shape) for name in large}
    shadows = {name: adam.init(zero) for name in ("exact", *ARMS)}
    seen: dict[str, list[float]] = {name: [] for name in ARMS}
    for step in range(UPDATES[-1]):
        batch = {name: jnp.asarray(x) for name, x in batches(step).items()}
        shadows, distances = follow(shadows, state, batch)
        for name in ARMS:
            seen[name].append(float(distances[name]))
        state, _ = job.advance(state, feeder(step))
    return {name: {n: statistics.mean(own[n - 50 : n]) for n in UPDATES} for name, own in seen.items()}


def trained(config: str, place: Path, split: str, figure: str, **keys: Any) -> dict[str, Any]:
    dotted = {name.replace("__", "."): value for name, value in keys.items()}
    with jt.train(config, run_dir=place, quiet=True, **dotted) as run:
        assert run.state is not None
        state = run.state
        values = sum(x.size for x in state["params"].values())
        held = sum(x.nbytes for x in jax.tree.leaves(state["opt_state"]))
        rows = [row[f"eval/{figure}"] for row in run.metrics() if f"eval/{figure}" in row]
        return {figure: run.test[figure] if split == "test" else rows[-1], "bytes": held / values}


def main() -> None:
    text = sys.argv[1]
    raw: dict[str, Any] = {"apart": {}, "digits": {}, "shakespeare": {}}
    for axis, blocking in AXES.items():
        with mock.patch.object(moments, "_blocking", blocking):
            raw["apart"][axis] = apart(text)
    print(raw["apart"], file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for dtype in TYPES:
            keys = {"optimizer__moment_dtype": dtype}
            raw["digits"][dtype] = [
                trained(
                    "digits",
                    Path(folder) / f"{dtype}{seed}",
                    "test",
                    "accuracy",
                    train__seed=seed,
                    data__split_seed=seed,
                    **keys,
                )
                for seed in DIGITS
            ]
            print(dtype, raw["digits"][dtype], file=sys.stderr, flush=True)
        for kind, seed in SHAKESPEARE:
            for dtype in TYPES if kind == "adamw" else (TYPES[0], TYPES[2]):
                own = {"data.path": text, "train.seed": seed, "optimizer.moment_dtype": dtype, **KEYS[kind]}
                place = Path(folder) / f"{kind}{seed}{dtype}"
                found = trained("shakespeare", place, "eval", "loss", **own)
                raw["shakespeare"].setdefault(f"{kind}, seed {seed}", {})[dtype] = found
                print(kind, seed, dtype, found, file=sys.stderr, flush=True)
    record("moments", "Moments in 8 bits", lines(raw), raw, ["core/moments.py", "core/optimizer.py"])


def lines(raw: dict[str, Any]) -> list[str]:
    """The tables."""
    first, last = UPDATES
    page = [
        "Relative distance of Adam's direction from float32's, all given the same gradients (a gpt of 2 layers, 128 "
        f"wide, on Shakespeare; b2 0.999), mean of 50 updates up to the {first}th and the {last:,}th, with blocks "
        "along the shortest axis that holds one (as in core/moments.py) or along the longest:\n",
        "| code | " + " | ".join(f"{axis} axis, {n:,}" for axis in AXES for n in UPDATES) + " |",
        "| --- |" + " --- |" * 2 * len(UPDATES),
    ]
    for arm in ARMS:
        page.append(f"| {arm} | " + " | ".join(f"{raw['apart'][axis][arm][n]:.3f}" for axis in AXES for n in UPDATES))
        page[-1] += " |"
    page += ["", "Whole runs on the same seeds; bytes of the optimizer's state for each parameter:\n"]
    page += ["| run | float32 | bfloat16 | int8 | bytes |", "| --- | --- | --- | --- | --- |"]
    digits = raw["digits"]
    figures = [f"{statistics.mean(r['accuracy'] for r in digits[t]):.4f}" for t in TYPES]
    least = [f" ({min(r['accuracy'] for r in digits[t]):.4f})" for t in TYPES]
    weights = ", ".join(f"{digits[t][0]['bytes']:.2f}" for t in TYPES)
    cells = " | ".join(a + b for a, b in zip(figures, least, strict=True))
    page.append(f"| digits, test accuracy, mean of {len(DIGITS)} seeds (least) | {cells} | {weights} |")
    for name, own in raw["shakespeare"].items():
        cells = " | ".join(f"{own[t]['loss']:.4f}" if t in own else "" for t in TYPES)
        weights = ", ".join(f"{x['bytes']:.2f}" for x in own.values())
        page.append(f"| shakespeare, loss, {name} | {cells} | {weights} |")
    distance = abs(
        statistics.mean(r["accuracy"] for r in digits["int8"])
        - statistics.mean(r["accuracy"] for r in digits["float32"])
    )
    worst = max(abs(math.log(own["int8"]["loss"] / own["float32"]["loss"])) for own in raw["shakespeare"].values())
    page += [
        "",
        f"int8 and float32 apart: {distance:.4f} in accuracy (bound 0.005), {100 * worst:.1f} % in loss (2 %).",
    ]
    return page


if __name__ == "__main__":
    main()
