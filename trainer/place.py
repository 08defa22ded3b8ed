"""Where a run is served: by one process at a time, and in one place, for two that serve copies of one run would sign
two policies under one version.

A copied folder is known by its files' inodes: moving a folder and restarting a container keep them, copying does not.
Not here: the processes that serve it (serve.py), copies that may be served (backup.py).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from protocol.errors import UsageError
from trainer.rundir import Run, RunFolder

PARTS: Final = ("gateway", "learner", "records")  # whose locks child.alone keeps beside those of the auditors


@dataclass(frozen=True, slots=True)
class Served:
    """RUN/served: where a run was served last."""

    inode: int  # of its genesis
    machine: str
    path: str
    process: int
    since_ms: int


def here(folder: RunFolder, now_ms: int) -> Served:
    """This place, for this process."""
    inode = folder.genesis.stat().st_ino
    return Served(inode, platform.node(), str(folder.path.resolve()), os.getpid(), now_ms)


def last_served(folder: RunFolder) -> Served | None:
    """None: never, or nobody can say."""
    try:
        return Served(**json.loads(folder.served.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def copied_from(folder: RunFolder) -> Served | None:
    """Where the run was served last, if this folder is a copy of that one."""
    last = last_served(folder)
    return last if last is not None and last.inode != folder.genesis.stat().st_ino else None


def holder(folder: RunFolder) -> int | None:
    """The process that serves the run now, 0 where its number is unknown; None: nobody does."""
    return _holder(folder.lock)


def workers(folder: RunFolder) -> list[str]:
    """The parts of the run that are at work, whoever started them."""
    return sorted(lock.stem for lock in folder.path.glob("*.lock") if _holder(lock) is not None)


def _holder(lock: Path) -> int | None:
    try:
        file = lock.open("r", encoding="utf-8")
    except OSError:
        return None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            said = file.read().strip()
            return int(said) if said.isdecimal() else 0
        return None


@contextlib.contextmanager
def locked(run: Run, *, moved: bool = False) -> Iterator[None]:
    """One `rltrainer serve` a run. `moved`: a person says that no other copy of it is served any more.

    Raises UsageError naming the other's process id, or the place where the run was served before.
    """
    folder = run.folder
    with folder.lock.open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            other = file.read().strip() or "unknown"
            raise UsageError(
                f"{folder.path} is served already, by process {other}: look at it with "
                f"`rltrainer status {folder.path}`, or stop it first"
            ) from None
        check_place(folder, moved=moved)
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        _note(folder)
        yield


def check_place(folder: RunFolder, *, moved: bool) -> None:
    """Raises UsageError for a back-up, and for a copy unless `moved`."""
    if folder.backup.exists():
        raise UsageError(f"{folder.path} is a back-up: make a run of it with `rltrainer restore {folder.path} RUN`")
    last = copied_from(folder)
    if last is not None and not moved:
        raise UsageError(f"{folder.path} is {copy_advice(last, folder.path)}")


def copy_advice(last: Served, path: Path) -> str:
    """What to do about a copy of a run."""
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(last.since_ms / 1000))
    return (
        f"a copy of the run served from {when} on in {last.path} on {last.machine}: two that are served would sign two "
        f"policies under one version. If the other is gone for good, and nothing was published after the copying: "
        f"`rltrainer serve {path} --moved`. To copy a run while it is served: `rltrainer backup`"
    )


def _note(folder: RunFolder) -> None:
    made = here(folder, time.time_ns() // 1_000_000)
    beside = folder.served.with_suffix(".new")
    beside.write_text(json.dumps(asdict(made)) + "\n", encoding="utf-8")
    beside.replace(folder.served)
