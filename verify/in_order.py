"""Numbers that should be 1, 2, 3, … and come in pieces, a bit out of order: what comes when, and what is missing.

The epochs of a log overlap in time, so each holds some of the run's receipts and verdicts; no more of them is kept
here than waits for one before it. Not here: what the numbers count (run_audit.py).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class InOrder(Generic[T]):
    """Hands items out in the order of their numbers."""

    def __init__(self) -> None:
        self.reached = 0  # all up to this number were handed out by `ready`
        self.highest = 0
        self._waiting: list[int] = []
        self._items: dict[int, T] = {}

    def add(self, number: int, item: T) -> bool:
        """False for a number that came before, or 0."""
        if number <= self.reached or number in self._items:
            return False
        self._items[number] = item
        heapq.heappush(self._waiting, number)
        self.highest = max(self.highest, number)
        return True

    def ready(self) -> Iterator[tuple[int, T]]:
        """Those that have all before them, each once."""
        while self._waiting and self._waiting[0] == self.reached + 1:
            number = heapq.heappop(self._waiting)
            self.reached = number
            yield number, self._items.pop(number)

    def missing(self) -> list[tuple[int, int]]:
        """The gaps below the highest number, (first, last), once everything is here and `ready` was emptied."""
        gaps = []
        expected = self.reached + 1
        for number in sorted(self._waiting):
            if number > expected:
                gaps.append((expected, number - 1))
            expected = number + 1
        return gaps
