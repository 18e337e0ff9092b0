"""jaxtrain tune lr: what it prints and writes, and into which file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cli_helpers import TINY, one_line

FAST = ("--steps=60", "--seeds=1", "--high=100", "--quiet")


def test_it_prints_a_rate_and_its_files_and_writes_it_into_a_config(cli: Any) -> None:
    Path("mine.yaml").write_text("# mine\nname: mine\noptimizer: {kind: adamw}  # as usual\n")
    answer = cli("tune", "lr", "mine.yaml", *TINY, *FAST, "--apply")
    assert (answer.code, answer.err) == (0, "")
    rate = float(answer.results[0].removeprefix("optimizer.peak_lr "))
    assert 1e-4 < rate < 0.2
    assert answer.results[1:] == ["tune/mine-lr.json", "tune/mine-lr.png"]
    assert Path("mine.yaml").read_text() == (
        f"# mine\nname: mine\noptimizer: {{peak_lr: {rate!r}, kind: adamw}}  # as usual\n"
    )
    assert json.loads(Path("tune/mine-lr.json").read_text())["seeds"] == [0]


def test_flat_losses_give_no_suggestion_and_change_nothing(cli: Any) -> None:
    Path("mine.yaml").write_text("name: mine\n")
    answer = cli("tune", "lr", "mine.yaml", *TINY, *FAST, "--high=1e-5", "--low=1e-8", "--apply", "--json")
    assert answer.code == 1
    assert json.loads(answer.out)["lr"] is None
    assert Path("mine.yaml").read_text() == "name: mine\n"


def test_a_shipped_config_is_not_written_to(cli: Any) -> None:
    answer = cli("tune", "lr", "digits", "--apply", "--quiet")
    assert (answer.code, answer.out) == (2, "")
    assert one_line(answer.err).startswith("--apply: 'digits' is a shipped config; copy it (jaxtrain train digits ")
    assert not Path("tune").exists()


def test_a_misspelt_key_is_one_line(cli: Any) -> None:
    answer = cli("tune", "lr", "digits", "--optimizer.peek_lr=1", "--quiet")
    assert (answer.code, answer.out) == (2, "")
    assert "optimizer.peak_lr" in one_line(answer.err)
