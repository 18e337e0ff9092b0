"""What a config leaves to its data and devices: steps, lanes, rows of an evaluation, which way a metric is better."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtrain.config import RunConfig, schema
from jaxtrain.config.durations import period, to_steps
from jaxtrain.config.errors import ConfigError, choices
from jaxtrain.core.metrics import Metrics, best_is
from jaxtrain.core.module import ModuleDef
from jaxtrain.data.make import Data
from jaxtrain.data.order import steps_per_epoch
from jaxtrain.hardware.devices import Devices
from jaxtrain.models import MODELS


@dataclass(frozen=True)
class Steps:
    """The run counted in steps. An interval of 0 is "never"; the end evaluates and saves in any case."""

    total: int
    per_epoch: int
    log_every: int
    evaluate_every: int
    save_every: int
    save_seconds: float | None
    keep_every: int


def steps(config: RunConfig, dataset: Data) -> Steps:
    """Durations and intervals in steps of this dataset."""
    train = config.train
    per_epoch = max(steps_per_epoch(dataset.rows("train"), train.global_batch_size), 1)
    total = to_steps(train.duration, steps_per_epoch=per_epoch)
    if total < 1:
        raise ConfigError(f"train.duration: {train.duration!r} is no step at all; at least 1 is needed")
    save_every, save_seconds = period(config.checkpoint.every, steps_per_epoch=per_epoch, total_steps=total)
    evaluate_every = to_steps(config.evaluate.every, steps_per_epoch=per_epoch, total_steps=total)
    keep_every = to_steps(config.checkpoint.keep_every, steps_per_epoch=per_epoch, total_steps=total)
    return Steps(total, per_epoch, config.log.every, evaluate_every, save_every, save_seconds, keep_every)


def check_divisible(config: RunConfig, devices: int) -> None:
    """Raises ConfigError for rows that cannot be split over so many devices."""
    train = config.train
    micro = train.micro_batch_size or train.global_batch_size
    if micro % devices:
        name = "train.micro_batch_size" if train.micro_batch_size else "train.global_batch_size"
        near = sorted({max(micro // devices, 1) * devices, (micro // devices + 1) * devices})
        raise ConfigError(
            f"{name}: {micro} rows cannot be split over {devices} devices; "
            f"allowed: multiples of {devices}, such as {' or '.join(map(str, near))} "
            f"(or {'mesh.data=1' if config.mesh.fsdp == 1 else 'less of mesh.data, mesh.fsdp'})"
        )


def check_dispatch(config: RunConfig, feed_kind: str) -> None:
    """Raises ConfigError for several steps a dispatch over rows that come from the host."""
    asked = config.train.steps_per_dispatch
    if asked not in ("auto", 1) and feed_kind != "resident":
        raise ConfigError(
            f"train.steps_per_dispatch: {asked} needs rows on the device, and these come by data.feed={feed_kind}; "
            "allowed: auto or 1, or data.feed=resident"
        )


def lanes(config: RunConfig, module: ModuleDef, devices: Devices, parts: int) -> int:
    """The lanes of a forward pass: those asked for, or on one CPU device those of the kind, where the rows allow it."""
    rows, asked = config.train.micro_batch_size or config.train.global_batch_size, config.train.lanes
    if asked is None:
        kind = MODELS.get(config.model.kind)
        wanted = kind.lanes if kind and devices.platform == "cpu" and parts == 1 and not module.model_state else 1
        return wanted if rows % wanted == 0 else 1
    if rows % (asked * parts):
        fits = [n for n in range(1, rows // parts + 1) if rows % (n * parts) == 0]
        raise ConfigError(
            f"train.lanes: {rows} rows on {parts} device{'s'[: parts - 1]} cannot be split into {asked}; "
            f"allowed: {', '.join(map(str, fits))}"
        )
    if asked > 1 and module.model_state:
        raise ConfigError(
            f"train.lanes: {asked} for a model with state of its own ({next(iter(module.model_state))}), "
            "which each lane would change; allowed: 1, or a model without it (such as model.norm=layer)"
        )
    return asked


def eval_batch(config: RunConfig, devices: int) -> int:
    """Rows of an evaluation batch, a multiple of the devices that split them."""
    wanted = config.evaluate.batch_size or config.train.global_batch_size
    return -(-wanted // devices) * devices


def mode(config: RunConfig, metrics: Metrics | None) -> str:
    """min or max: which way evaluate.metric is better. Raises ConfigError for one that is not there."""
    name = config.evaluate.metric
    known = ["loss", *(metrics.names if metrics else [])]
    custom = isinstance(config.objective, schema.CustomObjective) or metrics is None
    if name not in known and not custom:
        raise ConfigError(f"evaluate.metric: {name!r} is not computed here; {choices(name, known)}")
    if config.evaluate.mode != "auto":
        return config.evaluate.mode
    if name not in known:
        raise ConfigError(f"evaluate.mode: auto does not know which way {name!r} is better; allowed: min, max")
    return best_is(name)


def convolutional(config: RunConfig, module: ModuleDef) -> bool:
    """Whether the program convolves: by the table of kinds, or by the kernels of a user's module."""
    kind = MODELS.get(config.model.kind)
    return kind.convolutional if kind else any(p.ndim >= 3 for p in module.params.values())
