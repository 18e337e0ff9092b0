"""What the tests of the hooks share: a small run, a reader of TensorBoard's files, evaluations by hand."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import jaxtrain as jt
from jaxtrain.loop import Evaluation

TINY: dict[str, Any] = {
    "name": "tiny",
    "model": {"kind": "mlp", "hidden": [16]},
    "train": {"duration": 24, "global_batch_size": 64},
    "log": {"every": 5, "tensorboard": False, "wrong_samples": 0},
    "evaluate": {"every": 8},
}


def tiny(place: Path, quiet: bool = True, **overrides: Any) -> jt.Run:
    """A run of 24 steps of a small mlp on digits."""
    return jt.train(TINY, run_dir=place, quiet=quiet, **overrides)


def evaluation(value: float, metric: str = "loss") -> Evaluation:
    """An evaluation of one figure."""
    return Evaluation({metric: value})


def no_constant(word: str) -> float:
    """For `parse_constant`: strict JSON has no NaN and no Infinity."""
    raise AssertionError(f"{word} is not JSON")


def strict_rows(path: Path) -> list[dict[str, Any]]:
    """Lines of strict JSON."""
    return [json.loads(line, parse_constant=no_constant) for line in path.read_text(encoding="utf-8").splitlines()]


def untimed(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows without what a clock decides."""
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows]


def events(folder: Path) -> list[Any]:
    """All events of all files of a folder, in the order in which TensorBoard reads them (TFRecord: length, data)."""
    from tensorboardX.proto.event_pb2 import Event

    found = []
    for path in sorted(folder.glob("events.*")):
        data = path.read_bytes()
        place = 0
        while place < len(data):
            (length,) = struct.unpack_from("<Q", data, place)
            event = Event()
            event.ParseFromString(data[place + 12 : place + 12 + length])
            found.append(event)
            place += 12 + length + 4
    return found


def scalars(folder: Path, purge: bool = True) -> list[tuple[str, int, float]]:
    """(tag, step, value) as TensorBoard shows them: a session that starts at step s purges all from s on."""
    kept: list[tuple[str, int, float]] = []
    for event in events(folder):
        if purge and event.HasField("session_log") and event.session_log.status == event.session_log.START:
            kept = [row for row in kept if row[1] < event.step]
        kept += [(value.tag, event.step, value.simple_value) for value in event.summary.value if _is_scalar(value)]
    return kept


def _is_scalar(value: Any) -> bool:
    return value.WhichOneof("value") == "simple_value"
