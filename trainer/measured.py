"""The times a plan is made of, as the ledger and the traces in it tell them.

Nodes' own times are held against the trainer's clock: no rollout took longer than from its lease to its receipt. How
fast nodes decode is known by their last heartbeats alone. Not here: what follows from it (planning.py).
"""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from typing import Any, Final

from protocol import codec
from protocol.envelope import Signed
from protocol.lease import Lease
from protocol.trace import Trace
from trainer.config import TrainerConfig
from trainer.ledger import Ledger
from trainer.planning import AuditTimes, Engines, StepTimes, Stretch, TraceTimes

WINDOW: Final = 16_384  # the newest traces: the tasks and the policy of a run change as it goes
READ: Final = 512  # of which so many are decoded, evenly spread: a long one takes a millisecond or more


def measured(ledger: Ledger, config: TrainerConfig) -> Stretch:
    """The newest WINDOW traces of a run, and the audits and steps since the first of them arrived."""
    rows = ledger.view(
        "SELECT s.sequence, s.received_ms, s.state, s.trace IS NOT NULL AS kept, s.judged_by, s.claimed_ms, "
        "(SELECT v.judged_ms FROM verdicts v WHERE v.digest = s.digest ORDER BY v.sequence LIMIT 1) AS judged_ms, "
        "(SELECT v.audited FROM verdicts v WHERE v.digest = s.digest ORDER BY v.sequence LIMIT 1) AS audited "
        "FROM submissions s ORDER BY s.sequence DESC LIMIT ?",
        (WINDOW,),
    )[::-1]
    since = rows[0]["received_ms"] if rows else 0
    kept = [row["sequence"] for row in rows if row["kept"] and row["state"] == "ACCEPTED"]
    told = _told(ledger, kept[:: max(1, -(-len(kept) // READ))])
    steps = ledger.view(
        "SELECT created_ms, traces, seconds FROM steps WHERE created_ms >= ? ORDER BY version", (since,)
    )
    return Stretch(
        traces=tuple(_times(row, told.get(row["sequence"])) for row in rows),
        audits=_audits(rows),
        steps=tuple(StepTimes(each["created_ms"], each["traces"], each["seconds"]) for each in steps),
        engines=_engines(ledger),
        auditors=config.auditors,
    )


def _told(ledger: Ledger, sequences: list[int]) -> dict[int, tuple[int, float, float]]:
    """Of each trace: tokens generated, seconds of its rollout, seconds it was held."""
    marks = ",".join("?" * len(sequences))
    rows = ledger.view(
        "SELECT s.sequence, s.received_ms, s.trace, l.signed FROM submissions s "
        f"JOIN leases l ON l.lease_id = s.lease_id WHERE s.sequence IN ({marks})",
        sequences,
    )
    return {row["sequence"]: _of_trace(row) for row in rows}


def _of_trace(row: dict[str, Any]) -> tuple[int, float, float]:
    trace = codec.decode(Trace, codec.decode(Signed, row["trace"]).payload)
    lease = codec.decode(Lease, codec.decode(Signed, row["signed"]).payload)
    whole = max(0, row["received_ms"] - lease.issued_ms) / 1000
    rollout = min(whole, max(0, trace.finished_ms - trace.started_ms) / 1000)
    return len(trace.logprobs), rollout, whole - rollout


def _times(row: dict[str, Any], told: tuple[int, float, float] | None) -> TraceTimes:
    generated, rollout, held = told or (None, None, None)
    judged = row["judged_ms"]
    return TraceTimes(
        at_ms=row["received_ms"],
        audited=None if judged is None else bool(row["audited"]),
        verified=None if judged is None else max(0, judged - row["received_ms"]) / 1000,
        generated=generated,
        rollout=rollout,
        held=held,
    )


def _audits(rows: list[dict[str, Any]]) -> tuple[AuditTimes, ...]:
    """Traces of a batch have one time at which their auditor began it. It was done when the auditor began the next, or
    at the latest when the last of its verdicts was given."""
    batches: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if row["judged_by"] is not None and row["audited"] and row["claimed_ms"] is not None:
            batches[row["judged_by"]][row["claimed_ms"]].append(row["judged_ms"])
    found = []
    for of_auditor in batches.values():
        begun = sorted(of_auditor)
        for began, following in pairwise([*begun, None]):
            assert began is not None
            ended = max(of_auditor[began]) if following is None else min(following, max(of_auditor[began]))
            found.append(AuditTimes(began, len(of_auditor[began]), max(0, ended - began) / 1000))
    return tuple(sorted(found, key=lambda each: each.at_ms))


def _engines(ledger: Ledger) -> Engines:
    nodes = ledger.view(
        "SELECT slots_total, slots_busy, slots_waiting, tokens_per_second FROM nodes "
        "WHERE connected AND slots_total > 0"
    )
    drawing = [each for each in nodes if each["slots_busy"] and each["tokens_per_second"] > 0]
    return Engines(
        nodes=len(nodes),
        slots=sum(each["slots_total"] for each in nodes),
        drawing=sum(each["slots_busy"] for each in drawing),
        waiting=sum(each["slots_waiting"] for each in drawing),
        tokens_per_second=sum(each["tokens_per_second"] for each in drawing),
    )
