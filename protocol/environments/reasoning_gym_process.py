"""Runs inside the sandbox (sandbox.py): makes reasoning_gym's tasks and scores answers to them.

Run as a script, alone: imports nothing of this project. First it takes the means to do harm away from itself:
resource limits before any import, an audit hook after the imports that refuses to write, to connect and to
start programs. The answers it scores come from strangers, and the library has scorers that run what they score.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import resource
import sys
from typing import Any

MEMORY_BYTES = 2 * 1024**3  # of address space; the library and sympy take a tenth of it resident
OPEN_FILES = 64
CALL_CPU_SECONDS = 10
START_CPU_SECONDS = 60

FORBIDDEN_EVENTS = (
    "os.system",
    "os.exec",
    "os.fork",
    "os.forkpty",
    "os.posix_spawn",
    "os.spawn",
    "os.startfile",
    "os.kill",
    "os.remove",
    "os.rename",
    "os.rmdir",
    "os.mkdir",
    "os.link",
    "os.symlink",
    "os.truncate",
    "os.chmod",
    "os.chown",
    "subprocess.",
    "socket.",
    "ctypes.",
    "pty.",
    "shutil.",
    "resource.setrlimit",
)


def limit_resources() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES, OPEN_FILES))
    with contextlib.suppress(ValueError, OSError):  # macOS has no limit on address space
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))


def limit_cpu(seconds: int) -> None:
    """The process ends by signal once it has used `seconds` more. The limit counts from the process's start, so
    it moves with every call."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    used = int(usage.ru_utime + usage.ru_stime) + 1
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    soft = used + seconds if hard == resource.RLIM_INFINITY else min(hard, used + seconds)
    resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))


class Gate:
    """The audit hook, open only while this script itself moves its CPU limit."""

    open = True

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.open:
            return
        if event.startswith(FORBIDDEN_EVENTS):
            raise PermissionError(f"the sandbox refuses {event}")
        if event == "open" and not is_reading(arguments):
            raise PermissionError("the sandbox refuses to write files")


def is_reading(arguments: tuple[Any, ...]) -> bool:
    _, mode, flags = arguments
    if isinstance(mode, str):
        return not set(mode) & set("wax+")
    return isinstance(flags, int) and flags & os.O_ACCMODE == os.O_RDONLY


@functools.lru_cache(maxsize=32)
def dataset(name: str, config: str) -> Any:
    import reasoning_gym

    return reasoning_gym.create_dataset(name, size=2**62, seed=0, **json.loads(config))


@functools.lru_cache(maxsize=1024)
def entry(name: str, config: str, index: int) -> Any:
    return dataset(name, config)[index]


def answer(request: dict[str, Any]) -> object:
    task = (request["generator"], request["config"])
    match request["do"]:
        case "make":
            dataset(*task)
            return True
        case "question":
            return entry(*task, request["index"])["question"]
        case "score":
            return float(dataset(*task).score_answer(request["answer"], entry(*task, request["index"])))
    raise ValueError(f"unknown request {request['do']!r}")


def main() -> None:
    limit_resources()
    limit_cpu(START_CPU_SECONDS)
    requests = sys.stdin.buffer
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what a library prints is not a reply
    import reasoning_gym  # noqa: F401

    gate = Gate()
    sys.addaudithook(gate)
    while line := requests.readline():
        limit_cpu(CALL_CPU_SECONDS)
        gate.open = False
        try:
            reply = {"ok": answer(json.loads(line))}
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"[:500]}
        gate.open = True
        replies.write(json.dumps(reply).encode() + b"\n")


if __name__ == "__main__":
    main()
