"""The three ways in: command, jt.train, jt.Trainer; and what a run gives back."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from run_helpers import TINY, differing, tiny

import jaxtrain as jt
from jaxtrain.build import build
from jaxtrain.checkpoint import Checkpoints, files
from jaxtrain.config import load
from jaxtrain.hooks.control import Evaluator

FLAGS = ["--model.kind=mlp", "--model.hidden=[32]", "--augment.shift=0", "--train.duration=40"]
KEYS = {"model.kind": "mlp", "model.hidden": [32], "augment.shift": 0, "train.duration": 40}


class Net(nnx.Module):
    """The mlp of the tests, written by a user."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        he = nnx.initializers.he_normal()
        self.layers = nnx.List([nnx.Linear(64, 32, kernel_init=he, rngs=rngs)])
        self.dropout = nnx.Dropout(0.3, rngs=rngs)
        self.head = nnx.Linear(32, 10, kernel_init=he, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = jax.nn.relu(self.layers[0](x.reshape(x.shape[0], -1)))
        return self.head(self.dropout(x))


def own_loss(model: Net, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
    mask = batch["mask"].astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(model(batch["inputs"]), batch["targets"])
    return jnp.sum(losses * mask), jnp.sum(mask), {}


def test_command_function_trainer_and_own_module_end_with_the_same_parameters(tmp_path: Path) -> None:
    place = tmp_path / "command"
    command = [sys.executable, "-m", "jaxtrain", "train", "digits", *FLAGS, f"--run-dir={place}", "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == str(place)
    function = jt.train("digits", run_dir=tmp_path / "function", quiet=True, **KEYS)
    trainer = jt.Trainer("digits", **KEYS).fit(run_dir=tmp_path / "trainer", quiet=True)
    own = jt.Trainer("digits", model=lambda rngs: Net(rngs), loss=own_loss, **KEYS).fit(
        run_dir=tmp_path / "own", quiet=True
    )
    store = Checkpoints(place / "checkpoints", metric="loss", mode="min")
    from_command = store.restore(store.get("last"), function.job.abstract_state)
    assert differing(from_command, function.state) == []
    assert differing(trainer.state, function.state) == []
    assert differing(own.state["params"], function.state["params"]) == []
    assert own.test["accuracy"] == function.test["accuracy"]
    other = jt.train("digits", run_dir=tmp_path / "other", quiet=True, **KEYS, **{"train.seed": 1})
    assert differing(other.state["params"], function.state["params"]) != []  # the control


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"model": {"kind": "mlp"}}, "model: an nnx.Module or a function rngs -> module is taken; keys are dotted: "),
        ({"data": {"kind": "digits"}}, "data: 'kind' is no array of rows; allowed: inputs, targets, weights, split"),
    ],
    ids=["model", "data"],
)
def test_a_section_given_as_an_object_is_one_line(given: dict[str, object], line: str, tmp_path: Path) -> None:
    """`train(model=...)` takes a module, `train(data=...)` arrays; keys of these sections are dotted."""
    for call in (jt.train, lambda config, **options: jt.Trainer(config, **given).fit(run_dir=options["run_dir"])):
        with pytest.raises(jt.ConfigError) as caught:
            call(TINY, run_dir=tmp_path / "run", **given)  # type: ignore[operator]
        assert str(caught.value).startswith(line)
    assert not (tmp_path / "run").exists()
    tiny(tmp_path / "run", **{"model.kind": "mlp", "data.kind": "digits", "train.duration": 1}).close()  # the control


def test_a_module_instance_starts_from_its_own_arrays(tmp_path: Path) -> None:
    module = Net(nnx.Rngs(7))
    kernel = np.array(module.head.kernel[...])
    with jt.Trainer(TINY, model=module, **{"optimizer.kind": "sgd", "optimizer.peak_lr": 1e-9}).fit(
        run_dir=tmp_path / "run", quiet=True
    ) as run:
        np.testing.assert_allclose(run.state["params"]["head.kernel"], kernel, atol=1e-6)
        np.testing.assert_array_equal(module.head.kernel[...], kernel)  # the user's module is left alone


