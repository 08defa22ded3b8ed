"""Where others reach this node: where it listens, and, when it is behind NAT, the relays that keep a place for it.

Every relay is asked where it sees this node come from: one that sees an address of this machine's own is not needed.
One on the same machine sees it come from there, which says nothing of a NAT between it and others.
Not here: relays themselves and hole punching (protocol/net), who else there is (peers.py).
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Sequence
from random import Random
from typing import Final

import trio

from node.report import Event, Level, Report, Status
from protocol import limits
from protocol.errors import NetError, Unreachable
from protocol.identity import peer_id
from protocol.net.backoff import backoff
from protocol.net.base import Address, Host, Reservation

_SECONDS: Final = 15.0  # for a relay to answer
_LOOK_SECONDS: Final = 5.0  # a lost connection to a relay is noticed so soon
_OPEN_SECONDS: Final = 600.0  # not behind NAT: asked again, machines move
_LONGEST_SECONDS: Final = 60.0  # between two tries
_MOST_CIRCUITS: Final = 2  # addresses through relays that are told; the rest are direct ones


class Relaying:
    """Keeps places at relays and knows every address of this node's."""

    def __init__(
        self,
        host: Host,
        listening: Sequence[str],
        relays: Sequence[str],
        changed: Callable[[], None],
        report: Report,
        status: Status,
        random: Random,
    ) -> None:
        """`listening`: as told to others, none when it serves nothing, and then no place is asked for. `relays`: their
        addresses. `changed` is called when the addresses are others."""
        self._host = host
        self._listening = tuple(listening)
        self._relays = tuple(relays)
        self._changed = changed
        self._report = report
        self._status = status
        self._random = random
        self._circuits: dict[str, str] = {}  # relay → the address through it, as told to others
        self._translated: set[str] = set()  # relays that see this node at an address of another machine

    def addresses(self) -> tuple[str, ...]:
        """What others are told: direct addresses first."""
        circuits = tuple(self._circuits.values())[:_MOST_CIRCUITS]
        return (*self._listening[: limits.MAX_PEER_ADDRESSES - len(circuits)], *circuits)

    async def run(self) -> None:
        if not self._listening:
            return
        async with trio.open_nursery() as nursery:
            for relay in self._relays:
                nursery.start_soon(self._keep_place, relay)

    async def _keep_place(self, relay: str) -> None:
        delays = backoff(self._random, first=1.0, cap=_LONGEST_SECONDS)
        while True:
            try:
                seen = await self._host.seen_as(relay, seconds=_SECONDS)
                self._note_nat(relay, seen)
                if self._is_own(seen):
                    self._set(relay, None)
                    await trio.sleep(_OPEN_SECONDS)
                    continue
                reservation = await self._host.reserve(relay, seconds=_SECONDS)
            except (NetError, Unreachable) as error:
                self._set(relay, None)
                self._report(Event("no_relay", f"no place at a relay: {error}", Level.DETAIL, {"relay": relay}))
                await trio.sleep(next(delays))
                continue
            delays = backoff(self._random, first=1.0, cap=_LONGEST_SECONDS)
            self._set(relay, reservation)
            await self._until_due(relay, reservation)

    def _is_own(self, seen: str | None) -> bool:
        """Whether others reach this node without help."""
        return any(Address.parse(address).host == seen for address in self._host.addresses)

    def _note_nat(self, relay: str, seen: str | None) -> None:
        if seen is None or self._is_own(seen) or _is_loopback(seen):
            self._translated.discard(relay)
        else:
            self._translated.add(relay)
        self._status.behind_nat = bool(self._translated)

    async def _until_due(self, relay: str, reservation: Reservation) -> None:
        """Until it should be renewed, or the relay is gone and the place with it."""
        node = Address.parse(relay).node
        with trio.move_on_after(max(reservation.seconds / 2, _LOOK_SECONDS)):
            while node in self._host.connected():
                await trio.sleep(_LOOK_SECONDS)

    def _set(self, relay: str, reservation: Reservation | None) -> None:
        before = self._circuits.get(relay)
        if reservation is None:
            self._circuits.pop(relay, None)
        else:
            self._circuits[relay] = Address.parse(reservation.address).told
        self._status.relays = len(self._circuits)
        if self._circuits.get(relay) == before:
            return
        name = peer_id(Address.parse(relay).node)
        text = f"others reach this node through {name}" if reservation else f"no more through {name}"
        self._report(Event("relay", text, Level.DETAIL, {"relay": relay, "address": self._circuits.get(relay)}))
        self._changed()


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
