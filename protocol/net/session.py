"""Requests, replies and notices over one stream; both ends may ask.

    frame  = kind u8 ‖ request id u32 BE ‖ body
    kind   = REQUEST 0 | REPLY 1 | ERROR 2 | NOTICE 3 (id 0)
    ERROR's body = canonical msgpack {"code": str, "message": str}

Each side counts its own request ids from 1. Not here: what the bodies mean (messages.py),
heartbeats (a caller's notice every HEARTBEAT_SECONDS), reconnecting.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Awaitable, Callable
from enum import IntEnum

import msgpack
import trio

from protocol import identity
from protocol.errors import (
    Code,
    ConnectionLost,
    DeadlineExceeded,
    DecodeError,
    NetError,
    Refused,
    RemoteError,
)
from protocol.limits import (
    MAX_FRAME_BYTES,
    MAX_IN_FLIGHT_REQUESTS,
    MAX_NOTICE_BYTES,
    MAX_TEXT_CHARACTERS,
    REQUEST_SECONDS,
    SESSION_SILENCE_SECONDS,
)
from protocol.net.base import Stream

log = logging.getLogger(__name__)

_HEAD = struct.Struct(">BI")
MAX_BODY_BYTES = MAX_FRAME_BYTES - _HEAD.size
_MAX_ID = 0xFFFF_FFFF
_NOTICES = 64  # received and not yet handled
_IN_FLIGHT_BYTES = 32 * 1024 * 1024  # bodies of the peer's unanswered requests


class Kind(IntEnum):
    REQUEST = 0
    REPLY = 1
    ERROR = 2
    NOTICE = 3


OnRequest = Callable[[bytes], Awaitable[bytes]]
OnNotice = Callable[[bytes], Awaitable[None]]


class _Pending:
    """A request of ours: its slot is held until the peer answers, even after we gave up waiting."""

    def __init__(self) -> None:
        self.answered = trio.Event()
        self.outcome: bytes | Exception | None = None

    def settle(self, outcome: bytes | Exception) -> None:
        self.outcome = outcome
        self.answered.set()


class Session:
    """One conversation over `stream`. `run` must be running for requests to be answered."""

    def __init__(self, stream: Stream, *, at_once: int = MAX_IN_FLIGHT_REQUESTS) -> None:
        """`at_once`: requests of the peer in work together; where replies are large it bounds their memory."""
        self._stream = stream
        self._at_once = at_once
        self._pending: dict[int, _Pending] = {}
        self._last_id = 0
        self._sending = trio.Lock()
        self._slots = trio.Semaphore(MAX_IN_FLIGHT_REQUESTS)
        self._answering: dict[int, int] = {}  # the peer's unanswered requests → bytes of their bodies
        self._ended: str | None = None
        self._closed_here = False

    @property
    def peer(self) -> bytes:
        """The peer's 32-byte public key."""
        return self._stream.peer

    # --- asking ---

    async def request(self, body: bytes, *, seconds: float, what: str) -> bytes:
        """Ask and wait for the reply's body.

        Raises Refused (the peer answered with an error), DeadlineExceeded, ConnectionLost.
        """
        with trio.move_on_after(seconds):
            return await self._request(body, seconds, what)
        raise DeadlineExceeded(what, seconds)

    async def _request(self, body: bytes, seconds: float, what: str) -> bytes:
        await self._slots.acquire()
        pending = None
        try:
            async with self._sending:
                self._check_open(what)
                number = self._next_id()
                # From here on the peer may have it: the slot is freed by its answer or the end.
                pending = self._pending[number] = _Pending()
                await self._stream.send(_message(Kind.REQUEST, number, body), seconds=seconds, what=what)
        finally:
            if pending is None:
                self._slots.release()
        await pending.answered.wait()
        if isinstance(pending.outcome, bytes):
            return pending.outcome
        if isinstance(pending.outcome, Refused):
            raise pending.outcome
        raise self._lost(what)

    def _next_id(self) -> int:
        while True:
            self._last_id = self._last_id % _MAX_ID + 1
            if self._last_id not in self._pending:
                return self._last_id

    async def notify(self, body: bytes) -> None:
        """Tell, without an answer: at most MAX_NOTICE_BYTES. Raises DeadlineExceeded or ConnectionLost."""
        if len(body) > MAX_NOTICE_BYTES:
            raise ValueError(f"a notice of {len(body)} bytes is over the limit of {MAX_NOTICE_BYTES}")
        await self._send(Kind.NOTICE, 0, body, "sending a notice")

    async def close(self) -> None:
        """End the conversation gracefully; `run` returns. Never raises."""
        self._closed_here = True
        self._end("we closed the session")
        await self._stream.close()

    async def _send(self, kind: Kind, number: int, body: bytes, what: str) -> None:
        with trio.move_on_after(REQUEST_SECONDS):
            async with self._sending:
                self._check_open(what)
                await self._stream.send(_message(kind, number, body), seconds=REQUEST_SECONDS, what=what)
            return
        raise DeadlineExceeded(what, REQUEST_SECONDS)

    def _check_open(self, what: str) -> None:
        if self._ended is not None:
            raise self._lost(what)

    def _lost(self, what: str) -> ConnectionLost:
        return ConnectionLost(f"the session with {identity.peer_id(self.peer)} ended while {what}: {self._ended}")

    # --- serving ---

    async def run(self, on_request: OnRequest, on_notice: OnNotice) -> None:
        """Read until the session ends; requests are answered concurrently, notices handled in order.

        An `on_request` that raises RemoteError answers with its code; any other exception is logged
        and answered INTERNAL. Returns after `close`; raises ConnectionLost when the peer ended or
        went silent for SESSION_SILENCE_SECONDS, RemoteError when it broke the protocol.
        """
        failure: Exception | None = None
        async with trio.open_nursery() as nursery:
            notices, queued = trio.open_memory_channel[bytes](_NOTICES)
            nursery.start_soon(self._handle_notices, queued, on_notice)
            try:
                while True:
                    await self._handle(await self._receive(), nursery, on_request, notices)
            except (NetError, RemoteError) as error:
                failure = error
            finally:
                self._end(str(failure) if failure else "it was cancelled")
                notices.close()
                nursery.cancel_scope.cancel()
        if self._closed_here or failure is None:
            return
        await self._stream.reset()
        raise failure

    async def _receive(self) -> bytes:
        try:
            return await self._stream.receive(seconds=SESSION_SILENCE_SECONDS, what="waiting for a message")
        except DeadlineExceeded:
            raise ConnectionLost(
                f"{identity.peer_id(self.peer)} was silent for {SESSION_SILENCE_SECONDS} s: the session is dead"
            ) from None

    def _end(self, reason: str) -> None:
        if self._ended is None:
            self._ended = reason
        for pending in self._pending.values():
            pending.settle(ConnectionLost(reason))
            self._slots.release()
        self._pending.clear()

    async def _handle(
        self, frame: bytes, nursery: trio.Nursery, on_request: OnRequest, notices: trio.MemorySendChannel[bytes]
    ) -> None:
        kind, number, body = _split(frame)
        if kind is Kind.REQUEST:
            await self._take_request(number, body, nursery, on_request)
        elif kind is Kind.NOTICE:
            if len(body) > MAX_NOTICE_BYTES:
                raise RemoteError(Code.TOO_LARGE, f"a notice of {len(body)} bytes; the limit is {MAX_NOTICE_BYTES}")
            await notices.send(body)
        else:
            self._take_answer(kind, number, body)

    async def _take_request(self, number: int, body: bytes, nursery: trio.Nursery, on_request: OnRequest) -> None:
        if number in self._answering:
            raise RemoteError(Code.UNEXPECTED_MESSAGE, f"request {number} came twice before it was answered")
        if len(self._answering) >= self._at_once or sum(self._answering.values()) > _IN_FLIGHT_BYTES:
            # Answered by the reader itself, so that a flood meets back-pressure.
            busy = Refused(Code.BUSY, "too many requests of yours are unanswered: ask again when some are")
            await self._send(Kind.ERROR, number, encode_error(busy), "refusing a request")
            return
        self._answering[number] = len(body)
        nursery.start_soon(self._answer, number, body, on_request)

    async def _answer(self, number: int, body: bytes, on_request: OnRequest) -> None:
        try:
            kind, answer = await self._outcome(body, on_request)
            await self._send(kind, number, answer, "sending a reply")
        except NetError as error:
            log.debug("a reply to %s did not leave: %s", identity.peer_id(self.peer), error)
        finally:
            self._answering.pop(number, None)

    async def _outcome(self, body: bytes, on_request: OnRequest) -> tuple[Kind, bytes]:
        try:
            answer = await on_request(body)
            if len(answer) > MAX_BODY_BYTES:
                raise ValueError(f"a reply of {len(answer)} bytes is over the limit of {MAX_BODY_BYTES}")
            return Kind.REPLY, answer
        except RemoteError as error:
            return Kind.ERROR, encode_error(error)
        except Exception:
            log.exception("answering a request of %s failed", identity.peer_id(self.peer))
            fault = RemoteError(Code.INTERNAL, "the answering side failed; its log says more")
            return Kind.ERROR, encode_error(fault)

    def _take_answer(self, kind: Kind, number: int, body: bytes) -> None:
        if number not in self._pending:
            raise RemoteError(Code.UNEXPECTED_MESSAGE, f"an answer to request {number}, which was not asked")
        outcome = body if kind is Kind.REPLY else decode_error(body)
        self._slots.release()
        self._pending.pop(number).settle(outcome)

    async def _handle_notices(self, queued: trio.MemoryReceiveChannel[bytes], on_notice: OnNotice) -> None:
        async with queued:
            async for body in queued:
                try:
                    await on_notice(body)
                except Exception:
                    log.exception("handling a notice of %s failed", identity.peer_id(self.peer))


