"""Ctrl-C while a command has nothing to end in order: as Python still loads it, and once it is done.

The commands import this before anything else, and loading takes what they print as little as this file does. Not here:
Ctrl-C at work (command.py, and the commands themselves).
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

# How a command is called; `cli` is `python -m node.cli`. A process that merely imports one is left as it is.
_COMMANDS = ("rlnode", "rltrainer", "rlverify", "cli", "run-demo")


def leave(number: int, frame: FrameType | None) -> None:
    """The handler of SIGINT: no traceback of what was being imported, and the code that a shell reports. An exception
    would do for neither: Python loses one that comes as it clears something away, and imports may catch it."""
    os._exit(128 + number)


if (
    os.path.basename(sys.argv[0]).partition(".")[0] in _COMMANDS
    and signal.getsignal(signal.SIGINT) is signal.default_int_handler  # else it is ignored, as in a script's background
):
    signal.signal(signal.SIGINT, leave)
