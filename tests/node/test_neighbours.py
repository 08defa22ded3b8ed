"""Nodes that keep in touch: they pass new policies on, and find each other while the trainer is away.

Not here: fetching (test_swarm.py), circuits and NATs (tests/network, test_nat.py).
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import trio

from node.peers import PeerBook, told_addresses
from node.point import MeetingPoint
from protocol import messages
from protocol.envelope import seal
from protocol.errors import Refused
from protocol.identity import Identity
from protocol.net.base import Host, RelayLimits
from protocol.net.memory import Nat, Network
from protocol.net.p2p import open_host
from protocol.net.session import Session
from protocol.run import Membership, RunAddress
from tests.node.fetching_node import FetchingNode, fetching_node
from tests.node.rig import EMBEDDED
from tests.node.small_trainer import SmallTrainer


@dataclass
class World:
    """A run whose trainer may be away: nodes have no session unless a test makes one."""

    folder: Path
    network: Network | None = field(default_factory=Network)  # None: libp2p on loopback
    trainer: SmallTrainer = field(default_factory=SmallTrainer)

    @property
    def address(self) -> RunAddress:
        return RunAddress(
            "/memory/99" if self.network else "/ip4/127.0.0.1/tcp/9", self.trainer.identity.node, self.trainer.run
        )

    def host(self, who: Identity, nat: Nat | None = None) -> AbstractAsyncContextManager[Host]:
        if self.network is None:
            return open_host(who, listen=("/ip4/127.0.0.1/tcp/0",))
        return self.network.host(who, nat=nat)

    @asynccontextmanager
    async def node(self, name: str, *, nat: Nat | None = None, **changes: Any) -> AsyncIterator[FetchingNode]:
        """One that the trainer has known before."""
        who = Identity.generate()
        async with (
            self.host(who, nat) as host,
            fetching_node(self.folder / name, host, who, self.address, meet_seconds=0.1, **changes) as node,
        ):
            membership = Membership(self.trainer.run, who.node, self.trainer.now() + 10**9)
            node.book.learn((), seal(self.trainer.identity, membership))
            yield node

    @asynccontextmanager
    async def point(self) -> AsyncIterator[tuple[Host, MeetingPoint]]:
        who = Identity.generate()
        async with self.host(who) as host, trio.open_nursery() as nursery:
            point = MeetingPoint(self.address, who.node, lambda event: None)
            await nursery.start(point.run, host, RelayLimits())
            yield host, point
            nursery.cancel_scope.cancel()


def told_of(*nodes: FetchingNode) -> list[messages.Peer]:
    return [messages.Peer(node.host.node, told_addresses(node.host.addresses), ()) for node in nodes]


async def until(condition: Any, seconds: float = 60.0) -> None:
    with trio.fail_after(seconds):
        while not condition():
            await trio.sleep(0.01)


@pytest.mark.parametrize("network", [Network(), None], ids=["memory", "p2p"])
def test_a_new_policy_reaches_nodes_that_the_trainer_does_not_tell_within_a_second(
    tmp_path: Path, network: Network | None
) -> None:
    """None of them has a session; the first one is told."""
    world = World(tmp_path, network)
    policies = [world.trainer.publish(EMBEDDED, version) for version in range(5)]

    async def scenario() -> None:
        async with world.node("a") as a, world.node("b") as b, world.node("c") as c:
            a.book.learn(told_of(b))
            b.book.learn(told_of(a, c))
            c.book.learn(told_of(b))
            await until(lambda: all(len(node.neighbours.in_touch()) == 2 for node in (a, b, c)))
            took = []
            for version, policy in enumerate(policies):  # the best of five: other programs may have the processor
                began = time.monotonic()
                a.follower.offer(policy.signed)
                await until(lambda version=version: c.follower.highest == version)
                took.append(time.monotonic() - began)
            print(f"told onwards in {1e3 * min(took):.0f} ms")
            assert min(took) < 1.0 and c.said("announced")

    trio.run(scenario)


def test_who_announces_what_the_trainer_did_not_sign_is_left_alone(tmp_path: Path) -> None:
    world = World(tmp_path)
    policy = world.trainer.publish(EMBEDDED, 3)
    forged = seal(Identity.generate(), policy.manifest)

    async def scenario() -> None:
        async with world.node("a") as a, world.node("b") as b:
            a.book.learn(told_of(b))
            b.book.learn(told_of(a))
            await until(lambda: a.host.node in b.neighbours.in_touch())
            body = messages.pack(messages.Announce(forged))
            (source,) = b.swarm.nodes()
            await source.announce(body)
            await until(lambda: a.said("announce_wrong"))
            assert a.follower.highest == -1 and b.host.node not in a.host.connected()

    trio.run(scenario)


def test_a_policy_is_announced_onwards_once_and_an_old_one_never(tmp_path: Path) -> None:
    world = World(tmp_path)
    old, new = world.trainer.publish(EMBEDDED, 0), world.trainer.publish(EMBEDDED, 1)

    async def scenario() -> None:
        async with world.node("a") as a:
            passed: list[bytes] = []
            follower, before = a.follower, a.follower.on_newer
            follower.on_newer = lambda signed: (passed.append(signed.payload), before(signed))
            for policy in (new, old, new, old):
                a.neighbours.heard(b"\1" * 32, messages.Announce(policy.signed))
            assert passed == [new.signed.payload]
            checked: list[Any] = []
            follower.offer = lambda *arguments, **named: checked.append(arguments)
            later = [replace(new.manifest, version=number, created_ms=number) for number in range(2, 100)]
            for manifest in later:
                a.neighbours.heard(b"\2" * 32, messages.Announce(seal(world.trainer.identity, manifest)))
            assert len(checked) <= 16  # a flood is not even looked at

    trio.run(scenario)


def test_nodes_find_each_other_through_a_third_while_the_trainer_is_away(tmp_path: Path) -> None:
    """And are served: each shows the trainer's word that it is of the run."""
    world = World(tmp_path)
    world.trainer.publish(EMBEDDED, 0)

    async def scenario() -> None:
        async with world.node("a") as a, world.node("b") as b, world.node("c") as c:
            a.book.learn(told_of(b))
            c.book.learn(told_of(b))
            await until(lambda: c.host.node in a.book.known() and a.host.node in c.book.known())
            assert c.host.node not in a.book.peers
            await until(lambda: c.book.is_admitted(a.host.node))
            assert not c.book.is_admitted(Identity.generate().node)

    trio.run(scenario)


