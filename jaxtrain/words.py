"""What a run says at its opening and its end, and what it was made in. Text only; the console prints it."""

from __future__ import annotations

import functools
import os
import platform
import socket
import sys
from importlib import metadata
from typing import Any

import jax

from jaxtrain.build import Job
from jaxtrain.config import RunConfig
from jaxtrain.hardware.devices import unused_gpu
from jaxtrain.hooks.folder import RunFolder
from jaxtrain.loop import Stop
from jaxtrain.models import summary
from jaxtrain.parallel import mesh as meshes
from jaxtrain.parallel import rules
from jaxtrain.plan.units import si

_SHOWN = ("perplexity", "accuracy", "f1_macro", "f1", "auroc", "mae", "rmse", "r2", "loss")


def opening_lines(job: Job, first: int) -> list[str]:
    """Model, device, data, length; then what a user should know before it begins."""
    config, steps = job.config, job.steps
    parameters = sum(row[2] for row in summary.rows(job.module.params))
    kind = config.model.kind if config.model.kind != "custom" else job.module.name
    counts = [job.dataset.rows("train"), *(job.dataset.eval_rows(split) for split in ("validation", "test"))]
    rows = "/".join(f"{count:,}" for count in counts)
    lines = [
        f"{config.name}: {kind}, {parameters:,} parameters, {job.precision.name}, on {job.devices}"
        + (f", {job.mesh.size} used" if job.mesh.size != len(job.devices.devices) else "")
        + (f" as {meshes.words(job.mesh)}" if job.mesh.size > 1 else ""),
        f"data: {job.dataset.name}, {rows} {job.dataset.unit} (train/validation/test); "
        f"{steps.total:,} steps of {config.train.global_batch_size} rows, {steps.per_epoch} an epoch",
    ]
    if first:
        lines.append(f"resuming after step {first:,}; {steps.total - first:,} steps to go")
    gpu = unused_gpu(job.devices)
    if gpu:
        lines.append(f"GPU seen but unused: {gpu}; this jax computes on the CPU: pip install 'jaxtrain[cuda12]'")
    return lines + [f"note: {text}" for text in job.notes]


def closing_lines(stop: Stop, result: dict[str, Any], folder: RunFolder) -> list[str]:
    """The card at the end: the result, the best step, the time, what to type next."""
    best = result["best"]
    lines = [f"{stop.state} ({stop.reason}) in {result['seconds']:.1f} s"]
    if best["evaluation"]:
        value = best["evaluation"][best["metric"]]
        lines.append(f"best step {best['step']:,}: eval/{best['metric']} {value:.4g}")
    if "test" in result:
        shown = [name for name in _SHOWN if name in result["test"]]
        figures = ", ".join(f"{name} {result['test'][name]:.4f}" for name in shown[:4])
        lines.append(f"test: {figures} ({result['rows']['test']:,} {result['unit']}, read once, at the best step)")
    lines.append(f"report: {folder.report}")
    return [*lines, f"next: jaxtrain eval {folder.id}", f"  or: jaxtrain resume {folder.id} --train.duration=..."]


def model_summary(job: Job) -> str:
    """Every array of the model, then what a step costs, counted from the traced program."""
    cost = job.cost
    rows = f"{cost.rows:,} {job.dataset.unit}"
    arrays = summary.table(job.module.params)
    if job.mesh.size > 1:
        params, (one, once) = job.abstract_state["params"], rules.state_bytes(job.abstract_state)
        arrays = (
            f"{rules.table(params)}\n{sum(row[2] for row in summary.rows(params)):,} parameters; on "
            f"{meshes.words(job.mesh)} a device holds {one / 2**20:,.2f} of the {once / 2**20:,.2f} MiB of "
            "parameters, moments and averages"
        )
    return (
        f"{arrays}\n"
        f"a step on {rows}: {si(cost.forward_flops)}FLOP forward, {si(cost.step_flops)}FLOP with the backward pass; "
        f"{cost.saved_bytes / 2**20:,.1f} MiB of activations kept between the two"
        + (f", in each of {job.spec.micro_batches} micro-batches" if job.spec.micro_batches > 1 else "")
    )


@functools.cache
def versions() -> dict[str, str]:
    """{package: version} of what a run is made of."""
    packages = ("jaxtrain", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
    return {name: metadata.version(name) for name in packages}


def environment(job: Job) -> dict[str, Any]:
    """Versions, machine and devices."""
    return {
        "python": platform.python_version(),
        "packages": versions(),
        "platform": platform.platform(),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "command": sys.argv,
        "devices": str(job.devices),
        "device_count": job.mesh.size,
        "precision": job.precision.name,
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
        "JAX_PLATFORMS": os.environ.get("JAX_PLATFORMS", ""),
        "backend": jax.default_backend(),
    }


def flat_config(config: RunConfig) -> dict[str, Any]:
    """{dotted key: value}, for TensorBoard's table."""
    tree = config.model_dump(mode="json")
    return {
        f"{section}.{leaf}" if isinstance(part, dict) else section: value
        for section, part in tree.items()
        for leaf, value in (part.items() if isinstance(part, dict) else [("", part)])
    }
