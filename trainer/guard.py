"""What an auditor may use of this machine, so that no trace can take the rest of the trainer down with it.

The supervisor looks from outside, for a process that hangs in native code or eats all memory cannot look after
itself; what outruns the supervisor's look meets a limit of the system. Not here: ending a process (serve.py) and what
becomes of the trace it was at work on (audit.py).
"""

from __future__ import annotations

import contextlib
import resource
import subprocess
import time
from pathlib import Path
from typing import Final

from trainer.config import TrainerConfig

MIB: Final = 1024 * 1024
_BURST: Final = 2  # times the limit: what may be allocated between two looks of the supervisor
_FIRST_TO_GO: Final = 900  # of 1,000: when this machine is out of memory, an auditor is what it can spare
_PS_SECONDS: Final = 5.0


class Guard:
    """Watches one auditor at a time. `cause` is asked again and again."""

    def __init__(self, config: TrainerConfig) -> None:
        self._seconds = config.auditor_seconds
        self._memory_mib = config.auditor_memory_mib
        self._began_ms: int | None = None
        self._seen = 0.0

    def cause(self, process: int, began_ms: int | None, now: float | None = None) -> str:
        """Why this auditor must end, or "". `began_ms`: its mark in the ledger when it began what it is at work on.

        Measured on the steady clock (`now`, seconds), from when a mark was first seen: the system's may jump.
        """
        now = time.monotonic() if now is None else now
        if began_ms != self._began_ms:
            self._began_ms, self._seen = began_ms, now
        if began_ms is not None and now - self._seen > self._seconds:
            return f"it took more than {self._seconds:g} s for one batch (auditor_seconds)"
        held = resident_mib(process) if self._memory_mib else 0
        if held > self._memory_mib:
            return f"it held {held:,} MiB of memory, {self._memory_mib:,} are allowed (auditor_memory_mib)"
        return ""


def resident_mib(process: int) -> int:
    """Memory that a process holds; 0 when it is gone."""
    try:
        pages = Path(f"/proc/{process}/statm").read_text(encoding="ascii").split()[1]
        return int(pages) * resource.getpagesize() // MIB
    except (OSError, IndexError):
        return _asked_of_ps(process)


def _asked_of_ps(process: int) -> int:
    """Where there is no /proc."""
    words = ["ps", "-o", "rss=", "-p", str(process)]
    try:
        found = subprocess.run(words, capture_output=True, text=True, timeout=_PS_SECONDS).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return int(found) * 1024 // MIB if found.isdigit() else 0


def give_way(config: TrainerConfig) -> None:
    """Limit this process, an auditor, as far as the system lets it."""
    with contextlib.suppress(OSError):  # Linux: an unprivileged process may always make itself the one to go
        Path("/proc/self/oom_score_adj").write_text(str(_FIRST_TO_GO), encoding="ascii")
    if config.auditor_memory_mib and config.device == "cpu":  # a GPU's driver reserves many times what is used
        most = _BURST * config.auditor_memory_mib * MIB
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_DATA, (most, most))
