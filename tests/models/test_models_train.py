"""A small one of each kind learns through build and the loop; kinds that want other data say so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models_helpers import formula, job_of, losses_of
from sklearn.datasets import load_digits

from jaxtrain.build import build
from jaxtrain.config import ConfigError, load
from jaxtrain.data.sources import ArraySource

SMALL = {
    "mlp": {"model__hidden": [32], "optimizer__peak_lr": 1e-2},
    "cnn": {"model__channels": [8, 8], "model__dense": [16], "optimizer__peak_lr": 1e-2},
    "resnet": {"model__depth": 8, "model__width": 4, "optimizer__kind": "momentum", "optimizer__peak_lr": 0.1},
}
BELOW = {"mlp": 0.6, "cnn": 0.8, "resnet": 1.0}  # ln 10 = 2.30 is the loss of knowing nothing
STEPS = 60


@pytest.mark.parametrize("kind", SMALL)
def test_a_small_one_learns_digits(kind: str) -> None:
    job = job_of(
        model__kind=kind,
        **SMALL[kind],
        train__duration=STEPS,
        train__global_batch_size=32,
        schedule__kind="constant",
        data__feed="direct",
    )
    losses, state = losses_of(job, STEPS)
    assert len(losses) == STEPS
    assert int(state["updates"]) == STEPS
    assert np.mean(losses[-8:]) < BELOW[kind]
    assert np.mean(losses[:3]) > 1.9  # the control: it was not low from the start


def digits_as_sequences() -> ArraySource:
    """8 steps of 8 channels: an image, row by row from the top."""
    inputs, targets = load_digits(return_X_y=True)
    return ArraySource("digits", inputs.reshape(-1, 8, 8).astype(np.float32), targets)


def test_a_small_tcn_learns_digits_row_by_row() -> None:
    job = job_of(
        digits_as_sequences(),
        model={"kind": "tcn", "channels": [32, 32]},
        optimizer__peak_lr=1e-2,
        train__duration=STEPS,
        train__global_batch_size=32,
        schedule__kind="constant",
        data__feed="direct",
    )
    assert job.spec.unroll is True  # it convolves, and this is a CPU
    losses, state = losses_of(job, STEPS)
    assert int(state["updates"]) == STEPS
    assert np.mean(losses[-8:]) < 0.8
    assert np.mean(losses[:3]) > 1.9  # the control


def a_text(folder: Path) -> str:
    """Each pair of 3 letters stands in it once a round: two letters tell the next one, one letter tells nothing."""
    path = folder / "text.txt"
    path.write_text("aabacbbcc" * 200)
    return str(path)


def test_a_small_gpt_learns_a_text(tmp_path: Path) -> None:
    job = job_of(
        model={"kind": "gpt", "layers": 2, "heads": 2, "width": 32, "init_sd": 0.05},
        data={"kind": "text", "path": a_text(tmp_path), "block_size": 16, "tokenizer": "char"},
        optimizer__peak_lr=1e-2,
        train__duration=STEPS,
        train__global_batch_size=16,
        schedule__kind="constant",
    )
    assert job.spec.unroll is False
    losses, state = losses_of(job, STEPS)
    assert int(state["updates"]) == STEPS
    # ln 3 = 1.10 is the loss of knowing nothing, or the last letter alone; only the first of 16 has to be guessed.
    assert np.mean(losses[-8:]) < 0.25
    assert np.mean(losses[:2]) > 1.05  # the control


@pytest.mark.parametrize("kind", ["cnn", "resnet"])
@pytest.mark.parametrize(("shape", "hint"), [((5,), ""), ((8, 8), "; add a channel axis: inputs[..., None]")])
def test_kinds_for_images_refuse_other_rows_in_one_line(kind: str, shape: tuple[int, ...], hint: str) -> None:
    source = ArraySource("made", formula((30, *shape), 0.1, 1.0), np.arange(30) % 3)
    with pytest.raises(ConfigError) as caught:
        build(load({"model": {"kind": kind}}), source=source)
    assert str(caught.value) == (
        f"model.kind={kind} needs images [H, W, C]; the data has rows of shape {list(shape)}{hint}"
    )
    build(load({"model": {"kind": "mlp"}}), source=source)  # the control: an mlp takes both


def test_augmentation_of_vectors_is_refused_in_one_line() -> None:
    source = ArraySource("made", formula((30, 5), 0.1, 1.0), np.arange(30) % 3)
    with pytest.raises(ConfigError) as caught:
        build(load({"model": {"kind": "mlp"}, "augment": {"flip": True}}), source=source)
    assert str(caught.value) == "augment needs images [H, W, C]; the data has rows of shape [5]"


@pytest.mark.parametrize("shape", [(8, 8, 1), (4, 4, 4, 1)])
def test_a_tcn_refuses_what_is_no_sequence_in_one_line(shape: tuple[int, ...]) -> None:
    def source(shape: tuple[int, ...]) -> ArraySource:
        return ArraySource("made", formula((30, *shape), 0.1, 1.0), np.arange(30) % 3)

    config = load({"model": {"kind": "tcn"}})
    with pytest.raises(ConfigError) as caught:
        build(config, source=source(shape))
    assert str(caught.value) == (
        f"model.kind=tcn needs sequences [T] or [T, C]; the data has rows of shape {list(shape)}"
    )
    for fitting in ((8,), (8, 2)):  # the control
        build(config, source=source(fitting))


def test_a_gpt_refuses_numbers_in_one_line() -> None:
    source = ArraySource("made", formula((30, 8), 0.1, 1.0), np.arange(30) % 3)
    with pytest.raises(ConfigError) as caught:
        build(load({"model": {"kind": "gpt"}}), source=source)
    assert (
        str(caught.value)
        == "model.kind=gpt needs tokens; data.kind=digits gives numbers; allowed: mlp, cnn, resnet, tcn"
    )


@pytest.mark.parametrize(("kind", "takes"), [("mlp", "rows"), ("cnn", "images"), ("tcn", "sequences")])
def test_kinds_for_numbers_refuse_text_in_one_line(kind: str, takes: str, tmp_path: Path) -> None:
    text: dict[str, Any] = {"kind": "text", "path": a_text(tmp_path), "block_size": 16}
    with pytest.raises(ConfigError) as caught:
        build(load({"model": {"kind": kind}, "data": text}))
    assert str(caught.value) == f"model.kind={kind} needs {takes}; data.kind=text gives tokens; allowed: gpt"
    build(load({"model": {"kind": "gpt"}, "data": text}))  # the control


@pytest.mark.parametrize("output", ["row", "step"])
def test_a_tcn_gives_each_step_its_target_where_the_config_says_so(output: str) -> None:
    """8 targets of a row: from its last step, or each from its own."""
    source = ArraySource("made", formula((30, 8, 2), 0.1, 1.0), formula((30, 8), 0.3, 1.0))
    config = load({"model": {"kind": "tcn", "channels": [4], "output": output}, "objective": {"kind": "mse"}})
    shape = build(config, source=source).module.params["head.kernel"].shape
    assert tuple(shape) == ((4, 8) if output == "row" else (4, 1))


def test_a_tcn_that_cannot_share_out_its_targets_says_so_in_one_line() -> None:
    """3 classes of a row are none for each of 8 steps; 13 values neither."""
    inputs = formula((39, 8, 2), 0.1, 1.0)
    classes = ArraySource("made", inputs, np.arange(39) % 3)
    values = ArraySource("made", inputs, formula((39, 13), 0.3, 1.0))
    for source, objective, number in ((classes, "cross_entropy", 3), (values, "mse", 13)):
        tree = {"model": {"kind": "tcn", "output": "step"}, "objective": {"kind": objective}}
        with pytest.raises(ConfigError) as caught:
            build(load(tree), source=source)
        assert str(caught.value).startswith(f"model.output=step: rows have 8 steps and {number} target values")
        assert "\n" not in str(caught.value)
        build(load(tree, [("model.output", "row")]), source=source)  # the control


# ---------------------------------------------------------------- lanes


def test_the_kind_says_how_many_lanes_a_cpu_takes_where_nothing_is_asked(tmp_path: Path) -> None:
    words = tmp_path / "words.txt"
    words.write_text("to be or not to be " * 40)
    text = {"kind": "text", "path": str(words), "block_size": 8}
    small = {"kind": "gpt", "layers": 1, "heads": 1, "width": 8}

    def lanes(**train: Any) -> int:
        tree = {"name": "t", "data": text, "model": small, "train": {"global_batch_size": 6, "duration": 4} | train}
        return build(load(tree)).spec.lanes

    assert lanes() == 2
    assert lanes(lanes=1) == 1
    assert lanes(lanes=3) == 3
    assert lanes(global_batch_size=5) == 1  # an odd batch has no halves
    assert lanes(micro_batch_size=3) == 1
    assert job_of(model__kind="mlp").spec.lanes == 1
    assert job_of(model__kind="mlp", train__lanes=2, train__global_batch_size=32).spec.lanes == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"train__lanes": 3, "train__global_batch_size": 32},
            "train.lanes: 32 rows on 1 device cannot be split into 3; allowed: 1, 2, 4, 8, 16, 32",
        ),
        (
            {"train__lanes": 2, "train__global_batch_size": 32, "model__norm": "batch"},
            "train.lanes: 2 for a model with state of its own (norms.0.mean), which each lane would change; "
            "allowed: 1, or a model without it (such as model.norm=layer)",
        ),
    ],
)
def test_lanes_that_cannot_be_are_one_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        job_of(model__kind="mlp", **changes)
    assert str(caught.value) == message