def test_nodes_behind_nat_that_know_nobody_meet_and_fetch_through_a_meeting_point(tmp_path: Path) -> None:
    world = World(tmp_path)
    policy = world.trainer.publish(EMBEDDED, 0)

    async def scenario() -> None:
        async with world.point() as (host, _):
            relays = (host.addresses[0],)
            nat = Nat.RANDOM_PORTS
            async with world.node("a", relays=relays, nat=nat) as a, world.node("b", relays=relays, nat=nat) as b:
                for digest, data in world.trainer.blobs.items():
                    a.store.put_blob(digest, data)
                a.follower.offer(policy.signed)
                await a.until_ready(0)
                await b.until_ready(0)
                (fetched,) = b.said("policy_fetched")
                assert set(fetched.values["bytes_by_source"]) == {"node"}
                assert b.host.is_relayed(a.host.node)
                figures = host.statistics()
                assert figures.reservations == 2 and figures.relayed_bytes > policy.manifest.size

    trio.run(scenario)


def test_a_meeting_point_answers_only_who_shows_the_trainers_word(tmp_path: Path) -> None:
    world = World(tmp_path)

    async def scenario() -> None:
        stranger = Identity.generate()
        now, run = world.trainer.now(), world.trainer.run
        async with world.point() as (host, _), world.host(stranger) as guest:
            stream = await guest.open(host.addresses[0], messages.BLOB_PROTOCOL, seconds=5)
            session = Session(stream)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(session.run, _refuse, _ignore)
                for membership, key in (
                    (None, None),
                    (Membership(run, stranger.node, now + 10**6), stranger),
                    (Membership(run, stranger.node, now), world.trainer.identity),
                    (Membership(bytes(32), stranger.node, now + 10**6), world.trainer.identity),
                    (Membership(run, host.node, now + 10**6), world.trainer.identity),
                ):
                    shown = None if membership is None else seal(key, membership)
                    request = messages.pack(messages.GetPeers(None, (), (), (), shown))
                    with pytest.raises(Refused, match="show the trainer's word"):
                        await session.request(request, seconds=5, what="asking")
                shown = seal(world.trainer.identity, Membership(run, stranger.node, now + 10**6))
                request = messages.pack(messages.GetPeers(None, (), (), (), shown))
                reply = messages.expect(messages.PeersReply, await session.request(request, seconds=5, what="asking"))
                assert reply == messages.PeersReply(())
                nursery.cancel_scope.cancel()

    trio.run(scenario)


def test_one_node_cannot_fill_the_book_of_another(tmp_path: Path) -> None:
    async def scenario() -> None:
        book = PeerBook(tmp_path / "peers", b"\0" * 32)
        peers = [messages.Peer(number.to_bytes(32, "big"), ("/ip4/203.0.113.7/tcp/1",), ()) for number in range(1, 65)]
        assert len(book.hear(b"\7" * 32, peers)) == len(book.known()) == 16
        for teller in range(100):
            others = [replace(peer, node=(10_000 * teller + at).to_bytes(32, "big")) for at, peer in enumerate(peers)]
            book.hear(teller.to_bytes(32, "little"), others)
        assert len(book.known()) == 128

    trio.run(scenario)


def test_the_trainers_word_outlives_a_restart(tmp_path: Path) -> None:
    trainer = SmallTrainer()
    membership = seal(trainer.identity, Membership(trainer.run, b"\0" * 32, 1))

    async def scenario() -> None:
        book = PeerBook(tmp_path / "peers", b"\0" * 32)
        assert book.learn((), membership) and not book.learn((), membership)  # written once, not each time
        book.save()
        assert PeerBook(tmp_path / "peers", b"\0" * 32).membership == membership

    trio.run(scenario)


async def _refuse(body: bytes) -> bytes:
    raise AssertionError("a point asks nothing")


async def _ignore(body: bytes) -> None:
    pass