def test_own_arrays_train_and_predict_with_their_words(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(300, 5)) + 3.0
    targets = np.where(inputs[:, 0] > 3.0, "high", "low")
    run = jt.Trainer(TINY, data=(inputs, targets), **{"train.duration": "60ep", "optimizer.peak_lr": 0.01}).fit(
        run_dir=tmp_path / "run", quiet=True
    )
    assert run.test["accuracy"] >= 0.9
    model = jt.load_model(tmp_path / "run")
    assert model.class_names == ("high", "low")
    assert model.predict(np.array([[5.0, 3, 3, 3, 3], [1.0, 3, 3, 3, 3]])) == ["high", "low"]
    with pytest.raises(jt.ConfigError, match=r"inputs have shape \[2, 4\]; allowed: \[B, 5\]"):
        model(np.zeros((2, 4)))


def test_load_model_gives_the_averaged_weights_of_the_best_step(tmp_path: Path) -> None:
    run = tiny(tmp_path / "run", **{"train.ema_decay": 0.9})
    best = run.result["best"]["step"]
    model = jt.load_model(tmp_path / "run")
    assert model.step == best
    dataset = run.job.dataset
    rows = dataset.read("test", np.arange(dataset.rows("test")))
    accuracy = float((model(rows["inputs"]).argmax(-1) == rows["targets"]).mean())
    assert accuracy == pytest.approx(run.test["accuracy"], abs=1e-9)
    raw = run.state["params"]["head.kernel"]
    assert not np.array_equal(jt.load_model(tmp_path / "run", "last").module.head.kernel[...], raw)  # not the raw ones


def test_evaluate_run_repeats_the_test_figures(tmp_path: Path) -> None:
    run = tiny(tmp_path / "run")
    evaluation, sealed = jt.evaluate_run(tmp_path / "run", "test")
    assert sealed.step == run.result["best"]["step"]
    assert evaluation.figures == run.test
    with pytest.raises(jt.ConfigError, match="split 'tset' is not allowed"):
        jt.evaluate_run(tmp_path / "run", "tset")


def test_close_gives_the_device_memory_back(tmp_path: Path) -> None:
    tiny(tmp_path / "warm").close()
    gc.collect()  # what earlier tests have left in circles
    before = len(jax.live_arrays())
    with tiny(tmp_path / "run") as run:
        assert len(jax.live_arrays()) > before + 10
        state = run.state  # held on to, as a notebook would
    assert len(jax.live_arrays()) == before
    assert state["step"].is_deleted()


def test_the_state_given_to_a_step_is_donated(tmp_path: Path) -> None:
    with tiny(tmp_path / "run") as run:
        state = run.job.init()
        kernel = state["params"]["head.kernel"]
        run.job.advance(state, run.job.feeder()(0))
        assert kernel.is_deleted()


@pytest.mark.parametrize("rows", [64, 65, 70, 71])
def test_one_train_and_one_eval_executable(rows: int, tmp_path: Path) -> None:
    """Whatever the last batch holds; and the evaluations of both splits share one."""
    rng = np.random.default_rng(rows)
    total = rows + 40
    split = np.array([0] * rows + [1] * 17 + [2] * 23, np.int8)
    data = {"inputs": rng.normal(size=(total, 4)).astype(np.float32), "targets": rng.integers(0, 3, total)}
    with jt.Trainer(TINY, data={**data, "split": split}, **{"evaluate.batch_size": 16}).fit(
        run_dir=tmp_path / "run", quiet=True
    ) as run:
        assert run.job.advance._cache_size() == 1
        assert run.job.eval_step._cache_size() == 1
        assert run.result["rows"] == {"train": rows, "validation": 17, "test": 23}


def test_feeds_give_the_same_run(tmp_path: Path) -> None:
    runs = {f: tiny(tmp_path / f, **{"data.feed": f}) for f in ("resident", "direct", "prefetch")}
    assert runs["resident"].job.feed_kind == "resident"
    assert differing(runs["direct"].state, runs["prefetch"].state) == []
    assert differing(runs["direct"].state, runs["resident"].state) == []
    assert runs["direct"].test == runs["resident"].test
    for run in runs.values():
        run.close()


def test_test_split_is_read_once_on_the_best_sealed_step(tmp_path: Path) -> None:
    run = tiny(tmp_path / "run", **{"evaluate.mode": "max"})  # the greatest loss: surely not that of the last step
    losses = {row["step"]: row["eval/loss"] for row in run.metrics() if "eval/loss" in row}
    best = max(losses, key=losses.get)
    assert best < 24
    tested = [row for row in run.metrics() if "test/loss" in row]
    assert [row["test/best_step"] for row in tested] == [best] == [run.result["best"]["step"]]
    last = jt.evaluate_run(tmp_path / "run", "test", "last")[0].figures
    assert tested[0]["test/loss"] == run.test["loss"] != last["loss"]


