"""What the tests of the models share: arrays by formula, modules bound to them, a short real training."""

from __future__ import annotations

import zlib
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.build import Job, build
from jaxtrain.config import load, schema
from jaxtrain.core.module import ModuleDef
from jaxtrain.core.objectives import RESERVED
from jaxtrain.core.state import init_state
from jaxtrain.data.sources import ArraySource
from jaxtrain.loop import Evaluation, fit
from jaxtrain.models import MODELS, conv

SHAPES = {"mlp": (8, 8, 1), "cnn": (8, 8, 1), "resnet": (8, 8, 1), "gpt": (8,), "tcn": (8, 2)}
"""What a row is, for each kind."""
OUTPUTS = {"mlp": (3,), "cnn": (3,), "resnet": (3,), "gpt": (8, 5), "tcn": (3,)}
"""What a small one gives for a row: 3 outputs, or 5 for each of 8 tokens."""


def module_of(config: Any, shape: tuple[int, ...] | None = None, outputs: int | None = None) -> ModuleDef:
    row = SHAPES[config.kind] if shape is None else shape
    wide = OUTPUTS[config.kind][-1] if outputs is None else outputs
    return ModuleDef(lambda rngs: MODELS[config.kind].make(config, row, wide, rngs=rngs))


def mlp(**changes: Any) -> schema.Mlp:
    return schema.Mlp(**({"hidden": (6,)} | changes))


def cnn(**changes: Any) -> schema.Cnn:
    return schema.Cnn(**({"channels": (4, 6), "dense": (5,)} | changes))


def resnet(**changes: Any) -> schema.Resnet:
    return schema.Resnet(**({"depth": 8, "width": 4} | changes))


def gpt(**changes: Any) -> schema.Gpt:
    return schema.Gpt(**({"layers": 2, "heads": 2, "width": 8} | changes))


def tcn(**changes: Any) -> schema.Tcn:
    return schema.Tcn(**({"channels": (4, 6)} | changes))


SMALL = {"mlp": mlp, "cnn": cnn, "resnet": resnet, "gpt": gpt, "tcn": tcn}


def allowed(kind: str, field: str) -> tuple[str, ...]:
    """What the config of a kind allows for a field."""
    return get_args(type(SMALL[kind]()).model_fields[field].annotation)


def formula(shape: tuple[int, ...], phase: float, scale: float) -> np.ndarray:
    """Values that look random and that no random generator can change."""
    n = np.arange(int(np.prod(shape)), dtype=np.float64)
    return (scale * np.sin(1.7 * n + phase) + 0.3 * scale * np.cos(0.31 * n * n)).reshape(shape).astype(np.float32)


def arrays_by_formula(module: ModuleDef) -> tuple[dict[str, Any], dict[str, Any]]:
    """(params, model_state) in which no array is constant; variances are positive."""
    params = {name: formula(p.shape, len(name), 0.3) for name, p in module.params.items()}
    params = {name: x + 1.0 if name.endswith("scale") else x for name, x in params.items()}
    state = {name: formula(s.shape, 2.0 + len(name), 0.2) for name, s in module.model_state.items()}
    state = {name: 1.0 + np.abs(x) if name.endswith("var") else x for name, x in state.items()}
    return params, state


def arrays_apart(module: ModuleDef, scale: float = 0.3) -> dict[str, Any]:
    """Params of which no two are alike, not even those of two blocks."""
    params = {name: formula(p.shape, zlib.crc32(name.encode()) % 97, scale) for name, p in module.params.items()}
    return {name: x + np.float32(name.endswith("scale")) for name, x in params.items()}


def fresh(module: ModuleDef, seed: int = 0) -> tuple[dict[str, Any], dict[str, Any]]:
    return module.init(seed)  # eager: compiling all of it at once takes longer


def run_eval(module: ModuleDef, params: Any, state: Any, x: Any) -> np.ndarray:
    return np.asarray(jax.jit(lambda p, s, x: module.bind(p, s, None)(x))(params, state, x))


