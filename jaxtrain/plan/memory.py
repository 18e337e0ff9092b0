"""What a run holds on one device, in bytes, before it runs.

In: a Job. Out: `Memory`, from the compiled step (`compiled`: exact for this backend) or counted from the traced program
(`counted`: for another card, as a band). Nothing is run or allocated. Arrays are counted as their shardings say.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxtrain.build import Job
from jaxtrain.core.state import weights_for_evaluation
from jaxtrain.data.order import sequential_rows
from jaxtrain.parallel import mesh as meshes
from jaxtrain.parallel import rules
from jaxtrain.plan.units import MIB

BATCHES = {"resident": 1, "direct": 2, "prefetch": 5}
"""What is on the device of what is fed at one time: all rows; or the batch in use and the next; of a thread that reads
ahead three in its queue and one in its hand besides."""
WORKSPACE = 256 * MIB
"""What a GPU's libraries take besides: a CUDA context is outside of jax's share, work space of cuDNN and cuBLAS inside.
A round figure, in the upper end of a band only."""


@dataclass(frozen=True)
class Way:
    """How memory is found: `step` without the evaluation, which is cheaper; `run` with it."""

    name: str
    step: Callable[[Job], Memory]
    run: Callable[[Job], Memory]


@dataclass(frozen=True)
class Memory:
    """Bytes on one device.

    parameters, optimizer, averages, statistics: the state. rows: of training, all of them or the batches on their way.
    step: temporary, most of it gradients and activations; where it is counted, the upper end. evaluation: the same of
    an evaluation. saving: a second state while a checkpoint is written. gradients: what they are of `step`.
    slack: how much less `step` may be; 0 where it is compiled.
    """

    parameters: int
    optimizer: int
    averages: int
    statistics: int
    rows: int
    step: int
    evaluation: int
    saving: int
    gradients: int
    slack: int = 0

    @property
    def state(self) -> int:
        """What is there from the first step to the last."""
        return self.parameters + self.optimizer + self.averages + self.statistics

    @property
    def total(self) -> int:
        """The most that is there at one time."""
        return self.state + self.rows + self.saving + max(self.step, self.evaluation)

    @property
    def least(self) -> int:
        """The lower end of the band; the total, where it is compiled."""
        return self.state + self.rows + self.saving + max(self.step - self.slack, self.evaluation)


def compiled_step(job: Job) -> Memory:
    """Of the program that this backend runs, without the evaluation."""
    return _memory(job, _temporary(job.compiled))


def compiled(job: Job) -> Memory:
    """Of the two programs that this backend runs: a step, an evaluation."""
    batch = _evaluation_batch(job)
    if not batch:
        return compiled_step(job)
    evaluation: Any = job.eval_step
    program = evaluation.lower(*weights_for_evaluation(job.abstract_state), batch).compile()
    more = 0 if job.feed_kind == "resident" else 2 * _bytes(batch.values())  # metrics are merged one batch late
    return dataclasses.replace(compiled_step(job), evaluation=_temporary(program) + more)


def counted(job: Job) -> Memory:
    """Of the traced program, for a card that is not here, as a band: it needs `least` to `total`.

    Activations are given up as gradients come, so of a step at least the larger of the two is there, and of the
    activations a compiler may compute a fifth again rather than keep them; at most there are both and the update, a
    quarter more for what is being computed, and a work space. An evaluation, which keeps none, is not counted.
    """
    parts = job.mesh.shape["data"] * job.mesh.shape["fsdp"] * job.mesh.shape["context"]
    saved, gradients = math.ceil(job.cost.saved_bytes / parts), _bytes(job.abstract_state["params"].values())
    least, most = max(4 * saved // 5, gradients), math.ceil(1.25 * (saved + 2 * gradients)) + WORKSPACE
    return dataclasses.replace(_memory(job, most), slack=most - least, saving=0)


def _memory(job: Job, step: int) -> Memory:
    rows = BATCHES[job.feed_kind] * _bytes(jax.tree.leaves(job.expected[1]))
    if job.feed_kind == "resident":  # then those of the evaluation stay there too
        rows += _bytes(_evaluation_batch(job).values()) * -(-job.dataset.eval_rows("validation") // job.eval_batch)
    state = {name: _bytes(jax.tree.leaves(part)) for name, part in job.abstract_state.items()}
    named = ("params", "opt_state", "ema")
    saving = sum(state.values()) if job.devices.platform == "cpu" else 0
    return Memory(
        parameters=state["params"],
        optimizer=state["opt_state"],
        averages=state.get("ema", 0),
        statistics=sum(size for name, size in state.items() if name not in named),
        rows=rows,
        step=step,
        evaluation=0,
        saving=saving,
        gradients=_bytes(job.abstract_state["params"].values()),
    )


COMPILED = Way("compiled", compiled_step, compiled)
COUNTED = Way("counted", counted, counted)


def _evaluation_batch(job: Job) -> dict[str, Any]:
    """Abstract, with shardings; {} without validation rows."""
    rows = job.dataset.eval_rows("validation")
    if not rows:
        return {}
    batch = job.dataset.evaluation("validation", *sequential_rows(0, rows, job.eval_batch))
    shardings = meshes.batch_shardings(job.mesh, batch)
    return {n: jax.ShapeDtypeStruct(np.shape(x), x.dtype, sharding=shardings[n]) for n, x in batch.items()}


def _temporary(program: Any) -> int:
    """Beside the arguments: what is freed at the end, and results that do not take the place of an argument."""
    found = program.memory_analysis()
    if found is None:  # a backend that does not tell: then only what is counted is compared
        return 0
    return int(found.temp_size_in_bytes + max(found.output_size_in_bytes - found.alias_size_in_bytes, 0))


def _bytes(arrays: Iterable[Any]) -> int:
    return sum(map(rules.bytes_per_device, arrays))
