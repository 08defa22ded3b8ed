"""What the ledger holds of nodes: what each said of itself last, its audits, and those that a person named when the run
was served: the home engine's, and those trusted until they lie (SPEC 10.7).

A part of the ledger, in whose transactions it writes. Not here: who is named (naming.py), what audits and trust change
(standing.py), and what nodes make of their time (ledger_use.py).
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from trainer.ledger_rows import SUBMISSION_COLUMNS, SubmissionRow, SubmissionState, submission_of
from verify.standing import NO_LIES, WINDOW


class NodesOfLedger:
    """Trust is a sequence number: of the last verdict there was when it was given. No more is written when it is lost,
    which follows from the verdicts since."""

    _db: sqlite3.Connection  # the ledger's connection

    if TYPE_CHECKING:  # the ledger has it

        def write(self) -> AbstractContextManager[None]: ...

        def last_verdict(self) -> int: ...

    def see_node(self, node: bytes, now_ms: int, software: str, engine: str) -> None:
        """A node said hello."""
        with self.write():
            self._db.execute(
                "INSERT INTO nodes (node, first_seen_ms, last_seen_ms, software, engine, connected) "
                "VALUES (?, ?, ?, ?, ?, 1) ON CONFLICT(node) DO UPDATE SET last_seen_ms = excluded.last_seen_ms, "
                "software = excluded.software, engine = excluded.engine, connected = 1",
                (node, now_ms, now_ms, software, engine),
            )

    def beat_node(
        self,
        node: bytes,
        now_ms: int,
        *,
        policy_version: int | None,
        tokens_per_second: float,
        slots_busy: int,
        slots_total: int,
        slots_waiting: int,
        cache_percent: int | None,
        unsent: int,
    ) -> None:
        with self.write():
            self._db.execute(
                "UPDATE nodes SET last_seen_ms = ?, policy_version = ?, tokens_per_second = ?, slots_busy = ?, "
                "slots_total = ?, slots_waiting = ?, cache_percent = ?, unsent = ?, connected = 1 WHERE node = ?",
                (
                    now_ms, policy_version, tokens_per_second, slots_busy, slots_total, slots_waiting, cache_percent,
                    unsent, node,
                ),
            )  # fmt: skip

    def lose_node(self, node: bytes | None = None) -> None:
        """A node's session ended; None: all of them (the gateway starts)."""
        with self.write():
            self._db.execute(
                "UPDATE nodes SET connected = 0, tokens_per_second = 0, slots_busy = 0, slots_waiting = 0, waits = '' "
                "WHERE ? IS NULL OR node = ?",
                (node, node),
            )

    def latest_audits(self, node: bytes, seen: int) -> list[bool]:
        """The newest audits of a node that count for its standing (verify/standing.py), newest first, True where the
        trace was accepted, from the verdicts up to the sequence `seen`."""
        rows = self._db.execute(
            "SELECT v.outcome FROM verdicts v WHERE v.node = ? AND v.audited AND v.outcome != ? AND v.sequence <= ? "
            "AND NOT EXISTS (SELECT 1 FROM verdicts l WHERE l.digest = v.digest AND l.node = v.node "
            "AND l.sequence > v.sequence AND l.sequence <= ?) ORDER BY v.sequence DESC LIMIT ?",
            (node, SubmissionState.NOT_JUDGED, seen, seen, WINDOW),
        )
        return [row[0] == SubmissionState.ACCEPTED for row in rows]

    def audit_record(self, node: bytes) -> tuple[int, int]:
        """(audits passed, audits failed) of a node."""
        row = self._db.execute("SELECT audits_passed, audits_failed FROM nodes WHERE node = ?", (node,)).fetchone()
        return (0, 0) if row is None else (row[0], row[1])

    def seen_nodes(self) -> list[bytes]:
        """Every node that ever said hello."""
        return [row[0] for row in self._db.execute("SELECT node FROM nodes ORDER BY node")]

    # --- named by a person ---

    def name_nodes(self, *, home: bytes | None, always: Collection[bytes], anew: Collection[bytes]) -> None:
        """What a person says of nodes when the run is served; nothing of what was said before is left.

        Those of `anew` are trusted from now on, whatever they did. Those of `always` are since they were named so
        first: that a run is started again brings no lost trust back.
        """
        with self.write():
            last = self.last_verdict()
            before = dict(self._db.execute("SELECT node, trusted FROM named_nodes WHERE trusted IS NOT NULL"))
            self._db.execute("DELETE FROM named_nodes")
            trusted = {node: before.get(node, last) for node in always} | dict.fromkeys(anew, last)
            named = trusted.keys() | ({home} if home is not None else set())
            self._db.executemany(
                "INSERT INTO named_nodes VALUES (?, ?, ?)",
                [(node, node == home, trusted.get(node)) for node in sorted(named)],
            )

    def trust(self, node: bytes, seen: int) -> int | None:
        """Since which verdict a node is trusted as of verdict `seen`; None: nobody trusts it, or it lied since."""
        row = self._db.execute("SELECT trusted FROM named_nodes WHERE node = ?", (node,)).fetchone()
        if row is None or row[0] is None or self._lie(node, row[0], seen) is not None:
            return None
        return int(row[0])

    def trusted(self) -> frozenset[bytes]:
        """The nodes that are trusted now."""
        return frozenset(node for node, lie in self.lies_of_trusted().items() if lie is None)

    def lies_of_trusted(self) -> dict[bytes, str | None]:
        """For what each node that a person named as trusted is not any more: the reason of a refusal; None: it is."""
        rows = self._db.execute("SELECT node, trusted FROM named_nodes WHERE trusted IS NOT NULL").fetchall()
        last = self.last_verdict()
        return {node: self._lie(node, since, last) for node, since in rows}

    def note_rate(self, node: bytes, rate: float) -> None:
        """At which a node's traces are drawn for audit from now on, for people."""
        with self.write():
            self._db.execute("UPDATE nodes SET rate = ? WHERE node = ?", (rate, node))

    def traces_by(self, nodes: Collection[bytes], version: int, most: int) -> list[SubmissionRow]:
        """The first submissions of these nodes under a policy version that are still here and passed the checks that
        need no model, and were not refused after that."""
        marks = ", ".join("?" * len(nodes))
        rows = self._db.execute(
            f"SELECT {SUBMISSION_COLUMNS} FROM submissions s JOIN leases l ON l.lease_id = s.lease_id "
            f"WHERE s.policy_version = ? AND s.node IN ({marks}) AND s.trace IS NOT NULL AND s.checks IS NOT NULL "
            "AND s.state != ? ORDER BY s.sequence LIMIT ?",
            (version, *nodes, SubmissionState.REFUSED, most),
        )
        return [submission_of(row) for row in rows]

    def home(self) -> bytes | None:
        """The home engine's node."""
        row = self._db.execute("SELECT node FROM named_nodes WHERE home").fetchone()
        return None if row is None else row[0]

    def _lie(self, node: bytes, since: int, seen: int) -> str | None:
        """SPEC 10.7: of the verdicts after `since` up to `seen`, the newest on some trace is a refusal of what the
        trace says. The reason of the first of these."""
        marks = ", ".join("?" * len(NO_LIES))
        row = self._db.execute(
            f"SELECT v.reason FROM verdicts v WHERE v.outcome = '{SubmissionState.REFUSED}' AND v.node = ? "
            f"AND v.sequence > ? AND v.sequence <= ? AND v.reason NOT IN ({marks}) "
            "AND NOT EXISTS (SELECT 1 FROM verdicts l WHERE l.digest = v.digest AND l.node = v.node "
            "AND l.sequence > v.sequence AND l.sequence <= ?) ORDER BY v.sequence LIMIT 1",
            (node, since, seen, *sorted(NO_LIES), seen),
        ).fetchone()
        return None if row is None else str(row[0])
