"""The command as a whole: tour, help, errors of usage, exit codes, what it imports, completion."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cli_helpers import SHORT, one_line, process

from jaxtrain import __version__
from jaxtrain.cli.main import main
from jaxtrain.config import NeedsPerson, shipped

VERBS = ("train", "resume", "verify-resume", "eval", "predict", "runs", "report", "checkpoints", "init", "config")


def test_the_tour_is_seven_lines(cli: Any) -> None:
    answer = cli()
    assert (answer.code, answer.err) == (0, "")
    assert len(answer.results) == 7
    for words in ("jaxtrain train digits", "jaxtrain predict last INPUT...", "jaxtrain --help lists all verbs"):
        assert words in answer.out


def test_version(cli: Any) -> None:
    answer = cli("--version")
    assert (answer.code, answer.out, answer.err) == (0, f"jaxtrain {__version__}\n", "")


@pytest.mark.parametrize("arguments", [[], *([verb] for verb in VERBS), *(["config", v] for v in ("list", "schema"))])
def test_help_is_under_every_verb(cli: Any, arguments: list[str]) -> None:
    answer = cli(*arguments, "--help")
    assert (answer.code, answer.err) == (0, "")
    assert answer.out.strip().startswith(f"Usage: jaxtrain {' '.join(arguments)}".strip())


def test_config_alone_shows_its_help(cli: Any) -> None:
    answer = cli("config")
    assert len((answer.out + answer.err).splitlines()) > 5
    assert (answer.out + answer.err).strip().startswith("Usage: jaxtrain config")


def test_help_lists_all_verbs(cli: Any) -> None:
    listed = {line.split()[0] for line in cli("--help").out.splitlines() if line.startswith("  ") and line.split()}
    assert set(VERBS) <= listed


WRONG = [  # arguments, words of the one line
    (["trian", "digits"], ["'trian' is no verb", "did you mean train?", "allowed: train, resume"]),
    (["train"], ["Missing argument 'config'"]),
    (["train", "digits", "--ovrwrite"], ["--ovrwrite"]),
    (["train", "digits", "--resume=always"], ["always", "never", "auto"]),
    (["train", "digits", "--overfit-batches=-1"], ["--overfit-batches", "greater than or equal to 0"]),
    (["train", "digits", "more"], ["more"]),
    (["train", "digts"], ["config 'digts'", "did you mean digits?"]),
    (["train", "nowhere/my.yaml"], ["config 'nowhere/my.yaml': no such file", "digits"]),
    (["train", "digits", "--optimizer.peek_lr=1e-3"], ["unknown key optimizer.peek_lr", "mean optimizer.peak_lr?"]),
    (["train", "digits", "--optimizer.peek_lr", "1e-3"], ["unknown key optimizer.peek_lr", "mean optimizer.peak_lr?"]),
    (["train", "digits", "--optimizer.peak_lr"], ["--optimizer.peak_lr needs a value"]),
    (["train", "digits", "--optimizer.peak_lr=-1"], ["optimizer.peak_lr", "-1", "greater than 0"]),
    (["train", "digits", "--optimizer.kind=adamm"], ["optimizer.kind: 'adamm'", "did you mean adam"]),
    (["train", "digits", "--optimzer.kind=sgd"], ["unknown key optimzer", "did you mean optimizer?"]),
    (["train", "digits", "--optimizer=sgd"], ["optimizer: 'sgd' is no section", "--optimizer.peak_lr=VALUE"]),
    (["train", "digits", "--precision", "bf17"], ["precision: 'bf17'", "did you mean bf16?"]),
    (["train", "digits", "--model.kind=resnet", "--model.depth=19"], ["model.depth: 19"]),
    (
        ["train", "mnist", "--quiet"],
        ["data.path: ", "/here/mnist': no such folder", "say where it is: --data.path=..."],
    ),
    (["train", "images", "--quiet"], ["data.path: ", "no such folder", "say where it is: --data.path=..."]),
    (["train", "shakespeare", "--quiet"], ["/here/input.txt': no such file or folder", "--data.path=..."]),
    (["resume", "last"], ["run 'last': no runs in"]),
    (["resume"], ["Missing argument 'run'"]),
    (["eval", "last"], ["run 'last': no runs in"]),
    (["predict", "last", "x.png"], ["run 'last': no runs in"]),
    (["predict", "last"], ["Missing argument 'INPUT...'"]),
    (["predict", "last", "x.png", "--batch-size=0"], ["--batch-size", "greater than or equal to 1"]),
    (["report", "20260101"], ["run '20260101': no runs in"]),
    (["runs", "last", "last"], ["run 'last': no runs in"]),
    (["checkpoints", "last"], ["run 'last': no runs in"]),
    (["checkpoints", "last", "--prune", "--keep-last=0"], ["--keep-last", "greater than or equal to 1"]),
    (["config", "describe", "optimiser"], ["optimiser", "did you mean optimizer"]),
    (["config", "shema"], ["shema"]),
    (["init", "--from", "digts"], ["config 'digts'", "did you mean digits?"]),
]


@pytest.mark.parametrize(("arguments", "words"), WRONG, ids=[" ".join(a) for a, _ in WRONG])
def test_wrong_usage_is_one_line_on_stderr_and_leaves_nothing(cli: Any, arguments: list[str], words: list[str]) -> None:
    answer = cli(*arguments)
    assert (answer.code, answer.out) == (2, "")
    line = one_line(answer.err)
    for word in words:
        assert word in line
    assert list(Path.cwd().iterdir()) == []


def test_an_unexpected_error_is_one_line_with_its_type(cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **options: Any) -> Any:
        raise ValueError("boom\nand more")

    monkeypatch.setattr("jaxtrain.runner.train", broken)
    answer = cli("train", "digits", *SHORT, "--quiet")
    assert (answer.code, answer.out) == (1, "")
    assert one_line(answer.err) == "ValueError: boom (--debug shows the traceback)"
    with pytest.raises(ValueError, match="boom"):
        main(["train", "digits", *SHORT, "--quiet", "--debug"])
    with pytest.raises(ValueError, match="boom"):
        main(["--debug", "train", "digits", *SHORT, "--quiet"])


def test_an_error_a_person_must_mend_ends_with_78(cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **options: Any) -> Any:
        raise NeedsPerson("nothing is intact")

    monkeypatch.setattr("jaxtrain.runner.train", broken)
    answer = cli("train", "digits", *SHORT, "--quiet")
    assert (answer.code, answer.out, one_line(answer.err)) == (78, "", "nothing is intact")


def test_ctrl_c_before_a_run_begins_ends_with_130(cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: Any, **options: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("jaxtrain.runner.train", interrupted)
    answer = cli("train", "digits", *SHORT, "--quiet")
    assert (answer.code, answer.out) == (130, "")
    assert "Traceback" not in answer.err


# ------------------------------------------------------------ processes


def test_what_needs_no_jax_imports_none() -> None:
    code = """
