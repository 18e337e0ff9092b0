"""The console: plain lines in a pipe, one live table on a terminal, never silent for long."""

from __future__ import annotations

import io
import itertools
import logging
import math
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hooks_helpers import TINY, evaluation, tiny
from rich.console import Console as RichConsole

import jaxtrain as jt
from jaxtrain.hooks import console as module
from jaxtrain.hooks.console import Console, waiting
from jaxtrain.loop import Evaluation

ESCAPE = "\x1b"


class Clock:
    """Time that tests move."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def __getattr__(self, name: str) -> object:
        return getattr(time, name)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def terminal(width: int = 100, environment: dict[str, str] | None = None, encoding: str = "utf-8") -> RichConsole:
    """A terminal that is a text: its escape codes can be looked at."""
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding, write_through=True)
    variables = {"TERM": "xterm", **(environment or {})}
    return RichConsole(file=file, force_terminal=True, width=width, height=30, _environ=variables, highlight=False)


def pipe() -> RichConsole:
    return RichConsole(file=io.StringIO(), force_terminal=False, soft_wrap=True, width=80)


def text(rich: RichConsole) -> str:
    if isinstance(rich.file, io.StringIO):
        return rich.file.getvalue()
    return rich.file.buffer.getvalue().decode(rich.file.encoding)  # type: ignore[attr-defined]


def drawn(console: Console) -> list[str]:
    """The lines of the live table as they would be drawn now."""
    with console.rich.capture() as capture:
        console.rich.print(console._render())
    return [re.sub(r"\x1b\[[0-9;]*m", "", line).rstrip() for line in capture.get().splitlines()]


def training(rich: RichConsole, clock: Clock, first: int = 0, steps: int = 100, seconds: float = 10.0) -> Console:
    """A console in a run of 680 steps, `steps` after `first`, which took so many seconds."""
    console = Console("accuracy", "max", rich=rich)
    console.plan(680, 17, 64)
    console.start(first)
    for step in range(first + 1, first + steps + 1):
        clock.now += seconds / steps
        console.after_step(step)
    figures = {"lr": 0.002252, "grad_norm": 1.824, "in_row": 0.0, "loss": 0.1202, "accuracy": 0.9577, "skipped": 0.0}
    console.on_metrics(first + steps, figures)
    console.on_evaluation(first + steps, Evaluation({"loss": 0.09178, "accuracy": 0.9696, "f1": 0.9}))
    return console


def eventually(condition: Callable[[], bool]) -> None:
    """Within ten seconds."""
    end = time.monotonic() + 10.0
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


# ------------------------------------------------------------ plain lines


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[Console]:
    monkeypatch.setattr(module, "_CALM", ((math.inf, 0.8),))
    console = Console("loss", "min", rich=pipe())
    console.open()
    yield console
    console.shut()


def test_a_phase_is_told_at_once_and_with_its_time_at_the_end(opened: Console) -> None:
    with opened.phase("compiling", hint=" (first time 41.0 s)"):
        assert text(opened.rich) == "compiling ... (first time 41.0 s)\n"
    assert re.fullmatch(r"compiling \.\.\. \(first time 41\.0 s\)\ncompiling: 0\.\d s\n", text(opened.rich))


def test_an_untold_phase_that_is_short_is_not_seen(opened: Console) -> None:
    with opened.phase("sealing", told=False):
        pass
    assert text(opened.rich) == ""


def test_a_long_phase_ticks_and_so_does_what_comes_between_phases(opened: Console) -> None:
    eventually(lambda: "getting ready ... 1 s\n" in text(opened.rich))
    with opened.phase("sealing", told=False):
        eventually(lambda: "sealing ... 1 s\n" in text(opened.rich))


def test_of_two_phases_the_inner_one_is_told(opened: Console, clock: Clock) -> None:
    with opened.phase("compiling"), opened.phase("linking"):
        assert opened._waiting() == "linking ... 0 s"
        clock.now += 3
        assert opened._waiting() == "linking ... 3 s"
    assert opened._waiting() == "getting ready ... 0 s"


def test_no_stretch_of_the_first_minute_of_a_run_is_silent_for_long(
    tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    moments = []
    show = Console._show

    def timed(self: Console, text: str, style: str = "") -> None:
        moments.append(time.monotonic())
        show(self, text, style)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Console, "_show", timed)
        jt.train(
            TINY,
            run_dir=tmp_path / "run",
            **{"train.duration": 400, "evaluate.every": 100, "checkpoint.every": 0},
        ).close()
    gaps = [after - before for before, after in itertools.pairwise(moments)]
    assert max(gaps) < 4.0  # 2 on an idle machine


def test_lines_in_a_pipe_have_no_escape_codes_and_are_not_wrapped(clock: Clock) -> None:
    console = training(pipe(), clock)
    console.line("x" * 300)
    logging.getLogger("jaxtrain").addHandler(console._handler)
    logging.getLogger("jaxtrain").warning("careful: %s", "y" * 200)
    logging.getLogger("jaxtrain").removeHandler(console._handler)
    assert text(console.rich) == "x" * 300 + "\nwarning: careful: " + "y" * 200 + "\n"


def test_a_line_of_progress_tells_all_there_is(clock: Clock) -> None:
    console = training(pipe(), clock)
    assert [*console._progress(), *console._values()] == [
        ("step", "100/680"),
        ("epoch", "5.9"),
        ("ETA", "00:58"),
        ("loss", "0.1202"),
        ("accuracy", "0.9577"),
        ("eval loss", "0.09178"),
        ("eval accuracy", "0.9696"),
        ("best", "0.9696 @ 100"),
        ("lr", "0.002252"),
        ("grad_norm", "1.824"),
        ("examples/s", "640"),
    ]


def test_lines_come_less_often_later(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[float] = []
    clock = Clock()

    class Closing:
        """`wait` moves the clock instead of waiting, for a quarter of an hour."""

        def wait(self, seconds: float) -> bool:
            clock.now += seconds
            return clock.now > 1900.0

    monkeypatch.setattr(module, "time", clock)
    console = Console("loss", "min", rich=pipe())
    console.plan(10**6, 10, 64)
    console.start(0)
    console._closed = Closing()  # type: ignore[assignment]
    monkeypatch.setattr(console, "_show", lambda text, style="": told.append(clock.now - 1000.0))
    console._tick()
    gaps = [after - before for before, after in zip([0.0, *told], told, strict=False)]
    assert max(gap for gap, at in zip(gaps, told, strict=True) if at <= 60) <= 2.0
    assert {gap for gap, at in zip(gaps, told, strict=True) if 75 < at <= 600} == {9.75}
    assert {gap for gap, at in zip(gaps, told, strict=True) if at > 700} == {59.75}


def test_a_slow_step_is_told_with_its_seconds(opened: Console) -> None:
    opened.plan(680, 17, 64)
    opened.start(0)
    opened.after_step(3)
    eventually(lambda: "step 3/680 ... 1 s\n" in text(opened.rich))
    assert text(opened.rich).startswith("step 3/680  epoch 0.2  ETA ")


# ------------------------------------------------------------ how long still


def test_eta_counts_the_steps_of_this_process_only(clock: Clock) -> None:
    resumed = training(pipe(), clock, first=580, steps=50, seconds=10.0)
    assert dict(resumed._progress())["ETA"] == "00:10"  # 50 steps at 5 a second; not 630 steps in 10 s
    assert dict(resumed._values())["examples/s"] == "320"


def test_nothing_is_claimed_before_the_first_step_has_passed(clock: Clock) -> None:
    console = Console("loss", "min", rich=pipe())
    console.plan(680, 17, 64)
    console.start(580)
    clock.now += 30
    assert dict(console._progress())["ETA"] == "-:--"
    assert "examples/s" not in dict(console._values())


def test_eta_forgets_a_slow_beginning_and_runs_down_between_steps(clock: Clock) -> None:
    console = Console("loss", "min", rich=pipe())
    console.plan(200, 10, 64)
    console.start(0)
    clock.now += 60  # the first step compiles
    for step in range(1, 101):
        console.after_step(step)
        clock.now += 1
    assert dict(console._progress())["ETA"] == "01:39"
    clock.now += 9
    assert dict(console._progress())["ETA"] == "01:30"


def test_eta_counts_evaluations_between_the_steps(clock: Clock) -> None:
    console = Console("loss", "min", rich=pipe())
    console.plan(200, 10, 64)
    console.start(0)
    for step in range(1, 101):
        clock.now += 1
        console.after_step(step)
        if step % 10 == 0:
            clock.now += 10
    assert dict(console._progress())["ETA"] in ("03:09", "03:10", "03:11", "03:20")


def test_long_times_are_told_in_hours() -> None:
    assert [module._clock(s) for s in (5, 65, 3600 + 125)] == ["00:05", "01:05", "1:02:05"]


# ------------------------------------------------------------ the live table


@pytest.mark.parametrize("width", [40, 70, 100, 200])
def test_the_table_fits_any_width_and_drops_nothing(width: int, clock: Clock) -> None:
    console = training(terminal(width), clock)
    lines = drawn(console)
    assert max(map(len, lines)) <= width
    shown = " ".join(lines)
    for name, value in [*console._progress(), *console._values()]:
        assert name in shown
        assert value in shown


def test_the_table_at_100_and_at_70_columns(clock: Clock) -> None:
    assert drawn(training(terminal(100), clock)) == [
        "step 100/680 ━━━━━━──────────────────────────────────  15%  epoch 5.9  ETA 00:58",
        "loss      accuracy  eval loss  eval accuracy  best          lr        grad_norm  examples/s",
        "0.1202    0.9577    0.09178    0.9696         0.9696 @ 100  0.002252  1.824      640",
    ]
    assert drawn(training(terminal(70), clock)) == [
        "step 100/680 ━━━━──────────────────────────  15%  epoch 5.9  ETA 00:58",
        "loss      accuracy  eval loss  eval accuracy  best          lr",
        "0.1202    0.9577    0.09178    0.9696         0.9696 @ 100  0.002252",
        "grad_norm  examples/s",
        "1.824      640",
    ]


def test_a_terminal_without_utf8_gets_plain_signs(clock: Clock) -> None:
    first = drawn(training(terminal(100, encoding="ascii"), clock))[0]
    assert first.startswith("step 100/680 ######----")


def test_a_phase_within_training_is_below_the_table(clock: Clock) -> None:
    console = training(terminal(), clock)
    with console.phase("evaluating", told=False):
        clock.now += 0.9
        assert len(drawn(console)) == 3  # the table does not jump at each evaluation
        clock.now += 3.1
        assert drawn(console)[-1] == "evaluating ... 4 s"
    assert len(drawn(console)) == 3


def live(environment: dict[str, str]) -> str:
    console = Console("loss", "min", rich=terminal(60, environment))
    console.open()
    logging.getLogger("jaxtrain").warning("careful")
    with console.phase("compiling"):
        time.sleep(0.6)
    console.shut()
    return text(console.rich)


def test_a_terminal_gets_a_table_that_is_gone_at_the_end_and_keeps_its_cursor() -> None:
    shown = live({})
    assert "warning: careful" in shown
    assert "compiling ... 0 s" in shown
    assert "\x1b[2K" in shown  # lines are erased and drawn again
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")
    hidden = shown.index("\x1b[?25l")
    assert "careful" not in shown[: shown.index("\x1b[?25h", hidden)]  # shown again before anything else happens


def test_no_color_means_no_color_and_dumb_means_no_escape_codes() -> None:
    colour = re.compile(r"\x1b\[[0-9;]*3[0-7][0-9;]*m")
    assert colour.search(live({}))
    assert not colour.search(live({"NO_COLOR": "1"}))
    plain = live({"TERM": "dumb", "NO_COLOR": "1"})
    assert ESCAPE not in plain
    assert plain.splitlines()[:2] == ["warning: careful", "compiling ..."]


def test_a_log_file_of_ci_gets_plain_lines(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    console = Console("loss", "min")
    console.open()
    console.line("hello")
    logging.getLogger("jaxtrain").warning("careful")
    console.shut()
    assert capfd.readouterr().err == "hello\nwarning: careful\n"


# ------------------------------------------------------------ what goes through it


def test_quiet_prints_nothing_and_run_log_still_has_it(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    with tiny(tmp_path / "run", quiet=True) as run:
        assert "compiling: " in (run.path / "run.log").read_text()
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "")


def test_skipped_updates_are_told(clock: Clock) -> None:
    console = training(pipe(), clock)
    console.on_metrics(150, {"loss": 1.0, "skipped": 3.0})
    assert text(console.rich) == "step 150: 3 updates were not finite and were skipped\n"


def test_a_notice_of_a_signal_handler_is_told_by_the_ticker(opened: Console) -> None:
    opened.notice("stopping after this step")
    eventually(lambda: text(opened.rich) == "stopping after this step\n")


def test_a_notice_is_not_lost_at_the_end() -> None:
    console = Console("loss", "min", rich=pipe())
    console.open()
    console.notice("stopping after this step")
    console.shut()
    assert text(console.rich) == "stopping after this step\n"


def test_a_stderr_that_is_gone_stops_nothing(tmp_path: Path) -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    console = Console("loss", "min", rich=RichConsole(file=Gone()))
    console.line("one")
    console.line("two")
    assert console.rich.quiet


def test_the_best_goes_through_a_resume(clock: Clock) -> None:
    console = training(pipe(), clock)
    other = Console("accuracy", "max", rich=pipe())
    other.load_state_dict(console.state_dict())
    other.on_evaluation(200, evaluation(0.5, "accuracy"))
    assert ("best", "0.9696 @ 100") in other._values()


def test_waiting_outside_a_run_begins_with_a_line_and_ends_without(monkeypatch: pytest.MonkeyPatch) -> None:
    rich = pipe()
    monkeypatch.setattr(module, "RichConsole", lambda **options: rich)
    monkeypatch.setattr(module, "_CALM", ((math.inf, 0.8),))
    with waiting("building"):
        eventually(lambda: text(rich).endswith("\nbuilding ... 1 s\n"))
    assert re.fullmatch(r"building \.\.\.\n(building \.\.\. [01] s\n)+", text(rich))
