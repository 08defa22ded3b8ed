"""libp2p 0.8.1, contained: the parts of it that a stranger's bytes reach, replaced or fenced.

We keep libp2p's Noise handshake, its swarm's records and its host with identify and ping. What
each class below contains is said at the class; docs/decisions/0003 says why at all. Every fault
has a regression test in tests/network/test_hostile_peers.py. Only this file and p2p.py import libp2p.
Not here: our Host and Stream (p2p.py), the multiplexer's rules (yamux.py).
"""

from __future__ import annotations

import errno
import importlib.metadata
import ipaddress
import logging
import os
import socket
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import trio

from protocol import identity
from protocol.errors import NetError, UsageError
from protocol.net import multistream, yamux
from protocol.net.base import HostLimits
from protocol.net.door import Door, Refused, address_group, decrement
from protocol.net.framing import Channel, ChannelClosed, serve_contained
from protocol.net.wire import Carrier, CircuitWire, Counters, Wire

CONTAINED_VERSION = "0.8.1"


def require_version(found: str) -> None:
    """Raise UsageError unless `found` is the libp2p release whose faults are contained here."""
    if found != CONTAINED_VERSION:
        raise UsageError(
            f"libp2p {found} is installed, but this program contains the faults of {CONTAINED_VERSION} exactly "
            f"and is not safe to expose with another: run  pip install libp2p=={CONTAINED_VERSION}"
        )


require_version(importlib.metadata.version("libp2p"))

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # of libp2p's dependencies, at import
    from libp2p.abc import IListener, IMuxedConn, IMuxedStream, INetStream
    from libp2p.connection_types import ConnectionType
    from libp2p.crypto.ed25519 import create_new_key_pair
    from libp2p.crypto.keys import KeyPair
    from libp2p.crypto.x25519 import create_new_key_pair as create_noise_key
    from libp2p.custom_types import StreamHandlerFn, TProtocol
    from libp2p.host.basic_host import BasicHost
    from libp2p.host.ping import ID as PING
    from libp2p.host.ping import PingService
    from libp2p.identity.identify.identify import ID as _IDENTIFY_ID
    from libp2p.identity.identify.identify import identify_handler_for
    from libp2p.network.connection import swarm_connection
    from libp2p.network.connection.swarm_connection import SwarmConn
    from libp2p.network.swarm import Swarm
    from libp2p.peer.id import ID
    from libp2p.peer.peerstore import PeerStore
    from libp2p.rcmgr import Direction
    from libp2p.security.noise.patterns import PatternXX
    from libp2p.stream_muxer.exceptions import MuxedConnUnavailable, MuxedStreamEOF, MuxedStreamReset
    from libp2p.transport.upgrader import TransportUpgrader
    from multiaddr import Multiaddr
    from noise.exceptions import NoiseInvalidMessage

log = logging.getLogger(__name__)

# libp2p logs a line, or a traceback, for each hostile byte: a stranger must not fill the disk.
# Its connection module also logs through the root logger, which installs a handler as it goes.
if "LIBP2P_DEBUG" not in os.environ:
    logging.getLogger("libp2p").setLevel(logging.CRITICAL)
vars(swarm_connection)["logging"] = logging.getLogger("libp2p.network.connection")

IDENTIFY = str(_IDENTIFY_ID)
NOISE = "/noise"
YAMUX = "/yamux/1.0.0"
_NEGOTIATION_SECONDS = 10.0  # for a peer to say which protocol its new stream speaks


class WrongPeer(Exception):
    """Somebody other than the expected node answered; `found` is its peer id."""

    def __init__(self, found: str) -> None:
        super().__init__(found)
        self.found = found


def peer_id_of(node: bytes) -> ID:
    return ID.from_string(identity.peer_id(node))


# --- TCP -----------------------------------------------------------------------------------------


def _multiaddr(host: str, port: int) -> Multiaddr:
    return Multiaddr(f"/ip{ipaddress.ip_address(host).version}/{host}/tcp/{port}")


class Listener(IListener):
    """Bound TCP sockets. Stock sets SO_REUSEPORT: a second program could bind the same port unnoticed."""

    def __init__(self, sockets: Sequence[trio.SocketListener]) -> None:
        self.sockets = sockets

    async def listen(self, maddr: Multiaddr) -> None:
        raise NotImplementedError("made listening; see ContainedSwarm.listen_on")

    def get_addrs(self) -> tuple[Multiaddr, ...]:
        return tuple(_multiaddr(*listener.socket.getsockname()[:2]) for listener in self.sockets)

    async def close(self) -> None:
        for listener in self.sockets:
            await listener.aclose()


