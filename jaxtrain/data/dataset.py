"""A dataset: a source, its three splits, and the schema that is learnt from the training rows alone.

The schema (class names, normalisation, shapes) is stored with the model: prediction and export reuse it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.config import RunConfig, schema
from jaxtrain.config.errors import ConfigError
from jaxtrain.data.sources import ArraySource, open_source
from jaxtrain.data.split import Splits, given, stratified

TASKS = {
    "cross_entropy": "classes",
    "binary": "binary",
    "mse": "regression",
    "mae": "regression",
    "huber": "regression",
}
MAX_CLASSES = 100_000


@dataclass(frozen=True)
class Schema:
    """What a model needs to know of its data.

    task: classes | binary | regression. outputs: numbers the model gives for a row (classes, labels or values).
    mean, sd: normalisation of inputs, lists that broadcast against a row, or None.
    """

    task: str
    input_shape: tuple[int, ...]
    input_dtype: str
    outputs: int
    target_shape: tuple[int, ...]
    class_names: tuple[str, ...] | None = None
    mean: Any = None
    sd: Any = None

    def to_json(self) -> dict[str, Any]:
        """Plain values; `Schema.from_json` gives an equal schema."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Schema:
        """The schema that `to_json` wrote."""
        lists = ("input_shape", "target_shape", "class_names")
        plain: dict[str, Any] = {k: tuple(v) if k in lists and v is not None else v for k, v in values.items()}
        return cls(**plain)

    def preprocess(self) -> Callable[[jax.Array], jax.Array]:
        """Raw inputs [B, ...] -> float32, normalised; for use inside jit, in training, evaluation and prediction."""
        if self.mean is None:
            return lambda x: x.astype(jnp.float32)
        mean, factor = np.float32(self.mean), np.float32(1.0 / np.asarray(self.sd))
        return lambda x: (x.astype(jnp.float32) - mean) * factor


@dataclass(frozen=True)
class Dataset:
    """Rows ready to be batched: inputs as stored, targets encoded (int32 classes or float32 values)."""

    source: ArraySource
    splits: Splits
    schema: Schema
    targets: np.ndarray
    notes: tuple[str, ...] = ()
    _fingerprint: list[str] = field(default_factory=list, repr=False)

    def rows(self, split: str) -> int:
        """How many rows a split has."""
        return len(self.splits[split])

    def read(self, split: str, rows: np.ndarray) -> dict[str, np.ndarray]:
        """A batch: `rows` number the rows of the split. `ids` are row numbers of the source."""
        ids = self.splits[split][rows]
        batch = {
            "inputs": _narrow(self.source.inputs[ids]),
            "targets": self.targets[ids],
            "ids": ids.astype(np.int32),
        }
        if self.source.weights is not None:
            batch["weights"] = self.source.weights[ids].astype(np.float32)
        return batch

    def fingerprint(self) -> str:
        """Digest of rows, encoding, splits and normalisation: a resume with other data is refused by it."""
        if not self._fingerprint:
            digest = hashlib.sha256(self.source.fingerprint().encode())
            for rows in (self.splits.train, self.splits.validation, self.splits.test):
                digest.update(np.ascontiguousarray(rows.astype(np.int64)).data)
            digest.update(repr(sorted(self.schema.to_json().items())).encode())
            self._fingerprint.append(digest.hexdigest())
        return self._fingerprint[0]

    def nbytes(self, split: str) -> int:
        """Bytes of a split when it lives on a device."""
        per_row = sum(x[:1].nbytes for x in self.read(split, np.zeros(1, np.int64)).values())
        return per_row * self.rows(split)


def make_dataset(config: RunConfig, source: ArraySource | None = None) -> Dataset:
    """Load, encode, split, normalise. `source` replaces the one that the config names (a user's own arrays)."""
    source = source or open_source(config.data)
    task = TASKS.get(config.objective.kind) or _task_of(source.targets)
    labels = source.targets if task == "classes" and source.targets.ndim == 1 else None
    if task == "classes":
        _check_classes(config, source)
    fractions = (config.data.validation_fraction, config.data.test_fraction)
    splits = (
        given(source.split)
        if source.split is not None
        else stratified(labels, len(source), fractions, config.data.split_seed)
    )
    if not len(splits.train):
        raise ConfigError(f"{source.name}: no row is left to train on of {len(source)}")
    notes: list[str] = []
    if config.train.overfit_batches:
        rows = splits.train[: config.train.overfit_batches * config.train.global_batch_size]
        splits = Splits(rows, rows, rows[:0])
        notes.append(f"overfitting {len(rows)} rows: they are trained on and evaluated")
    targets, names = _ENCODERS[task](source, splits)
    mean, sd = _statistics(_narrow(source.inputs[splits.train]), config.data.normalize)
    schema_ = Schema(
        task=task,
        input_shape=tuple(source.inputs.shape[1:]),
        input_dtype=str(_narrow(source.inputs[:1]).dtype),
        outputs=len(names) if names else int(np.prod(targets.shape[1:])),
        target_shape=tuple(targets.shape[1:]),
        class_names=names,
        mean=mean,
        sd=sd,
    )
    batch = config.train.global_batch_size
    if len(splits.train) < batch:
        notes.append(
            f"{len(splits.train)} training rows are fewer than train.global_batch_size {batch}: "
            f"each epoch is one step on {len(splits.train)} rows"
        )
    return Dataset(source, splits, schema_, targets, tuple(notes))


