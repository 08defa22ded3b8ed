"""How long each stage of the chain takes, over all rollouts of a run: Prometheus histograms, and a table for people.

Read from the ledger in the order in which things were written there, each once, so that a process that was started
again shows what the one before did. A histogram takes nothing back: `verify` is counted with the first verdict on a
trace, where chain.py has it end with the one that stands; `batch_wait` begins with that one in both. Not here: the
chain of one rollout (chain.py).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from typing import Any, Final

from prometheus_client.core import HistogramMetricFamily

from trainer.chain import CLAIMED, Stage, of_standing_verdict, spread, told
from trainer.ledger import Ledger
from trainer.ledger_rows import TIMES

BUCKETS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)  # seconds
MOST_ENVIRONMENTS: Final = 16  # a label of its own each; further ones share one
RECENT: Final = 512  # of each stage, of which the table is

_PAGE: Final = 2048  # rows in memory at once, of a run that may have millions

_RECEIVED: Final = (
    f"SELECT s.sequence, g.environment, s.received_ms - l.issued_ms AS whole, {TIMES} FROM submissions s "
    "JOIN leases l ON l.lease_id = s.lease_id JOIN groups g ON g.group_id = s.group_id "
    "WHERE s.sequence > ? ORDER BY s.sequence LIMIT ?"
)
_JUDGED: Final = (  # for the first time
    "SELECT v.sequence, g.environment, v.judged_ms - s.received_ms AS ms, EXISTS (SELECT 1 FROM verdicts e "
    "WHERE e.digest = v.digest AND e.node = v.node AND e.sequence < v.sequence) AS again FROM verdicts v "
    "LEFT JOIN submissions s ON s.digest = v.digest AND s.node = v.node "
    "LEFT JOIN groups g ON g.group_id = s.group_id WHERE v.sequence > ? ORDER BY v.sequence LIMIT ?"
)
_STEPS: Final = "SELECT version, created_ms, seconds FROM steps WHERE version > ? ORDER BY version LIMIT ?"
_TAKEN: Final = (
    f"SELECT g.environment, {of_standing_verdict('judged_ms')} AS judged_ms "
    "FROM groups g INDEXED BY groups_by_batch JOIN steps t ON t.version = g.batch "
    "CROSS JOIN submissions s INDEXED BY submissions_by_group ON s.group_id = g.group_id "
    "WHERE g.batch = ? AND s.state = 'ACCEPTED'"
)


@dataclass(slots=True)
class _Histogram:
    """Observations by the bucket they fall into, the last of them without an end."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS) + 1))
    total: float = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(BUCKETS, seconds)] += 1
        self.total += seconds

    def buckets(self) -> list[tuple[str, float]]:
        return list(zip((*map(str, BUCKETS), "+Inf"), accumulate(self.counts), strict=True))


class Telemetry:
    """Sums of a run up to where its ledger was read last."""

    def __init__(self) -> None:
        self._received, self._judged, self._learned = 0, 0, -1  # the last of each that was read
        self._sums: dict[tuple[Stage, str], _Histogram] = defaultdict(_Histogram)
        self._recent: dict[Stage, deque[float]] = {stage: deque(maxlen=RECENT) for stage in Stage}
        self._environments: set[str] = set()

    def catch_up(self, ledger: Ledger) -> None:
        """Read what is new."""
        for row in _pages(ledger, _RECEIVED, self._received, "sequence"):
            self._received = row["sequence"]
            self._add_node(row)
        for row in _pages(ledger, _JUDGED, self._judged, "sequence"):
            self._judged = row["sequence"]
            if row["ms"] is not None and not row["again"]:  # not of a trace that was turned away
                self._add(Stage.VERIFY, row["environment"], row["ms"] / 1000)
        for step in _pages(ledger, _STEPS, self._learned, "version"):
            self._learned = step["version"]
            began = step["created_ms"] / 1000 - step["seconds"]
            for row in ledger.view(_TAKEN, (step["version"],)):
                if row["judged_ms"] is not None:
                    self._add(Stage.BATCH, row["environment"], began - row["judged_ms"] / 1000)
                self._add(Stage.TRAIN, row["environment"], step["seconds"])

    def _add_node(self, row: dict[str, Any]) -> None:
        whole = max(0.0, row["whole"] / 1000)
        self._add(Stage.NODE, row["environment"], whole)
        if found := told(row, whole):
            for stage in CLAIMED:
                self._add(stage, row["environment"], found.of(stage))

    def _add(self, stage: Stage, environment: str, seconds: float) -> None:
        if environment not in self._environments and len(self._environments) == MOST_ENVIRONMENTS:
            environment = "other"
        else:
            self._environments.add(environment)
        seconds = max(0.0, seconds)
        self._sums[stage, environment].add(seconds)
        self._recent[stage].append(seconds)

    def family(self) -> HistogramMetricFamily:
        """As `rlcommons_stage_seconds`. `source`: "claimed" is a node's word within what the trainer saw."""
        text = "Seconds of a rollout by stage of its way from lease to learner step"
        found = HistogramMetricFamily("rlcommons_stage_seconds", text, labels=["stage", "source", "environment"])
        for (stage, environment), sums in self._sums.items():
            source = "claimed" if stage in CLAIMED else "seen"
            found.add_metric([stage, source, environment], buckets=sums.buckets(), sum_value=sums.total)
        return found

    def table(self) -> list[dict[str, Any]]:
        """Of each stage the newest RECENT: `stage`, `title`, `claimed`, `count`, `mean` and `p95` in seconds."""
        rows = [found for stage in Stage if (found := spread(stage, self._recent[stage]))]
        return [{**asdict(row), "title": row.stage.words, "claimed": row.stage in CLAIMED} for row in rows]


def _pages(ledger: Ledger, query: str, after: int, key: str) -> Iterator[dict[str, Any]]:
    """The rows of a query in the order of `key`, page by page."""
    while rows := ledger.view(query, (after, _PAGE)):
        yield from rows
        after = rows[-1][key]
        if len(rows) < _PAGE:
            return
