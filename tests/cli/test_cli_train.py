"""jaxtrain train: flags, what it prints where, run folders, dry run, overfitting, eager steps."""

from __future__ import annotations

import json
import math
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
from cli_helpers import SHORT, TINY, one_line, tree

import jaxtrain as jt
from jaxtrain.config import load
from jaxtrain.hooks.folder import RunFolder


def config_of(run: str | Path) -> Any:
    return load(RunFolder(Path(run)).resolved)


# ------------------------------------------------------------ a run


def test_results_go_to_stdout_with_the_folder_last_and_progress_to_stderr(cli: Any) -> None:
    answer = cli("train", "digits", *SHORT)
    assert answer.code == 0
    *figures, folder = answer.results
    assert re.fullmatch(r"runs/digits/\d{8}T\d{6}Z", folder)
    result = json.loads((Path(folder) / "result.json").read_text())
    assert figures == [f"test/{name} {result['test'][name]:.6g}" for name in sorted(result["test"])]
    assert "test/accuracy" in answer.out
    for words in ("compiling ...", "digits: mlp, 1,210 parameters", "done (20 steps) in ", "best step "):
        assert words in answer.err
    assert "\x1b" not in answer.err


def test_quiet_prints_nothing_on_stderr(cli: Any) -> None:
    answer = cli("train", "digits", *SHORT, "--quiet")
    assert (answer.code, answer.err) == (0, "")
    assert answer.results[-1].startswith("runs/digits/")


def test_dropped_keys_of_another_kind_are_noted(cli: Any) -> None:
    answer = cli("train", "digits", "--model.kind=mlp", "--print-config")
    assert answer.err.splitlines() == [
        "note: model.kind=mlp: model.channels dropped, mlp has none",
        "note: model.kind=mlp: model.dense dropped, mlp has none",
    ]


# ------------------------------------------------------------ flags


def test_flags_may_stand_before_and_after_the_config_with_and_without_equals(cli: Any) -> None:
    after = cli("train", "digits", "--optimizer.peak_lr=1e-3", "--precision=bf16", "--print-config")
    before = cli("train", "--optimizer.peak_lr", "1e-3", "--precision", "bf16", "--print-config", "digits")
    assert (after.code, before.code, after.err, before.err) == (0, 0, "", "")
    assert after.out == before.out
    assert "peak_lr: 0.001" in after.out
    assert "precision: bf16" in after.out
    assert after.out != cli("train", "digits", "--print-config").out


def test_of_a_flag_given_twice_the_last_wins(cli: Any) -> None:
    assert "seed: 3" in cli("train", "digits", "--train.seed=1", "--train.seed=3", "--print-config").out


@pytest.mark.parametrize("keys", [[], ["--optimizer.kind=muon", "--schedule.kind=wsd", "--train.time_budget=2h"]])
def test_the_printed_config_loads_back_equal(cli: Any, tmp_path: Path, keys: list[str]) -> None:
    answer = cli("train", "digits", *keys, "--print-config")
    assert answer.code == 0
    (tmp_path / "printed.yaml").write_text(answer.out)
    pairs = [flag[2:].split("=") for flag in keys]
    assert load(tmp_path / "printed.yaml") == load("digits", pairs)
    assert list(Path.cwd().iterdir()) == []


def test_the_summary_lists_every_array(cli: Any) -> None:
    answer = cli("train", "digits", *SHORT, "--summary")
    assert answer.code == 0
    rows = [line.split() for line in answer.results]
    assert [row[-2:] for row in rows if row and row[0] == "total"] == [["1,210", "4,840"]]
    assert sum(len(row) == 5 or len(row) == 4 for row in rows) >= 4
    assert list(Path.cwd().iterdir()) == []


