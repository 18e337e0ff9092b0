"""Numbers in words: bytes, operations, seconds."""

from __future__ import annotations

import re

from jaxtrain.config.errors import ConfigError

MIB, GIB = 2**20, 2**30
_UNITS = {"": 1, "K": 2**10, "M": MIB, "G": GIB, "T": 2**40}


def of_bytes(count: float) -> str:
    """1288490189 -> "1.2 GiB"."""
    for size, name in ((GIB, "GiB"), (MIB, "MiB"), (1024, "KiB")):
        if count >= size:
            return f"{count / size:,.{1 if count < 100 * size else 0}f} {name}"
    return f"{count:.0f} bytes"


def to_bytes(text: str) -> int:
    """ "8GiB", "7.5 GB", "512M" -> bytes; a GB counts as a GiB, as on the box of a card. Raises ConfigError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)i?B?\s*", text, re.IGNORECASE)
    if match is None or not float(match[1]):
        raise ConfigError(f"{text!r} is no amount of memory; allowed: a number with MiB, GiB or TiB, such as 8GiB")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def si(number: float) -> str:
    """12345678 -> "12.3 M"; the unit follows."""
    for factor, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= factor:
            return f"{number / factor:.3g} {letter}"
    return f"{number:.3g} "


def of_seconds(seconds: float) -> str:
    """0.00123 -> "1.2 ms"; 5000 -> "1.4 h"."""
    for factor, name in ((86400.0, "days"), (3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms")):
        if seconds >= factor:
            return f"{seconds / factor:.{1 if seconds < 10 * factor else 0}f} {name}"
    return f"{1e6 * seconds:.0f} us"
