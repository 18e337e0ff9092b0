"""Options for `jax.jit` that a backend needs to be fast. A table; an option this jax does not know is left out."""

from __future__ import annotations

import functools
import logging

import jax

log = logging.getLogger("jaxtrain")

# FACTS.md: XLA:CPU sends convolutions to a library whose backward pass is up to ten times slower. Its sums are kept:
# benchmarks/conv.py has what a step takes without them.
CONVOLUTION: dict[str, dict[str, str]] = {
    "cpu": {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT,LIBRARY_FUSION_TYPE_REDUCE"},
}


# XLA:CPU spends far longer on optimising code that draws random numbers than running it once takes.
RUN_ONCE: dict[str, dict[str, str]] = {"cpu": {"xla_backend_optimization_level": "0"}}


def run_once_options(platform: str) -> dict[str, str]:
    """The options for a program that runs once, such as an initialisation."""
    return {name: value for name, value in RUN_ONCE.get(platform, {}).items() if _accepted(name, value)}


def compiler_options(platform: str, convolutional: bool) -> dict[str, str]:
    """The options for a program on `platform`, only those that this jax accepts."""
    wanted = CONVOLUTION.get(platform, {}) if convolutional else {}
    return {name: value for name, value in wanted.items() if _accepted(name, value)}


@functools.cache
def _accepted(name: str, value: str) -> bool:
    try:
        jax.jit(lambda x: x + 1, compiler_options={name: value}).lower(0.0).compile()
    except Exception as error:  # jax raises different types for an unknown option in different versions
        log.info("compiler option %s is not known to this jax: %s", name, str(error).splitlines()[0])
        return False
    return True
