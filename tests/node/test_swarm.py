"""Downloads from several sources: the trainer's link is spared, and no source that lies, stalls or leaves stops one."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import pytest
import trio
import trio.testing

from node.failures import foremost
from node.peers import told_addresses
from node.pieces import Ask, Offer, Pieces
from node.serving import Bucket
from node.sources import Record, bitmap
from node.swarm import Pace, Progress
from protocol import messages
from protocol.errors import Code, NetError, RemoteError, Unreachable
from protocol.identity import Identity, peer_id
from protocol.net import memory
from protocol.net.base import Host, Stream
from protocol.net.session import Session
from protocol.policy import Blob
from tests.node.fetching_node import FetchingNode, fetching_node
from tests.node.small_trainer import SmallTrainer

PIECE = 8_192


@dataclass
class World:
    """A trainer that has some pieces, and a network; nodes fetch them without manifest and session."""

    network: memory.Network
    trainer: SmallTrainer
    host: Host
    folder: Path
    wanted: tuple[Blob, ...]
    identities: dict[str, Identity] = field(default_factory=dict)

    @asynccontextmanager
    async def node(self, name: str, **changes: Any) -> AsyncIterator[FetchingNode]:
        who = self.who(name)
        address = self.trainer.address(self.host)
        seed = len(self.identities)
        async with (
            self.network.host(who) as host,
            fetching_node(self.folder / name, host, who, address, seed=seed, **changes) as node,
        ):
            node.book.learn(())
            yield node

    def who(self, name: str) -> Identity:
        return self.identities.setdefault(name, Identity.generate())

    async def fetch(self, node: FetchingNode, wanted: tuple[Blob, ...] | None = None) -> Progress:
        return await node.swarm.fetch(wanted or self.wanted, node.follower._keep, "policy 7", lambda progress: None)

    def introduce(self, *nodes: FetchingNode, others: tuple[messages.Peer, ...] = ()) -> None:
        """As the trainer's list would."""
        peers = [messages.Peer(node.host.node, told_addresses(node.host.addresses), ()) for node in nodes]
        for node in nodes:
            node.book.learn([*peers, *others])

    @asynccontextmanager
    async def fake(self, answer: Callable[[Any], Awaitable[Any]]) -> AsyncIterator[messages.Peer]:
        """A node that answers the blob protocol as a test says."""

        async def serve(stream: Stream) -> None:
            async def reply(body: bytes) -> bytes:
                return messages.pack(await answer(messages.open_body(body)))

            async def ignore(body: bytes) -> None:
                pass

            await Session(stream).run(reply, ignore)

        async with self.network.host(Identity.generate()) as host:
            host.serve(messages.BLOB_PROTOCOL, serve)
            yield messages.Peer(host.node, told_addresses(host.addresses), (7,))


@asynccontextmanager
async def world(folder: Path, pieces: int = 12) -> AsyncIterator[World]:
    network, trainer, random = memory.Network(), SmallTrainer(), Random(3)
    data = [random.randbytes(PIECE) for _ in range(pieces)]
    trainer.blobs = {hashlib.sha256(each).digest(): each for each in data}
    with trio.fail_after(60):
        async with network.host(trainer.identity) as host:
            trainer.serve(host)
            yield World(network, trainer, host, folder, tuple(Blob(digest, PIECE) for digest in trainer.blobs))


def has_everything(request: messages.GetHaves) -> messages.Haves:
    return messages.Haves(bitmap([True] * len(request.digests)))


# --- from other nodes ---