@pytest.mark.parametrize("micro", [None, 16])
def test_the_last_line_of_the_summary_counts_a_step_by_hand(cli: Any, micro: int | None) -> None:
    """64 -> 16 -> 10 on 64 rows: products of 64 x 16 and 16 x 10 weights; backward, each once more for its weights,
    and the second once more for what goes into it."""
    split = [f"--train.micro_batch_size={micro}"] if micro else []
    answer = cli("train", "digits", *SHORT, *split, "--model.dropout=0", "--summary")
    first, second = 2 * 64 * 64 * 16, 2 * 64 * 16 * 10
    forward, step = first + second, 2 * first + 3 * second
    assert (forward, step) == (151_552, 323_584)
    parts = re.fullmatch(
        r"a step on 64 rows: 152 kFLOP forward, 324 kFLOP with the backward pass; "
        r"(\d\.\d) MiB of activations kept between the two(, in each of 4 micro-batches)?",
        answer.results[-1],
    )
    assert parts
    assert bool(parts[2]) == bool(micro)
    wider = cli("train", "digits", *SHORT, "--model.hidden=[32]", "--model.dropout=0", "--summary")  # the control
    assert "a step on 64 rows: 303 kFLOP forward, 647 kFLOP" in wider.results[-1]


def test_the_summary_of_a_language_model_counts_rows_of_tokens(cli: Any) -> None:
    Path("rain.txt").write_text("the rain in spain stays mainly in the plain\n" * 60)
    keys = ["--data.path=rain.txt", "--data.block_size=16", "--data.test_fraction=0.1"]
    answer = cli("train", "shakespeare", *keys, "--summary")
    assert answer.results[-1].startswith("a step on 12 rows of 16 tokens: ")


# ------------------------------------------------------------ run folders


def test_a_used_run_folder_is_refused_with_the_ways_on(cli: Any, trained: Path) -> None:
    before = tree(trained)
    answer = cli("train", "digits", *SHORT, f"--run-dir={trained}", "--quiet")
    assert (answer.code, answer.out) == (2, "")
    assert one_line(answer.err) == (
        f"run folder '{trained}' is used (state done); continue with: jaxtrain resume {trained}, or --resume=auto; "
        "start anew with --overwrite"
    )
    assert tree(trained) == before


def test_overwrite_starts_anew(cli: Any, trained: Path) -> None:
    (trained / "old").write_text("")
    answer = cli("train", "digits", *SHORT, "--log.wrong_samples=3", f"--run-dir={trained}", "--overwrite", "--quiet")
    assert (answer.code, answer.results[-1]) == (0, str(trained))
    assert not (trained / "old").exists()
    assert config_of(trained).log.wrong_samples == 3
    assert [row["step"] for row in jt.load_run(trained).metrics() if "train/loss" in row] == [1, 20]


def test_resume_auto_of_a_finished_run_says_so(cli: Any, trained: Path) -> None:
    answer = cli("train", "digits", *SHORT, f"--run-dir={trained}", "--resume=auto", "--quiet")
    assert answer.code == 0
    assert "step 20 of 20 is reached" in answer.err
    assert answer.results[-1] == str(trained)


def preempted(folder: Path, sealed: bool = True) -> None:
    """Make a finished run look as if SIGTERM had come; `sealed`: after its last save."""
    RunFolder(folder).write_status(state="preempted", reason="SIGTERM")
    if not sealed:
        for manifest in folder.glob("checkpoints/*/manifest.json"):
            manifest.unlink()
        (folder / "result.json").unlink()
        RunFolder(folder).write_status(last_sealed=None, best=None)


