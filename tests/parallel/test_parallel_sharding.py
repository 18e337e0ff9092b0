"""One gpt in every mesh of 8 simulated devices: one loss, parts of the promised size, one line for what cannot be."""

from __future__ import annotations

import re
from typing import Any

import pytest
from parallel_helpers import result_of

MESHES = ["data 8", "fsdp 8", "data 2 x fsdp 4", "data 2 x tensor 4", "data 2 x fsdp 2 x tensor 2"]
MESHES += ["data 2 x context 4", "tensor 2 x context 2"]
STACKED = ["pipe 4 x data 2", "pipe 2 x fsdp 2 x tensor 2", "pipe 2 x context 2 x data 2", "fsdp 8"]


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    return result_of("sharding_worker.py")


@pytest.mark.parametrize("name", [*MESHES, "direct", "accumulated"])
def test_every_mesh_trains_what_one_device_trains(name: str, result: dict[str, Any]) -> None:
    one, other = result["one"], result[name]
    assert len(other["losses"]) == 20
    assert other["losses"] == pytest.approx(one["losses"], rel=1e-5)
    assert other["eval"] == pytest.approx(one["eval"], rel=1e-5)
    assert other["norm"] == pytest.approx(one["norm"], rel=1e-5)
    assert other["executables"] == 1
    # The control: another seed is seen, and the network learns.
    assert result["other seed"]["losses"] != pytest.approx(one["losses"], rel=1e-4)
    assert one["losses"][-1] < 0.9 * one["losses"][0]


@pytest.mark.parametrize("name", STACKED)
def test_a_stack_in_every_mesh_trains_what_one_device_trains(name: str, result: dict[str, Any]) -> None:
    one, other = result["stacked: one"], result[f"stacked: {name}"]
    assert other["losses"] == pytest.approx(one["losses"], rel=1e-5)
    assert other["eval"] == pytest.approx(one["eval"], rel=1e-5)
    assert other["norm"] == pytest.approx(one["norm"], rel=1e-5)
    assert other["names"] == sorted(part.split()[0] for part in name.split(" x "))
    assert other["held"] == [other["table"][0]] * 2
    # The control: stages that keep what they should hand on.
    assert result["no stage hands on"]["losses"][4] != pytest.approx(one["losses"][4], rel=1e-3)
    assert one["losses"][-1] < 0.9 * one["losses"][0]


def test_a_stage_holds_its_own_blocks(result: dict[str, Any]) -> None:
    pipe, one = result["stacked: pipe 4 x data 2"], result["stacked: one"]
    name = "blocks.stacked.attention.qkv.kernel"
    assert pipe["spec"][name] == pipe["moment"] == pipe["average"] == "('pipe',)"
    assert pipe["spec"]["blocks.stacked.hidden_norm.scale"] == "('pipe',)"
    assert pipe["spec"]["token_embed.embedding"] == "()"
    assert one["held"][0] / 4 < pipe["held"][0] < one["held"][0] / 3
    assert pipe["sent"]["collective-permute"] > 0
    assert "collective-permute" not in result["stacked: fsdp 8"]["sent"]
    all_axes = result["stacked: pipe 2 x fsdp 2 x tensor 2"]["spec"]
    assert all_axes[name] == "('pipe', 'fsdp', 'tensor')"
    assert all_axes["blocks.stacked.hidden.down.kernel"] == "('pipe', 'tensor', 'fsdp')"


def test_dropout_in_a_pipe_hides_something_of_every_micro_batch(result: dict[str, Any]) -> None:
    assert result["dropped"]["losses"][0] != pytest.approx(result["stacked: one"]["losses"][0], rel=1e-4)
    assert len(set(result["dropped"]["losses"])) == 5


@pytest.mark.parametrize("name", MESHES)
def test_the_mesh_is_the_one_that_was_asked_for(name: str, result: dict[str, Any]) -> None:
    assert result[name]["names"] == sorted(part.split()[0] for part in name.split(" x "))


@pytest.mark.parametrize("name", MESHES)
def test_a_device_holds_what_the_table_says(name: str, result: dict[str, Any]) -> None:
    held, table, whole = result[name]["held"], result[name]["table"], result["one"]["held"][0]
    assert held == [table[0], table[0]]  # at the start, and after 20 donated steps
    assert table[1] == whole
    parts = {"data": 1, "context": 1}
    least = 1
    for axis, size in (part.split() for part in name.split(" x ")):
        least *= int(size) if axis not in parts else 1
    # Norms, and what tensor parallelism leaves alone, stay whole: a little more than an equal part.
    assert whole / least <= table[0] <= whole / least * (1.25 if least > 1 else 1.0)


