"""A dataset of rows: a source, its three splits, and the schema that is learnt from the training rows alone.

What every dataset gives (this one, and `text.TextDataset`): `rows(split)` and `read(split, rows, epoch)`, the training
batches; `eval_rows` and `evaluation`, each row once, for figures; `resident_shapes`, `resident` and `take`, the same
batches from arrays that live on the device; `fingerprint`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.config import RunConfig, schema
from jaxtrain.config.errors import ConfigError
from jaxtrain.data.schema import Schema
from jaxtrain.data.sources import ArraySource, Source
from jaxtrain.data.split import Splits, given, stratified

TASKS = {
    "cross_entropy": "classes",
    "binary": "binary",
    "mse": "regression",
    "mae": "regression",
    "huber": "regression",
}
MAX_CLASSES = 100_000
STATISTICS_ROWS = 20_000
"""Rows from which mean and sd are taken where rows must be decoded from files; all, where they are in memory."""


@dataclass(frozen=True)
class Dataset:
    """Rows ready to be batched: inputs as stored, targets encoded (int32 classes or float32 values)."""

    source: Source
    splits: Splits
    schema: Schema
    targets: np.ndarray
    notes: tuple[str, ...] = ()
    _fingerprint: dict[str, str] = field(default_factory=dict, repr=False)

    @property
    def name(self) -> str:
        """What the rows are called."""
        return self.source.name

    @property
    def unit(self) -> str:
        """What is counted."""
        return "rows"

    @property
    def in_memory(self) -> bool:
        """Whether a row is there without decoding a file again and again."""
        return self.source.in_memory

    def rows(self, split: str) -> int:
        """How many rows a split has."""
        return len(self.splits[split])

    eval_rows = rows

    def read(self, split: str, rows: np.ndarray, epoch: int = 0) -> dict[str, np.ndarray]:
        """A batch: `rows` number the rows of the split. `ids` are row numbers of the source."""
        ids = self.splits[split][rows]
        batch = {
            "inputs": narrow(self.source.read(ids)),
            "targets": self.targets[ids],
            "ids": ids.astype(np.int32),
        }
        if self.source.weights is not None:
            batch["weights"] = self.source.weights[ids].astype(np.float32)
        return batch

    def evaluation(self, split: str, rows: np.ndarray, mask: np.ndarray) -> dict[str, Any]:
        """A batch for figures; mask [B]: which of them count."""
        return {**self.read(split, rows), "mask": mask, "epoch": np.int32(0)}

    def shapes(self, n: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes and types of what `read` gives for n rows; nothing is read."""
        shapes = {
            "inputs": jax.ShapeDtypeStruct((n, *self.schema.input_shape), np.dtype(self.schema.input_dtype)),
            "targets": jax.ShapeDtypeStruct((n, *self.targets.shape[1:]), self.targets.dtype),
            "ids": jax.ShapeDtypeStruct((n,), np.int32),
        }
        if self.source.weights is not None:
            shapes["weights"] = jax.ShapeDtypeStruct((n, *self.source.weights.shape[1:]), np.float32)
        return shapes

    def resident_shapes(self, split: str) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes and types of `resident`."""
        return self.shapes(self.rows(split))

    def resident(self, split: str) -> dict[str, np.ndarray]:
        """All rows of a split, in the split's order."""
        return self.read(split, np.arange(self.rows(split)))

    def take(self, resident: dict[str, Any], rows: Any, epoch: Any) -> dict[str, Any]:
        """Inside jit: `read` from resident arrays."""
        return {name: jnp.take(x, rows, axis=0) for name, x in resident.items()}

    def class_counts(self) -> np.ndarray:
        """How many training rows each class has, [C]."""
        return np.bincount(self.targets[self.splits.train].reshape(-1), minlength=self.schema.outputs)

    def fingerprint(self) -> dict[str, str]:
        """{part: what tells it from another}: a resume with other data is refused by it.

        rows: of the source, how many. content: digest of them. split: of which rows each split has. encoding: of
        types, classes and normalisation.
        """
        if not self._fingerprint:
            split = hashlib.sha256()
            for name in ("train", "validation", "test"):
                split.update(np.ascontiguousarray(self.splits[name].astype(np.int64)).data)
                split.update(name.encode())
            self._fingerprint.update(
                rows=f"{len(self.targets):,}",
                content=self.source.fingerprint(),
                split=split.hexdigest(),
                encoding=self.schema.digest(),
            )
        return dict(self._fingerprint)


def other_parts(saved: Mapping[str, str], now: Mapping[str, str]) -> str:
    """What differs between two fingerprints, in words; "" when they are equal."""
    differing = [part for part in dict.fromkeys([*saved, *now]) if saved.get(part) != now.get(part)]
    return ", ".join(f"{p} {saved.get(p, 'unknown')[:12]} is now {now.get(p, 'unknown')[:12]}" for p in differing)


