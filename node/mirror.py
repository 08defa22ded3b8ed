"""Pieces of a policy from a static HTTP server (SPEC 9.6): one more source, trusted as little as the others.

Plain http.client in threads. A transfer that breaks off goes on where it stopped, with a Range request. Redirects are
not followed: the address given is the one that is asked. Not here: writing a mirror (trainer/mirror.py).
"""

from __future__ import annotations

import http.client
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Final
from urllib.parse import SplitResult, urlsplit

import trio

from protocol import codec, limits
from protocol.envelope import Signed
from protocol.errors import Code, ConnectionLost, DeadlineExceeded, DecodeError, RemoteError, Unreachable, UsageError
from protocol.policy import Blob, version_name

_READ_BYTES: Final = 256 * 1024
_TRIES: Final = 3  # of one transfer that breaks off
_IDLE_CONNECTIONS: Final = 4
_MANIFEST_BYTES: Final = limits.MAX_MANIFEST_BYTES + 4_096


def check_mirror(url: str) -> SplitResult:
    """The parts of a mirror's URL. Raises UsageError."""
    parts = urlsplit(url)
    try:
        good = parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port > 0)
    except ValueError:  # a port that is no number
        good = False
    if not good or parts.query or parts.fragment or parts.username:
        raise UsageError(f"--mirror {url[:200]}: give the URL of its folder, such as https://example.org/run")
    return parts


class MirrorSource:
    """One mirror."""

    def __init__(self, url: str, *, seconds: float) -> None:
        """`seconds`: longest silence of the server. Raises UsageError."""
        self._parts = check_mirror(url)
        self._seconds = seconds
        self._idle: list[http.client.HTTPConnection] = []
        self.name = f"the mirror {url.rstrip('/')}"

    async def fetch(self, blob: Blob, *, seconds: float) -> bytes:
        name = blob.digest.hex()
        return await self._get(f"blobs/{name[:2]}/{name}", blob.length, seconds)

    async def holds(self, digests: Sequence[bytes]) -> set[bytes] | None:
        """Nobody can ask a folder what it has but by asking for it."""
        return None

    async def manifest(self, version: int | None = None) -> Signed:
        path = "latest.msgpack" if version is None else f"manifests/{version_name(version)}.msgpack"
        data = await self._get(path, None, limits.REQUEST_SECONDS)
        try:
            return codec.decode(Signed, data)
        except DecodeError as error:
            raise DecodeError(error.code, f"{self.name}: {path} is no signed object: {error}") from None

    async def _get(self, path: str, length: int | None, seconds: float) -> bytes:
        """A file of exactly `length` bytes, or of any bounded size. Raises NetError or RemoteError."""
        what = f"fetching {path[:24]} from {self.name}"
        with trio.move_on_after(seconds):
            read = partial(self._read, path, length, time.monotonic() + seconds, what)
            # trio-typing, which libp2p brings along, describes an older trio.
            return await trio.to_thread.run_sync(read, abandon_on_cancel=True)  # type: ignore[call-arg]
        raise DeadlineExceeded(what, seconds)

    # --- in a thread ---

    def _read(self, path: str, length: int | None, deadline: float, what: str) -> bytes:
        data = bytearray()
        most = _MANIFEST_BYTES if length is None else length
        for attempt in range(1, _TRIES + 1):
            try:
                with self._connection() as connection:
                    self._read_on(connection, path, data, most, deadline)
                break
            except (OSError, http.client.HTTPException) as error:
                if time.monotonic() > deadline or attempt == _TRIES:
                    raise ConnectionLost(f"{what} failed: {error or type(error).__name__}") from error
        if length is not None and len(data) != length:
            raise RemoteError(Code.MALFORMED, f"{self.name} has {len(data)} bytes of {path[:24]}, not {length}")
        return bytes(data)

    def _read_on(
        self, connection: http.client.HTTPConnection, path: str, data: bytearray, most: int, deadline: float
    ) -> None:
        """Append what is still missing to `data`, at most to `most` bytes."""
        headers = {"Range": f"bytes={len(data)}-{most - 1}"} if data else {}
        connection.request("GET", f"{self._parts.path.rstrip('/')}/{path}", headers=headers)
        reply = connection.getresponse()
        if reply.status == 404:
            reply.read(_READ_BYTES)
            raise RemoteError(Code.NOT_FOUND, f"{self.name} does not have {path[:24]}")
        if reply.status not in (200, 206):
            raise ConnectionLost(f"{self.name} answered {reply.status} {reply.reason} for {path[:24]}")
        if reply.status == 200:
            data.clear()  # it sends the whole, whatever was asked
        elif not (reply.getheader("Content-Range") or "").startswith(f"bytes {len(data)}-"):
            raise RemoteError(Code.MALFORMED, f"{self.name} answered a Range request with another range")
        while chunk := reply.read(min(_READ_BYTES, most + 1 - len(data))):
            data += chunk
            if len(data) > most:
                raise RemoteError(Code.TOO_LARGE, f"{self.name} sends more than {most} bytes for {path[:24]}")
            if time.monotonic() > deadline:
                raise TimeoutError("it took too long")
        if reply.length:
            raise http.client.IncompleteRead(b"", reply.length)

    @contextmanager
    def _connection(self) -> Iterator[http.client.HTTPConnection]:
        """A connection, kept for the next time if nothing goes wrong with it."""
        connection = self._idle.pop() if self._idle else self._connect()
        try:
            yield connection
        except BaseException:
            connection.close()
            raise
        if len(self._idle) < _IDLE_CONNECTIONS:
            self._idle.append(connection)
        else:
            connection.close()

    def _connect(self) -> http.client.HTTPConnection:
        cls = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        assert self._parts.hostname is not None
        connection = cls(self._parts.hostname, self._parts.port, timeout=self._seconds)
        try:
            connection.connect()
        except (OSError, socket.gaierror) as error:
            raise Unreachable(f"{self.name} does not answer: {error}") from None
        return connection

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()
