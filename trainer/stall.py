"""When a part of the trainer has work and does none of it: then it is ended and started again, and where that does
not help the run ends. When nothing moves and no part is to blame: then that is said.

    gateway    traces to check, audits to make verdicts, policies to sign; and its sign of life, every second
    auditors   traces to audit that none of them takes up (one that takes too long: guard.py)
    learner    groups enough for a step
    home engine   its sign of life, every ten seconds; and, with the device, what it draws

Pure: the supervisor describes what it sees and acts on the answer. Time is the steady clock's: the system's may jump.
Not here: who is ended and how (serve.py), what people are shown all along (waits.py).
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final

MOST_RESTARTS: Final = 2  # of a part that does not move, before the run ends
STARTING_SECONDS: Final = 900.0  # for a part to load what it works with: a large policy, an engine that compiles
FORGIVEN_SECONDS: Final = 120.0  # a part that still moves so long after a restart (or twice the limit) was helped by it
AUDITORS: Final = "auditor"  # all of them: their names begin so
RUN: Final = "run"  # all parts together


@dataclass(frozen=True, slots=True)
class Seen:
    """`owes`: whether the part has work; `mark`: anything that changes when it does some. `ready`: since when it could,
    on the clock of Watch.look; None while it starts."""

    part: str
    owes: str  # "": nothing
    mark: Hashable
    ready: float | None = 0.0


@dataclass(frozen=True, slots=True)
class Stuck:
    """A part to start again; `hopeless` once that was tried often enough."""

    part: str
    cause: str
    hopeless: bool


class Watch:
    """Remembers since when each part has not moved."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._marks: dict[str, tuple[Hashable, float]] = {}
        self._restarts: dict[str, tuple[int, float]] = {}  # part → (how often in a row, when last)

    def look(self, seen: Seen, now: float) -> Stuck | None:
        """Asked again and again; Stuck once each time the part has stood still for too long."""
        before, since = self._marks.get(seen.part, (None, now))
        if seen.part not in self._marks or seen.mark != before:
            self._marks[seen.part] = (seen.mark, now)
            if now - self._restarts.get(seen.part, (0, now))[1] > max(FORGIVEN_SECONDS, 2 * self._seconds):
                del self._restarts[seen.part]
            return None
        if not seen.owes:
            self._marks[seen.part] = (seen.mark, now)
            return None
        cause = self._overdue(seen, since, now)
        if not cause:
            return None
        tries, _ = self._restarts.get(seen.part, (0, now))
        self._restarts[seen.part] = (tries + 1, now)
        self._marks[seen.part] = (seen.mark, now)
        return Stuck(seen.part, cause, hopeless=tries >= MOST_RESTARTS)

    def _overdue(self, seen: Seen, since: float, now: float) -> str:
        """Why a part that stands still since then is stuck; "": not yet. What it needs to start is not held against
        it, but one that starts again and again is not waited for without end."""
        waited, most = now - since, self._seconds + STARTING_SECONDS
        if seen.ready is None:
            return f"it is not ready for work after {most:g} s: {seen.owes}" if waited >= most else ""
        if now - max(since, seen.ready) >= self._seconds or waited >= most:
            return f"no progress for {self._seconds:g} s (stall_seconds): {seen.owes}"
        return ""
