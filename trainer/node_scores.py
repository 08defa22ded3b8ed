"""The sums of a node's scores under one policy version, as the `node` check of SPEC 10.8 takes them.

Of several verdicts on one trace the newest counts. Reads the ledger and keeps what it read; what the judge has
decided since and the ledger does not hold yet is added on top. Not here: what a sum means (verify/scores.py).
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final

from trainer.ledger import Ledger

KEPT: Final = 256  # tallies in memory: nodes times the policy versions they draw under

Key = tuple[bytes, int]  # node, policy version


@dataclass(slots=True)
class _Tally:
    """What the ledger holds of a node and version, up to the sequence `seen`."""

    seen: int = 0
    newest: dict[bytes, tuple[bytes | None, tuple[float, ...]]] = field(default_factory=dict)  # by trace digest
    sums: dict[bytes, list[float]] = field(default_factory=dict)  # by calibration

    def replace(self, digest: bytes, calibration: bytes | None, scores: tuple[float, ...]) -> None:
        earlier, before = self.newest.get(digest, (None, ()))
        if earlier is not None:
            _add(self.sums[earlier], before, -1)
        if calibration is not None:
            _add(self.sums.setdefault(calibration, [0.0] * len(scores)), scores, 1)
        self.newest[digest] = (calibration, scores)


class NodeScores:
    """For one thread. `begin` before each batch of decisions; `add` after each of them."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._tallies: OrderedDict[Key, _Tally] = OrderedDict()
        self._decided: dict[Key, dict[bytes, tuple[bytes | None, tuple[float, ...]]]] = {}

    def begin(self, sealed: int) -> None:
        """What was decided is in the ledger now, or was undone. Nothing comes of versions before `sealed` any more."""
        self._decided.clear()
        for key in [key for key in self._tallies if key[1] < sealed]:
            del self._tallies[key]

    def add(
        self, node: bytes, version: int, digest: bytes, calibration: bytes | None, scores: tuple[float, ...]
    ) -> None:
        """A verdict that follows those of the ledger."""
        self._decided.setdefault((node, version), {})[digest] = (calibration, scores)

    def before(self, node: bytes, version: int, digest: bytes, calibration: bytes | None) -> tuple[float, ...]:
        """The sums over all other traces with a verdict so far that were scored by this calibration, one number an
        alternative; empty where there is none."""
        if calibration is None:
            return ()
        tally = self._read((node, version))
        sums = list(tally.sums.get(calibration, ()))
        later = self._decided.get((node, version), {})
        for each in {**dict.fromkeys(later), digest: None}:
            earlier, scores = tally.newest.get(each, (None, ()))
            if earlier == calibration:
                _add(sums, scores, -1)
            now, scores = later.get(each, (None, ()))
            if now == calibration and each != digest:
                sums = sums or [0.0] * len(scores)
                _add(sums, scores, 1)
        return tuple(sums)

    def _read(self, key: Key) -> _Tally:
        tally = self._tallies.pop(key, None) or _Tally()
        self._tallies[key] = tally
        if len(self._tallies) > KEPT:
            self._tallies.popitem(last=False)
        for each in self._ledger.scored_verdicts(*key, tally.seen):
            tally.replace(each.digest, each.calibration, each.scores)
            tally.seen = each.sequence
        return tally


def _add(sums: list[float], scores: tuple[float, ...], sign: int) -> None:
    for place, score in enumerate(scores):
        sums[place] += sign * score
