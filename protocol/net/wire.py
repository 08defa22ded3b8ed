"""A TCP connection as our protocol layers read it: exact reads, our own loop, bytes counted.

Not here: encryption (hardening.NoiseLink), frames and streams.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass

import trio

from protocol.net.framing import ChannelClosed

_READ_BYTES = 256 * 1024


@dataclass(slots=True)
class Counters:
    """What a host counts over its life, across restarts of its swarm."""

    refused: int = 0
    failed_handshakes: int = 0
    handler_faults: int = 0
    bytes_in: int = 0
    bytes_out: int = 0


class Wire:
    """A TCP connection with our own read loop: stock reads give up after 100 partial ones."""

    def __init__(self, stream: trio.SocketStream, *, initiator: bool, counters: Counters) -> None:
        self.is_initiator = initiator
        self.buffer = bytearray()
        self._stream = stream
        self._counters = counters
        # A machine that lost power never says so; without this its slot would be held for ever.
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_KEEPIDLE"):
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60)
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 15)
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)

    async def fill(self) -> None:
        """Add at least one byte to the buffer; raises ChannelClosed at the end."""
        try:
            data = await self._stream.receive_some(_READ_BYTES)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            raise ChannelClosed("the TCP connection broke") from None
        if not data:
            raise ChannelClosed("the peer closed the TCP connection")
        self._counters.bytes_in += len(data)
        self.buffer += data

    async def receive_exactly(self, count: int) -> bytes:
        while len(self.buffer) < count:
            await self.fill()
        data = bytes(self.buffer[:count])
        del self.buffer[:count]
        return data

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

    # What libp2p's handshake calls; its messages are exact, so a read is too.

    async def read(self, n: int | None = None) -> bytes:
        return await self.receive_exactly(1 if n is None else n)

    async def write(self, data: bytes) -> None:
        await self.send(data)

    def get_remote_address(self) -> tuple[str, int] | None:
        try:
            host, port = self._stream.socket.getpeername()[:2]
        except OSError:
            return None
        return host, port
