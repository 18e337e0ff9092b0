"""One pool of threads for reading and decoding files: Pillow, sha256 and the system let go of the GIL."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

In = TypeVar("In")
Out = TypeVar("Out")


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(8, os.cpu_count() or 1), "jaxtrain-images")


def each(function: Callable[[In], Out], items: Sequence[In], chunk: int) -> Iterator[Out]:
    """`function` of each item, in order, by threads; `chunk` items a task, as a task costs more than a small read."""
    chunks = [items[start : start + chunk] for start in range(0, len(items), chunk)]
    for part in _threads().map(lambda part: [function(item) for item in part], chunks):
        yield from part