def make_rows(config: RunConfig, source: Source) -> Dataset:
    """Encode, split, normalise the rows of a source."""
    task = TASKS.get(config.objective.kind) or _task_of(source.targets)
    labels = source.targets if task == "classes" and source.targets.ndim == 1 else None
    if task == "classes":
        _check_classes(config, source)
    data: Any = config.data
    fractions = (data.validation_fraction, getattr(data, "test_fraction", 0.0))
    splits = (
        given(source.split, labels, fractions[0], data.split_seed)
        if source.split is not None
        else stratified(labels, len(source), fractions, data.split_seed)
    )
    if not len(splits.train):
        raise ConfigError(f"{source.name}: no row is left to train on of {len(source)}")
    notes = list(source.notes)
    if config.train.overfit_batches:
        rows = splits.train[: config.train.overfit_batches * config.train.global_batch_size]
        splits = Splits(rows, rows, rows[:0])
        notes.append(f"overfitting {len(rows)} rows: they are trained on and evaluated")
    used = np.concatenate([splits.train, splits.validation, splits.test])
    names = _class_names(source, splits) if task == "classes" else None
    targets = encode(task, names, source, used)
    mean, sd = _statistics(source, splits.train, data.normalize)
    schema_ = Schema(
        task=task,
        input_shape=tuple(source.shape),
        input_dtype=str(narrow(np.zeros(0, source.dtype)).dtype),
        outputs=len(names) if names else int(np.prod(targets.shape[1:])),
        target_shape=tuple(targets.shape[1:]),
        class_names=names,
        mean=mean,
        sd=sd,
        image=source.form.to_json() if source.form else None,
    )
    batch = config.train.global_batch_size
    if len(splits.train) < batch:
        notes.append(
            f"{len(splits.train)} training rows are fewer than train.global_batch_size {batch}: "
            f"each epoch is one step on {len(splits.train)} rows"
        )
    return Dataset(source, splits, schema_, targets, tuple(notes))


def rows_of_schema(source: Source, schema_: Schema) -> Dataset:
    """Another source as the test split of a trained model, whose class names and normalisation hold.

    All its rows; of a source that carries a test split, that.
    """
    if tuple(source.shape) != schema_.input_shape:
        raise ConfigError(
            f"{source.name} has rows of shape {list(source.shape)}; "
            f"the model was trained on {list(schema_.input_shape)}"
        )
    rows = np.arange(len(source))
    if source.split is not None and (source.split == 2).any():
        rows = rows[source.split == 2]
    targets = encode(schema_.task, schema_.class_names, source, rows)
    if targets.shape[1:] != schema_.target_shape:
        raise ConfigError(
            f"{source.name} has targets of shape {list(targets.shape[1:])} a row; the model was trained on "
            f"{list(schema_.target_shape)}"
        )
    return Dataset(source, Splits(rows[:0], rows[:0], rows), schema_, targets, source.notes)


def encode(task: str, names: tuple[str, ...] | None, source: Source, used: np.ndarray) -> np.ndarray:
    """The targets as numbers: int32 places in `names`, or float32. `used`: the rows that must be right."""
    return _ENCODERS[task](source, names, used)


def class_weights(config: schema.Objective, dataset: Any) -> tuple[float, ...] | None:
    """The weights of an objective with `class_weights`, resolved on the training rows; None for all equal."""
    wanted = getattr(config, "class_weights", "none")
    classes = dataset.schema.outputs
    if wanted == "none":
        return None
    if wanted == "balanced":
        counts = dataset.class_counts()
        return tuple(float(w) for w in counts.sum() / (classes * np.maximum(counts, 1)))
    if len(wanted) != classes:
        raise ConfigError(f"objective.class_weights: {len(wanted)} weights for {classes} classes; one each is needed")
    return tuple(wanted)


def narrow(inputs: np.ndarray) -> np.ndarray:
    """float64 -> float32 and int64 -> int32, as jax would; images of bytes stay bytes."""
    if inputs.dtype.kind == "f":
        return inputs.astype(np.float32, copy=False)
    return inputs.astype(np.int32, copy=False) if inputs.dtype.itemsize > 4 else inputs


def _task_of(targets: np.ndarray) -> str:
    return "classes" if targets.dtype.kind in "iubUSO" and targets.ndim == 1 else "regression"


