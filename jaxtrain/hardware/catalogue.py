"""The catalogue of graphics cards: what each has and how fast it can be at most, whether or not one is here.

In: the name that a driver gives, or what somebody types. Out: a `Card`, and the least time of a computation on it. The
figures and where they come from are in cards.yaml; nothing here asks the hardware.
"""

from __future__ import annotations

import difflib
import functools
import re
from dataclasses import dataclass
from pathlib import Path

import yaml

from jaxtrain.config.errors import ConfigError

GIB = 1024**3
TABLE = Path(__file__).with_name("cards.yaml")
KINDS = ("data centre", "workstation", "consumer", "laptop", "integrated")
CUDA12, CUDA13, TENSOR_CORES = (5, 2), (7, 5), (7, 0)
"""From which compute capability on there are the wheels of jax 0.10 (docs.jax.dev/en/latest/installation.html), and
products of fp16 with fp32 sums."""

OTHERS: dict[str, str] = {
    "AMD": "jax[rocm7-local], Linux only",
    "AMD integrated": "CPU; ROCm only where AMD's list names it",
    "Intel": "CPU; jax-oneapi-plugin is experimental and needs jax 0.11",
    "Apple": "CPU; jax-metal ended in 2024, with jax 0.5",
}
"""What jax can do without CUDA, by maker (and kind). jax-ml/jax issue 26968 (jax-metal), jax 0.10.2's
extras (ROCm), intel/intel-extension-for-openxla issue 47 (Intel)."""

LISTED = 8  # names in an error
APART = frozenset(["ti", "super", "d", "xt", "xtx", "laptop", "sff", "max", "q"])
"""Words that make another card of a name: a card that has one is only meant by somebody who says it."""


@dataclass(frozen=True)
class Card:
    """One card by its market name. None: there is no such unit, or no figure that can be trusted.

    kind: one of KINDS. memory: bytes; None where it is the machine's. bandwidth: bytes a second of that memory. fp32,
    tf32, bf16, fp16: operations a second (2 for a multiply-add) of dense products, with fp32 sums (P100 and GP100:
    fp16 sums). capability: of CUDA. year: of its launch. source, address: who states the figures, and where. jax: what
    jax 0.10 can do there. driver: all names that its driver gives, without the maker's.
    """

    name: str
    vendor: str
    kind: str
    memory: int | None
    bandwidth: float | None
    fp32: float | None
    tf32: float | None
    bf16: float | None
    fp16: float | None
    compute_capability: tuple[int, int] | None
    year: int
    watts: float | None
    source: str
    address: str
    jax: str
    driver: tuple[str, ...]