def class_weights(config: schema.Objective, dataset: Dataset) -> tuple[float, ...] | None:
    """The weights of an objective with `class_weights`, resolved on the training rows; None for all equal."""
    wanted = getattr(config, "class_weights", "none")
    classes = dataset.schema.outputs
    if wanted == "none":
        return None
    if wanted == "balanced":
        counts = np.bincount(dataset.targets[dataset.splits.train].reshape(-1), minlength=classes)
        return tuple(float(w) for w in counts.sum() / (classes * np.maximum(counts, 1)))
    if len(wanted) != classes:
        raise ConfigError(f"objective.class_weights: {len(wanted)} weights for {classes} classes; one each is needed")
    return tuple(wanted)


def _task_of(targets: np.ndarray) -> str:
    return "classes" if targets.dtype.kind in "iubUSO" and targets.ndim == 1 else "regression"


def _check_classes(config: RunConfig, source: ArraySource) -> None:
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


def _encode_classes(source: ArraySource, splits: Splits) -> tuple[np.ndarray, tuple[str, ...]]:
    """The class map comes from the training rows: a class that they lack cannot be learnt, so it is an error."""
    known = np.unique(source.targets[splits.train])
    index = np.searchsorted(known, source.targets)
    index = np.minimum(index, len(known) - 1)
    unknown = known[index] != source.targets
    used = np.concatenate([splits.train, splits.validation, splits.test])
    if unknown[used].any():
        row = int(used[unknown[used]][0])
        raise ConfigError(f"{source.name}: class {_plain(source.targets[row])!r} (row {row}) has no training row")
    numbers = known.dtype.kind in "iub"
    words = source.names is not None and numbers and known.min() >= 0 and known.max() < len(source.names)
    names = [source.names[int(k)] for k in known] if words and source.names else [_word(k) for k in known]
    return index.astype(np.int32), tuple(names)


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def _word(value: Any) -> str:
    return str(int(value)) if isinstance(value, np.floating) else str(value)


def _encode_binary(source: ArraySource, splits: Splits) -> tuple[np.ndarray, None]:
    if source.targets.dtype.kind not in "fiub" or not np.isin(source.targets, (0, 1)).all():
        wrong = [v for v in np.unique(source.targets).tolist() if v not in (0, 1)]
        raise ConfigError(f"objective.kind=binary: a target of {source.name} is {wrong[0]!r}; allowed: 0 and 1")
    return source.targets.astype(np.float32), None


def _encode_values(source: ArraySource, splits: Splits) -> tuple[np.ndarray, None]:
    if source.targets.dtype.kind not in "fiub":
        first = source.targets.reshape(-1)[0]
        raise ConfigError(f"{source.name}: a target is {first!r}; numbers are needed (cross_entropy takes words)")
    targets = source.targets.astype(np.float32)
    if not np.isfinite(targets).all():
        row = int(np.flatnonzero(~np.isfinite(targets.reshape(len(targets), -1)).all(1))[0])
        raise ConfigError(f"{source.name}: the target of row {row} is not finite")
    return targets, None


_ENCODERS: dict[str, Callable[[ArraySource, Splits], tuple[np.ndarray, Any]]] = {
    "classes": _encode_classes,
    "binary": _encode_binary,
    "regression": _encode_values,
}


def _narrow(inputs: np.ndarray) -> np.ndarray:
    """float64 -> float32 and int64 -> int32, as jax would; images of bytes stay bytes."""
    if inputs.dtype.kind == "f":
        return inputs.astype(np.float32, copy=False)
    return inputs.astype(np.int32, copy=False) if inputs.dtype.itemsize > 4 else inputs


def _statistics(inputs: np.ndarray, how: str) -> tuple[Any, Any]:
    if how == "none":
        return None, None
    axes = tuple(range(inputs.ndim - 1)) if how == "channel" and inputs.ndim > 1 else (0,)
    wide = inputs.astype(np.float64)
    mean, sd = wide.mean(axes), wide.std(axes)
    # A constant feature has nothing to divide by.
    return mean.tolist(), np.where(sd > 1e-12, sd, 1.0).tolist()
