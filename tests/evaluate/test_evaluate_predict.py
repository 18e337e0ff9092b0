"""Predictions: rows and columns, the very numbers that evaluation sees, picture files and folders, array files."""

from __future__ import annotations

import csv
import io
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from evaluate_helpers import cross_entropy, log_softmax, made_rows, train, words_of, write_pictures

import jaxtrain as jt
from jaxtrain.core.state import weights_for_evaluation
from jaxtrain.data.images import ImageForm, decode
from jaxtrain.evaluate.predict import Prediction, figures_of, predict, write

CLASSES = ("high", "low", "mid")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, jt.Run]:
    """A run of each task on the same rows, and one with BatchNorm and an average of weights on pictures."""
    place = tmp_path_factory.mktemp("runs")
    inputs, values = made_rows()
    targets = {"classes": words_of(values), "binary": values > 0, "regression": values}
    objectives = {"classes": "cross_entropy", "binary": "binary", "regression": "mse"}
    made = {
        task: train(place / task, data=(inputs, targets[task]), **{"objective.kind": kind, "data.normalize": "feature"})
        for task, kind in objectives.items()
    }
    write_pictures(place / "pictures", {"blue": 30, "green": 30, "red": 30})
    sections = {
        "data": {"kind": "images", "path": str(place / "pictures"), "size": [8, 8]},
        "model": {"kind": "resnet", "depth": 8, "width": 4},
        "train": {"duration": 12, "global_batch_size": 32, "ema_decay": 0.8},
    }
    return {**made, "pictures": train(place / "pictures-run", sections)}


@pytest.fixture(scope="module")
def models(runs: dict[str, jt.Run]) -> dict[str, jt.LoadedModel]:
    return {name: jt.load_model(run.path) for name, run in runs.items()}


def folder_of(run: jt.Run) -> Path:
    """The pictures that a run was trained on."""
    assert run.job is not None
    return Path(run.job.config.data.path)  # type: ignore[union-attr]


def split_of(run: jt.Run, split: str = "test") -> dict[str, np.ndarray]:
    """Raw rows and encoded targets of a split."""
    assert run.job is not None
    return run.job.dataset.read(split, np.arange(run.job.dataset.rows(split)))


def as_evaluated(run: jt.Run, inputs: np.ndarray, raw: bool = False) -> np.ndarray:
    """What the evaluation step computes for these rows, with the weights in memory. raw: not their average."""
    job, state = run.job, run.state
    assert job is not None
    assert state is not None
    weights = (state["params"], state["model_state"]) if raw else weights_for_evaluation(state)
    return np.asarray(job.module.bind(*weights, None)(job.spec.preprocess(np.asarray(inputs))))


def written(model: jt.LoadedModel, paths: list[Path], form: str, outputs: bool = False, batch: int = 64) -> str:
    text = io.StringIO()
    write(predict(model, paths, batch), model, text, form, outputs=outputs)
    return text.getvalue()


