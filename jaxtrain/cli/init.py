"""jaxtrain init: a config and a model of your own to begin with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

MODEL = '''"""Your model and your loss. `jaxtrain train config.yaml` finds them by name."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx


class Net(nnx.Module):
    """x: [B, ...], normalised float32 -> logits [B, classes]. Keyword arguments come from model.args."""

    def __init__(self, features: int, classes: int, width: int = 128, *, rngs: nnx.Rngs):
        self.hidden = nnx.Linear(features, width, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.head = nnx.Linear(width, classes, rngs=rngs)

    def __call__(self, x):
        x = x.reshape(x.shape[0], -1)
        return self.head(self.dropout(jax.nn.relu(self.hidden(x))))


def loss(model, batch):
    """(sum, count, metrics): sums over the real rows, so that padding and micro-batches change nothing."""
    logits = model(batch["inputs"]).astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    right = jnp.sum((logits.argmax(-1) == batch["targets"]) & batch["mask"])
    return jnp.sum(jnp.where(batch["mask"], losses, 0.0)), jnp.sum(batch["mask"]), {"hits": right}
'''


def init(
    folder: Annotated[str, typer.Argument(help="where to write")] = ".",
    from_: Annotated[str, typer.Option("--from", help="a shipped config to begin with")] = "digits",
) -> None:
    """Write config.yaml and my_model.py: a run of your own model that works before you change it."""
    from jaxtrain.config import ConfigError, dump, load
    from jaxtrain.data.make import make_dataset

    place = Path(folder)
    for name in ("config.yaml", "my_model.py"):
        if (place / name).exists():
            raise ConfigError(f"{place / name} exists; nothing was written: name another folder")
    shipped = load(from_)
    data = make_dataset(shipped).schema
    if data.task == "tokens":
        raise ConfigError(f"--from {from_}: init writes a model for rows of numbers, not for tokens; try digits")
    features = 1
    for size in data.input_shape:
        features *= size
    own = load(
        shipped,
        [
            ("name", "my_run"),
            ("model", {"kind": "custom", "target": "my_model.py:Net"}),
            ("model.args", {"features": features, "classes": data.outputs, "width": 128}),
            ("objective", {"kind": "custom", "target": "my_model.py:loss"}),
        ],
    )
    place.mkdir(parents=True, exist_ok=True)
    (place / "my_model.py").write_text(MODEL, encoding="utf-8")
    head = "# jaxtrain config describe shows every key; jaxtrain train config.yaml --dry-run tries it.\n"
    (place / "config.yaml").write_text(head + dump(own), encoding="utf-8")
    print(place / "config.yaml")
    print(place / "my_model.py")
