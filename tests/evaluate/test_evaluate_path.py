"""eval --path: figures on data that the run has never seen, by the schema of the run alone."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from evaluate_helpers import (
    BLOCK,
    NO_SPLIT,
    RAIN,
    cross_entropy,
    made_rows,
    text_config,
    train,
    words_of,
    write_pictures,
)
from PIL import Image

import jaxtrain as jt
from jaxtrain.data.images import ImageForm, decode
from jaxtrain.evaluate.generate import Generator


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs on rows, pictures and text; then their data goes."""
    place = tmp_path_factory.mktemp("runs")
    inputs, values = made_rows()
    np.savez(place / "own.npz", inputs=inputs, targets=words_of(values))
    np.savez(place / "values.npz", inputs=inputs, targets=values)
    write_pictures(place / "own", {"blue": 20, "green": 20, "red": 20})
    (place / "own.txt").write_text(RAIN * 60)
    arrays = {"kind": "arrays", "normalize": "feature", **NO_SPLIT}
    train(place / "rows", {"data": {**arrays, "path": str(place / "own.npz")}}).close()
    values_data = {**arrays, "path": str(place / "values.npz")}
    long = {"duration": 150, "global_batch_size": 32}
    train(place / "values", {"data": values_data, "objective": {"kind": "mse"}, "train": long}).close()
    data = {"kind": "images", "path": str(place / "own"), "size": [8], "resize": "pad", **NO_SPLIT}
    train(place / "pictures", {"data": data, "optimizer": {"peak_lr": 0.003}}).close()
    config = text_config(place / "own.txt", model={"layers": 1}, duration=30)
    train(place / "text", {**config, "evaluate": {"every": 0, "batch_size": 4}}).close()
    for own in ("own.npz", "values.npz", "own.txt"):
        (place / own).unlink()
    shutil.rmtree(place / "own")
    return place


def figures_of(run: Path, path: Path) -> dict[str, float]:
    return jt.evaluate_run(run, path=path)[0].figures


# ---------------------------------------------------------------- arrays


def test_an_npz_gives_the_figures_of_its_rows_through_the_model(place: Path, tmp_path: Path) -> None:
    inputs, values = made_rows(77, seed=5)
    np.savez(tmp_path / "other.npz", inputs=inputs, targets=words_of(values))
    evaluation, sealed = jt.evaluate_run(place / "rows", path=tmp_path / "other.npz")
    model = jt.load_model(place / "rows")
    logits, names = model(inputs), np.array(model.class_names)
    codes = np.searchsorted(names, words_of(values))
    assert list(names) == ["high", "low", "mid"]
    assert sealed.step == model.step == 40
    assert evaluation.figures["loss"] == pytest.approx(cross_entropy(logits, codes), rel=1e-5)
    assert evaluation.figures["accuracy"] == (logits.argmax(1) == codes).mean()
    confusion = np.zeros((3, 3), int)
    np.add.at(confusion, (codes, logits.argmax(1)), 1)
    assert evaluation.details["confusion"] == confusion.tolist()
    assert evaluation.rows["ids"].tolist() == list(range(77))
    assert cross_entropy(logits, codes[::-1]) != pytest.approx(evaluation.figures["loss"], rel=0.01)  # the control


def test_the_normalisation_is_that_of_the_training(place: Path, tmp_path: Path) -> None:
    """Rows moved to another place: by their own mean they would look as before."""
    inputs, values = made_rows(77, seed=5)
    figures = []
    for name, moved in (("as_is", inputs), ("moved", inputs + np.array([3, 30, 300, 0.3, 3]))):
        np.savez(tmp_path / f"{name}.npz", inputs=moved, targets=words_of(values))
        figures.append(figures_of(place / "rows", tmp_path / f"{name}.npz"))
    assert figures[1]["loss"] > figures[0]["loss"] + 0.5
    assert figures[1]["accuracy"] < figures[0]["accuracy"]


