"""How many rollouts a node keeps in flight, so that its engine stays busy while environments wait. Pure: no clock.

A rollout is either in a turn, which takes a slot of the engine, or waits for its environment, which takes none. So
with 64 slots and rollouts that spend a fifth of their time in turns, 320 in flight keep the slots full. More would
only wait for a slot; and what cannot be drawn by its deadline is better leased to another node. Not here: which
lease is drawn next (leases.py), who acts on it (worker.py).
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Final

KEPT: Final = 64  # completions that the figures are of: the tasks of a run change as it goes
FIRST: Final = 4  # so many before anything is concluded
MOST_A_SLOT: Final = 16  # rollouts in flight: below a share of 6 % the environment is what to mend
DEADLINE_SHARE: Final = 0.5  # of a lease's time, in which what is held should be drawn: the rest is for bad luck


@dataclass(frozen=True, slots=True)
class Completion:
    """One that ended, in seconds. `in_turns`: what its turns took of the whole, with waiting for a slot."""

    in_turns: float
    whole: float


class Pace:
    """What recent completions took here."""

    def __init__(self) -> None:
        self._kept: deque[Completion] = deque(maxlen=KEPT)

    def add(self, completion: Completion) -> None:
        self._kept.append(completion)

    def forget(self) -> None:
        """The engine is another now."""
        self._kept.clear()

    def decoding_share(self) -> float:
        """Of a completion's time, the part in its turns: 1 until some have ended.

        Waiting for a slot counts as decoding. So too many in flight raise the share, and lower the number: where it
        settles, exactly as many rollouts are in a turn as there are slots.
        """
        whole = sum(each.whole for each in self._kept)
        if len(self._kept) < FIRST or whole <= 0:
            return 1.0
        return min(1.0, sum(each.in_turns for each in self._kept) / whole)

    def mean(self) -> float | None:
        """Seconds a completion takes; None until some have ended."""
        if len(self._kept) < FIRST:
            return None
        return sum(each.whole for each in self._kept) / len(self._kept)

    def longest(self) -> float:
        """Seconds that one in ten exceeds; 0 until one has ended."""
        if not self._kept:
            return 0.0
        return sorted(each.whole for each in self._kept)[-max(1, len(self._kept) // 10)]


def rollouts_in_flight(slots: int, decoding_share: float, most: int) -> int:
    """slots ÷ the share of a rollout's time spent decoding, between `slots` and `most`."""
    wanted = math.ceil(slots / decoding_share - 1e-9) if decoding_share > 0 else most
    return max(slots, min(wanted, most))


def most_in_flight(slots: int, environments: int) -> int:
    """`environments`: answers that can be waited for at once. More rollouts than both together would wait for one
    or the other."""
    return min(slots * MOST_A_SLOT, slots + environments)


def held_at_most(in_flight: int, ahead: int, mean: float | None, lease_seconds: float | None) -> int:
    """Slots of leases to hold: what is in flight and what waits behind it, or fewer where that could not be drawn
    in time; at least one.

    So many in flight that each take `mean` seconds are in_flight ÷ mean completions a second. Where that is too
    slow for the leases, fewer are held; each then has more of the engine, and takes less long.
    """
    if mean is None or lease_seconds is None or mean <= 0:
        return in_flight + ahead
    in_time = math.ceil(in_flight / mean * lease_seconds * DEADLINE_SHARE)
    return max(1, min(in_flight + ahead, in_time))
