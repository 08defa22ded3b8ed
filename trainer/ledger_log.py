"""What the ledger holds of the log of a run, epoch by epoch, and whether an epoch can still change (SPEC 8.12).

A part of the ledger, whose connection it reads. Not here: when an epoch is closed (epochs.py), and writing
(ledger.py).
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator

from trainer.ledger_rows import OF_EPOCH, GroupState, LeaseState, SubmissionState


class LogOfRun:
    """Epochs are closed one after the other, and nothing of a closed one changes."""

    _db: sqlite3.Connection  # the ledger's connection

    def sealed(self) -> int:
        """The version whose epoch is closed next: all before it are closed, or were passed over (ledger_care.py)."""
        following: int = self._db.execute(
            "SELECT COALESCE((SELECT MIN(version) FROM policies WHERE version > last), last + 1) "
            "FROM (SELECT COALESCE(MAX(version), -1) AS last FROM epochs)"
        ).fetchone()[0]
        return following

    def seal_before(self, version: int) -> bytes | None:
        """The canonical Signed Epoch that was closed before this version's; None for the first."""
        row = self._db.execute(
            "SELECT signed FROM epochs WHERE version < ? ORDER BY version DESC LIMIT 1", (version,)
        ).fetchone()
        return None if row is None else row[0]

    def seal(self, version: int) -> bytes | None:
        """The canonical Signed Epoch of a closed epoch."""
        row = self._db.execute("SELECT signed FROM epochs WHERE version = ?", (version,)).fetchone()
        return None if row is None else row[0]

    def is_settled(self, version: int) -> bool:
        """Whether nothing of a policy version waits: no group that may yet be learned from, no open lease, no
        submission without a verdict."""
        row = self._db.execute(
            "SELECT NOT EXISTS (SELECT 1 FROM groups WHERE state IN (?, ?) AND policy_version = ?) "
            "AND NOT EXISTS (SELECT 1 FROM leases WHERE policy_version = ? AND state = ?) "
            "AND NOT EXISTS (SELECT 1 FROM submissions WHERE state IN (?, ?, ?) AND policy_version = ?)",
            (
                GroupState.OPEN, GroupState.COMPLETE, version, version, LeaseState.OPEN,
                SubmissionState.RECEIVED, SubmissionState.AUDIT, SubmissionState.AUDITED, version,
            ),
        ).fetchone()  # fmt: skip
        return bool(row[0])

    def leases_of(self, version: int) -> Iterator[bytes]:
        """The canonical Signed leases of a policy version, in order of issue."""
        for row in self._db.execute("SELECT signed FROM leases WHERE policy_version = ? ORDER BY rowid", (version,)):
            yield row[0]

    def logged_submissions(self, version: int) -> Iterator[tuple[bytes, int | None, float, float, int, int | None]]:
        """(canonical Signed receipt, the draw's seen or None without a draw, floor, rate, drawn, trusted) of a policy
        version's submissions, oldest first."""
        return self._db.execute(
            "SELECT receipt, draw_seen, draw_floor, draw_rate, drawn, draw_trusted FROM submissions "
            "WHERE policy_version = ? ORDER BY sequence",
            (version,),
        )

    def calibrations_named(self, version: int) -> list[bytes]:
        """The canonical Signed calibrations that an epoch's verdicts name, by digest rising."""
        rows = self._db.execute(
            "SELECT signed FROM calibrations WHERE digest IN "
            "(SELECT DISTINCT calibration FROM verdicts WHERE epoch = ?) AND signed IS NOT NULL ORDER BY digest",
            (version,),
        )
        return [row[0] for row in rows]

    def epoch_size(self, version: int) -> tuple[int, int, int]:
        """How many leases, submissions and verdicts an epoch has."""
        counts = [
            self._db.execute(f"SELECT COUNT(*) FROM {table} WHERE {column} = ?", (version,)).fetchone()[0]
            for table, column in OF_EPOCH
        ]
        return (counts[0], counts[1], counts[2])

    def logged_verdicts(self, version: int) -> Iterator[tuple[int, bytes]]:
        """(sequence, canonical Signed) of an epoch's verdicts, oldest first."""
        return self._db.execute("SELECT sequence, signed FROM verdicts WHERE epoch = ? ORDER BY sequence", (version,))

    def submitted(self, version: int) -> list[bytes]:
        """The digests of a policy version's traces that are still here, oldest first."""
        rows = self._db.execute(
            "SELECT digest FROM submissions WHERE policy_version = ? AND trace IS NOT NULL ORDER BY sequence",
            (version,),
        )
        return [row[0] for row in rows]
