"""A process with many threads keeps few heaps, and what it no longer needs goes back to the system."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest

COUNT = """
import ctypes, sys, threading
from protocol.heap import few_heaps
if sys.argv[1] == "few":
    few_heaps()
libc = ctypes.CDLL(None)
libc.malloc.restype = libc.fopen.restype = ctypes.c_void_p
here, held = threading.Barrier(13), []
def work():
    held.append(libc.malloc(1000))
    here.wait(20)
threads = [threading.Thread(target=work) for _ in range(12)]
for each in threads:
    each.start()
here.wait(20)
file = libc.fopen(sys.argv[2].encode(), b"w")
libc.malloc_info(0, ctypes.c_void_p(file))
libc.fclose(ctypes.c_void_p(file))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library has other heaps")
def test_threads_share_two_heaps(tmp_path: Path) -> None:
    counts = {}
    for how in ("few", "default"):
        out = tmp_path / how
        subprocess.run([sys.executable, "-c", COUNT, how, str(out)], check=True, timeout=60)
        counts[how] = out.read_text().count("<heap nr=")
    assert counts["few"] <= 2 < counts["default"]


# Half of what was taken is freed, piece by piece, so that a piece in use lies behind every hole.
HOLES = """
import gc, os
import psutil
from protocol.heap import give_back, settle
settle()
gc.disable()
def resident():
    return psutil.Process().memory_info().rss / 2**20
class Cycle:
    def __init__(self):
        self.me, self.held = self, bytearray(60_000)
pieces = [(Cycle(), bytearray(2_000)) for _ in range(1_000)]
kept = [small for _, small in pieces]
del pieces
before = resident()
give_back()
print(before - resident())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library gives back by itself or not at all")
def test_cycles_and_the_holes_that_they_leave_go_back_to_the_system() -> None:
    done = subprocess.run([sys.executable, "-c", HOLES], check=True, timeout=60, capture_output=True, text=True)
    assert float(done.stdout) > 40  # MiB, of 57 in holes
