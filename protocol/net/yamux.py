"""yamux: many byte channels over one authenticated connection, with the limits enforced.

libp2p 0.8.1 brings a yamux of its own; it only logs a peer that ignores its receive window, keeps
any number of streams, gives up on a writer after 5 seconds and lets its reader wait on its writer
(docs/decisions/0003). This one holds these rules:
  - a peer can make us keep at most the window we granted, and all its windows together at most
    `unread_bytes_per_peer`; overrunning a window ends the connection;
  - a peer has at most `streams_per_peer` streams open; more are reset, and a flood ends the connection;
  - the reader never waits for the writer: answers (acknowledgements, pongs, resets) go to a bounded
    queue, and a peer that makes us answer faster than it reads is disconnected;
  - a cancelled send never leaves half a packet on the connection.
Source: the yamux specification, with libp2p's 256 KiB initial window. trio only; hardening.py fits
it into libp2p. Not here: encryption (the `Link`), frames (framing.py), deadlines (the callers).
"""

from __future__ import annotations

import math
import struct
from collections import deque
from typing import Final, Protocol

import trio

from protocol.net.base import HostLimits
from protocol.net.framing import ChannelClosed

_HEADER = struct.Struct(">BBHII")  # version, type, flags, stream id, length
_DATA, _WINDOW_UPDATE, _PING, _GO_AWAY = range(4)
_SYN, _ACK, _FIN, _RST = 1, 2, 4, 8
_NORMAL, _PROTOCOL_ERROR = 0, 1

INITIAL_WINDOW: Final = 256 * 1024
# With yamux' header (12) and Noise's tag (16) exactly one Noise packet of 65,535 bytes.
WRITE_BYTES: Final = 65_507
_PACKET_BYTES = WRITE_BYTES + _HEADER.size
_OUTBOX_BYTES = 4 * _PACKET_BYTES  # what the writer takes at once
_SMALL_CHUNK_BYTES = 4096
_ANSWERS_BYTES = 64 * 1024  # unsent acknowledgements, pongs, resets
_REFUSED_STREAMS = 512  # streams over the limit that one connection may try
_STALL_SECONDS = 60.0  # the kernel took none of a batch for so long: nobody is there
_FLUSH_SECONDS = 1.0  # for what is queued when the connection closes


class Link(Protocol):
    """The encrypted connection below. Losing it raises ChannelClosed."""

    async def receive_packets(self) -> list[bytes]:
        """At least one decrypted packet."""

    async def send_packets(self, packets: list[bytes]) -> None:
        """Encrypt and send packets of at most 65,519 bytes."""

    async def close(self) -> None: ...


