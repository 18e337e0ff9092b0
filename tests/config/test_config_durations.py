"""Durations: what may be written, and how many steps or seconds it is."""

from __future__ import annotations

import pytest

from jaxtrain.config import ConfigError, load
from jaxtrain.config.durations import period, to_seconds, to_steps


@pytest.mark.parametrize(
    ("written", "steps"),
    [
        (0, 0),
        (500, 500),
        ("0ep", 0),
        ("0%", 0),
        ("1ep", 30),
        ("20ep", 600),
        ("2.5ep", 75),
        ("0.5ep", 15),
        ("0.01ep", 1),  # 0.3 of a step is rounded up
        ("0.11ep", 4),  # 3.3
        ("1.1ep", 33),  # 33.000000000000004 in float64 is not 34
        ("5%", 50),
        ("0.5%", 5),
        ("7%", 70),  # 70.00000000000001 in float64 is not 71
        ("0.01%", 1),
        ("33.33%", 334),
        ("100%", 1000),
    ],
)
def test_steps_epochs_and_percent_become_whole_steps_rounded_up(written: int | str, steps: int) -> None:
    assert to_steps(written, steps_per_epoch=30, total_steps=1000) == steps


def test_a_small_part_of_an_epoch_is_a_step_and_no_part_is_none() -> None:
    assert to_steps("0.000001ep", steps_per_epoch=30) == 1
    assert to_steps("0.0ep", steps_per_epoch=30) == 0


@pytest.mark.parametrize(
    ("written", "per_epoch", "steps"),
    [
        ("1.1ep", 300_000_000, 330_000_000),
        ("2.3ep", 100_000_000, 230_000_000),
        ("0.0000000001ep", 1, 1),
    ],
)
def test_rounding_is_exact_at_any_size(written: str, per_epoch: int, steps: int) -> None:
    assert to_steps(written, steps_per_epoch=per_epoch) == steps


def test_a_percentage_needs_a_total_and_epochs_do_not() -> None:
    assert to_steps("5ep", steps_per_epoch=10) == 50
    with pytest.raises(ValueError, match=r"^'5%': a percentage needs a total; allowed here: steps or epochs$"):
        to_steps("5%", steps_per_epoch=10)


@pytest.mark.parametrize("written", ["90s", "5m", "2h", "ep", "5", "5 ep", "-1ep"])
def test_what_is_no_number_of_steps_is_refused_with_what_is_allowed(written: str) -> None:
    with pytest.raises(ValueError) as refused:
        to_steps(written, steps_per_epoch=10, total_steps=100)
    assert str(refused.value) == (
        f'{written!r} is not a number of steps; allowed: steps (500), epochs ("20ep") or a share of the run ("5%")'
    )


@pytest.mark.parametrize(
    ("written", "seconds"),
    [
        ("90s", 90.0),
        ("5m", 300.0),
        ("2h", 7200.0),
        ("1.5m", 90.0),
        (90, 90),
        (2.5, 2.5),
        (None, None),
        ("20ep", None),
        ("5%", None),
    ],
)
def test_wall_time_becomes_seconds_and_steps_do_not(written: object, seconds: float | None) -> None:
    assert to_seconds(written) == seconds  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("written", "pair"),
    [
        (0, (0, None)),
        (100, (100, None)),
        ("1ep", (30, None)),
        ("5%", (50, None)),
        ("30s", (0, 30.0)),
        ("2h", (0, 7200.0)),
    ],
)
def test_a_period_is_steps_or_seconds_never_both(written: int | str, pair: tuple[int, float | None]) -> None:
    assert period(written, steps_per_epoch=30, total_steps=1000) == pair


# ---------------------------------------------------------------- in a config

STEPS = 'steps (500), epochs ("20ep") or a share of the run ("5%")'
PERIODS = STEPS + ' or wall time ("30s", "5m", "2h")'
SECONDS = 'seconds (90) or "30s", "5m", "2h"'


