"""Gives other nodes of the run what this one has: pieces, whole or being collected, and the signed manifests.

Serves nobody whom the trainer did not name, each no more than its share, all together no more than the upload cap.
Nothing is given that was not checked when it was stored. Not here: fetching (swarm.py).
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

import trio

from node.peers import PeerBook
from node.report import Status
from node.sources import bitmap
from node.store import RunStore
from protocol import limits, messages
from protocol.errors import Code, NetError, Refused, RemoteError
from protocol.net.base import Host, Stream
from protocol.net.bucket import Bucket
from protocol.net.session import Session

_STREAMS_PER_NODE: Final = 2  # the old one may linger beside its successor
_BLOBS_PER_STREAM: Final = 4  # 4 MiB each, in memory while the other reads slowly
_UPLOADS: Final = 4  # at once, to all: a few at full speed spread sooner than many slow ones
_WAITING: Final = 32  # for one of these
_ANNOUNCED_TO: Final = 8  # nodes that keep in touch with this one
_LONGEST_WAIT_SECONDS: Final = 20.0  # for the upload cap; who would wait longer is told to ask elsewhere
_BURST_BYTES: Final = 2 * limits.MAX_BLOB_BYTES


class _Sending:
    """A stream that says when a blob has left, or could not."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self.peer = stream.peer
        self.on_sent: Callable[[int], None] = lambda size: None

    async def send(self, frame: bytes, *, seconds: float, what: str) -> None:
        try:
            await self._stream.send(frame, seconds=seconds, what=what)
        finally:
            self.on_sent(len(frame))

    async def receive(self, *, seconds: float, what: str, limit: int = limits.MAX_FRAME_BYTES) -> bytes:
        return await self._stream.receive(seconds=seconds, what=what, limit=limit)

    async def close(self) -> None:
        await self._stream.close()

    async def reset(self) -> None:
        await self._stream.reset()


class _Visitor:
    """One stream of another node: what it is being sent, what it asked about and was not yet told."""

    def __init__(self, stream: Stream, uploads: trio.Semaphore) -> None:
        sending = _Sending(stream)
        sending.on_sent = self._on_sent
        self.session = Session(sending, at_once=_BLOBS_PER_STREAM)
        self._uploads = uploads
        self._turn = trio.Lock()  # a stream carries one blob at a time anyway
        self._size: int | None = None  # of the blob that is about to leave
        self._left = trio.Event()  # no blob of this stream holds a place
        self._left.set()
        self.wants: frozenset[bytes] = frozenset()
        self.news: list[bytes] = []
        self.coming: list[bytes] = []
        self.is_neighbour = False  # it introduced itself
        self.announcement: bytes | None = None  # the newest Announce, not passed on yet
        self.has_news = trio.Event()

    async def take_place(self) -> None:
        """Wait for a place among the uploads. It is given back when the blob has left, or by `leave_place`."""
        async with self._turn:
            await self._left.wait()
            await self._uploads.acquire()
            self._left = trio.Event()

    def leave_place(self) -> None:
        self._size = None
        if not self._left.is_set():
            self._left.set()
            self._uploads.release()

    def expect(self, size: int) -> None:
        """The next frame of more than `size` bytes is the blob that holds the place."""
        self._size = size

    def _on_sent(self, size: int) -> None:
        if self._size is not None and size > self._size:
            self.leave_place()

    def tell(self, digest: bytes) -> None:
        if digest in self.wants:
            self.news.append(digest)
            self.has_news.set()

    def tell_coming(self, digest: bytes) -> None:
        if digest in self.wants:
            self.coming.append(digest)
            self.has_news.set()

    def announce(self, body: bytes) -> None:
        self.announcement = body
        self.has_news.set()

    async def pass_news(self) -> None:
        while True:
            await self.has_news.wait()
            if self.announcement is not None:
                body, self.announcement = self.announcement, None
                try:
                    await self.session.notify(body)
                except NetError:
                    return
            first, self.news = self.news[: limits.MAX_HAVE_DIGESTS], self.news[limits.MAX_HAVE_DIGESTS :]
            coming, self.coming = self.coming[: limits.MAX_HAVE_DIGESTS], self.coming[limits.MAX_HAVE_DIGESTS :]
            if not self.news and not self.coming:
                self.has_news = trio.Event()
            if not first and not coming:
                continue
            try:
                await self.session.notify(messages.pack(messages.Have(tuple(first), tuple(coming))))
            except NetError:
                return  # the session says so itself


