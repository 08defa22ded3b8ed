"""Frames over a byte channel: u32 big-endian length, payload. One `Stream` for every transport.

A channel moves bytes with back-pressure (yamux.Channel, memory.Pipe). Deadlines, sizes and the
translation of a channel's end into our errors are here, once.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Awaitable, Callable
from typing import Protocol

import trio

from protocol import identity
from protocol.errors import Code, ConnectionLost, DeadlineExceeded, DecodeError, NetError, RemoteError
from protocol.limits import MAX_FRAME_BYTES

log = logging.getLogger(__name__)

_LENGTH = struct.Struct(">I")


class ChannelClosed(Exception):
    """The channel ended; `str(error)` says how, to be put after "the connection was lost: "."""


class Channel(Protocol):
    """What a transport gives us."""

    async def send(self, data: bytes) -> None:
        """Hand over all of `data`. Raises ChannelClosed. Cancelled midway, part of it may have left."""

    async def receive_exactly(self, count: int) -> bytes:
        """`count` bytes, or none taken when cancelled. Raises ChannelClosed."""

    async def close(self) -> None: ...

    def abort(self) -> None:
        """End both directions now."""


class FramedStream:
    """A `base.Stream` over a channel."""

    def __init__(self, channel: Channel, peer: bytes) -> None:
        self.peer = peer
        self._channel = channel
        self._sending = trio.Lock()
        self._announced: int | None = None  # length of the frame whose payload is still to come

    async def send(self, frame: bytes, *, seconds: float, what: str) -> None:
        if len(frame) > MAX_FRAME_BYTES:
            raise ValueError(f"a frame of {len(frame)} bytes is over the limit of {MAX_FRAME_BYTES}")
        with trio.move_on_after(seconds):
            async with self._sending:
                await self._send(_LENGTH.pack(len(frame)) + frame, what)
            return
        raise DeadlineExceeded(what, seconds)

    async def _send(self, data: bytes, what: str) -> None:
        try:
            await self._channel.send(data)
        except ChannelClosed as error:
            raise self._lost(what, error) from None
        except trio.Cancelled:
            self._channel.abort()  # half a frame has left: the peer could not find the next one
            raise

    async def receive(self, *, seconds: float, what: str, limit: int = MAX_FRAME_BYTES) -> bytes:
        with trio.move_on_after(seconds):
            try:
                return await self._receive(what, limit)
            except ChannelClosed as error:
                raise self._lost(what, error) from None
        raise DeadlineExceeded(what, seconds)

    async def _receive(self, what: str, limit: int) -> bytes:
        if self._announced is None:
            (self._announced,) = _LENGTH.unpack(await self._channel.receive_exactly(_LENGTH.size))
        if self._announced > limit:
            self._channel.abort()
            raise DecodeError(
                Code.TOO_LARGE,
                f"{identity.peer_id(self.peer)} announced a frame of {self._announced} bytes while {what}; "
                f"the limit is {limit}",
            )
        frame = await self._channel.receive_exactly(self._announced)
        self._announced = None
        return frame

    def _lost(self, what: str, error: ChannelClosed) -> ConnectionLost:
        return ConnectionLost(f"the connection to {identity.peer_id(self.peer)} was lost while {what}: {error}")

    async def close(self) -> None:
        await self._channel.close()

    async def reset(self) -> None:
        self._channel.abort()
        await trio.lowlevel.checkpoint()


async def serve_contained(serve: Callable[[], Awaitable[None]], channel: Channel, what: str) -> bool:
    """Run a stream's handler; nothing it raises gets out. True when it failed by a fault of ours."""
    try:
        await serve()
    except (NetError, RemoteError, ChannelClosed) as error:
        log.debug("%s ended: %s", what, error)
        channel.abort()
    except Exception:
        log.exception("the handler of %s failed; the stream is reset, the host goes on", what)
        channel.abort()
        return True
    else:
        await channel.close()
    return False
