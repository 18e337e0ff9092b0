"""The plan of a run: memory against its limit, work, time, bytes on disk; and what would fit where it does not.

In: a Job. Out: `Plan`, its lines for people, its JSON. Nothing is run or allocated.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from jaxtrain.build import Job
from jaxtrain.hardware.memory import Limit, limit
from jaxtrain.models import summary
from jaxtrain.parallel import mesh as meshes
from jaxtrain.parallel import rules
from jaxtrain.plan import fitting, memory, roofline
from jaxtrain.plan.fitting import Choice
from jaxtrain.plan.memory import Memory
from jaxtrain.plan.roofline import Roof
from jaxtrain.plan.units import of_bytes, of_seconds, si


@dataclass(frozen=True)
class Plan:
    """need: bytes that are compared with `room`. seconds: of a step, at least; None where no peak is known.

    checkpoint: bytes of one on disk. kept: how many are there at most. choices: what fits, where the run does not.
    """

    memory: Memory
    need: int
    room: Limit
    flops: int
    seconds: float | None
    roof: Roof | None
    steps: int
    checkpoint: int
    kept: int
    choices: tuple[Choice, ...]

    @property
    def fits(self) -> bool:
        """Whether the run has the memory that it needs."""
        return self.need <= self.room.bytes

    def to_json(self) -> dict[str, Any]:
        """All of it; bytes, seconds, operations."""
        return {"fits": self.fits, **dataclasses.asdict(self), "how": "compiled for this backend"}


def plan(job: Job, room: Limit | None = None) -> Plan:
    """Of the program that this backend runs. room: another limit than the memory that there is."""
    room = room or limit(job.devices)
    own = memory.compiled(job)
    need = fitting.needed(own, job, room)
    roof = roofline.of_job(job)
    kept = job.config.checkpoint.keep_last + job.config.checkpoint.keep_best
    if job.steps.keep_every:
        kept += job.steps.total // job.steps.keep_every
    return Plan(
        memory=own,
        need=need,
        room=room,
        flops=job.model_flops,
        seconds=roofline.least_seconds(job, roof) if roof else None,
        roof=roof,
        steps=job.steps.total,
        checkpoint=rules.state_bytes(job.abstract_state)[1],
        kept=kept,
        choices=() if need <= room.bytes else tuple(fitting.search(job, room)),
    )


def lines(plan: Plan, job: Job) -> list[str]:
    """The table, the verdict, work and time, the disk."""
    own, config = plan.memory, job.config
    count = sum(row[2] for row in summary.rows(job.plain.params))
    on = f"{job.devices.kind} ({job.devices.platform})"
    on += f", {meshes.words(job.mesh)}" if job.mesh.size > 1 else ""
    batch = f"{config.train.global_batch_size} {job.dataset.unit} a step"
    if job.spec.micro_batches > 1:
        batch += f" in {job.spec.micro_batches} micro-batches"
    out = [f"{config.name}: {count:,} parameters, {job.precision.name}, {batch}, on {on}", *_table(own, job)]
    together = f", {of_bytes(plan.need)} on all devices of this machine" if plan.need != own.total else ""
    verdict = "fits" if plan.fits else "does not fit"
    out.append(f"{verdict}: {of_bytes(own.total)}{together}; {of_bytes(plan.room.bytes)} are {plan.room.what}")
    for choice in plan.choices:
        out.append(f"  this fits: {choice.flags} ({choice.said})")
    if not plan.fits and not plan.choices:
        out.append("  nothing that was tried fits: a smaller model, shorter rows or more devices are needed")
    out.append(_work(plan))
    out.append(
        f"a checkpoint: about {of_bytes(plan.checkpoint)}; of {plan.kept} that are kept, and one being written: "
        f"{of_bytes((plan.kept + 1) * plan.checkpoint)}"
    )
    return out


def _table(own: Memory, job: Job) -> list[str]:
    parts = [
        ("parameters", own.parameters, "counted"),
        (f"optimizer ({job.config.optimizer.kind})", own.optimizer, "counted"),
        ("averaged weights", own.averages, "counted"),
        ("statistics and counters", own.statistics, "counted"),
        ("rows, all of them" if job.feed_kind == "resident" else "batches on their way", own.rows, "counted"),
        ("step: activations, gradients", own.step, f"compiled; gradients: {of_bytes(own.gradients)}"),
        ("evaluation, not at that time", own.evaluation, "compiled"),
        ("second state during a save", own.saving, "counted"),
        ("most at one time", own.total, ""),
    ]
    wide = max(len(name) for name, _, _ in parts)
    rows = [(name, of_bytes(size), how) for name, size, how in parts if size]
    return [f"  {name:<{wide}}  {size:>10}  {how}".rstrip() for name, size, how in rows]


def _work(plan: Plan) -> str:
    text = f"a step: {si(plan.flops)}FLOP"
    if plan.seconds is None or plan.roof is None:
        return text + "; no time: what these devices can do at most is not known"
    moves = f" and moves {si(plan.roof.bandwidth)}B/s" if plan.roof.bandwidth else ""
    return (
        f"{text}, at least {of_seconds(plan.seconds)}; {plan.steps:,} steps, {of_seconds(plan.steps * plan.seconds)} "
        f"({plan.roof.source}: {si(plan.roof.flops)}FLOP/s{moves})"
    )
