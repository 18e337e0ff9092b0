"""Eight devices do what one does: the same rows, the same loss, the same statistics; each holds its share."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    """What `mesh_worker.py` saw on 8 simulated devices."""
    worker = Path(__file__).with_name("mesh_worker.py")
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, str(worker)], capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(next(x for x in done.stdout.splitlines() if x.startswith("RESULT "))[7:])


MANY = ["2-direct", "8-direct", "8-resident"]


def test_there_are_eight_devices_and_minus_one_takes_them_all(result: dict[str, Any]) -> None:
    assert result["devices"] == result["all"] == 8
    assert result["first"] == [0, 1]


def test_rows_come_in_one_order_on_1_2_and_8_devices(result: dict[str, Any]) -> None:
    runs = result["trained"]
    assert runs["1-direct"]["ids"] == runs["2-direct"]["ids"] == runs["8-direct"]["ids"]
    assert len({tuple(ids) for ids in runs["1-direct"]["ids"]}) == 10  # the control: batches differ


@pytest.mark.parametrize("many", MANY)
def test_the_loss_of_ten_steps_is_that_of_one_device(many: str, result: dict[str, Any]) -> None:
    one, other = result["trained"]["1-direct"], result["trained"][many]
    np.testing.assert_allclose(other["losses"], one["losses"], rtol=1e-5)
    assert one["losses"][-1] < 0.8 * one["losses"][0]
    for name, value in one["params"].items():
        np.testing.assert_allclose(other["params"][name], value, rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("many", MANY)
def test_batch_norm_statistics_are_those_of_the_whole_batch(many: str, result: dict[str, Any]) -> None:
    one, other = result["trained"]["1-direct"]["statistics"], result["trained"][many]["statistics"]
    assert one.keys() == other.keys() == {"norms.0.mean", "norms.0.var"}
    for name, value in one.items():
        np.testing.assert_allclose(other[name], value, rtol=1e-5, atol=1e-6)
        assert not np.allclose(value, 1.0 if name.endswith("var") else 0.0, atol=1e-3)  # the control: they moved


def test_accumulation_on_eight_devices_is_accumulation_on_one(result: dict[str, Any]) -> None:
    one, eight = result["accumulated_alone"], result["accumulated"]
    np.testing.assert_allclose(eight["losses"], one["losses"], rtol=1e-5)


@pytest.mark.parametrize("run", ["1-direct", *MANY])
def test_21_rows_count_21_in_evaluation(run: str, result: dict[str, Any]) -> None:
    seen = result["trained"][run]
    assert seen["eval_batch"] == {"1": 21, "2": 22, "8": 24}[run[0]]  # padded up to what divides
    assert seen["counts"] == [21.0]
    assert seen["confusion"] == 21
    for name, value in result["trained"]["1-direct"]["evaluation"].items():
        assert seen["evaluation"][name] == pytest.approx(value, rel=1e-5), name


def test_each_device_holds_its_share_of_the_rows_and_all_of_the_scalars(result: dict[str, Any]) -> None:
    for name, shapes in result["shards_8"].items():
        tail = [6] if name == "inputs" else []
        assert shapes == ([[]] * 8 if name == "epoch" else [[5, *tail]] * 8), name
    assert result["shards_1"]["inputs"] == [[40, 6]]  # the control
    assert result["scalar"] is True


@pytest.mark.parametrize("feed", ["direct", "resident"])
def test_the_program_of_a_device_computes_its_share_only(feed: str, result: dict[str, Any]) -> None:
    rows = result["trained"][f"8-{feed}"]["activations"]
    assert 5 in rows
    assert 40 not in rows
    assert 40 in result["trained"]["1-direct"]["activations"]  # the control


def test_the_state_is_whole_on_every_device_before_and_after(result: dict[str, Any]) -> None:
    for name, run in result["trained"].items():
        assert run["replicated"], name
        assert run["devices_of_params"] == [int(name[0])]
        assert run["executables"] == 1, name


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("too_many", "mesh.data: 9 devices asked for, 8 are there; allowed: -1 or 1..8"),
        (
            "indivisible",
            "train.global_batch_size: 42 rows cannot be split over 8 devices; "
            "allowed: multiples of 8, such as 40 or 48 (or mesh.data=1)",
        ),
        (
            "small",
            "train.global_batch_size: 3 rows cannot be split over 8 devices; "
            "allowed: multiples of 8, such as 8 (or mesh.data=1)",
        ),
        (
            "micro",
            "train.micro_batch_size: 20 rows cannot be split over 8 devices; "
            "allowed: multiples of 8, such as 16 or 24 (or mesh.data=1)",
        ),
    ],
)
def test_what_does_not_divide_is_one_line_with_the_numbers(case: str, expected: str, result: dict[str, Any]) -> None:
    assert result["errors"][case] == ["ConfigError", expected]


def test_what_divides_and_what_needs_not_is_taken(result: dict[str, Any]) -> None:
    assert result["errors"]["fits"] == result["errors"]["one"] == ["none", ""]
