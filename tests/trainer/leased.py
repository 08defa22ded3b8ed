"""Leases and what became of them, written into a ledger without a network: groups of two slots, answers that are a
few bytes.

Not here: honest traces (fabricate.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from trainer.ledger import Ledger
from trainer.ledger_rows import GroupRow, LeaseState, NewSubmission, StepRow, SubmissionState

NODE, OTHER = b"N" * 32, b"O" * 32
NOW = 1_000_000
FIGURES = dict(
    tokens=1, reward_mean=0.5, staleness_mean=1.0, staleness_max=1, loss=0.1, ess=0.9, kl=0.0, masked=0.0, clipped=0.0,
    entropy=1.0, ratio_mean=1.0, ratio_max=1.0, gradient_norm=1.0, learning_rate=1e-3, seconds=0.1,
)  # fmt: skip


@dataclass
class Story:
    """Writes groups of two slots into a ledger, lease by lease."""

    ledger: Ledger
    names: Iterator[int] = field(default_factory=itertools.count)

    def group(self, version: int = 0, environment: str = "tools8@1") -> bytes:
        name = next(self.names).to_bytes(16, "big")
        row = GroupRow(name, environment, "", 7, version, 2, (1, 2), 14, NOW + int.from_bytes(name, "big"))
        self.ledger.add_group(row, [1, 2])
        return name

    def lease(self, group: bytes, *slots: int, node: bytes = NODE, issued_ms: int = NOW) -> bytes:
        name = next(self.names).to_bytes(16, "big")
        self.ledger.add_lease(name, node, group, slots, b"signed", issued_ms, issued_ms + 60_000)
        return name

    def answer(
        self, group: bytes, lease: bytes, slot: int, tokens: int, reward: float, *, node: bytes = NODE,
        state: SubmissionState = SubmissionState.ACCEPTED, received_ms: int = NOW,
    ) -> None:  # fmt: skip
        digest = next(self.names).to_bytes(32, "big")
        new = NewSubmission(digest, lease, group, slot, node, 0, received_ms, b"trace", tokens)
        self.ledger.add_submission(new, self.ledger.next_sequence(), b"receipt")
        row = self.ledger.submission(digest)
        assert row is not None
        reason = None if state is SubmissionState.ACCEPTED else "MARGIN"
        self.ledger.judge(
            row, state=state, reason=reason, audited=False, reward=reward, checks=b"", verdict=b"v", judged_ms=NOW
        )

    def drawn(self, lengths: tuple[int, int], *, rewards: tuple[float, float] = (0.0, 1.0), **of: str) -> bytes:
        """A complete group."""
        group = self.group(**of)  # type: ignore[arg-type]
        lease = self.lease(group, 0, 1)
        for slot in (0, 1):
            self.answer(group, lease, slot, lengths[slot], rewards[slot])
        return group

    def learn(self, groups: list[bytes], version: int = 1, at_ms: int = NOW, flat: int = 0) -> None:
        counts: dict[str, Any] = {"groups": len(groups) - flat, "traces": 2, "flat_groups": flat, **FIGURES}
        step = StepRow(version=version, created_ms=at_ms, **counts)
        self.ledger.record_step(step, bytes([version]) * 32, groups)

    def spread(self, groups: int) -> list[bytes]:
        """Complete groups of one short trace and one long one, of which every second long one ran out once."""
        made = []
        for number in range(groups):
            group = self.group()
            lease = self.lease(group, 0, 1)
            self.answer(group, lease, 0, 50, 0.0)
            if number % 2:
                self.ledger.end_lease(lease, LeaseState.EXPIRED)
                lease = self.lease(group, 1)
            self.answer(group, lease, 1, 500, 1.0)
            made.append(group)
        return made
