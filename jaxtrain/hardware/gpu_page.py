"""docs/gpus.md, made from the catalogue: `python -m jaxtrain.hardware.gpu_page > docs/gpus.md` writes it anew."""

from __future__ import annotations

from jaxtrain.hardware.catalogue import GIB, KINDS, Card, cards

_HEAD = """\
# GPUs

The cards that jaxtrain knows without having one: what they hold, how fast they are at most, and what jax 0.10 can do
there. Somebody who asks for one may write its name in any short way, as long as it fits only one:

```python
from jaxtrain.hardware.catalogue import find, named, roofline

card = named("rtx3060-12gb")
assert card.name == "GeForce RTX 3060 12GB"
assert card == find("NVIDIA GeForce RTX 3060", memory=12 * 1024**3)  # as the driver says it
print(roofline(card, flops=2 * 4096**3, bytes_moved=3 * 2 * 4096**2, precision="bf16"), "seconds at least")
```

This page is made from the table that the package reads:

```sh
python -m jaxtrain.hardware.gpu_page > gpus.md
```

**Figures.** TFLOPS are those of dense matrices with fp32 sums, which is what training uses: half of what is stated
"with sparsity", and on a GeForce half of the headline rate of fp16. `fp32` is tf32 where the card has it, since jax
multiplies so by default there. `16 bit` is bf16, or fp16 where there is no bf16; P100 and GP100 sum it in fp16. A dash:
the card has no such unit, or its maker states no figure. A laptop's rates depend on the power that it allows, so there
are none.

**What jax needs.** CUDA 12: compute capability 5.2 and a driver from 525 on; CUDA 13: 7.5 and a driver from 580 on;
Linux, or WSL2 (experimental)[^jax]. Drivers after 580 no longer know cards below 7.5. AMD: ROCm 7 on Linux, for the
cards that AMD's own list names. On Apple's chips jax computes on the CPU; its Metal plugin had its last release in
2024. Windows without WSL2 has the CPU only.

[^jax]: [Installing jax](https://docs.jax.dev/en/latest/installation.html). jax on ROCm:
    [AMD's instructions](https://github.com/jax-ml/jax/blob/main/build/rocm/README.md). Metal:
    [jax issue 26968](https://github.com/jax-ml/jax/issues/26968). Intel:
    [issue 47](https://github.com/intel/intel-extension-for-openxla/issues/47).
"""
_COLUMNS = ("Card", "GB", "GB/s", "fp32", "16 bit", "Capability", "Year", "Watts", "jax", "Source")


def page() -> str:
    """The whole page in Markdown: a table for each kind of card, then the sources that they cite."""
    sources = list(dict.fromkeys((card.source, card.address) for card in cards()))
    parts = [_HEAD]
    for kind in KINDS:
        rows = [_row(card, 1 + sources.index((card.source, card.address))) for card in cards() if card.kind == kind]
        parts += [f"## {kind.capitalize()}\n", _line(_COLUMNS), _line(["---"] * len(_COLUMNS)), *rows, ""]
    parts += ["## Sources\n", *(f"{i}. [{title}]({address})" for i, (title, address) in enumerate(sources, 1))]
    return "\n".join(parts) + "\n"


def _row(card: Card, source: int) -> str:
    name = card.name if card.name.startswith(card.vendor) else f"{card.vendor} {card.name}"
    capability = ".".join(map(str, card.compute_capability or "–"))
    half = card.bf16 or card.fp16
    figures = (
        _figure(card.memory, GIB),
        _figure(card.bandwidth, 1e9),
        _figure(card.tf32 or card.fp32, 1e12),
        _figure(half, 1e12) + (" (fp16)" if half and not card.bf16 else ""),
    )
    return _line([name, *figures, capability, str(card.year), _figure(card.watts, 1), card.jax, str(source)])


def _figure(value: float | None, unit: float) -> str:
    return f"{value / unit:g}" if value else "–"


def _line(cells: list[str] | tuple[str, ...]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    print(page(), end="")