def test_resume_auto_goes_on_with_the_unfinished_run_of_this_config_only(
    cli: Any, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(trained.parents[2])
    preempted(trained)
    for step in (20,):
        (trained / f"checkpoints/{step:09d}/manifest.json").unlink()
    answer = cli("train", "digits", *SHORT, "--resume=auto", "--quiet")
    assert (answer.code, answer.results[-1]) == (0, str(trained.relative_to(Path.cwd())))
    assert (trained / "journal.jsonl").exists()
    other = cli("train", "digits", *SHORT, "--resume=auto", "--quiet")  # that one is finished now
    assert other.code == 0
    assert other.results[-1] != answer.results[-1]


def test_resume_auto_of_a_run_that_was_stopped_before_its_first_save_begins_it_anew(cli: Any, trained: Path) -> None:
    """What a queue starts again and again must not need a person because it was preempted while compiling."""
    preempted(trained, sealed=False)
    answer = cli("train", "digits", *SHORT, f"--run-dir={trained}", "--resume=auto", "--quiet")
    assert (answer.code, answer.results[-1:]) == (0, [str(trained)])
    assert RunFolder(trained).read_status()["state"] == "done"


def test_a_run_folder_below_a_file_is_refused_before_any_step(cli: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    answer = cli("train", "digits", *SHORT, f"--run-dir={tmp_path / 'file' / 'run'}", "--quiet")
    assert (answer.code, answer.out) == (2, "")
    assert one_line(answer.err) == f"run folder '{tmp_path / 'file' / 'run'}' cannot be written: Not a directory"


# ------------------------------------------------------------ trying things


def test_a_dry_run_leaves_nothing_behind(cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    answer = cli("train", "digits", *TINY, "--dry-run", "--quiet")
    assert answer.code == 0
    assert re.fullmatch(
        r"dry run passed: 2 steps, evaluation, save, restore \(\d+ arrays equal\), report; nothing is left behind\n",
        answer.out,
    )
    assert list(place.iterdir()) == []
    assert list(Path.cwd().iterdir()) == []


def test_overfitting_a_batch_brings_the_training_loss_down_and_says_what_it_does(cli: Any) -> None:
    keys = (*TINY, "--model.dropout=0", "--train.duration=200", "--evaluate.every=100", "--optimizer.peak_lr=1e-2")
    answer = cli("train", "digits", *keys, "--overfit-batches", "1")
    assert answer.code == 0
    assert "overfitting 64 rows: they are trained on and evaluated" in answer.err
    run = jt.load_run(answer.results[-1])
    losses = [row["train/loss"] for row in run.metrics() if "train/loss" in row]
    assert losses[0] > 2.0
    assert losses[-1] < 0.02
    assert config_of(run.path).train.overfit_batches == 1


def test_without_it_as_many_steps_do_not_get_there(cli: Any) -> None:
    keys = (*TINY, "--model.dropout=0", "--train.duration=200", "--evaluate.every=100", "--optimizer.peak_lr=1e-2")
    answer = cli("train", "digits", *keys, "--quiet")
    assert [r["train/loss"] for r in jt.load_run(answer.results[-1]).metrics() if "train/loss" in r][-1] > 0.02


MODEL = """
import jax, jax.numpy as jnp
from flax import nnx

class Logarithm(nnx.Module):
    def __call__(self, x):
        return jnp.log({inside})

class Net(nnx.Module):
    def __init__(self, features, classes, width=8, *, rngs):
        self.first = nnx.Linear(features, width, rngs=rngs)
        self.squash = Logarithm()
        self.head = nnx.Linear(width, classes, rngs=rngs)

    def __call__(self, x):
        return self.head(self.squash(self.first(x.reshape(x.shape[0], -1))))
"""


def eager(cli: Any, inside: str, steps: int = 2) -> Any:
    """`--eager` of a model of one's own that takes the logarithm of `inside`."""
    assert cli("init").code == 0
    own = Path("my_model.py").read_text()
    loss = own[own.index("def loss(") :]
    Path("my_model.py").write_text(f"import optax\n{MODEL.format(inside=inside)}\n\n{loss}")
    plain = ("--augment.shift=0", "--model.args.width=8", "--optimizer.kind=sgd", "--schedule.kind=constant")
    return cli("train", "config.yaml", *plain, f"--eager={steps}")


def test_eager_steps_print_every_layer(cli: Any) -> None:
    answer = eager(cli, "1.0 + jnp.abs(x)")
    assert answer.code == 0
    *layers, first, second = answer.results
    assert [line.split()[0] for line in layers] == ["first", "squash", "head", "(model)"]
    assert layers[0].split()[1:4] == ["Linear", "[64,", "8]"]
    assert "NOT FINITE" not in answer.out
    losses = [float(re.match(r"step \d: loss (\S+)  grad_norm ", line)[1]) for line in (first, second)]
    assert all(math.isfinite(loss) for loss in losses)
    assert not Path("runs").exists()


def test_eager_steps_name_the_layer_where_nan_begins(cli: Any) -> None:
    answer = eager(cli, "-1.0 - jnp.abs(x)")
    assert answer.code == 78
    marked = [line.split()[0] for line in answer.results if line.endswith("NOT FINITE")]
    assert marked == ["squash", "head", "(model)"]
    assert re.fullmatch(
        r"first not finite: output of layer squash \(rows \d+(, \d+){7}, \.\.\.\)", answer.err.splitlines()[-1]
    )
    assert "step 2" not in answer.out