def as_json(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


# ---------------------------------------------------------------- rows and columns


def test_rows_of_classes(models: dict[str, jt.LoadedModel], tmp_path: Path) -> None:
    model, path = models["classes"], tmp_path / "some.npz"
    inputs, _ = made_rows(9, seed=1)
    np.savez(path, inputs=inputs)
    rows = as_json(written(model, [path], "jsonl"))
    shares = np.exp(log_softmax(model(inputs)))
    assert [list(row) for row in rows] == [["input", "class", "probability", "probabilities"]] * 9
    assert [row["input"] for row in rows] == [f"{path}[{i}]" for i in range(9)]
    for row, share in zip(rows, shares, strict=True):
        assert list(row["probabilities"]) == list(CLASSES)
        np.testing.assert_allclose(list(row["probabilities"].values()), share, rtol=1e-5)
        assert sum(row["probabilities"].values()) == pytest.approx(1, abs=1e-12)
        assert row["class"] == CLASSES[share.argmax()]
        assert row["probability"] == row["probabilities"][row["class"]] == max(row["probabilities"].values())
    assert len({row["class"] for row in rows}) > 1  # the control: it is not one answer for all
    assert [row["class"] for row in rows] == model.predict(inputs)


def test_rows_of_binary_labels(models: dict[str, jt.LoadedModel], tmp_path: Path) -> None:
    model, path = models["binary"], tmp_path / "some.npy"
    inputs, _ = made_rows(9, seed=1)
    np.save(path, inputs)
    rows = as_json(written(model, [path], "jsonl"))
    logits = model(inputs).astype(np.float64)
    assert [list(row) for row in rows] == [["input", "values", "probabilities"]] * 9
    assert [row["values"] for row in rows] == (logits > 0).astype(int).tolist()
    np.testing.assert_allclose([row["probabilities"] for row in rows], 1 / (1 + np.exp(-logits)), rtol=1e-5)
    assert {value for row in rows for value in row["values"]} == {0, 1}
    near = figures_of(model, np.array([0.1, -0.1], np.float32))
    assert near["values"] == [1, 0]
    np.testing.assert_allclose(near["probabilities"], [0.524979, 0.475021], atol=1e-6)


def test_rows_of_values(models: dict[str, jt.LoadedModel], tmp_path: Path) -> None:
    model, path = models["regression"], tmp_path / "some.npy"
    inputs, _ = made_rows(9, seed=1)
    np.save(path, inputs)
    rows = as_json(written(model, [path], "jsonl", outputs=True))
    assert [list(row) for row in rows] == [["input", "values", "outputs"]] * 9
    np.testing.assert_allclose([row["values"] for row in rows], model(inputs), rtol=1e-5)
    assert [row["values"] for row in rows] == [row["outputs"] for row in rows]
    assert np.ptp([row["values"] for row in rows], axis=0).min() > 0.1  # the control


COLUMNS = {
    "classes": ["class", "probability", "p_high", "p_low", "p_mid"],
    "binary": ["values_0", "values_1", "p_0", "p_1"],
    "regression": ["values_0", "values_1"],
}


@pytest.mark.parametrize("task", COLUMNS)
@pytest.mark.parametrize("outputs", [False, True])
def test_columns_of_csv(task: str, outputs: bool, models: dict[str, jt.LoadedModel], tmp_path: Path) -> None:
    model, path = models[task], tmp_path / "some.npy"
    inputs, _ = made_rows(5, seed=1)
    np.save(path, inputs)
    told = list(csv.reader(io.StringIO(written(model, [path], "csv", outputs))))
    count = model.schema.outputs
    own = [f"outputs_{i}" for i in range(count)] if outputs else []
    assert told[0] == ["input", *COLUMNS[task], *own, "error"]
    assert len(told) == 6
    for i, row in enumerate(told[1:]):
        assert len(row) == len(told[0])
        assert row[0] == f"{path}[{i}]"
        assert row[-1] == ""
        given = model(inputs)[i]
        flat = [v for value in figures_of(model, given).values() for v in _plain(value)]
        flat += list(given) if outputs else []
        np.testing.assert_allclose(_numbers(row[1:-1]), _numbers(flat), rtol=1e-4)
    assert (told[0] != ["input", *COLUMNS[task], "error"]) == outputs  # the control


def _plain(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else [value]


def _numbers(cells: list[Any]) -> list[float]:
    return [float(CLASSES.index(cell) if cell in CLASSES else cell) for cell in cells]


# ---------------------------------------------------------------- the numbers that evaluation sees


def fresh(run: jt.Run, *paths: Path) -> list[dict[str, Any]]:
    """`jaxtrain predict --outputs` as a process of its own."""
    command = [sys.executable, "-m", "jaxtrain", "predict", str(run.path), *map(str, paths), "--outputs"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    return as_json(done.stdout)


def test_a_fresh_process_predicts_the_logits_of_the_evaluation_of_normalised_rows(
    runs: dict[str, jt.Run], tmp_path: Path
) -> None:
    run, test = runs["classes"], split_of(runs["classes"])
    np.savez(tmp_path / "test.npz", inputs=test["inputs"])
    logits = np.array([row["outputs"] for row in fresh(run, tmp_path / "test.npz")])
    np.testing.assert_allclose(logits, as_evaluated(run, test["inputs"]), atol=1e-5)
    assert cross_entropy(logits, test["targets"]) == pytest.approx(run.test["loss"], rel=1e-5)
    assert (logits.argmax(1) == test["targets"]).mean() == pytest.approx(run.test["accuracy"], abs=1e-12)
    assert run.job is not None
    without = np.asarray(run.job.module.bind(*weights_for_evaluation(run.state), None)(test["inputs"]))  # type: ignore[arg-type]
    assert np.abs(without - logits).max() > 0.1  # the control: the normalisation matters


def test_a_fresh_process_predicts_the_logits_of_the_evaluation_with_batch_norm_and_averaged_weights(
    runs: dict[str, jt.Run], tmp_path: Path
) -> None:
    run, test = runs["pictures"], split_of(runs["pictures"])
    np.savez(tmp_path / "test.npz", inputs=test["inputs"])
    folder = folder_of(run)
    rows = fresh(run, tmp_path / "test.npz", folder)
    count = len(test["inputs"])
    logits = np.array([row["outputs"] for row in rows[:count]])
    np.testing.assert_allclose(logits, as_evaluated(run, test["inputs"]), atol=1e-5)
    assert cross_entropy(logits, test["targets"]) == pytest.approx(run.test["loss"], rel=1e-5)
    assert np.abs(logits - as_evaluated(run, test["inputs"], raw=True)).max() > 1e-3  # the control: the average counts
    # The files of the folder, by name, against the rows that training saw.
    predicted = {row["input"]: row["outputs"] for row in rows[count:]}
    assert run.job is not None
    names = [str(folder / path) for path in run.job.dataset.source.pictures.paths]  # type: ignore[union-attr]
    assert sorted(predicted) == sorted(names)
    for split in ("train", "validation", "test"):
        seen = split_of(run, split)
        told = np.array([predicted[names[i]] for i in seen["ids"]])
        np.testing.assert_allclose(told, as_evaluated(run, seen["inputs"]), atol=1e-5)
    assert np.abs(np.diff(list(predicted.values()), axis=0)).max() > 0.01  # the control: files differ


@pytest.mark.parametrize("task", ["binary", "regression"])
def test_losses_of_predicted_rows_are_those_of_the_run(
    task: str, runs: dict[str, jt.Run], models: dict[str, jt.LoadedModel], tmp_path: Path
) -> None:
    run, test = runs[task], split_of(runs[task])
    np.save(tmp_path / "test.npy", test["inputs"])
    outputs = np.array([p.outputs for p in predict(models[task], [tmp_path / "test.npy"])]).astype(np.float64)
    truth = test["targets"].astype(np.float64)
    if task == "binary":
        losses = np.logaddexp(0, outputs) - outputs * truth
    else:
        losses = (outputs - truth) ** 2
    assert losses.mean() == pytest.approx(run.test["loss"], rel=1e-5)
    assert losses[::-1].mean() != pytest.approx(np.square(outputs - truth[::-1]).mean(), rel=1e-3)  # rows have an order


def test_a_picture_file_becomes_exactly_the_row_of_training(runs: dict[str, jt.Run]) -> None:
    run, folder = runs["pictures"], folder_of(runs["pictures"])
    assert run.job is not None
    form = ImageForm.from_json(run.job.dataset.schema.image or {})
    seen = split_of(run, "train")
    for inputs, row in zip(seen["inputs"], seen["ids"], strict=True):
        path = folder / run.job.dataset.source.pictures.paths[row]  # type: ignore[union-attr]
        np.testing.assert_array_equal(decode(path, form), inputs)
    other = ImageForm(8, 8, 3, "stretch")
    assert not np.array_equal(decode(path, other), inputs)  # the control: how it is resized shows


# ---------------------------------------------------------------- batches


def test_a_batch_of_one_gives_what_a_batch_of_64_gives_by_one_program_each(
    runs: dict[str, jt.Run], tmp_path: Path
) -> None:
    inputs, _ = made_rows(70, seed=2)
    np.save(tmp_path / "some.npy", inputs)
    told, programs = {}, {}
    for batch in (1, 64, 13):
        model = jt.load_model(runs["classes"].path)
        told[batch] = [p.outputs for p in predict(model, [tmp_path / "some.npy"], batch)]
        programs[batch] = model._forward._cache_size()
    assert programs == {1: 1, 64: 1, 13: 1}  # 70 rows are no whole number of 64 or 13
    np.testing.assert_allclose(told[1], told[64], atol=1e-5)
    np.testing.assert_allclose(told[13], told[64], atol=1e-5)
    for n in (70, 6):
        model(inputs[:n])
    assert model._forward._cache_size() == 3  # the control: other sizes are other programs


def test_array_and_picture_inputs_may_be_mixed(
    models: dict[str, jt.LoadedModel], runs: dict[str, jt.Run], tmp_path: Path
) -> None:
    folder = folder_of(runs["pictures"])
    first = folder / "blue" / "000.png"
    np.save(tmp_path / "two.npy", np.stack([decode(first, ImageForm(8, 8, 3))] * 2))
    told = list(predict(models["pictures"], [tmp_path / "two.npy", first, folder / "red"], batch=7))
    assert [p.input for p in told[:3]] == [f"{tmp_path / 'two.npy'}[0]", f"{tmp_path / 'two.npy'}[1]", str(first)]
    assert len(told) == 33
    np.testing.assert_allclose(told[0].outputs, told[2].outputs, atol=1e-5)
    assert not np.allclose(told[0].outputs, told[3].outputs, atol=1e-3)  # the control


# ---------------------------------------------------------------- folders and damage


def test_a_folder_is_read_in_order_without_what_is_hidden(models: dict[str, jt.LoadedModel], tmp_path: Path) -> None:
    folder = write_pictures(tmp_path / "new", {"b": 2, "a": 1})
    shutil.copy(folder / "b/000.png", folder / "zero.PNG")
    shutil.copy(folder / "b/000.png", folder / "no_ending")
    for hidden in (".hidden.png", "__MACOSX/x.png", ".cache/y.png", "b/._000.png", "a/Thumbs.db"):
        (folder / hidden).parent.mkdir(exist_ok=True)
        shutil.copy(folder / "b/000.png", folder / hidden)
    (folder / "notes.txt").write_text("no picture")
    told = [p.input for p in predict(models["pictures"], [folder])]
    assert told == [str(folder / name) for name in ("a/000.png", "b/000.png", "b/001.png", "no_ending", "zero.PNG")]
    visible = list(predict(models["pictures"], [folder / "b/._000.png"]))
    assert [p.failed for p in visible] == [False]  # the control: it is a picture, and is read when it is named


def test_a_damaged_file_is_told_in_its_place_and_the_others_are_there(
    models: dict[str, jt.LoadedModel], tmp_path: Path
) -> None:
    folder = write_pictures(tmp_path / "new", {"a": 5})
    whole = list(predict(models["pictures"], [folder], batch=2))
    content = (folder / "a/002.png").read_bytes()
    (folder / "a/002.png").write_bytes(content[:-40])
    for batch in (1, 2, 64):
        told = list(predict(models["pictures"], [folder], batch))
        assert [p.failed for p in told] == [False, False, True, False, False]
        assert [p.input for p in told] == [p.input for p in whole]
        assert list(told[2].figures) == ["error"]
        assert told[2].figures["error"].startswith(f"{folder / 'a/002.png'} cannot be used as a picture: ")
        for i in (0, 1, 3, 4):
            np.testing.assert_allclose(told[i].outputs, whole[i].outputs, atol=1e-5)
    text = io.StringIO()
    assert write(iter(told), models["pictures"], text, "csv", outputs=True) == (5, 1)
    rows = list(csv.reader(io.StringIO(text.getvalue())))
    assert rows[3][0] == str(folder / "a/002.png")
    assert set(rows[3][1:-1]) == {""}
    assert rows[3][-1] == told[2].figures["error"]
    assert [row[-1] for row in rows[1:3] + rows[4:]] == [""] * 4
    assert write(iter(whole), models["pictures"], io.StringIO(), "csv") == (5, 0)  # the control
    as_lines = as_json(written(models["pictures"], [folder], "jsonl", outputs=True))
    assert list(as_lines[2]) == ["input", "error"]


def test_a_folder_of_damaged_files_only_has_a_row_for_each(models: dict[str, jt.LoadedModel], tmp_path: Path) -> None:
    folder = write_pictures(tmp_path / "new", {"a": 2})
    for path in (folder / "a").iterdir():
        path.write_bytes(path.read_bytes()[:60])
    assert [p.failed for p in predict(models["pictures"], [folder])] == [True, True]


# ---------------------------------------------------------------- what is refused


def refusal(model: jt.LoadedModel, *paths: Path) -> str:
    with pytest.raises(jt.ConfigError) as caught:
        list(predict(model, paths))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_path_that_is_not_there_is_named_before_anything_is_predicted(
    models: dict[str, jt.LoadedModel], tmp_path: Path
) -> None:
    np.save(tmp_path / "some.npy", made_rows(3)[0])
    with pytest.raises(jt.ConfigError, match="nowhere': no such file or folder") as caught:
        next(predict(models["classes"], [tmp_path / "some.npy", tmp_path / "nowhere"]))
    assert str(caught.value).endswith(f"(looked in {tmp_path})")
    assert len(list(predict(models["classes"], [tmp_path / "some.npy"]))) == 3  # the control


def test_rows_of_another_shape_are_refused(models: dict[str, jt.LoadedModel], tmp_path: Path) -> None:
    for shape in ((3, 4), (3, 5, 1), (5,), ()):
        np.save(tmp_path / "some.npy", np.zeros(shape, np.float32))
        assert refusal(models["classes"], tmp_path / "some.npy") == (
            f"{str(tmp_path / 'some.npy')!r}: inputs have shape {list(shape)}; allowed: [B, 5]"
        )
    np.save(tmp_path / "some.npy", np.zeros((0, 5), np.float32))
    assert list(predict(models["classes"], [tmp_path / "some.npy"])) == []


def test_a_model_of_rows_refuses_pictures_with_the_reason(models: dict[str, jt.LoadedModel], tmp_path: Path) -> None:
    folder = write_pictures(tmp_path / "new", {"a": 1})
    for path in (folder, folder / "a/000.png"):
        assert refusal(models["classes"], path) == (
            f"{str(path)!r}: this model was trained on rows of shape [5], not on pictures; "
            "give it an .npz with `inputs`, or an .npy"
        )
    assert len(list(predict(models["pictures"], [folder]))) == 1  # the control


def test_a_folder_without_pictures_says_so(models: dict[str, jt.LoadedModel], tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    (tmp_path / "new/notes.txt").write_text("none")
    assert refusal(models["pictures"], tmp_path / "new") == (
        f"{str(tmp_path / 'new')!r}: no picture in this folder (1 other files)"
    )


def broken(folder: Path, name: str) -> Path:
    """A file that is no array file of numbers, in one of many ways."""
    inputs, _ = made_rows(3)
    path = folder / name
    np.savez(folder / "whole.npz", inputs=inputs)
    np.save(folder / "whole.npy", inputs)
    whole = (folder / f"whole{path.suffix}").read_bytes()
    match name:
        case "text.npz" | "text.npy":
            path.write_bytes(b"hello")
        case "empty.npz" | "empty.npy":
            path.write_bytes(b"")
        case "cut.npz" | "cut.npy":
            path.write_bytes(whole[: len(whole) // 2])
        case "none.npz":
            np.savez(path, x=inputs)
        case "objects.npy":
            np.save(path, np.array([{"a": 1}] * 5, object)[None])
        case "words.npy":
            np.save(path, np.array([["a"] * 5]))
        case "complex.npy":
            np.save(path, inputs.astype(complex))
    return path


@pytest.mark.parametrize(
    "name",
    [
        "text.npz",
        "text.npy",
        "empty.npz",
        "empty.npy",
        "cut.npz",
        "cut.npy",
        "none.npz",
        "objects.npy",
        "words.npy",
        "complex.npy",
    ],
)
def test_a_file_that_holds_no_rows_of_numbers_is_one_line_with_its_name(
    name: str, models: dict[str, jt.LoadedModel], tmp_path: Path
) -> None:
    path = broken(tmp_path, name)
    assert refusal(models["classes"], path).startswith(f"{str(path)!r}")
    for whole in ("whole.npz", "whole.npy"):  # the control
        assert len(list(predict(models["classes"], [tmp_path / whole]))) == 3


@pytest.mark.parametrize(("inside", "name"), [("whole.npy", "some.npz"), ("whole.npz", "some.npy")])
def test_an_array_file_is_known_by_its_content(
    inside: str, name: str, models: dict[str, jt.LoadedModel], tmp_path: Path
) -> None:
    inputs, _ = made_rows(3)
    np.savez(tmp_path / "whole.npz", inputs=inputs)
    np.save(tmp_path / "whole.npy", inputs)
    shutil.copy(tmp_path / inside, tmp_path / name)
    told, plain = ([p.outputs for p in predict(models["classes"], [tmp_path / file])] for file in (name, inside))
    np.testing.assert_array_equal(told, plain)


def test_a_row_that_is_not_finite_is_told_in_its_place(models: dict[str, jt.LoadedModel], tmp_path: Path) -> None:
    """Training refuses such rows; of all NaN the first class would be the likeliest."""
    inputs, _ = made_rows(4)
    inputs[1, 2], inputs[2, 0] = np.nan, np.inf
    np.save(tmp_path / "some.npy", inputs)
    told = list(predict(models["classes"], [tmp_path / "some.npy"]))
    assert [p.failed for p in told] == [False, True, True, False]
    assert "NaN or infinite" in told[1].figures["error"]


def test_a_language_model_is_told_to_take_prompts(models: dict[str, jt.LoadedModel]) -> None:
    from dataclasses import replace

    model = jt.LoadedModel(models["classes"]._module, models["classes"].weights, models["classes"].schema, 1)
    model.schema = replace(model.schema, task="tokens")
    assert refusal(model, Path("x.npz")).startswith("this run is a language model: it continues prompts")


def test_what_failed_is_known(models: dict[str, jt.LoadedModel]) -> None:
    assert Prediction("x", {"error": "why"}).failed
    assert not Prediction("x", figures_of(models["regression"], np.zeros(2, np.float32))).failed