def test_values_are_compared_as_values(place: Path, tmp_path: Path) -> None:
    inputs, values = made_rows(50, seed=6)
    np.savez(tmp_path / "other.npz", inputs=inputs, targets=values)
    figures = figures_of(place / "values", tmp_path / "other.npz")
    wrong = (jt.load_model(place / "values")(inputs).astype(np.float64) - values) ** 2
    assert figures["loss"] == pytest.approx(wrong.mean(), rel=1e-5)
    assert wrong.mean() < 0.9 * values.var(0).mean()  # the control: it has learnt something


def test_which_classes_come_and_in_which_order_does_not_matter(place: Path, tmp_path: Path) -> None:
    inputs, values = made_rows(60, seed=7)
    words = words_of(values)
    for name, rows in {
        "by_name": np.argsort(words, kind="stable"),
        "backwards": np.argsort(words, kind="stable")[::-1],
        "two_only": np.flatnonzero(words != "high"),
        "one_only": np.flatnonzero(words == "mid"),
    }.items():
        np.savez(tmp_path / f"{name}.npz", inputs=inputs[rows], targets=words[rows])
        figures = figures_of(place / "rows", tmp_path / f"{name}.npz")
        logits = jt.load_model(place / "rows")(inputs[rows])
        codes = np.array([["high", "low", "mid"].index(word) for word in words[rows]])
        assert figures["loss"] == pytest.approx(cross_entropy(logits, codes), rel=1e-5), name
        assert figures["accuracy"] == pytest.approx((logits.argmax(1) == codes).mean(), abs=1e-12), name
        if name == "two_only":  # the control: numbered among themselves they would be other classes
            own = np.unique(words[rows], return_inverse=True)[1]
            assert cross_entropy(logits, own) != pytest.approx(figures["loss"], rel=0.01)


def test_a_class_that_training_never_saw_is_named(place: Path, tmp_path: Path) -> None:
    inputs, values = made_rows(30, seed=8)
    words = words_of(values).astype("<U6")
    words[11] = "higher"
    np.savez(tmp_path / "other.npz", inputs=inputs, targets=words)
    with pytest.raises(jt.ConfigError, match=r"^other\.npz: class 'higher' \(row 11\) has no training row$"):
        figures_of(place / "rows", tmp_path / "other.npz")
    words[11] = "high"
    np.savez(tmp_path / "other.npz", inputs=inputs, targets=words)
    assert figures_of(place / "rows", tmp_path / "other.npz")["loss"] > 0  # the control


def test_rows_of_another_shape_are_refused_with_both_shapes(place: Path, tmp_path: Path) -> None:
    inputs, values = made_rows(30)
    np.savez(tmp_path / "other.npz", inputs=inputs[:, :4], targets=words_of(values))
    with pytest.raises(jt.ConfigError, match=r"has rows of shape \[4\]; the model was trained on \[5\]$"):
        figures_of(place / "rows", tmp_path / "other.npz")
    np.savez(tmp_path / "other.npz", inputs=inputs, targets=values[:, 0])
    with pytest.raises(jt.ConfigError, match=r"has targets of shape \[\] a row; the model was trained on \[2\]$"):
        figures_of(place / "values", tmp_path / "other.npz")


def test_a_path_that_is_not_there_is_one_line(place: Path, tmp_path: Path) -> None:
    for run in ("rows", "pictures", "text"):
        for name in ("nowhere.npz", "nowhere"):
            with pytest.raises(jt.ConfigError, match=f"{name}': no such file or folder") as caught:
                figures_of(place / run, tmp_path / name)
            assert "\n" not in str(caught.value)


def test_an_npz_that_carries_a_split_gives_its_test_rows(place: Path, tmp_path: Path) -> None:
    inputs, values = made_rows(60, seed=9)
    split = np.arange(60) % 3
    np.savez(tmp_path / "whole.npz", inputs=inputs, targets=words_of(values), split=split)
    np.savez(tmp_path / "part.npz", inputs=inputs[split == 2], targets=words_of(values)[split == 2])
    np.savez(tmp_path / "all.npz", inputs=inputs, targets=words_of(values))
    whole, part, every = (figures_of(place / "rows", tmp_path / f"{name}.npz") for name in ("whole", "part", "all"))
    assert whole == pytest.approx(part)
    assert whole["loss"] != pytest.approx(every["loss"], rel=1e-4)  # the control


