"""The times a plan is made of: means over the last minutes, as the chains of their rollouts tell them.

Not of the last heartbeats: slots in use at one moment say little of a run that draws in bursts. Not here: what
follows from it (planning.py), and how far a node is believed about its own times (chain.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

from trainer import chain
from trainer.chain import Chain
from trainer.config import TrainerConfig
from trainer.ledger import Ledger
from trainer.planning import AuditTimes, StepTimes, Stretch, TraceTimes

# The stretch is as long as the longer of these: the tasks and the policy of a run change as it goes.
MINUTES: Final = 10
STEPS: Final = 32
MOST: Final = 16_384  # traces of it


def measured(ledger: Ledger, config: TrainerConfig) -> Stretch:
    """The newest traces of a run, and the audits and steps since the first of them arrived."""
    found = chain.newest(ledger, MOST, since_ms=_beginning(ledger))
    since = found[0].received_ms if found else 0
    steps = ledger.view(
        "SELECT created_ms, traces, seconds FROM steps WHERE created_ms >= ? ORDER BY version", (since,)
    )
    nodes, slots = _nodes(ledger, found)
    return Stretch(
        traces=tuple(_times(each) for each in found),
        audits=_audits(found),
        steps=tuple(StepTimes(each["created_ms"], each["traces"], each["seconds"]) for each in steps),
        nodes=nodes,
        slots=slots,
        auditors=config.auditors,
    )


def _beginning(ledger: Ledger) -> int:
    """Unix ms."""
    newest = ledger.view("SELECT received_ms FROM submissions ORDER BY sequence DESC LIMIT 1")
    before = ledger.view("SELECT created_ms FROM steps ORDER BY version DESC LIMIT 1 OFFSET ?", (STEPS,))
    if not newest or not before:
        return 0
    return min(int(newest[0]["received_ms"]) - MINUTES * 60_000, int(before[0]["created_ms"]))


def _times(of: Chain) -> TraceTimes:
    told = of.told
    return TraceTimes(
        at_ms=of.received_ms,
        audited=of.audited,
        verified=None if of.judged_ms is None else max(0, of.judged_ms - of.received_ms) / 1000,
        held=None if told is None else told.waited + told.hand_in,
        slot_wait=None if told is None else told.slot,
        decoding=None if told is None else told.prefill + told.decode,
        tools=None if told is None else told.tool,
    )


def _audits(found: Sequence[Chain]) -> tuple[AuditTimes, ...]:
    """Traces of a batch have one time at which their auditor began it. It was done when the auditor began the next, or
    at the latest when the last of its verdicts was given."""
    batches: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for each in found:
        if each.auditor and each.audited and each.recomputed_ms is not None and each.judged_ms is not None:
            batches[each.auditor][each.recomputed_ms].append(each.judged_ms)
    made = []
    for of_auditor in batches.values():
        begun = sorted(of_auditor)
        for began, following in pairwise([*begun, None]):
            assert began is not None
            ended = max(of_auditor[began]) if following is None else min(following, max(of_auditor[began]))
            made.append(AuditTimes(began, len(of_auditor[began]), max(0, ended - began) / 1000))
    return tuple(sorted(made, key=lambda each: each.at_ms))


def _nodes(ledger: Ledger, found: Sequence[Chain]) -> tuple[int, int]:
    """How many and their slots: those that are connected, or, of a run that is not served, those that drew."""
    told = ledger.view("SELECT node, slots_total, connected FROM nodes WHERE slots_total > 0")
    drew = {each.node for each in found}
    here = [row for row in told if row["connected"]] or [row for row in told if row["node"] in drew]
    return len(here), sum(row["slots_total"] for row in here)
