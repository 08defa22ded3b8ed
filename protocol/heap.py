"""Keeps a long-lived process with many threads from growing.

Not here: what is kept in memory; this is about what was given back and the system does not get.
"""

from __future__ import annotations

import contextlib
import ctypes
from typing import Final

_M_ARENA_MAX: Final = -8  # of malloc.h
_HEAPS: Final = 2


def few_heaps() -> None:
    """Let the threads of this process share few heaps. glibc makes one for each of up to eight threads a processor,
    each of them keeps the holes that large tensors and replies leave, and a process that starts and ends threads all
    day goes on growing. Call it before there are threads; does nothing where the C library is another."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, _HEAPS)


def give_back() -> None:
    """Let the system have what was freed: after work that for a moment needed much more than is kept."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
