"""Runs end to end on text, pictures, MNIST files and sequences."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from run_files import GPT, RAIN, write_idx, write_pictures
from run_helpers import TINY, differing, rows_without_time, stop_at
from sklearn.datasets import load_digits

import jaxtrain as jt
from jaxtrain.build import build
from jaxtrain.config import load
from jaxtrain.session import eval_batches

BLOCK = 8


def sections(data: dict[str, Any], **other: Any) -> dict[str, Any]:
    """The small run of the other tests on other data, with other sections."""
    return {**TINY, "data": data, **other}


# ---------------------------------------------------------------- text


@pytest.fixture(scope="module")
def rain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """880 characters: 704 for training, 88 windows, and 6 steps of 16 an epoch."""
    path = tmp_path_factory.mktemp("text") / "rain.txt"
    path.write_text(RAIN * 20)
    return path


# Everything that has a memory: dropout, average, accumulation, patience, windows that are shifted in each epoch.
def rich(path: Path) -> dict[str, Any]:
    return sections(
        {"kind": "text", "path": str(path), "block_size": BLOCK},
        model={**GPT, "dropout": 0.1},
        train={"duration": 24, "global_batch_size": 16, "micro_batch_size": 8, "ema_decay": 0.9},
        optimizer={"peak_lr": 0.02},
        early_stopping={"patience": 5},
    )


def text_run(path: Path, place: Path, **overrides: Any) -> jt.Run:
    return jt.train(rich(path), run_dir=place, quiet=True, **overrides)


@pytest.fixture(scope="module")
def whole(rain: Path, tmp_path_factory: pytest.TempPathFactory) -> jt.Run:
    return text_run(rain, tmp_path_factory.mktemp("whole") / "run")


def test_a_language_model_learns_a_text(whole: jt.Run) -> None:
    assert whole.job is not None
    assert whole.job.feed_kind == "resident"
    assert (whole.job.steps.per_epoch, whole.job.steps.total) == (6, 24)
    first, *_, last = [row["eval/loss"] for row in whole.metrics() if "eval/loss" in row]
    assert last < first < np.log(14)
    assert whole.test["perplexity"] == pytest.approx(np.exp(whole.test["loss"]), rel=1e-6)
    assert whole.result["unit"] == "rows of 8 tokens"
    assert whole.result["rows"] == {"train": 87, "validation": 11, "test": 11}


@pytest.mark.parametrize("feed", ["direct", "prefetch"])
def test_feeds_of_text_give_the_same_run(feed: str, whole: jt.Run, rain: Path, tmp_path: Path) -> None:
    with text_run(rain, tmp_path / "run", **{"data.feed": feed}) as run:
        assert run.job is not None
        assert run.job.feed_kind == feed
        assert differing(run.state, whole.state) == []
        assert rows_without_time(run) == rows_without_time(whole)
        assert run.test == whole.test


def test_another_seed_is_another_run_of_a_text(whole: jt.Run, rain: Path, tmp_path: Path) -> None:
    """The control of the tests around it: they see a difference where there is one."""
    with text_run(rain, tmp_path / "run", **{"train.seed": 1}) as run:
        assert "['params']['head.kernel']" not in differing(run.state, whole.state)  # tied: there is none
        assert len(differing(run.state["params"], whole.state["params"])) == len(run.state["params"])  # type: ignore[index]
        assert rows_without_time(run) != rows_without_time(whole)


@pytest.mark.parametrize("k", [7, 15])
def test_a_language_model_that_was_stopped_and_resumed_equals_the_uninterrupted(
    k: int, whole: jt.Run, rain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of an epoch, whose shift the resumed run must find again."""
    stop_at(monkeypatch, k)
    with text_run(rain, tmp_path / "run") as stopped:
        assert stopped.exit_code == 130
        assert differing(stopped.state, whole.state) != []  # the control: it is not there yet
    monkeypatch.undo()
    with jt.resume(tmp_path / "run", quiet=True) as resumed:
        assert differing(resumed.state, whole.state) == []
        assert rows_without_time(resumed) == rows_without_time(whole)
        assert resumed.test == whole.test
        assert resumed.result["best"] == whole.result["best"]


