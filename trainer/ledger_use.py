"""What the ledger tells of how work is used: how fast the learner takes what is leased, how long a node's traces take,
and what became of the slots of groups that are over.

A part of the ledger, whose connection it uses. Not here: what follows for new leases (pacing.py), rates (rates.py).
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from trainer.ledger_rows import OF_GROUP, TOO_STALE, GroupState, SubmissionState
from trainer.pacing import Consumption

STEPS: Final = 8  # of which speed and share are measured: both change as the policy does
TRACES: Final = 16  # a node's newest, of which its time is the mean
RECENT_SECONDS: Final = 600.0  # older traces say nothing of a node any more: it may have become faster


@dataclass(frozen=True, slots=True)
class SettledSlot:
    """A slot of a group that is over: TAKEN, or DROPPED. Each of its `leased` times ended one way: without an answer
    (`expired`, `returned`), `refused`, accepted (`completed`, at most once), or none of these by the time the group
    was given up. `tokens` and `reward` are of the accepted trace, None without one: the same seed gives the same
    trace, so they are those of its earlier attempts too. `answered`: some trace came for it. `lag`: versions from
    the policy that drew it to the one that learned from it, None where none did."""

    environment: str
    leased: int
    expired: int
    returned: int
    refused: int
    completed: int
    answered: bool
    tokens: int | None
    reward: float | None
    used: bool
    stale: bool  # its group was dropped for its age
    lag: int | None


class UseOfLedger:
    """Read by the gateway at every request for leases, and by viewers: each of these is bounded."""

    _db: sqlite3.Connection  # the ledger's connection

    def consumption(self, now_ms: int) -> Consumption:
        """How the learner consumes. Every complete group is counted once: with the step that used it, or waiting."""
        made: int | None = self._db.execute("SELECT MAX(version) FROM policies").fetchone()[0]
        complete, waiting = self._count_complete()
        steps = self._db.execute(
            "SELECT created_ms, groups, flat_groups FROM steps ORDER BY version DESC LIMIT ?", (STEPS + 1,)
        ).fetchall()
        taught, flat = sum(row[1] for row in steps), sum(row[2] for row in steps)
        # What a step took arrived before it: the first one's time is where the others' begins.
        seconds = (now_ms - steps[-1][0]) / 1000 if len(steps) > 1 else 0.0
        return Consumption(
            made=made or 0,
            waiting=waiting,
            taught=taught + waiting,
            judged=taught + flat + complete,
            steps_per_second=(len(steps) - 1) / seconds if seconds > 0 else 0.0,
        )

    def count_informative(self) -> int:
        """Complete groups whose rewards differ: what the learner can use. Flat ones teach nothing, and wait
        for the next step to be counted, so they must not make dispatch believe that enough is waiting."""
        return self._count_complete()[1]

    def _count_complete(self) -> tuple[int, int]:
        """Complete groups, and those among them whose rewards differ."""
        row = self._db.execute(
            "SELECT COUNT(*), COALESCE(SUM(low < high), 0) FROM (SELECT MIN(s.reward) AS low, MAX(s.reward) AS high "
            f"FROM groups g CROSS JOIN {OF_GROUP} ON s.group_id = g.group_id "
            "WHERE g.state = ? AND s.state = ? GROUP BY g.group_id)",
            (GroupState.COMPLETE, SubmissionState.ACCEPTED),
        ).fetchone()
        return (row[0], row[1])

    def count_drawing(self) -> int:
        """Groups that are being drawn or judged."""
        query = "SELECT COUNT(*) FROM groups WHERE state = ?"
        count: int = self._db.execute(query, (GroupState.OPEN,)).fetchone()[0]
        return count

    def trace_seconds(self, node: bytes, now_ms: int) -> float | None:
        """From lease to receipt, the mean of a node's newest accepted traces; None where none is recent."""
        found: float | None = self._db.execute(
            "SELECT AVG(took) FROM (SELECT s.received_ms, s.received_ms - l.issued_ms AS took FROM submissions s "
            "JOIN leases l ON l.lease_id = s.lease_id WHERE s.node = ? AND s.state = ? "
            "ORDER BY s.sequence DESC LIMIT ?) WHERE received_ms > ?",
            (node, SubmissionState.ACCEPTED, TRACES, now_ms - int(RECENT_SECONDS * 1000)),
        ).fetchone()[0]
        return None if found is None else max(0.0, found) / 1000

    def settled_slots(self, most_groups: int) -> Iterator[SettledSlot]:
        """The slots of the newest groups that are over, by when they were begun, as they are read."""
        of_state = (
            "SELECT * FROM (SELECT group_id, environment, policy_version, state, cause, batch, created_ms FROM groups "
            "WHERE state = ? ORDER BY created_ms DESC LIMIT ?)"
        )
        rows = self._db.execute(
            "SELECT g.environment, s.attempts, s.expired, s.returned, (SELECT COUNT(*) FROM submissions r "
            "INDEXED BY submissions_by_group WHERE r.group_id = g.group_id AND r.slot = s.slot AND r.state = ?), "
            "a.tokens, a.reward, g.state = ?, g.state = ? AND g.cause LIKE ?, g.batch - 1 - g.policy_version, "
            "s.digest IS NOT NULL "
            f"FROM (SELECT * FROM ({of_state} UNION ALL {of_state}) ORDER BY created_ms DESC LIMIT ?) g "
            "CROSS JOIN slots s ON s.group_id = g.group_id "
            "LEFT JOIN submissions a INDEXED BY submissions_by_group "
            "ON a.group_id = s.group_id AND a.slot = s.slot AND a.state = ? WHERE s.attempts > 0",
            (
                SubmissionState.REFUSED, GroupState.TAKEN, GroupState.DROPPED, f"{TOO_STALE}%",
                GroupState.TAKEN, most_groups, GroupState.DROPPED, most_groups, most_groups, SubmissionState.ACCEPTED,
            ),
        )  # fmt: skip
        for row in rows:
            yield SettledSlot(
                environment=row[0],
                leased=row[1],
                expired=row[2],
                returned=row[3],
                refused=row[4],
                completed=int(row[5] is not None),
                answered=bool(row[10]),
                tokens=row[5],
                reward=row[6],
                used=bool(row[7]) and row[5] is not None,
                stale=bool(row[8]),
                lag=row[9] if row[7] and row[5] is not None else None,
            )
