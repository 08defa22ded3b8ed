"""How long to wait before the next try. Pure: randomness comes in, nothing sleeps here."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from random import Random


def backoff(random: Random, first: float = 0.5, cap: float = 30.0) -> Iterator[float]:
    """Endless delays in seconds: each drawn from the upper half of (0, first · 2ⁿ], which stops growing at `cap`.

    The jitter spreads hundreds of nodes that lost the same trainer at the same moment; the lower
    half is left out so that no node hammers.
    """
    for attempt in itertools.count():
        longest = min(cap, first * 2.0 ** min(attempt, 64))
        yield longest * random.uniform(0.5, 1.0)
