"""What everything above the network sees: hosts, streams of whole frames, addresses.

Two implementations: `p2p.open_host` (libp2p over TCP) and `memory.Network` (inside one process).
They behave alike; one test suite drives both. Not here: what a frame means (messages.py),
requests and replies (session.py), heartbeats and reconnecting (the callers).
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from protocol import identity
from protocol.errors import DecodeError, UsageError
from protocol.limits import MAX_FRAME_BYTES

_HOST_NAME = re.compile(r"^(?=.{1,253}$)[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?$")
_EXAMPLE = "/ip4/203.0.113.7/tcp/4001/p2p/12D3KooW…"


@dataclass(frozen=True, slots=True)
class Address:
    """Where a peer listens, or is reached through a relay that does, and who must answer there.

    `network` is "ip4", "ip6", "dns", "dns4", "dns6" or "memory"; `host` the IP address or name
    (the host's number for "memory"); `port` the TCP port (0 for "memory"); `node` the 32-byte key.
    """

    network: str
    host: str
    port: int
    node: bytes
    relay: bytes | None = None  # who listens there instead, and connects to `node` on demand

    @classmethod
    def parse(cls, text: str) -> Address:
        """Read a multiaddr that ends in /p2p/<peer id>. Raises UsageError, which says what is wrong."""
        before, circuit, target = text.strip().partition("/p2p-circuit/")
        if circuit:
            return cls._through(text, before, target)
        parts = text.strip().split("/")
        if len(parts) < 3 or parts[0] != "":
            raise UsageError(f"'{text[:200]}' is not an address: it should look like {_EXAMPLE}")
        if parts[-2] != "p2p":
            raise UsageError(f"the address '{text[:200]}' does not end in /p2p/ and the peer's id, as in {_EXAMPLE}")
        try:
            node = identity.node_from_peer_id(parts[-1])
        except DecodeError as error:
            raise UsageError(f"the address '{text[:200]}' names no node: {error}") from None
        return cls(*_endpoint(text, parts[1:-2]), node)

    @classmethod
    def _through(cls, text: str, before: str, target: str) -> Address:
        via = cls.parse(before)
        kind, _, name = target.partition("/")
        if kind != "p2p":
            raise UsageError(f"the address '{text[:200]}' does not end in /p2p/ and the peer's id after /p2p-circuit")
        try:
            node = identity.node_from_peer_id(name)
        except DecodeError as error:
            raise UsageError(f"the address '{text[:200]}' names no node: {error}") from None
        if node == via.node:
            raise UsageError(f"the address '{text[:200]}' leads through the node that it leads to")
        return cls(via.network, via.host, via.port, node, via.node)

    @property
    def via(self) -> Address | None:
        """Where the relay is, for an address that leads through one."""
        return None if self.relay is None else Address(self.network, self.host, self.port, self.relay)

    def __str__(self) -> str:
        where = f"/memory/{self.host}" if self.network == "memory" else f"/{self.network}/{self.host}/tcp/{self.port}"
        through = "" if self.relay is None else f"/p2p/{identity.peer_id(self.relay)}/p2p-circuit"
        return f"{where}{through}/p2p/{identity.peer_id(self.node)}"

    @property
    def told(self) -> str:
        """As it stands in lists of nodes: without the node's own id at the end."""
        return str(self).rpartition("/p2p/")[0]


def _endpoint(text: str, parts: list[str]) -> tuple[str, str, int]:
    """(network, host, port) of the part of a multiaddr before /p2p/."""
    match parts:
        case ["memory", number] if number.isascii() and number.isdigit():
            return "memory", number, 0
        case [("ip4" | "ip6") as network, host, "tcp", port]:
            try:
                parsed = ipaddress.ip_address(host)
            except ValueError:
                raise UsageError(f"'{host}' in the address '{text[:200]}' is not an IP address") from None
            if parsed.version != int(network[2:]):
                raise UsageError(f"'{host}' in the address '{text[:200]}' is not an {network} address")
            return network, host, _port(text, port)
        case [("dns" | "dns4" | "dns6") as network, host, "tcp", port]:
            if not _HOST_NAME.match(host):
                raise UsageError(f"'{host}' in the address '{text[:200]}' is not a host name")
            return network, host, _port(text, port)
    raise UsageError(f"the address '{text[:200]}' is not over TCP: it should look like {_EXAMPLE}")


def _port(text: str, port: str) -> int:
    if not (port.isascii() and port.isdigit() and int(port) <= 65_535):
        raise UsageError(f"'{port}' in the address '{text[:200]}' is not a TCP port")
    return int(port)


def listen_endpoint(multiaddr: str) -> tuple[str, int]:
    """Host and port to listen at. Raises UsageError for what is no IP address with a TCP port (0: any free one)."""
    match multiaddr.split("/"):
        case ["", "ip4" | "ip6" as network, host, "tcp", port]:
            with contextlib.suppress(UsageError):
                return _endpoint(multiaddr, [network, host, "tcp", port])[1:]
    raise UsageError(f"cannot listen on '{multiaddr[:200]}': it should look like /ip4/0.0.0.0/tcp/4001")


def peer_address(multiaddr: str, node: bytes) -> str | None:
    """The address to dial of a node that says it listens at `multiaddr`; None for what nobody should dial.

    SPEC 9.6: an IP address and a port, never a name: a stranger must not choose whom nodes look up.
    """
    try:
        parsed = Address.parse(f"{multiaddr}/p2p/{identity.peer_id(node)}")
    except UsageError:
        return None
    if parsed.network == "memory":
        return str(parsed)
    if parsed.network.startswith("dns") or not parsed.port or ipaddress.ip_address(parsed.host).is_unspecified:
        return None
    return str(parsed)


@dataclass(frozen=True, slots=True)
class HostLimits:
    """What strangers may cost us. Each side chooses its own; defaults fit a machine with 1 GiB to spare."""

    connections: int = 1_000  # inbound and live
    connections_per_address: int = 64  # one IPv4 address or IPv6 /64: a household, a campus NAT
    connections_per_peer: int = 4  # a restarted peer's old connection may linger beside its new one
    handshakes: int = 512  # not yet authenticated, all addresses
    handshakes_per_address: int = 32
    handshake_seconds: float = 10.0
    streams_per_peer: int = 64
    unread_bytes_per_peer: int = 64 * 1024 * 1024  # room for a dozen blobs in flight
    unread_bytes: int = 512 * 1024 * 1024  # all peers together


@dataclass(frozen=True, slots=True)
class RelayLimits:
    """What a relay gives away. All its circuits together cost it at most `bytes_per_second` in, and the same out."""

    reservations: int = 256  # nodes that can be reached through it
    reservation_seconds: float = 3_600.0  # renewed by whoever still wants it
    circuits: int = 128
    circuits_per_peer: int = 8  # that end at one node
    circuit_bytes: int = 256 * 1024 * 1024  # both ways together; then the nodes connect anew, or elsewhere
    circuit_seconds: float = 1_800.0
    idle_seconds: float = 120.0  # a circuit on which nothing moves
    bytes_per_second: float = 2.0 * 1024 * 1024  # all circuits together


@dataclass(frozen=True, slots=True)
class Reservation:
    """A place at a relay: others reach this host at `address` for `seconds` more, while it stays connected."""

    address: str  # with /p2p/ and this host's id
    seconds: float


@dataclass(frozen=True, slots=True)
class HostStatistics:
    """Counters since the host was opened, except `connections`, `handshakes`, `reservations` and `circuits`, which are
    of now."""

    connections: int
    handshakes: int
    refused: int  # inbound connections and streams turned away, by a limit or a ban
    failed_handshakes: int
    handler_faults: int  # exceptions out of stream handlers, contained
    restarts: int
    bytes_in: int
    bytes_out: int
    reservations: int  # at this host as a relay
    circuits: int
    relayed_bytes: int  # for others; each came in and went out once
    relay_refusals: int
    punched: int  # relayed connections of this host that became direct ones
    punches_failed: int


@runtime_checkable
class Stream(Protocol):
    """One ordered, authenticated, two-way stream of frames of at most MAX_FRAME_BYTES.

    Several tasks may send at once (frames do not interleave); one may receive.
    """

    peer: bytes  # 32-byte public key, proved in the handshake

    async def send(self, frame: bytes, *, seconds: float, what: str) -> None:
        """Hand over one frame; waits while the peer does not read (back-pressure).

        Raises DeadlineExceeded (the stream is then reset if part of the frame had left) or
        ConnectionLost. ValueError: a frame over MAX_FRAME_BYTES, which is our own bug.
        """

    async def receive(self, *, seconds: float, what: str, limit: int = MAX_FRAME_BYTES) -> bytes:
        """The next frame. After DeadlineExceeded the stream is intact: receive again goes on.

        Raises ConnectionLost when the peer closed, reset or vanished; DecodeError(TOO_LARGE) for a
        frame over `limit`, upon which the stream is reset.
        """

    async def close(self) -> None:
        """Graceful: what was sent arrives, then the peer sees the end. Never raises."""

    async def reset(self) -> None:
        """Abrupt: both directions end now. Never raises."""


Handler = Callable[[Stream], Awaitable[None]]


@runtime_checkable
class Host(Protocol):
    """One identity on the network: opens streams to others and serves the streams they open."""

    node: bytes
    addresses: tuple[str, ...]  # multiaddrs including /p2p/<peer id>; empty for a host that only dials

    def serve(self, protocol: str, handler: Handler) -> None:
        """Answer streams of `protocol`. The stream is closed when the handler returns.

        An exception out of a handler is logged and counted, and resets that stream alone.
        """

    async def open(self, address: str, protocol: str, *, seconds: float) -> Stream:
        """A stream to the peer at `address`, over the live connection if there is one.

        Raises UsageError for a malformed address; Unreachable, which names the address and the
        likely cause: nobody listens, no answer in time, somebody else answered, we banned the
        peer, or the peer does not speak `protocol`.
        """

    async def disconnect(self, peer: bytes) -> None:
        """End every connection with `peer`. Never raises."""

    def ban(self, peer: bytes, seconds: float) -> None:
        """Disconnect `peer` and have nothing to do with it for `seconds`."""

    def connected(self) -> tuple[bytes, ...]:
        """The peers with a live connection."""

    # --- behind NAT ---

    def relay(self, limits: RelayLimits, admits: Callable[[bytes], bool]) -> None:
        """Be a relay from now on. `admits`: which peers may have places; whoever wants may connect to those."""

    async def reserve(self, relay: str, *, seconds: float) -> Reservation:
        """Have a place kept at the relay at this address, or renew it. Raises Unreachable, which says why not."""

    async def seen_as(self, peer: str, *, seconds: float) -> str | None:
        """The IP address that the peer at this address sees this host at; None when it does not say.

        Raises UsageError or Unreachable.
        """

    def is_relayed(self, peer: bytes) -> bool:
        """Whether the connection with `peer` goes through a relay; it may become direct by itself."""

    def statistics(self) -> HostStatistics: ...