async def _bind(host: str, port: int) -> Listener:
    try:
        return Listener(await trio.open_tcp_listeners(port, host=host))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            why = "another program listens there; stop it or choose another port (0 takes a free one)"
        else:
            why = error.strerror or str(error)
        raise UsageError(f"cannot listen on {host}, TCP port {port}: {why}") from None


# --- Noise ---------------------------------------------------------------------------------------


class NoiseLink:
    """The encrypted connection under yamux: libp2p's Noise keys, our own packet loop."""

    def __init__(self, wire: Carrier, state: Any) -> None:
        self.wire = wire
        self._state = state
        self._plain = bytearray()  # decrypted before yamux took over

    async def receive_packets(self) -> list[bytes]:
        if self._plain:
            plain, self._plain = self._plain, bytearray()
            return [bytes(plain)]
        while True:
            packets = self._decrypt_buffered()
            if packets:
                return packets
            await self.wire.fill()

    def _decrypt_buffered(self) -> list[bytes]:
        packets = []
        buffer = self.wire.buffer
        at = 0
        while len(buffer) - at >= 2:
            end = at + 2 + int.from_bytes(buffer[at : at + 2], "big")
            if len(buffer) < end:
                break
            packets.append(self._decrypt(bytes(buffer[at + 2 : end])))
            at = end
        del buffer[:at]
        return packets

    def _decrypt(self, packet: bytes) -> bytes:
        try:
            plain: bytes = self._state.decrypt(packet)
        except NoiseInvalidMessage:
            raise ChannelClosed("a packet does not decrypt: it was altered on the way") from None
        return plain

    async def send_packets(self, packets: list[bytes]) -> None:
        parts = []
        for packet in packets:
            sealed = self._state.encrypt(packet)
            parts.append(len(sealed).to_bytes(2, "big"))
            parts.append(sealed)
        await self.wire.send(b"".join(parts))

    async def receive_exactly(self, count: int) -> bytes:
        while len(self._plain) < count:
            plain, self._plain = self._plain, bytearray()  # else receive_packets would return it again
            try:
                for packet in await self.receive_packets():
                    plain += packet
            finally:
                self._plain = plain
        data = bytes(self._plain[:count])
        del self._plain[:count]
        return data

    async def send(self, data: bytes) -> None:
        await self.send_packets([data])

    async def close(self) -> None:
        await self.wire.close()

    def abort(self) -> None:
        self.wire.abort()


class Noise:
    """Who we are, and libp2p's XX handshake with a stranger. Noise is the one security we offer:
    stock also accepts plaintext, in which a client may claim any identity."""

    def __init__(self, keys: KeyPair) -> None:
        self._keys = keys
        self._peer = ID.from_pubkey(keys.public_key)
        self._static = create_noise_key().private_key

    async def secure(self, wire: Carrier, expected: ID | None) -> tuple[NoiseLink, ID, bytes]:
        """(link, peer id, 32-byte key) of the peer that proved itself.

        Raises WrongPeer when it is not `expected`, DecodeError when its key is not Ed25519, and
        what libp2p raises on a bad handshake, which is a lot.
        """
        pattern = PatternXX(self._peer, self._keys.private_key, self._static)
        connection: Any = wire  # of a raw connection the handshake uses read and write
        if expected is None:
            session: Any = await pattern.handshake_inbound(connection)
        else:
            session = await pattern.handshake_outbound(connection, None)
        peer = session.get_remote_peer()
        if expected is not None and peer != expected:
            raise WrongPeer(str(peer))
        return NoiseLink(wire, session.conn.noise_state), peer, identity.node_from_peer_id(str(peer))


# --- yamux, as libp2p sees it --------------------------------------------------------------------


class MuxedStream(IMuxedStream):
    """One of our channels behind libp2p's interface, for its own protocols (identify, ping)."""

    def __init__(self, channel: yamux.Channel, connection: MuxedConnection) -> None:
        self.channel = channel
        self.muxed_conn: IMuxedConn = connection
        self._remote = connection.get_remote_address

    async def read(self, n: int | None = None) -> bytes:
        try:
            return await self.channel.receive_some(65_536 if n is None or n < 0 else n)
        except ChannelClosed as error:
            if "reset" in str(error):
                raise MuxedStreamReset(str(error)) from None
            raise MuxedStreamEOF(str(error)) from None

    async def write(self, data: bytes) -> None:
        try:
            await self.channel.send(data)
        except ChannelClosed as error:
            raise MuxedStreamReset(str(error)) from None

    async def close_write(self) -> None:
        self.channel.finish()
        await trio.lowlevel.checkpoint()

    async def close(self) -> None:
        self.channel.finish()
        await trio.lowlevel.checkpoint()

    async def reset(self) -> None:
        self.channel.abort()
        await trio.lowlevel.checkpoint()

    def set_deadline(self, ttl: int) -> None:
        raise NotImplementedError("deadlines are the caller's")

    def get_remote_address(self) -> tuple[str, int] | None:
        return self._remote()

    async def __aenter__(self) -> MuxedStream:
        return self