def test_windows_are_shifted_anew_in_each_epoch(whole: jt.Run) -> None:
    assert whole.job is not None
    dataset, starts = whole.job.dataset, []
    for epoch in range(4):
        ids = dataset.read("train", np.arange(dataset.rows("train")), epoch)["ids"]
        assert (np.diff(ids) == BLOCK).all()
        starts.append(int(ids[0]))
    assert len(set(starts)) > 1


@pytest.mark.parametrize("split", ["validation", "test"])
def test_the_mask_of_the_last_window_leaves_one_target_fewer_than_tokens(split: str, whole: jt.Run) -> None:
    job, state = whole.job, whole.state
    assert job is not None
    assert state is not None
    tokens = job.dataset.tokens[split]  # type: ignore[union-attr]
    batches = list(eval_batches(job, split))
    counts = [float(job.eval_step(state["params"], state["model_state"], put)["loss_count"]) for _, put in batches]
    assert sum(counts) == len(tokens) - 1 == 87
    seen = np.concatenate([host["targets"][host["mask"]] for host, _ in batches])
    assert seen.tolist() == tokens[1:].tolist()
    assert sum(host["targets"].size for host, _ in batches) > len(tokens) - 1  # the control: there is something to mask


@pytest.fixture(scope="module")
def devices(rain: Path) -> dict[str, Any]:
    """What `text_worker.py` saw on 8 simulated devices."""
    worker = Path(__file__).with_name("text_worker.py")
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, str(worker), str(rain)], capture_output=True, text=True, env=env, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(next(x for x in done.stdout.splitlines() if x.startswith("RESULT "))[7:])


@pytest.mark.parametrize("many", ["eight", "eight_resident"])
def test_a_language_model_on_eight_devices_is_that_on_one(many: str, devices: dict[str, Any]) -> None:
    one, other = devices["one"], devices[many]
    assert (devices["devices"], one["devices"], other["devices"]) == (8, 1, 8)
    np.testing.assert_allclose(other["losses"], one["losses"], rtol=1e-4)
    for name, value in one["params"].items():
        np.testing.assert_allclose(other["params"][name], value, rtol=1e-3, atol=1e-5, err_msg=name)
    assert other["figures"] == pytest.approx(one["figures"], rel=1e-4)
    assert other["targets"] == one["targets"] == one["tokens"] - 1
    assert one["losses"][-1] < 0.9 * one["losses"][0]  # the control: it moves


def word_tokenizer(path: Path) -> None:
    """A tokenizer.json of whole words."""
    words = {word: i for i, word in enumerate(["?", *sorted(set(RAIN.split()))])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(path))


