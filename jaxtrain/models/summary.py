"""What a model is made of: path, shape, parameters, bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

Row = tuple[str, tuple[int, ...], int, int]


def rows(params: Mapping[str, Any]) -> list[Row]:
    """(path, shape, parameters, bytes) of every array; works on abstract arrays."""
    return [(n, tuple(p.shape), math.prod(p.shape), math.prod(p.shape) * p.dtype.itemsize) for n, p in params.items()]


def table(params: Mapping[str, Any]) -> str:
    """The rows as aligned text, with a total."""
    body = [(name, str(list(shape)), f"{count:,}", f"{size:,}") for name, shape, count, size in rows(params)]
    total = rows(params)
    lines = [("path", "shape", "parameters", "bytes"), *body]
    lines.append(("total", "", f"{sum(r[2] for r in total):,}", f"{sum(r[3] for r in total):,}"))
    widths = [max(len(line[i]) for line in lines) for i in range(4)]
    text = [f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c:>{widths[2]}}  {d:>{widths[3]}}" for a, b, c, d in lines]
    return "\n".join([text[0], "-" * len(text[0]), *text[1:-1], "-" * len(text[0]), text[-1]])
