"""Moments in 8 bits on 8 simulated devices: the same bits, split like their parameter, with nothing more to send."""

from __future__ import annotations

from typing import Any

import pytest
from parallel_helpers import result_of

MANY = ["fsdp 8", "data 2 x fsdp 2 x tensor 2"]


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    return result_of("moments_worker.py")


@pytest.mark.parametrize("name", MANY)
def test_the_same_gradients_give_the_same_bits_on_any_mesh(name: str, result: dict[str, Any]) -> None:
    differing, values = result["differing"][name]
    assert values > 500_000
    assert sum(differing) == 0


@pytest.mark.parametrize("name", MANY)
def test_every_mesh_trains_what_one_device_trains(name: str, result: dict[str, Any]) -> None:
    one, other = result["int8"]["one"], result["int8"][name]
    assert len(one["losses"]) == 12
    # Gradients are summed in another order, and a value on the border of two codes then falls to the other side.
    assert other["losses"] == pytest.approx(one["losses"], rel=3e-5)
    assert result["float32"]["one"]["losses"] != pytest.approx(one["losses"], rel=3e-5)  # the control
    assert other["executables"] == 1
    assert one["losses"][-1] < 0.5 * one["losses"][0]


@pytest.mark.parametrize("name", MANY)
def test_codes_are_split_like_their_parameter(name: str, result: dict[str, Any]) -> None:
    found = result["int8"][name]
    assert found["codes"] == found["spec"] == ("(None, 'fsdp')" if name == "fsdp 8" else "('fsdp', 'tensor')")
    # [1, 384] scales of a [128, 384] kernel: split where the axis divides.
    assert found["scales"] == ("(None, 'fsdp')" if name == "fsdp 8" else "(None, 'tensor')")


@pytest.mark.parametrize("name", ["one", *MANY])
def test_a_device_holds_a_quarter_of_the_bytes_of_moments(name: str, result: dict[str, Any]) -> None:
    ours, full = result["int8"][name], result["float32"][name]
    assert ours["held"] == [ours["table"], ours["table"]]
    # 2 + 8/128 bytes in place of 8, but for the embedding and the norms.
    assert 2.0625 / 8 < ours["moments"] / full["moments"] < 0.29


def test_moments_in_8_bits_are_not_sent(result: dict[str, Any]) -> None:
    assert result["int8"]["fsdp 8"]["sent"] == result["float32"]["fsdp 8"]["sent"]
    ours, full = (result[dtype]["data 2 x fsdp 2 x tensor 2"]["sent"] for dtype in ("int8", "float32"))
    largest = ours.pop("all-reduce") - full.pop("all-reduce")  # of blocks that lie on two devices
    assert ours == full
    assert 0 < largest < 10_000


def test_a_run_goes_on_in_another_mesh(result: dict[str, Any]) -> None:
    found = result["resumed"]
    assert found["losses"] == pytest.approx(result["int8"]["one"]["losses"], rel=3e-5)
    assert (found["codes"], found["dtype"]) == ("(None, 'fsdp')", "int8")