class MuxedConnection(IMuxedConn):
    """Our yamux behind libp2p's interface. Nothing it raises can reach the swarm's nursery."""

    def __init__(self, link: NoiseLink, peer: ID, connection: yamux.Connection) -> None:
        self.peer_id = peer
        self.node = connection.peer
        self.connection = connection
        self.event_started = trio.Event()
        self.relay: MuxedConnection | None = None  # the connection that this one's bytes go through
        self.seen_at: tuple[str, int] | None = None  # where the peer sees us come from, once it was asked
        self._link = link

    async def start(self) -> None:
        self.event_started.set()
        try:
            await self.connection.run()
        except Exception:
            log.exception("the connection to %s failed; it alone ends", self.peer_id)
            self.connection.fail("a fault of ours; see our log")

    async def close(self) -> None:
        await self.connection.close()
        await self._link.close()

    async def open_stream(self) -> MuxedStream:
        return MuxedStream(self.connection.open(), self)

    async def accept_stream(self) -> MuxedStream:
        try:
            return MuxedStream(await self.connection.accept(), self)
        except ChannelClosed as error:
            raise MuxedConnUnavailable(str(error)) from None

    @property
    def is_initiator(self) -> bool:
        return self.connection.is_initiator

    @property
    def is_established(self) -> bool:
        return self.connection.accepting

    @property
    def is_closed(self) -> bool:
        return self.connection.closed.is_set()

    def get_remote_address(self) -> tuple[str, int] | None:
        return self._link.wire.get_remote_address()

    def get_local_address(self) -> tuple[str, int] | None:
        wire = self._link.wire
        return wire.get_local_address() if isinstance(wire, Wire) else None

    @property
    def is_relayed(self) -> bool:
        return self.relay is not None

    def get_transport_addresses(self) -> list[Multiaddr]:
        remote = self.get_remote_address()
        return [] if remote is None else [_multiaddr(*remote)]

    def get_connection_type(self) -> ConnectionType:
        return ConnectionType.RELAYED if self.is_relayed else ConnectionType.DIRECT


# --- the swarm -----------------------------------------------------------------------------------


