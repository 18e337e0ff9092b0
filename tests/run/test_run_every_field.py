"""Every field of the config changes something: the program, the initial state, or what a run leaves behind.

A field that changes nothing is deleted. The table below must name every field of every variant.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from run_helpers import TINY, rows_without_time

import jaxtrain as jt
from jaxtrain.build import Job, build
from jaxtrain.config import dump, load
from jaxtrain.config.schema_tools import fields

BASE = {**TINY, "train": {"duration": 12, "global_batch_size": 64}, "log": {"every": 4, "tensorboard": False}}
BASE["evaluate"] = {"every": 4}
SMALL_CNN = {"model.channels": [2], "model.dense": [4]}
SMALL_RESNET = {"model.depth": 8, "model.width": 4}
DIVERGES = {"optimizer.kind": "sgd", "optimizer.peak_lr": 1e30, "optimizer.clip_norm": 0, "log.every": 1}
DIVERGES["train.duration"] = 60
MODEL = """
from flax import nnx
class A(nnx.Module):
    def __init__(self, width=4, *, rngs):
        self.a, self.b = nnx.Linear(64, width, rngs=rngs), nnx.Linear(width, 10, rngs=rngs)
    def __call__(self, x): return self.b(self.a(x.reshape(x.shape[0], -1)))
class B(A):
    def __call__(self, x): return -super().__call__(x)
