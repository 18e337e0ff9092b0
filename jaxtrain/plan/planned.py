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
from jaxtrain.plan.memory import Memory, Way
from jaxtrain.plan.roofline import Roof
from jaxtrain.plan.units import of_bytes, of_seconds, si

VERDICTS = {"fits": "fits", "borderline": "may fit", "no": "does not fit"}


@dataclass(frozen=True)
class Plan:
    """need: bytes that are compared with `room`, the upper end where they are counted. least: the lower end, then.

    how: compiled or counted. flops, seconds: of a step; the seconds at least, None where no peak is known.
    checkpoint: bytes of one on disk. kept: how many are there at most. choices: what fits, where the run does not.
    """

    memory: Memory
    how: str
    need: int
    least: int
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
        """Whether the run has the memory that it needs, for sure."""
        return self.need <= self.room.bytes

    @property
    def verdict(self) -> str:
        """fits, borderline (within a counted band), no."""
        return "fits" if self.fits else "borderline" if self.least <= self.room.bytes else "no"

    def to_json(self) -> dict[str, Any]:
        """All of it; bytes, seconds, operations."""
        return {"verdict": self.verdict, **dataclasses.asdict(self)}


def plan(
    job: Job, room: Limit | None = None, *, way: Way = memory.COMPILED, roof: Roof | None = None, search: bool = True
) -> Plan:
    """Of the program that this backend runs, or counted for other devices.

    room, roof: of other devices than those that are here. search: for what fits, where it does not.
    """
    room = room or limit(job.devices)
    own = way.run(job)
    need, least = (
        fitting.needed(own, job, room),
        fitting.needed(dataclasses.replace(own, step=own.step - own.slack), job, room),
    )
    if way is memory.COMPILED:
        roof = roof or roofline.of_job(job)
    kept = job.config.checkpoint.keep_last + job.config.checkpoint.keep_best
    if job.steps.keep_every:
        kept += job.steps.total // job.steps.keep_every
    return Plan(
        memory=own,
        how=way.name,
        need=need,
        least=least,
        room=room,
        flops=job.model_flops,
        seconds=roofline.least_seconds(job, roof) if roof else None,
        roof=roof,
        steps=job.steps.total,
        checkpoint=rules.state_bytes(job.abstract_state)[1],
        kept=kept,
        choices=tuple(fitting.search(job, room, way)) if search and need > room.bytes else (),
    )


def lines(plan: Plan, job: Job) -> list[str]:
    """The table, the verdict, work and time, the disk."""
    own, config = plan.memory, job.config
    count = sum(row[2] for row in summary.rows(job.plain.params))
    on = meshes.words(job.mesh) if job.mesh.size > 1 else "one device"
    batch = f"{config.train.global_batch_size} {job.dataset.unit} a step"
    if job.spec.micro_batches > 1:
        batch += f" in {job.spec.micro_batches} micro-batches"
    out = [f"{config.name}: {count:,} parameters, {job.precision.name}, {batch}, {on}", *_table(plan, job)]
    together = f", {of_bytes(plan.need)} on all devices of this machine" if plan.need != own.total else ""
    band = f"{of_bytes(own.least)} to " if plan.least < plan.need else ""
    out.append(
        f"{VERDICTS[plan.verdict]}: {band}{of_bytes(own.total)}{together}; "
        f"{of_bytes(plan.room.bytes)} are {plan.room.what}"
    )
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


def _table(plan: Plan, job: Job) -> list[str]:
    own = plan.memory
    parts = [
        ("parameters", own.parameters, "counted"),
        (f"optimizer ({job.config.optimizer.kind})", own.optimizer, "counted"),
        ("averaged weights", own.averages, "counted"),
        ("statistics and counters", own.statistics, "counted"),
        ("rows, all of them" if job.feed_kind == "resident" else "batches on their way", own.rows, "counted"),
        ("step: activations, gradients", own.step, f"{plan.how}; gradients: {of_bytes(own.gradients)}"),
        ("evaluation, not at that time", own.evaluation, plan.how),
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
