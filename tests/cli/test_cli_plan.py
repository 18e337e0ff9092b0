"""jaxtrain plan: what it prints, its exit codes, its JSON."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from cli_helpers import SHORT, TINY, one_line, process

PARAMETERS = 4 * (64 * 16 + 16 + 16 * 10 + 10)


def test_a_plan_says_memory_work_time_and_disk_and_runs_nothing(cli: Any) -> None:
    answer = cli("plan", "digits", *SHORT, "--quiet")
    assert (answer.code, answer.err) == (0, "")
    text = answer.out
    assert text.startswith("digits: 1,210 parameters, fp32, 64 rows a step, one device\n")
    assert re.search(r"\n  parameters +4\.7 KiB  counted\n  optimizer \(adamw\) +9\.5 KiB  counted\n", text)
    assert re.search(r"\n  step: activations, gradients +[\d.]+ [KM]iB  compiled; gradients: 4\.7 KiB\n", text)
    assert re.search(r"\n  most at one time +[\d.]+ [KM]iB\nfits: [\d.]+ [KM]iB.*; [\d,.]+ GiB are ", text)
    assert re.search(r"\na step: [\d.]+ kFLOP, at least .*; 20 steps, .* \(", text)
    assert text.splitlines()[-1].startswith("a checkpoint: about 14.2 KiB; of 3 that are kept, and one being written: ")
    assert not list(Path.cwd().iterdir())


def test_what_does_not_fit_ends_with_2_and_with_what_would(cli: Any) -> None:
    big = (*SHORT, "--model.hidden=[256]", "--train.global_batch_size=512", "--quiet")
    own = json.loads(cli("plan", "digits", *big, "--json").out)
    half = json.loads(cli("plan", "digits", *big, "--json", "--train.micro_batch_size=256").out)
    assert half["need"] < own["need"]
    answer = cli("plan", "digits", *big, f"--memory={half['need']}")
    assert answer.code == 2
    assert re.search(
        r"\ndoes not fit: .* are asked for on a device\n  this fits: --train\.micro_batch_size=256 \(", answer.out
    )
    answer = cli("plan", "digits", *SHORT, "--memory=2KiB", "--quiet")
    assert answer.code == 2
    assert "\n  nothing that was tried fits: a smaller model, shorter rows or more devices are needed\n" in answer.out


def test_the_json_holds_bytes_seconds_and_operations(cli: Any) -> None:
    found = json.loads(cli("plan", "digits", *SHORT, "--json", "--quiet", "--memory=1GiB").out)
    assert (found["verdict"], found["how"]) == ("fits", "compiled")
    assert found["room"] == {"bytes": 2**30, "what": "asked for on a device", "shared": False}
    own = found["memory"]
    assert own["parameters"] == own["gradients"] == PARAMETERS
    assert found["need"] == sum(
        own[n] for n in ("parameters", "optimizer", "averages", "statistics", "rows", "saving")
    ) + max(own["step"], own["evaluation"])
    assert found["steps"] == 20
    assert found["flops"] == 2 * 64 * (64 * 16 + 16 * 10) * 3 - 2 * 64 * 64 * 16  # inputs have no gradient
    assert found["seconds"] is None or found["seconds"] > 0


def test_more_devices_than_there_are_are_simulated() -> None:
    answer = process("plan", "digits", *TINY, "--devices=4", "--mesh.fsdp=4", "--model.hidden=[2048]", "--json")
    assert answer.returncode == 0, answer.stderr
    own = json.loads(answer.stdout)["memory"]
    whole = 4 * (64 * 2048 + 2048 + 2048 * 10 + 10)
    assert whole / 4 <= own["parameters"] <= whole / 4 + 4 * (2048 + 10)


def test_what_is_no_memory_and_what_is_no_key_are_one_line(cli: Any) -> None:
    answer = cli("plan", "digits", "--memory=much", "--quiet")
    assert (answer.code, answer.out) == (2, "")
    assert one_line(answer.err).startswith("'much' is no amount of memory; allowed: ")
    answer = cli("plan", "digits", "--model.hiden=[3]", "--quiet")
    assert (answer.code, answer.out) == (2, "")


def test_a_run_can_be_tried_without_a_plan(cli: Any) -> None:
    answer = cli("train", "digits", "--no-plan", "--print-config")
    assert " fit: never" in answer.out
    assert " fit: check" in cli("train", "digits", "--print-config").out