def _message(kind: Kind, number: int, body: bytes) -> bytes:
    if len(body) > MAX_BODY_BYTES:
        raise ValueError(f"a body of {len(body)} bytes is over the limit of {MAX_BODY_BYTES}")
    return _HEAD.pack(kind, number) + body


def _split(frame: bytes) -> tuple[Kind, int, bytes]:
    if len(frame) < _HEAD.size:
        raise RemoteError(Code.MALFORMED, f"a message of {len(frame)} bytes has no head")
    kind, number = _HEAD.unpack_from(frame)
    try:
        known = Kind(kind)
    except ValueError:
        raise RemoteError(Code.MALFORMED, f"a message of the unknown kind {kind}") from None
    if (known is Kind.NOTICE) != (number == 0):
        raise RemoteError(Code.MALFORMED, f"a {known.name} with the id {number}")
    return known, number, frame[_HEAD.size :]


def encode_error(error: RemoteError) -> bytes:
    message = str(error)[:MAX_TEXT_CHARACTERS]
    return bytes(msgpack.packb({"code": str(error.code), "message": message}))


def decode_error(body: bytes) -> Refused:
    """The peer's error. Raises DecodeError when the body is not one canonical error."""
    try:
        # Without a limit, nested list headers make the parser set aside much for little (codec.unpack).
        value = msgpack.unpackb(body, raw=False, strict_map_key=True, max_array_len=0)
    except (ValueError, msgpack.UnpackException):
        value = None
    if not (isinstance(value, dict) and list(value) == ["code", "message"]):
        raise DecodeError(Code.MALFORMED, 'an error reply is not the map {"code", "message"}')
    code, message = value["code"], value["message"]
    if not (isinstance(code, str) and isinstance(message, str) and len(message) <= MAX_TEXT_CHARACTERS):
        raise DecodeError(Code.MALFORMED, "an error reply has fields of the wrong type or length")
    if msgpack.packb(value) != body:
        raise DecodeError(Code.NOT_CANONICAL, "an error reply is not canonical")
    if code not in Code.__members__:
        return Refused(Code.INTERNAL, f"{message} (code {code[:64]}, which this version does not know)")
    return Refused(Code(code), message)
