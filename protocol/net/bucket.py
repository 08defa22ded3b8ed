"""A cap on bytes a second that several share. Not here: who may have how many (the callers)."""

from __future__ import annotations

import math

import trio


class Bucket:
    """Lets so many bytes a second pass, after a first burst. First come, first served."""

    def __init__(self, rate: float, burst: float) -> None:
        """`rate`: bytes a second."""
        self._rate = rate
        self._burst = burst
        self._paid_until = -math.inf  # trio time at which all that passed was within the rate

    def wait_seconds(self, count: int) -> float:
        """How long `count` more bytes would have to wait now."""
        return max(0.0, self._next(count) - trio.current_time() - self._burst / self._rate)

    def _next(self, count: int) -> float:
        return max(self._paid_until, trio.current_time()) + count / self._rate

    async def take(self, count: int) -> None:
        wait = self.wait_seconds(count)
        self._paid_until = self._next(count)
        await trio.sleep(wait)
