"""A node whose machine fails, run as `python tests/e2e/faulty_node.py ADDRESS HOME FAULT`: everything is the real
rlnode, but at a named point the process is killed (-9), or its clock is wrong, or it is of another time.

    download     killed when three pieces of the policy are on the disk
    generation   killed with completions in the engine and others drawn
    submit       killed when the trainer has answered a submission and nothing of the answer is noted
    clock        an hour ahead
    version      it speaks another version of the protocol
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from node.cli import main
from node.store import RunStore
from node.transformers_engine import TransformersEngine
from protocol import limits

HOUR = 3_600.0


def killed_at_call(method: Callable[..., Any], number: int, *, after: bool = False) -> Callable[..., Any]:
    """The method, which ends the process at its n-th call, before it does what it does or after. Threads call it."""
    left = [number]
    lock = threading.Lock()

    def called(*arguments: Any) -> Any:
        result = method(*arguments) if after else None
        with lock:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return result if after else method(*arguments)

    return called


def fail(fault: str) -> None:
    if fault == "download":
        RunStore.put_blob = killed_at_call(RunStore.put_blob, 3, after=True)  # type: ignore[method-assign]
    elif fault == "generation":
        # The start-up check takes a dozen steps, a completion about twenty.
        TransformersEngine.step = killed_at_call(TransformersEngine.step, 60)  # type: ignore[method-assign]
    elif fault == "submit":
        RunStore.settle = killed_at_call(RunStore.settle, 5)  # type: ignore[method-assign]
    elif fault == "clock":
        real = time.time
        time.time = lambda: real() + HOUR
    elif fault == "version":
        limits.PROTOCOL_VERSION = (9, 3)  # type: ignore[misc]
    else:
        raise SystemExit(f"there is no fault '{fault}'")


if __name__ == "__main__":
    fail(sys.argv[3])
    sys.exit(main(["join", sys.argv[1], "--cpu", "--json", "--home", sys.argv[2]]))