class Unread:
    """Bytes received and not yet read, of all connections of a host."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.total = 0
        self.connections: set[Connection] = set()

    def add(self, count: int) -> None:
        self.total += count
        if self.total > self.limit:
            hoarder = max(self.connections, key=lambda connection: connection.unread)
            hoarder.fail("it held the most unread bytes when all peers together were over the limit")


class ProtocolViolation(Exception):
    """The peer broke yamux; the connection ends."""


class Channel:
    """One stream of a connection. Made by `Connection.open` and `Connection.accept`."""

    def __init__(self, connection: Connection, number: int) -> None:
        self.connection = connection
        self.number = number
        self._chunks: deque[bytes] = deque()
        self.unread = 0
        self.window = INITIAL_WINDOW  # bytes the peer may still send
        self._wanted = 0  # bytes the reader waits for
        self._credit = INITIAL_WINDOW  # bytes we may still send
        self._readable = trio.Event()
        self._writable = trio.Event()
        self._peer_finished = False
        self._finished = False
        self._closed: str | None = None  # why both directions ended

    # --- the reader's side ---

    async def receive_exactly(self, count: int) -> bytes:
        await trio.lowlevel.checkpoint()  # a flood of tiny frames must not starve other tasks
        self._wanted = count
        try:
            while self.unread < count:
                self._check_readable()
                self._grant()
                self._readable = trio.Event()
                await self._readable.wait()
        finally:
            self._wanted = 0
        return self._take(count)

    async def receive_some(self, most: int) -> bytes:
        """Between 1 and `most` bytes; raises ChannelClosed at the end."""
        await trio.lowlevel.checkpoint()
        while not self.unread:
            self._check_readable()
            self._readable = trio.Event()
            await self._readable.wait()
        return self._take(min(most, self.unread))

    def _check_readable(self) -> None:
        if self._closed is not None:
            raise ChannelClosed(self._closed)
        if self._peer_finished:
            raise ChannelClosed("the peer closed the stream")

    def _take(self, count: int) -> bytes:
        taken: list[bytes] = []
        left = count
        while left:
            chunk = self._chunks.popleft()
            if len(chunk) > left:
                self._chunks.appendleft(chunk[left:])
                chunk = chunk[:left]
            taken.append(chunk)
            left -= len(chunk)
        self._forget_unread(count)
        self._grant()
        return taken[0] if len(taken) == 1 else b"".join(taken)

    def _forget_unread(self, count: int) -> None:
        self.unread -= count
        self.connection.forget_unread(count)

    def _grant(self) -> None:
        """Open the window for what the reader waits for and one initial window more."""
        if self._peer_finished or self._closed is not None:
            return
        missing = self._wanted + INITIAL_WINDOW - self.unread - self.window
        if missing >= INITIAL_WINDOW // 2:
            granted = self.connection.reserve(self, missing)
            if granted:
                self.window += granted
                self.connection.answer(_WINDOW_UPDATE, 0, self.number, granted)

    # --- the writer's side ---

    async def send(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            await self._wait_credit()
            size = min(len(view), self._credit, WRITE_BYTES)
            header = _HEADER.pack(0, _DATA, 0, self.number, size)
            await self.connection.wait_outbox()
            self._check_writable()
            if self._credit < size:
                continue  # another task spent it while this one waited for the outbox
            self._credit -= size
            self.connection.post(b"".join((header, view[:size])))
            view = view[size:]

    async def _wait_credit(self) -> None:
        while True:
            self._check_writable()
            if self._credit > 0:
                return
            self._writable = trio.Event()
            await self._writable.wait()

    def _check_writable(self) -> None:
        if self._closed is not None:
            raise ChannelClosed(self._closed)
        if self._finished:
            raise ChannelClosed("we closed the stream")

    # --- ends ---

    def finish(self) -> None:
        """Send nothing more; go on receiving."""
        if self._finished or self._closed is not None:
            return
        self._finished = True
        # Behind the data, not among the answers: the end must not overtake it.
        self.connection.post(_HEADER.pack(0, _WINDOW_UPDATE, _FIN, self.number, 0))
        if self._peer_finished:
            self._end("both sides closed the stream")

    async def close(self) -> None:
        """Finish and read nothing more. The peer's further bytes are answered with a reset."""
        self.finish()
        self._end("we closed the stream")
        self._drop_unread()
        await trio.lowlevel.checkpoint()

    def abort(self) -> None:
        if self._closed is None:
            self.connection.post(_HEADER.pack(0, _WINDOW_UPDATE, _RST, self.number, 0))  # behind our own SYN
            self._end("we reset the stream")
        self._drop_unread()

    def _end(self, reason: str) -> None:
        if self._closed is None:
            self._closed = reason
            self.connection.remove(self)
        self._readable.set()
        self._writable.set()

    def _drop_unread(self) -> None:
        self._chunks.clear()
        self._forget_unread(self.unread)

    # --- what the peer's frames do; called by the connection's reader, never wait ---

    def on_data(self, data: bytes) -> None:
        if data:
            if self._chunks and len(self._chunks[-1]) + len(data) <= _SMALL_CHUNK_BYTES:
                self._chunks[-1] += data  # one object a byte would cost 40 times what is counted
            else:
                self._chunks.append(data)
            self.unread += len(data)
            self.window -= len(data)
            if self.unread >= self._wanted:
                self._readable.set()

    def on_credit(self, count: int) -> None:
        self._credit = min(self._credit + count, 0xFFFFFFFF)
        self._writable.set()

    def on_finished(self) -> None:
        self._peer_finished = True
        self._readable.set()
        if self._finished:
            self._end("both sides closed the stream")

    def on_reset(self) -> None:
        self._end("the peer reset the stream")
        self._drop_unread()

    def on_connection_lost(self, reason: str) -> None:
        self._end(reason)  # what arrived before can still be read