class ContainedSwarm(Swarm):
    """libp2p's swarm without transports of its own: it listens and dials through the two methods here.

    Stock dials blacklist a peer for 60 s after a failure and wait 250 ms on every dial; stock
    listening counts connections for ever. Both paths are bypassed.
    """

    def __init__(
        self, keys: KeyPair, limits: HostLimits, counters: Counters, is_banned: Callable[[bytes], bool]
    ) -> None:
        store = PeerStore()
        peer = ID.from_pubkey(keys.public_key)
        store.add_key_pair(peer, keys)
        super().__init__(peer, store, TransportUpgrader({}, {}), [])
        self.limits = limits
        self.counters = counters
        self.door = Door(limits)
        self.unread = yamux.Unread(limits.unread_bytes)
        self._noise = Noise(keys)
        self._is_banned = is_banned
        self.notifees.clear()  # records of every peer ever seen, which nobody reads

    async def run(self) -> None:
        """Only the nursery of stock's run: its pruner closes, and its connector dials, whom it likes."""
        async with trio.open_nursery() as nursery:
            self.background_nursery = nursery
            self.event_background_nursery_created.set()
            await trio.sleep_forever()

    # --- inbound ---

    async def listen_on(self, host: str, port: int) -> None:
        """Accept connections on a TCP port. Raises UsageError, which names the port, when it cannot."""
        listener = await _bind(host, port)
        self.listeners[str(listener.get_addrs()[0])] = listener
        self._nursery().start_soon(self._accept, listener)

    def _nursery(self) -> trio.Nursery:
        if self.background_nursery is None:
            raise NetError("the host is not running")
        return self.background_nursery

    async def _accept(self, listener: Listener) -> None:
        try:
            await trio.serve_listeners(self._on_socket, listener.sockets)
        except* trio.ClosedResourceError:
            log.debug("a listener was closed")

    async def _on_socket(self, stream: trio.SocketStream) -> None:
        try:
            wire = Wire(stream, initiator=False, counters=self.counters)
            remote = wire.get_remote_address()
            if remote is not None:
                await self._admit(wire, address_group(remote[0]))
        except Refused as error:
            self.counters.refused += 1
            log.debug("refused a connection from %s: %s", remote, error)
        except Exception as error:  # whatever a stranger's bytes make libp2p raise
            self.counters.failed_handshakes += 1
            log.debug("a handshake failed: %r", error)
        finally:
            await trio.aclose_forcefully(stream)

    async def _admit(self, wire: Wire, group: str) -> None:
        muxed = None
        with self.door.handshake(group):
            muxed = await self._upgrade(wire, expected=None)
        if muxed is None:
            raise ChannelClosed("the handshake took too long or gave way to newer ones")
        if self._is_banned(muxed.node):
            raise Refused(f"{muxed.peer_id} is banned")
        with self.door.slot(muxed.connection, group):
            await self.add_conn(muxed, "inbound")
            await muxed.connection.closed.wait()

    # --- outbound ---

    async def dial(self, host: str, port: int, peer: ID) -> MuxedConnection:
        """A connection to `peer`. Raises OSError, WrongPeer, ChannelClosed, and what libp2p raises."""
        stream = await trio.open_tcp_stream(host, port)
        try:
            muxed = await self._upgrade(Wire(stream, initiator=True, counters=self.counters), expected=peer)
            await self.add_conn(muxed, "outbound")
        except BaseException:
            await trio.aclose_forcefully(stream)
            raise
        return muxed

    # --- through a relay, and past it ---

    async def dial_through(self, relay: MuxedConnection, channel: yamux.Channel, peer: ID) -> MuxedConnection:
        """A connection to `peer` over a stream that `relay` has spliced to it. Raises as `dial` does."""
        try:
            muxed = await self._upgrade(CircuitWire(channel, initiator=True), expected=peer)
            muxed.relay = relay
            await self.add_conn(muxed, "outbound")
        except BaseException:
            channel.abort()
            raise
        return muxed

    async def admit_through(
        self, relay: MuxedConnection, channel: yamux.Channel, peer: ID, met: Callable[[MuxedConnection], None]
    ) -> None:
        """Serve a connection of `peer` that `relay` brings, as long as it lasts. Raises Refused, WrongPeer,
        ChannelClosed, and what libp2p raises. The slots of one relay's circuits are those of one address."""
        group = f"circuits of {relay.peer_id}"
        muxed = None
        with self.door.handshake(group):
            muxed = await self._upgrade(CircuitWire(channel, initiator=False), expected=None)
        if muxed is None:
            raise ChannelClosed("the handshake took too long or gave way to newer ones")
        if muxed.peer_id != peer:
            raise WrongPeer(str(muxed.peer_id))
        if self._is_banned(muxed.node):
            raise Refused(f"{muxed.peer_id} is banned")
        muxed.relay = relay
        with self.door.slot(muxed.connection, group):
            await self.add_conn(muxed, "inbound")
            met(muxed)
            await muxed.connection.closed.wait()

    async def dial_from(self, local: tuple[str, int], host: str, port: int, *, initiator: bool) -> Wire:
        """A TCP connection from a port that another connection comes from. Raises OSError."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        plain = trio.socket.socket(family, socket.SOCK_STREAM)
        try:
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            await plain.bind(local)
            await plain.connect((host, port))
            return Wire(trio.SocketStream(plain), initiator=initiator, counters=self.counters)
        except BaseException:
            plain.close()
            raise

    async def join(self, wire: Wire, peer: ID) -> MuxedConnection:
        """Make a connection with `peer` of a TCP connection that both sides dialled; `wire` says who begins."""
        try:
            with trio.fail_after(self.limits.handshake_seconds):
                muxed = await self._upgrade(wire, expected=peer if wire.is_initiator else None)
            if muxed.peer_id != peer:
                raise WrongPeer(str(muxed.peer_id))
            await self.add_conn(muxed, "outbound" if wire.is_initiator else "inbound")
        except BaseException:
            await wire.close()
            raise
        return muxed

    # --- all of them ---

    async def _upgrade(self, wire: Carrier, expected: ID | None) -> MuxedConnection:
        """Noise, then yamux; with `expected` as the side that dialled."""
        await _agree(wire, NOISE, proposing=expected is not None)
        link, peer, node = await self._noise.secure(wire, expected)
        await _agree(link, YAMUX, proposing=expected is not None)
        connection = yamux.Connection(
            link, peer=node, is_initiator=expected is not None, limits=self.limits, unread=self.unread
        )
        return MuxedConnection(link, peer, connection)

    async def add_conn(self, muxed_conn: IMuxedConn, direction: str = "unknown") -> SwarmConn:
        connection = SwarmConn(muxed_conn, self, direction=Direction.from_string(direction))
        self.connections.setdefault(muxed_conn.peer_id, []).append(connection)
        nursery = self._nursery()
        nursery.start_soon(muxed_conn.start)
        nursery.start_soon(self._follow, connection)
        await muxed_conn.event_started.wait()
        await self.notify_connected(connection)
        return connection

    async def _follow(self, connection: SwarmConn) -> None:
        try:
            await connection.start()
        except Exception:
            log.exception("serving %s failed; its connection ends", connection.muxed_conn.peer_id)
            await connection.close()

    async def notify_disconnected(self, conn: Any) -> None:
        await self._notify("disconnected", conn)  # stock also remembers every peer that ever left

    def live(self, peer: ID) -> list[MuxedConnection]:
        """The usable connections to a peer: direct ones first, of equals the newest first."""
        muxed = [connection.muxed_conn for connection in self.connections.get(peer, [])]
        usable = [one for one in reversed(muxed) if isinstance(one, MuxedConnection) and one.is_established]
        return sorted(usable, key=lambda one: one.is_relayed)

    def all_live(self) -> list[MuxedConnection]:
        return [one for peer in list(self.connections) for one in self.live(peer)]

    async def close_gently(self) -> None:
        """Say goodbye to every peer at once; stock takes 100 ms for each in turn."""
        for listener in self.listeners.values():
            await listener.close()
        async with trio.open_nursery() as nursery:
            for muxed in self.all_live():
                nursery.start_soon(muxed.close)


async def _agree(channel: Channel, protocol: str, *, proposing: bool) -> None:
    if proposing:
        await multistream.propose(channel, protocol)
    else:
        await multistream.answer(channel, (protocol,))


# --- the host ------------------------------------------------------------------------------------


class ContainedHost(BasicHost):
    """libp2p's host with every stream handler contained; stock ends when one raises.

    It answers identify and ping and asks neither: what we need to know of a peer is in its address.
    """

    def __init__(self, swarm: ContainedSwarm) -> None:
        super().__init__(swarm, default_protocols=_own_protocols(self), disable_identify_address_discovery=True)
        swarm.notifees.clear()
        self._swarm = swarm
        self._handlers_of: Counter[str] = Counter()

    async def _swarm_stream_handler(self, net_stream: INetStream) -> None:
        channel = channel_of(net_stream)
        peer = str(net_stream.muxed_conn.peer_id)
        # The multiplexer counts open streams; a handler may outlive its stream.
        if self._handlers_of[peer] >= self._swarm.limits.streams_per_peer:
            self._swarm.counters.refused += 1
            channel.abort()
            return
        self._handlers_of[peer] += 1
        try:
            await self._serve(net_stream, channel, peer)
        finally:
            decrement(self._handlers_of, peer)

    async def _serve(self, net_stream: INetStream, channel: yamux.Channel, peer: str) -> None:
        handlers: dict[Any, StreamHandlerFn | None] = dict(self.multiselect.handlers)
        protocol = ""
        try:
            with trio.move_on_after(_NEGOTIATION_SECONDS):
                protocol = await multistream.answer(channel, handlers)
        except (multistream.NegotiationFailed, ChannelClosed) as error:
            log.debug("a stream of %s agreed on no protocol: %s", peer, error)
        handler = handlers.get(protocol)
        if handler is None:
            channel.abort()
            return
        net_stream.set_protocol(TProtocol(protocol))

        async def serve() -> None:
            await handler(net_stream)

        if await serve_contained(serve, channel, f"a stream of {peer} ({protocol})"):
            self._swarm.counters.handler_faults += 1


def channel_of(net_stream: Any) -> yamux.Channel:
    """Our channel under a libp2p stream."""
    channel: yamux.Channel = net_stream.muxed_stream.channel
    return channel


def _own_protocols(host: BasicHost) -> Any:
    identify = identify_handler_for(host, use_varint_format=True)
    return OrderedDict([(TProtocol(IDENTIFY), _quietly(identify)), (PING, _quietly(PingService(host).handle_ping))])


def _quietly(handler: StreamHandlerFn) -> StreamHandlerFn:
    """libp2p's own handlers raise on any odd byte of a peer's; that is no fault of ours."""

    async def serve(net_stream: INetStream) -> None:
        try:
            await handler(net_stream)
        except Exception as error:
            log.debug("identify or ping ended: %r", error)

    return serve


def key_pair(private_bytes: bytes) -> KeyPair:
    """libp2p's form of our Ed25519 key (32 private bytes)."""
    return create_new_key_pair(private_bytes)
