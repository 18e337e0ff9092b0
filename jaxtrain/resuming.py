"""Which run a resume goes on with, what it may change, what it refuses and why, and how a change is told."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Protocol

from jaxtrain.config import ConfigError, RunConfig, load
from jaxtrain.hooks.folder import RunFolder, list_runs

Changes = dict[str, tuple[Any, Any]]

ENDED = ("early_stop", "time_budget")
"""States of a run that ended by itself before its last step."""

REFUSED = {
    "name": "the run has its name already",
    "data": "rows would change places between the splits, or would not be the same rows",
    "model": "the saved arrays belong to the saved model",
    "objective": "the losses before and after would not be one curve",
    "train.seed": "order and randomness would change in the middle",
    "train.global_batch_size": "steps and epochs would no longer be the same rows",
    "train.init_from": "the run has weights of its own by now",
    "train.ema_decay": "the average is part of the saved state",
    "train.overfit_batches": "the training rows would change",
    "optimizer.kind": "the saved moments belong to the saved optimizer",
    "optimizer.moment_dtype": "the saved moments have the saved type (--cast converts floats)",
    "evaluate.metric": "the best step so far was chosen by the saved metric",
    "evaluate.mode": "the best step so far was chosen the saved way",
    "precision": "the loss scale is part of the saved state",
}
"""Sections and keys that a resume refuses to change, each with its reason. All others may change, and are told."""


CASTABLE = ("optimizer.moment_dtype",)
"""Of these, what a resume may change when saved arrays may be cast."""


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


def check_resumable(changed: Changes, *, cast: bool = False) -> None:
    """Raise ConfigError for the first change that would make it another run. cast: arrays may change their type."""
    for key, (old, new) in changed.items():
        reason = REFUSED.get(key) or REFUSED.get(key.partition(".")[0])
        if cast and key in CASTABLE:
            continue
        if reason:
            raise ConfigError(
                f"{key}: a resume cannot change {old!r} to {new!r}: {reason}; train a new run with it instead"
            )


def tell_changes(changed: Changes, lines: Lines) -> None:
    """Each change in a line; a new length says what it does to the schedule."""
    for key, (old, new) in changed.items():
        about = "; the schedule is drawn anew over the new length" if key == "train.duration" else ""
        lines.line(f"changed: {key} {old} -> {new}{about}")


def absolute_paths(config: RunConfig) -> RunConfig:
    """Paths as seen from anywhere, so that a resume from another folder finds the same files."""
    changed: list[tuple[str, Any]] = []
    for key in ("path", "targets_path", "tokenizer"):
        value = getattr(config.data, key, None)
        if value is not None and (key != "tokenizer" or value not in ("char", "byte")):
            changed.append((f"data.{key}", str(Path(value).resolve())))
    if config.train.init_from is not None:
        changed.append(("train.init_from", str(Path(config.train.init_from).resolve())))
    if config.checkpoint.mirror is not None:  # its file system may not answer: only the text of the path is looked at
        changed.append(("checkpoint.mirror", os.path.abspath(config.checkpoint.mirror)))
    for section in ("model", "objective"):
        where, colon, name = getattr(getattr(config, section), "target", "").partition(":")
        if where.endswith(".py"):
            changed.append((f"{section}.target", f"{Path(where).resolve()}{colon}{name}"))
    return load(config, changed) if changed else config


def unfinished(config: RunConfig) -> RunFolder | None:
    """The newest run of this very config that has not ended by itself."""
    for folder in reversed(list_runs()):
        if folder.path.parent.name == config.name and load(folder.resolved) == config:
            return None if folder.read_status().get("state") in ("done", *ENDED) else folder
    return None
