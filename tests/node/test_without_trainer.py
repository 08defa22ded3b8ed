"""Nodes that find and fetch policies while the trainer is away, and how soon they hear of one while it is there."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import trio

from node.peers import PeerBook, told_addresses
from protocol import limits, messages
from protocol.envelope import seal
from protocol.errors import RemoteError
from protocol.identity import Identity
from protocol.net import memory
from protocol.net.p2p import open_host
from protocol.policy import policy_root
from protocol.run import RunAddress
from tests.node.fetching_node import FetchingNode, fetching_node
from tests.node.rig import EMBEDDED
from tests.node.small_trainer import SmallTrainer

LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)


def test_a_trainer_that_dies_after_one_node_has_a_policy_is_not_missed_by_the_second(tmp_path: Path) -> None:
    """Over libp2p. The second node is even started again, and knows the first from its disk alone."""
    trainer, first_who, second_who = SmallTrainer(), Identity.generate(), Identity.generate()
    trainer.publish(EMBEDDED, 0)

    async def scenario() -> None:
        with trio.fail_after(100):
            async with trio.open_nursery() as nursery, open_host(first_who, listen=LOOPBACK) as first_host:
                async with open_host(trainer.identity, listen=LOOPBACK) as host:
                    trainer.serve(host)
                    address = trainer.address(host)
                    first = await nursery.start(_at_work, tmp_path / "first", first_host, first_who, address)
                    await first.until_ready(0)
                    async with open_host(second_who, listen=LOOPBACK) as second_host:
                        second = await _joined(nursery, tmp_path / "second", second_host, second_who, address)
                        await second.until_ready(0)
                        await second.knows(first_who.node)
                        await first.knows(second_who.node)
                        # It was fetched from the first one already: the trainer gave it once.
                        assert trainer.blobs_served == len(trainer.blobs)
                    trainer.publish(_changed_policy(tmp_path / "new"), 1)
                    await trainer.announce(1)
                    await first.until_ready(1)
                # The trainer is gone now. The second node comes back and has never seen version 1.
                async with open_host(second_who, listen=LOOPBACK) as second_host:
                    again = await nursery.start(_at_work, tmp_path / "second", second_host, second_who, address)
                    held = await again.until_ready(1)
                    assert policy_root(held.folder) == trainer.policies[1].manifest.root
                    (said,) = again.said("policy_fetched")
                    assert set(said.values["bytes_by_source"]) == {"node"}
                    assert "while the trainer is away" in (await again.until_said("manifest_found")).text
                nursery.cancel_scope.cancel()

    trio.run(scenario)


async def _at_work(
    folder: Path, host: object, who: Identity, address: RunAddress, *, task_status: trio.TaskStatus[FetchingNode]
) -> None:
    """A node that talks to the trainer for as long as it is there, and goes on without it."""
    async with fetching_node(folder, host, who, address) as node, trio.open_nursery() as nursery:  # type: ignore[arg-type]
        nursery.start_soon(node.follow, address)
        task_status.started(node)
        await trio.sleep_forever()


async def _joined(
    nursery: trio.Nursery, folder: Path, host: object, who: Identity, address: RunAddress
) -> FetchingNode:
    node: FetchingNode = await nursery.start(_at_work, folder, host, who, address)
    return node


def _changed_policy(folder: Path) -> Path:
    import shutil

    shutil.copytree(EMBEDDED, folder)
    (folder / "notes.txt").write_text("new in this version")
    return folder


def test_an_announced_policy_is_known_within_a_second(tmp_path: Path) -> None:
    trainer, who = SmallTrainer(), Identity.generate()
    trainer.publish(EMBEDDED, 0)

    async def scenario() -> None:
        with trio.fail_after(60):
            async with (
                trio.open_nursery() as nursery,
                open_host(trainer.identity, listen=LOOPBACK) as host,
                open_host(who) as ours,
            ):
                trainer.serve(host)
                node = await nursery.start(_at_work, tmp_path / "home", ours, who, trainer.address(host))
                await node.until_ready(0)
                trainer.publish(EMBEDDED, 1)
                began = time.monotonic()
                await trainer.announce(1)
                while node.follower.highest < 1:
                    await trio.sleep(0.001)
                assert time.monotonic() - began < 1
                nursery.cancel_scope.cancel()

    trio.run(scenario)


# --- manifests that come from nodes ---


@asynccontextmanager
async def alone(folder: Path, trainer: SmallTrainer) -> AsyncIterator[FetchingNode]:
    network, who = memory.Network(), Identity.generate()
    async with (
        network.host(who) as host,
        network.host(trainer.identity) as theirs,
        fetching_node(folder, host, who, trainer.address(theirs), scout_seconds=60) as node,
    ):
        yield node


def test_a_manifest_from_a_node_must_be_signed_by_the_trainer_of_this_run_and_not_expired(tmp_path: Path) -> None:
    trainer = SmallTrainer()
    policy = trainer.publish(EMBEDDED, 3)

    async def scenario() -> None:
        async with alone(tmp_path, trainer) as node:
            now = trainer.now()
            cases = (
                (SmallTrainer().publish(EMBEDDED, 3).signed, "signed"),
                (
                    seal(trainer.identity, replace(policy.manifest, run=b"\7" * 32)),
                    "the node sent a manifest of another",
                ),
                (seal(trainer.identity, replace(policy.manifest, expires_ms=now)), "manifest of policy 3 has expired"),
            )
            for signed, text in cases:
                with pytest.raises(RemoteError, match=text):
                    node.follower.offer(signed, heard_from="the node", now_ms=now)
                assert node.follower.highest == -1
            # The trainer itself may show one that expired a moment ago: it signs it anew.
            node.follower.offer(policy.signed, heard_from="the node", now_ms=now)
            assert node.follower.highest == 3
            node.follower.offer(trainer.publish(EMBEDDED, 2).signed, heard_from="the node", now_ms=now)
            assert node.follower.highest == 3

    trio.run(scenario)


# --- the list of nodes ---


def peer(number: int, address: str = "/ip4/203.0.113.7/tcp/4001") -> messages.Peer:
    return messages.Peer(number.to_bytes(32, "big"), (address,), ())


def test_the_list_of_nodes_outlives_the_process(tmp_path: Path) -> None:
    async def scenario() -> None:
        book = PeerBook(tmp_path / "peers", b"\0" * 32)
        assert book.learn([peer(1), peer(2), peer(0)])  # without ourselves
        assert not book.learn([peer(2)])  # who is not named again is remembered
        book.save()
        assert set(PeerBook(tmp_path / "peers", b"\0" * 32).peers) == {peer(1).node, peer(2).node}
        (tmp_path / "peers").write_bytes(b"damaged")
        assert PeerBook(tmp_path / "peers", b"\0" * 32).peers == {}
        book.learn([peer(number) for number in range(3, 400)])
        assert len(book.peers) == 256

    trio.run(scenario)


def test_a_stranger_is_asked_about_and_admitted_once_it_is_named(tmp_path: Path) -> None:
    async def scenario() -> None:
        book, admitted = PeerBook(tmp_path / "peers", b"\0" * 32), []
        stirred = book.stirred

        async def ask() -> None:
            admitted.append(await book.admits(peer(5).node))

        with trio.fail_after(10):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask)
                await stirred.wait()
                assert list(book.strangers) == [peer(5).node]
                book.learn([peer(5)])
        assert admitted == [True] and not book.strangers

    trio.run(scenario)


def test_addresses_are_told_without_key_and_the_far_reaching_first() -> None:
    suffix = f"/p2p/{Identity.generate().peer_id}"
    listening = ("/ip4/127.0.0.1/tcp/4", "/ip4/192.168.1.2/tcp/4", "/ip6/fe80::1/tcp/4", "/ip4/8.8.8.8/tcp/4")
    told = told_addresses([each + suffix for each in listening])
    assert told == ("/ip4/8.8.8.8/tcp/4", "/ip4/192.168.1.2/tcp/4", "/ip6/fe80::1/tcp/4", "/ip4/127.0.0.1/tcp/4")
    assert len(told_addresses([f"/ip4/10.0.0.{n}/tcp/4{suffix}" for n in range(9)])) == limits.MAX_PEER_ADDRESSES