@pytest.mark.parametrize("value", [0, 500, "20ep", "2.5ep", "0ep", "5%", "0%", "12.5%"])
def test_a_length_in_steps_stays_as_it_was_written(value: int | str) -> None:
    assert load({}, [("schedule.warmup", value)]).schedule.warmup == value


def test_digits_in_quotes_are_steps() -> None:
    assert load({}, [("train.duration", "500")]).train.duration == 500


@pytest.mark.parametrize(
    "value", [-1, 2.5, True, None, "", "x", "-5%", "20 ep", "20epochs", "5m", "1e3", "%", [1], {"steps": 3}]
)
def test_a_length_that_is_none_is_refused_with_its_value_and_what_is_allowed(value: object) -> None:
    with pytest.raises(ConfigError) as refused:
        load({}, [("evaluate.every", value)])
    line = str(refused.value)
    assert "\n" not in line
    assert line.startswith(f"evaluate.every: {value!r} is not valid: ")
    assert STEPS in line
    assert "wall time" not in line


def test_a_line_end_is_no_part_of_a_duration() -> None:
    with pytest.raises(ConfigError):
        load({}, [("train.duration", "20ep\n")])
    assert load({}, [("train.duration", "20ep")]).train.duration == "20ep"


@pytest.mark.parametrize("value", [0, 100, "1ep", "5%", "30s", "1.5m", "2h"])
def test_a_period_may_be_wall_time(value: int | str) -> None:
    assert load({}, [("checkpoint.every", value)]).checkpoint.every == value


@pytest.mark.parametrize("value", [-1, 2.5, True, None, "5 minutes", "5min", "-5m", [1]])
def test_a_period_that_is_none_is_refused_with_its_value_and_what_is_allowed(value: object) -> None:
    with pytest.raises(ConfigError) as refused:
        load({}, [("checkpoint.every", value)])
    line = str(refused.value)
    assert line.startswith(f"checkpoint.every: {value!r} is not valid: ")
    assert PERIODS in line or value == -1  # a negative number names the step-like ones
    assert STEPS in line


@pytest.mark.parametrize("value", [90, 0.5, "90s", "5m", "2h", None])
def test_a_time_budget_is_seconds_or_wall_time_or_none(value: object) -> None:
    assert load({}, [("train.time_budget", value)]).train.time_budget == value


@pytest.mark.parametrize("value", [0, -1, True, "90", "20ep", "5%", "2 hours", [1]])
def test_a_time_budget_that_is_none_is_refused_with_what_is_allowed(value: object) -> None:
    with pytest.raises(ConfigError) as refused:
        load({}, [("train.time_budget", value)])
    assert str(refused.value).startswith(f"train.time_budget: {value!r} is not valid: allowed: {SECONDS}")


@pytest.mark.parametrize("key", ["train.time_budget", "checkpoint.every"])
def test_no_wall_time_at_all_is_refused(key: str) -> None:
    """`checkpoint.every: 0` means never; "0s" would mean at every step."""
    assert load({}, [(key, "1s")])
    with pytest.raises(ConfigError) as refused:
        load({}, [(key, "0s")])
    assert str(refused.value).startswith(f"{key}: '0s' is not valid: ")


def test_a_run_cannot_be_a_share_of_itself() -> None:
    assert load({}, [("evaluate.every", "50%")]).evaluate.every == "50%"
    with pytest.raises(ConfigError) as refused:
        load({}, [("train.duration", "50%")])
    line = str(refused.value)
    assert line.startswith("train.duration: '50%'")
    assert 'allowed: steps (500) or epochs ("20ep")' in line


def test_no_part_is_more_than_the_whole_run() -> None:
    assert load({}, [("schedule.warmup", "100%")]).schedule.warmup == "100%"
    with pytest.raises(ConfigError) as refused:
        load({}, [("schedule.warmup", "150%")])
    assert str(refused.value).startswith("schedule.warmup: '150%' is not valid: ")
