"""What the ledger holds of audits: which traces wait for one, which auditor has them, what it found, and second audits
of what the first refused (SPEC 10.7).

A part of the ledger, in whose transactions it writes. Not here: which traces are audited (audit_draw.py), what follows
from an audit (`judge` in ledger.py).
"""

from __future__ import annotations

import itertools
import sqlite3
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy as np

from trainer.ledger_rows import SUBMISSION_COLUMNS, Reaudit, SubmissionRow, SubmissionState, submission_of


class AuditsOfLedger:
    """Auditors claim and answer; the gateway asks once more."""

    _db: sqlite3.Connection  # the ledger's connection

    if TYPE_CHECKING:  # the ledger has it

        def write(self) -> AbstractContextManager[None]: ...

        def _newest_verdict(self, digest: bytes, node: bytes) -> tuple[SubmissionState, bool] | None: ...

    def claim_audits(self, auditor: str, now_ms: int, most: int, *, reaudits_only: bool = False) -> list[SubmissionRow]:
        """Claim waiting audits of one policy version (the oldest waiting) for one auditor: no re-audit of what it
        judged itself. `attempts` of the rows counts the auditors that died with it. After the first such death a
        trace is claimed alone, so that it is not suspected for another's sake."""
        waiting = "state = ? AND claimed_by IS NULL AND (judged_by IS NULL OR judged_by != ?)"
        if reaudits_only:
            waiting += f" AND reaudit = '{Reaudit.WAITING}'"
        oldest = f"SELECT policy_version FROM submissions WHERE {waiting} ORDER BY sequence LIMIT 1"
        values = (SubmissionState.AUDIT, auditor)
        # An idle auditor looks often: a read does not make the others wait for the write lock.
        if self._db.execute(oldest, values).fetchone() is None:
            return []
        with self.write():
            row = self._db.execute(oldest, values).fetchone()
            if row is None:
                return []
            rows = self._db.execute(
                f"SELECT {SUBMISSION_COLUMNS} FROM submissions s JOIN leases l ON l.lease_id = s.lease_id "
                f"WHERE s.sequence IN (SELECT sequence FROM submissions WHERE {waiting} AND policy_version = ? "
                "ORDER BY sequence LIMIT ?) ORDER BY s.sequence",
                (*values, row[0], most),
            ).fetchall()
            found = [submission_of(each) for each in rows]
            claimed = list(itertools.takewhile(lambda each: not each.attempts, found)) or found[:1]
            self._db.executemany(
                "UPDATE submissions SET claimed_by = ?, claimed_ms = ?, attempts = attempts + 1 WHERE sequence = ?",
                [(auditor, now_ms, each.sequence) for each in claimed],
            )
            return claimed

    def renew_claims(self, auditor: str, now_ms: int) -> None:
        """An auditor begins its next batch: until then it was not stuck."""
        with self.write():
            self._db.execute("UPDATE submissions SET claimed_ms = ? WHERE claimed_by = ?", (now_ms, auditor))

    def claimed_ms(self, auditor: str) -> int | None:
        """When an auditor began what it is at work on; None: it has nothing."""
        found: int | None = self._db.execute(
            "SELECT MAX(claimed_ms) FROM submissions WHERE claimed_by = ?", (auditor,)
        ).fetchone()[0]
        return found

    def finish_audit(self, sequence: int, audit: bytes, mu: np.ndarray[Any, np.dtype[np.float32]] | None) -> None:
        with self.write():
            self._db.execute(
                "UPDATE submissions SET state = ?, audit = ?, mu = ?, judged_by = COALESCE(judged_by, claimed_by), "
                "claimed_by = NULL "
                "WHERE sequence = ? AND state = ?",
                (
                    SubmissionState.AUDITED, audit, None if mu is None else mu.astype("<f4").tobytes(), sequence,
                    SubmissionState.AUDIT,
                ),
            )  # fmt: skip

    def release_claims(self, auditor: str, *, died_of: str | None) -> int:
        """Give back what an auditor had claimed that died of something, or that was told to end (None); how many."""
        with self.write():
            return self._db.execute(
                "UPDATE submissions SET claimed_by = NULL, attempts = attempts - ?, "
                "died_of = CASE WHEN ? IS NULL THEN died_of WHEN died_of IS NULL THEN ? ELSE died_of || '; ' || ? END "
                "WHERE claimed_by = ? AND state = ?",
                (int(died_of is None), died_of, died_of, died_of, auditor, SubmissionState.AUDIT),
            ).rowcount

    # --- re-audits (gateway) ---

    def audited_refusal(self, digest: bytes, node: bytes) -> bool:
        """Whether the newest verdict on a node's trace is a refusal after an audit."""
        return self._newest_verdict(digest, node) == (SubmissionState.REFUSED, True)

    def ask_reaudit(self, sequence: int) -> None:
        """Send a refused trace to audit once more; auditors that died on it before do not count."""
        with self.write():
            self._db.execute(
                "UPDATE submissions SET state = ?, reaudit = ?, attempts = 0, died_of = NULL WHERE sequence = ?",
                (SubmissionState.AUDIT, Reaudit.WAITING, sequence),
            )

    def end_reaudit(self, sequence: int, *, may_ask_again: bool) -> None:
        """The second audit could not judge: the trace stays refused."""
        with self.write():
            self._db.execute(
                "UPDATE submissions SET state = ?, reaudit = ? WHERE sequence = ?",
                (SubmissionState.REFUSED, None if may_ask_again else Reaudit.DONE, sequence),
            )

    def reaudits_waiting(self, of: str) -> int:
        """Re-audits not answered yet of what this auditor judged."""
        count: int = self._db.execute(
            "SELECT COUNT(*) FROM submissions WHERE reaudit = ? AND state = ? AND judged_by = ?",
            (Reaudit.WAITING, SubmissionState.AUDIT, of),
        ).fetchone()[0]
        return count

    def waiting_audits(self) -> int:
        count: int = self._db.execute(
            "SELECT COUNT(*) FROM submissions WHERE state = ?", (SubmissionState.AUDIT,)
        ).fetchone()[0]
        return count