class BlobServer:
    """Answers the blob protocol of one host."""

    def __init__(self, store: RunStore, book: PeerBook, upload_cap: float, status: Status) -> None:
        """`upload_cap`: bytes a second, to all together."""
        self._store = store
        self._book = book
        self._bucket = Bucket(upload_cap, _BURST_BYTES)
        self._status = status
        self._streams: Counter[bytes] = Counter()
        self._visitors: set[_Visitor] = set()
        self._uploads = trio.Semaphore(_UPLOADS)
        self._asked = 0  # blobs being read or waiting for an upload's place
        self.on_announce: Callable[[bytes, messages.Announce], None] = lambda node, announce: None

    def start(self, host: Host) -> None:
        host.serve(messages.BLOB_PROTOCOL, self._stream)

    def tell(self, digest: bytes) -> None:
        """A piece is here that was not: whoever asked about it hears of it."""
        for visitor in self._visitors:
            visitor.tell(digest)

    def tell_coming(self, digest: bytes) -> None:
        """This node is asking the trainer for a piece: others need not."""
        for visitor in self._visitors:
            visitor.tell_coming(digest)

    def announce(self, body: bytes) -> None:
        """Pass an Announce on to the nodes that keep in touch with this one, some of them."""
        for visitor in [each for each in self._visitors if each.is_neighbour][:_ANNOUNCED_TO]:
            visitor.announce(body)

    async def _stream(self, stream: Stream) -> None:
        peer = stream.peer
        if self._streams[peer] >= _STREAMS_PER_NODE:
            await stream.reset()
            return
        self._streams[peer] += 1
        visitor = _Visitor(stream, self._uploads)
        self._visitors.add(visitor)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(visitor.pass_news)
                await self._serve(visitor)
                nursery.cancel_scope.cancel()
        finally:
            visitor.leave_place()
            self._visitors.discard(visitor)
            self._streams[peer] -= 1
            if not self._streams[peer]:
                del self._streams[peer]

    async def _serve(self, visitor: _Visitor) -> None:
        async def answer(body: bytes) -> bytes:
            return messages.pack(await self._answer(visitor, messages.open_body(body)))

        async def on_notice(body: bytes) -> None:
            with contextlib.suppress(RemoteError):  # a notice has no answer; what is none costs nobody a line in a log
                if visitor.is_neighbour:
                    self.on_announce(visitor.session.peer, messages.expect(messages.Announce, body))

        try:
            await visitor.session.run(answer, on_notice)
        except (NetError, RemoteError):
            return  # it left, or it broke the protocol and was told

    async def _answer(self, visitor: _Visitor, request: Any) -> Any:
        if isinstance(request, messages.GetPeers):
            self._book.show(visitor.session.peer, request.membership)
        # SPEC 9.6: a node SHOULD serve only keys that the trainer named to it, and those that show its word.
        if not await self._book.admits(visitor.session.peer):
            raise Refused(Code.BUSY, "the trainer has not named you to this node: ask again later, or elsewhere")
        match request:
            case messages.GetBlob():
                return await self._blob(visitor, request.digest)
            case messages.GetHaves():
                return await self._haves(visitor, request.digests)
            case messages.GetManifest():
                return self._manifest(request.version)
            case messages.GetPeers():
                visitor.is_neighbour = True
                return self._book.meet(visitor.session.peer, request)
        raise Refused(Code.UNEXPECTED_MESSAGE, f"a node does not answer {type(request).__name__} here")

    async def _blob(self, visitor: _Visitor, digest: bytes) -> messages.BlobReply:
        if self._asked >= _WAITING or self._bucket.wait_seconds(limits.MAX_BLOB_BYTES) > _LONGEST_WAIT_SECONDS:
            raise Refused(Code.BUSY, "this node gives away all it wants to: ask elsewhere")
        self._asked += 1
        try:
            if not await trio.to_thread.run_sync(self._store.has_blob, digest):
                raise Refused(Code.NOT_FOUND, f"this node has no blob {digest.hex()[:16]}… now")
            return await self._read_in_turn(visitor, digest)
        finally:
            self._asked -= 1

    async def _read_in_turn(self, visitor: _Visitor, digest: bytes) -> messages.BlobReply:
        await visitor.take_place()
        try:
            data = await trio.to_thread.run_sync(self._store.read_blob, digest)
            if data is None:
                raise Refused(Code.NOT_FOUND, f"this node has no blob {digest.hex()[:16]}… now")
            await self._bucket.take(len(data))
        except BaseException:
            visitor.leave_place()
            raise
        visitor.expect(len(data))
        self._status.given_bytes += len(data)
        self._status.giving.add(len(data))
        return messages.BlobReply(data)

    async def _haves(self, visitor: _Visitor, digests: tuple[bytes, ...]) -> messages.Haves:
        visitor.wants = frozenset(digests)  # before looking: what comes meanwhile is told twice, not never
        answers = await trio.to_thread.run_sync(lambda: [self._store.has_blob(digest) for digest in digests])
        visitor.wants = frozenset(each for each, has in zip(digests, answers, strict=True) if not has)
        return messages.Haves(bitmap(answers))

    def _manifest(self, version: int | None) -> messages.ManifestReply:
        held = self._store.held
        found = held.get(max(held, default=-1) if version is None else version)
        if found is None:
            wanted = "a whole policy" if version is None else f"policy {version}"
            raise Refused(Code.NOT_FOUND, f"this node does not hold {wanted}")
        return messages.ManifestReply(found.manifest)