def test_a_run_that_is_never_finite_ends_with_78_and_no_claim(tmp_path: Path) -> None:
    def nan_loss(model: Net, batch: dict[str, jax.Array]) -> jax.Array:
        return jnp.mean(model(batch["inputs"])) * jnp.nan

    with jt.Trainer(TINY, model=lambda rngs: Net(rngs), loss=nan_loss).fit(run_dir=tmp_path / "run", quiet=True) as run:
        assert run.exit_code == 78
        assert run.test == {}
        assert "skipped" not in run.stop.reason
        assert int(run.state["updates"]) == 0
        rows = [row for row in run.metrics() if "train/skipped" in row]
        assert rows[0]["train/skipped"] == 1
        assert np.isnan(rows[0]["train/loss"])  # told, not hidden
    status = jt.load_run(tmp_path / "run")
    assert status.stop.state == "failed"


@pytest.mark.parametrize(("kind", "loops"), [("cnn", False), ("mlp", True)])
def test_accumulation_of_convolutions_is_written_out_on_a_cpu(kind: str, loops: bool) -> None:
    """XLA:CPU runs convolutions inside a loop more than ten times slower; products are not affected."""
    keys = {"model.kind": kind, "model.dropout": 0.0, "augment.shift": 0, "data.feed": "direct"}  # no other loops
    text = build(load("digits", {**keys, "train.micro_batch_size": 16}.items())).lower().as_text()
    assert ("stablehlo.while" in text) is loops
    assert "stablehlo.while" not in build(load("digits", keys.items())).lower().as_text()


def test_an_error_in_a_run_gives_everything_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny(tmp_path / "warm").close()
    before, threads = len(jax.live_arrays()), threading.active_count()

    def fail(self: Evaluator, step: int) -> None:
        if step == 3:
            raise RuntimeError("broken on purpose")

    monkeypatch.setattr(Evaluator, "after_step", fail)
    with pytest.raises(RuntimeError, match="broken on purpose"):
        tiny(tmp_path / "run", **{"data.feed": "prefetch"})
    assert len(jax.live_arrays()) == before
    assert threading.active_count() == threads
    status = jt.load_run(tmp_path / "run").stop
    assert (status.state, status.reason) == ("failed", "RuntimeError: broken on purpose")


def test_a_failed_save_ends_the_run_at_the_next_step_and_not_at_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(folder: Path) -> None:
        raise OSError(28, "No space left on device")

    save = Checkpoints.save

    def save_to_its_end(self: Checkpoints, *args: Any) -> None:
        save(self, *args)
        self._saving.join()  # type: ignore[union-attr]  # how long a disk takes to be full is not what is tested

    monkeypatch.setattr(files, "fsync_tree", full)
    monkeypatch.setattr(Checkpoints, "save", save_to_its_end)
    keys = {"checkpoint.every": 30, "train.duration": 100, "evaluate.every": 0, "train.steps_per_dispatch": 1}
    with pytest.raises(jt.NeedsPerson, match="No space left on device"):
        tiny(tmp_path / "run", **keys)
    status = jt.load_run(tmp_path / "run").folder.read_status()
    assert status["state"] == "failed"
    assert status["last_sealed"] is None
    assert status["step"] == 30  # the last whole step before the one that raised; the next save is at 60


def test_a_run_that_is_stopped_early_has_a_row_for_its_last_step(tmp_path: Path) -> None:
    keys = {"evaluate.every": 3, "early_stopping.patience": 2, "early_stopping.min_delta": 10.0, "log.every": 50}
    run = tiny(tmp_path / "run", **keys)
    assert int(run.state["step"]) == 9
    assert [row["step"] for row in run.metrics() if "train/loss" in row] == [1, 9]


def test_a_time_budget_that_ends_before_the_first_evaluation_tests_the_last_step(tmp_path: Path) -> None:
    run = tiny(tmp_path / "run", **{"train.time_budget": 1e-9})
    assert (run.stop.state, run.exit_code) == ("time_budget", 0)
    assert run.result["best"] == {"step": 1, "metric": "loss", "evaluation": None}
    assert run.test["loss"] > 0
