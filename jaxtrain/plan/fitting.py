"""Which settings fit: the largest micro-batch, and where none does, what else gives way.

In: a Job and a limit in bytes. Out: `Choice`s, cheapest first, each proved by compiling the step that it makes. The
global batch stays, so steps, epochs and schedule do; what else changes is said. Nothing is run or allocated.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from jaxtrain.build import Job
from jaxtrain.config import ConfigError, RunConfig, UserError, load
from jaxtrain.hardware.devices import resolve_precision
from jaxtrain.hardware.memory import Limit, limit
from jaxtrain.parallel import mesh as meshes
from jaxtrain.parallel import processes
from jaxtrain.plan import memory
from jaxtrain.plan.memory import Memory, Way
from jaxtrain.plan.units import of_bytes

MICRO, EVALUATION = "train.micro_batch_size", "evaluate.batch_size"
SEARCH_SECONDS = 40.0
"""No further combination is begun after so long."""
UNROLLED = 4
"""Micro-batches of a step where each is compiled by itself (convolutions on a CPU): more would compile for minutes."""
NEAR = 1.02
"""What a line says to be over the limit by less than this is compiled too, to know."""


class DoesNotFit(ConfigError):
    """The run needs more memory than there is."""


@dataclass(frozen=True)
class Choice:
    """keys: {config key: value} to change. memory: of one device, as compiled with them. need: what that asks of the
    limit. work: operations of a step over those of the step asked for. says: what changes beside the micro-batch.
    """

    keys: Mapping[str, Any]
    memory: Memory
    need: int
    work: float
    says: str

    @property
    def flags(self) -> str:
        """As the command takes them."""
        return " ".join(f"--{key}={value}" for key, value in self.keys.items())

    @property
    def said(self) -> str:
        """What it needs and what it costs, in words."""
        more = [f"{100 * (self.work - 1):.0f} % more operations"] if self.work > 1.005 else []
        return ", ".join([of_bytes(self.need), *more, *([self.says] if self.says else [])])


@dataclass(frozen=True)
class Remedy:
    """A setting that takes less memory. cost: of a step's time and of what else it touches, roughly: the order.

    keys(job): {config key: value}; {} where a job cannot take it or has it. says: what it costs, in words.
    """

    says: str
    cost: float
    keys: Callable[[Job], dict[str, Any]]


def _where(section: str, key: str, now: Any, value: Any) -> Callable[[Job], dict[str, Any]]:
    def keys(job: Job) -> dict[str, Any]:
        there = getattr(getattr(job.config, section), key, None)
        return {f"{section}.{key}": value} if there == now else {}

    return keys


def _half_precision(job: Job) -> dict[str, Any]:
    able = resolve_precision("auto", job.devices).name == "bf16"
    return {"precision": "bf16"} if able and job.precision.name == "fp32" else {}


def _prefetch(job: Job) -> dict[str, Any]:
    return {"data.feed": "prefetch"} if job.feed_kind == "resident" else {}


def _split(job: Job) -> dict[str, Any]:
    many = job.mesh.shape["data"]
    return {"mesh.fsdp": many, "mesh.data": 1} if many > 1 and job.mesh.shape["fsdp"] == 1 else {}


def _offload(job: Job) -> dict[str, Any]:
    able = job.devices.platform != "cpu" and job.config.optimizer.offload == "none"
    return {"optimizer.offload": "host"} if able else {}


REMEDIES = (
    Remedy("fewer digits in the computation", 0.02, _half_precision),
    Remedy("batches come from the host", 0.05, _prefetch),
    Remedy("the first moment has fewer digits", 0.06, _where("optimizer", "moment_dtype", "float32", "bfloat16")),
    Remedy("moments are kept in blocks of 8 bits", 0.1, _where("optimizer", "moment_dtype", "float32", "int8")),
    Remedy("devices hold parts of the parameters and exchange them", 0.2, _split),
    Remedy("activations are computed a second time", 0.33, _where("model", "remat", "none", "full")),
    Remedy("moments live on the host and travel at each step", 0.5, _offload),
)


def needed(own: Memory, job: Job, room: Limit) -> int:
    """Bytes to compare with `room`: of one device, or of all that share the memory of this machine."""
    return _shared(own.total, job, room)


def _shared(each: int, job: Job, room: Limit) -> int:
    return each * (len(job.mesh.local_devices) if room.shared else 1)


def check(job: Job, tell: Callable[[str], None]) -> None:
    """Raise DoesNotFit for a run, compiled here, that needs more than there is; `tell` gets what would fit, by lines.

    Several processes go by the memory of the first, so that all refuse or none. `train.fit: never` looks at nothing.
    """
    if job.config.train.fit == "never":
        return
    room = limit(job.devices)
    need, there = processes.agree((_needed_by_run(job, room), room.bytes))
    if need <= there:
        return
    tell(f"{of_bytes(need)} are needed, {of_bytes(there)} are {room.what}; looking for settings that fit")
    raise refusal(search(job, room), need, room)


def refusal(choices: Sequence[Choice], need: int, room: Limit) -> DoesNotFit:
    """The one line, with the cheapest choice."""
    line = f"the run needs {of_bytes(need)}, and {of_bytes(room.bytes)} are {room.what}; "
    if not choices:
        return DoesNotFit(line + "nothing fits that was tried; a smaller model does, or --no-plan to try it as it is")
    return DoesNotFit(
        f"{line}this fits: {choices[0].flags} ({choices[0].said}); --train.fit=auto takes it by itself, "
        "--no-plan tries it as it is"
    )


def fitted(job: Job) -> tuple[Job, RunConfig]:
    """With `train.fit: auto`: the job as it is, or with the cheapest settings that fit, and its config; a line says so.

    Raises DoesNotFit where nothing fits.
    """
    if job.config.train.fit != "auto":
        return job, job.config
    room = limit(job.devices)
    need, there = processes.agree((_needed_by_run(job, room), room.bytes))
    if need <= there:
        return job, job.config
    choices = search(job, room, most=1)
    keys = processes.agree(choices[0].keys if choices else None)
    if keys is None:
        raise refusal([], need, room)
    job = job.remake(load(job.config, keys.items()))
    flags = " ".join(f"--{key}={value}" for key, value in keys.items())
    note = f"as asked for, the run needs {of_bytes(need)}, and {of_bytes(there)} are {room.what}: it takes {flags}"
    return dataclasses.replace(job, notes=(*job.notes, note)), job.config


def _needed_by_run(job: Job, room: Limit) -> int:
    """Of the step; of the evaluation too where that could be more: a row of it takes no more than one in training."""
    own, rows = memory.compiled_step(job), job.config.train.micro_batch_size or 0
    most = math.ceil(own.step * job.eval_batch / (rows or job.config.train.global_batch_size))
    if most > own.step and needed(dataclasses.replace(own, step=most), job, room) > room.bytes:
        own = memory.compiled(job)
    return needed(own, job, room)


def search(
    job: Job,
    room: Limit,
    way: Way = memory.COMPILED,
    *,
    most: int = 3,
    seconds: float = SEARCH_SECONDS,
) -> list[Choice]:
    """Up to `most` choices that fit into `room`, cheapest first: a smaller micro-batch, then with remedies.

    way: COUNTED for a card that is not here. A combination whose least need, counted without compiling, is too large
    already is passed over.
    """
    found: list[Choice] = []
    until = time.monotonic() + seconds
    for remedies in _combinations(job):
        if len(found) == most or time.monotonic() > until:
            break
        keys = {key: value for remedy in remedies for key, value in remedy.keys(job).items()}
        if any(set(choice.keys) - {MICRO, EVALUATION} <= set(keys) for choice in found):
            continue  # a cheaper part of it fits
        try:
            choice = _choice(job, room, way, keys, ", ".join(remedy.says for remedy in remedies))
        except UserError:  # this model, optimizer or mesh does not go with it
            continue
        if choice is not None:
            found.append(choice)
    return found


def _combinations(job: Job) -> list[tuple[Remedy, ...]]:
    """All sets of remedies that the job can take, without two of one key; the cheapest first."""
    there = [remedy for remedy in REMEDIES if remedy.keys(job)]
    sets = [chosen for n in range(len(there) + 1) for chosen in itertools.combinations(there, n)]
    apart = [s for s in sets if len({k for r in s for k in r.keys(job)}) == sum(len(r.keys(job)) for r in s)]
    return sorted(apart, key=lambda s: sum(remedy.cost for remedy in s))


def _choice(job: Job, room: Limit, way: Way, keys: dict[str, Any], says: str) -> Choice | None:
    """With these keys: the whole batch at once, or the largest micro-batch; None: not even the least fits."""
    made: dict[int, Job] = {}

    def remade(size: int, more: Mapping[str, Any] = MappingProxyType({})) -> Job:
        return job.remake(load(job.config, [*keys.items(), (MICRO, size), *more.items()]))

    def need(size: int) -> int:
        made[size] = remade(size)
        return needed(way.step(made[size]), made[size], room)

    sizes = micro_sizes(job)
    least = remade(sizes[0])
    if _shared(memory.counted(least).least, least, room) > room.bytes:
        return None
    sizes = micro_sizes(least)  # another mesh splits rows into other parts
    whole = sizes.pop()
    size = whole if keys and need(whole) <= room.bytes else largest(sizes, need, room.bytes)
    if size is None:
        return None
    changed = {**keys, **({} if size == whole and not job.config.train.micro_batch_size else {MICRO: size})}
    own = way.run(made[size])
    if needed(own, made[size], room) > room.bytes:  # so it is the evaluation
        changed[EVALUATION] = size
        made[size] = remade(size, {EVALUATION: size})
        own = way.run(made[size])
        if needed(own, made[size], room) > room.bytes:
            return None
    work = made[size].cost.step_flops / job.cost.step_flops
    return Choice(changed, own, needed(own, made[size], room), work, says)


def micro_sizes(job: Job) -> list[int]:
    """Rows that a micro-batch may have: they divide the global batch, and the devices that split rows divide them."""
    rows, parts = job.config.train.global_batch_size, meshes.row_parts(job.mesh)
    most = UNROLLED if job.spec.unroll else rows
    return [n for n in range(parts, rows + 1, parts) if rows % n == 0 and rows // n <= most]


def largest(sizes: Sequence[int], need: Callable[[int], int], most: int) -> int | None:
    """The largest of `sizes` (rising) whose need is at most `most`; None: not even the first, or there is none.

    need(size) is dear (a compilation) and near a line (FACTS.md: temporary memory is linear in rows), so the next size
    to ask is where a line through the nearest two known ones says. It ends where that line says that the next larger
    size does not fit: linear needs take three questions, a fourth where the next one nearly fits.
    """
    known: dict[int, int] = {}

    def fits(i: int) -> bool:
        known[i] = need(sizes[i])
        return known[i] <= most

    if not sizes or not fits(0):
        return None
    low, high = 0, len(sizes)
    while high - low > 1:
        guess = _by_line(sizes, known, low, most)
        if guess == low:
            break
        guess = min(guess, high - 1)
        low, high = (guess, high) if fits(guess) else (low, guess)
    return sizes[low]


def _by_line(sizes: Sequence[int], known: Mapping[int, int], low: int, most: int) -> int:
    """The largest index, from `low` on, that (nearly) fits by the line through `low` and the nearest known point."""
    others = [i for i in known if i != low]
    if not others:
        return min(range(low + 1, len(sizes)), key=lambda i: abs(sizes[i] - 4 * sizes[low]))
    other = min(others, key=lambda i: abs(i - low))
    slope = (known[other] - known[low]) / (sizes[other] - sizes[low])
    fitting = [i for i in range(low, len(sizes)) if known[low] + slope * (sizes[i] - sizes[low]) <= NEAR * most]
    return max(fitting)
