"""A subprocess that runs other people's task code: one question at a time, with limits and a deadline.

Here: starting it, asking it, ending it. A call that is not answered (the process died, hung or spoke nonsense)
is an EnvironmentFault and never a reward; the next call starts a fresh process. Not here: what the process
does; the script sets its own resource limits before it imports anything (reasoning_gym_process.py).

The wire is one JSON object a line: a request as the caller gives it, a reply `{"ok": value}` or
`{"error": text}`.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Final

from protocol.errors import EnvironmentFault

START_SECONDS: Final = 120.0  # the first call waits for imports, on a machine that may be busy
CALL_SECONDS: Final = 30.0
MAX_LINE_BYTES: Final = 1024 * 1024
_ENDING_SECONDS: Final = 5.0


class CallRefused(EnvironmentFault):
    """The process answered that it cannot do what was asked."""


class Sandbox:
    """A persistent process of `script`, started by the first call. Safe to share between threads."""

    def __init__(self, script: Path, call_seconds: float = CALL_SECONDS, start_seconds: float = START_SECONDS) -> None:
        self._script = script
        self._call_seconds = call_seconds
        self._start_seconds = start_seconds
        self._lock = threading.Lock()
        self._process: _Process | None = None

    def call(self, request: Mapping[str, object]) -> Any:
        """The reply's value. Raises CallRefused for an `error` reply, EnvironmentFault for no proper reply."""
        line = json.dumps(request).encode() + b"\n"
        with self._lock:
            fresh = self._process is None or not self._process.is_ours()
            if fresh:
                self._process = _Process(self._script)
            assert self._process is not None
            seconds = self._call_seconds + (self._start_seconds if fresh else 0)
            try:
                reply = _parse(self._process.exchange(line, seconds))
            except EnvironmentFault:
                self._end()
                raise
        if "error" in reply:
            raise CallRefused(str(reply["error"])[:1000])
        return reply["ok"]

    def close(self) -> None:
        """Ends the process; a later call starts another."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        if self._process is not None:
            self._process.end()
            self._process = None


class _Process:
    """One process and its two pipes."""

    def __init__(self, script: Path) -> None:
        # -P and -s keep the working directory and the user's packages out. Not -I: it would drop the fixed hash
        # seed, on which the order of sets, and so a task, may depend.
        command = [sys.executable, "-P", "-s", "-W", "ignore", str(script)]
        child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=_environment(),
            start_new_session=True,  # Ctrl-C is for the process that asks
        )
        assert child.stdin is not None and child.stdout is not None
        self._owner = os.getpid()
        self._child = child
        self._requests: IO[bytes] = child.stdin
        self._replies: IO[bytes] = child.stdout
        os.set_blocking(self._requests.fileno(), False)
        os.set_blocking(self._replies.fileno(), False)
        self._finalizer = weakref.finalize(self, _end, child, self._owner)

    def is_ours(self) -> bool:
        """False in a process that was forked from the one that started this."""
        return self._owner == os.getpid()

    def end(self) -> None:
        self._finalizer()

    def exchange(self, line: bytes, seconds: float) -> bytes:
        """Writes one line, reads one line."""
        deadline = time.monotonic() + seconds
        waiting, reply = memoryview(line), bytearray()
        with selectors.DefaultSelector() as selector:
            selector.register(self._replies, selectors.EVENT_READ)
            selector.register(self._requests, selectors.EVENT_WRITE)
            while not reply.endswith(b"\n"):
                left = deadline - time.monotonic()
                ready = selector.select(max(0.0, left))
                if not ready and left <= 0:
                    raise EnvironmentFault(f"the sandboxed task did not answer within {seconds:g} s")
                for key, _ in ready:
                    if key.fileobj is self._requests:
                        waiting = self._write(waiting)
                        if not waiting:
                            selector.unregister(self._requests)
                    else:
                        reply += self._read()
                if len(reply) > MAX_LINE_BYTES:
                    raise EnvironmentFault(f"the sandboxed task answered with over {MAX_LINE_BYTES} bytes")
        return bytes(reply)

    def _write(self, data: memoryview) -> memoryview:
        try:
            return data[os.write(self._requests.fileno(), data) :]
        except OSError as error:
            raise self._died() from error

    def _read(self) -> bytes:
        data = os.read(self._replies.fileno(), 65536)
        if not data:
            raise self._died()
        return data

    def _died(self) -> EnvironmentFault:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(_ENDING_SECONDS)
        return EnvironmentFault(f"the sandboxed task died (exit status {self._child.returncode})")


def _end(child: subprocess.Popen[bytes], owner: int) -> None:
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            pipe.close()
    if os.getpid() == owner:
        child.kill()
        child.wait()
    else:
        child.returncode = 0  # somebody else's child: nothing to wait for


def _environment() -> dict[str, str]:
    """Fixed, so that a task is the same on every machine; nothing of ours leaks into it."""
    threads = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}
    return {"PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1", "LC_ALL": "C.UTF-8", "TZ": "UTC", **threads}


def _parse(line: bytes) -> dict[str, Any]:
    try:
        reply = json.loads(line)
    except ValueError as error:
        raise EnvironmentFault("the sandboxed task answered with something that is not JSON") from error
    if not isinstance(reply, dict) or set(reply) not in ({"ok"}, {"error"}):
        raise EnvironmentFault("the sandboxed task answered with something that is not a reply")
    return reply
