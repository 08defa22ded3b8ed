"""What the ledger holds of pairs of engines and their calibrations (SPEC 8.11): auditors write them, the gateway signs.

A part of the ledger, in whose transactions it writes. Not here: measuring (calibrating.py).
"""

from __future__ import annotations

import sqlite3
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Final

from trainer.ledger_rows import CALIBRATION_COLUMNS, CalibrationRow

MOST_PAIRS: Final = 64  # that are remembered: nodes name their engines as they like


class PairsOfLedger:
    """Calibrations by digest, and what is said of a pair that has none."""

    _db: sqlite3.Connection  # the ledger's connection

    if TYPE_CHECKING:  # the ledger has it

        def write(self) -> AbstractContextManager[None]: ...

    def add_calibration(self, row: CalibrationRow) -> bool:
        """Keep a measured calibration; False where it is known."""
        with self.write():
            values = (
                row.digest, row.pair, row.policy_version, row.created_ms, row.body, row.provisional, row.signed
            )  # fmt: skip
            added = self._db.execute("INSERT OR IGNORE INTO calibrations VALUES (?, ?, ?, ?, ?, ?, ?)", values)
            return added.rowcount == 1

    def set_signed_calibration(self, digest: bytes, signed: bytes) -> None:
        with self.write():
            self._db.execute("UPDATE calibrations SET signed = ? WHERE digest = ?", (signed, digest))

    def calibrations(self) -> list[CalibrationRow]:
        """All of the run, oldest first."""
        rows = self._db.execute(f"SELECT {CALIBRATION_COLUMNS} FROM calibrations ORDER BY created_ms, digest")
        return [CalibrationRow(*row) for row in rows]

    def calibration(self, digest: bytes) -> CalibrationRow | None:
        row = self._db.execute(f"SELECT {CALIBRATION_COLUMNS} FROM calibrations WHERE digest = ?", (digest,)).fetchone()
        return None if row is None else CalibrationRow(*row)

    def unsigned_calibrations(self) -> list[tuple[bytes, bytes]]:
        """(digest, canonical Calibration) of those that wait for the gateway's signature."""
        return self._db.execute("SELECT digest, body FROM calibrations WHERE signed IS NULL").fetchall()

    def version_of(self, root: bytes) -> int | None:
        """The first policy version with this root."""
        row = self._db.execute("SELECT MIN(version) FROM policies WHERE root = ?", (root,)).fetchone()
        version: int | None = row[0]
        return version

    def note_pair(self, pair: str, now_ms: int, note: str | None) -> bool:
        """Say of a pair of engines why it is not calibrated, or that it is (None); whether that is news."""
        row = self._db.execute("SELECT note FROM pairs WHERE pair = ?", (pair,)).fetchone()
        if row is not None and row[0] == note:
            return False
        with self.write():
            if row is None and self._db.execute("SELECT COUNT(*) FROM pairs").fetchone()[0] >= MOST_PAIRS:
                return False
            self._db.execute(
                "INSERT INTO pairs VALUES (?, ?, ?, NULL) ON CONFLICT(pair) DO UPDATE SET note = excluded.note",
                (pair, now_ms, note),
            )
            return True

    def pair_trying(self, pair: str) -> int | None:
        """The policy version on which an auditor measures a pair, or died measuring it."""
        row = self._db.execute("SELECT trying FROM pairs WHERE pair = ?", (pair,)).fetchone()
        return None if row is None else row[0]

    def try_pair(self, pair: str, now_ms: int, version: int | None) -> None:
        with self.write():
            self._db.execute(
                "INSERT INTO pairs VALUES (?, ?, 'being measured', ?) "
                "ON CONFLICT(pair) DO UPDATE SET trying = excluded.trying",
                (pair, now_ms, version),
            )

    def calibrated_pairs(self) -> set[str]:
        """The pairs with a signed calibration of their own."""
        query = "SELECT DISTINCT pair FROM calibrations WHERE signed IS NOT NULL AND NOT provisional"
        return {row[0] for row in self._db.execute(query)}
