"""The record of a run on SQLite (WAL): what was leased, submitted, judged, learned and published.

Every process of the trainer opens it; it is also how they hand work to each other, so that any of
them may be killed at any point: the gateway writes submissions, an auditor claims and answers
them, the gateway signs verdicts, the learner takes complete groups and records steps. What is
acknowledged to a node or to another process was committed with an fsync first.

Policies, groups, leases, submissions, verdicts and events are in this file; the schema is in ledger_rows.py, and the
rest of the project's SQL in parts of the ledger: audits (ledger_audits.py), learning (ledger_learning.py), nodes
(ledger_nodes.py), the log of the run (ledger_log.py), calibrations (ledger_pairs.py), how work is used (ledger_use.py)
and upkeep (ledger_care.py). Not here: who gets which lease (dispatch.py), what a trace is worth (verify/), when a group
may be learned from (batch.py).
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from protocol.errors import StorageError, UsageError
from protocol.log import Draw
from protocol.verdict import Reason
from trainer.ledger_audits import AuditsOfLedger
from trainer.ledger_care import CareOfLedger
from trainer.ledger_learning import LearningOfLedger
from trainer.ledger_log import LogOfRun
from trainer.ledger_nodes import NodesOfLedger
from trainer.ledger_pairs import PairsOfLedger
from trainer.ledger_rows import (
    GROUP_COLUMNS,
    OF_GROUP,
    SCHEMA,
    SCHEMA_VERSION,
    SUBMISSION_COLUMNS,
    TIMES,
    GroupRow,
    GroupState,
    LeaseState,
    NewSubmission,
    OpenSlot,
    Published,
    Reaudit,
    ScoredVerdict,
    SlotRow,
    SlotState,
    SubmissionRow,
    SubmissionState,
    group_of,
    ids_bytes,
    submission_of,
    times_of,
    u64_bytes,
    u64_of,
)
from trainer.ledger_use import UseOfLedger

ARRIVALS_KEPT = 256  # versions of which it is known when nodes got them
EVENTS_KEPT = 2_000
EVENTS_BETWEEN = 100  # events, from one time that old ones are removed to the next
BUSY_SECONDS = 30  # how long a writer waits for another process' transaction


class Ledger(AuditsOfLedger, LearningOfLedger, LogOfRun, NodesOfLedger, PairsOfLedger, UseOfLedger, CareOfLedger):
    """One connection. Methods outside `with ledger.write():` commit by themselves.

    Use a connection from one thread at a time. Raises StorageError on a full disk or a database
    that stays locked; nothing of the failed transaction remains.
    """

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        if not path.exists():
            raise UsageError(f"no ledger at {path}: make a run first with `rltrainer init`")
        self._path = path
        try:
            self._db = self._connect(path, read_only)
            found = self._db.execute("PRAGMA user_version").fetchone()[0]
        except sqlite3.DatabaseError as error:
            raise StorageError(f"the ledger {path} cannot be read ({error}): restore it from a backup") from None
        if found == 0:
            raise StorageError(f"the ledger {path} is empty: restore it from a backup")
        if found != SCHEMA_VERSION:
            whose = "a newer rlcommons" if found > SCHEMA_VERSION else "an older rlcommons"
            raise UsageError(
                f"{path} has ledger format {found}, of {whose}; this one reads {SCHEMA_VERSION}: use the rlcommons "
                "that made it, or begin a new run from the latest of its policies (`rltrainer init --policy FOLDER`)"
            )

    @property
    def folder(self) -> Path:
        return self._path.parent

    @staticmethod
    def _connect(path: Path, read_only: bool) -> sqlite3.Connection:
        db = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")
        db.execute("PRAGMA query_only = " + ("ON" if read_only else "OFF"))
        if read_only:
            # KiB. A viewer looks twice a second for weeks; the default of 2 MiB only fills up slowly, like a leak.
            db.execute("PRAGMA cache_size = -256")
        return db

    @classmethod
    def create(cls, path: Path) -> Ledger:
        """A new, empty ledger. Raises UsageError when the file exists, StorageError when it cannot be written."""
        if path.exists():
            raise UsageError(f"{path} exists already")
        try:
            with closing(cls._connect(path, read_only=False)) as db:
                db.executescript(SCHEMA + f"PRAGMA user_version = {SCHEMA_VERSION};")
        except sqlite3.Error as error:
            raise StorageError(f"the ledger {path} could not be made: {error}: make room there") from error
        return cls(path)

    def close(self) -> None:
        self._db.close()

    @contextmanager
    def write(self) -> Iterator[None]:
        """One atomic, durable transaction; nested use joins the outer one."""
        if self._db.in_transaction:
            yield
            return
        try:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise
        except sqlite3.OperationalError as error:
            raise StorageError(f"the ledger {self._path} could not be written: {error}") from error

    @contextmanager
    def part(self) -> Iterator[None]:
        """Inside `write()`: an exception undoes this part alone; StorageError, of a full disk say, undoes all."""
        self._db.execute("SAVEPOINT part")
        try:
            yield
        except sqlite3.OperationalError as error:
            raise StorageError(f"the ledger {self._path} could not be written: {error}") from error
        except BaseException:
            self._db.execute("ROLLBACK TO part")
            self._db.execute("RELEASE part")
            raise
        self._db.execute("RELEASE part")

    def change_counter(self) -> int:
        """Grows when another connection has committed; cheap enough to poll."""
        counter: int = self._db.execute("PRAGMA data_version").fetchone()[0]
        return counter

    # --- policies (learner writes, gateway signs) ---

    def add_policy(self, version: int, root: bytes, created_ms: int) -> None:
        with self.write():
            self._db.execute(
                "INSERT INTO policies (version, root, created_ms) VALUES (?, ?, ?)", (version, root, created_ms)
            )

    def set_manifest(self, version: int, signed: bytes, published: Published | None = None) -> None:
        """Keep a signed manifest; `published` the first time, when there are figures."""
        with self.write():
            self._db.execute("UPDATE policies SET manifest = ? WHERE version = ?", (signed, version))
            if published is not None:
                self._db.execute(
                    "UPDATE policies SET published_ms = COALESCE(published_ms, ?), bytes = ?, delta_bytes = ? "
                    "WHERE version = ?",
                    (published.at_ms, published.bytes, published.delta_bytes, version),
                )

    def note_arrivals(self, arrivals: Mapping[tuple[int, bytes], int]) -> None:
        """When nodes told first that they have a policy: (version, node) → Unix ms. What is known stays; versions that
        were never made are ignored, and old ones forgotten."""
        with self.write():
            self._db.executemany(
                "INSERT OR IGNORE INTO arrivals SELECT ?1, ?2, ?3 WHERE EXISTS "
                "(SELECT 1 FROM policies WHERE version = ?1 AND manifest IS NOT NULL)",
                [(version, node, at_ms) for (version, node), at_ms in arrivals.items()],
            )
            self._db.execute(
                "DELETE FROM arrivals WHERE version <= (SELECT MAX(version) FROM policies) - ?", (ARRIVALS_KEPT,)
            )

    def policy(self, version: int | None = None) -> tuple[int, bytes, bytes | None] | None:
        """(version, root, manifest or None) of a version, or of the latest."""
        query = "SELECT version, root, manifest FROM policies "
        row = (
            self._db.execute(query + "ORDER BY version DESC LIMIT 1").fetchone()
            if version is None
            else self._db.execute(query + "WHERE version = ?", (version,)).fetchone()
        )
        return None if row is None else (row[0], row[1], row[2])

    def root(self, version: int) -> bytes | None:
        """The root of a version, signed or not."""
        row = self._db.execute("SELECT root FROM policies WHERE version = ?", (version,)).fetchone()
        return None if row is None else bytes(row[0])

    def latest_signed(self) -> int | None:
        latest: int | None = self._db.execute(
            "SELECT MAX(version) FROM policies WHERE manifest IS NOT NULL"
        ).fetchone()[0]
        return latest

    def unsigned_policies(self) -> list[tuple[int, bytes]]:
        return self._db.execute("SELECT version, root FROM policies WHERE manifest IS NULL ORDER BY version").fetchall()

    # --- groups, slots, leases (gateway) ---

    def add_group(self, group: GroupRow, seeds: Sequence[int]) -> None:
        with self.write():
            self._db.execute(
                f"INSERT INTO groups ({GROUP_COLUMNS}, state) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    group.group_id, group.environment, group.parameters, u64_bytes(group.task_index),
                    group.policy_version, group.size, ids_bytes(group.prompt), group.max_turn_tokens,
                    group.created_ms, GroupState.OPEN,
                ),
            )  # fmt: skip
            self._db.executemany(
                "INSERT INTO slots (group_id, slot, seed, state) VALUES (?, ?, ?, ?)",
                [(group.group_id, i, u64_bytes(seed), SlotState.FREE) for i, seed in enumerate(seeds)],
            )

    def open_groups(self) -> list[GroupRow]:
        rows = self._db.execute(
            f"SELECT {GROUP_COLUMNS} FROM groups WHERE state = ? ORDER BY created_ms, group_id",
            (GroupState.OPEN,),
        )
        return [group_of(row) for row in rows]

    def slots_of(self, group_id: bytes) -> list[SlotRow]:
        rows = self._db.execute(
            "SELECT slot, seed, state, node, attempts FROM slots WHERE group_id = ? ORDER BY slot",
            (group_id,),
        )
        return [SlotRow(group_id, r[0], u64_of(r[1]), SlotState(r[2]), r[3], r[4]) for r in rows]

    def group(self, group_id: bytes) -> tuple[GroupRow, GroupState] | None:
        row = self._db.execute(f"SELECT {GROUP_COLUMNS}, state FROM groups WHERE group_id = ?", (group_id,)).fetchone()
        return None if row is None else (group_of(row), GroupState(row[9]))

    def group_state(self, group_id: bytes) -> GroupState:
        row = self._db.execute("SELECT state FROM groups WHERE group_id = ?", (group_id,)).fetchone()
        return GroupState(row[0])

    def open_slots(self) -> list[OpenSlot]:
        """Every slot of every open group, oldest group first."""
        rows = self._db.execute(
            "SELECT g.group_id, g.policy_version, g.created_ms, s.slot, s.state, s.node, s.attempts "
            "FROM groups g JOIN slots s ON s.group_id = g.group_id WHERE g.state = ? "
            "ORDER BY g.created_ms, g.group_id, s.slot",
            (GroupState.OPEN,),
        )
        return [OpenSlot(r[0], r[1], r[2], r[3], SlotState(r[4]), r[5], r[6]) for r in rows]

    def refused_answers(self) -> list[tuple[bytes, int, bytes]]:
        """(group, slot, node) of every refused submission of an open group."""
        return self._db.execute(
            f"SELECT s.group_id, s.slot, s.node FROM groups g CROSS JOIN {OF_GROUP} ON s.group_id = g.group_id "
            "WHERE g.state = ? AND s.state = ?",
            (GroupState.OPEN, SubmissionState.REFUSED),
        ).fetchall()

    def groups_made(self) -> int:
        """Groups of the whole run, in any state."""
        count: int = self._db.execute("SELECT COUNT(*) FROM groups").fetchone()[0]
        return count

    def count_groups(self, state: GroupState) -> int:
        count: int = self._db.execute("SELECT COUNT(*) FROM groups WHERE state = ?", (state,)).fetchone()[0]
        return count

    def drop_group(self, group_id: bytes, cause: str) -> None:
        with self.write():
            self._db.execute(
                "UPDATE groups SET state = ?, cause = ? WHERE group_id = ? AND state IN (?, ?)",
                (GroupState.DROPPED, cause, group_id, GroupState.OPEN, GroupState.COMPLETE),
            )

    def drop_stale_groups(self, oldest_version: int, cause: str) -> int:
        """Drop open and complete groups of policies before `oldest_version`; how many."""
        with self.write():
            return self._db.execute(
                "UPDATE groups SET state = ?, cause = ? WHERE state IN (?, ?) AND policy_version < ?",
                (GroupState.DROPPED, cause, GroupState.OPEN, GroupState.COMPLETE, oldest_version),
            ).rowcount

    def add_lease(
        self,
        lease_id: bytes,
        node: bytes,
        group_id: bytes,
        slots: Sequence[int],
        signed: bytes,
        issued_ms: int,
        deadline_ms: int,
    ) -> None:
        with self.write():
            of_group = "(SELECT policy_version FROM groups WHERE group_id = ?)"
            self._db.execute(
                f"INSERT INTO leases VALUES (?, ?, ?, ?, ?, ?, ?, {of_group})",
                (lease_id, node, group_id, signed, issued_ms, deadline_ms, LeaseState.OPEN, group_id),
            )
            self._db.executemany(
                "UPDATE slots SET state = ?, node = ?, lease_id = ?, attempts = attempts + 1 "
                "WHERE group_id = ? AND slot = ?",
                [(SlotState.LEASED, node, lease_id, group_id, slot) for slot in slots],
            )
            self._db.execute("UPDATE nodes SET leased = leased + ? WHERE node = ?", (len(slots), node))

    def lease(self, lease_id: bytes) -> tuple[bytes, bytes, LeaseState] | None:
        """(node, canonical Signed, state) of a lease."""
        row = self._db.execute("SELECT node, signed, state FROM leases WHERE lease_id = ?", (lease_id,)).fetchone()
        return None if row is None else (row[0], row[1], LeaseState(row[2]))

    def leased_slots(self, node: bytes) -> int:
        """Slots a node holds and has not answered."""
        count: int = self._db.execute(
            "SELECT COUNT(*) FROM leases l JOIN slots s ON s.group_id = l.group_id AND s.lease_id = l.lease_id "
            "WHERE l.state = ? AND l.node = ? AND s.state = ?",
            (LeaseState.OPEN, node, SlotState.LEASED),
        ).fetchone()[0]
        return count

    def holders(self) -> set[bytes]:
        """The nodes that hold a lease."""
        rows = self._db.execute("SELECT DISTINCT node FROM leases WHERE state = ?", (LeaseState.OPEN,))
        return {row[0] for row in rows}

    def end_lease(self, lease_id: bytes, state: LeaseState) -> int:
        """Close a lease as EXPIRED or RETURNED: its unanswered slots are free again, with their
        seeds. How many there were; they count on the node."""
        with self.write():
            row = self._db.execute(
                "SELECT node, group_id FROM leases WHERE lease_id = ? AND state = ?",
                (lease_id, LeaseState.OPEN),
            ).fetchone()
            if row is None:
                return 0
            self._db.execute("UPDATE leases SET state = ? WHERE lease_id = ?", (state, lease_id))
            column = "expired" if state is LeaseState.EXPIRED else "returned"
            freed = self._db.execute(
                f"UPDATE slots SET state = ?, node = NULL, lease_id = NULL, {column} = {column} + 1 "
                "WHERE group_id = ? AND lease_id = ? AND state = ?",
                (SlotState.FREE, row[1], lease_id, SlotState.LEASED),
            ).rowcount
            self._db.execute(f"UPDATE nodes SET {column} = {column} + ? WHERE node = ?", (freed, row[0]))
            return freed

    def due_leases(self, now_ms: int) -> list[bytes]:
        rows = self._db.execute(
            "SELECT lease_id FROM leases WHERE state = ? AND deadline_ms < ?", (LeaseState.OPEN, now_ms)
        )
        return [row[0] for row in rows]

    # --- submissions (gateway) ---

    def submission_of_slot(self, group_id: bytes, slot: int) -> tuple[bytes, SubmissionState] | None:
        """(digest, state) of the latest submission for a slot that was not refused or left unjudged."""
        row = self._db.execute(
            "SELECT digest, state FROM submissions WHERE group_id = ? AND slot = ? AND state NOT IN (?, ?) "
            "ORDER BY sequence DESC LIMIT 1",
            (group_id, slot, SubmissionState.REFUSED, SubmissionState.NOT_JUDGED),
        ).fetchone()
        return None if row is None else (row[0], SubmissionState(row[1]))

    def receipt(self, digest: bytes, node: bytes) -> bytes | None:
        """The canonical Signed receipt a node was given for a trace digest, if it was."""
        row = self._db.execute(
            "SELECT receipt FROM submissions WHERE digest = ? AND node = ?", (digest, node)
        ).fetchone()
        return None if row is None else row[0]

    def slot(self, group_id: bytes, slot: int) -> tuple[SlotState, bytes | None] | None:
        """(state, lease that holds or answered it) of a slot."""
        row = self._db.execute(
            "SELECT state, lease_id FROM slots WHERE group_id = ? AND slot = ?", (group_id, slot)
        ).fetchone()
        return None if row is None else (SlotState(row[0]), row[1])

    def answered(self, lease_id: bytes, slot: int) -> bool:
        """Whether a slot was answered under this lease, whatever became of the answer."""
        query = "SELECT 1 FROM submissions s JOIN leases l ON l.group_id = s.group_id WHERE l.lease_id = ? "
        row = self._db.execute(query + "AND s.slot = ? AND s.lease_id = l.lease_id", (lease_id, slot)).fetchone()
        return row is not None

    def next_sequence(self) -> int:
        """The sequence the next submission gets; valid inside `write()`."""
        row = self._db.execute("SELECT seq FROM sqlite_sequence WHERE name = 'submissions'").fetchone()
        return 1 if row is None else row[0] + 1

    def add_submission(self, new: NewSubmission, sequence: int, receipt: bytes) -> None:
        times = times_of(new.timing)
        with self.write():
            self._db.execute(
                "INSERT INTO submissions (sequence, digest, lease_id, group_id, slot, node, policy_version, "
                f"received_ms, receipt, trace, tokens, state, {TIMES}) VALUES ({', '.join('?' * (12 + len(times)))})",
                (
                    sequence, new.digest, new.lease_id, new.group_id, new.slot, new.node, new.policy_version,
                    new.received_ms, receipt, new.trace, new.tokens, SubmissionState.RECEIVED, *times,
                ),
            )  # fmt: skip
            self._db.execute(
                "UPDATE slots SET state = ?, digest = ? WHERE group_id = ? AND slot = ?",
                (SlotState.ANSWERED, new.digest, new.group_id, new.slot),
            )
            self._db.execute("UPDATE nodes SET tokens = tokens + ? WHERE node = ?", (new.tokens, new.node))
            self._db.execute(
                "UPDATE leases SET state = ? WHERE lease_id = ? AND state = ? AND NOT EXISTS ("
                "SELECT 1 FROM slots WHERE group_id = ? AND lease_id = ? AND state = ?)",
                (
                    LeaseState.CLOSED,
                    new.lease_id,
                    LeaseState.OPEN,
                    new.group_id,
                    new.lease_id,
                    SlotState.LEASED,
                ),
            )

    def submissions(self, state: SubmissionState, most: int) -> list[SubmissionRow]:
        """The oldest submissions in a state, with their leases."""
        rows = self._db.execute(
            f"SELECT {SUBMISSION_COLUMNS} FROM submissions s JOIN leases l ON l.lease_id = s.lease_id "
            "WHERE s.state = ? ORDER BY s.sequence LIMIT ?",
            (state, most),
        )
        return [submission_of(row) for row in rows]

    def abandoned_audits(self, most: int) -> list[SubmissionRow]:
        """Unclaimed audits of groups that were dropped meanwhile: nobody needs their answer, but a node that asked
        for it."""
        rows = self._db.execute(
            f"SELECT {SUBMISSION_COLUMNS} FROM submissions s JOIN leases l ON l.lease_id = s.lease_id "
            "JOIN groups g ON g.group_id = s.group_id WHERE s.state = ? AND s.claimed_by IS NULL AND g.state = ? "
            "AND s.reaudit IS NOT ? ORDER BY s.sequence LIMIT ?",
            (SubmissionState.AUDIT, GroupState.DROPPED, Reaudit.WAITING, most),
        )
        return [submission_of(row) for row in rows]

    def submission(self, digest: bytes) -> SubmissionRow | None:
        row = self._db.execute(
            f"SELECT {SUBMISSION_COLUMNS} FROM submissions s JOIN leases l ON l.lease_id = s.lease_id "
            "WHERE s.digest = ?",
            (digest,),
        ).fetchone()
        return None if row is None else submission_of(row)

    def send_to_audit(self, sequence: int, reward: float, checks: bytes) -> None:
        with self.write():
            self._db.execute(
                "UPDATE submissions SET state = ?, reward = ?, checks = ? WHERE sequence = ?",
                (SubmissionState.AUDIT, reward, checks, sequence),
            )

    def note_draw(self, sequence: int, node: bytes, draw: Draw) -> None:
        """Whether a submission was drawn for audit, and from what that follows; in the transaction of its decision."""
        with self.write():
            self._db.execute(
                "UPDATE submissions SET draw_seen = ?, draw_floor = ?, draw_rate = ?, drawn = ?, draw_trusted = ? "
                "WHERE sequence = ?",
                (draw.seen, draw.floor, draw.rate, draw.drawn, draw.trusted, sequence),
            )
            self._db.execute("UPDATE nodes SET rate = ? WHERE node = ?", (draw.rate, node))

    def judge_again(self, node: bytes, version: int) -> int:
        """What a node drew under a policy version, was audited and accepted, and is not yet learned from, gets a
        verdict once more, from the audit that is there; how many."""
        with self.write():
            return self._hold_back(
                "s.node = ? AND s.policy_version = ? AND s.state = ? AND s.audit IS NOT NULL",
                (node, version, SubmissionState.ACCEPTED),
                SubmissionState.AUDITED,
            )

    def quarantine(self, node: bytes) -> int:
        """Send every accepted, unaudited, untrained trace of a node to audit; how many."""
        with self.write():
            return self._hold_back(
                "s.node = ? AND s.state = ? AND s.mu IS NULL", (node, SubmissionState.ACCEPTED), SubmissionState.AUDIT
            )

    def _hold_back(self, which: str, values: Sequence[Any], state: SubmissionState) -> int:
        """Put accepted traces of groups that may yet be learned from into an earlier state; how many."""
        rows = self._db.execute(
            "SELECT s.sequence, s.group_id, s.slot FROM submissions s JOIN groups g ON g.group_id = s.group_id "
            f"WHERE {which} AND s.trace IS NOT NULL AND g.state IN (?, ?)",
            (*values, GroupState.OPEN, GroupState.COMPLETE),
        ).fetchall()
        for sequence, group_id, slot in rows:
            self._db.execute("UPDATE submissions SET state = ? WHERE sequence = ?", (state, sequence))
            self._db.execute(
                "UPDATE slots SET state = ? WHERE group_id = ? AND slot = ?", (SlotState.ANSWERED, group_id, slot)
            )
            self._db.execute(
                "UPDATE groups SET state = ? WHERE group_id = ? AND state = ?",
                (GroupState.OPEN, group_id, GroupState.COMPLETE),
            )
        return len(rows)

    def judge(
        self,
        submission: SubmissionRow,
        *,
        state: SubmissionState,
        reason: str | None,
        audited: bool,
        reward: float | None,
        checks: bytes,
        verdict: bytes,
        judged_ms: int,
        calibration: bytes | None = None,
        scores: Sequence[float] = (),
    ) -> None:
        """Record a signed verdict with all that follows from it: the slot, the group, the node's count.

        Accepting the last open slot completes the group. A refused or unjudged slot is free again. After a re-audit
        the slot may be another's by now: then an accepted trace is credited and not used.
        """
        accepted = state is SubmissionState.ACCEPTED
        again = submission.is_asked_for
        with self.write():
            kept = state
            if accepted and again and not self._take_back(submission):
                kept = SubmissionState.CREDITED
            self._db.execute(
                "UPDATE submissions SET state = ?, reason = ?, reward = COALESCE(?, reward), checks = ?, "
                "claimed_by = NULL, reaudit = ? WHERE sequence = ?",
                (kept, reason, reward, checks, Reaudit.DONE if again else submission.reaudit, submission.sequence),
            )
            # SPEC 8.8: what passed an audit, is judged again and passes again keeps its verdict.
            newest = self._newest_verdict(submission.digest, submission.node)
            if again or not accepted or newest != (SubmissionState.ACCEPTED, True):
                self._count_audit(submission, audited, state)
                self.add_verdict(
                    submission.node, submission.digest, state, reason, audited, judged_ms, verdict, calibration, scores
                )
            self._settle_slot(submission, accepted)
            self._complete(submission.group_id)

    def _settle_slot(self, submission: SubmissionRow, accepted: bool) -> None:
        """Of a slot that waits for this verdict. One that was free, or another's, when a re-audit began does not."""
        slot_state = SlotState.ACCEPTED if accepted else SlotState.FREE
        self._db.execute(
            "UPDATE slots SET state = ?, node = CASE WHEN ? THEN node ELSE NULL END, "
            "lease_id = CASE WHEN ? THEN lease_id ELSE NULL END "
            "WHERE group_id = ? AND slot = ? AND digest = ? AND state = ?",
            (
                slot_state, accepted, accepted, submission.group_id, submission.slot, submission.digest,
                SlotState.ANSWERED,
            ),
        )  # fmt: skip

    def _take_back(self, submission: SubmissionRow) -> bool:
        """Give a slot to the trace that was wrongly refused, where nobody has leased or answered it since."""
        taken = self._db.execute(
            "UPDATE slots SET state = ?, node = ?, lease_id = ? WHERE group_id = ? AND slot = ? AND digest = ? "
            "AND state = ? AND EXISTS (SELECT 1 FROM groups WHERE group_id = ? AND state = ?)",
            (
                SlotState.ACCEPTED, submission.node, submission.lease_id, submission.group_id, submission.slot,
                submission.digest, SlotState.FREE, submission.group_id, GroupState.OPEN,
            ),
        )  # fmt: skip
        return taken.rowcount == 1

    def _complete(self, group_id: bytes) -> None:
        self._db.execute(
            "UPDATE groups SET state = ? WHERE group_id = ? AND state = ? AND NOT EXISTS ("
            "SELECT 1 FROM slots WHERE group_id = ? AND state != ?)",
            (GroupState.COMPLETE, group_id, GroupState.OPEN, group_id, SlotState.ACCEPTED),
        )

    def _count_audit(self, submission: SubmissionRow, audited: bool, state: SubmissionState) -> None:
        """On the node. A trace audited before counts as what it is now."""
        columns = {SubmissionState.ACCEPTED: "audits_passed", SubmissionState.REFUSED: "audits_failed"}
        earlier = self._newest_verdict(submission.digest, submission.node)
        changes = []
        if earlier is not None and earlier[1]:
            changes.append((columns.get(earlier[0]), -1))
        if audited:
            changes.append((columns.get(state), 1))
        for column, by in changes:
            if column is not None:
                self._db.execute(f"UPDATE nodes SET {column} = {column} + ? WHERE node = ?", (by, submission.node))

    def _newest_verdict(self, digest: bytes, node: bytes) -> tuple[SubmissionState, bool] | None:
        """(outcome, audited) of the newest verdict on a trace of a node."""
        row = self._db.execute(
            "SELECT outcome, audited FROM verdicts WHERE digest = ? AND node = ? ORDER BY sequence DESC LIMIT 1",
            (digest, node),
        ).fetchone()
        return None if row is None else (SubmissionState(row[0]), bool(row[1]))

    def add_verdict(
        self,
        node: bytes,
        digest: bytes,
        state: SubmissionState,
        reason: str | None,
        audited: bool,
        judged_ms: int,
        signed: bytes,
        calibration: bytes | None = None,
        scores: Sequence[float] = (),
    ) -> None:
        """A verdict, also for a trace that was never stored; counts on the node."""
        with self.write():
            # A retro-audit judges a trace a second time: the node's count moves with the newest verdict. By node
            # too: whoever submits another's trace must not touch the verdicts on it.
            earlier = self._db.execute(
                "SELECT outcome FROM verdicts WHERE digest = ? AND node = ? ORDER BY sequence DESC LIMIT 1",
                (digest, node),
            ).fetchone()
            columns = {SubmissionState.ACCEPTED: "accepted", SubmissionState.REFUSED: "refused"}
            if reason == Reason.LEASE_EXPIRED:
                columns = {}  # late is no lie: it counts as expired
            if earlier is not None and (column := columns.get(SubmissionState(earlier[0]))):
                self._db.execute(f"UPDATE nodes SET {column} = {column} - 1 WHERE node = ?", (node,))
            if column := columns.get(state):
                self._db.execute(f"UPDATE nodes SET {column} = {column} + 1 WHERE node = ?", (node,))
            self._db.execute(
                "INSERT INTO verdicts (node, digest, outcome, reason, audited, judged_ms, signed, epoch, calibration, "
                "scores) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    node, digest, state, reason, audited, judged_ms, signed, self._epoch_of(digest, node), calibration,
                    np.asarray(scores, dtype="<f8").tobytes() if scores else None,
                ),
            )  # fmt: skip

    def _epoch_of(self, digest: bytes, node: bytes) -> int:
        """SPEC 8.12: a verdict belongs to the epoch of the lease; one on a trace that has no receipt to the latest,
        which is not closed before there is another."""
        row = self._db.execute(
            "SELECT policy_version FROM submissions WHERE digest = ? AND node = ?", (digest, node)
        ).fetchone()
        return (self.latest_signed() or 0) if row is None else int(row[0])

    def verdicts_after(self, node: bytes, cursor: int, most: int) -> list[tuple[int, bytes]]:
        """(sequence, canonical Signed) of a node's verdicts after `cursor`, oldest first."""
        return self._db.execute(
            "SELECT sequence, signed FROM verdicts WHERE node = ? AND sequence > ? ORDER BY sequence LIMIT ?",
            (node, cursor, most),
        ).fetchall()

    def verdict(self, digest: bytes, node: bytes) -> bytes | None:
        """The newest canonical Signed verdict on a trace digest that a node submitted."""
        row = self._db.execute(
            "SELECT signed FROM verdicts WHERE digest = ? AND node = ? ORDER BY sequence DESC LIMIT 1", (digest, node)
        ).fetchone()
        return None if row is None else row[0]

    def last_verdict(self) -> int:
        """The sequence of the newest verdict; 0: there is none."""
        row = self._db.execute("SELECT COALESCE(MAX(sequence), 0) FROM verdicts").fetchone()
        return int(row[0])

    def count_verdicts(self) -> int:
        count: int = self._db.execute("SELECT COUNT(*) FROM verdicts").fetchone()[0]
        return count

    def scored_verdicts(self, node: bytes, version: int, after: int) -> list[ScoredVerdict]:
        """The audited verdicts on what a node drew under a policy version, oldest first, after a sequence."""
        rows = self._db.execute(
            "SELECT sequence, digest, calibration, scores FROM verdicts WHERE audited AND node = ? AND epoch = ? "
            "AND sequence > ? ORDER BY sequence",
            (node, version, after),
        )
        return [
            ScoredVerdict(
                sequence, digest, calibration, () if raw is None else tuple(np.frombuffer(raw, "<f8").tolist())
            )
            for sequence, digest, calibration, raw in rows
        ]

    # --- the log (gateway); what is read of an epoch: ledger_log.py ---

    def add_seal(self, version: int, signed: bytes) -> None:
        with self.write():
            self._db.execute("INSERT INTO epochs VALUES (?, ?)", (version, signed))

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """Reads within see one state of the ledger, whatever others write meanwhile."""
        self._db.execute("BEGIN")
        try:
            self._db.execute("SELECT 1 FROM policies LIMIT 1").fetchone()  # the state is fixed by the first read
            yield
        finally:
            self._db.execute("COMMIT")

    # --- events ---

    def add_event(self, at_ms: int, kind: str, text: str) -> None:
        """A line for people: what happened and why. The newest EVENTS_KEPT of each kind are kept, and up to
        EVENTS_BETWEEN more of any: a node that makes one with every trace cannot push an alarm out."""
        with self.write():
            cursor = self._db.execute(
                "INSERT INTO events (at_ms, kind, text) VALUES (?, ?, ?)", (at_ms, kind, text[:1000])
            )
            if (cursor.lastrowid or 0) % EVENTS_BETWEEN == 0:
                numbered = "SELECT id, ROW_NUMBER() OVER (PARTITION BY kind ORDER BY id DESC) AS age FROM events"
                self._db.execute(
                    f"DELETE FROM events WHERE id IN (SELECT id FROM ({numbered}) WHERE age > ?)", (EVENTS_KEPT,)
                )

    # --- views for people (page, status) ---

    def view(self, query: str, parameters: Sequence[Any] = ()) -> list[dict[str, Any]]:
        """Rows of a SELECT as dicts; for the page and `rltrainer status`, on read-only connections."""
        cursor = self._db.execute(query, parameters)
        names = [column[0] for column in cursor.description]
        return [dict(zip(names, row, strict=True)) for row in cursor]
