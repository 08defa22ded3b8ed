"""What the ledger holds of learning: groups that may be learned from, steps, evaluations.

A part of the ledger, in whose transactions it writes. Not here: which groups a batch takes (batch.py).
"""

from __future__ import annotations

import itertools
import sqlite3
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import numpy as np

from trainer.ledger_rows import (
    GROUP_COLUMNS,
    OF_GROUP,
    CompleteGroup,
    EvaluationRow,
    GroupOutcome,
    GroupState,
    StepRow,
    SubmissionState,
    TrainingTrace,
    group_of,
)


class LearningOfLedger:
    """Written by the learner."""

    _db: sqlite3.Connection  # the ledger's connection

    if TYPE_CHECKING:  # the ledger has it

        def write(self) -> AbstractContextManager[None]: ...

        def add_policy(self, version: int, root: bytes, created_ms: int) -> None: ...

    def complete_groups(self) -> list[GroupOutcome]:
        """What the complete groups earned, oldest first (by policy version, then age)."""
        rows = self._db.execute(
            "SELECT g.group_id, g.policy_version, s.reward "
            f"FROM groups g CROSS JOIN {OF_GROUP} ON s.group_id = g.group_id "
            "WHERE g.state = ? AND s.state = ? ORDER BY g.policy_version, g.created_ms, g.group_id, s.slot",
            (GroupState.COMPLETE, SubmissionState.ACCEPTED),
        )
        grouped = itertools.groupby(rows, key=lambda row: (row[0], row[1]))
        return [GroupOutcome(*key, tuple(row[2] for row in members)) for key, members in grouped]

    def training_groups(self, group_ids: Sequence[bytes]) -> list[CompleteGroup]:
        """Groups that are still complete, of those named, with their accepted traces, in the order named."""
        found = []
        for group_id in group_ids:
            row = self._db.execute(
                f"SELECT {GROUP_COLUMNS} FROM groups WHERE group_id = ? AND state = ?",
                (group_id, GroupState.COMPLETE),
            ).fetchone()
            if row is not None:
                found.append(CompleteGroup(group_of(row), self._training_traces(group_id)))
        return found

    def drawers(self, group_ids: Sequence[bytes]) -> dict[bytes, tuple[bytes, ...]]:
        """Who drew the accepted completions of each of these groups, in the order named."""
        found = {}
        for group_id in group_ids:
            rows = self._db.execute(
                "SELECT node FROM submissions WHERE group_id = ? AND state = ? ORDER BY slot",
                (group_id, SubmissionState.ACCEPTED),
            )
            found[group_id] = tuple(row[0] for row in rows)
        return found

    def _training_traces(self, group_id: bytes) -> tuple[TrainingTrace, ...]:
        rows = self._db.execute(
            "SELECT slot, node, digest, reward, trace, mu FROM submissions WHERE group_id = ? AND state = ? "
            "ORDER BY slot",
            (group_id, SubmissionState.ACCEPTED),
        )
        return tuple(
            TrainingTrace(slot, node, digest, reward, trace, None if mu is None else np.frombuffer(mu, dtype="<f4"))
            for slot, node, digest, reward, trace, mu in rows
        )

    def record_step(self, step: StepRow, root: bytes, taken: Iterable[bytes]) -> None:
        """One learner step, atomically: its figures, the groups it used and the policy it made."""
        with self.write():
            values = tuple(getattr(step, name) for name in StepRow.__slots__)
            self._db.execute(f"INSERT INTO steps VALUES ({', '.join('?' * len(values))})", values)
            self._db.executemany(
                "UPDATE groups SET state = ?, batch = ? WHERE group_id = ?",
                [(GroupState.TAKEN, step.version, group_id) for group_id in taken],
            )
            self.add_policy(step.version, root, step.created_ms)

    def steps(self, after: int = -1) -> list[StepRow]:
        rows = self._db.execute("SELECT * FROM steps WHERE version > ? ORDER BY version", (after,))
        return [StepRow(*row) for row in rows]

    def record_evaluation(self, row: EvaluationRow) -> None:
        with self.write():
            values = tuple(getattr(row, name) for name in EvaluationRow.__slots__)
            self._db.execute(f"INSERT OR REPLACE INTO evaluations VALUES ({', '.join('?' * len(values))})", values)

    def evaluations(self, after: int = -1) -> list[EvaluationRow]:
        rows = self._db.execute("SELECT * FROM evaluations WHERE version > ? ORDER BY version", (after,))
        return [EvaluationRow(*row) for row in rows]

    def is_evaluated(self, version: int) -> bool:
        row = self._db.execute("SELECT 1 FROM evaluations WHERE version = ?", (version,)).fetchone()
        return row is not None
