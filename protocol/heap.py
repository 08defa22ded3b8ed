"""Keeps a long-lived process with many threads from growing.

Not here: what is kept in memory; this is about what was given back and the system does not get.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
from typing import Final

GIVE_BACK_SECONDS: Final = 2.0  # where the work has no end of its own to do it at
_M_ARENA_MAX: Final = -8  # of malloc.h
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_HEAPS: Final = 2
_BUFFER_BYTES: Final = 128 * 1024  # where glibc begins


def few_heaps() -> None:
    """Let the threads of this process share few heaps. glibc makes one for each of up to eight threads a processor,
    each of them keeps the holes that large tensors and replies leave, and a process that starts and ends threads all
    day goes on growing. Call it before there are threads; does nothing where the C library is another."""
    _set(_M_ARENA_MAX, _HEAPS)


def large_buffers_go_back() -> None:
    """Let a buffer of over 128 KiB come from the system each time, and go back to it. glibc does so until the first of
    them is freed, and from then on cuts those of its size out of the heap, where small objects that stay soon lie
    behind each hole. For a process of small objects with a large message now and then; one that computes would have
    every tensor's pages made anew."""
    _set(_M_MMAP_THRESHOLD, _BUFFER_BYTES)
    _set(_M_TRIM_THRESHOLD, _BUFFER_BYTES)


def _set(option: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(option, value)


def settle() -> None:
    """What is in memory now stays: modules, models, tables. Call it once when all is loaded. Python looks for garbage
    in cycles among old objects only when those that were added are a quarter of all it knows; with the libraries
    counted that comes late, and each time takes as long as the libraries are large."""
    gc.collect()
    gc.freeze()


def give_back() -> None:
    """Frees the garbage in cycles that came after `settle`, and hands the system the free pages of all heaps: glibc
    gives back by itself only those at a heap's end, and small objects that stay come to lie behind every hole that a
    step or a swap leaves. Some milliseconds; call it where work of one kind ends."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
