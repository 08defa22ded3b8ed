"""Who may connect, and for how long: slots for handshakes and for connections.

Stock libp2p counts inbound connections for ever (the 251st is refused until a restart) and lets
half-open handshakes shut everybody out for 10 seconds. Not here: what a connection may do once it
is in (yamux.py), bans (the host).
"""

from __future__ import annotations

import ipaddress
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

import trio

from protocol.net.base import HostLimits
from protocol.net.yamux import Connection

_EVICTABLE_AFTER_SECONDS = 10.0  # a peer needs time to open its first stream


class Refused(Exception):
    """An inbound connection that our limits or bans turn away."""


def address_group(host: str) -> str:
    """What one household or provider can hold many of counts as one: an IPv4 address, an IPv6 /64."""
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        return str(ipaddress.ip_network((address, 64), strict=False))
    return str(address)


class Door:
    """Slots for strangers. A slot is held while its connection lives; stock counts them for ever.

    When handshakes are full, the oldest unfinished one gives way: whoever means it needs
    milliseconds, so half-open connections cannot lock honest peers out.
    """

    def __init__(self, limits: HostLimits) -> None:
        self._limits = limits
        self._pending: OrderedDict[trio.CancelScope, str] = OrderedDict()
        self._pending_by_address: Counter[str] = Counter()
        self._live: dict[Connection, str] = {}
        self._live_by_address: Counter[str] = Counter()

    @property
    def handshakes(self) -> int:
        return len(self._pending)

    @contextmanager
    def handshake(self, group: str) -> Iterator[trio.CancelScope]:
        """A slot for one handshake; the scope is cancelled when time is up or a newcomer needs the slot."""
        self._make_way(group)
        scope = trio.move_on_after(self._limits.handshake_seconds)
        self._pending[scope] = group
        self._pending_by_address[group] += 1
        try:
            with scope:
                yield scope
        finally:
            self._forget(scope)

    def _make_way(self, group: str) -> None:
        if self._pending_by_address[group] >= self._limits.handshakes_per_address:
            self._evict(next(scope for scope, other in self._pending.items() if other == group))
        elif len(self._pending) >= self._limits.handshakes:
            self._evict(next(iter(self._pending)))

    def _evict(self, scope: trio.CancelScope) -> None:
        scope.cancel()
        self._forget(scope)

    def _forget(self, scope: trio.CancelScope) -> None:
        group = self._pending.pop(scope, None)
        if group is not None:
            decrement(self._pending_by_address, group)

    @contextmanager
    def slot(self, connection: Connection, group: str) -> Iterator[None]:
        """A slot for a connection whose peer has proved itself. Raises Refused when there is none."""
        self._limit_per_peer(connection.peer)
        if self._live_by_address[group] >= self._limits.connections_per_address:
            self._evict_idle([one for one, other in self._live.items() if other == group])
        if len(self._live) >= self._limits.connections:
            self._evict_idle(list(self._live))
        self._live[connection] = group
        self._live_by_address[group] += 1
        try:
            yield
        finally:
            if self._live.pop(connection, None) is not None:
                decrement(self._live_by_address, group)

    def _limit_per_peer(self, node: bytes) -> None:
        its = [one for one in self._live if one.peer == node]
        if len(its) >= self._limits.connections_per_peer:
            # A restarted peer's older connections are dead, whatever TCP still believes.
            its[0].fail("the same peer connected anew too often")

    def _evict_idle(self, candidates: list[Connection]) -> None:
        """Slots are for peers that talk: the oldest connection without a stream gives way."""
        now = trio.current_time()
        for one in candidates:
            if not one.channels and now - one.since > _EVICTABLE_AFTER_SECONDS:
                one.fail("it carried nothing and its slot was needed")
                return
        raise Refused("every connection slot is taken")


def decrement(counter: Counter[str], key: str) -> None:
    counter[key] -= 1
    if not counter[key]:
        del counter[key]
