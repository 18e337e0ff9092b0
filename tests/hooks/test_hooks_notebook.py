"""The console in a notebook: one display that is drawn anew, and lines wherever that is not possible."""

from __future__ import annotations

import gc
import itertools
import json
import logging
import re
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import IPython
import IPython.display
import nbformat
import pytest
from hooks_helpers import tiny
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

from jaxtrain.hooks import console as console_module
from jaxtrain.hooks import notebook as module
from jaxtrain.hooks.console import Console, waiting
from jaxtrain.loop import Evaluation

TRACK = "border-radius"
"""In the html only where there is a bar."""


class Page:
    """What a front end would show: {display id: bundles}, by IPython's `display` and its handles."""

    def __init__(self) -> None:
        self.cell = "cell 1"
        self.displays: list[list[dict[str, str]]] = []
        self.broken = ""

    def display(self, bundle: dict[str, str], *, raw: bool, display_id: bool) -> Any:
        assert raw
        assert display_id
        self._check("display")
        self.displays.append([bundle])
        place = self.displays[-1]

        def update(bundle: dict[str, str], *, raw: bool) -> None:
            assert raw
            self._check("update")
            place.append(bundle)

        return SimpleNamespace(update=update)

    def _check(self, action: str) -> None:
        if self.broken == action:
            raise RuntimeError("no front end")

    def bundles(self) -> list[dict[str, str]]:
        """Of the only display."""
        (bundles,) = self.displays
        return bundles

    def text(self) -> str:
        return self.bundles()[-1]["text/plain"]

    def html(self) -> str:
        return self.bundles()[-1]["text/html"]


def ipython(monkeypatch: pytest.MonkeyPatch, page: Page, shell: object) -> None:
    """IPython with this shell, whose displays go to the page."""
    monkeypatch.setattr(IPython, "get_ipython", lambda: shell)
    monkeypatch.setattr(IPython.display, "display", page.display)


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Iterator[Page]:
    """This process as a kernel."""
    page = Page()
    shell = SimpleNamespace(kernel=object(), get_parent=lambda: {"header": {"msg_id": page.cell}})
    ipython(monkeypatch, page, shell)
    yield page
    module._left.clear()


def training(console: Console) -> Console:
    """In the middle of a run of 200 steps."""
    console.plan(200, 10, 64)
    console.start(0)
    console.after_step(80)
    console.on_metrics(80, {"loss": 0.25, "lr": 0.001, "skipped": 0.0})
    console.on_evaluation(80, Evaluation({"loss": 0.5}))
    return console


def soon(condition: Any) -> None:
    """Within ten seconds."""
    end = time.monotonic() + 10.0
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


# ------------------------------------------------------------ one display


def test_a_run_is_one_display_that_is_drawn_anew(page: Page, capfd: pytest.CaptureFixture) -> None:
    console = Console("loss", "min")
    console.open()
    console.line("digits: mlp")
    assert page.text().splitlines()[0] == "digits: mlp"  # at once, not by the ticker
    training(console)
    soon(lambda: TRACK in page.html())
    middle = page.bundles()[-1]
    console.line("done")
    console.shut()
    assert middle["text/plain"].splitlines() == [
        "digits: mlp",
        "step 80/200  40%  epoch 8.0  ETA -:--",
        "loss 0.25  eval loss 0.5  best 0.5 @ 80  lr 0.001",
    ]
    assert "width:40.0%" in middle["text/html"]
    assert len(page.displays) == 1
    assert page.text() == "digits: mlp\ndone"
    assert TRACK not in page.html()
    assert page.html().count("<div") == 3  # the page and two lines: no bar, no values, no waiting text
    assert capfd.readouterr() == ("", "")