def run_train(module: ModuleDef, params: Any, state: Any, x: Any, mask: Any = None, key: int = 0) -> Any:
    """(outputs, model_state after) in training form."""

    def call(p: Any, s: Any, x: Any, mask: Any) -> Any:
        model = module.bind(p, s, jax.random.key(key))
        y = model(x, mask=mask) if module.takes_mask else model(x)
        return y, module.extract(model)[1]

    y, after = jax.jit(call)(params, state, x, mask)
    return np.asarray(y), {name: np.asarray(v) for name, v in after.items()}


def job_of(source: ArraySource | None = None, **overrides: Any) -> Job:
    base = {"log": {"every": 1, "tensorboard": False}, "augment": {"shift": 0}}
    return build(load(base, [(key.replace("__", "."), value) for key, value in overrides.items()]), source=source)


def first_state(job: Job, seed: int = 0) -> Any:
    """The first state with kernels drawn by numpy: `job.init` of a resnet takes ten seconds to compile."""
    rng = np.random.default_rng(seed)

    def draw(name: str, shape: tuple[int, ...]) -> np.ndarray:
        if len(shape) > 1:
            return rng.normal(size=shape, scale=(2 / np.prod(shape[:-1])) ** 0.5).astype(np.float32)
        return np.full(shape, name.endswith(("scale", "var")), np.float32)

    module = job.module
    state = init_state(
        {name: jnp.asarray(draw(name, p.shape)) for name, p in module.params.items()},
        {name: jnp.asarray(draw(name, s.shape)) for name, s in module.model_state.items()},
        job.spec.optimizer,
        ema=False,
        loss_scale=1.0,
        sums=[name for name in job.abstract_state["window"] if name not in RESERVED],
    )
    return jax.device_put(state, jax.tree.map(lambda x: x.sharding, job.abstract_state))


def losses_of(job: Job, steps: int) -> tuple[list[float], Any]:
    """Train by the real loop; the loss of each step, and the last state."""
    losses: list[float] = []

    class Keep:
        def __getattr__(self, name: str) -> Any:
            return lambda *args: None

        def on_metrics(self, step: int, figures: dict[str, float]) -> None:
            losses.append(figures["loss"])

    feeder = job.feeder()
    state, _ = fit(
        first_state(job) if job.config.model.kind in ("cnn", "resnet") else job.init(),
        job.advance,
        feeder,
        [Keep()],  # type: ignore[list-item]
        start=0,
        stop=steps,
        log_every=1,
        evaluate=lambda s: Evaluation({}),
        save=lambda step, s: None,
    )
    feeder.close()
    return losses, state


def convolutions_as_they_come(monkeypatch: Any) -> None:
    """No convolution is written as products of matrices, as on all backends but CPU."""
    monkeypatch.setattr(conv, "product_form", lambda *of: None)


def primitives(jaxpr: Any) -> list[str]:
    """Names of all primitives in a jaxpr, inner ones included."""
    names: list[str] = []
    for equation in jaxpr.eqns:
        names.append(equation.primitive.name)
        for value in equation.params.values():
            for inner in value if isinstance(value, (list, tuple)) else [value]:
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    names += primitives(inner)
    return names


def count(params: dict[str, Any]) -> int:
    return sum(int(np.prod(p.shape)) for p in params.values())


def images(rows: int = 4, size: int = 8) -> jax.Array:
    return jnp.asarray(formula((rows, size, size, 1), 0.5, 1.0))


def tokens(rows: int = 4, length: int = 8, vocabulary: int = 5) -> jax.Array:
    return jnp.asarray((np.arange(rows * length) ** 2 * 7 // 3 % 31 % vocabulary).reshape(rows, length), jnp.int32)


def sequences(rows: int = 4, length: int = 8, channels: int = 2) -> jax.Array:
    return jnp.asarray(formula((rows, length, channels), 0.5, 1.0))


def inputs_of(kind: str, rows: int = 4) -> jax.Array:
    return {"gpt": tokens, "tcn": sequences}.get(kind, images)(rows)