@functools.cache
def cards() -> tuple[Card, ...]:
    """All cards, in the order of the table: NVIDIA's by generation, then the other makers'."""
    table = yaml.load(TABLE.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    found = []
    for family, rows in table["families"].items():
        vendor, kind, capability, source = family.split(", ")
        cuda = None if capability == "-" else (int(capability.split(".")[0]), int(capability.split(".")[1]))
        title, address = table["sources"][source]
        for name, memory, bandwidth, fp32, tf32, bf16, fp16, year, watts, *others in rows:
            card = Card(
                name=name,
                vendor=vendor,
                kind=kind,
                memory=memory * GIB if memory else None,
                bandwidth=_times(bandwidth, 1e9),
                fp32=_times(fp32, 1e12),
                tf32=_times(tf32, 1e12),
                bf16=_times(bf16, 1e12),
                fp16=_times(fp16, 1e12),
                compute_capability=cuda,
                year=year,
                watts=watts,
                source=title,
                address=address,
                jax=_jax(vendor, kind, cuda),
                driver=(name, *others),
            )
            found.append(card)
    return tuple(found)


def _times(value: float | None, unit: float) -> float | None:
    return round(value * unit) if value else None  # 40.6 * 1e12 is not a whole number


def _jax(vendor: str, kind: str, cuda: tuple[int, int] | None) -> str:
    if cuda is None:
        return OTHERS.get(f"{vendor} {kind}") or OTHERS[vendor]
    if cuda < CUDA12:
        return "CPU: compute capability below 5.2"
    if cuda < CUDA13:
        return "jax[cuda12] only: compute capability below 7.5"
    return "jax[cuda12] or jax[cuda13]"


def forms(name: str) -> tuple[Card, ...]:
    """The cards that a driver calls `name`: several where only the memory tells them apart, () when none is known."""
    return _by_driver().get(_plain(name), ())


def find(name: str, memory: int | None = None) -> Card | None:
    """The card that a driver calls `name`, "NVIDIA GeForce RTX 3060"; None: not known, or not which form of it.

    memory: all that the driver states, in bytes (not jax's `bytes_limit`, a share of it); it chooses between the forms
    of one name. A laptop's card, a part of a card (MIG) and a card of a longer name are never taken for the card.
    """
    found = forms(name)
    if len(found) > 1 and memory is not None:  # ECC and the driver keep up to a tenth
        found = tuple(card for card in found if card.memory and 0.9 < memory / card.memory < 1.02)
    return found[0] if len(found) == 1 else None


@functools.cache
def _by_driver() -> dict[str, tuple[Card, ...]]:
    found: dict[str, tuple[Card, ...]] = {}
    for card in cards():
        for name in card.driver:
            found[_plain(name)] = (*found.get(_plain(name), ()), card)
    return found


def _plain(name: str) -> str:
    """Without the maker's name, marks and the word that Intel's and AMD's drivers end with."""
    name = re.sub(r"\((r|tm)\)", "", " ".join(name.casefold().split()))
    return re.sub(r"^(nvidia|amd|intel|apple) | graphics$", "", name)


def named(text: str) -> Card:
    """The card that somebody means: "rtx3060-12gb", "a100 sxm 80gb", "4090 laptop", or any name that a driver gives.

    Raises ConfigError when no card has all these words, and when several have.
    """
    words = _words(text)
    fits = [card for card in cards() if words and words <= _all_words(card) and APART & _all_words(card) <= words]
    exact = [card for card in fits if words == _words(card.name)] or list(forms(text))
    if len(exact) == 1:
        return exact[0]
    if len(fits) == 1:
        return fits[0]
    if fits:
        more = f" and {len(fits) - LISTED} more" if len(fits) > LISTED else ""
        names = ", ".join(card.name for card in fits[:LISTED])
        raise ConfigError(f"several GPUs are called {text!r}; name one: {names}{more}")
    near = _nearest(text)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    raise ConfigError(f"no GPU is called {text!r}; {hint}docs/gpus.md lists those that are known")


def _words(text: str) -> frozenset[str]:
    """The words of a name, also where they are written together ("rtx3060ti")."""
    text = re.sub(r"(\d+)[ -]?gi?b\b", r" \1gb ", re.sub(r"sxm\d\b", "sxm", text.casefold()))
    return frozenset(word for chunk in re.findall(r"[a-z0-9]+", text) for word in _apart(chunk))


def _apart(chunk: str) -> tuple[str, ...]:
    """The words of the catalogue that make up `chunk`; itself, when none do."""
    known = _vocabulary()
    for end in range(len(chunk), 0, -1):
        if chunk[:end] in known:
            rest = _apart(chunk[end:]) if chunk[end:] else ()
            if known.issuperset(rest):
                return (chunk[:end], *rest)
    return (chunk,)


@functools.cache
def _vocabulary() -> frozenset[str]:
    texts = [" ".join((card.vendor, *card.driver)) for card in cards()]
    return frozenset(re.findall(r"[a-z0-9]+", " ".join(texts).casefold()))


@functools.cache
def _all_words(card: Card) -> frozenset[str]:
    return _words(" ".join((card.vendor, "gpu", *card.driver)))


def _nearest(text: str) -> list[str]:
    """Names that end like `text`, three at most."""
    ends: dict[str, str] = {}
    for card in cards():
        words = card.name.casefold().split()
        for start in range(len(words)):
            ends.setdefault("".join(words[start:]), card.name)
    close = difflib.get_close_matches("".join(text.casefold().split()), ends, n=3, cutoff=0.6)
    return list(dict.fromkeys(ends[end] for end in close))


def rate(card: Card, precision: str) -> float | None:
    """Operations a second at most of products in "fp32", "bf16" or "fp16"; None: not known, or no such unit.

    fp32 is tf32 where the card has it: XLA multiplies so by default from compute capability 8.0 on (jax-ml/jax issues
    4873 and 14022). bf16 on a card without it runs as fp32 and is not faster: None, so that nobody plans with it.
    """
    return {"fp32": card.tf32 or card.fp32, "bf16": card.bf16, "fp16": card.fp16}[precision]


def roofline(card: Card, flops: float, bytes_moved: float, precision: str) -> float:
    """Seconds that `flops` operations and `bytes_moved` to and from the card's memory take at least (Williams 2009).

    Raises ConfigError when the card's rate in this precision, or its bandwidth, is not known.
    """
    per_second = rate(card, precision)
    if per_second is None or card.bandwidth is None:
        known = [name for name in ("fp32", "bf16", "fp16") if rate(card, name)] if card.bandwidth else []
        instead = f"use --precision {' or '.join(known)}" if known else "its time cannot be told, only its memory"
        raise ConfigError(f"{card.name} has no known rate in {precision}: {instead}")
    return max(flops / per_second, bytes_moved / card.bandwidth)


def tensor_rate(card: Card) -> float | None:
    """Operations a second of 16-bit products with fp32 sums: bf16, or fp16 where tensor cores are older than bf16."""
    old = card.compute_capability is not None and card.compute_capability < TENSOR_CORES
    return card.bf16 or (None if old else card.fp16)