class Connection:
    """The yamux state of one connection. `run` serves it until it ends; the rest never waits for the peer."""

    def __init__(self, link: Link, *, peer: bytes, is_initiator: bool, limits: HostLimits, unread: Unread) -> None:
        self.peer = peer  # 32-byte key
        self.is_initiator = is_initiator
        self.since = trio.current_time()
        self._link = link
        self._limits = limits
        self._host_unread = unread
        self.unread = 0
        self.heard = -math.inf  # trio time of the last packet
        self._reserved = 0  # unread bytes and open windows of all channels, over their initial windows
        self._starved: list[Channel] = []
        self._next_number = 1 if is_initiator else 2
        self._channels: dict[int, Channel] = {}
        self._peer_streams = 0
        self._refused = 0
        accept = trio.open_memory_channel[Channel](limits.streams_per_peer)
        self._accepted_send, self._accepted_receive = accept
        self._answers = bytearray()
        self._outbox: deque[bytes] = deque()
        self._outbox_bytes = 0
        self._outbox_room = trio.lowlevel.ParkingLot()
        self._to_write = trio.Event()
        self._flushed = trio.Event()
        self._closing = False
        self._running = False
        self._ended: str | None = None
        self.closed = trio.Event()  # the connection carries nothing any more
        self._scope = trio.CancelScope()
        # The frame being read: its header's bytes so far, then what is left of its payload.
        self._partial = b""
        self._payload_left = 0
        self._payload_channel: Channel | None = None
        self._payload_flags = 0
        self._payload_number = 0

    @property
    def accepting(self) -> bool:
        return self._ended is None and not self._closing

    @property
    def channels(self) -> int:
        return len(self._channels)

    # --- life ---

    async def run(self) -> None:
        """Read and write until the connection ends; never raises but on cancellation."""
        self._running = True
        self._host_unread.connections.add(self)
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._write_loop)
                    await self._read_loop()
                    nursery.cancel_scope.cancel()
        finally:
            self.fail("the connection was closed")
            self._host_unread.connections.discard(self)
            with trio.CancelScope(shield=True):
                await self._link.close()

    def fail(self, reason: str) -> None:
        """End the connection now; every channel learns why."""
        if self._ended is not None:
            return
        self._ended = reason
        self._host_unread.total -= self.unread
        self.unread = 0
        for channel in list(self._channels.values()):
            channel.on_connection_lost(reason)
        self._accepted_send.close()
        self._to_write.set()
        self._flushed.set()
        self._outbox_room.unpark_all()
        self.closed.set()
        self._scope.cancel()

    async def close(self) -> None:
        """Say goodbye, let what is queued leave (a second at most), end."""
        if self.accepting and self._running:
            self._closing = True
            self.post(_HEADER.pack(0, _GO_AWAY, 0, 0, _NORMAL))
            self._flushed = trio.Event()
            with trio.CancelScope(deadline=trio.current_time() + _FLUSH_SECONDS, shield=True):
                await self._flushed.wait()
        self.fail("we closed the connection")

    async def _read_loop(self) -> None:
        try:
            while True:
                packets = await self._link.receive_packets()
                self.heard = trio.current_time()
                for packet in packets:
                    self._feed(packet)
        except ChannelClosed as error:
            self.fail(str(error))
        except ProtocolViolation as error:
            self._goodbye()
            await self._flush_soon()
            self.fail(f"the peer broke the multiplexing protocol: {error}")

    def _goodbye(self) -> None:
        self._closing = True
        self.post(_HEADER.pack(0, _GO_AWAY, 0, 0, _PROTOCOL_ERROR))

    async def _flush_soon(self) -> None:
        self._flushed = trio.Event()
        with trio.move_on_after(_FLUSH_SECONDS / 4):
            await self._flushed.wait()

    async def _write_loop(self) -> None:
        try:
            while True:
                await self._to_write.wait()
                batch = self._take_outbox()
                if not batch:
                    self._to_write = trio.Event()
                    self._flushed.set()
                    continue
                with trio.fail_after(_STALL_SECONDS):
                    await self._link.send_packets(batch)
        except trio.TooSlowError:
            self.fail(f"the peer's machine took no bytes for {_STALL_SECONDS:g} s")
        except ChannelClosed as error:
            self.fail(str(error))

    def _take_outbox(self) -> list[bytes]:
        """Everything queued, answers first, small frames gathered into full packets."""
        frames = [bytes(self._answers[at : at + _PACKET_BYTES]) for at in range(0, len(self._answers), _PACKET_BYTES)]
        frames.extend(self._outbox)
        self._answers.clear()
        self._outbox.clear()
        self._outbox_bytes = 0
        self._outbox_room.unpark_all()
        packets: list[bytes] = []
        gathered: list[bytes] = []
        size = 0
        for frame in frames:
            size += len(frame)
            if size > _PACKET_BYTES and gathered:
                packets.append(b"".join(gathered))
                gathered, size = [], len(frame)
            gathered.append(frame)
        return [*packets, b"".join(gathered)] if gathered else packets

    # --- what channels ask for ---

    async def wait_outbox(self) -> None:
        """Until the writer can take another frame; first come, first served."""
        await trio.lowlevel.checkpoint_if_cancelled()
        while self._outbox_bytes >= _OUTBOX_BYTES and self._ended is None:
            await self._outbox_room.park()

    def post(self, frame: bytes) -> None:
        if self._ended is None:
            self._outbox.append(frame)
            self._outbox_bytes += len(frame)
            self._to_write.set()

    def answer(self, kind: int, flags: int, number: int, length: int) -> None:
        if self._ended is None:
            self._answers += _HEADER.pack(0, kind, flags, number, length)
            self._to_write.set()
            if len(self._answers) > _ANSWERS_BYTES:
                self.fail("the peer asks for answers faster than it reads them")

    def reserve(self, channel: Channel, count: int) -> int:
        """How much of `count` the channel's window may grow now; the rest when others have read."""
        room = self._limits.unread_bytes_per_peer - self._reserved
        granted = min(count, max(room, 0))
        self._reserved += granted
        if granted < count and channel not in self._starved:
            self._starved.append(channel)
        return granted

    def forget_unread(self, count: int) -> None:
        if self._ended is not None:
            return
        self.unread -= count
        self._host_unread.total -= count
        self._reserved -= count
        if count and self._starved:
            starved, self._starved = self._starved, []
            for channel in starved:
                channel._grant()

    def remove(self, channel: Channel) -> None:
        if self._channels.pop(channel.number, None) is None:
            return
        self._reserved -= channel.window - INITIAL_WINDOW
        if self._is_peers(channel.number):
            self._peer_streams -= 1

    def _is_peers(self, number: int) -> bool:
        return number % 2 != self._next_number % 2

    def open(self) -> Channel:
        """A new channel; raises ChannelClosed when the connection is ending."""
        if not self.accepting:
            raise ChannelClosed(self._ended or "we are closing the connection")
        channel = Channel(self, self._next_number)
        self._next_number += 2
        self._channels[channel.number] = channel
        self.post(_HEADER.pack(0, _WINDOW_UPDATE, _SYN, channel.number, 0))
        return channel

    async def accept(self) -> Channel:
        """The next channel the peer opens; raises ChannelClosed when there will be none."""
        try:
            return await self._accepted_receive.receive()
        except (trio.EndOfChannel, trio.ClosedResourceError):
            raise ChannelClosed(self._ended or "the connection ended") from None

    # --- the peer's frames ---

    def _feed(self, packet: bytes) -> None:
        at = 0
        while at < len(packet):
            if self._payload_left:
                size = min(self._payload_left, len(packet) - at)
                self._on_payload(packet[at : at + size])
                at += size
                continue
            missing = _HEADER.size - len(self._partial)
            self._partial += packet[at : at + missing]
            at += missing
            if len(self._partial) == _HEADER.size:
                header, self._partial = self._partial, b""
                self._on_header(*_HEADER.unpack(header))

    def _on_payload(self, data: bytes) -> None:
        self._payload_left -= len(data)
        channel = self._payload_channel
        if channel is not None and channel._closed is None:
            self.unread += len(data)
            channel.on_data(data)
            self._host_unread.add(len(data))
        if not self._payload_left:
            self._on_flags(self._payload_number, self._payload_flags)

    def _on_header(self, version: int, kind: int, flags: int, number: int, length: int) -> None:
        if version != 0 or kind > _GO_AWAY:
            raise ProtocolViolation(f"a frame of version {version} and type {kind}")
        if kind == _PING:
            if flags & _SYN:
                self.answer(_PING, _ACK, 0, length)
        elif kind == _GO_AWAY:
            raise ChannelClosed("the peer is closing the connection")
        else:
            self._on_stream_frame(kind, flags, number, length)

    def _on_stream_frame(self, kind: int, flags: int, number: int, length: int) -> None:
        if flags & _SYN:
            self._on_new_stream(number)
        channel = self._channels.get(number)
        if kind == _WINDOW_UPDATE:
            if channel is not None:
                channel.on_credit(length)
            self._on_flags(number, flags)
            return
        if channel is not None and length > channel.window:
            raise ProtocolViolation(f"{length} bytes for stream {number}, whose window is {channel.window}")
        if channel is None and length and not flags & _RST:
            self.answer(_WINDOW_UPDATE, _RST, number, 0)
        self._payload_channel, self._payload_left = channel, length
        self._payload_number, self._payload_flags = number, flags
        if not length:
            self._on_flags(number, flags)

    def _on_flags(self, number: int, flags: int) -> None:
        channel = self._channels.get(number)
        if channel is None:
            return
        if flags & _RST:
            channel.on_reset()
        elif flags & _FIN:
            channel.on_finished()

    def _on_new_stream(self, number: int) -> None:
        if not number or not self._is_peers(number) or number in self._channels:
            raise ProtocolViolation(f"a new stream with the number {number}")
        channel = Channel(self, number)
        if self._closing or self._peer_streams >= self._limits.streams_per_peer or not self._offer(channel):
            self._refuse_stream(number)
            return
        self._channels[number] = channel
        self._peer_streams += 1
        self.answer(_WINDOW_UPDATE, _ACK, number, 0)

    def _offer(self, channel: Channel) -> bool:
        try:
            self._accepted_send.send_nowait(channel)
        except (trio.WouldBlock, trio.BrokenResourceError, trio.ClosedResourceError):
            return False
        return True

    def _refuse_stream(self, number: int) -> None:
        self._refused += 1
        if self._refused > _REFUSED_STREAMS:
            raise ProtocolViolation(f"more than {_REFUSED_STREAMS} streams over the limit")
        self.answer(_WINDOW_UPDATE, _RST, number, 0)
