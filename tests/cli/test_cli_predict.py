"""jaxtrain predict: where rows go, formats, exit codes; prompts of a language model."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_helpers import one_line, tree
from PIL import Image
from sklearn.datasets import load_digits

import jaxtrain as jt
from jaxtrain.evaluate.generate import Generator, Sampling

RAIN = "the rain in spain stays mainly in the plain\n"


@pytest.fixture(scope="module")
def speaking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A language model of a few steps."""
    place = tmp_path_factory.mktemp("speaking")
    (place / "rain.txt").write_text(RAIN * 60)
    config = {
        "name": "rain",
        "model": {"kind": "gpt", "layers": 1, "heads": 2, "width": 16},
        "data": {"kind": "text", "path": str(place / "rain.txt"), "block_size": 16, "test_fraction": 0},
        "train": {"duration": 40, "global_batch_size": 16},
        "optimizer": {"peak_lr": 0.02},
        "evaluate": {"every": 0},
        "log": {"tensorboard": False},
    }
    jt.train(config, run_dir=place / "run", quiet=True).close()
    return place / "run"


def some_digits(n: int = 5) -> np.ndarray:
    return load_digits().images[:n, ..., None].astype(np.float32)


def digit_pictures(n: int = 4) -> Path:
    """Digits as grey PNGs: 0..16 as 0..255."""
    folder = Path("pictures")
    folder.mkdir()
    for i, image in enumerate(load_digits().images[:n]):
        Image.fromarray((image * 255 / 16).round().astype(np.uint8)).save(folder / f"{i}.png")
    return folder


def lines_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


# ------------------------------------------------------------ rows


def test_rows_go_to_stdout_as_json_and_nothing_else_does(cli: Any, finished: Path) -> None:
    np.save("some.npy", some_digits())
    answer = cli("predict", finished, "some.npy")
    assert (answer.code, answer.err) == (0, "")
    rows = lines_of(answer.out)
    assert [row["input"] for row in rows] == [f"some.npy[{i}]" for i in range(5)]
    assert [row["class"] for row in rows] == jt.load_model(finished).predict(some_digits())
    assert "outputs" not in rows[0]
    assert len(lines_of(cli("predict", finished, "some.npy", "--outputs").out)[0]["outputs"]) == 10


@pytest.mark.parametrize("form", ["jsonl", "csv"])
def test_an_output_file_holds_what_the_terminal_would_show(cli: Any, finished: Path, form: str) -> None:
    np.save("some.npy", some_digits())
    shown = cli("predict", finished, "some.npy", "--format", form)
    answer = cli("predict", finished, "some.npy", "--format", form, "--output=out.txt")
    assert (answer.code, answer.out, answer.err) == (0, "", "")
    assert Path("out.txt").read_bytes().decode() == shown.out
    if form == "csv":
        header, *rows = csv.reader(io.StringIO(shown.out))
        assert header == ["input", "class", "probability", *(f"p_{i}" for i in range(10)), "error"]
        assert [row[0] for row in rows] == [f"some.npy[{i}]" for i in range(5)]
    else:
        assert len(lines_of(shown.out)) == 5


def test_a_picture_is_read_as_training_reads_its_rows(cli: Any, finished: Path) -> None:
    folder = digit_pictures()
    np.save("some.npy", some_digits(4))
    files = lines_of(cli("predict", finished, folder, "--outputs").out)
    arrays = lines_of(cli("predict", finished, "some.npy", "--outputs").out)
    # A byte is a step of 16/255: the pictures are the arrays, rounded.
    np.testing.assert_allclose([r["outputs"] for r in files], [r["outputs"] for r in arrays], atol=0.05)
    Image.fromarray(255 - np.asarray(Image.open(folder / "0.png"))).save(folder / "0.png")
    changed = lines_of(cli("predict", finished, folder / "0.png", "--outputs").out)
    assert np.abs(np.subtract(changed[0]["outputs"], arrays[0]["outputs"])).max() > 0.5  # the control