import io, sys
import jaxtrain
from jaxtrain.cli.main import main
heavy = ("jax", "flax", "optax", "orbax", "numpy", "matplotlib", "sklearn")
def none(what):
    found = [name for name in heavy if name in sys.modules]
    assert not found, (what, found)
none("import")
for command in ("", "--help", "--version", "train --help", "resume --help", "train digits --print-config",
                "config list", "config schema", "config describe optimizer", "train digts", "trian"):
    try:
        main(command.split())
    except SystemExit:
        none(command)
jaxtrain.train
assert "jax" in sys.modules
print("done", file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == "done"


def test_a_pipe_that_is_closed_early_is_no_error() -> None:
    # `jaxtrain config schema | head -1`; the reader leaves after one line, long before the writer is through
    for command in ("config schema", "config describe"):
        writer = subprocess.Popen(
            [sys.executable, "-u", "-m", "jaxtrain", *command.split()], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        assert writer.stdout is not None
        assert writer.stdout.readline()
        writer.stdout.close()
        assert writer.stderr is not None
        assert writer.stderr.read() == b""
        writer.stderr.close()
        writer.wait(60)


def test_the_module_is_the_command() -> None:
    done = process("config", "list")
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.split()[0] for line in done.stdout.splitlines()] == list(shipped())


# ------------------------------------------------------------ completion


def complete(cli: Any, monkeypatch: pytest.MonkeyPatch, words: str) -> list[str]:
    monkeypatch.setenv("_JAXTRAIN_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split(" ")) - 1))
    answer = cli()
    assert answer.err == ""
    return [word for word in answer.results if word]


def test_the_shell_completes_verbs(cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(complete(cli, monkeypatch, "jaxtrain ")) >= set(VERBS)
    assert complete(cli, monkeypatch, "jaxtrain tr") == ["train"]


def test_the_shell_completes_shipped_configs_and_runs(cli: Any, monkeypatch: pytest.MonkeyPatch, trained: Path) -> None:
    assert complete(cli, monkeypatch, "jaxtrain train dig") == ["digits"]
    monkeypatch.chdir(trained.parents[2])
    assert complete(cli, monkeypatch, "jaxtrain resume ") == ["last", "20260101T000000Z"]
    assert complete(cli, monkeypatch, "jaxtrain report 2026") == ["20260101T000000Z"]


def test_the_shell_completes_options(cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert complete(cli, monkeypatch, "jaxtrain train digits --over") == ["--overwrite", "--overfit-batches"]
    assert complete(cli, monkeypatch, "jaxtrain train digits --se") == []  # --set is ours


@pytest.mark.parametrize("verb", ["train digits", "resume last"])
def test_the_shell_completes_config_keys(cli: Any, monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    found = complete(cli, monkeypatch, f"jaxtrain {verb} --optimizer.pe")
    assert found == ["--optimizer.peak_lr"]
    found = complete(cli, monkeypatch, f"jaxtrain {verb} --optimizer.kind=sgd --optim")
    assert {"--optimizer.kind", "--optimizer.peak_lr", "--optimizer.momentum"} <= set(found)
    assert all(word.startswith("--optimizer.") for word in found)
