"""The plan of a run on cards that are not here: memory as a band, least time, by the program and the catalogue.

In: a Job, built on the CPU in the card's precision, and a `Card`. Out: a `Plan`, or a line for every card. A program
compiled for a CPU says little of a GPU's temporary memory, so that is counted (`memory.counted`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxtrain.build import Job
from jaxtrain.hardware.catalogue import Card, cards, rate
from jaxtrain.hardware.devices import precision_of
from jaxtrain.hardware.memory import Limit
from jaxtrain.plan import memory, planned
from jaxtrain.plan.planned import Plan
from jaxtrain.plan.roofline import Roof
from jaxtrain.plan.units import GIB, of_bytes, of_seconds

SHARE = 0.75
"""Of a card's memory jax takes so much, unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise (docs.jax.dev,
"GPU memory allocation")."""


@dataclass(frozen=True)
class Ranked:
    """A card and the plan on it; seconds: of the whole run, at least; None: its rates are not known."""

    card: Card
    plan: Plan
    seconds: float | None


def precision(card: Card) -> str:
    """What `precision: auto` is on this card."""
    return precision_of(float(".".join(map(str, card.compute_capability))) if card.compute_capability else 0.0)


def plan_for(job: Job, card: Card, room: Limit | None = None, *, search: bool = True) -> Plan:
    """On as many of these cards as the job has devices. search: for what fits, where it does not."""
    room = room or Limit(int(SHARE * (card.memory or 0)), f"what jax may use on a {card.name}", shared=False)
    return planned.plan(job, room, way=memory.COUNTED, roof=_roof(job, card), search=search)


def _roof(job: Job, card: Card) -> Roof | None:
    per_second = rate(card, job.precision.name)
    if per_second is None:
        return None
    bandwidth = job.mesh.size * card.bandwidth if card.bandwidth else None
    return Roof(job.mesh.size * per_second, bandwidth, card.source)


def ranked(job_in: Callable[[str], Job]) -> list[Ranked]:
    """All cards that jax can use, the fastest first among those on which the run fits; the others by their memory.

    job_in(precision): the job, built once for each precision.
    """
    found = []
    jobs: dict[str, Job] = {}
    for card in cards():
        if card.compute_capability is None or not card.memory or card.jax.startswith("CPU only"):
            continue
        name = precision(card)
        job = jobs.setdefault(name, jobs.get(name) or job_in(name))
        plan = plan_for(job, card, search=False)
        found.append(Ranked(card, plan, plan.seconds and plan.steps * plan.seconds))
    order = ("fits", "borderline", "no")
    return sorted(found, key=lambda r: (order.index(r.plan.verdict), r.seconds or float("inf"), -(r.card.memory or 0)))


def table(found: Sequence[Ranked], have: Card | None = None) -> list[str]:
    """A line a card; with `have`: how many times as fast as that one, and the cheapest step up in words."""
    own = next((r for r in found if have and r.card.name == have.name), None)
    head = ("card", "memory", "needs", "verdict", "least step", "least run", *(("speed",) if own else ()))
    rows = [head]
    for r in found:
        step = of_seconds(r.plan.seconds) if r.plan.seconds else "?"
        run = of_seconds(r.seconds) if r.seconds else "?"
        band = f"{of_bytes(r.plan.least)} to {of_bytes(r.plan.need)}"
        speed = (f"{own.seconds / r.seconds:.1f}x" if own.seconds and r.seconds else "?",) if own else ()
        rows.append((r.card.name, f"{(r.card.memory or 0) / GIB:.0f} GiB", band, r.plan.verdict, step, run, *speed))
    wide = [max(len(row[i]) for row in rows) for i in range(len(head))]
    return ["  ".join(f"{cell:<{w}}" for cell, w in zip(row, wide, strict=True)).rstrip() for row in rows]
