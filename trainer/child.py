"""What the trainer's child processes (auditors, learner) have in common: they end with their parent, wait for the
ledger to change, give signs of life, and say what they do in lines on stderr.

Not here: starting and watching them (serve.py).
"""

from __future__ import annotations

import _thread
import contextlib
import fcntl
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from protocol.errors import LocalError
from protocol.outputs import printable
from trainer.ledger import Ledger

POLL_SECONDS: Final = 0.03  # a look at the ledger's change counter costs some microseconds

CANNOT_START: Final = 2  # of gateway and page, and of the run: a setting of it cannot be used, or an address is taken
RESTARTED: Final = "; started again"  # so goes on what is told of a process that ended
DIVERGED: Final = 5  # exit code of the learner, and of the run: started again it would do the same

END_SECONDS: Final = 10.0  # after an interruption; the parent, where it lives, is less patient


def now_ms() -> int:
    """Unix milliseconds."""
    return time.time_ns() // 1_000_000


def say(name: str, text: str) -> None:
    """A line of this process's log, in which a node's words may be."""
    print(f"{name}: {printable(text)}", file=sys.stderr, flush=True)


def end_with_parent() -> None:
    """Raise KeyboardInterrupt in the main thread once stdin ends: the parent holds the other end of it, so this
    also comes when the parent is killed. Whatever the main thread is doing must bear being cut off; what does not
    end then is ended."""
    # A process that a script started in the background inherits SIGINT ignored, and would not be interrupted.
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def watch() -> None:
        # Not sys.stdin: a thread that waits inside it aborts the interpreter when the main thread ends by itself.
        while os.read(0, 4096):
            pass
        _thread.interrupt_main()
        time.sleep(END_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="watch-parent", daemon=True).start()


@contextmanager
def alone(run: Path, name: str) -> Iterator[None]:
    """One process of a name at a run. Waits for one that is ending: of a supervisor that was killed, say.

    Raises LocalError when the other does not end.
    """
    with _lock(run, name).open("a") as file:
        deadline = time.monotonic() + 2 * END_SECONDS
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise LocalError(f"another {name} of {run} is running: end it, two must not work at once") from None
                time.sleep(POLL_SECONDS)
        os.utime(file.fileno(), (0, 0))
        yield


def _lock(run: Path, name: str) -> Path:
    return run / f"{name}.lock"


def show_life(run: Path, name: str) -> None:
    """A sign of life of a process that is `alone` there: its lock's time. A full disk takes it too."""
    with contextlib.suppress(OSError):
        os.utime(_lock(run, name))


def last_sign(run: Path, name: str) -> int:
    """Changes with each sign of life; 0 before the first since its start."""
    try:
        return _lock(run, name).stat().st_mtime_ns
    except OSError:
        return 0


@dataclass(frozen=True, slots=True)
class Life:
    """Of a process that is `alone`: when it was started, and when it was ready for work, Unix ms; None: not yet."""

    started_ms: int
    ready_ms: int | None


def note_start(run: Path, name: str) -> None:
    """Of the supervisor, before it starts a process that will be `alone` there. A full disk costs the note."""
    with contextlib.suppress(OSError):
        _lock(run, name).write_text(f"{now_ms()}\n", encoding="ascii")
        os.utime(_lock(run, name), (0, 0))


def say_ready(run: Path, name: str) -> None:
    """Of that process, once it has loaded what it works with."""
    with contextlib.suppress(OSError), _lock(run, name).open("a", encoding="ascii") as file:
        file.write(f"{now_ms()}\n")


def life(run: Path, name: str) -> Life | None:
    """None where nobody noted it."""
    try:
        started, *ready = map(int, _lock(run, name).read_text(encoding="ascii").split())
    except (OSError, ValueError):
        return None
    return Life(started, ready[-1] if ready else None)


class Changes:
    """Waits for commits of other processes."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._seen = ledger.change_counter()

    def wait(self, seconds: float) -> bool:
        """Until another process has committed since the last call, at most `seconds`; whether one has."""
        deadline = time.monotonic() + seconds
        while (counter := self._ledger.change_counter()) == self._seen:
            if time.monotonic() >= deadline:
                return False
            time.sleep(POLL_SECONDS)
        self._seen = counter
        return True