def mean(model, batch): return model(batch["inputs"]).mean()
def square(model, batch): return (model(batch["inputs"]) ** 2).mean()
"""

# key -> value away from the default, and what must be set beside it. `run:` marks fields that only a run shows.
TABLE: dict[str, tuple[Any, dict[str, Any]]] = {
    "run:name": ("other", {}),
    "precision": ("bf16", {}),
    "model.mlp.activation": ("gelu", {}),
    "model.mlp.dropout": (0.5, {}),
    "model.mlp.init": ("xavier_normal", {}),
    "model.mlp.hidden": ([8], {}),
    "model.mlp.norm": ("layer", {}),
    "model.cnn.activation": ("gelu", SMALL_CNN),
    "model.cnn.dropout": (0.5, SMALL_CNN),
    "model.cnn.init": ("orthogonal", SMALL_CNN),
    "model.cnn.channels": ([3], SMALL_CNN),
    "model.cnn.dense": ([5], SMALL_CNN),
    "model.cnn.norm": ("group", SMALL_CNN),
    "model.cnn.remat": ("full", SMALL_CNN),
    "model.resnet.activation": ("silu", SMALL_RESNET),
    "model.resnet.dropout": (0.5, SMALL_RESNET),
    "model.resnet.init": ("lecun_normal", SMALL_RESNET),
    "model.resnet.depth": (20, SMALL_RESNET),
    "model.resnet.width": (2, SMALL_RESNET),
    "model.resnet.norm": ("none", SMALL_RESNET),
    "model.resnet.stochastic_depth": (0.3, SMALL_RESNET),
    "model.resnet.remat": ("dots", SMALL_RESNET),
    "model.custom.target": ("{files}/mine.py:B", {}),
    "model.custom.args": ({"width": 5}, {}),
    **{
        key.format(kind): value
        for kind in ("digits", "arrays")
        for key, value in {
            "data.{}.validation_fraction": (0.3, {}),
            "data.{}.test_fraction": (0.3, {}),
            "data.{}.split_seed": (1, {}),
            "data.{}.normalize": ("none", {}),
            "data.{}.feed": ("direct", {}),
        }.items()
    },
    "data.arrays.path": ("{files}/other.npz", {}),
    "data.arrays.targets_path": ("{files}/targets2.npy", {"data.path": "{files}/inputs.npy"}),
    "augment.shift": (1, {}),
    "augment.flip": (True, {}),
    "objective.cross_entropy.label_smoothing": (0.1, {}),
    "objective.cross_entropy.class_weights": ("balanced", {}),
    "objective.cross_entropy.focal_gamma": (2.0, {}),
    "objective.binary.label_smoothing": (0.1, {}),
    "objective.binary.positive_weight": (2.0, {}),
    "objective.huber.delta": (2.0, {}),
    "objective.custom.target": ("{files}/mine.py:square", {}),
    **{
        f"optimizer.{kind}.{name}": value
        for kind, names in {
            "sgd": "weight_decay",
            "momentum": "weight_decay momentum nesterov moment_dtype",
            "adam": "b1 b2 eps moment_dtype",
            "adamw": "weight_decay b1 b2 eps moment_dtype",
            "lion": "weight_decay b1 b2 moment_dtype",
            "muon": "weight_decay momentum ns_steps adam_lr_factor b1 b2 moment_dtype",
            "adafactor": "weight_decay decay_rate min_dim_size_to_factor clipping_threshold",
            "lamb": "weight_decay b1 b2 eps",
        }.items()
        for name in ("peak_lr", "clip_norm", *names.split())
        for value in [
            {
                "weight_decay": (0.5, {}),
                "momentum": (0.5, {}),
                "nesterov": (True, {}),
                "moment_dtype": ("bfloat16", {}),
                "ns_steps": (3, {}),
                "min_dim_size_to_factor": (4, {}),
                "clip_norm": (0.0, {}),
            }.get(name, (0.123, {}))
        ]
    },
    **{f"schedule.{kind}.warmup": (5, {}) for kind in ("constant", "linear", "cosine", "one_cycle", "wsd")},
    **{f"schedule.{kind}.warmup": (5, {}) for kind in ("exponential", "piecewise", "inverse_sqrt")},
    **{f"schedule.{kind}.end_factor": (0.3, {}) for kind in ("linear", "cosine", "one_cycle", "wsd")},
    "schedule.one_cycle.start_factor": (0.3, {}),
    "schedule.wsd.decay": (6, {}),
    "schedule.exponential.decay_factor": (0.5, {}),
    "schedule.exponential.decay_every": (2, {}),
    "schedule.piecewise.boundaries": ([2, 5], {}),
    "schedule.piecewise.factors": ([0.5, 0.5], {}),
    "schedule.inverse_sqrt.timescale": (7, {}),
    "train.duration": (13, {}),
    "train.seed": (1, {}),
    "train.global_batch_size": (32, {}),
    "train.micro_batch_size": (16, {}),
    "train.ema_decay": (0.9, {}),
    "run:train.time_budget": (1e-9, {}),
    "train.overfit_batches": (1, {}),
    "run:evaluate.every": (3, {}),
    "run:evaluate.metric": ("accuracy", {}),
    "run:evaluate.mode": ("max", {}),
    "evaluate.batch_size": (32, {}),
    "evaluate.top_k": (3, {}),
    "run:early_stopping.patience": (1, {"evaluate.mode": "max"}),
    "run:early_stopping.min_delta": (100.0, {"early_stopping.patience": 1}),
    "run:checkpoint.every": (1, {"checkpoint.keep_last": 9}),
    "run:checkpoint.keep_last": (9, {"checkpoint.every": 1}),
    "run:checkpoint.keep_best": (3, {"checkpoint.keep_last": 1}),
    "run:guard.max_skips": (3, DIVERGES),
    "mesh.data": (2, {}),
    "run:log.every": (3, {}),
    "run:log.tensorboard": (True, {}),
    "run:log.wrong_samples": (2, {}),
}


def _named(key: str) -> tuple[str, str | None, str]:
    parts = key.removeprefix("run:").split(".")
    return ("", None, parts[0]) if len(parts) == 1 else (parts[0], parts[1] if len(parts) == 3 else None, parts[-1])


def test_the_table_names_every_field() -> None:
    wanted = {(s, k if _has_kinds(s) else None, f) for s, k, f, _ in fields() if f != "kind"}
    assert {_named(key) for key in TABLE} == wanted


def _has_kinds(section: str) -> bool:
    return section in {s for s, k, _, _ in fields() if k is not None}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("files")
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(80, 8, 8, 1)).astype(np.float32)
    targets = rng.integers(0, 3, 80)
    np.savez(place / "some.npz", inputs=inputs, targets=targets)
    np.savez(place / "other.npz", inputs=inputs + 1, targets=targets)
    np.savez(place / "binary.npz", inputs=inputs, targets=(targets > 0).astype(np.int64))
    np.savez(place / "values.npz", inputs=inputs, targets=inputs.mean((1, 2)))
    np.save(place / "inputs.npy", inputs)
    np.save(place / "targets.npy", inputs.mean((1, 2)))
    np.save(place / "targets2.npy", inputs[:, 0, 0, :1].repeat(2, 1))
    (place / "mine.py").write_text(MODEL)
    return place


def _context(section: str, kind: str | None, beside: dict[str, Any]) -> dict[str, Any]:
    keys: dict[str, Any] = {}
    if kind is not None:
        keys[f"{section}.kind"] = kind
    if kind == "custom":
        keys[f"{section}.target"] = "{files}/mine.py:" + ("A" if section == "model" else "mean")
    if kind == "arrays":
        keys["data.path"] = "{files}/some.npz"
    if kind == "binary":
        keys |= {"data.kind": "arrays", "data.path": "{files}/binary.npz"}
    if kind == "huber":
        keys |= {"data.kind": "arrays", "data.path": "{files}/values.npz"}
    if "data.path" in beside:
        keys |= {"objective.kind": "mse", "data.targets_path": "{files}/targets.npy"}
    return {**keys, **beside}


def _filled(value: Any, files: Path) -> Any:
    return value.replace("{files}", str(files)) if isinstance(value, str) else value


def _program(job: Job) -> list[Any]:
    """The text of the three programs: training, evaluation, and the one that makes the initial state."""
    batch = {**job.host_batches()(0)}
    small = {n: x[: job.eval_batch] if getattr(x, "ndim", 0) else x for n, x in batch.items()}
    if job.eval_batch > len(batch["mask"]):
        small = batch
    weights = (job.abstract_state["params"], job.abstract_state["model_state"])
    evaluation = job.eval_step.lower(*weights, small).as_text()
    return [job.lower().as_text(), evaluation, job.init.lower().as_text()]


def _left_behind(config: Any, place: Path) -> list[Any]:
    """What a run leaves: rows, checkpoints, result, files, and how it stopped."""
    place.mkdir()
    here = Path.cwd()
    os.chdir(place)
    try:
        with jt.train(config, quiet=True) as run:
            steps = sorted(p.name for p in (run.path / "checkpoints").glob("[0-9]*"))
            names = sorted({p.name.split(".")[0] for p in run.path.iterdir()})
            result = {k: v for k, v in run.result.items() if k != "seconds"}
            return [rows_without_time(run), steps, result, names, run.stop, run.path.parent.name]
    finally:
        os.chdir(here)


@pytest.mark.parametrize("key", TABLE)
def test_the_field_changes_something(key: str, files: Path, tmp_path: Path) -> None:
    section, kind, leaf = _named(key)
    value, beside = TABLE[key]
    context = {k: _filled(v, files) for k, v in _context(section, kind, beside).items()}
    dotted = f"{section}.{leaf}" if section else leaf
    before = load(BASE, context.items())
    after = load(BASE, {**context, dotted: _filled(value, files)}.items())
    assert before != after, "the value in the table is the default"
    if key == "mesh.data" and len(jax.devices()) == 1:
        build(before)
        with pytest.raises(jt.ConfigError, match=r"mesh\.data: 2 devices asked for, 1 are there"):
            build(after)
        return
    if key.startswith("run:"):
        assert _known(before, lambda: _left_behind(before, tmp_path / "a")) != _left_behind(after, tmp_path / "b")
        return
    assert _known(before, lambda: _program(build(before))) != _program(build(after))


_KNOWN: dict[tuple[str, str], list[Any]] = {}


def _known(config: Any, observe: Any) -> list[Any]:
    """Many fields share the config that they are compared with: it is observed once."""
    key = (dump(config), observe.__code__.co_names[0])
    if key not in _KNOWN:
        _KNOWN[key] = observe()
    return _KNOWN[key]


def test_the_same_config_gives_the_same_program_and_leavings(tmp_path: Path) -> None:
    """The control: the comparison above does not see differences where there are none."""
    config = load(BASE)
    assert _program(build(config)) == _program(build(config))
    assert _left_behind(config, tmp_path / "a") == _left_behind(config, tmp_path / "b")
