"""A node without an engine: what of `rlnode join` fetches and serves policies, made of the real parts.

Shared by tests and benchmarks. Not here: drawing, submitting, and what a test asserts.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

import trio

from node.asking import Asker
from node.config import NodeConfig
from node.neighbours import Neighbours, meeting_point
from node.peers import Circle, PeerBook, PeerExchange, told_addresses
from node.relaying import Relaying
from node.report import Event, Status
from node.scout import Scout
from node.serving import BlobServer
from node.session import hello_of
from node.sources import Source
from node.store import HeldPolicy, RunStore
from node.swarm import Pace, Swarm
from node.weights import PolicyFollower
from protocol import messages
from protocol.errors import Code, NetError, RemoteError
from protocol.identity import Identity
from protocol.net.base import Host
from protocol.net.session import Session
from protocol.policy import Blob
from protocol.run import RunAddress
from protocol.trace import EngineDescriptor

ENGINE = EngineDescriptor("none", "1", "float32", "cpu", "reference")
QUICK = Pace(patience=1.0, refresh=5.0, rest=0.3, rest_most=5.0, dial=2.0)


@dataclass
class FetchingNode:
    """One node, at work while its context lasts."""

    host: Host
    config: NodeConfig
    store: RunStore
    book: PeerBook
    swarm: Swarm
    follower: PolicyFollower
    exchange: PeerExchange
    status: Status
    neighbours: Neighbours
    events: list[Event] = field(default_factory=list)
    ready: list[HeldPolicy] = field(default_factory=list)
    changed: trio.Event = field(default_factory=trio.Event)

    def tell(self) -> None:
        self.changed.set()
        self.changed = trio.Event()

    async def until_ready(self, version: int, *, seconds: float = 60) -> HeldPolicy:
        with trio.fail_after(seconds):
            while not (found := [held for held in self.ready if held.version == version]):
                await self.changed.wait()
        return found[0]

    async def until_has(self, blobs: Sequence[Blob], *, seconds: float = 30) -> None:
        """Wait until every one of these pieces lies here."""
        with trio.fail_after(seconds):
            while not all(self.store.has_blob(blob.digest) for blob in blobs):
                await self.changed.wait()

    async def until_said(self, name: str) -> Event:
        with trio.fail_after(60):
            while not (found := self.said(name)):
                await self.changed.wait()
        return found[0]

    def said(self, name: str) -> list[Event]:
        return [event for event in self.events if event.name == name]

    async def knows(self, node: bytes) -> None:
        """Wait until the trainer has named this node."""
        with trio.fail_after(60):
            while node not in self.book.peers or not self.book.peers[node].addresses:
                await self.book.changed.wait()

    async def follow(self, address: RunAddress) -> None:
        """Keep one session with the trainer: greet it, take what it announces, ask who else is there."""
        try:
            stream = await self.host.open(address.dial, messages.SESSION_PROTOCOL, seconds=10)
        except NetError as error:
            self.status.lost_because = str(error)
            return
        session = Session(stream)
        asker = Asker(session, self.events.append, Random())
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(session.run, _refuse, self._on_notice)
                hello = hello_of(address.run, ENGINE)
                welcome = await asker.once(hello, messages.Welcome, "greeting the trainer")
                self.status.connected, self.status.lost_because = True, ""
                self.follower.offer(welcome.manifest)
                await self.exchange.run(asker)
        except* (NetError, RemoteError):
            pass
        finally:
            self.status.connected = False

    async def _on_notice(self, body: bytes) -> None:
        self.follower.offer(messages.expect(messages.Announce, body).manifest)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


async def _refuse(body: bytes) -> bytes:
    raise RemoteError(Code.UNEXPECTED_MESSAGE, "a node is asked nothing here")


@asynccontextmanager
async def fetching_node(
    folder: Path,
    host: Host,
    who: Identity,
    address: RunAddress,
    *,
    mirrors: Sequence[Source] = (),
    pace: Pace = QUICK,
    scout_seconds: float = 0.3,
    meet_seconds: float = 1.0,
    seed: int = 1,
    **changes: object,
) -> AsyncIterator[FetchingNode]:
    config = NodeConfig(address=address, home=folder, disk_reserve_bytes=0)
    config = replace(config, **changes)  # type: ignore[arg-type]
    store = RunStore(folder, config)
    status, random = Status(), Random(seed)
    async with trio.open_nursery() as nursery:

        def report(event: Event) -> None:
            node.events.append(event)
            node.tell()

        def ready(held: HeldPolicy) -> None:
            node.ready.append(held)
            node.book.stir()
            node.tell()

        book = PeerBook(folder / "peers.msgpack", who.node, Circle(address.run, address.trainer, _now_ms))
        swarm = Swarm(nursery, host, config, book, report, random, mirrors=mirrors, pace=pace)
        server = BlobServer(store, book, config.upload_cap * 2**20, status)
        swarm.on_coming = server.tell_coming
        listening = told_addresses(host.addresses) if config.serve else ()
        if listening:
            server.start(host)

        def piece_here(digest: bytes) -> None:
            server.tell(digest)
            node.tell()

        follower = PolicyFollower(
            address.run, address.trainer, store, swarm, ready, report, status, piece_here=piece_here
        )
        relaying = Relaying(host, listening, (address.dial, *config.relays), book.stir, report, status, random)
        where = relaying.addresses
        exchange = PeerExchange(book, where, lambda: store.held, lambda: follower.latest, report)
        points = [meeting_point(nursery, host, each, config.dial_seconds) for each in config.relays]
        neighbours = Neighbours(
            swarm,
            server,
            book,
            follower,
            where,
            lambda: store.held,
            _now_ms,
            report,
            random,
            points=points,
            seconds=meet_seconds,
        )
        node = FetchingNode(host, config, store, book, swarm, follower, exchange, status, neighbours)
        waits = {"first_seconds": scout_seconds, "seconds": scout_seconds}
        scout = Scout(swarm, follower, _now_ms, status, report, random, **waits)
        nursery.start_soon(follower.run)
        nursery.start_soon(scout.run)
        nursery.start_soon(relaying.run)
        nursery.start_soon(neighbours.run)
        yield node
        nursery.cancel_scope.cancel()