def test_a_run_with_a_tokenizer_file_goes_on_in_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths as they were meant, wherever the run is taken up; the model itself needs no file."""
    monkeypatch.chdir(tmp_path)
    Path("rain.txt").write_text(RAIN * 40)
    word_tokenizer(Path("words.json"))
    data = {"kind": "text", "path": "rain.txt", "block_size": BLOCK, "tokenizer": "words.json"}
    config = sections(data, model=GPT, train={"duration": 4, "global_batch_size": 8})
    run = jt.train(config, run_dir=tmp_path / "run", quiet=True)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert jt.evaluate_run(tmp_path / "run")[0].figures == run.test
    with jt.resume(tmp_path / "run", quiet=True, **{"train.duration": 6}) as longer:
        assert int(longer.state["step"]) == 6  # type: ignore[index]
    (tmp_path / "words.json").unlink()
    assert len(jt.load_model(tmp_path / "run").generate("the rain", 3).split()) == 3
    with pytest.raises(jt.ConfigError, match=r"words\.json': no such file"):  # the control
        jt.evaluate_run(tmp_path / "run")


# ---------------------------------------------------------------- pictures


def test_pictures_in_folders_are_learnt(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = write_pictures(tmp_path / "pictures", {"cat": 40, "dog": 40})
    (folder / "cat/notes.txt").write_text("no picture")
    data = {"kind": "images", "path": str(folder), "size": [6]}
    with jt.train(sections(data, optimizer={"peak_lr": 0.01}), run_dir=tmp_path / "run") as run:
        assert run.result["class_names"] == ("cat", "dog")
        assert run.result["rows"] == {"train": 48, "validation": 16, "test": 16}
        assert run.test["accuracy"] >= 0.95
        losses = [row["train/loss"] for row in run.metrics() if "train/loss" in row]
        assert losses[0] > 0.4  # the control: it was not known from the start
    assert "note: 1 file is no image and is left out: cat/notes.txt" in capfd.readouterr().err


def test_fault_img_hidden_folders(shared: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """6 images of cat and dog, in this order; what systems leave behind is no class, and an empty one is told."""
    case = Path(shutil.copytree(shared / "faults/img_hidden_folders", tmp_path / "case"))
    case.chmod(0o755)
    (case / "empty_class").chmod(0o755)
    data = {"kind": "images", "path": str(case), "size": [8], "validation_fraction": 0.0, "test_fraction": 0.0}
    short = {"duration": 3, "global_batch_size": 6}
    with jt.train(sections(data, train=short), run_dir=tmp_path / "run") as run:
        assert run.job is not None
        assert run.job.dataset.schema.class_names == ("cat", "dog")
        assert run.result["class_names"] == ("cat", "dog")
        assert run.result["rows"] == {"train": 6, "validation": 0, "test": 0}
        rows = run.job.dataset.read("train", np.arange(6))
        names = [run.job.dataset.source.pictures.paths[i] for i in rows["ids"]]  # type: ignore[union-attr]
        assert sorted(names) == [f"{name}/{i}.png" for name in ("cat", "dog") for i in range(3)]
        assert [("cat", "dog")[k] for k in rows["targets"]] == [name.partition("/")[0] for name in names]
    said = capfd.readouterr().err
    assert "note: 1 class folder has no images and is left out: empty_class" in said
    assert "ipynb" not in said
    assert "MACOSX" not in said
    model = jt.load_model(tmp_path / "run", "last")
    assert model.class_names == ("cat", "dog")
    shutil.copy(case / "cat/0.png", case / "empty_class/0.png")
    other = build(load(sections(data, train=short)))  # the control: with a picture it is a class
    assert other.dataset.schema.class_names == ("cat", "dog", "empty_class")


def unpacked(shared: Path, place: Path, count: int) -> Path:
    """The first `count` photographs of each class; people follow one another in the names."""
    with tarfile.open(shared / "data/sign_digits/sign_digits.tar") as tar:
        names = sorted(m.name for m in tar.getmembers() if m.name.lower().endswith(".jpg"))
        by_class: dict[str, list[str]] = {}
        for name in names:
            by_class.setdefault(Path(name).parent.name, []).append(name)
        assert len(by_class) == 10
        wanted = {name for group in by_class.values() for name in group[:count]}
        tar.extractall(place, [m for m in tar.getmembers() if m.name in wanted], filter="data")
    return place / Path(names[0]).parents[1]


def test_real_photographs_of_hands_are_learnt(shared: Path, tmp_path: Path) -> None:
    """Sign Language Digits: 100 photographs of each of 10 classes, by chance 10 % are right."""
    folder = unpacked(shared, tmp_path / "hands", 100)
    keys = {
        "data.path": str(folder),
        "data.size": [24],
        "data.color": "grey",
        "model.kind": "cnn",
        "model.channels": [16, 32],
        "model.dense": [64],
        "augment.shift": 2,
        "train.duration": "8ep",
        "evaluate.every": "4ep",
        "log.tensorboard": False,
    }
    with jt.train("images", run_dir=tmp_path / "run", quiet=True, **keys) as run:
        assert run.result["class_names"] == tuple("0123456789")
        assert run.result["rows"] == {"train": 600, "validation": 200, "test": 200}
        assert run.test["accuracy"] >= 0.4
    for k in range(10):
        (folder / str(k)).rename(folder / f"was-{k}")
    for k in range(10):
        (folder / f"was-{k}").rename(folder / str((k + 1) % 10))
    assert jt.evaluate_run(tmp_path / "run", path=folder)[0].figures["accuracy"] <= 0.2  # the control


# ---------------------------------------------------------------- mnist


def test_idx_files_are_learnt_and_their_own_test_files_are_the_test(tmp_path: Path) -> None:
    folder = write_idx(tmp_path / "idx", train=90, test=30)
    data = {"kind": "mnist", "path": str(folder)}
    with jt.train(sections(data, optimizer={"peak_lr": 0.01}), run_dir=tmp_path / "run", quiet=True) as run:
        assert run.job is not None
        assert run.result["class_names"] == ("0", "1", "2")
        assert run.result["rows"] == {"train": 81, "validation": 9, "test": 30}
        assert run.job.dataset.splits.test.tolist() == list(range(90, 120))  # type: ignore[union-attr]
        assert run.test["accuracy"] >= 0.95
    labels = folder / "t10k-labels-idx1-ubyte"
    content = labels.read_bytes()
    labels.write_bytes(content[:8] + bytes((b + 1) % 3 for b in content[8:]))
    assert jt.evaluate_run(tmp_path / "run", path=folder)[0].figures["accuracy"] <= 0.05  # the control


# ---------------------------------------------------------------- sequences


def test_a_tcn_reads_digits_row_by_row(tmp_path: Path) -> None:
    digits = load_digits()
    keys = {"model.kind": "tcn", "model.channels": [24, 24], "optimizer.peak_lr": 0.01, "train.duration": "5ep"}
    config = {k: v for k, v in TINY.items() if k != "model"}
    trainer = jt.Trainer(config, data=(digits.images, digits.target), **keys)
    with trainer.fit(run_dir=tmp_path / "run", quiet=True) as run:
        assert run.job is not None
        assert run.job.dataset.schema.input_shape == (8, 8)
        assert run.test["accuracy"] >= 0.85
    model = jt.load_model(tmp_path / "run")
    rows = digits.images[:200]
    right = np.array(model.predict(rows)) == digits.target[:200].astype(str)
    upside_down = np.array(model.predict(rows[:, ::-1])) == digits.target[:200].astype(str)
    assert right.mean() >= 0.85
    assert upside_down.mean() < 0.6  # the control: the order of the steps is read


def test_a_tcn_gives_a_value_at_each_step_from_what_came_before(tmp_path: Path) -> None:
    """The running mean of a random walk."""
    walks = np.random.default_rng(0).normal(size=(400, 12, 1)).cumsum(1).astype(np.float32)
    means = walks[..., 0].cumsum(1) / np.arange(1, 13)
    config = {k: v for k, v in TINY.items() if k != "model"}
    keys = {"model.kind": "tcn", "model.channels": [16, 16], "model.output": "step", "objective.kind": "mse"}
    keys |= {
        "train.duration": "20ep",
        "optimizer.peak_lr": 0.01,
        "train.global_batch_size": 32,
        "evaluate.every": "5ep",
    }
    with jt.Trainer(config, data=(walks, means), **keys).fit(run_dir=tmp_path / "run", quiet=True) as run:
        assert run.test["r2"] >= 0.9
    model = jt.load_model(tmp_path / "run")
    outputs = model(walks[:5])
    assert outputs.shape == (5, 12, 1)
    changed = walks[:5].copy()
    changed[:, 8:] += 3
    moved = np.abs(model(changed) - outputs)[..., 0].max(0)
    assert (moved[:8] <= 1e-5).all()
    assert (moved[8:] > 0.1).all()  # the control
