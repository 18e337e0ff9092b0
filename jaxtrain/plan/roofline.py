"""How long a step takes at least: no device computes or moves more in a second than it can (Williams et al. 2009).

In: a Job. Out: seconds, a lower bound. What a step waits for besides (the host, other devices, small operations) comes
on top, so a plan says "at least".
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxtrain.build import Job
from jaxtrain.hardware import memory as hardware
from jaxtrain.hardware import peak
from jaxtrain.parallel import rules


@dataclass(frozen=True)
class Roof:
    """All devices of a run together: operations and bytes a second (None: not known), and where that comes from."""

    flops: float
    bandwidth: float | None
    source: str


def of_job(job: Job) -> Roof | None:
    """Of the devices that it runs on: a CPU is measured; a GPU's operations come from a table. None: not known."""
    flops = peak.peak(job.devices, job.mesh.size)
    if flops is None:
        return None
    if job.devices.platform == "cpu":  # what is kept may be of a busy moment
        return Roof(max(flops, peak.measure()), hardware.bandwidth(), "measured on this CPU")
    return Roof(flops, None, f"{job.devices.kind}'s data sheet")


def least_seconds(job: Job, roof: Roof) -> float:
    """Of one step: its products and convolutions, or the bytes that it moves, whichever takes longer."""
    moving = moved_bytes(job) / roof.bandwidth if roof.bandwidth else 0.0
    return max(job.model_flops / roof.flops, moving)


def moved_bytes(job: Job) -> int:
    """What a step reads and writes at least, over all devices: state, gradients and activations, once each."""
    each, _ = rules.state_bytes(job.abstract_state)
    gradients = sum(map(rules.bytes_per_device, job.abstract_state["params"].values()))
    return 2 * (job.mesh.size * (each + gradients) + job.spec.micro_batches * job.cost.saved_bytes)
