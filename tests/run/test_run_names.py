"""Every name of a list trains: objectives, precisions, activations, initialisers, norms, depths, averages."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from run_files import GPT, RAIN
from run_helpers import TINY, tiny

import jaxtrain as jt
from jaxtrain.build import build
from jaxtrain.config import load, schema
from jaxtrain.core.objectives import OBJECTIVES
from jaxtrain.core.precision import PRECISIONS
from jaxtrain.models import MODELS

LONG = {"train.duration": "40ep", "optimizer.peak_lr": 0.01, "evaluate.every": "10ep", "train.global_batch_size": 32}


def _rows(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    inputs = rng.normal(size=(400, 6)).astype(np.float32)
    return inputs, inputs @ rng.normal(size=(6, 3)).astype(np.float32)


def _fit(place: Path, data: Any, **options: Any) -> jt.Run:
    return jt.Trainer(TINY, data=data, **{**LONG, **options}).fit(run_dir=place, quiet=True)


def test_every_objective_is_trained_below() -> None:
    assert OBJECTIVES.keys() == {"cross_entropy", "binary", "mse", "mae", "huber"}


@pytest.mark.parametrize("kind", ["mse", "mae", "huber"])
def test_regression_objectives_learn_a_linear_map(kind: str, tmp_path: Path) -> None:
    inputs, values = _rows()
    run = _fit(tmp_path / "run", (inputs, values), **{"objective.kind": kind})
    assert run.test["r2"] >= 0.95
    assert run.test["rmse"] < 0.25 * float(values.std())


def test_one_value_a_row_is_a_regression_too(tmp_path: Path) -> None:
    inputs, values = _rows()
    assert _fit(tmp_path / "run", (inputs, values[:, 0]), **{"objective.kind": "mse"}).test["r2"] >= 0.95


@pytest.mark.parametrize("options", [{}, {"objective.label_smoothing": 0.1}, {"objective.positive_weight": 3.0}])
def test_binary_learns_one_label(options: dict[str, Any], tmp_path: Path) -> None:
    inputs, values = _rows()
    target = (values[:, 0] > 0).astype(np.int64)
    run = _fit(tmp_path / "run", (inputs, target), **{"objective.kind": "binary", **options})
    assert run.test["accuracy"] >= 0.9
    assert run.test["auroc"] >= 0.97
    assert len(run.result["details"]["confusion"]) == 2


def test_binary_learns_several_labels(tmp_path: Path) -> None:
    inputs, values = _rows()
    run = _fit(tmp_path / "run", (inputs, values > 0), **{"objective.kind": "binary"})
    assert run.test["accuracy"] >= 0.9
    assert run.test["exact_match"] >= 0.75
    assert run.test["f1_macro"] >= 0.9


@pytest.mark.parametrize(
    "options",
    [{"label_smoothing": 0.1}, {"focal_gamma": 2.0}, {"class_weights": "balanced"}, {"class_weights": [1.0, 3.0, 1.0]}],
    ids=str,
)
def test_cross_entropy_learns_with_its_options(options: dict[str, Any], tmp_path: Path) -> None:
    inputs, values = _rows()
    run = _fit(tmp_path / "run", (inputs, values.argmax(1)), **{f"objective.{k}": v for k, v in options.items()})
    assert run.test["accuracy"] >= 0.85
    assert run.test["f1_weighted"] >= 0.85


def test_balanced_weights_raise_the_recall_of_a_rare_class(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(1000, 2)).astype(np.float32)
    targets = (inputs[:, 0] + 0.8 * rng.normal(size=1000) > 1.8).astype(np.int64)  # about 8 %
    recall = {}
    for weights in ("none", "balanced"):
        run = _fit(
            tmp_path / weights, (inputs, targets), **{"objective.class_weights": weights, "train.duration": "8ep"}
        )
        recall[weights] = run.result["details"]["per_class"]["recall"][1]
    assert recall["balanced"] >= recall["none"] + 0.2


@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_precision_learns_digits(precision: str, tmp_path: Path) -> None:
    run = tiny(tmp_path / "run", precision=precision, **{"train.duration": "6ep", "optimizer.peak_lr": 0.01})
    assert run.test["accuracy"] >= 0.85
    assert {str(p.dtype) for p in run.state["params"].values()} == {"float32"}
    scaled = [row for row in run.metrics() if "train/loss_scale" in row]
    assert bool(scaled) == (precision == "fp16")


def _names(field: str, kind: Any = schema.Mlp) -> list[str]:
    return list(get_args(kind.model_fields[field].annotation))


VARIANTS = [
    *(("activation", name) for name in _names("activation")),
    *(("init", name) for name in _names("init")),
    *(("norm", name) for name in _names("norm")),
    ("dropout", 0.3),
]


@pytest.mark.parametrize(("field", "name"), VARIANTS)
def test_every_variant_of_a_model_learns_digits(field: str, name: Any, tmp_path: Path) -> None:
    keys = {f"model.{field}": name, "train.duration": "8ep", "optimizer.peak_lr": 0.01, "model.hidden": [32]}
    run = tiny(tmp_path / "run", **keys)
    if name == "zeros":  # nothing but the last bias can move: the name is for what comes on top of other weights
        assert run.test["accuracy"] <= 0.2
    else:
        assert run.test["accuracy"] >= 0.85


def test_the_average_of_weights_is_what_is_evaluated(tmp_path: Path) -> None:
    keys = {"train.duration": "6ep", "optimizer.peak_lr": 0.02}
    averaged = tiny(tmp_path / "a", **keys, **{"train.ema_decay": 0.95})
    plain = tiny(tmp_path / "b", **keys)
    assert averaged.test["accuracy"] >= 0.9
    assert averaged.test["loss"] != plain.test["loss"]


@pytest.mark.parametrize("depth", [8, 18, 50])
def test_a_depth_of_each_form_learns_a_batch(depth: int) -> None:
    """A few steps on one batch: three stages of two convolutions a block, four, four of bottlenecks; others have more.

    Compiled without optimisation, which for these many layers takes minutes.
    """
    keys = {
        "model.kind": "resnet",
        "model.depth": depth,
        "model.width": 4,
        "train.global_batch_size": 16,
        "train.overfit_batches": 1,
        "optimizer.peak_lr": 0.01,
        "schedule.kind": "constant",
        "augment.shift": 0,
        "train.duration": 24,
    }
    losses = _overfitted(load("digits", keys.items()), 24)
    # The first steps of 50 layers at this rate jump: rounding decides where one of them lands.
    assert min(losses[-8:]) < 0.7 * losses[0]


def _overfitted(config: Any, steps: int) -> list[float]:
    """The losses of some steps on one batch; compiled without optimisation, as that takes longer than the steps."""
    job = build(config)
    step = job.lower().compile(compiler_options={"xla_backend_optimization_level": "0"})
    state, feed, losses = job.init(), job.feeder(), []
    for position in range(steps):
        state, metrics = step(state, feed(position))
        losses.append(float(metrics["loss"]))
    return losses


def _others(kind: Any, *fields: str) -> list[tuple[str, str]]:
    """All names of these fields but the defaults, which are part of every other variant."""
    return [(f, name) for f in fields for name in _names(f, kind) if name != kind.model_fields[f].default]


ONE_BATCH = {
    "optimizer.peak_lr": 0.01,
    "schedule.kind": "constant",
    "train.overfit_batches": 1,
    "train.duration": 30,
    "train.global_batch_size": 16,
}
GPT_VARIANTS = [
    *_others(schema.Gpt, "positions", "norm", "activation", "remat"),
    ("bias", True),
    ("tie_embeddings", False),
    ("kv_heads", None),
    ("mlp_width", 8),
    ("dropout", 0.1),
]


@pytest.mark.parametrize(("field", "name"), GPT_VARIANTS)
def test_every_variant_of_a_language_model_learns_a_batch(field: str, name: Any, tmp_path: Path) -> None:
    (tmp_path / "rain.txt").write_text(RAIN * 30)
    data = {"kind": "text", "path": str(tmp_path / "rain.txt"), "block_size": 8}
    config = load({**TINY, "model": {**GPT, field: name}, "data": data}, ONE_BATCH.items())
    losses = _overfitted(config, 30)
    assert losses[0] > 2.4  # 14 characters: ln 14 = 2.64 is knowing nothing
    assert losses[-1] < 1.7


@pytest.mark.parametrize(("field", "name"), _others(schema.Tcn, "norm", "remat"))
def test_every_variant_of_a_tcn_learns_a_batch(field: str, name: str, tmp_path: Path) -> None:
    inputs = np.random.default_rng(0).normal(size=(60, 8, 2)).astype(np.float32)
    np.savez(tmp_path / "some.npz", inputs=inputs, targets=inputs.mean((1, 2)) > 0)
    model = {"kind": "tcn", "channels": [8, 8], field: name}
    data = {"kind": "arrays", "path": str(tmp_path / "some.npz")}
    losses = _overfitted(load({**TINY, "model": model, "data": data}, ONE_BATCH.items()), 30)
    assert losses[-1] < 0.5 * losses[0]


def test_every_kind_of_model_is_trained_in_this_folder() -> None:
    """mlp everywhere; cnn in the resumes, resnet and gpt here, tcn in test_run_kinds_of_data.py."""
    assert MODELS.keys() == {"mlp", "cnn", "resnet", "gpt", "tcn"}