def test_a_step_can_be_chosen(cli: Any, finished: Path) -> None:
    np.save("some.npy", some_digits())
    told = {step: cli("predict", finished, "some.npy", "--step", step, "--outputs") for step in ("17", "20", "last")}
    assert {answer.code for answer in told.values()} == {0}
    assert told["20"].out == told["last"].out != told["17"].out
    answer = cli("predict", finished, "some.npy", "--step=7")
    assert (answer.code, answer.out) == (2, "")
    assert one_line(answer.err) == "checkpoint '7' is not there; allowed: best, last, 17, 20"


@pytest.mark.parametrize("form", ["jsonl", "csv"])
def test_a_damaged_file_is_told_in_its_place_with_exit_code_1(cli: Any, finished: Path, form: str) -> None:
    folder = digit_pictures()
    whole = cli("predict", finished, folder, f"--format={form}")
    assert whole.code == 0  # the control
    (folder / "1.png").write_bytes((folder / "1.png").read_bytes()[:50])
    answer = cli("predict", finished, folder, f"--format={form}")
    assert answer.code == 1
    assert one_line(answer.err) == "1 of 4 inputs could not be read; each is told in its place"
    first = 1 if form == "csv" else 0
    assert "pictures/1.png cannot be used as a picture: " in answer.results[first + 1]
    for i in (0, 2, 3):
        assert answer.results[first + i] == whole.results[first + i]


# ------------------------------------------------------------ what is refused


WRONG = [
    (["nowhere.png"], "'nowhere.png': no such file or folder"),
    (["some.npy", "nowhere.png"], "'nowhere.png': no such file or folder"),
    (["flat.npy"], "'flat.npy': inputs have shape [5, 64]; allowed: [B, 8, 8, 1]"),
    (["empty"], "'empty': no picture in this folder (0 other files)"),
    (["cut.npz"], "'cut.npz' cannot be read as arrays: "),
    (["some.npy", "--format=xml"], "--format: 'xml' is not allowed; allowed: jsonl, csv"),
    (["some.npy", "--format=cvs"], "--format: 'cvs' is not allowed; did you mean csv? allowed: jsonl, csv"),
    (["some.npy", "--format=text"], "--format: 'text' is not allowed; allowed: jsonl, csv"),
    (["some.npy", "--output=no/folder.txt"], "--output: 'no/folder.txt' cannot be written: No such file or directory"),
]


