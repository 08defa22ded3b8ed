"""Hosts that talk inside one process, behaving as libp2p hosts do: windows, deadlines, resets, bans.

For tests and simulations without sockets, on trio's real or virtual clock. A `Network` can delay
bytes, cut nodes off from each other, and put hosts behind NAT, where only a relay reaches them. Not here: loss,
reordering, bandwidth (TCP hides the first two; a relay's rate is not kept either), cost of encryption.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum

import trio

from protocol import identity
from protocol.errors import UsageError
from protocol.identity import Identity
from protocol.net import unreachable
from protocol.net.base import Address, Handler, Host, HostLimits, HostStatistics, RelayLimits, Reservation, Stream
from protocol.net.framing import ChannelClosed, FramedStream, serve_contained
from protocol.net.relay import Places
from protocol.net.yamux import INITIAL_WINDOW


class Nat(StrEnum):
    """What stands between a host and the others. Nobody dials through either."""

    KEEPS_PORTS = "keeps ports"  # two hosts that dial each other at once get through
    RANDOM_PORTS = "random ports"  # they do not


class Network:
    """The world in which memory hosts find each other."""

    def __init__(self, *, delay: float = 0.0) -> None:
        """`delay`: seconds every byte travels, one way."""
        self.delay = delay
        self._hosts: dict[str, _Host] = {}
        self._numbers = itertools.count(1)
        self._cuts: list[tuple[frozenset[bytes], frozenset[bytes]]] = []
        self._pipes: set[_Pipe] = set()
        self._healed = trio.Event()

    @asynccontextmanager
    async def host(
        self,
        who: Identity,
        *,
        listen: Sequence[str] = ("/memory/0",),
        limits: HostLimits | None = None,
        nat: Nat | None = None,
    ) -> AsyncIterator[Host]:
        """A running host; "/memory/0" takes a free number, () makes a host that only dials.

        Raises UsageError when another host has the number.
        """
        numbers = [self._number(address) for address in listen]
        failure: BaseException | None = None
        async with trio.open_nursery() as nursery:
            host = _Host(self, who, numbers, limits or HostLimits(), nursery, nat)
            for number in numbers:
                self._hosts[number] = host
            try:
                yield host
            except BaseException as error:  # kept, so that the nursery does not wrap it into a group
                failure = error
            for number in numbers:
                del self._hosts[number]
            host.leave()
            nursery.cancel_scope.cancel()
        if failure is not None:
            raise failure

    def partition(self, left: Iterable[bytes], right: Iterable[bytes]) -> None:
        """Nothing travels between the two groups of nodes until `heal`; nobody is told."""
        self._cuts.append((frozenset(left), frozenset(right)))

    def heal(self) -> None:
        """Undo every partition; what was on its way arrives."""
        self._cuts.clear()
        self._healed.set()
        self._healed = trio.Event()
        for pipe in list(self._pipes):
            pipe.poke()

    def is_cut(self, one: bytes, other: bytes) -> bool:
        return any((one in a and other in b) or (one in b and other in a) for a, b in self._cuts)

    async def travel(self, one: bytes, other: bytes, trips: int) -> None:
        """Wait as long as `trips` one-way messages take."""
        await trio.sleep(self.delay * trips)
        while self.is_cut(one, other):
            await self._healed.wait()

    def _number(self, address: str) -> str:
        match address.split("/"):
            case ["", "memory", "0"]:
                return next(free for free in map(str, self._numbers) if free not in self._hosts)
            case ["", "memory", number] if number.isascii() and number.isdigit():
                if number in self._hosts:
                    raise UsageError(f"cannot listen on {address}: another host of this process has that number")
                return number
        raise UsageError(f"cannot listen on '{address}': it should look like /memory/7")

    def find(self, number: str) -> _Host | None:
        return self._hosts.get(number)


# What travels behind the bytes of a pipe.
@dataclass(frozen=True, slots=True)
class _End:
    reason: str
    drops_unread: bool = False
    ends_both_ways: bool = True


class _Pipe:
    """One end of a channel between two hosts."""

    other: _Pipe

    def __init__(self, network: Network, local: _Host, remote: bytes) -> None:
        self.remote = remote
        self._network = network
        self._local = local
        self._travelling: deque[tuple[float, bytes | _End]] = deque()  # (arrival, what), towards us
        self._travelling_bytes = 0
        self._arrived = bytearray()
        self._wanted = 0
        self._incoming_end: str | None = None
        self._closed: str | None = None
        self._changed = trio.Event()
        network._pipes.add(self)

    def poke(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    async def send(self, data: bytes) -> None:
        await trio.lowlevel.checkpoint()
        view = memoryview(data)
        while view:
            self._advance()
            if self._closed is not None:
                raise ChannelClosed(self._closed)
            size = min(len(view), self.other._room())
            if size <= 0:
                await self._wait()
                continue
            self._post(bytes(view[:size]))
            self._local.bytes_out += size
            self._local.note_relayed(self.remote, size)
            view = view[size:]

    async def receive_exactly(self, count: int) -> bytes:
        await trio.lowlevel.checkpoint()
        self._wanted = count
        self.other.poke()
        try:
            while True:
                self._advance()
                if len(self._arrived) >= count:
                    break
                if self._closed is not None or self._incoming_end is not None:
                    raise ChannelClosed(self._closed or self._incoming_end)
                await self._wait()
        finally:
            self._wanted = 0
        data = bytes(self._arrived[:count])
        del self._arrived[:count]
        self._local.bytes_in += count
        self.other.poke()
        return data

    def _room(self) -> int:
        """How many bytes the other side may still send us, as yamux grants them."""
        return INITIAL_WINDOW + self._wanted - len(self._arrived) - self._travelling_bytes

    async def _wait(self) -> None:
        """Until something changed here or the next thing arrives."""
        cut = self._network.is_cut(self._local.node, self.remote)
        arrival = self._travelling[0][0] if self._travelling and not cut else math.inf
        changed = self._changed
        with trio.move_on_at(arrival):
            await changed.wait()

    def _advance(self) -> None:
        """Take in what has arrived by now."""
        if self._network.is_cut(self._local.node, self.remote):
            return
        now = trio.current_time()
        while self._travelling and self._travelling[0][0] <= now:
            _, item = self._travelling.popleft()
            if isinstance(item, _End):
                self._on_end(item)
            else:
                self._travelling_bytes -= len(item)
                if self._closed is None:
                    self._arrived += item

    def _on_end(self, end: _End) -> None:
        self._incoming_end = end.reason
        if end.drops_unread:
            self._arrived.clear()
        if end.ends_both_ways:
            self._end(end.reason)

    def _post(self, item: bytes | _End) -> None:
        """Set something on its way to the other end."""
        self.other._travelling.append((trio.current_time() + self._network.delay, item))
        if not isinstance(item, _End):
            self.other._travelling_bytes += len(item)
        self.other.poke()

    def _end(self, reason: str) -> None:
        if self._closed is None:
            self._closed = reason
            self._local.forget(self)
            self._network._pipes.discard(self)
        self.poke()

    async def close(self) -> None:
        if self._closed is None:
            self._post(_End("the peer closed the stream", ends_both_ways=False))
            self._end("we closed the stream")
            self._arrived.clear()
        await trio.lowlevel.checkpoint()

    def abort(self) -> None:
        if self._closed is None:
            self._post(_End("the peer reset the stream", drops_unread=True))
            self._end("we reset the stream")
        self._arrived.clear()

    def hang_up(self, here: str, there: str) -> None:
        """The connection under the stream ends."""
        if self._closed is None:
            self._post(_End(there))
            self._end(here)


class _Circuit:
    """A connection between two hosts that goes through a third."""

    def __init__(self, relay: _Host, one: _Host, other: _Host, most_bytes: int) -> None:
        self._relay = relay
        self._one = one
        self._other = other
        self._left = most_bytes

    def carry(self, count: int) -> None:
        self._left -= count
        self._relay.relayed_bytes += count
        if self._left < 0:
            self._one._drop(self._other.node, "the relay ended the circuit", "the relay ended the circuit")

    def end(self) -> None:
        """The two are connected directly now, or not any more."""
        self._one._circuits.pop(self._other.node, None)
        self._other._circuits.pop(self._one.node, None)
        self._relay.places.end(self._one.node, self._other.node)


class _Host:
    def __init__(
        self,
        network: Network,
        who: Identity,
        numbers: list[str],
        limits: HostLimits,
        nursery: trio.Nursery,
        nat: Nat | None,
    ) -> None:
        self.node = who.node
        self.addresses = tuple(f"/memory/{number}/p2p/{who.peer_id}" for number in numbers)
        self.bytes_in = self.bytes_out = 0
        self._network = network
        self._limits = limits
        self._nursery = nursery
        self._handlers: dict[str, Handler] = {}
        self._bans: dict[bytes, float] = {}
        self._peers: dict[bytes, _Host] = {}  # live connections
        self._pipes: set[_Pipe] = set()
        self._handlers_of: Counter[bytes] = Counter()
        self._refused = self._faults = 0
        self._nat = nat
        self._relay: tuple[RelayLimits, Callable[[bytes], bool]] | None = None
        self.places = Places(RelayLimits())
        self._circuits: dict[bytes, _Circuit] = {}  # by the peer at the other end
        self.relayed_bytes = self._relay_refusals = self._punched = self._punches_failed = 0

    def serve(self, protocol: str, handler: Handler) -> None:
        self._handlers[protocol] = handler

    # --- opening ---

    async def open(self, address: str, protocol: str, *, seconds: float) -> Stream:
        target = Address.parse(address)
        if self.node in (target.node, target.relay):
            raise unreachable.is_ourselves(target)
        if self.is_banned(target.node):
            raise unreachable.is_banned(target)
        with trio.move_on_after(seconds):
            return await self._open(target, protocol)
        raise unreachable.no_answer(target, seconds)

    async def _open(self, target: Address, protocol: str) -> Stream:
        if target.node not in self._peers:
            await self._connect(target)
        await self._network.travel(self.node, target.node, trips=2)
        peer = self._peers.get(target.node)
        if peer is None:
            raise unreachable.hung_up(target, "the connection ended")
        ours, theirs = _Pipe(self._network, self, peer.node), _Pipe(self._network, peer, self.node)
        ours.other, theirs.other = theirs, ours
        peer.accept(theirs, protocol, target)
        self._pipes.add(ours)
        return FramedStream(ours, peer.node)

    async def _connect(self, target: Address) -> None:
        if target.network != "memory":
            raise UsageError(f"{target} is not an address of this process's memory network")
        if target.via is not None:
            await self._connect_through(target, target.via)
            return
        await self._network.travel(self.node, target.node, trips=2)
        peer = self._network.find(target.host)
        if peer is None:
            raise unreachable.nobody_listens(target)
        if peer._nat is not None:
            await trio.sleep_forever()  # whoever is behind NAT never hears of it
        if peer.node != target.node:
            raise unreachable.other_peer(target, identity.peer_id(peer.node))
        if peer.is_banned(self.node) or len(peer._peers) >= peer._limits.connections:
            peer._refused += 1
            raise unreachable.hung_up(target, "the peer closed the connection")
        self._peers[peer.node] = peer
        peer._peers[self.node] = self

    async def _connect_through(self, target: Address, via: Address) -> None:
        if via.node not in self._peers:
            await self._connect(via)
        await self._network.travel(self.node, target.node, trips=4)
        relay = self._peers.get(via.node)
        if relay is None or relay._relay is None:
            raise unreachable.relay_declined(target, via, "it is no relay")
        limits, _ = relay._relay
        if (cause := relay._cause_against(self.node, target.node)) is not None:
            relay._relay_refusals += 1
            raise unreachable.relay_declined(target, via, cause)
        peer = relay._peers[target.node]
        circuit = _Circuit(relay, self, peer, limits.circuit_bytes)
        relay.places.begin(self.node, peer.node)
        self._peers[peer.node], peer._peers[self.node] = peer, self
        self._circuits[peer.node] = peer._circuits[self.node] = circuit
        peer._nursery.start_soon(peer._punch, self, circuit)

    def _cause_against(self, source: bytes, target: bytes) -> str | None:
        refusal = self.places.refusal(source, target)
        if refusal is not None:
            return refusal.name
        return None if self._is_here(target) else "CONNECTION_FAILED"

    async def _punch(self, other: _Host, circuit: _Circuit) -> None:
        """As hole punching ends: a direct connection, if a NAT drops what comes too early (a machine refuses it) and
        none gives out ports at random."""
        await self._network.travel(self.node, other.node, trips=4)
        if self._circuits.get(other.node) is not circuit:
            return
        nats = {self._nat, other._nat}
        if Nat.RANDOM_PORTS in nats or Nat.KEEPS_PORTS not in nats:
            self._punches_failed += 1
            return
        for host in (self, other):
            host._punched += 1
        circuit.end()

    def note_relayed(self, peer: bytes, count: int) -> None:
        """Bytes on their way to a peer."""
        circuit = self._circuits.get(peer)
        if circuit is not None:
            circuit.carry(count)

    # --- behind NAT ---

    def relay(self, limits: RelayLimits, admits: Callable[[bytes], bool]) -> None:
        self._relay = (limits, admits)
        self.places = Places(limits)

    async def reserve(self, relay: str, *, seconds: float) -> Reservation:
        via = Address.parse(relay)
        with trio.move_on_after(seconds):
            return await self._reserve(via)
        raise unreachable.no_answer(via, seconds)

    async def _reserve(self, via: Address) -> Reservation:
        if via.node not in self._peers:
            await self._connect(via)
        await self._network.travel(self.node, via.node, trips=2)
        host = self._peers[via.node]
        if host._relay is None:
            raise unreachable.relay_declined(via, via, "it is no relay")
        limits, admits = host._relay
        granted = admits(self.node) and host.places.reserve(self.node, host._is_here)
        if not granted:
            host._relay_refusals += 1
            raise unreachable.relay_declined(via, via, "RESERVATION_REFUSED")
        address = Address(via.network, via.host, via.port, self.node, via.node)
        return Reservation(str(address), limits.reservation_seconds)

    async def seen_as(self, peer: str, *, seconds: float) -> str | None:
        target = Address.parse(peer)
        with trio.move_on_after(seconds):
            if target.node not in self._peers:
                await self._connect(target)
            hosts = [Address.parse(each).host for each in self.addresses]
            return "behind NAT" if self._nat is not None or not hosts else hosts[0]
        raise unreachable.no_answer(target, seconds)

    def is_relayed(self, peer: bytes) -> bool:
        return peer in self._circuits

    def _is_here(self, node: bytes) -> bool:
        return node in self._peers and node not in self._circuits

    def accept(self, pipe: _Pipe, protocol: str, target: Address) -> None:
        handler = self._handlers.get(protocol)
        if handler is None:
            raise unreachable.does_not_speak(target, protocol)
        if self._handlers_of[pipe.remote] >= self._limits.streams_per_peer:
            self._refused += 1
            raise unreachable.hung_up(target, "the peer reset the stream")
        self._pipes.add(pipe)
        self._handlers_of[pipe.remote] += 1
        self._nursery.start_soon(self._serve, handler, pipe, protocol)

    async def _serve(self, handler: Handler, pipe: _Pipe, protocol: str) -> None:
        async def serve() -> None:
            await handler(FramedStream(pipe, pipe.remote))

        try:
            self._faults += await serve_contained(
                serve, pipe, f"a stream of {identity.peer_id(pipe.remote)} ({protocol})"
            )
        finally:
            self._handlers_of[pipe.remote] -= 1
            if not self._handlers_of[pipe.remote]:
                del self._handlers_of[pipe.remote]

    def forget(self, pipe: _Pipe) -> None:
        self._pipes.discard(pipe)

    # --- peers ---

    async def disconnect(self, peer: bytes) -> None:
        self._drop(peer, "we closed the connection", "the peer is closing the connection")
        await trio.lowlevel.checkpoint()

    def _drop(self, node: bytes, here: str, there: str) -> None:
        peer = self._peers.pop(node, None)
        if peer is not None:
            peer._peers.pop(self.node, None)
        if node in self._circuits:
            self._circuits[node].end()
        for pipe in [pipe for pipe in self._pipes if pipe.remote == node]:
            pipe.hang_up(here, there)

    def leave(self) -> None:
        for circuit in [each for host in self._peers.values() for each in host._circuits.values()]:
            if circuit._relay is self:
                circuit._one._drop(circuit._other.node, "the relay is gone", "the relay is gone")
        for node in list(self._peers):
            self._drop(node, "we closed the connection", "the peer is closing the connection")

    def ban(self, peer: bytes, seconds: float) -> None:
        now = trio.current_time()
        self._bans = {node: end for node, end in self._bans.items() if end > now}
        self._bans[peer] = now + seconds
        self._drop(peer, "we closed the connection", "the peer is closing the connection")

    def is_banned(self, node: bytes) -> bool:
        return self._bans.get(node, 0.0) > trio.current_time()

    def connected(self) -> tuple[bytes, ...]:
        return tuple(self._peers)

    def statistics(self) -> HostStatistics:
        return HostStatistics(
            connections=len(self._peers),
            handshakes=0,
            refused=self._refused,
            failed_handshakes=0,
            handler_faults=self._faults,
            restarts=0,
            bytes_in=self.bytes_in,
            bytes_out=self.bytes_out,
            reservations=self.places.reservations,
            circuits=self.places.circuits,
            relayed_bytes=self.relayed_bytes,
            relay_refusals=self._relay_refusals,
            punched=self._punched,
            punches_failed=self._punches_failed,
        )
