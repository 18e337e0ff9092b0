"""What a resume may change, what it refuses and why, and how a change is told."""

from __future__ import annotations

from typing import Any, Protocol

from jaxtrain.config import ConfigError, RunConfig

Changes = dict[str, tuple[Any, Any]]

REFUSED = {
    "name": "the run has its name already",
    "data": "rows would change places between the splits, or would not be the same rows",
    "model": "the saved arrays belong to the saved model",
    "objective": "the losses before and after would not be one curve",
    "train.seed": "order and randomness would change in the middle",
    "train.global_batch_size": "steps and epochs would no longer be the same rows",
    "train.ema_decay": "the average is part of the saved state",
    "train.overfit_batches": "the training rows would change",
    "optimizer.kind": "the saved moments belong to the saved optimizer",
    "optimizer.moment_dtype": "the saved moments have the saved type",
    "evaluate.metric": "the best step so far was chosen by the saved metric",
    "evaluate.mode": "the best step so far was chosen the saved way",
    "precision": "the loss scale is part of the saved state",
}
"""Sections and keys that a resume refuses to change, each with its reason. All others may change, and are told."""


class Lines(Protocol):
    """Something that prints lines."""

    def line(self, text: str) -> None:
        """One line."""


def changes(before: RunConfig, after: RunConfig) -> Changes:
    """{dotted key: (before, after)} of all that differs."""
    old, new = before.model_dump(mode="json"), after.model_dump(mode="json")
    found: Changes = {}
    for section in new:
        if not isinstance(new[section], dict):
            if old[section] != new[section]:
                found[section] = (old[section], new[section])
            continue
        for leaf in dict.fromkeys([*old[section], *new[section]]):
            pair = (old[section].get(leaf), new[section].get(leaf))
            if pair[0] != pair[1]:
                found[f"{section}.{leaf}"] = pair
    return found


def check_resumable(changed: Changes) -> None:
    """Raise ConfigError for the first change that would make it another run."""
    for key, (old, new) in changed.items():
        reason = REFUSED.get(key) or REFUSED.get(key.partition(".")[0])
        if reason:
            raise ConfigError(
                f"{key}: a resume cannot change {old!r} to {new!r}: {reason}; train a new run with it instead"
            )


def tell_changes(changed: Changes, lines: Lines) -> None:
    """Each change in a line; a new length says what it does to the schedule."""
    for key, (old, new) in changed.items():
        about = "; the schedule is drawn anew over the new length" if key == "train.duration" else ""
        lines.line(f"changed: {key} {old} -> {new}{about}")
