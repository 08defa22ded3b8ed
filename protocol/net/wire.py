"""What lies under an encrypted connection, as our protocol layers read it: TCP, or a circuit through a relay.

Exact reads, our own loop, bytes of TCP counted. Not here: encryption (hardening.NoiseLink), frames and streams.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass

import trio

from protocol.net.framing import ChannelClosed
from protocol.net.yamux import Channel

_READ_BYTES = 256 * 1024


@dataclass(slots=True)
class Counters:
    """What a host counts over its life, across restarts of its swarm."""

    refused: int = 0
    failed_handshakes: int = 0
    handler_faults: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    relayed_bytes: int = 0  # for others, as a relay; each came in and went out once
    relay_refusals: int = 0
    punched: int = 0  # relayed connections that became direct ones
    punches_failed: int = 0


class Carrier:
    """Bytes both ways, in order, from and to one machine that has proved nothing yet."""

    def __init__(self, *, initiator: bool) -> None:
        self.is_initiator = initiator
        self.buffer = bytearray()

    async def fill(self) -> None:
        """Add at least one byte to the buffer; raises ChannelClosed at the end."""
        raise NotImplementedError

    async def send(self, data: bytes) -> None:
        """Hand over all of `data`; raises ChannelClosed."""
        raise NotImplementedError

    async def close(self) -> None:
        raise NotImplementedError

    def abort(self) -> None:
        raise NotImplementedError

    def get_remote_address(self) -> tuple[str, int] | None:
        """(host, port) of the other end of a TCP connection; None where there is none."""
        return None

    async def receive_exactly(self, count: int) -> bytes:
        while len(self.buffer) < count:
            await self.fill()
        data = bytes(self.buffer[:count])
        del self.buffer[:count]
        return data

    # What libp2p's handshake calls; its messages are exact, so a read is too.

    async def read(self, n: int | None = None) -> bytes:
        return await self.receive_exactly(1 if n is None else n)

    async def write(self, data: bytes) -> None:
        await self.send(data)


class Wire(Carrier):
    """A TCP connection with our own read loop: stock reads give up after 100 partial ones."""

    def __init__(self, stream: trio.SocketStream, *, initiator: bool, counters: Counters) -> None:
        super().__init__(initiator=initiator)
        self._stream = stream
        self._counters = counters
        # So that a hole can be punched from the port that a relay sees this connection come from (punch.py).
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # A machine that lost power never says so; without this its slot would be held for ever.
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_KEEPIDLE"):
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60)
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 15)
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)

    async def fill(self) -> None:
        try:
            data = await self._stream.receive_some(_READ_BYTES)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            raise ChannelClosed("the TCP connection broke") from None
        if not data:
            raise ChannelClosed("the peer closed the TCP connection")
        self._counters.bytes_in += len(data)
        self.buffer += data

    async def send(self, data: bytes) -> None:
        try:
            await self._stream.send_all(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            raise ChannelClosed("the TCP connection broke") from None
        self._counters.bytes_out += len(data)

    async def close(self) -> None:
        await trio.aclose_forcefully(self._stream)

    def abort(self) -> None:
        self._stream.socket.close()

    def get_remote_address(self) -> tuple[str, int] | None:
        try:
            host, port = self._stream.socket.getpeername()[:2]
        except OSError:
            return None
        return host, port

    def get_local_address(self) -> tuple[str, int] | None:
        try:
            host, port = self._stream.socket.getsockname()[:2]
        except OSError:
            return None
        return host, port


class CircuitWire(Carrier):
    """A stream of the relay's connection, spliced by it to one of the other node's. Its bytes are counted below."""

    def __init__(self, channel: Channel, *, initiator: bool) -> None:
        super().__init__(initiator=initiator)
        self._channel = channel

    async def fill(self) -> None:
        self.buffer += await self._channel.receive_some(_READ_BYTES)

    async def send(self, data: bytes) -> None:
        await self._channel.send(data)

    async def close(self) -> None:
        await self._channel.close()

    def abort(self) -> None:
        self._channel.abort()
