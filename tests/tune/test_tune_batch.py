"""The batch size: the largest that fits, the smallest that is fast, the noise of gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jaxtrain.config import load
from jaxtrain.hardware.memory import Limit
from jaxtrain.plan import fitting, memory
from jaxtrain.tune import batch
from jaxtrain.tune.batch import Size, batch_test, chosen_size, noise_scale

TINY: dict[str, Any] = {
    "name": "tiny",
    "model": {"kind": "mlp", "hidden": [32]},
    "augment": {"shift": 0},
    "train": {"duration": 20, "global_batch_size": 96},
    "log": {"tensorboard": False},
}


def test_the_smallest_of_the_nearly_fastest_is_chosen() -> None:
    sizes = [Size(8, 1.0, 0.0), Size(16, 1.05, 0.0), Size(32, 1.3, 0.0), Size(64, 2.65, 0.0), Size(128, 5.2, 0.0)]
    assert [round(size.rows_per_second, 1) for size in sizes] == [8.0, 15.2, 24.6, 24.2, 24.6]
    assert chosen_size(sizes) == 32
    assert chosen_size([*sizes, Size(256, 9.0, 0.0)]) == 256


def test_the_noise_scale_of_gradients_with_a_known_one_is_found() -> None:
    rng = np.random.default_rng(0)
    mean, sd = rng.normal(size=200) * 0.1, 1.5
    want = 200 * sd**2 / (mean**2).sum()
    norms = []
    for rows in (8, 16, 32, 64, 128, 256):
        draws = mean + sd * rng.normal(size=(400, 200)) / np.sqrt(rows)
        norms.append((rows, float((draws**2).sum(1).mean())))
    found = noise_scale(norms)
    assert found is not None
    assert abs(found / want - 1) < 0.1
    assert noise_scale(norms[:1]) is None
    assert noise_scale([(8, 1.0), (16, 1.1)]) is None  # larger batches with larger gradients: no noise to be seen


def test_a_small_set_limits_the_batch_and_few_programs_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[int] = []
    real = memory.compiled_step

    def counted(job: Any) -> memory.Memory:
        compiled.append(job.config.train.global_batch_size)
        return real(job)

    monkeypatch.setattr(memory, "compiled_step", counted)
    rows = 100
    arrays = batch_rows(rows)
    found = batch_test(load(TINY), Limit(2**40, "a lot", shared=True), **arrays)
    assert (found.largest, found.limited) == (64, "training rows")
    assert len(compiled) <= 4
    assert max(size.rows for size in found.sizes) == 64
    assert [size.rows for size in found.sizes] == sorted(size.rows for size in found.sizes)


def batch_rows(rows: int) -> dict[str, Any]:
    from jaxtrain.data.sources import ArraySource

    rng = np.random.default_rng(0)
    split = np.repeat(np.arange(3), [rows, 8, 8]).astype(np.int8)
    inputs = rng.normal(size=(len(split), 12)).astype(np.float32)
    return {"source": ArraySource("made", inputs, inputs[:, :3].argmax(1), split=split)}


def test_with_little_memory_what_is_chosen_fits_and_the_next_size_does_not() -> None:
    config = load(TINY)
    needs = {}
    for size in (16, 32, 64, 128):
        job = batch.build(load(config, [("train.global_batch_size", size)]))
        needs[size] = fitting.needed(memory.compiled_step(job), job, Limit(0, "", shared=True))
    assert needs[32] < needs[64]
    found = batch_test(config, Limit(needs[64] - 1, "free in a test", shared=True))
    assert (found.largest, found.limited) == (32, "memory")
    assert found.keys == {"train.micro_batch_size": found.chosen}
    assert 96 % found.chosen == 0


def test_gradients_are_measured_where_training_has_brought_the_parameters_and_stand_still(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[Any] = []
    real = batch._trained
    monkeypatch.setattr(batch, "_trained", lambda job: seen.append(real(job)) or seen[0])
    config = load(TINY)
    batch_test(config)
    (state,) = seen
    assert int(state["step"]) == 20
    job = batch._of_size(batch.build(config), 64)
    one, two = batch._measured(job, state, 64), batch._measured(job, state, 64)
    assert abs(one.grad_norm2 / two.grad_norm2 - 1) < 0.2  # of more or fewer batches, as the clock allows
