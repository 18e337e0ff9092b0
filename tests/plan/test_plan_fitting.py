"""The largest micro-batch that fits, what gives way where none does, and how a run that does not fit is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from plan_helpers import TINY, job_of

import jaxtrain as jt
from jaxtrain.hardware.memory import Limit
from jaxtrain.plan import fitting, memory
from jaxtrain.plan.fitting import DoesNotFit, largest, micro_sizes, needed

BIG_BATCH = {"model.hidden": [256], "train.global_batch_size": 512}


def room_of(count: float) -> Limit:
    return Limit(int(count), "free in a test", shared=True)


# ---------------------------------------------------------------- the search itself


def asked(sizes: list[int], need: Any, most: float) -> tuple[int | None, list[int]]:
    questions: list[int] = []

    def counted(size: int) -> int:
        questions.append(size)
        return int(need(size))

    return largest(sizes, counted, int(most)), questions


@pytest.mark.parametrize("rows", [64, 100, 360, 1024])
def test_a_line_is_found_with_few_questions_and_its_next_size_would_not_fit(rows: int) -> None:
    sizes = [n for n in range(1, rows + 1) if rows % n == 0]
    for most in range(1000, 1000 + 7 * rows + 14, 7):
        size, questions = asked(sizes, lambda n: 1000 + 7 * n, most)
        fits = [n for n in sizes if 1000 + 7 * n <= most]
        assert size == (fits[-1] if fits else None)
        assert len(questions) <= 5
        assert all(n <= rows for n in questions)


def test_of_any_rising_need_what_is_chosen_has_been_asked_for_and_fits() -> None:
    rng = np.random.default_rng(0)
    sizes = [2**k for k in range(11)]
    for _ in range(200):
        needs = dict(
            zip(sizes, np.cumsum(rng.exponential(size=11) * 10 ** rng.uniform(0, 4, 11)).astype(int), strict=True)
        )
        most = rng.uniform(0, 1.2 * needs[1024])
        size, questions = asked(sizes, needs.__getitem__, most)
        assert len(set(questions)) == len(questions)
        if size is None:
            assert needs[1] > int(most)
        else:
            assert size in questions
            assert needs[size] <= int(most)


def test_nothing_is_chosen_from_nothing_or_where_the_first_does_not_fit() -> None:
    assert asked([], lambda n: 0, 5) == (None, [])
    assert asked([1, 2], lambda n: 6, 5) == (None, [1])
    assert asked([4], lambda n: 5, 5) == (4, [4])


def test_micro_batches_divide_the_batch_and_are_few_where_each_is_compiled_by_itself() -> None:
    assert micro_sizes(job_of(**{"train.global_batch_size": 60})) == [1, 2, 3, 4, 5, 6, 10, 12, 15, 20, 30, 60]
    convolutions = job_of(**{"model.kind": "cnn", "train.global_batch_size": 60})
    if convolutions.spec.unroll:  # on a CPU
        assert micro_sizes(convolutions) == [15, 20, 30, 60]


# ---------------------------------------------------------------- on real programs


def test_the_chosen_micro_batch_is_the_largest_that_fits() -> None:
    job = job_of(**BIG_BATCH, **{"evaluate.batch_size": 1})
    needs = {}
    for size in (64, 128, 256):
        train = job.config.train.model_copy(update={"micro_batch_size": size})
        needs[size] = memory.compiled(job.remake(job.config.model_copy(update={"train": train}))).total
    assert needs[64] < needs[128] < needs[256]
    for most in (needs[128], needs[256] - 1):
        choice = fitting.search(job, room_of(most), most=1)[0]
        assert choice.keys == {"train.micro_batch_size": 128}
        assert choice.need == needs[128]
        assert choice.work == 1.0


def test_where_the_state_is_too_large_the_moments_give_way_and_what_is_dearer_is_not_tried() -> None:
    job = job_of(**{"model.hidden": [1024, 1024], "train.global_batch_size": 1})
    own = memory.compiled(job)
    found = fitting.search(job, room_of(own.total - own.parameters // 4), most=9)
    assert found[0].keys == {"optimizer.moment_dtype": "bfloat16"}
    assert found[0].said.endswith("MiB, the first moment has fewer digits")
    assert found[0].need <= own.total - own.parameters // 4 < own.total
    assert all(not set(choice.keys) > set(found[0].keys) for choice in found[1:])


def test_an_evaluation_that_is_too_large_gets_smaller_batches() -> None:
    job = job_of(**{**BIG_BATCH, "data.feed": "prefetch", "evaluate.batch_size": 4096, "train.global_batch_size": 16})
    own = memory.compiled(job)
    assert own.evaluation > own.step
    room = room_of(own.total - (own.evaluation - own.step) // 2)
    assert fitting._needed_by_run(job, room) == own.total > room.bytes
    (choice,) = fitting.search(job, room, most=1)
    assert choice.keys == {"train.micro_batch_size": 8, "evaluate.batch_size": 8}


def test_nothing_is_found_where_nothing_fits_and_nothing_is_compiled() -> None:
    job = job_of()
    assert fitting.search(job, room_of(5000)) == []
    assert "compiled" not in job.__dict__


def test_devices_of_a_machine_share_its_memory_and_gpus_do_not() -> None:
    job = job_of()
    own = memory.compiled_step(job)
    here = len(job.mesh.local_devices)
    assert needed(own, job, room_of(1)) == here * own.total
    assert needed(own, job, Limit(1, "on a GPU", shared=False)) == own.total


# ---------------------------------------------------------------- a run


@pytest.fixture
def little(monkeypatch: pytest.MonkeyPatch) -> int:
    """As much memory as the run takes with half of its batch."""
    job = job_of(**BIG_BATCH, **{"train.micro_batch_size": 256})
    most = needed(memory.compiled(job), job, room_of(0))
    monkeypatch.setattr(fitting, "limit", lambda devices: room_of(most))
    return most


def test_a_run_that_does_not_fit_is_refused_with_what_fits(
    little: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(DoesNotFit) as error:
        jt.train(TINY, run_dir=tmp_path / "run", **BIG_BATCH)
    line = str(error.value)
    assert line.startswith("the run needs ")
    assert " are free in a test; this fits: --train.micro_batch_size=256 (" in line
    assert line.endswith("); --train.fit=auto takes it by itself, --no-plan tries it as it is")
    assert error.value.exit_code == 2
    assert "looking for settings that fit" in capfd.readouterr().err
    assert not list((tmp_path / "run").glob("checkpoints/*"))


def test_auto_takes_what_fits_says_so_and_keeps_it(little: int, tmp_path: Path) -> None:
    with jt.train(TINY, run_dir=tmp_path / "run", quiet=True, **BIG_BATCH, **{"train.fit": "auto"}) as run:
        assert run.exit_code == 0
        assert "it takes --train.micro_batch_size=256" in (run.path / "run.log").read_text()
    assert yaml.safe_load((tmp_path / "run/resolved.yaml").read_text())["train"]["micro_batch_size"] == 256
    with jt.resume(tmp_path / "run", quiet=True, **{"train.duration": 30}) as longer:
        assert (longer.exit_code, int(longer.state["step"])) == (0, 30)  # type: ignore[index]


def test_never_tries_it_as_it_is(little: int, tmp_path: Path) -> None:
    with jt.train(TINY, run_dir=tmp_path / "run", quiet=True, **BIG_BATCH, **{"train.fit": "never"}) as run:
        assert json.loads((run.path / "status.json").read_text())["state"] == "done"


def test_where_nothing_fits_auto_refuses_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting, "limit", lambda devices: room_of(5000))
    with pytest.raises(DoesNotFit, match=r"and 4\.9 KiB are free in a test; nothing fits that was tried; a smaller"):
        jt.train(TINY, run_dir=tmp_path / "run", quiet=True, **{"train.fit": "auto"})
    assert not (tmp_path / "run").exists()