# ---------------------------------------------------------------- the run's own data


def test_the_own_data_of_the_run_need_not_be_there(place: Path) -> None:
    """The control of all tests here: without a path it is needed."""
    for run, name in (("rows", "own.npz"), ("pictures", "own"), ("text", "own.txt")):
        with pytest.raises(jt.ConfigError, match=f"{name}': no such"):
            jt.evaluate_run(place / run)


# ---------------------------------------------------------------- pictures


def test_a_folder_of_pictures_gives_the_figures_of_its_decoded_files(place: Path, tmp_path: Path) -> None:
    folder = write_pictures(tmp_path / "other", {"red": 9, "blue": 4}, seed=3)  # no green: red is still the third
    figures = figures_of(place / "pictures", folder)
    model = jt.load_model(place / "pictures")
    assert model.class_names == ("blue", "green", "red")
    files = sorted(folder.rglob("*.png"))
    form = ImageForm(8, 8, 3, "pad")
    logits = model(np.stack([decode(path, form) for path in files]))
    codes = np.array([{"blue": 0, "red": 2}[path.parent.name] for path in files])
    assert len(files) == 13
    assert figures["loss"] == pytest.approx(cross_entropy(logits, codes), rel=1e-5)
    assert figures["accuracy"] == pytest.approx((logits.argmax(1) == codes).mean(), abs=1e-12)
    assert cross_entropy(logits, codes // 2) != pytest.approx(figures["loss"], rel=0.01)  # the control
    other = model(np.stack([decode(path, ImageForm(8, 8, 3, "crop")) for path in files]))
    assert cross_entropy(other, codes) != pytest.approx(figures["loss"], rel=1e-3)  # resized as in training


def test_pictures_of_an_unknown_class_are_refused_by_its_name(place: Path, tmp_path: Path) -> None:
    folder = write_pictures(tmp_path / "other", {"blue": 2, "violet": 2})
    with pytest.raises(jt.ConfigError, match=r"other: class 'violet' \(row 2\) has no training row"):
        figures_of(place / "pictures", folder)


def test_pictures_as_arrays_give_the_same_figures_as_their_files(place: Path, tmp_path: Path) -> None:
    folder = write_pictures(tmp_path / "other", {"blue": 5, "red": 5}, seed=4)
    files = sorted(folder.rglob("*.png"))
    rows = np.stack([decode(path, ImageForm(8, 8, 3, "pad")) for path in files])
    np.savez(tmp_path / "other.npz", inputs=rows, targets=np.array([path.parent.name for path in files]))
    assert figures_of(place / "pictures", tmp_path / "other.npz") == pytest.approx(
        figures_of(place / "pictures", folder)
    )


# ---------------------------------------------------------------- text


@pytest.mark.parametrize("length", [BLOCK + 1, 5 * BLOCK, 5 * BLOCK + 1, 5 * BLOCK + 7, 2, 9])
def test_a_text_gives_the_loss_of_each_of_its_tokens_but_the_first(length: int, place: Path, tmp_path: Path) -> None:
    text = ("the plain stays in the rain " * 9)[:length]
    (tmp_path / "other.txt").write_text(text)
    figures = figures_of(place / "text", tmp_path / "other.txt")
    model = jt.load_model(place / "text")
    tokens = Generator(model).tokenizer.encode(text)
    losses = []
    for start in range(0, length - 1, BLOCK):
        window = tokens[start : start + BLOCK + 1]
        logits = model(window[None, :-1])[0]
        losses += [cross_entropy(logits[i], window[i + 1]) for i in range(len(window) - 1)]
    assert len(losses) == length - 1
    assert figures["loss"] == pytest.approx(np.mean(losses), rel=1e-5)
    assert figures["perplexity"] == pytest.approx(np.exp(np.mean(losses)), rel=1e-5)
    if length > 2:
        assert figures["loss"] != pytest.approx(np.mean(losses[:-1]), rel=1e-5)  # the control: the last one counts


def test_a_text_with_a_new_character_is_refused_by_its_name(place: Path, tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_text("the zebra in the rain\n")
    with pytest.raises(jt.UserError, match=r"^'b', 'z': the model has never seen these characters"):
        figures_of(place / "text", tmp_path / "other.txt")


def test_a_folder_of_texts_is_one_text(place: Path, tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    for name, text in (("b.txt", "the plain"), ("a.txt", "the rain\n"), ("c.md", "not this one")):
        (tmp_path / "texts" / name).write_text(text)
    (tmp_path / "one.txt").write_text("the rain\nthe plain\n")  # each of several ends
    assert figures_of(place / "text", tmp_path / "texts") == figures_of(place / "text", tmp_path / "one.txt")


def test_a_language_model_refuses_arrays_in_one_line(place: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "other.npz", inputs=np.zeros((3, BLOCK), np.int64), targets=np.zeros((3, BLOCK), np.int64))
    with pytest.raises(jt.ConfigError, match=r"other\.npz") as caught:
        figures_of(place / "text", tmp_path / "other.npz")
    assert "\n" not in str(caught.value)


# ---------------------------------------------------------------- kinds without a path


def test_digits_take_an_npz_and_pictures_and_say_so(tmp_path: Path) -> None:
    from sklearn.datasets import load_digits

    run = train(tmp_path / "run", **{"train.duration": 10})
    digits = load_digits()
    inputs = digits.images[..., None].astype(np.float32)
    rows = run.job.dataset.splits.test  # type: ignore[union-attr]
    np.savez(tmp_path / "test.npz", inputs=inputs[rows], targets=digits.target[rows])
    assert figures_of(tmp_path / "run", tmp_path / "test.npz") == pytest.approx(run.test, rel=1e-5)
    np.savez(tmp_path / "some.npz", inputs=inputs[:100], targets=digits.target[:100])
    assert figures_of(tmp_path / "run", tmp_path / "some.npz")["loss"] != pytest.approx(run.test["loss"], rel=1e-3)
    files, codes = [], []
    for i in range(30):
        folder = tmp_path / "pictures" / str(digits.target[i])
        folder.mkdir(parents=True, exist_ok=True)
        files.append(folder / f"{i:02}.png")
        codes.append(int(digits.target[i]))
        Image.fromarray((digits.images[i] * 255 / 16).round().astype(np.uint8)).save(files[-1])
    pictures = np.stack([decode(path, ImageForm(8, 8, 1, "stretch", high=16.0)) for path in files])
    np.testing.assert_allclose(pictures, inputs[:30], atol=16 / 255)
    logits = jt.load_model(tmp_path / "run")(pictures)
    figures = figures_of(tmp_path / "run", tmp_path / "pictures")
    assert figures["loss"] == pytest.approx(cross_entropy(logits, np.array(codes)), rel=1e-5)
    (tmp_path / "some.txt").write_text("7")
    with pytest.raises(jt.ConfigError) as caught:
        figures_of(tmp_path / "run", tmp_path / "some.txt")
    line = str(caught.value)
    assert line.startswith(repr(str(tmp_path / "some.txt")))
    assert "allowed: an .npz with inputs and targets, or a folder" in line


# ---------------------------------------------------------------- what is said of it


def test_what_is_left_out_of_the_figures_is_told(place: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write_pictures(tmp_path / "other", {"red": 3, "blue": 3})
    figures_of(place / "pictures", folder)
    assert caplog.messages == []
    (folder / "red" / "page.jpg").write_text("<html>")
    (folder / "green").mkdir()
    figures_of(place / "pictures", folder)
    assert caplog.messages == [
        "1 file is no image and is left out: red/page.jpg",
        "1 class folder has no images and is left out: green",
    ]


def test_a_split_of_other_data_is_refused(place: Path, tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_text(RAIN)
    with pytest.raises(jt.ConfigError, match="split 'validation' with path"):
        jt.evaluate_run(place / "text", "validation", path=tmp_path / "other.txt")
