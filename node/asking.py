"""Requests to the trainer: one answer of the expected kind, and which refusals to wait out.

Not here: what is asked when (session.py, submit.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any, Final, TypeVar

import trio

from node.report import Event, Level, Report
from protocol import limits, messages
from protocol.errors import Code, Refused
from protocol.net.backoff import backoff
from protocol.net.session import Session

T = TypeVar("T")

# Refusals that waiting does not heal: the node stops and says what to do.
FATAL: Final = (
    Code.VERSION_MISMATCH,
    Code.WRONG_RUN,
    Code.CLOCK_SKEW,
    Code.ENGINE_NOT_ADMITTED,
    Code.BANNED,
)
# The trainer cannot now; the same request will do later.
LATER: Final = (Code.BUSY, Code.INTERNAL)


class Asker:
    """Asks on one session."""

    def __init__(self, session: Session, report: Report, random: Random) -> None:
        self._session = session
        self._report = report
        self._random = random

    def delays(self) -> Iterator[float]:
        """How long to wait before the next try, and the next."""
        return backoff(self._random)

    async def once(self, request: Any, cls: type[T], what: str) -> T:
        """The answer. Raises Refused, NetError, RemoteError."""
        body = await self._session.request(messages.pack(request), seconds=limits.REQUEST_SECONDS, what=what)
        return messages.expect(cls, body)

    async def patiently(self, request: Any, cls: type[T], what: str) -> T:
        """As `once`; while the trainer is busy or has a fault of its own, again and again."""
        delays = self.delays()
        while True:
            try:
                return await self.once(request, cls, what)
            except Refused as error:
                if error.code not in LATER:
                    raise
                text = f"the trainer cannot answer now while {what}: {error}"
                self._report(Event("busy", text, Level.DETAIL, {"code": str(error.code)}))
                await trio.sleep(next(delays))
