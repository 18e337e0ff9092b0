"""time/mfu: the model's operations of a step by its time, as a share of what the mesh's devices can do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from run_files import GPT, RAIN
from run_helpers import TINY, tiny

from jaxtrain.build import Job, build
from jaxtrain.config import load

MLP = 2 * 64 * (2 * 64 * 16 + 3 * 16 * 10)
"""64 rows through 64-16-10: forward and gradient of the weights, and from the second layer also that of the inputs."""


def gpt(place: Path, **keys: Any) -> Job:
    text = place / "rain.txt"
    text.write_text(40 * RAIN)
    config = TINY | {"model": GPT, "data": {"kind": "text", "path": str(text), "block_size": 16}}
    return build(load(config, {"mesh.data": 1, **keys}.items()))


@pytest.mark.parametrize("keys", [{}, {"train.micro_batch_size": 16}, {"optimizer.kind": "sgd"}])
def test_the_operations_of_an_mlp_are_those_counted_by_hand(keys: dict[str, Any]) -> None:
    job = build(load(TINY, {"mesh.data": 1, **keys}.items()))
    assert job.model_flops == MLP
    assert job.cost.step_flops == MLP


@pytest.mark.parametrize("lanes", [1, 2])
def test_what_is_computed_again_does_not_count(lanes: int, tmp_path: Path) -> None:
    plain = gpt(tmp_path, **{"train.lanes": lanes})
    again = gpt(tmp_path, **{"train.lanes": lanes, "model.remat": "full"})
    assert plain.model_flops == plain.cost.step_flops
    assert again.cost.step_flops > 1.2 * plain.cost.step_flops  # the control
    assert plain.model_flops <= again.model_flops <= 3 * plain.cost.forward_flops


def test_a_row_has_the_share_of_the_devices_that_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def peak(devices: Any, used: int) -> float:
        asked.append(used)
        return 1e9

    monkeypatch.setattr("jaxtrain.session.peak.peak", peak)
    with tiny(tmp_path / "run", **{"mesh.data": 1}) as run:
        rows = [row for row in run.metrics() if "train/loss" in row]
    assert asked == [1]
    assert len(rows) > 4
    for row in rows:
        assert row["time/mfu"] == pytest.approx(MLP / row["time/step"] / 1e9)
