"""Pictures of rows, and which wrong predictions are kept."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from report_helpers import dataset, evaluation, make_run

from jaxtrain.report import save_wrong_samples, training_samples

IMAGES = np.arange(20 * 8 * 8, dtype=np.float32).reshape(20, 8, 8, 1)


def test_training_samples_are_the_first_training_rows_scaled_by_their_range() -> None:
    samples = training_samples(dataset(IMAGES), count=4)
    assert samples is not None
    assert (samples.shape, samples.dtype) == ((4, 32, 32, 1), np.uint8)
    rows = IMAGES[[19, 18, 17, 16]]
    expected = np.rint((rows - rows.min()) / (rows.max() - rows.min()) * 255)
    np.testing.assert_array_equal(samples[:, ::4, ::4], expected)
    np.testing.assert_array_equal(samples[:, 3::4, 3::4], expected)  # nearest neighbour: a pixel became 4x4 equal ones


@pytest.mark.parametrize("shape", [(5, 7), (5, 8, 8), (5, 8, 8, 4), (5, 64, 1, 1)])
def test_rows_that_are_no_images_give_none(shape: tuple[int, ...]) -> None:
    assert training_samples(dataset(np.zeros(shape, np.float32))) is None


def test_constant_rows_fewer_rows_and_large_pictures_are_fine() -> None:
    constant = training_samples(dataset(np.full((2, 40, 50, 3), 7, np.uint8)))
    assert constant is not None
    assert constant.shape == (2, 40, 50, 3)
    assert not constant.any()
    large = training_samples(dataset(np.zeros((1, 1200, 1600, 3), np.uint8)))
    assert large is not None
    assert large.shape == (1, 300, 400, 3)


def test_the_most_confident_wrong_predictions_come_first(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    scores = [[0.6, 0.3, 0.1], [0.1, 0.8, 0.1], [0.9, 0.05, 0.05], [0.2, 0.3, 0.5], [0.0, 0.0, 1.0]]
    kept = evaluation(scores, [1, 0, 2, 2, 0], [11, 12, 13, 14, 15])
    wrong = save_wrong_samples(folder, dataset(IMAGES), kept, limit=3)
    assert [(w["id"], w["true"], w["predicted"]) for w in wrong] == [
        (15, "cat", "owl"),
        (13, "owl", "cat"),
        (12, "cat", "dog"),
    ]
    assert [w["probability"] for w in wrong] == [1.0, float(np.float32(0.9)), float(np.float32(0.8))]
    assert [w["image"] for w in wrong] == [f"samples/wrong_{n:02d}_id{i}.png" for n, i in enumerate((15, 13, 12))]
    with Image.open(folder.path / wrong[0]["image"]) as picture:
        assert picture.size == (32, 32)
        # Row 15 of the source, scaled by the range of the training rows (all 20 here).
        expected = np.rint(IMAGES[15, :, :, 0] / IMAGES.max() * 255)
        np.testing.assert_array_equal(np.asarray(picture)[::4, ::4], expected)


def test_pictures_of_an_earlier_evaluation_go_and_others_stay(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    folder.samples.mkdir()
    (folder.samples / "wrong_07_id3.png").write_bytes(b"old")
    (folder.samples / "mine.png").write_bytes(b"mine")
    assert save_wrong_samples(folder, dataset(IMAGES), evaluation([[0.9, 0.1, 0]], [0], [4]), limit=5) == []
    assert [p.name for p in folder.samples.iterdir()] == ["mine.png"]


def test_colour_pictures_and_rows_that_are_no_images(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    kept = evaluation([[0.9, 0.1, 0]], [1], [2])
    colour = np.random.default_rng(0).integers(0, 255, (4, 40, 40, 3), np.uint8)
    wrong = save_wrong_samples(folder, dataset(colour), kept, limit=5)
    with Image.open(folder.path / wrong[0]["image"]) as picture:
        assert picture.mode == "RGB"
    wrong = save_wrong_samples(folder, dataset(np.zeros((4, 6), np.float32), names=None), kept, limit=5)
    assert wrong == [{"id": 2, "true": "1", "predicted": "0", "probability": float(np.float32(0.9)), "image": None}]


def test_binary_predicts_by_half_and_is_sure_on_both_sides(tmp_path: Path) -> None:
    rows = dataset(np.zeros((9, 6), np.float32), task="binary", names=None)
    kept = evaluation([[0.75], [0.125], [0.5], [0.9]], [[False], [True], [True], [True]], [1, 2, 3, 4])
    wrong = save_wrong_samples(make_run(tmp_path), rows, kept, limit=9)
    assert [(w["id"], w["true"], w["predicted"], w["probability"]) for w in wrong] == [
        (2, "1", "0", 0.875),
        (1, "0", "1", 0.75),
        (3, "1", "0", 0.5),  # a logit of 0 is "no", as in the metrics
    ]


def test_tasks_without_a_single_class_give_nothing(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    vectors = np.zeros((9, 6), np.float32)
    several = evaluation([[0.9, 0.9], [0.1, 0.1]], [[0, 0], [1, 1]], [1, 2])
    assert save_wrong_samples(folder, dataset(vectors, task="binary", names=None), several, 5) == []
    assert save_wrong_samples(folder, dataset(vectors, task="regression"), evaluation([[1.0]], [[2.0]], [1]), 5) == []
    positions = evaluation([[0.9, 0.1, 0]] * 4, [1, 1, 1, 1], [1, 2])  # two rows of two tokens
    assert save_wrong_samples(folder, dataset(vectors), positions, 5) == []
    plain = evaluation([[0.9, 0.1, 0]], [1], [1])
    assert len(save_wrong_samples(folder, dataset(vectors), plain, 5)) == 1
    del plain.rows["scores"]
    assert save_wrong_samples(folder, dataset(vectors), plain, 5) == []


def test_scores_that_are_nan_have_no_confidence(tmp_path: Path) -> None:
    kept = evaluation([[np.nan] * 3, [0.9, 0.1, 0.0]], [1, 1], [1, 2])
    wrong = save_wrong_samples(make_run(tmp_path), dataset(IMAGES), kept, 5)
    assert [w["id"] for w in wrong] == [2]
