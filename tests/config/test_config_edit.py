"""One value of a config file is changed, and nothing else of its text."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from jaxtrain.config import ConfigError, load, shipped
from jaxtrain.config.edit import changed


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (
            "optimizer:\n  # ours\n  kind: adamw  # decoupled\n  peak_lr: 1e-3 # found\ntrain: {seed: 1}\n",
            "optimizer:\n  # ours\n  kind: adamw  # decoupled\n  peak_lr: 0.02 # found\ntrain: {seed: 1}\n",
        ),
        ("optimizer: {kind: sgd, peak_lr: 1}\n", "optimizer: {kind: sgd, peak_lr: 0.02}\n"),
        ("optimizer: {kind: sgd}\n", "optimizer: {peak_lr: 0.02, kind: sgd}\n"),
        ("optimizer: {}\n", "optimizer: {peak_lr: 0.02}\n"),
        ("optimizer:\n    kind: sgd\n", "optimizer:\n    peak_lr: 0.02\n    kind: sgd\n"),
        ("name: a", "name: a\noptimizer: {peak_lr: 0.02}\n"),
        ("# nothing\n", "# nothing\noptimizer: {peak_lr: 0.02}\n"),
        ('optimizer: {"peak_lr": "1e-3"}', 'optimizer: {"peak_lr": 0.02}'),
    ],
)
def test_only_the_value_changes(before: str, after: str) -> None:
    assert changed(before, "optimizer.peak_lr", 0.02) == after


@pytest.mark.parametrize("name", shipped())
def test_every_shipped_config_stays_what_it_was_but_for_the_value(name: str, tmp_path: Path) -> None:
    text = shipped()[name].read_text()
    new = changed(text, "optimizer.peak_lr", 0.0123)
    own, before = yaml.safe_load(new), yaml.safe_load(text)
    assert own["optimizer"].pop("peak_lr") == 0.0123
    before["optimizer"].pop("peak_lr", None)
    assert own == before
    assert [line for line in text.splitlines() if line.startswith("#")] == [
        line for line in new.splitlines() if line.startswith("#")
    ]
    (tmp_path / "new.yaml").write_text(new)
    if name != "images":  # it has no default path
        assert load(tmp_path / "new.yaml").optimizer.peak_lr == 0.0123


@pytest.mark.parametrize("text", ["- a\n", "optimizer: adamw\n"])
def test_a_text_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        changed(text, "optimizer.peak_lr", 0.02)
