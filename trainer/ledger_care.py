"""The ledger as a thing to be looked after: whether it is whole, how it stays small, a copy of it while others write,
what a run that was restored must not use again, and what the trainer and its nodes wait for.

A part of the ledger, whose connection it uses. Not here: which copies are made (backup.py), what is said of what was
found (doctor.py, waits.py).
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from protocol.errors import StorageError
from trainer.ledger_rows import GroupState, LeaseState, SlotState, SubmissionState

MOST_FAULTS: Final = 5
# Receipts and verdicts that a run may have given after its last back-up: these numbers are not used again.
NUMBERS_PASSED_OVER: Final = 1_000_000
# Every time in the ledger that this machine's clock gave.
_TIMES: Final = (
    ("policies", "created_ms"), ("submissions", "received_ms"), ("verdicts", "judged_ms"), ("steps", "created_ms"),
    ("events", "at_ms"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Owed:
    """Work that waits, with the Unix ms since when the oldest of it does; None where there is none."""

    received: int  # traces to check: the gateway
    received_ms: int | None
    audited: int  # audits to be made verdicts: the gateway
    audited_ms: int | None
    audits: int  # traces to audit, claimed ones included: the auditors
    audits_ms: int | None
    unsigned: int  # 1 if the latest policy is to be signed: the gateway
    unsigned_ms: int | None


@dataclass(frozen=True, slots=True)
class Claim:
    """What an auditor is at work on since `since_ms`."""

    auditor: str
    traces: int
    version: int
    since_ms: int


class CareOfLedger:
    """Checks, copies, and notes of who waits."""

    _db: sqlite3.Connection  # the ledger's connection
    _path: Path

    if TYPE_CHECKING:

        def write(self) -> AbstractContextManager[None]: ...

    # --- whole? ---

    def damage(self) -> list[str]:
        """What SQLite finds wrong with the file, a line each; reads all of it."""
        try:
            rows = self._db.execute(f"PRAGMA quick_check({MOST_FAULTS})").fetchall()
        except sqlite3.DatabaseError as error:
            return [str(error)]
        return [str(row[0]) for row in rows if row[0] != "ok"]

    def newest_ms(self) -> int:
        """The latest time that anything in it was written at, Unix ms."""
        query = " UNION ALL ".join(f"SELECT MAX({column}) AS at FROM {table}" for table, column in _TIMES)
        newest: int | None = self._db.execute(f"SELECT MAX(at) FROM ({query})").fetchone()[0]
        return newest or 0

    def versions(self) -> list[int]:
        """Of every policy, rising. A run that was restored may have passed over some."""
        return [row[0] for row in self._db.execute("SELECT version FROM policies ORDER BY version")]

    # --- room ---

    def prune_traces(self, keep: int) -> int:
        """Forget the bodies of traces no longer needed beyond the newest `keep`; how many."""
        with self.write():
            return self._db.execute(
                "UPDATE submissions INDEXED BY submissions_with_trace SET trace = NULL, mu = NULL "
                "WHERE trace IS NOT NULL AND sequence <= "
                "(SELECT COALESCE(MAX(sequence), 0) - ? FROM submissions) AND state IN (?, ?, ?, ?) "
                "AND group_id NOT IN (SELECT group_id FROM groups WHERE state IN (?, ?))",
                (
                    keep, SubmissionState.ACCEPTED, SubmissionState.REFUSED, SubmissionState.NOT_JUDGED,
                    SubmissionState.CREDITED, GroupState.OPEN, GroupState.COMPLETE,
                ),
            ).rowcount  # fmt: skip

    # --- a copy ---

    def copy_to(self, path: Path) -> None:
        """A copy of the ledger as this connection sees it: within `snapshot()`, that state. Raises StorageError."""
        try:
            with closing(sqlite3.connect(path)) as target:
                self._db.backup(target)
                # One file, which can be copied as such.
                target.execute("PRAGMA journal_mode = DELETE")
        except sqlite3.Error as error:
            told = f"the ledger {self._path} could not be copied to {path}: {error}"
            raise StorageError(f"{told}: make room there or choose another place, and run it again") from error

    # --- a run that goes on from a copy ---

    def pass_over(self, version: int, now_ms: int) -> None:
        """Go on as policy `version`, which is the latest one again: what was given after the copy was made, and is
        lost, keeps its numbers to itself. What was being drawn is given up, at no node's cost."""
        with self.write():
            latest, root = self._db.execute(
                "SELECT version, root FROM policies ORDER BY version DESC LIMIT 1"
            ).fetchone()
            self._db.execute(
                "INSERT INTO policies (version, root, created_ms) VALUES (?, ?, ?)", (version, root, now_ms)
            )
            for table in ("submissions", "verdicts"):
                self._db.execute(
                    "INSERT INTO sqlite_sequence (name, seq) SELECT ?1, 0 WHERE NOT EXISTS "
                    "(SELECT 1 FROM sqlite_sequence WHERE name = ?1)",
                    (table,),
                )
                self._db.execute(
                    "UPDATE sqlite_sequence SET seq = seq + ? WHERE name = ?", (NUMBERS_PASSED_OVER, table)
                )
            cause = f"the run was restored from a copy of policy {latest}"
            self._db.execute(
                "UPDATE groups SET state = ?, cause = ? WHERE state = ?", (GroupState.DROPPED, cause, GroupState.OPEN)
            )
            self._db.execute("UPDATE slots SET state = ? WHERE state = ?", (SlotState.FREE, SlotState.LEASED))
            self._db.execute("UPDATE leases SET state = ? WHERE state = ?", (LeaseState.RETURNED, LeaseState.OPEN))

    # --- waits ---

    def note_node_wait(self, node: bytes, what: str, since_ms: int) -> None:
        """Why a node got no lease when it asked; "" once it gets one."""
        with self.write():
            self._db.execute("UPDATE nodes SET waits = ?, waits_ms = ? WHERE node = ?", (what, since_ms, node))

    def owed(self) -> Owed:
        """What each part of the trainer has to do."""
        count = "SELECT COUNT(*), MIN(received_ms) FROM submissions WHERE state = ?"
        received = self._db.execute(count, (SubmissionState.RECEIVED,)).fetchone()
        audited = self._db.execute(count, (SubmissionState.AUDITED,)).fetchone()
        audits = self._db.execute(count, (SubmissionState.AUDIT,)).fetchone()
        unsigned = self._db.execute(
            "SELECT COUNT(*), MIN(created_ms) FROM policies WHERE manifest IS NULL "
            "AND version = (SELECT MAX(version) FROM policies)"
        ).fetchone()
        return Owed(*received, *audited, *audits, *unsigned)

    def claims(self) -> list[Claim]:
        """What auditors are at work on."""
        rows = self._db.execute(
            "SELECT claimed_by, COUNT(*), MIN(policy_version), MIN(claimed_ms) FROM submissions "
            "WHERE claimed_by IS NOT NULL GROUP BY claimed_by ORDER BY claimed_by"
        )
        return [Claim(*row) for row in rows]

    def last_times(self) -> tuple[int, int, int]:
        """When the newest submission came, the newest verdict was given, the newest policy was made; 0: never."""
        row = self._db.execute(
            "SELECT (SELECT received_ms FROM submissions ORDER BY sequence DESC LIMIT 1), "
            "(SELECT judged_ms FROM verdicts ORDER BY sequence DESC LIMIT 1), "
            "(SELECT created_ms FROM policies ORDER BY version DESC LIMIT 1)"
        ).fetchone()
        return (row[0] or 0, row[1] or 0, row[2] or 0)

    def held_slots(self, now_ms: int) -> dict[bytes, tuple[int, int]]:
        """node → (slots it holds and has not answered, the first deadline of them, Unix ms)."""
        rows: Sequence[tuple[bytes, int, int]] = self._db.execute(
            "SELECT l.node, COUNT(*), MIN(l.deadline_ms) FROM leases l JOIN slots s "
            "ON s.group_id = l.group_id AND s.lease_id = l.lease_id "
            "WHERE l.state = ? AND l.deadline_ms > ? AND s.state = ? GROUP BY l.node",
            (LeaseState.OPEN, now_ms, SlotState.LEASED),
        ).fetchall()
        return {node: (count, deadline) for node, count, deadline in rows}
