"""Where the time of a rollout went: its chain from lease to learner step, as the ledger tells it.

    queue wait → prefill → decode → tool wait → hand-in    at its node: the node's own figures, which nobody checked
    verify → batch wait → train                            by the trainer's clock

The trainer itself saw how long all that is the node's took, from the lease to the receipt (`Stage.NODE`). The node's
figures divide that and are cut down to it: none can claim more. Hand-in is what they leave of it: proofs, the node's
disk, both ways over the network.

A trace may get several verdicts: one accepted unseen is audited when its node fails an audit, a refused one again when
its node asks. Everything here is by one of them: the newest; of a trace that a step took, the newest there was when
that step began. Not here: sums over all rollouts (telemetry.py), how a chain is shown (timeline.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from trainer.ledger import Ledger
from trainer.ledger_rows import TIMES, SubmissionState


class Stage(StrEnum):
    """In their order. NODE is the whole of those that are CLAIMED."""

    QUEUE = "queue_wait"  # at the node: until it was begun, and in turns that had no slot of the engine yet
    PREFILL = "prefill"
    DECODE = "decode"
    TOOL = "tool_wait"
    HAND_IN = "hand_in"
    NODE = "node"
    VERIFY = "verify"  # from the receipt to the verdict that stands
    BATCH = "batch_wait"  # from there until the step that took it began
    TRAIN = "train"  # that step

    @property
    def words(self) -> str:
        return self.value.replace("_", " ")


_TIMES: Final = tuple(TIMES.split(", "))
CLAIMED: Final = (Stage.QUEUE, Stage.PREFILL, Stage.DECODE, Stage.TOOL, Stage.HAND_IN)


@dataclass(frozen=True, slots=True)
class Told:
    """A node's figures for one rollout in seconds, each the sum over its turns, within what the trainer saw."""

    waited: float  # until it was begun
    slot: float  # for a slot of the engine
    prefill: float
    decode: float
    tool: float
    hand_in: float  # the rest

    def of(self, stage: Stage) -> float:
        return {
            Stage.QUEUE: self.waited + self.slot,
            Stage.PREFILL: self.prefill,
            Stage.DECODE: self.decode,
            Stage.TOOL: self.tool,
            Stage.HAND_IN: self.hand_in,
        }[stage]


def told(row: dict[str, Any], whole: float) -> Told | None:
    """Of the columns TIMES. More than `whole` seconds, all together, is cut down to that in proportion; None where
    the node said nothing."""
    claims = [row[name] for name in _TIMES]
    if None in claims:
        return None
    seconds = [claim / 1000 for claim in claims]
    share = min(1.0, whole / max(math.fsum(seconds), 1e-9))
    seconds = [each * share for each in seconds]
    waited, slot, prefill, decode, tool = seconds
    return Told(waited, slot, prefill, decode, tool, hand_in=max(0.0, whole - math.fsum(seconds)))


@dataclass(frozen=True, slots=True)
class Span:
    """A stage of one rollout. `start_ms` is Unix time; of a claimed stage, as if its parts followed each other."""

    stage: Stage
    start_ms: float
    seconds: float
    claimed: bool


@dataclass(frozen=True, slots=True)
class Chain:
    """One rollout. Times are Unix ms of the trainer's clock, None where it has not come to that."""

    sequence: int
    digest: bytes
    node: bytes
    group_id: bytes
    environment: str
    policy_version: int
    state: SubmissionState
    reason: str | None
    tokens: int
    leased_ms: int
    received_ms: int
    told: Told | None
    audited: bool | None  # by the verdict that stands; None before the first
    auditor: str | None
    recomputed_ms: int | None  # when its auditor began
    judged_ms: int | None  # when that was given
    batch: int | None  # the policy version that the step made which took it
    taken_ms: int | None
    learned_ms: int | None

    @property
    def is_judged_again(self) -> bool:
        """It has a verdict, and waits for another."""
        return self.judged_ms is not None and self.state in _TO_BE_JUDGED

    @property
    def node_seconds(self) -> float:
        return max(0, self.received_ms - self.leased_ms) / 1000

    def spans(self) -> list[Span]:
        """One after the other, without gaps. Where its node told nothing, NODE stands for its part."""
        found: list[Span] = []
        at: float = self.leased_ms
        if self.told is None:
            found.append(Span(Stage.NODE, at, self.node_seconds, False))
        else:
            for stage in CLAIMED:
                found.append(Span(stage, at, self.told.of(stage), True))
                at += 1000 * self.told.of(stage)
        at = self.received_ms
        ends = ((Stage.VERIFY, self.judged_ms), (Stage.BATCH, self.taken_ms), (Stage.TRAIN, self.learned_ms))
        for stage, end_ms in ends:
            if end_ms is None:
                break
            found.append(Span(stage, at, max(0.0, end_ms - at) / 1000, False))
            at = max(at, end_ms)
        return found


_TO_BE_JUDGED: Final = (SubmissionState.RECEIVED, SubmissionState.AUDIT, SubmissionState.AUDITED)


def of_standing_verdict(column: str) -> str:
    """SQL: of the verdict that stands on the submission `s`, where `t` is the step that took it, if one did."""
    of_trace = f"SELECT v.{column} FROM verdicts v WHERE v.digest = s.digest AND v.node = s.node"
    in_time = "(t.version IS NULL OR v.judged_ms <= t.created_ms - 1000 * t.seconds)"
    return (
        f"COALESCE(({of_trace} AND {in_time} ORDER BY v.sequence DESC LIMIT 1), "
        f"({of_trace} ORDER BY v.sequence LIMIT 1))"
    )


