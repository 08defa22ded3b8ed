"""Turns on a device that two processes of one machine share: the learner, and a node's engine that draws for it in
between. No part of what peers agree on: it is here because trainer and node both need it, and share nothing else.

    FOLDER/asked    locked by the learner from when it wants the device until it has given it back
    FOLDER/device   locked by whoever computes; says who, and since when
    FOLDER/turns.jsonl   a line a turn: who, from_ms, to_ms

Locks are the system's: what a process that died held is free. Not here: when the engine gives way (node/sharing.py),
when the learner steps (trainer/learner.py).
"""

from __future__ import annotations

import fcntl
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Final

from protocol.errors import StorageError
from protocol.outputs import cause

POLL_SECONDS: Final = 0.03  # trying a lock costs some microseconds
LEARNER: Final = "learner"
ENGINE: Final = "home engine"
RECORD_BYTES: Final = 1024 * 1024  # turns.jsonl is turned over at this size: some ten thousand turns


@dataclass(frozen=True, slots=True)
class Turn:
    """A stretch of time in which one process had the device. Unix ms."""

    who: str
    from_ms: int
    to_ms: int


@dataclass(frozen=True, slots=True)
class Look:
    """`who` has the device since when ("", None: nobody has it); `asked`: the learner wants it, or has it."""

    who: str
    since_ms: int | None
    asked: bool


class Turns:
    """One process' side. Raises StorageError where the folder cannot be used."""

    def __init__(self, folder: Path, who: str) -> None:
        self._folder = folder
        self._who = who
        self._since_ms = 0
        self.held = False
        try:
            self._asked, self._device = (_open(folder / name) for name in ("asked", "device"))
        except OSError as error:
            raise StorageError(f"{folder} is no place to take turns in: {cause(error)}") from None

    def ask(self) -> bool:
        """Of the learner: say that it wants the device. False while an earlier one still does."""
        return _lock(self._asked, fcntl.LOCK_EX)

    def is_asked(self) -> bool:
        """Of the engine: whether it should give way."""
        if not _lock(self._asked, fcntl.LOCK_SH):
            return True
        fcntl.flock(self._asked, fcntl.LOCK_UN)
        return False

    def take(self) -> bool:
        """The device, if it is free."""
        if not self.held and _lock(self._device, fcntl.LOCK_EX):
            self.held, self._since_ms = True, _now_ms()
            self._say(json.dumps([self._who, self._since_ms]))
        return self.held

    def give_back(self) -> None:
        """Whatever is held; a turn that was had is noted down."""
        if self.held:
            self._note(Turn(self._who, self._since_ms, _now_ms()))
            self._say("")
            self.held = False
        for file in (self._device, self._asked):
            fcntl.flock(file, fcntl.LOCK_UN)

    def close(self) -> None:
        self.give_back()
        for file in (self._device, self._asked):
            file.close()

    def _say(self, text: str) -> None:
        self._device.truncate(0)
        self._device.write(text)
        self._device.flush()

    def _note(self, turn: Turn) -> None:
        path = self._folder / "turns.jsonl"
        try:
            if path.exists() and path.stat().st_size > RECORD_BYTES:
                path.replace(path.with_suffix(".jsonl.1"))
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(turn)) + "\n")
        except OSError:
            pass  # a full disk costs the note, not the turn


def look(folder: Path) -> Look | None:
    """How it stands; None where nobody takes turns. For people: a moment later it may be otherwise."""
    try:
        with _open(folder / "asked") as asked, _open(folder / "device") as device:
            wanted = not _lock(asked, fcntl.LOCK_SH)
            if _lock(device, fcntl.LOCK_SH):
                return Look("", None, wanted)
            device.seek(0)
            who, since_ms = json.loads(device.read())
            return Look(str(who), int(since_ms), wanted)
    except (OSError, ValueError, TypeError):
        return None


def turns(folder: Path) -> list[Turn]:
    """Those noted last, oldest first."""
    try:
        lines = (folder / "turns.jsonl").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    return [Turn(**json.loads(line)) for line in lines if line.endswith("}")]


def _open(path: Path) -> IO[str]:
    return path.open("a+", encoding="utf-8")


def _lock(file: IO[str], how: int) -> bool:
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