@pytest.mark.parametrize(("arguments", "line"), WRONG, ids=[" ".join(arguments) for arguments, _ in WRONG])
def test_what_cannot_be_is_one_line_and_leaves_nothing(
    cli: Any, finished: Path, arguments: list[str], line: str
) -> None:
    np.save("some.npy", some_digits())
    np.save("flat.npy", some_digits().reshape(5, 64))
    Path("empty").mkdir()
    np.savez("whole.npz", inputs=some_digits())
    content = Path("whole.npz").read_bytes()
    Path("cut.npz").write_bytes(content[: len(content) // 2])
    before = tree(Path.cwd())
    forms = [] if any("--format" in a for a in arguments) else ["--format=csv"]
    answer = cli("predict", finished, *arguments, *forms)
    assert (answer.code, answer.out) == (2, "")
    assert one_line(answer.err).startswith(line)
    assert tree(Path.cwd()) == before


@pytest.mark.parametrize("path", ["nowhere.png", "flat.npy"])
def test_an_output_file_that_was_there_outlives_a_wrong_input(cli: Any, finished: Path, path: str) -> None:
    np.save("flat.npy", some_digits().reshape(5, 64))
    Path("out.csv").write_text("of yesterday")
    answer = cli("predict", finished, path, "--format=csv", "--output=out.csv")
    assert answer.code == 2
    assert Path("out.csv").read_text() == "of yesterday"
    np.save("some.npy", some_digits())
    assert cli("predict", finished, "some.npy", "--format=csv", "--output=out.csv").code == 0
    assert Path("out.csv").read_text() != "of yesterday"  # the control


# ------------------------------------------------------------ prompts


def test_a_prompt_is_continued_as_text(cli: Any, speaking: Path) -> None:
    answer = cli("predict", speaking, "the rain", "--tokens=30", "--temperature=0.8", "--top-k=5", "--seed=3")
    wanted = Generator(jt.load_model(speaking)).generate("the rain", 30, Sampling(0.8, 5, 1.0, 3))
    assert (answer.code, answer.err) == (0, "")
    assert answer.out == f"the rain{wanted}\n"
    other = cli("predict", speaking, "the rain", "--tokens=30", "--temperature=0.8", "--top-k=5", "--seed=4")
    assert other.out != answer.out  # the control
    assert len(cli("predict", speaking, "the rain", "--tokens=7").out) == len("the rain") + 7 + 1


def test_samples_are_seeds_in_a_row(cli: Any, speaking: Path) -> None:
    keys = ("--tokens=12", "--samples=3", "--seed=5", "--top-p=0.9")
    rows = lines_of(cli("predict", speaking, "the", "in ", *keys, "--format=jsonl").out)
    assert [(row["prompt"], row["seed"]) for row in rows] == [(p, s) for p in ("the", "in ") for s in (5, 6, 7)]
    generator = Generator(jt.load_model(speaking))
    for row in rows:
        assert row["continuation"] == generator.generate(row["prompt"], 12, Sampling(top_p=0.9, seed=row["seed"]))
    assert len({row["continuation"] for row in rows}) > 2
    header, *told = csv.reader(io.StringIO(cli("predict", speaking, "the", "in ", *keys, "--format=csv").out))
    assert header == ["prompt", "continuation", "seed"]
    assert told == [[row["prompt"], row["continuation"], str(row["seed"])] for row in rows]
    text = cli("predict", speaking, "the", "in ", *keys).out
    assert text == "\n\n".join(row["prompt"] + row["continuation"] for row in rows) + "\n"


PROMPTS = [
    (["zoo"], 1, "'o', 'z': the model has never seen these characters; it knows 14: "),
    (["the", "zoo"], 1, "'o', 'z': the model has never seen these characters"),
    (["the", "--top-p=0"], 2, "--top-p: 0.0 is not allowed; allowed: above 0, up to 1 (all)"),
    (["the", "--temperature=-1"], 2, "--temperature: -1.0 is not allowed; allowed: 0 (the likeliest) or more"),
    (["the", "--top-k=-1"], 2, "--top-k: -1 is not allowed; allowed: 0 (all) or more"),
    (["the", "--seed=-1"], 2, "--seed: -1 is not allowed; allowed: 0 to 4294967295"),
    (["the", "--samples=2", "--seed=4294967295"], 2, "--seed: 4294967296 is not allowed; allowed: 0 to 4294967295"),
    (["the", "--format=xml"], 2, "--format: 'xml' is not allowed; allowed: text, jsonl, csv"),
    (["the", "--tokens=0"], 2, "Invalid value for '--tokens': Input should be greater than or equal to 1"),
]


@pytest.mark.parametrize(("arguments", "code", "line"), PROMPTS, ids=[" ".join(arguments) for arguments, *_ in PROMPTS])
def test_a_prompt_that_cannot_be_said_is_one_line_and_leaves_nothing(
    cli: Any, speaking: Path, arguments: list[str], code: int, line: str
) -> None:
    answer = cli("predict", speaking, *arguments, "--output=out.txt")
    assert (answer.code, answer.out) == (code, "")
    assert one_line(answer.err).startswith(line)
    assert list(Path.cwd().iterdir()) == []
    assert cli("predict", speaking, "the", "--tokens=1", "--output=out.txt").code == 0  # the control
    assert Path("out.txt").read_text().startswith("the")