def test_what_one_node_has_the_trainer_gives_no_second_time(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as it, it.node("first") as first, it.node("second") as second:
            await it.fetch(first)
            served = it.trainer.blobs_served
            assert served == len(it.wanted)
            it.introduce(first, second)
            progress = await it.fetch(second)
            assert it.trainer.blobs_served == served
            assert progress.given == {"node": len(it.wanted) * PIECE}
            assert all(second.store.read_blob(blob.digest) for blob in it.wanted)
            assert first.status.given_bytes >= progress.given["node"]

    trio.run(scenario)


def test_eight_nodes_that_start_together_share_what_the_trainer_gives(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path, pieces=32) as it, trio.open_nursery() as nursery:
            slow = Bucket(32 * PIECE, PIECE)  # the trainer's link: a second for everything
            it.trainer.before_blob = lambda data: slow.take(len(data))
            nodes = [await enter(nursery, it.node(f"node-{number}", pace=Pace(rest=0.2))) for number in range(8)]
            it.introduce(*nodes)
            async with trio.open_nursery() as downloads:
                for node in nodes:
                    downloads.start_soon(it.fetch, node)
            print(f"the trainer gave {it.trainer.blobs_served / len(it.wanted):.2f} times the whole")
            assert it.trainer.blobs_served <= 2.2 * len(it.wanted)
            nursery.cancel_scope.cancel()

    trio.run(scenario)


async def enter(nursery: trio.Nursery, context: Any) -> Any:
    """Enter a context that lasts as long as the nursery."""

    async def hold(task_status: Any) -> None:
        async with context as value:
            task_status.started(value)
            await trio.sleep_forever()

    return await nursery.start(hold)


def test_pieces_of_a_download_that_is_not_finished_are_given_and_told_of(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as it, it.node("first") as first, it.node("second") as second:
            it.introduce(first, second)
            held_back = it.wanted[6:]
            withheld = {blob.digest: it.trainer.blobs.pop(blob.digest) for blob in held_back}
            it.trainer.on_missing = trio.sleep_forever
            async with trio.open_nursery() as nursery:
                nursery.start_soon(it.fetch, second)  # asks the first one what it has, which is nothing yet
                await it.fetch(first, it.wanted[:6])
                await second.until_has(it.wanted[:6])
                for blob in held_back:  # the first one gets the rest by other means, and says so at once
                    await first.follower._keep(blob, withheld[blob.digest])
                await second.until_has(it.wanted, seconds=10)

    trio.run(scenario)


def test_wrong_bytes_cost_the_node_that_sent_them_its_place(tmp_path: Path) -> None:
    async def scenario() -> None:
        async def lie(request: Any) -> Any:
            if isinstance(request, messages.GetHaves):
                return has_everything(request)
            return messages.BlobReply(b"not what you asked for")

        async with world(tmp_path) as it, it.node("node") as node, it.fake(lie) as liar:
            it.introduce(node, others=(liar,))
            await it.fetch(node)
            blamed = node.said("blob_wrong")
            assert {event.values["peer"] for event in blamed} == {peer_id(liar.node)}
            assert 1 <= len(blamed) <= 2  # those that were on their way
            with pytest.raises(Unreachable, match="banned"):
                await node.host.open(f"{liar.addresses[0]}/p2p/{peer_id(liar.node)}", "/x", seconds=1)
            assert liar.node not in [each.node for each in node.swarm.nodes()]

    trio.run(scenario)


def test_a_node_that_stalls_is_asked_no_more_and_its_pieces_elsewhere(tmp_path: Path) -> None:
    async def scenario() -> None:
        async def stall(request: Any) -> Any:
            if isinstance(request, messages.GetHaves):
                return has_everything(request)
            await trio.sleep_forever()

        async with world(tmp_path) as it, it.node("node") as node, it.fake(stall) as staller:
            it.introduce(node, others=(staller,))
            with trio.fail_after(10):  # its requests alone would wait 120 s
                progress = await it.fetch(node)
            assert progress.given == {"trainer": len(it.wanted) * PIECE}

    trio.run(scenario)


def test_a_node_that_claims_what_it_lacks_is_left_alone(tmp_path: Path) -> None:
    asked: list[Any] = []

    async def scenario() -> None:
        async def boast(request: Any) -> Any:
            asked.append(request)
            if isinstance(request, messages.GetHaves):
                return has_everything(request)
            raise RemoteError(Code.NOT_FOUND, "no")

        async with world(tmp_path) as it, it.node("node") as node, it.fake(boast) as boaster:
            it.introduce(node, others=(boaster,))
            progress = await it.fetch(node)
            assert progress.given == {"trainer": len(it.wanted) * PIECE}
            assert sum(isinstance(each, messages.GetBlob) for each in asked) <= 4
            record = node.swarm.record(node.swarm._nodes[boaster.node])
            assert record.failures >= 1 and record.rests_until > 0

    trio.run(scenario)


def test_a_bitmap_of_another_length_is_a_failure_of_the_peer(tmp_path: Path) -> None:
    async def scenario() -> None:
        async def shorten(request: Any) -> Any:
            return messages.Haves(b"\xff")

        async with world(tmp_path) as it, it.node("node") as node, it.fake(shorten) as peer:
            it.introduce(node, others=(peer,))
            it.trainer.on_blob = lambda digest, data: b"" if not node.said("source_lost") else data
            async with trio.open_nursery() as nursery:
                nursery.start_soon(it.fetch, node)
                said = await node.until_said("source_lost")
                nursery.cancel_scope.cancel()
            assert "a bitmap of 1 bytes answers for 12 blobs" in said.text

    trio.run(scenario)


def test_a_node_that_leaves_midway_is_done_without(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as it, it.node("second") as second, trio.open_nursery() as nursery:
            scope = trio.CancelScope()

            async def leaving(task_status: Any) -> None:
                with scope:
                    async with it.node("first") as first:
                        await it.fetch(first)
                        task_status.started(first)
                        await trio.sleep_forever()

            first = await nursery.start(leaving)
            it.introduce(first, second)
            it.trainer.on_blob = lambda digest, data: b"" if not scope.cancel_called else data
            nursery.start_soon(it.fetch, second)
            while not any(second.store.has_blob(blob.digest) for blob in it.wanted):
                await second.changed.wait()
            scope.cancel()
            await second.until_has(it.wanted, seconds=20)

    trio.run(scenario)


def test_a_download_goes_on_without_the_trainer(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as it, it.node("first") as first, it.node("second") as second:
            await it.fetch(first)
            it.introduce(first, second)
            it.network.partition([it.trainer.identity.node], [second.host.node])
            progress = await it.fetch(second)
            assert progress.given == {"node": len(it.wanted) * PIECE}

    trio.run(scenario)


# --- whom a node serves ---


async def ask(host: Host, address: str, request: Any, cls: Any) -> Any:
    session = Session(await host.open(address, messages.BLOB_PROTOCOL, seconds=5))
    with foremost():
        return await _ask(session, request, cls)


async def _ask(session: Session, request: Any, cls: Any) -> Any:
    async with trio.open_nursery() as nursery:

        async def run() -> None:
            try:
                await session.run(_refuse, _ignore)
            except NetError:
                return

        nursery.start_soon(run)
        try:
            return messages.expect(cls, await session.request(messages.pack(request), seconds=20, what="asking"))
        finally:
            with trio.CancelScope(shield=True):
                await session.close()
            nursery.cancel_scope.cancel()


async def _refuse(body: bytes) -> bytes:
    raise AssertionError("nobody asks here")


async def _ignore(body: bytes) -> None:
    pass


def test_a_stranger_is_served_once_the_trainer_has_named_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node.peers._ADMIT_SECONDS", 0.2)

    async def scenario() -> None:
        async with world(tmp_path) as it, it.node("node") as node:
            await it.fetch(node)
            stranger = Identity.generate()
            async with it.network.host(stranger, listen=()) as host:
                request = messages.GetBlob(it.wanted[0].digest)
                with pytest.raises(RemoteError) as caught:
                    await ask(host, node.host.addresses[0], request, messages.BlobReply)
                assert caught.value.code is Code.BUSY and "has not named you" in str(caught.value)
                node.book.learn([messages.Peer(stranger.node, (), ())])
                reply = await ask(host, node.host.addresses[0], request, messages.BlobReply)
                assert hashlib.sha256(reply.data).digest() == it.wanted[0].digest

    trio.run(scenario)


def test_a_node_answers_for_blobs_and_manifests_alone(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as it, it.node("node") as node:
            other = Identity.generate()
            node.book.learn([messages.Peer(other.node, (), ())])
            async with it.network.host(other, listen=()) as host:
                for request, code in (
                    (messages.GetBlob(b"\1" * 32), Code.NOT_FOUND),
                    (messages.GetManifest(None), Code.NOT_FOUND),
                    (messages.GetManifest(4), Code.NOT_FOUND),
                    (messages.GetLeases(1, (0,)), Code.UNEXPECTED_MESSAGE),
                ):
                    with pytest.raises(RemoteError) as caught:
                        await ask(host, node.host.addresses[0], request, messages.BlobReply)
                    assert caught.value.code is code, request

    trio.run(scenario)


def test_who_does_not_serve_does_not_listen_for_blobs(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with (
            world(tmp_path) as it,
            it.node("node", serve=False) as node,
            it.network.host(Identity.generate(), listen=()) as host,
        ):
            with pytest.raises(Unreachable, match="does not speak"):
                await host.open(node.host.addresses[0], messages.BLOB_PROTOCOL, seconds=2)

    trio.run(scenario)


def test_the_upload_cap_lets_a_burst_through_and_then_its_rate(autojump_clock: trio.testing.MockClock) -> None:
    async def scenario() -> None:
        bucket, began = Bucket(100.0, 200.0), trio.current_time()
        passed = []
        for _ in range(5):
            await bucket.take(100)
            passed.append(trio.current_time() - began)
        assert passed == pytest.approx([0, 0, 1, 2, 3])
        assert bucket.wait_seconds(100) == pytest.approx(1)

    trio.run(scenario, clock=autojump_clock)


@pytest.fixture
def autojump_clock() -> trio.testing.MockClock:
    return trio.testing.MockClock(autojump_threshold=0)


# --- choices ---


def pieces(count: int, **held: set[int]) -> tuple[Pieces, dict[str, Offer], list[Blob]]:
    """Pieces numbered from 0, and sources that hold some; one called "trainer" is the last resort."""
    blobs = [Blob(bytes([number]) * 32, 1_000) for number in range(count)]
    made = Pieces(blobs, Random(1))
    offers = {}
    for name, numbers in held.items():
        holds = None if name == "trainer" else {blobs[number].digest for number in numbers}
        offers[name] = Offer(last_resort=name == "trainer", holds=holds, answers=True)
        made.offers.append(offers[name])
    return made, offers, blobs


def test_the_rarest_piece_is_asked_for_first() -> None:
    made, offers, blobs = pieces(3, a={0, 1, 2}, b={0, 1}, c={0})
    assert made.choose(offers["a"], 0) == blobs[2]
    assert made.choose(offers["b"], 0) == blobs[1]


def test_the_trainer_is_asked_only_for_what_nobody_else_has() -> None:
    made, offers, blobs = pieces(3, trainer=set(), a={0, 2})
    assert made.choose(offers["trainer"], 0) == blobs[1]
    made.done(blobs[1].digest)
    assert made.choose(offers["trainer"], 0) is None
    offers["a"].answers = False
    assert made.choose(offers["trainer"], 0) is not None


def test_what_comes_to_another_is_not_asked_of_the_trainer_for_a_while_and_that_word_counts_once() -> None:
    made, offers, blobs = pieces(3, trainer=set(), a=set())
    for blob in blobs:
        offers["a"].promise(blob.digest, 0, 10)
    assert made.choose(offers["trainer"], 5) == blobs[2]  # two at a time are believed
    made.done(blobs[2].digest)
    assert made.choose(offers["trainer"], 5) is None
    offers["a"].promise(blobs[0].digest, 11, 20)
    assert made.choose(offers["trainer"], 11) in blobs[:2]


def test_a_late_source_gets_nothing_more_and_its_pieces_are_asked_of_others() -> None:
    made, offers, blobs = pieces(2, trainer=set(), a={0, 1})
    offers["a"].asks[blobs[0].digest] = Ask(0.0, 5.0, 1.0)
    assert made.choose(offers["trainer"], 4) is None
    assert made.choose(offers["a"], 6) is None
    first = made.choose(offers["trainer"], 6)
    assert first == blobs[1]  # fresh ones first
    offers["trainer"].asks[blobs[1].digest] = Ask(6.0, 20.0, 7.0)
    assert made.choose(offers["trainer"], 6) == blobs[0]


def test_at_the_end_an_idle_source_helps_a_slow_one() -> None:
    made, offers, blobs = pieces(1, a={0}, b={0})
    offers["a"].asks[blobs[0].digest] = Ask(0.0, 100.0, 2.0)
    assert made.choose(offers["b"], 1) is None
    assert made.choose(offers["b"], 3) == blobs[0]


def test_nodes_that_start_together_choose_in_different_orders() -> None:
    blobs = [Blob(bytes([number]) * 32, 1) for number in range(50)]
    orders = {tuple(Pieces(blobs, Random(seed)).missing) for seed in range(8)}
    assert len(orders) == 8


def test_a_source_that_fails_again_and_again_rests_longer_and_longer() -> None:
    record = Record()
    rests = []
    for now in (0.0, 100.0, 200.0, 300.0):
        record.failed(now, 5.0, 30.0)
        rests.append(record.rests_until - now)
    assert rests == [5, 10, 20, 30]
    record.failed(301.0, 5.0, 30.0)  # together with the last one
    assert record.failures == 4
    record.worked(1_000_000, 0.5)
    assert record.failures == 0 and record.rate == 2_000_000
    record.worked(1_000_000, 1.0)
    assert record.rate == pytest.approx(1_700_000)


def test_progress_reads_as_a_sentence() -> None:
    async def scenario() -> None:
        progress = Progress("policy 7", 3 * 2**20, 3 * 2**20)
        assert progress.text() == "policy 7: 3.0 MiB of 3.0 MiB left, from nobody yet, 0 B/s, waiting"
        progress.givers = {"node": {"a", "b"}, "mirror": {"m"}, "trainer": {"t"}}
        assert progress.sources() == "2 nodes, 1 mirror and the trainer"
        progress.meter.add(2**20)
        progress.left = 2 * 2**20
        assert progress.text().endswith("1.0 MiB/s, 2 s left")
        assert progress.values()["bytes_left"] == 2 * 2**20

    trio.run(scenario)