def _check_classes(config: RunConfig, source: Source) -> None:
    targets = source.targets
    if targets.dtype.kind == "f":
        bad = np.flatnonzero(~np.isfinite(targets.reshape(len(targets), -1)).all(1))
        if len(bad):
            raise ConfigError(f"{source.name}: the target of row {bad[0]} is not finite")
        broken = targets[targets != np.round(targets)]
        if broken.size:
            raise ConfigError(
                f"objective.kind={config.objective.kind}: the targets of {source.name} are numbers with fractions "
                f"(first: {broken[0]:g}), not classes; allowed for them: mse, mae, huber"
            )
    if targets.ndim != 1:
        raise ConfigError(
            f"objective.kind={config.objective.kind}: the targets of {source.name} have shape {targets.shape}; "
            "one class for each row is needed (binary takes [n, K] of 0 and 1)"
        )
    if len(np.unique(targets)) > MAX_CLASSES:
        raise ConfigError(f"{source.name}: {len(np.unique(targets))} different targets; are these classes?")


def _class_names(source: Source, splits: Splits) -> tuple[str, ...]:
    """The class map comes from the training rows, in the order of the stored values."""
    return tuple(_words(source, np.unique(source.targets[splits.train])))


def _words(source: Source, values: np.ndarray) -> list[str]:
    """The names of some target values: the source's own, or the values themselves as words."""
    named = source.names is not None and values.dtype.kind in "iub" and len(values)
    if named and source.names and values.min() >= 0 and values.max() < len(source.names):
        return [source.names[int(k)] for k in values]
    return [str(int(k)) if isinstance(k, np.floating) else str(k) for k in values]


def _encode_classes(source: Source, names: tuple[str, ...] | None, used: np.ndarray) -> np.ndarray:
    """A class that the training rows lack cannot have been learnt, so it is an error."""
    values, place = np.unique(source.targets, return_inverse=True)
    index = {name: i for i, name in enumerate(names or ())}
    codes = np.array([index.get(word, -1) for word in _words(source, values)], np.int32)[place.reshape(-1)]
    unknown = used[codes[used] < 0]
    if len(unknown):
        row = int(unknown[0])
        word = _words(source, source.targets[row : row + 1])[0]
        raise ConfigError(f"{source.name}: class {word!r} (row {row}) has no training row")
    return np.maximum(codes, 0)


def _encode_binary(source: Source, names: tuple[str, ...] | None, used: np.ndarray) -> np.ndarray:
    if source.targets.dtype.kind not in "fiub" or not np.isin(source.targets, (0, 1)).all():
        wrong = [v for v in np.unique(source.targets).tolist() if v not in (0, 1)]
        raise ConfigError(f"objective.kind=binary: a target of {source.name} is {wrong[0]!r}; allowed: 0 and 1")
    return source.targets.astype(np.float32)


def _encode_values(source: Source, names: tuple[str, ...] | None, used: np.ndarray) -> np.ndarray:
    if source.targets.dtype.kind not in "fiub":
        first = source.targets.reshape(-1)[0]
        raise ConfigError(f"{source.name}: a target is {first!r}; numbers are needed (cross_entropy takes words)")
    targets = source.targets.astype(np.float32)
    if not np.isfinite(targets).all():
        row = int(np.flatnonzero(~np.isfinite(targets.reshape(len(targets), -1)).all(1))[0])
        raise ConfigError(f"{source.name}: the target of row {row} is not finite")
    return targets


_ENCODERS: dict[str, Callable[[Source, tuple[str, ...] | None, np.ndarray], np.ndarray]] = {
    "classes": _encode_classes,
    "binary": _encode_binary,
    "regression": _encode_values,
}


def _statistics(source: Source, train: np.ndarray, how: str) -> tuple[Any, Any]:
    """(mean, sd) of the training rows, as lists; (None, None) for none."""
    if how == "none":
        return None, None
    axes = tuple(range(len(source.shape))) if how == "channel" and len(source.shape) > 0 else (0,)
    if source.dtype == np.uint8:
        mean, sd = _moments_of_bytes(source, train, axes)
    else:
        wide = narrow(source.read(train)).astype(np.float64)
        mean, sd = wide.mean(axes), wide.std(axes)
    # A constant feature has nothing to divide by.
    return mean.tolist(), np.where(sd > 1e-12, sd, 1.0).tolist()


def _moments_of_bytes(source: Source, train: np.ndarray, axes: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Mean and sd by sums of integers, which are exact; of files at most STATISTICS_ROWS, evenly taken."""
    rows = train if isinstance(source, ArraySource) else train[:: -(-len(train) // STATISTICS_ROWS)]
    total, squares, count = 0, 0, 0
    for start in range(0, len(rows), 256):
        values = source.read(rows[start : start + 256]).astype(np.int64)
        total, squares = total + values.sum(axes), squares + (values * values).sum(axes)
        count += int(np.prod([values.shape[a] for a in axes]))
    mean = np.asarray(total) / count
    return mean, np.sqrt(np.maximum(np.asarray(squares) / count - mean**2, 0.0))
