"""A small one of each kind learns digits through build and the loop; kinds for images say so."""

from __future__ import annotations

import numpy as np
import pytest
from models_helpers import formula, job_of, losses_of

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
