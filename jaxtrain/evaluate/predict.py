"""What a saved model says of new inputs: picture files and folders, .npz and .npy files.

Rows are made by the preprocessing that is stored with the model, in batches of one shape. A file that cannot be read is
told in its place and does not end the rest.
"""

from __future__ import annotations

import csv
import json
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from jaxtrain.config.errors import ConfigError, UserError
from jaxtrain.data.folders import is_hidden, is_picture_file
from jaxtrain.data.images import ImageForm, decode
from jaxtrain.evaluate.loaded import LoadedModel
from jaxtrain.hooks.folder import strict

ARRAYS = (".npz", ".npy")


@dataclass(frozen=True)
class Prediction:
    """input: path, with [row] for arrays. figures: class, probability, probabilities, values; or an error.

    outputs: what the model gives, in fp32: logits, or values.
    """

    input: str
    figures: dict[str, Any]
    outputs: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))

    @property
    def failed(self) -> bool:
        """Whether this input could not be read."""
        return "error" in self.figures


def predict(model: LoadedModel, inputs: Sequence[str | Path], batch: int = 64) -> Iterator[Prediction]:
    """A prediction for each picture below each path, and each row of each array file, in order.

    Raises ConfigError for a path that is not there, and for one that this model cannot read at all.
    """
    if model.schema.task == "tokens":
        raise ConfigError(
            "this run is a language model: it continues prompts (model.generate, or jaxtrain predict RUN TEXT)"
        )
    return _predictions(model, [_existing(path) for path in inputs], batch)


def _predictions(model: LoadedModel, paths: list[Path], batch: int) -> Iterator[Prediction]:
    rows = (row for path in paths for row in _rows(model, path))
    while chunk := list(islice(rows, batch)):
        arrays = [row for _, row in chunk if isinstance(row, np.ndarray)]
        outputs = iter(_outputs(model, arrays, batch))
        for name, row in chunk:
            if isinstance(row, np.ndarray):
                given = next(outputs)
                yield Prediction(name, figures_of(model, given), given)
            else:
                yield Prediction(name, {"error": row})


def figures_of(model: LoadedModel, outputs: np.ndarray) -> dict[str, Any]:
    """One row's outputs as what a person asks for."""
    task, names = model.schema.task, model.class_names
    if task == "classes" and names is not None:
        shares = _softmax(outputs.astype(np.float64))
        best = int(shares.argmax())
        probabilities = {name: float(p) for name, p in zip(names, shares, strict=True)}
        return {"class": names[best], "probability": float(shares[best]), "probabilities": probabilities}
    if task == "binary":
        shares = 1.0 / (1.0 + np.exp(-outputs.astype(np.float64).reshape(-1)))
        return {"values": (shares > 0.5).astype(int).tolist(), "probabilities": shares.tolist()}
    return {"values": outputs.reshape(-1).astype(float).tolist()}


def write(
    predictions: Iterable[Prediction], model: LoadedModel, out: TextIO, form: str, *, outputs: bool = False
) -> tuple[int, int]:
    """Write predictions as jsonl or csv; (how many, how many failed). outputs: the model's own numbers too."""
    blank = np.zeros(model.schema.outputs, np.float32)
    columns = [*_flat(_row(Prediction("", figures_of(model, blank), blank), outputs))]
    line, count, failed = FORMS[form](out, columns), 0, 0
    for prediction in predictions:
        line(_row(prediction, outputs))
        count, failed = count + 1, failed + prediction.failed
    return count, failed


def _row(prediction: Prediction, outputs: bool) -> dict[str, Any]:
    row = {"input": prediction.input, **prediction.figures}
    if outputs and not prediction.failed:
        row["outputs"] = prediction.outputs.reshape(-1).astype(float).tolist()
    return row


def _jsonl(out: TextIO, columns: list[str]) -> Callable[[dict[str, Any]], Any]:
    return lambda row: out.write(json.dumps(strict(row), ensure_ascii=False) + "\n")


def _csv(out: TextIO, columns: list[str]) -> Callable[[dict[str, Any]], Any]:
    """A column a value, `p_NAME` for probabilities, and one for why a row could not be read."""
    writer = csv.DictWriter(out, [*columns, "error"], restval="")
    writer.writeheader()
    return lambda row: writer.writerow(_flat(row))


FORMS: dict[str, Callable[[TextIO, list[str]], Callable[[dict[str, Any]], Any]]] = {"jsonl": _jsonl, "csv": _csv}


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in row.items():
        name = "p" if key == "probabilities" else key
        inner = value if isinstance(value, dict) else dict(enumerate(value)) if isinstance(value, list) else None
        flat |= {key: value} if inner is None else {f"{name}_{part}": item for part, item in inner.items()}
    return flat


def _existing(path: str | Path) -> Path:
    if not Path(path).exists():
        raise ConfigError(f"{str(path)!r}: no such file or folder (looked in {Path(path).absolute().parent})")
    return Path(path)


def _rows(model: LoadedModel, path: Path) -> Iterator[tuple[str, np.ndarray | str]]:
    """(name, row) or (name, why there is none)."""
    if path.suffix in ARRAYS:
        yield from _array_rows(model, path)
        return
    if model.schema.image is None:
        raise ConfigError(
            f"{str(path)!r}: this model was trained on rows of shape {list(model.schema.input_shape)}, "
            "not on pictures; give it an .npz with `inputs`, or an .npy"
        )
    form = ImageForm.from_json(model.schema.image)
    if path.is_dir():
        below = sorted(p for p in path.rglob("*") if p.is_file() and not is_hidden(p.relative_to(path)))
        pictures = [p for p in below if is_picture_file(p)]
        if not pictures:
            raise ConfigError(f"{str(path)!r}: no picture in this folder ({len(below)} other files)")
    else:
        pictures = [path]
    for picture in pictures:
        try:
            yield str(picture), decode(picture, form)
        except UserError as error:
            yield str(picture), str(error)


def _array_rows(model: LoadedModel, path: Path) -> Iterator[tuple[str, np.ndarray | str]]:
    try:
        with path.open("rb") as opened:
            stored = np.load(opened, allow_pickle=False)
            inputs = stored if isinstance(stored, np.ndarray) else stored["inputs"]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise ConfigError(f"{str(path)!r} cannot be read as arrays: {' '.join(str(error).split())}") from None
    if inputs.shape[1:] != model.schema.input_shape:
        raise ConfigError(
            f"{str(path)!r}: inputs have shape {list(inputs.shape)}; "
            f"allowed: [B, {', '.join(map(str, model.schema.input_shape))}]"
        )
    if inputs.dtype.kind not in "fiub":
        raise ConfigError(f"{str(path)!r}: inputs are of type {inputs.dtype}; numbers are needed")
    for number, row in enumerate(inputs):
        finite = inputs.dtype.kind != "f" or np.isfinite(row).all()
        yield f"{path}[{number}]", row if finite else "the row has NaN or infinite inputs"


def _outputs(model: LoadedModel, arrays: list[np.ndarray], batch: int) -> np.ndarray:
    """[n, ...] of the model, which always sees `batch` rows: one program is compiled."""
    if not arrays:
        return np.zeros((0, 1), np.float32)
    rows = np.stack(arrays + arrays[:1] * (batch - len(arrays)))
    return model(rows)[: len(arrays)]


def _softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - logits.max())
    return powers / powers.sum()