def test_parameters_are_sent_and_not_activations(result: dict[str, Any]) -> None:
    parameters = result["one"]["parameters"]
    for name in ("fsdp 8", "data 2 x fsdp 4"):
        sent = result[name]["sent"]
        assert 0.8 * parameters <= sent["all-gather"] <= parameters  # once each, small ones are whole
        assert sent.keys() <= {"all-gather", "all-reduce", "reduce-scatter"}
    assert "all-gather" not in result["data 8"]["sent"]
    assert "all-gather" not in result["data 2 x tensor 4"]["sent"]
    assert result["one"]["sent"] == {}
    # The control: left to the compiler, a network of usual width sends its activations.
    assert result["left alone"]["all-gather"] > 5 * result["wide"]["all-gather"]
    assert "all-to-all" in result["left alone"]
    assert "all-to-all" not in result["wide"]


def test_a_run_goes_on_in_another_mesh(result: dict[str, Any]) -> None:
    found = result["resumed"]
    assert len(found["moved"]) == 20
    assert found["moved"] == pytest.approx(found["straight"], rel=1e-5)
    assert found["split"] == "(None, 'tensor')"
    assert found["evaluated"][0] == pytest.approx(found["evaluated"][1], rel=1e-6)


def test_columns_then_rows(result: dict[str, Any]) -> None:
    spec = result["data 2 x tensor 4"]["spec"]
    assert spec["blocks.0.attention.qkv.kernel"] == "(None, 'tensor')"
    assert spec["blocks.0.attention.out.kernel"] == "('tensor',)"
    assert spec["blocks.1.hidden.gate.kernel"] == spec["blocks.1.hidden.up.kernel"] == "(None, 'tensor')"
    assert spec["blocks.1.hidden.down.kernel"] == "('tensor',)"
    assert spec["norm.scale"] == "()"
    both = result["data 2 x fsdp 2 x tensor 2"]
    assert both["spec"]["blocks.1.attention.qkv.kernel"] == "('fsdp', 'tensor')"
    assert both["moment"] == both["average"] == "('fsdp', 'tensor')"


def test_rows_are_split_by_data_and_fsdp_and_tokens_by_context(result: dict[str, Any]) -> None:
    assert result["data 2 x fsdp 4"]["batch"] == "(('data', 'fsdp'),)"
    assert result["data 2 x context 4"]["batch"] == "(('data', 'fsdp'), 'context')"


def test_the_summary_has_the_parts(result: dict[str, Any]) -> None:
    text = result["summary"]
    assert re.search(r"^blocks\.0\.attention\.qkv\.kernel +\[32, 96\] +fsdp, tensor +3,072$", text, re.MULTILINE)
    assert re.search(r"^norm\.scale +\[32\] +whole +128$", text, re.MULTILINE)
    one, whole = (x / 2**20 for x in result["data 2 x fsdp 2 x tensor 2"]["table"])
    said = f"a device holds {one:,.2f} of the {whole:,.2f} MiB of parameters, moments and averages"
    assert f" parameters; on data 2 x fsdp 2 x tensor 2 {said}\n" in text


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (
            "heads",
            "mesh.tensor: 3 does not divide model.heads=4 and model.kv_heads=4 and model.mlp_width=88; "
            "allowed: 1, 2, 4",
        ),
        ("groups", "mesh.tensor: 4 does not divide model.kv_heads=2; allowed: 1, 2"),
        ("context", "mesh.context: 5 does not divide data.block_size=16; allowed: 1, 2, 4, 8, 16"),
        (
            "devices",
            "mesh: fsdp 3: 3 does not divide the 8 devices there are; allowed: 1, 2, 4, 8, or a number for mesh.data",
        ),
        ("many", "mesh: data 4 x fsdp 4 = 16 devices asked for, 8 are there; allowed: 1..8"),
        (
            "pipe",
            "mesh.pipe: 2 splits a stack of blocks, which this model has not; "
            "allowed: 1, or model.kind gpt with model.scan_layers=true",
        ),
        ("stages", "mesh.pipe: 4 does not divide model.layers=2; allowed: 1, 2"),
        (
            "rows",
            "train.global_batch_size: 12 rows cannot be split over 8 devices; "
            "allowed: multiples of 8, such as 8 or 16 (or less of mesh.data, mesh.fsdp)",
        ),
    ],
)
def test_what_cannot_be_is_one_line_with_the_numbers(case: str, expected: str, result: dict[str, Any]) -> None:
    assert result["errors"][case] == expected
