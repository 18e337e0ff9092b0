"""A run folder written by hand: what a runner leaves, with any part replaced or left out."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from jaxtrain.hooks.folder import RunFolder, strict
from jaxtrain.loop import Evaluation
from jaxtrain.report import write_report

RESOLVED = """name: {name}
precision: auto
model: {{kind: cnn}}
data: {{kind: digits}}
optimizer: {{kind: adamw, peak_lr: 0.003}}
schedule: {{kind: cosine}}
train: {{duration: 40ep, seed: 7, global_batch_size: 64}}
evaluate: {{metric: loss, mode: auto}}
"""

NAMES = ("cat", "dog", "owl")
CONFUSION = [[10, 1, 0], [0, 12, 0], [3, 0, 11]]

RESULT: dict[str, Any] = {
    "best": {"step": 60, "metric": "loss", "evaluation": {"accuracy": 0.9123456789, "loss": 0.2345678901}},
    "class_names": list(NAMES),
    "rows": {"train": 1078, "validation": 362, "test": 37},
    "parameters": 53098,
    "split": "test",
    "details": {
        "confusion": CONFUSION,
        "per_class": {
            "precision": [10 / 13, 12 / 13, 1.0],
            "recall": [10 / 11, 1.0, 11 / 14],
            "f1": [0.8333333333333334, 0.96, 0.88],
            "support": [11, 12, 14],
            "auroc": [0.97, 0.99, None],
        },
    },
    "wrong": [],
    "test": {"accuracy": 0.8918918918918919, "f1_macro": 0.8911111111, "auroc": 0.9777777777, "loss": 0.3141592653},
    "seconds": 200.4,
}

STATUS = {
    "state": "done",
    "reason": "100 steps",
    "step": 96,
    "last_sealed": 100,
    "best": 60,
    "updated": "2026-01-02T03:04",
    "time": {"compile": 12.5, "train": 150.0, "evaluate": 0.0, "lost": 37.5, "pause": 50.0, "begun": 1e9, "until": 1e9},
}

ENV = {
    "python": "3.11",
    "packages": {"jaxtrain": "0.1.0"},
    "devices": "1 x cpu",
    "precision": "fp32",
    "command": ["-c"],
}


def metric_rows(steps: int = 100, **special: dict[int, Any]) -> list[dict[str, Any]]:
    """Rows every 10 steps, evaluations every 20; special={"train_loss": {30: value}} replaces values."""
    rows: list[dict[str, Any]] = []
    for step in (1, *range(10, steps + 1, 10)):
        figures = {
            "loss": 2.0 / step,
            "accuracy": 1 - 1 / step,
            "grad_norm": 3.0,
            "lr": 1e-3,
            "in_row": 0.0,
            "skipped": 0.0,
        }
        row = {f"train/{k}": special.get(f"train_{k}", {}).get(step, v) for k, v in figures.items()}
        rows.append({"step": step, "epoch": step / 20, **row, "time/step": 0.01, "time/examples_per_s": 6400.0})
        if step % 20 == 0:
            loss = special.get("eval_loss", {}).get(step, 0.2 + abs(step - 60) / 100)
            rows.append({"step": step, "epoch": step / 20, "eval/loss": loss, "eval/accuracy": 0.9})
    return rows


def make_run(place: Path, name: str = "digits", **parts: Any) -> RunFolder:
    """A finished classification; parts: status, result, rows, env, journal, resolved; None leaves the file out."""
    folder = RunFolder(place / "20260102T030405Z")
    folder.path.mkdir(parents=True)
    result = parts.get("result", RESULT)
    rows = parts.get("rows", metric_rows())
    if result and "test" in result and "rows" not in parts:
        rows = [
            *rows,
            {"step": 100, "epoch": 5.0, "test/accuracy": result["test"].get("accuracy"), "test/best_step": 60},
        ]
    for path, value in (
        (folder.status, parts.get("status", STATUS)),
        (folder.result, result),
        (folder.env, parts.get("env", ENV)),
    ):
        if value is not None:
            path.write_text(json.dumps(strict(value), allow_nan=False), encoding="utf-8")
    for path, lines in ((folder.metrics, rows), (folder.journal, parts.get("journal"))):
        if lines is not None:
            path.write_text("".join(json.dumps(strict(row), allow_nan=False) + "\n" for row in lines), encoding="utf-8")
    resolved = parts.get("resolved", RESOLVED.format(name=name))
    if resolved is not None:
        folder.resolved.write_text(resolved, encoding="utf-8")
    return folder


def report_of(folder: RunFolder) -> str:
    """The page of a run, already checked to be well formed."""
    text = write_report(folder).read_text(encoding="utf-8")
    Page.of(text)
    return text


class Page(HTMLParser):
    """Checks that tags nest, and gathers text, <data> values, attributes that load something, ids."""

    VOID = frozenset({"meta", "img", "br", "link", "input"})

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.words: list[str] = []
        self.values: list[str] = []
        self.loads: list[str] = []
        self.tags: list[str] = []
        self.h1 = ""

    @classmethod
    def of(cls, text: str) -> Page:
        """Parse; an unbalanced page is an AssertionError."""
        page = cls()
        page.feed(text)
        page.close()
        assert page.open == [], f"never closed: {page.open}"
        return page

    @property
    def text(self) -> str:
        """What a reader sees."""
        return " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)
        for name, value in attributes:
            if name in ("src", "href", "xlink:href", "srcset", "data", "action", "poster"):
                self.loads.append(value or "")
            if tag == "data" and name == "value":
                self.values.append(value or "")

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> without a start"
        assert self.open[-1] == tag, f"</{tag}> closes <{self.open[-1]}>"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if "style" in self.open:
            return
        self.words.append(data)
        if "h1" in self.open:
            self.h1 += data


def dataset(
    inputs: np.ndarray, task: str = "classes", names: tuple[str, ...] | None = NAMES, ids: np.ndarray | None = None
) -> Any:
    """What the room uses of a Dataset: schema, read, rows, source. Training rows are the source's, reversed."""
    order = np.arange(len(inputs))[::-1] if ids is None else ids
    return SimpleNamespace(
        schema=SimpleNamespace(task=task, class_names=names, input_shape=inputs.shape[1:]),
        rows=lambda split: len(order),
        read=lambda split, rows: {"inputs": inputs[order[rows]]},
        source=SimpleNamespace(read=lambda rows: inputs[rows]),
    )


def evaluation(scores: Any, targets: Any, ids: Any) -> Evaluation:
    """An Evaluation that kept its rows."""
    rows = {"scores": np.array(scores, np.float32), "targets": np.array(targets), "ids": np.array(ids, np.int32)}
    return Evaluation({}, {}, rows)
