"""Finds the newest policy without the trainer: while there is no session, other nodes and mirrors are asked for it.

What they show is worth what the trainer's signature on it says. Not here: fetching it (swarm.py).
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Final

import trio

from node.report import Event, Level, Report, Status
from node.sources import Source
from node.swarm import Swarm
from node.weights import PolicyFollower
from protocol import limits
from protocol.errors import NetError, RemoteError

_FIRST_SECONDS: Final = 3.0  # most sessions are there by then
_ASKED: Final = 8  # sources, each time


class Scout:
    """Offers the follower what others have."""

    def __init__(
        self,
        swarm: Swarm,
        follower: PolicyFollower,
        now_ms: Callable[[], int],
        status: Status,
        report: Report,
        random: Random,
        *,
        first_seconds: float = _FIRST_SECONDS,
        seconds: float = limits.HEARTBEAT_SECONDS,
    ) -> None:
        self._swarm = swarm
        self._follower = follower
        self._now_ms = now_ms
        self._status = status
        self._report = report
        self._random = random
        self._first_seconds = first_seconds
        self._seconds = seconds

    async def run(self) -> None:
        await trio.sleep(self._first_seconds)
        while True:
            if not self._status.connected:
                await self._look()
            await trio.sleep(self._seconds)

    async def _look(self) -> None:
        nodes: list[Source] = list(self._swarm.nodes())
        self._random.shuffle(nodes)
        async with trio.open_nursery() as nursery:
            for source in [*self._swarm.mirrors, *nodes][:_ASKED]:
                nursery.start_soon(self._ask, source)

    async def _ask(self, source: Source) -> None:
        before = self._follower.highest
        try:
            signed = await source.manifest()
            self._follower.offer(signed, heard_from=source.name, now_ms=self._now_ms())
        except (NetError, RemoteError) as error:
            text = f"no policy from {source.name}: {error}"
            self._report(Event("manifest_refused", text, Level.DETAIL, {"peer": source.name}))
            return
        if self._follower.highest > before:
            why = "while the trainer is away" if self._status.lost_because else "before the trainer was reached"
            text = f"policy {self._follower.highest} is out, says {source.name}, {why}"
            values = {"version": self._follower.highest, "peer": source.name}
            self._report(Event("manifest_found", text, Level.INFO, values))
