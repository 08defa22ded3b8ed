"""A relay: keeps places for nodes behind NAT and splices circuits to them, within limits (circuit relay v2).

libp2p's relay is not used (docs/decisions/0012): one idle circuit is held for ever, any number of them is carried for
somebody who reserved nothing, nothing bounds them together, and a status is written into the middle of the bytes it
carries. Not here: what is said on the wire (circuit.py), connections (p2p.py).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Final

import trio

from protocol.net import circuit, protobuf
from protocol.net.base import RelayLimits
from protocol.net.bucket import Bucket
from protocol.net.circuit import HopKind, Status, Terms
from protocol.net.framing import ChannelClosed
from protocol.net.multistream import NegotiationFailed
from protocol.net.protobuf import Fields, Malformed
from protocol.net.wire import Counters
from protocol.net.yamux import WRITE_BYTES, Channel

_BURST_SECONDS: Final = 1.0


class Places:
    """Who has a place, and who is at either end of how many circuits. Times are trio's."""

    def __init__(self, limits: RelayLimits) -> None:
        self._limits = limits
        self._until: dict[bytes, float] = {}
        self._circuits_of: Counter[bytes] = Counter()
        self.circuits = 0

    @property
    def reservations(self) -> int:
        return len(self._until)

    def reserve(self, node: bytes, is_here: Callable[[bytes], bool]) -> bool:
        """Keep or renew a place. False: there is none. Places of who left or did not renew are free."""
        now = trio.current_time()
        self._until = {each: end for each, end in self._until.items() if end > now and is_here(each)}
        if node not in self._until and len(self._until) >= self._limits.reservations:
            return False
        self._until[node] = now + self._limits.reservation_seconds
        return True

    def refusal(self, source: bytes, target: bytes) -> Status | None:
        """Why these two get no circuit now."""
        if self._until.get(target, 0.0) <= trio.current_time():
            return Status.NO_RESERVATION
        most = self._limits.circuits_per_peer
        if self.circuits >= self._limits.circuits or max(self._circuits_of[source], self._circuits_of[target]) >= most:
            return Status.RESOURCE_LIMIT_EXCEEDED
        return None

    def begin(self, source: bytes, target: bytes) -> None:
        """A circuit between these two."""
        self.circuits += 1
        self._circuits_of.update((source, target))

    def end(self, source: bytes, target: bytes) -> None:
        self.circuits -= 1
        self._circuits_of -= Counter((source, target))


class Relay:
    """Answers the hop protocol of one host."""

    def __init__(
        self,
        limits: RelayLimits,
        admits: Callable[[bytes], bool],
        open_stop: Callable[[bytes], Awaitable[Channel | None]],
        is_here: Callable[[bytes], bool],
        addresses: Callable[[], list[bytes]],
        counters: Counters,
    ) -> None:
        """`open_stop`: a stream of the stop protocol to a node that is connected, never by dialling; None: it is not.
        `addresses`: where this relay listens, binary multiaddrs."""
        self.limits = limits
        self.places = Places(limits)
        self._admits = admits
        self._open_stop = open_stop
        self._is_here = is_here
        self._addresses = addresses
        self._counters = counters
        self._bucket = Bucket(limits.bytes_per_second, limits.bytes_per_second * _BURST_SECONDS)
        self._terms = Terms(int(limits.circuit_seconds), limits.circuit_bytes)

    async def serve(self, channel: Channel, peer: bytes, *, is_relayed: bool) -> None:
        """One request on one stream; a CONNECT's circuit lasts as long as this runs."""
        try:
            fields = await circuit.receive(channel)
            # The specification: no places and no circuits over circuits.
            if is_relayed:
                await self._decline(channel, Status.PERMISSION_DENIED)
                return
            match protobuf.number(fields, 1, -1):
                case HopKind.RESERVE:
                    await self._reserve(channel, peer)
                case HopKind.CONNECT:
                    await self._connect(channel, peer, fields)
                case _:
                    await self._decline(channel, Status.UNEXPECTED_MESSAGE)
        except Malformed:
            await self._decline(channel, Status.MALFORMED_MESSAGE)
        except trio.TooSlowError:
            channel.abort()

    async def _decline(self, channel: Channel, status: Status) -> None:
        self._counters.relay_refusals += 1
        with trio.move_on_after(circuit.ANSWER_SECONDS):
            await protobuf.send(channel, circuit.hop_status(status))

    async def _reserve(self, channel: Channel, peer: bytes) -> None:
        if not self._admits(peer):
            await self._decline(channel, Status.PERMISSION_DENIED)
            return
        if not self.places.reserve(peer, self._is_here):
            await self._decline(channel, Status.RESERVATION_REFUSED)
            return
        expires = int(time.time() + self.limits.reservation_seconds)
        with trio.fail_after(circuit.ANSWER_SECONDS):
            await protobuf.send(channel, circuit.reserved(expires, self._addresses(), self._terms))

    async def _connect(self, channel: Channel, peer: bytes, fields: Fields) -> None:
        target = circuit.hop_peer(fields)
        refusal = self.places.refusal(peer, target)
        if refusal is not None:
            await self._decline(channel, refusal)
            return
        self.places.begin(peer, target)
        try:
            onward = await self._ask(peer, target)
            if onward is None:
                await self._decline(channel, Status.CONNECTION_FAILED)
                return
            await self._carry(channel, onward)
        finally:
            self.places.end(peer, target)

    async def _ask(self, source: bytes, target: bytes) -> Channel | None:
        """A stream to the target, which agreed to a circuit with `source`."""
        onward = None
        try:
            with trio.fail_after(circuit.ANSWER_SECONDS):
                onward = await self._open_stop(target)
                if onward is None:
                    return None
                await protobuf.send(onward, circuit.stop_connect(source, self._terms))
                circuit.require_stop_ok(await circuit.receive(onward))
                return onward
        except (trio.TooSlowError, ChannelClosed, NegotiationFailed, Malformed, circuit.Declined):
            if onward is not None:
                onward.abort()
            return None

    # --- carrying ---

    async def _carry(self, one: Channel, other: Channel) -> None:
        """Say that it begins; then until an end closes, nothing moves for a while, or bytes or time are used up."""
        ends = trio.current_time() + self.limits.circuit_seconds
        budget = [self.limits.circuit_bytes]
        try:
            with trio.CancelScope() as scope:
                self._prolong(scope, ends)
                await protobuf.send(one, circuit.hop_status(Status.OK, self._terms))
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._pump, one, other, budget, scope, ends)
                    nursery.start_soon(self._pump, other, one, budget, scope, ends)
        finally:
            with trio.CancelScope(shield=True):
                await one.close()
                await other.close()

    def _prolong(self, scope: trio.CancelScope, ends: float) -> None:
        scope.deadline = min(ends, trio.current_time() + self.limits.idle_seconds)

    async def _pump(
        self, source: Channel, sink: Channel, budget: list[int], scope: trio.CancelScope, ends: float
    ) -> None:
        try:
            while True:
                data = await source.receive_some(WRITE_BYTES)
                budget[0] -= len(data)
                if budget[0] < 0:
                    break
                await self._bucket.take(len(data))
                await sink.send(data)
                self._counters.relayed_bytes += len(data)
                self._prolong(scope, ends)
        except ChannelClosed:
            pass
        scope.cancel()
