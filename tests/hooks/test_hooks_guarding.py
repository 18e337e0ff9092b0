"""Hooks that want to go back: updates that are not finite, a loss that jumps; and rows that are named."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest

from jaxtrain.hooks.guarding import LossSpike, NameSkipped, SkipLimit
from jaxtrain.loop import Look, Rollback


def test_so_many_skipped_updates_in_a_row_go_back_to_before_the_first_of_them() -> None:
    hook = SkipLimit(3)
    assert [hook.on_metrics(step, {"in_row": float(step)}) for step in (0, 1, 2)] == [None, None, None]
    back = hook.on_metrics(40, {"in_row": 5.0})
    assert back == Rollback(36, 40, "5 updates in a row were not finite (guard.max_skips 3)")


def rows(hook: LossSpike, losses: list[float], every: int = 5) -> list[Any]:
    return [hook.on_metrics(every * (i + 1), {"loss": loss}) for i, loss in enumerate(losses)]


CALM = [1.0, 1.1, 0.9, 1.2, 0.8, 1.0, 1.1, 0.9, 1.2, 0.8]
"""Median 1, median absolute deviation 0.1: a deviation is 0.14826."""


def test_a_loss_that_jumps_goes_back_by_its_row() -> None:
    hook = LossSpike(6.0, 5)
    assert rows(hook, CALM) == [None] * 10
    assert hook.on_metrics(55, {"loss": 1 + 5.9 * 0.14826}) is None
    back = LossSpike(6.0, 5)
    rows(back, CALM)
    found = back.on_metrics(55, {"loss": 1 + 6.1 * 0.14826})
    assert found == Rollback(
        51,
        55,
        "train/loss 1.904 lies 6.1 deviations above 1, the median of 10 rows (guard.loss_spike 6)",
    )


def test_a_loss_that_falls_or_is_not_finite_or_comes_early_is_no_spike() -> None:
    hook = LossSpike(6.0, 5)
    assert rows(hook, [*CALM, 0.0, math.nan, math.inf]) == [None] * 13
    assert rows(LossSpike(6.0, 5), [1.0] * 9 + [100.0]) == [None] * 10


def test_a_loss_that_stood_still_has_a_deviation() -> None:
    hook = LossSpike(6.0, 5)
    assert rows(hook, [2.0] * 10) == [None] * 10
    assert hook.on_metrics(55, {"loss": 2.0 + 5.9 * 2e-3}) is None
    assert isinstance(hook.on_metrics(60, {"loss": 2.0 + 6.1 * 2e-3}), Rollback)


def test_what_a_stop_writes_between_two_rows_is_left_alone_and_the_memory_is_kept() -> None:
    hook = LossSpike(6.0, 5)
    rows(hook, CALM)
    assert hook.on_metrics(53, {"loss": 100.0}) is None
    other = LossSpike(6.0, 5)
    other.load_state_dict(hook.state_dict())
    assert other.state_dict() == {"losses": CALM}
    assert isinstance(other.on_metrics(55, {"loss": 100.0}), Rollback)


def test_skipped_rows_are_named_three_times(caplog: pytest.LogCaptureFixture) -> None:
    asked = []

    def name(state: Any, first: int, last: int) -> str:
        asked.append((state, first, last))
        return "the loss of row 37 is not finite"

    hook = NameSkipped(name, 5)
    assert hook.on_metrics(5, {"skipped": 0.0}) is None
    for step in (10, 13, 20):
        look = hook.on_metrics(step, {"skipped": 1.0})
        assert isinstance(look, Look)
        with caplog.at_level(logging.WARNING):
            look.at({"step": step})
    assert hook.on_metrics(25, {"skipped": 1.0}) is None
    assert asked == [({"step": 10}, 6, 10), ({"step": 13}, 11, 13), ({"step": 20}, 16, 20)]
    assert caplog.messages[0] == "skipped up to step 10: the loss of row 37 is not finite"
