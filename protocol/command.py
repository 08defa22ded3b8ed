"""How the three commands end: the exit codes that they share, and what is said when one cannot go on.

Not here: arguments, what is done, and the codes that one command alone has (each package's cli.py).
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from protocol import interrupts
from protocol.errors import RLCommonsError, StorageError, UsageError
from protocol.outputs import FULL, cause

FAULT: Final = 3  # of this machine, or of this program
INTERRUPTED: Final = 130  # 128 + SIGINT, as a shell reports it
BROKEN_PIPE: Final = 141  # 128 + SIGPIPE

# For the exit codes that `--help` lists.
ENDINGS: Final = f"""\
  {INTERRUPTED}  interrupted by Ctrl-C
  {BROKEN_PIPE}  whoever read the output went away (`| head`)
"""


# What looking at a place that a person named raises, even asking whether it is there.
_OUT_OF_REACH: Final = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP)
_AGAIN_SECONDS: Final = 0.02  # until Python is done with what it cleared away


def carry_out(program: str, command: Callable[[], int], failed: Callable[[RLCommonsError], int]) -> int:
    """The exit code of a command; `failed` says an error to the person and gives its code.

    A bug of ours is shown whole and ends with FAULT: Python's own code for it is 1, which means something else here.
    """
    with interruptible():
        return _carry_out(program, command, failed)


@contextmanager
def interruptible() -> Iterator[None]:
    """Within, Ctrl-C raises KeyboardInterrupt, so that work is ended in order. Python loses one that comes as it clears
    something away, which it does with each import: that is raised again, instead of being printed."""
    loaded = signal.getsignal(signal.SIGINT) is interrupts.leave
    told = sys.unraisablehook

    def again(lost: sys.UnraisableHookArgs) -> None:
        if not issubclass(lost.exc_type, KeyboardInterrupt):
            told(lost)
            return
        main = threading.main_thread().ident
        timer = threading.Timer(_AGAIN_SECONDS, signal.pthread_kill, (main, signal.SIGINT))
        timer.daemon = True
        timer.start()

    sys.unraisablehook = again
    if loaded:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        if loaded:
            signal.signal(signal.SIGINT, interrupts.leave)
        sys.unraisablehook = told


def _carry_out(program: str, command: Callable[[], int], failed: Callable[[RLCommonsError], int]) -> int:
    try:
        code = command()
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except BrokenPipeError:
        _drop_output()
        return BROKEN_PIPE
    except RLCommonsError as error:
        return failed(error)
    except KeyboardInterrupt:
        return INTERRUPTED
    except SystemExit as end:  # how rich ends a program whose reader has gone; arguments were read before
        return BROKEN_PIPE if end.code == 1 else FAULT
    except Exception as error:
        if isinstance(error, OSError) and error.errno in FULL and error.filename is None:
            _drop_output()
            told = f"the output cannot be written: {cause(error)}: make room, or send it elsewhere"
            return failed(StorageError(told))
        if isinstance(error, OSError) and error.errno in _OUT_OF_REACH and error.filename is not None:
            told = f"{error.filename} cannot be reached: {cause(error)}: name another place, or look who may enter it"
            return failed(UsageError(told))
        traceback.print_exc()
        print(f"{program}: this is a bug of {program}; please report the lines above", file=sys.stderr)
        return FAULT


def _drop_output() -> None:
    """What is still to be written goes nowhere: else the interpreter's end would fail over it."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):  # no descriptor below it
        return
