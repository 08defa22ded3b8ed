"""What a download still wants, who says it has it, and which piece to ask whom for next. Pure: no clock, no network.

Rarest first, at random among equals; a piece is asked of one source, unless that one is late; the last resort is asked
only for what nobody else has. Not here: asking (swarm.py), what is remembered of a source (sources.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Final

from protocol.policy import Blob

_COMPARED: Final = 256  # pieces whose rarity is compared for one choice
_ASKED_AT_ONCE: Final = 3  # sources, for one late piece
_PROMISES: Final = 2  # an honest node has one piece at a time on its way from the trainer


@dataclass(frozen=True, slots=True)
class Ask:
    """A request on its way."""

    since: float
    late_at: float  # others may be asked too, and the source gets nothing more until it has answered
    slow_at: float  # at the end of a download, when there is nothing else to do, others may be asked from here on


@dataclass(slots=True, eq=False)
class Offer:
    """What one source has to give in this download, and what it was asked for."""

    last_resort: bool = False
    holds: set[bytes] | None = None  # what it says it has; None: whatever there is
    lacks: set[bytes] = field(default_factory=set)  # what it had not when it was asked
    coming: dict[bytes, float] = field(default_factory=dict)  # what it asks the last resort for, believed until then
    promised: set[bytes] = field(default_factory=set)  # what it ever said was coming
    asks: dict[bytes, Ask] = field(default_factory=dict)
    answers: bool = False  # it is connected, and not left alone for a while

    def may_have(self, digest: bytes) -> bool:
        return digest not in self.lacks and (self.holds is None or digest in self.holds)

    def promise(self, digest: bytes, now: float, until: float) -> None:
        """It says that a piece is coming: believed once, and of few pieces at a time."""
        self.coming = {each: end for each, end in self.coming.items() if end > now}
        if digest not in self.promised and len(self.coming) < _PROMISES:
            self.promised.add(digest)
            self.coming[digest] = until

    def gives(self, digest: bytes, now: float) -> bool:
        """Whether the last resort need not be asked for this piece."""
        return self.may_have(digest) or self.coming.get(digest, now) > now

    def is_late(self, now: float) -> bool:
        return any(ask.late_at <= now for ask in self.asks.values())

    def is_usable(self, now: float) -> bool:
        return self.answers and not self.is_late(now)


class Pieces:
    """The pieces of one download."""

    def __init__(self, wanted: Iterable[Blob], random: Random) -> None:
        distinct = list({blob.digest: blob for blob in wanted}.values())
        # A random order: nodes that start together then ask the trainer for different pieces.
        random.shuffle(distinct)
        self.missing = {blob.digest: blob for blob in distinct}
        self.total = self.left = sum(blob.length for blob in distinct)
        self.offers: list[Offer] = []

    def done(self, digest: bytes) -> bool:
        """Note that a piece is here. False when it was already."""
        blob = self.missing.pop(digest, None)
        if blob is None:
            return False
        self.left -= blob.length
        return True

    def helpers(self, now: float) -> int:
        """How many others than the last resort give pieces now, or will when they have some."""
        return sum(offer.is_usable(now) for offer in self.offers if not offer.last_resort)

    def choose(self, offer: Offer, now: float) -> Blob | None:
        """The piece to ask this source for now, if any."""
        if not offer.is_usable(now):
            return None
        usable = [each for each in self.offers if each.is_usable(now) and not each.last_resort]
        others = [each for each in usable if each is not offer]
        asked = self._asked()
        fresh = (digest for digest in self._may_give(offer) if digest not in asked)
        if offer.last_resort:
            fresh = (digest for digest in fresh if not any(each.gives(digest, now) for each in others))
            found = next(fresh, None)
        else:
            found = _rarest(itertools.islice(fresh, _COMPARED), usable)
        if found is None:
            found = self._second(offer, now, asked)
        return None if found is None else self.missing[found]

    def _asked(self) -> dict[bytes, list[Ask]]:
        asked: dict[bytes, list[Ask]] = {}
        for offer in self.offers:
            for digest, ask in offer.asks.items():
                asked.setdefault(digest, []).append(ask)
        return asked

    def _may_give(self, offer: Offer) -> Iterator[bytes]:
        return (digest for digest in self.missing if offer.may_have(digest))

    def _second(self, offer: Offer, now: float, asked: dict[bytes, list[Ask]]) -> bytes | None:
        """A piece that others were asked for and are late with."""
        is_end = not offer.last_resort and all(digest in asked for digest in self.missing)
        for digest, asks in asked.items():
            if digest not in self.missing or digest in offer.asks or not offer.may_have(digest):
                continue
            if len(asks) < _ASKED_AT_ONCE and all((ask.slow_at if is_end else ask.late_at) <= now for ask in asks):
                return digest
        return None


def _rarest(digests: Iterable[bytes], offers: Collection[Offer]) -> bytes | None:
    """The first of those that fewest sources have. A source of everything tells none apart."""
    counted = [offer for offer in offers if offer.holds is not None]
    return min(digests, key=lambda digest: sum(offer.may_have(digest) for offer in counted), default=None)