_COLUMNS: Final = (
    "SELECT s.sequence, s.digest, s.node, s.group_id, g.environment, s.policy_version, s.state, s.reason, s.tokens, "
    f"l.issued_ms, s.received_ms, {TIMES}, s.judged_by, s.claimed_ms, t.version AS batch, t.created_ms AS learned_ms, "
    f"t.seconds, {of_standing_verdict('judged_ms')} AS judged_ms, {of_standing_verdict('audited')} AS audited "
)
_OF_SUBMISSIONS: Final = (
    _COLUMNS + "FROM submissions s JOIN leases l ON l.lease_id = s.lease_id JOIN groups g ON g.group_id = s.group_id "
    "LEFT JOIN steps t ON t.version = g.batch AND s.state = 'ACCEPTED' "
)
_OF_BATCHES: Final = (
    _COLUMNS + "FROM groups g INDEXED BY groups_by_batch CROSS JOIN submissions s INDEXED BY submissions_by_group "
    "ON s.group_id = g.group_id JOIN leases l ON l.lease_id = s.lease_id JOIN steps t ON t.version = g.batch "
    "WHERE g.batch IS NOT NULL AND s.state = 'ACCEPTED' ORDER BY g.batch DESC, s.sequence DESC LIMIT ?"
)


def newest(ledger: Ledger, most: int, *, since_ms: int = 0) -> list[Chain]:
    """Of the rollouts that arrived last, and not before `since_ms`; oldest first."""
    # By the index of times: the newest are few of many.
    first = ledger.view(
        "SELECT sequence FROM submissions INDEXED BY submissions_by_time WHERE received_ms >= ? "
        "ORDER BY received_ms LIMIT 1",
        (since_ms,),
    )
    if not first:
        return []
    query = _OF_SUBMISSIONS + "WHERE s.sequence >= ? ORDER BY s.sequence DESC LIMIT ?"
    return [_chain(row) for row in ledger.view(query, (first[0]["sequence"], most))][::-1]


def newest_learned(ledger: Ledger, most: int) -> list[Chain]:
    """Of the rollouts that the last steps took, oldest first."""
    found = [_chain(row) for row in ledger.view(_OF_BATCHES, (most,))]
    return sorted(found, key=lambda chain: chain.sequence)


def with_digest(ledger: Ledger, prefix: str) -> list[Chain]:
    """Those whose digest begins with these hex digits, at most two."""
    query = _OF_SUBMISSIONS + "WHERE hex(s.digest) LIKE ? ORDER BY s.sequence LIMIT 2"
    return [_chain(row) for row in ledger.view(query, (prefix + "%",))]


def complete_ms(ledger: Ledger, chain: Chain) -> int | None:
    """When the last of its group was judged; None where that is not complete."""
    rows = ledger.view(
        f"SELECT {of_standing_verdict('judged_ms')} AS at, g.size FROM submissions s "
        "JOIN groups g ON g.group_id = s.group_id LEFT JOIN steps t ON t.version = g.batch "
        "WHERE s.group_id = ? AND s.state = 'ACCEPTED'",
        (chain.group_id,),
    )
    found = [row["at"] for row in rows if row["at"] is not None]
    return max(found) if found and len(found) == rows[0]["size"] else None


def _chain(row: dict[str, Any]) -> Chain:
    judged, learned = row["judged_ms"], row["learned_ms"]
    taken = None
    if learned is not None and judged is not None:
        taken = max(judged, learned - round(1000 * row["seconds"]))
    return Chain(
        sequence=row["sequence"],
        digest=row["digest"],
        node=row["node"],
        group_id=row["group_id"],
        environment=row["environment"],
        policy_version=row["policy_version"],
        state=SubmissionState(row["state"]),
        reason=row["reason"],
        tokens=row["tokens"],
        leased_ms=row["issued_ms"],
        received_ms=row["received_ms"],
        told=told(row, max(0, row["received_ms"] - row["issued_ms"]) / 1000),
        audited=None if row["audited"] is None else bool(row["audited"]),
        auditor=row["judged_by"],
        recomputed_ms=row["claimed_ms"],
        judged_ms=judged,
        batch=row["batch"],
        taken_ms=taken,
        learned_ms=learned,
    )


# --- many ---


@dataclass(frozen=True, slots=True)
class Spread:
    """Of one stage over some rollouts, seconds."""

    stage: Stage
    count: int
    mean: float
    p95: float  # one in twenty takes longer


def spread(stage: Stage, seconds: Iterable[float]) -> Spread | None:
    """None of nothing."""
    found = sorted(seconds)
    if not found:
        return None
    return Spread(stage, len(found), math.fsum(found) / len(found), found[math.ceil(0.95 * len(found)) - 1])


def spreads(chains: Sequence[Chain]) -> list[Spread]:
    """Of each stage that any of them has come to, in order."""
    seconds: dict[Stage, list[float]] = {stage: [] for stage in Stage}
    for chain in chains:
        for each in chain.spans():
            if each.stage is not Stage.NODE:
                seconds[each.stage].append(each.seconds)
        seconds[Stage.NODE].append(chain.node_seconds)
    return [found for stage in Stage if (found := spread(stage, seconds[stage]))]
