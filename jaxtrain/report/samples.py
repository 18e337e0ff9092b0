"""Rows as pictures: the first training rows, and the test rows that the model gets wrong with most confidence.

In: a Dataset and an Evaluation that kept its rows. Out: pixels, and PNG files below `samples/` of the run folder.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from jaxtrain.data.dataset import Dataset
from jaxtrain.data.make import Data
from jaxtrain.hooks.folder import RunFolder
from jaxtrain.loop import Evaluation

SMALLEST, LARGEST = 32, 512
"""Pixels of the shorter and the longer side of a picture: small ones are enlarged, large ones thinned out."""


def training_samples(dataset: Data, count: int = 16) -> np.ndarray | None:
    """Pictures [N, H, W, C] (bytes) of the first training rows, or None when rows are no images [H, W, 1|3]."""
    if not is_image(dataset.schema.input_shape):
        return None
    rows = _first_rows(dataset, count)
    return pictures(rows, _range(rows))


def save_wrong_samples(folder: RunFolder, dataset: Data, evaluation: Evaluation, limit: int) -> list[dict[str, Any]]:
    """The wrong predictions of a classification, the most confident ones first, at most `limit`.

    Each is {"id", "true", "predicted", "probability", "image"}; image is the path of a PNG in the run folder, or None
    when rows are no images. Pictures of an earlier evaluation are removed. Rows whose scores are NaN have no
    confidence and are left out. Several labels a row, targets for each position of a row, and regression give [].
    """
    for old in folder.samples.glob("wrong_*.png"):
        old.unlink()
    true, predicted, probability = _decisions(dataset, evaluation)
    wrong = np.flatnonzero((true != predicted) & ~np.isnan(probability))
    # A stable order: equal confidence by place in the split.
    wrong = wrong[np.argsort(-probability[wrong], kind="stable")][: max(limit, 0)]
    if not len(wrong):
        return []
    ids = evaluation.rows["ids"][wrong]
    drawn = is_image(dataset.schema.input_shape)
    files: list[Any] = _save(folder, cast(Dataset, dataset), ids) if drawn else [None] * len(wrong)
    names = dataset.schema.class_names
    return [
        {
            "id": int(number),
            "true": names[true[row]] if names else str(true[row]),
            "predicted": names[predicted[row]] if names else str(predicted[row]),
            "probability": float(probability[row]),
            "image": file,
        }
        for row, number, file in zip(wrong, ids, files, strict=True)
    ]


def is_image(shape: tuple[int, ...]) -> bool:
    """Whether rows of this shape are pictures: [H, W, 1] or [H, W, 3]."""
    return len(shape) == 3 and shape[2] in (1, 3) and min(shape[:2]) > 1


def pictures(rows: np.ndarray, limits: tuple[float, float]) -> np.ndarray:
    """Rows [N, H, W, C] of any numbers as bytes; `limits` become 0 and 255. Whole factors, so pixels stay square."""
    low, high = limits
    wide = (rows.astype(np.float64) - low) * (255.0 / (high - low) if high > low else 0.0)
    pixels = np.clip(np.rint(wide), 0, 255).astype(np.uint8)
    larger = -(-SMALLEST // min(pixels.shape[1:3]))
    smaller = -(-max(pixels.shape[1:3]) // LARGEST)
    if larger > 1:
        return pixels.repeat(larger, 1).repeat(larger, 2)
    return pixels[:, ::smaller, ::smaller]


def _decisions(dataset: Data, evaluation: Evaluation) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(true class, predicted class, its probability), [n] each; empty where a row has no single class."""
    nothing = np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0)
    rows = evaluation.rows
    if dataset.schema.task not in ("classes", "binary") or "scores" not in rows:
        return nothing
    scores, targets = np.asarray(rows["scores"], np.float64), np.asarray(rows["targets"])
    if scores.ndim != 2 or len(scores) != len(rows["ids"]) or targets.size != len(scores):
        return nothing
    if scores.shape[1] == 1 and dataset.schema.task == "binary":
        scores = np.concatenate([1.0 - scores, scores], 1)
    predicted = scores.argmax(1)
    return targets.reshape(-1).astype(np.int64), predicted, scores[np.arange(len(scores)), predicted]


def _save(folder: RunFolder, dataset: Dataset, ids: np.ndarray) -> list[str]:
    from PIL import Image

    folder.samples.mkdir(exist_ok=True)
    pixels = pictures(dataset.source.read(ids), _range(_first_rows(dataset, 64)))
    names = []
    for place, (number, picture) in enumerate(zip(ids, pixels, strict=True)):
        path = folder.samples / f"wrong_{place:02d}_id{int(number)}.png"
        Image.fromarray(picture[..., 0] if picture.shape[-1] == 1 else picture).save(path, optimize=True)
        names.append(f"{folder.samples.name}/{path.name}")
    return names


def _first_rows(dataset: Data, count: int) -> np.ndarray:
    return dataset.read("train", np.arange(min(count, dataset.rows("train"))))["inputs"]


def _range(rows: np.ndarray) -> tuple[float, float]:
    return (float(rows.min()), float(rows.max())) if rows.size else (0.0, 1.0)
