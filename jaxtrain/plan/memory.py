"""What a run holds on one device, in bytes, before it runs.

In: a Job. Out: `Memory`, from the compiled step (`compiled`: exact for this backend) or counted from the traced program
(`counted`: for another card, as a band). Nothing is run or allocated. Arrays are counted as their shardings say.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxtrain.build import Job
from jaxtrain.core.state import weights_for_evaluation
from jaxtrain.data.order import sequential_rows
from jaxtrain.parallel import mesh as meshes
from jaxtrain.parallel import rules

MIB, GIB = 2**20, 2**30
BATCHES = {"resident": 1, "direct": 2, "prefetch": 5}
"""What is on the device of what is fed at one time: all rows; or the batch in use and the next; of a thread that reads
ahead three in its queue and one in its hand besides."""
WORKSPACE = 256 * MIB
"""What a GPU's libraries take besides: a CUDA context is outside of jax's share, work space of cuDNN and cuBLAS inside.
A round figure, in the upper end of a band only."""


@dataclass(frozen=True)
class Memory:
    """Bytes on one device.

    parameters, optimizer, averages, statistics: the state. rows: of training, all of them or the batches on their way.
    step: temporary, most of it gradients and activations; of the counted ones the upper end. evaluation: the same of an
    evaluation. saving: a second state while a checkpoint is written. slack: how much less `step` may be; 0: compiled.
    gradients: of `step`, counted.
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


def compiled(job: Job, *, evaluation: bool = True) -> Memory:
    """Of the program that this backend runs. evaluation: compile that too."""
    step = _temporary(job.compiled)
    other, batch = 0, _evaluation_batch(job)
    if evaluation and batch:
        program = job.eval_step.lower(*weights_for_evaluation(job.abstract_state), batch).compile()  # type: ignore[attr-defined]
        other = _temporary(program)
    return _memory(job, step, other)


def counted(job: Job) -> Memory:
    """Of the traced program, whatever runs it. The band of `step`: activations are given up as gradients come, so at
    least the larger of the two is there; at most both, a quarter more for what is being computed, and a work space.
    """
    parts = job.mesh.shape["data"] * job.mesh.shape["fsdp"] * job.mesh.shape["context"]
    saved, gradients = math.ceil(job.cost.saved_bytes / parts), _bytes(job.abstract_state["params"].values())
    least, most = max(saved, gradients), math.ceil(1.25 * (saved + gradients)) + WORKSPACE
    return _memory(job, most, 0, slack=most - least)


def _memory(job: Job, step: int, evaluation: int, slack: int = 0) -> Memory:
    """evaluation: temporary; its batches are added, all of them where a run keeps them on the device."""
    fed, batch = _bytes(jax.tree.leaves(job.expected[1])), _bytes(_evaluation_batch(job).values())
    kept = 0
    if job.feed_kind == "resident":
        kept = batch * -(-job.dataset.eval_rows("validation") // job.eval_batch)
    else:
        evaluation += 2 * batch  # metrics are merged one batch late
    state = {name: _bytes(jax.tree.leaves(part)) for name, part in job.abstract_state.items()}
    named = ("params", "opt_state", "ema")
    saving = sum(state.values()) if job.devices.platform == "cpu" else 0
    return Memory(
        parameters=state["params"],
        optimizer=state["opt_state"],
        averages=state.get("ema", 0),
        statistics=sum(size for name, size in state.items() if name not in named),
        rows=fed * BATCHES[job.feed_kind] + kept,
        step=step,
        evaluation=evaluation,
        saving=saving,
        gradients=_bytes(job.abstract_state["params"].values()),
        slack=slack,
    )


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
    return int(found.temp_size_in_bytes + max(found.output_size_in_bytes - found.alias_size_in_bytes, 0))


def _bytes(arrays: Iterable[Any]) -> int:
    return sum(map(rules.bytes_per_device, arrays))


def of_bytes(count: float) -> str:
    """1288490189 -> "1.2 GiB"."""
    for size, name in ((GIB, "GiB"), (MIB, "MiB"), (1024, "KiB")):
        if count >= size:
            return f"{count / size:,.{1 if count < 100 * size else 0}f} {name}"
    return f"{count:.0f} bytes"
