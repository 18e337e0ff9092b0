"""What a run holds, against the arrays themselves and the compiled programs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import pytest
from plan_helpers import NETWORKS, job_of

from jaxtrain.core.state import weights_for_evaluation
from jaxtrain.data import feed
from jaxtrain.plan import memory
from jaxtrain.plan.units import MIB

PARAMETERS = 4 * (64 * 16 + 16 + 16 * 10 + 10)


def real_bytes(tree: Any) -> int:
    return sum(array.size * array.dtype.itemsize for array in jax.tree.leaves(tree))


def test_the_state_is_what_its_arrays_hold() -> None:
    job = job_of(**{"train.ema_decay": 0.9})
    own, state = memory.compiled_step(job), job.init()
    assert own.parameters == real_bytes(state["params"]) == PARAMETERS
    assert own.optimizer == real_bytes(state["opt_state"])
    assert own.averages == real_bytes(state["ema"]) == PARAMETERS
    assert own.state == own.saving == real_bytes(state)
    assert own.gradients == PARAMETERS
    assert memory.compiled_step(job_of()).averages == 0


def test_rows_are_those_that_are_on_the_device() -> None:
    job = job_of()
    fed = real_bytes(job.feeder()(0))
    batch = real_bytes(memory._evaluation_batch(job))
    assert -(-job.dataset.eval_rows("validation") // 64) == 6
    assert memory.compiled_step(job).rows == fed + 6 * batch
    job = job_of(**{"data.feed": "prefetch"})
    assert memory.compiled_step(job).rows == (feed._DEPTH + 2) * real_bytes(job.host_batches()(0))


def test_what_a_step_and_an_evaluation_take_is_what_their_programs_say() -> None:
    job = job_of(**{"evaluate.batch_size": 1000})
    own = memory.compiled(job)
    step = job.lower().compile().memory_analysis()
    assert own.step == step.temp_size_in_bytes + step.output_size_in_bytes - step.alias_size_in_bytes
    batch = memory._evaluation_batch(job)
    found = job.eval_step.lower(*weights_for_evaluation(job.abstract_state), batch).compile().memory_analysis()
    assert own.evaluation == found.temp_size_in_bytes + found.output_size_in_bytes
    assert own.evaluation > own.step
    assert own.total == own.least == own.state + own.saving + own.rows + own.evaluation
    assert own.total - memory.compiled_step(job).total == own.evaluation - own.step


def test_a_backend_that_does_not_tell_its_memory_stops_no_run() -> None:
    assert memory._temporary(SimpleNamespace(memory_analysis=lambda: None)) == 0


@pytest.mark.parametrize("name", NETWORKS)
def test_what_is_counted_holds_what_is_compiled(name: str) -> None:
    """The band for a card that is not here, against the program of the one that is."""
    job = job_of(**NETWORKS[name])
    band, real = memory.counted(job), memory.compiled_step(job)
    assert real.step >= 8 * MIB
    assert band.step - band.slack <= real.step <= band.step - memory.WORKSPACE
    assert (band.saving, band.evaluation) == (0, 0)
    assert band.least < band.total
    for part in ("parameters", "optimizer", "averages", "statistics", "rows"):
        assert getattr(band, part) == getattr(real, part)
