"""The two networks that one suite of tests drives, and what both need."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass

import psutil
import trio
import trio.testing

from protocol import identity
from protocol.errors import RLCommonsError
from protocol.identity import Identity
from protocol.net import memory, p2p
from protocol.net.base import Address, Host, HostLimits, Stream

ECHO = "/test/echo/1"
SINK = "/test/sink/1"  # takes a stream and never reads it
BOOM = "/test/boom/1"  # reads one frame and raises
STATISTICS = "/test/statistics/1"  # answers each frame with the host's statistics


async def echo(stream: Stream) -> None:
    while True:
        frame = await stream.receive(seconds=60, what="waiting for a frame to echo")
        await stream.send(frame, seconds=60, what="echoing a frame")


async def sink(stream: Stream) -> None:
    await trio.sleep_forever()


async def boom(stream: Stream) -> None:
    await stream.receive(seconds=60, what="waiting for the frame that breaks the handler")
    raise RuntimeError("a bug in a handler")


async def ask(stream: Stream, frame: bytes, seconds: float = 10) -> bytes:
    await stream.send(frame, seconds=seconds, what="sending a frame")
    return await stream.receive(seconds=seconds, what="waiting for the echo")


class World:
    """Where hosts live. `host()` listens unless told otherwise."""

    name: str

    def clock(self) -> trio.abc.Clock | None:
        raise NotImplementedError

    def host(
        self,
        who: Identity | None = None,
        *,
        listening: bool = True,
        at: str | None = None,
        limits: HostLimits | None = None,
    ) -> AbstractAsyncContextManager[Host]:
        raise NotImplementedError

    def unused_address(self) -> str:
        """Where nobody listens, without /p2p/."""
        raise NotImplementedError

    @asynccontextmanager
    async def black_hole(self, client: Host) -> AsyncIterator[str]:
        """The address of something that never answers."""
        raise NotImplementedError
        yield ""


class P2PWorld(World):
    name = "p2p"

    def clock(self) -> None:
        return None

    def host(self, who=None, *, listening=True, at=None, limits=None):
        listen = (at or "/ip4/127.0.0.1/tcp/0",) if listening else ()
        return p2p.open_host(who or Identity.generate(), listen=listen, limits=limits)

    def unused_address(self) -> str:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            return f"/ip4/127.0.0.1/tcp/{free.getsockname()[1]}"

    @asynccontextmanager
    async def black_hole(self, client: Host) -> AsyncIterator[str]:
        with socket.create_server(("127.0.0.1", 0)) as server:
            yield f"/ip4/127.0.0.1/tcp/{server.getsockname()[1]}/p2p/{Identity.generate().peer_id}"


class MemoryWorld(World):
    name = "memory"

    def __init__(self) -> None:
        self.network = memory.Network()

    def clock(self) -> trio.abc.Clock:
        return trio.testing.MockClock(autojump_threshold=0)

    def host(self, who=None, *, listening=True, at=None, limits=None):
        listen = (at or "/memory/0",) if listening else ()
        return self.network.host(who or Identity.generate(), listen=listen, limits=limits)

    def unused_address(self) -> str:
        return "/memory/77"

    @asynccontextmanager
    async def black_hole(self, client: Host) -> AsyncIterator[str]:
        async with self.host() as host:
            self.network.partition([client.node], [host.node])
            yield host.addresses[0]


def without_peer(address: str) -> str:
    return address[: address.index("/p2p/")]


@dataclass(frozen=True)
class Victim:
    """The process under attack."""

    pid: int
    address: str

    @property
    def node(self) -> bytes:
        return Address.parse(self.address).node

    @property
    def peer_id(self) -> str:
        return identity.peer_id(self.node)

    @property
    def endpoint(self) -> tuple[str, int]:
        parsed = Address.parse(self.address)
        return parsed.host, parsed.port

    def resident_bytes(self) -> int:
        return psutil.Process(self.pid).memory_info().rss

    async def assert_serves(self, seconds: float = 5.0) -> None:
        """An honest stranger dials, asks and is answered."""
        async with p2p.open_host(Identity.generate()) as honest:
            stream = await honest.open(self.address, ECHO, seconds=seconds)
            assert await ask(stream, b"are you well?", seconds) == b"are you well?"
            await stream.close()


async def outcome_of(awaitable) -> type[BaseException] | None:
    """The class of error an operation ended with."""
    try:
        await awaitable
    except RLCommonsError as error:
        return type(error)
    return None
