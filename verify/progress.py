"""How far an audit of a log is: a line on a terminal, and what is said where it was interrupted.

Not here: the audit (run_audit.py, rejudge.py) and what it found (run_report.py).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

_A_SECOND: Final = 4  # times that the line is drawn


@dataclass
class Progress:
    """Counts that the audit keeps. `epochs` 0: the log's first files are being read. The traces are of the epoch at
    hand; `chosen` of them are to be recomputed, fewer where they fail an earlier check."""

    epochs: int = 0
    done: int = 0
    epoch: int | None = None
    traces: int = 0
    replayed: int = 0
    chosen: int = 0
    recomputed: int = 0

    def begin(self, epoch: int) -> None:
        self.done = self.epoch = epoch
        self.traces = self.replayed = self.chosen = self.recomputed = 0

    def line(self) -> str:
        if not self.epochs:
            return "the beginning of the log is being read"
        told = f"{self.done:,} of {self.epochs:,} epochs done"
        if self.epoch is not None and self.traces:
            told += f"; epoch {self.epoch}: {self.replayed:,} of {self.traces:,} traces replayed"
            told += f", {self.recomputed:,} of {self.chosen:,} recomputed by the model"
        return told


@contextmanager
def shown(progress: Progress) -> Iterator[None]:
    """Draws the line on standard error while the block runs, where that is a terminal. An interruption says where."""
    try:
        if not sys.stderr.isatty():
            yield
            return
        from rich.console import Console
        from rich.live import Live
        from rich.text import Text

        began = time.monotonic()

        def line() -> Text:
            seconds = time.monotonic() - began
            told = f"{seconds // 60:.0f}:{seconds % 60:02.0f}  {progress.line()}"
            return Text(told, no_wrap=True, overflow="ellipsis")

        console = Console(stderr=True)
        with Live(
            get_renderable=line, console=console, refresh_per_second=_A_SECOND, transient=True, redirect_stdout=False
        ):
            yield
    except KeyboardInterrupt:
        print(f"rlverify: interrupted: {progress.line()}: no verdict on this log", file=sys.stderr)
        raise
