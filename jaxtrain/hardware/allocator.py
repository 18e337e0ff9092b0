"""The memory allocator of the C library, told to keep large buffers: XLA:CPU asks for the same ones at every step.

glibc gives a freed buffer of more than 32 MB back to the system and has it zeroed page by page when it comes again;
`benchmarks/cpu.py` measures what that costs. Memory that was used once stays with the process.
"""

from __future__ import annotations

import ctypes
import functools
import os

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4  # names of malloc.h
_SETTINGS = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, 2**31 - 1), (_TOP_PAD, 64 << 20))
_OWN = ("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")


@functools.cache
def keep_buffers() -> bool:
    """Ask for it, once a process; whether it was granted. Not where the user has chosen an allocator or settings."""
    if any(name.startswith(_OWN) for name in os.environ):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):  # another C library: nothing to ask
        return False
    return all(mallopt(name, value) == 1 for name, value in _SETTINGS)