def test_a_whole_run_goes_there_and_its_files_are_as_ever(
    page: Page, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    with tiny(tmp_path / "run", quiet=False) as run:
        assert len(page.displays) == 1  # "building ..." was in the same place
        assert page.text().splitlines()[-1].startswith("  or: jaxtrain resume")
        told = (run.path / "run.log").read_text(encoding="utf-8")
    assert all(line in told for line in page.text().splitlines())
    assert capfd.readouterr() == ("", "")
    page.displays.clear()
    tiny(tmp_path / "other", quiet=True).close()
    assert page.displays == []


def test_a_second_run_in_the_same_cell_has_its_own_display(page: Page, tmp_path: Path) -> None:
    for name in ("one", "two"):
        tiny(tmp_path / name, quiet=False).close()
    texts = [bundles[-1]["text/plain"] for bundles in page.displays]
    assert [text.count("next: ") for text in texts] == [1, 1]


def test_frames_come_twice_a_second_at_most(page: Page) -> None:
    moments = []

    class Timed(list[dict[str, str]]):
        def append(self, bundle: dict[str, str]) -> None:
            moments.append(time.monotonic())
            super().append(bundle)

    console = Console("loss", "min")
    console.open()
    console.line("begin")
    page.displays[0] = Timed(page.displays[0])
    update = console._screen._handle.update  # type: ignore[attr-defined]
    console._screen._handle.update = lambda bundle, raw: (page.displays[0].append(bundle), update(bundle, raw=raw))  # type: ignore[attr-defined]
    training(console)
    for step in range(81, 181):
        console.after_step(step)
        time.sleep(0.02)
    frames = len(moments)
    console.shut()
    assert frames >= 2  # in at least 2 s
    assert all(after - before >= 0.49 for before, after in itertools.pairwise(moments[:frames]))


def test_names_and_values_are_escaped(page: Page) -> None:
    console = Console("<b>", "min")
    console.open()
    training(console)
    console.on_metrics(80, {"loss": 1.0, "<i>name</i>": 1.0})
    with console.phase("<u>phase</u>"):
        console.line('<script>alert("1")</script> & more')
        html, text = page.html(), page.text()
    console.shut()
    for tag in ("<script", "<i>", "<u>"):
        assert tag not in html
        assert tag in text or tag == "<u>"
    assert "&lt;script&gt;alert(&quot;1&quot;)&lt;/script&gt; &amp; more" in html
    assert "&lt;i&gt;name&lt;/i&gt;" in html


def test_a_warning_is_a_line_in_a_colour(page: Page) -> None:
    console = Console("loss", "min")
    console.open()
    console.line("calm")
    logging.getLogger("jaxtrain").warning("careful: %d", 7)
    console.shut()
    assert page.text() == "calm\nwarning: careful: 7"
    assert '<div>calm</div><div style="color:#b87000">warning: careful: 7</div>' in page.html()


def test_of_very_many_lines_the_first_and_the_newest_are_kept(page: Page) -> None:
    console = Console("loss", "min")
    for number in range(300):
        console.line(f"line {number}")
    lines = page.text().splitlines()
    assert lines[:20] == [f"line {number}" for number in range(20)]
    assert lines[20] == "... 100 lines are only in run.log ..."
    assert lines[21:] == [f"line {number}" for number in range(120, 300)]


# ------------------------------------------------------------ before the run


def test_waiting_leaves_nothing_and_the_run_takes_its_place(page: Page) -> None:
    with waiting("building"):
        soon(lambda: page.displays)
        assert re.fullmatch(r"building \.\.\. \d s", page.text())
    assert page.bundles()[-1] == {"text/plain": "", "text/html": ""}
    console = Console("loss", "min")  # made before the second wait, as a resume does it
    with waiting("restoring"):
        soon(lambda: page.text().startswith("restoring ... "))
        logging.getLogger("jaxtrain").warning("quarantined")
    assert page.text() == "warning: quarantined"
    console.line("digits: mlp")
    assert page.text() == "warning: quarantined\ndigits: mlp"


def test_a_short_wait_has_no_display(page: Page) -> None:
    with waiting("building"):
        pass
    assert page.displays == []


def test_another_cell_has_a_display_of_its_own(page: Page) -> None:
    with waiting("building"):
        soon(lambda: page.displays)
    page.cell = "cell 2"
    Console("loss", "min").line("digits: mlp")
    assert len(page.displays) == 2


# ------------------------------------------------------------ where it is not possible


@pytest.mark.parametrize("broken", ["display", "update"])
def test_a_display_that_breaks_stops_nothing_and_lines_follow(
    broken: str, page: Page, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(console_module, "_CALM", ((float("inf"), 0.8),))
    console = Console("loss", "min")
    if broken == "update":
        console.line("seen")
    page.broken = broken
    console.open()
    console.line("digits: mlp")
    training(console)
    shown = []
    soon(lambda: shown.append(capfd.readouterr().err) or "step 80/200" in "".join(shown))  # ticks are lines now
    console.shut()
    assert "".join(shown).splitlines()[:2] == [
        "warning: the display failed (RuntimeError: no front end); lines from here on",
        "digits: mlp",
    ]
    assert "seen" not in "".join(shown)


def test_a_display_that_breaks_between_lines_is_given_up_by_the_ticker(
    page: Page, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(console_module, "_CALM", ((float("inf"), 0.8),))
    console = Console("loss", "min")
    console.open()
    console.line("seen")
    page.broken = "update"
    shown = []
    soon(lambda: shown.append(capfd.readouterr().err) or "getting ready ..." in "".join(shown))
    console.shut()
    assert "".join(shown).startswith("warning: the display failed (RuntimeError: no front end); lines from here on\n")


def test_a_whole_run_goes_on_without_its_display(page: Page, tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    page.broken = "display"
    with tiny(tmp_path / "run", quiet=False) as run:
        assert run.stop.state == "done"
    assert capfd.readouterr().err.splitlines()[-1].startswith("  or: jaxtrain resume")


@pytest.mark.parametrize(
    "shell",
    [None, SimpleNamespace(), SimpleNamespace(kernel=None), SimpleNamespace(kernel=object(), get_parent=dict)],
    ids=["no shell", "a terminal", "no kernel", "an unknown kernel"],
)
def test_without_a_kernel_lines_go_to_stderr(
    shell: object, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    page = Page()
    ipython(monkeypatch, page, shell)
    console = Console("loss", "min")
    console.open()
    console.line("digits: mlp")
    console.shut()
    assert capfd.readouterr().err == "digits: mlp\n"
    assert page.displays == []


def test_ipython_is_not_imported_for_this() -> None:
    code = """
import sys
from jaxtrain.hooks.console import Console
Console("loss", "min").line("digits: mlp")
print(sorted(name for name in sys.modules if name.partition(".")[0] in ("IPython", "ipykernel", "ipywidgets")))
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (ran.stdout, ran.stderr) == ("[]\n", "digits: mlp\n")


# ------------------------------------------------------------ a real notebook


def executed(folder: Path, *cells: str) -> list[list[Any]]:
    """Outputs of the cells, run in `folder` by a kernel of this very interpreter."""
    spec = folder / "kernels" / "this"
    spec.mkdir(parents=True)
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (spec / "kernel.json").write_text(json.dumps({"argv": command, "display_name": "this", "language": "python"}))
    specs = KernelSpecManager(kernel_dirs=[str(spec.parent)], ensure_native_kernel=False)
    manager = AsyncKernelManager(kernel_name="this", kernel_spec_manager=specs)
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    place = {"metadata": {"path": str(folder)}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # the client leaves sockets to the garbage collector
        NotebookClient(notebook, km=manager, timeout=300, resources=place).execute()
        del manager
        gc.collect()
    return [cell.outputs for cell in notebook.cells]


TRAIN = """
import jaxtrain as jt
run = jt.train("digits", **{"model.kind": "mlp", "train.duration": "2ep"})
"""
INTERRUPT = """
import os, signal, threading
class Interrupt(threading.Thread):
    def run(self):
        while not os.path.exists("second/metrics.jsonl"):
            threading.Event().wait(0.1)
        os.kill(os.getpid(), signal.SIGINT)
Interrupt(daemon=True).start()
stopped = jt.train("digits", run_dir="second", **{"model.kind": "mlp", "train.duration": "9999ep"})
"""
BREAK = """
import IPython.display
def display(*objects, **options):
    raise RuntimeError("no front end")
IPython.display.display = display
jt.train("digits", **{"model.kind": "mlp", "train.duration": "2ep"}).close()
"""


def test_a_real_notebook_has_one_output_a_run_and_can_be_interrupted(tmp_path: Path) -> None:
    states = "print(run.stop.state, stopped.stop.state, stopped.exit_code)"
    trained, stopped, asked, broken = executed(tmp_path, TRAIN, INTERRUPT, states, BREAK)
    for outputs in (trained, stopped):
        assert [output.output_type for output in outputs] == ["display_data"]
    text, html = (trained[0].data[kind] for kind in ("text/plain", "text/html"))
    assert text.splitlines()[0].startswith("digits: mlp, ")
    assert "\ntest: accuracy 0." in text
    assert "test: accuracy 0." in html
    assert TRACK not in html
    assert "building" not in text
    assert "stopping after this step and saving" in stopped[0].data["text/plain"]
    assert TRACK not in stopped[0].data["text/html"]
    assert asked[0].text == "done interrupted 130\n"
    assert {(output.output_type, output.get("name")) for output in broken} == {("stream", "stderr")}  # no html of rich
    assert "\ntest: accuracy 0." in "".join(output.text for output in broken)
