"""Combinations that cannot work, found before anything is loaded. Those that need data are in build.py."""

from __future__ import annotations

import math

from jaxtrain.config.errors import ConfigError
from jaxtrain.config.schema import Arrays, CrossEntropy, Gpt, Piecewise, Resnet, RunConfig, Tcn


def check(config: RunConfig) -> None:
    """Raise ConfigError for the first combination of fields that cannot work."""
    train, data = config.train, config.data
    micro, batch = train.micro_batch_size, train.global_batch_size
    if micro is not None and batch % micro:
        low = [m for m in range(1, math.isqrt(batch) + 1) if batch % m == 0]
        fits = sorted({*low, *(batch // m for m in low)})
        raise ConfigError(
            f"train.micro_batch_size: {micro} does not divide train.global_batch_size {batch}; "
            f"allowed: {', '.join(map(str, fits))}"
        )
    if isinstance(train.duration, str) and train.duration.endswith("%"):
        raise ConfigError(
            f'train.duration: {train.duration!r}: a run is no share of itself; allowed: steps (500) or epochs ("20ep")'
        )
    taken = data.validation_fraction + getattr(data, "test_fraction", 0.0)
    if taken >= 1.0:
        raise ConfigError(
            f"data.validation_fraction + data.test_fraction = {taken:g} leaves no rows to train on; "
            "allowed: a sum below 1"
        )
    if config.mesh.data == 0 or config.mesh.data < -1:
        raise ConfigError(f"mesh.data: {config.mesh.data} is not allowed; allowed: -1 (all devices) or 1, 2, ...")
    schedule = config.schedule
    if isinstance(schedule, Piecewise) and len(schedule.boundaries) != len(schedule.factors):
        raise ConfigError(
            f"schedule.factors: {len(schedule.factors)} values for {len(schedule.boundaries)} boundaries; "
            "one factor for each boundary is needed"
        )
    objective = config.objective
    if isinstance(objective, CrossEntropy) and objective.focal_gamma and objective.label_smoothing:
        raise ConfigError(
            f"objective.focal_gamma {objective.focal_gamma:g} with objective.label_smoothing "
            f"{objective.label_smoothing:g}: focal loss is defined for hard targets; set one of them to 0"
        )
    for name, moves in (("flip", config.augment.flip), ("shift", config.augment.shift)):
        if moves and getattr(data, "normalize", "none") == "feature":
            raise ConfigError(
                f"augment.{name}={moves} with data.normalize=feature: pixels would change places with their scale; "
                "allowed: data.normalize channel or none"
            )
    if isinstance(data, Arrays) and data.path.endswith(".npy") and data.targets_path is None:
        raise ConfigError(f"data.targets_path: a value is needed, as data.path is {data.path!r}: targets.npy")
    if isinstance(config.model, Tcn) and config.model.norm == "group" and config.model.output == "step":
        raise ConfigError(
            "model.norm=group with model.output=step: groups are normalised over all steps, so a step would see "
            "later ones; allowed: layer, batch, none"
        )
    if isinstance(config.model, Gpt):
        _check_heads(config.model)
    if isinstance(config.model, Resnet) and config.model.norm == "none" and config.model.depth > 20:
        raise ConfigError(
            f"model.norm=none with model.depth={config.model.depth}: a residual net this deep does not train "
            "without normalisation; allowed: batch, group, layer, or a depth up to 20"
        )


def _check_heads(model: Gpt) -> None:
    kv_heads = model.kv_heads or model.heads
    if model.width % model.heads:
        raise ConfigError(f"model.heads: {model.heads} does not divide model.width {model.width}")
    if model.heads % kv_heads:
        raise ConfigError(f"model.kv_heads: {kv_heads} does not divide model.heads {model.heads}")
    if model.positions == "rotary" and model.width // model.heads % 2:
        raise ConfigError(
            f"model.heads: {model.heads} heads of {model.width // model.heads} features each; "
            "model.positions=rotary needs an even number"
        )
