"""Every field of the config changes something: the program, the initial state, or what a run leaves behind.

A field that changes nothing is deleted. The table below must name every field of every variant.
"""

from __future__ import annotations

import json
import os
import re
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from run_files import RAIN, write_idx, write_pictures, write_texts
from run_helpers import TINY, rows_without_time

import jaxtrain as jt
from jaxtrain.build import Job, build
from jaxtrain.config import dump, load
from jaxtrain.config.schema_tools import fields
from jaxtrain.hardware.memory import Limit
from jaxtrain.plan import fitting

BASE = {**TINY, "train": {"duration": 12, "global_batch_size": 64}, "log": {"every": 4, "tensorboard": False}}
BASE["evaluate"] = {"every": 4}
SMALL_CNN = {"model.channels": [2], "model.dense": [4]}
SMALL_RESNET = {"model.depth": 8, "model.width": 4}
STEPS = {"model.channels": [2, 2], "objective.kind": "mse", "data.path": "{files}/steps.npz"}
DIVERGES = {"optimizer.kind": "sgd", "optimizer.peak_lr": 1e30, "optimizer.clip_norm": 0, "log.every": 1}
DIVERGES["train.duration"] = 60
STANDS_STILL = {"optimizer.peak_lr": 1e-9, "train.global_batch_size": 8, "log.every": 1, "train.duration": 24}
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
    "model.gpt.layers": (2, {}),
    "model.gpt.heads": (4, {"model.positions": "learned"}),
    "model.gpt.kv_heads": (1, {}),
    "model.gpt.width": (12, {}),
    "model.gpt.mlp_width": (12, {}),
    "model.gpt.positions": ("learned", {}),
    "model.gpt.norm": ("layer", {}),
    "model.gpt.activation": ("gelu", {}),
    "model.gpt.bias": (True, {}),
    "model.gpt.tie_embeddings": (False, {}),
    "model.gpt.dropout": (0.5, {}),
    "model.gpt.init_sd": (0.1, {}),
    "model.gpt.remat": ("full", {}),
    "model.gpt.scan_layers": (True, {}),
    "model.tcn.activation": ("gelu", {}),
    "model.tcn.dropout": (0.5, {}),
    "model.tcn.init": ("orthogonal", {}),
    "model.tcn.channels": ([3], {}),
    "model.tcn.kernel_size": (2, {}),
    "model.tcn.norm": ("none", {}),
    "model.tcn.output": ("step", STEPS),
    "model.tcn.remat": ("dots", {}),
    "model.custom.target": ("{files}/mine.py:B", {}),
    "model.custom.args": ({"width": 5}, {}),
    **{
        key.format(kind): value
        for kind, lacks in (
            ("digits", ""),
            ("arrays", ""),
            ("mnist", "test_fraction"),
            ("images", ""),
            ("text", "normalize"),
            ("pystdlib", "normalize"),
        )
        for key, value in {
            "data.{}.validation_fraction": (0.3, {}),
            "data.{}.test_fraction": (0.3, {}),
            "data.{}.split_seed": (1, {}),
            "data.{}.normalize": ("none", {}),
            "data.{}.feed": ("direct", {}),
        }.items()
        if key.rpartition(".")[2] != lacks
    },
    "data.arrays.path": ("{files}/other.npz", {}),
    "data.arrays.targets_path": ("{files}/targets2.npy", {"data.path": "{files}/inputs.npy"}),
    "data.mnist.path": ("{files}/idx2", {}),
    "data.images.path": ("{files}/pictures2", {}),
    "data.images.size": ([7, 9], {}),
    "data.images.resize": ("pad", {}),
    "data.images.color": ("grey", {}),
    "data.text.block_size": (4, {}),
    "data.text.split_by": ("position", {}),
    "data.text.path": ("{files}/rain.txt", {}),
    "data.text.pattern": ("*.md", {}),
    "data.text.tokenizer": ("byte", {}),
    "data.text.encoding": ("cp1252", {"data.path": "{files}/accents.txt"}),
    "data.text.decode_errors": ("replace", {"data.path": "{files}/windows.txt"}),
    "data.text.unknown": ("token", {"data.path": "{files}/new_at_the_end.txt", "data.tokenizer": "char"}),
    "data.pystdlib.block_size": (4, {}),
    "data.pystdlib.split_by": ("position", {}),
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
        for name in ("peak_lr", "clip_norm", "offload", *names.split())
        for value in [
            {
                "weight_decay": (0.5, {}),
                "momentum": (0.5, {}),
                "nesterov": (True, {}),
                "moment_dtype": ("bfloat16", {}),
                "ns_steps": (3, {}),
                "min_dim_size_to_factor": (4, {}),
                "clip_norm": (0.0, {}),
                "offload": ("host", {}),
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
    "run:train.steps_per_dispatch": (3, {}),
    "train.lanes": (2, {}),
    "run:train.fit": ("never", {"log.every": 7}),
    "run:train.init_from": ("{files}/source", {}),
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
    "run:checkpoint.keep_every": (2, {"checkpoint.every": 1, "checkpoint.keep_last": 1}),
    "run:checkpoint.mirror": ("mirror", {}),
    "run:guard.max_skips": (3, DIVERGES),
    "run:guard.max_rollbacks": (1, {**DIVERGES, "guard.max_skips": 3}),
    "run:guard.loss_spike": (0.001, STANDS_STILL),
    "run:guard.stall_limit": (None, {}),
    "mesh.data": (2, {}),
    "mesh.fsdp": (2, {}),
    "mesh.tensor": (2, {}),
    "mesh.context": (2, {}),
    "mesh.pipe": (2, {}),
    "run:log.every": (3, {}),
    "run:log.tensorboard": (True, {}),
    "run:log.wrong_samples": (2, {}),
}

# What a kind is tried with, where the base would not do. `beside` goes on top.
NEEDS: dict[tuple[str, str], dict[str, Any]] = {
    ("data", "arrays"): {"data.path": "{files}/some.npz"},
    ("data", "mnist"): {"data.path": "{files}/idx"},
    ("data", "images"): {"data.path": "{files}/pictures", "data.size": [6]},
    ("model", "gpt"): {
        "data.kind": "text",
        "data.path": "{files}/texts",
        "data.block_size": 8,
        "model.layers": 1,
        "model.heads": 2,
        "model.width": 8,
    },
    ("model", "tcn"): {"model.channels": [2, 2], "data.kind": "arrays", "data.path": "{files}/sequences.npz"},
    ("model", "custom"): {"model.target": "{files}/mine.py:A"},
    ("objective", "custom"): {"objective.target": "{files}/mine.py:mean"},
    ("objective", "binary"): {"data.kind": "arrays", "data.path": "{files}/binary.npz"},
    ("objective", "huber"): {"data.kind": "arrays", "data.path": "{files}/values.npz"},
}
_GPT = {"model.kind": "gpt", **NEEDS["model", "gpt"]}
NEEDS["data", "text"] = _GPT
NEEDS["data", "pystdlib"] = {k: v for k, v in _GPT.items() if k not in ("data.kind", "data.path")}

# Fields that decide whether a run begins: which of the two does not (0: the default, 1: the value), and what it says.
REFUSALS = {
    "data.text.decode_errors": (0, r"windows\.txt: byte 0x92 at offset 5 is not utf-8"),
    "data.text.unknown": (0, r"test has characters that the training part lacks: 'q', 'x'"),
    "optimizer.sgd.offload": (1, r"optimizer\.offload: host: (this run computes on the CPU|.*=sgd keeps no moments)"),
    "mesh.pipe": (1, r"mesh\.pipe: 2 splits a stack of blocks, which this model has not"),
    "mesh.context": (1, r"mesh\.context: 2 splits tokens, which model\.kind=mlp does not take"),
}
if jax.default_backend() == "cpu":
    for kind in ("momentum", "adam", "adamw", "lion", "muon", "adafactor", "lamb"):
        REFUSALS[f"optimizer.{kind}.offload"] = (1, r"optimizer\.offload: host: this run computes on the CPU")
if len(jax.devices()) == 1:
    REFUSALS["mesh.data"] = (1, r"mesh\.data: 2 devices asked for, 1 are there")
    for axis in ("fsdp", "tensor"):
        REFUSALS[f"mesh.{axis}"] = (1, rf"mesh: {axis} 2: 2 does not divide the 1 device there are; allowed: 1,")


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
    np.savez(place / "sequences.npz", inputs=inputs[..., 0], targets=targets)
    np.savez(place / "steps.npz", inputs=inputs[..., 0], targets=inputs[:, :, 0, 0])
    (place / "mine.py").write_text(MODEL)
    write_idx(place / "idx")
    write_idx(place / "idx2", seed=1)
    write_pictures(place / "pictures", {"cat": 24, "dog": 24})
    write_pictures(place / "pictures2", {"cat": 24, "dog": 24}, seed=1)
    write_texts(write_texts(place / "texts", 24) / "more", 24, ".md", "some other words\n")
    write_texts(place / "lib", 24, ".py", "def main(): return 1\n")
    (place / "rain.txt").write_text(RAIN * 30)
    (place / "accents.txt").write_text("caf\u00e9 noir\n" * 40, encoding="utf-8")
    (place / "windows.txt").write_bytes(b"I don\x92t say so\n" * 40)
    (place / "new_at_the_end.txt").write_text(RAIN * 30 + "qx\n")
    jt.train(BASE, run_dir=place / "source", quiet=True, **{"train.seed": 1}).close()
    return place


@pytest.fixture(autouse=True)
def small_standard_library(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some megabytes of source take long to read."""
    paths = SimpleNamespace(get_paths=lambda: {"stdlib": str(files / "lib")})
    monkeypatch.setattr("jaxtrain.data.text.sysconfig", paths)


def _context(section: str, kind: str | None, beside: dict[str, Any]) -> dict[str, Any]:
    keys: dict[str, Any] = {}
    if kind is not None:
        keys = {f"{section}.kind": kind, **NEEDS.get((section, kind), {})}
    if (section, kind) == ("data", "arrays") and "data.path" in beside:
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
    started: list[threading.Thread] = []
    begin = threading.Thread.start
    threading.Thread.start = lambda self: (started.append(self), begin(self))[1]  # type: ignore[method-assign]
    try:
        with jt.train(config, quiet=True) as run:
            steps = sorted(p.name for p in (run.path / "checkpoints").glob("[0-9]*"))
            chosen = json.loads((run.path / "chosen.json").read_text())["steps_per_dispatch"]
            names = sorted({p.name.split(".")[0] for p in run.path.iterdir()})
            result = {k: v for k, v in run.result.items() if k != "seconds"}
            beside = sorted(p.name for p in place.iterdir())
            reason = re.sub(r"the batch is in \S+", "", run.stop.reason)
            watched = any(thread.name == "jaxtrain-watchdog" for thread in started)
            left = [rows_without_time(run), steps, result, names, chosen, run.stop.state, reason, watched, beside]
            return [*left, run.path.parent.name]
    except fitting.DoesNotFit as error:
        return [str(error)]
    finally:
        threading.Thread.start = begin  # type: ignore[method-assign]
        os.chdir(here)


@pytest.mark.parametrize("key", TABLE)
def test_the_field_changes_something(key: str, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    section, kind, leaf = _named(key)
    value, beside = TABLE[key]
    context = {k: _filled(v, files) for k, v in _context(section, kind, beside).items()}
    dotted = f"{section}.{leaf}" if section else leaf
    before = load(BASE, context.items())
    after = load(BASE, {**context, dotted: _filled(value, files)}.items())
    assert before != after, "the value in the table is the default"
    if key in REFUSALS:
        which, line = REFUSALS[key]
        refused, taken = (before, after) if which == 0 else (after, before)
        with pytest.raises(jt.ConfigError, match=line):
            build(refused)
        build(taken)
        return
    if key == "run:train.fit":  # it says what happens where memory is too small
        monkeypatch.setattr(fitting, "limit", lambda devices: Limit(1, "free in a test", shared=True))
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
