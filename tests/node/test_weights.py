"""Policies over the network: resumed, checked before a byte is stored, from a peer that lies, stalls or dies."""

from __future__ import annotations

import re
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

import pytest
import trio

from node.config import NodeConfig
from node.peers import PeerBook
from node.report import Event, Level, Status
from node.store import HeldPolicy, RunStore, size_text
from node.swarm import Swarm
from node.weights import PolicyFollower
from protocol.envelope import seal
from protocol.errors import Code, RemoteError
from protocol.identity import Identity
from protocol.limits import MAX_BLOB_BYTES
from protocol.net import memory
from protocol.policy import Blob, PolicyFile, policy_root
from tests.node.rig import EMBEDDED
from tests.node.small_trainer import Policy, SmallTrainer
from tests.node.test_store import tiny_disk  # noqa: F401


@dataclass
class Download:
    """A follower of one trainer, without engine or session."""

    trainer: SmallTrainer
    store: RunStore
    follower: PolicyFollower
    status: Status
    events: list[Event] = field(default_factory=list)
    ready: list[HeldPolicy] = field(default_factory=list)
    changed: trio.Event = field(default_factory=trio.Event)

    def take(self, held: HeldPolicy) -> None:
        self.ready.append(held)
        self.tell()

    def report(self, event: Event) -> None:
        self.events.append(event)
        self.tell()

    def tell(self) -> None:
        self.changed.set()
        self.changed = trio.Event()

    async def until_ready(self, version: int) -> HeldPolicy:
        while not (found := [held for held in self.ready if held.version == version]):
            await self.changed.wait()
        return found[0]

    async def until_said(self, name: str) -> Event:
        while not (found := [event for event in self.events if event.name == name]):
            await self.changed.wait()
        return found[0]


@asynccontextmanager
async def downloading(
    folder: Path,
    trainer: SmallTrainer,
    *,
    store: RunStore | None = None,
    stalled_seconds: float = 20.0,
    **changes: object,
) -> AsyncIterator[Download]:
    network = memory.Network()
    identity = Identity.generate()
    with trio.fail_after(90):
        async with (
            network.host(trainer.identity) as theirs,
            network.host(identity, listen=()) as ours,
            trio.open_nursery() as nursery,
        ):
            trainer.serve(theirs)
            address = trainer.address(theirs)
            config = replace(
                NodeConfig(address=address, home=folder, disk_reserve_bytes=0),
                **changes,  # type: ignore[arg-type]
            )
            store = store or RunStore(folder, config)
            status = Status()

            def report(event: Event) -> None:
                download.report(event)

            book = PeerBook(folder / "peers.msgpack", identity.node)
            book.learn(())
            swarm = Swarm(nursery, ours, config, book, report, Random(1))
            follower = PolicyFollower(
                trainer.run,
                trainer.identity.node,
                store,
                swarm,
                lambda held: download.take(held),
                report,
                status,
                stalled_seconds=stalled_seconds,
            )
            download = Download(trainer, store, follower, status)
            nursery.start_soon(follower.run)
            yield download
            nursery.cancel_scope.cancel()


@pytest.fixture
def trainer() -> SmallTrainer:
    return SmallTrainer()


@pytest.fixture
def big_policy(tmp_path: Path) -> Path:
    """The embedded policy with a tokenizer file of 26 MB beside it: seven blobs and a short one."""
    folder = tmp_path / "big"
    shutil.copytree(EMBEDDED, folder)
    (folder / "notes.txt").write_bytes(Random(5).randbytes(6 * MAX_BLOB_BYTES + 1_000))
    return folder


def resigned(trainer: SmallTrainer, policy: Policy, **changes: object) -> Policy:
    """The same policy under a manifest that is signed but says something else."""
    manifest = replace(policy.manifest, **changes)  # type: ignore[arg-type]
    return Policy(manifest, seal(trainer.identity, manifest), policy.folder)


def test_a_policy_arrives_whole_and_checked(tmp_path: Path, trainer: SmallTrainer, big_policy: Path) -> None:
    policy = trainer.publish(big_policy, 0)

    async def scenario() -> None:
        async with downloading(tmp_path / "home", trainer) as download:
            download.follower.offer(policy.signed)
            held = await download.until_ready(0)
            assert policy_root(held.folder) == policy.manifest.root
            assert (held.folder / "notes.txt").read_bytes() == (big_policy / "notes.txt").read_bytes()
            assert list((tmp_path / "home" / "blobs").iterdir()) == []
            (said,) = [event for event in download.events if event.name == "policy_fetched"]
            assert said.values["bytes"] == policy.manifest.size

    trio.run(scenario)


def test_a_download_goes_on_where_a_kill_left_it(tmp_path: Path, trainer: SmallTrainer, big_policy: Path) -> None:
    policy = trainer.publish(big_policy, 0)
    total = len({blob.digest for file in policy.manifest.files for blob in file.blobs})

    async def killed_half_way() -> None:
        async with downloading(tmp_path / "home", trainer, blobs_in_flight=2) as download:
            download.follower.offer(policy.signed)
            await trainer.until(lambda: trainer.blobs_served >= total // 2)

    async def started_again() -> None:
        async with downloading(tmp_path / "home", trainer, blobs_in_flight=2) as download:
            before = trainer.blobs_served
            stored = len(list((tmp_path / "home" / "blobs").iterdir()))
            download.follower.offer(policy.signed)
            await download.until_ready(0)
            assert trainer.blobs_served - before == total - stored
            # At most the blobs in flight are fetched twice.
            assert trainer.blobs_served <= total + 2

    trio.run(killed_half_way)
    trio.run(started_again)


def test_wrong_bytes_are_dropped_blamed_on_the_peer_and_asked_for_again(
    tmp_path: Path, trainer: SmallTrainer, big_policy: Path
) -> None:
    policy = trainer.publish(big_policy, 0)
    lied: set[bytes] = set()

    def lie_once(digest: bytes, data: bytes) -> bytes:
        if digest in lied:
            return data
        lied.add(digest)
        return bytes([data[0] ^ 1]) + data[1:]

    trainer.on_blob = lie_once

    async def scenario() -> None:
        async with downloading(tmp_path / "home", trainer) as download:
            download.follower.offer(policy.signed)
            held = await download.until_ready(0)
            assert policy_root(held.folder) == policy.manifest.root
            blamed = [event for event in download.events if event.name == "blob_wrong"]
            assert len(blamed) == len(lied)
            assert {event.values["peer"] for event in blamed} == {trainer.identity.peer_id}

    trio.run(scenario)


def test_a_peer_that_stalls_is_asked_again(tmp_path: Path, trainer: SmallTrainer, big_policy: Path) -> None:
    policy = trainer.publish(big_policy, 0)
    stalled: set[bytes] = set()

    def stall_once(digest: bytes, data: bytes) -> bytes:
        if len(stalled) < 2 and digest not in stalled:
            stalled.add(digest)
            return b""
        return data

    trainer.on_blob = stall_once

    async def scenario() -> None:
        async with downloading(tmp_path / "home", trainer, blob_seconds=1.0) as download:
            download.follower.offer(policy.signed)
            await download.until_ready(0)
            late = await download.until_said("blob_late")
            assert "within 1 s while fetching a piece of the policy" in late.text

    trio.run(scenario)


def test_a_peer_that_dies_midway_is_connected_to_again(tmp_path: Path, trainer: SmallTrainer, big_policy: Path) -> None:
    policy = trainer.publish(big_policy, 0)

    async def scenario() -> None:
        async with downloading(tmp_path / "home", trainer, blobs_in_flight=1) as download:
            download.follower.offer(policy.signed)
            await trainer.until(lambda: trainer.blobs_served == 2)
            await trainer.cut_all()
            await download.until_ready(0)
            assert trainer.blobs_served <= len(trainer.blobs) + 1

    trio.run(scenario)


def test_pieces_that_two_versions_share_are_fetched_once(
    tmp_path: Path, trainer: SmallTrainer, big_policy: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(big_policy, other)
    (other / "more.txt").write_text("new in this version")
    first, second = trainer.publish(big_policy, 0), trainer.publish(other, 1)

    async def scenario() -> None:
        async with downloading(tmp_path / "home", trainer) as download:
            download.follower.offer(first.signed)
            await download.until_ready(0)
            before = trainer.blobs_served
            download.follower.offer(second.signed)
            await download.until_ready(1)
            assert trainer.blobs_served == before + 1

    trio.run(scenario)


def test_versions_only_go_up(tmp_path: Path, trainer: SmallTrainer) -> None:
    old, new = trainer.publish(EMBEDDED, 3), trainer.publish(EMBEDDED, 4)

    async def scenario() -> None:
        async with downloading(tmp_path / "home", trainer) as download:
            download.follower.offer(new.signed)
            await download.until_ready(4)
            download.follower.offer(old.signed)
            assert download.follower.highest == 4
            assert [held.version for held in download.ready] == [4]

    trio.run(scenario)


def test_manifests_that_cannot_be_are_refused_before_a_byte_is_fetched(tmp_path: Path, trainer: SmallTrainer) -> None:
    policy = trainer.publish(EMBEDDED, 1)
    stranger = SmallTrainer().publish(EMBEDDED, 1)
    escaping = PolicyFile("../../key.json", (Blob(b"\1" * 32, 5),))
    cases = [
        (stranger, Code.BAD_SIGNATURE),
        (resigned(trainer, policy, run=b"\7" * 32), Code.WRONG_RUN),
        (resigned(trainer, policy, files=(escaping,)), Code.MALFORMED),
        (resigned(trainer, policy, files=policy.manifest.files[::-1]), Code.MALFORMED),
    ]

    async def scenario() -> None:
        async with downloading(tmp_path / "home", trainer) as download:
            for bad, code in cases:
                with pytest.raises(RemoteError) as caught:
                    download.follower.offer(bad.signed)
                assert caught.value.code == code
            assert trainer.blobs_served == 0 and download.follower.highest == -1

    trio.run(scenario)


def test_a_second_policy_under_the_same_version_is_refused(tmp_path: Path, trainer: SmallTrainer) -> None:
    policy = trainer.publish(EMBEDDED, 1)

    async def scenario() -> None:
        async with downloading(tmp_path / "home", trainer) as download:
            download.follower.offer(policy.signed)
            await download.until_ready(1)
            with pytest.raises(RemoteError, match=r"two policies as version 1: .*operator .*restore .* --published 1`"):
                download.follower.offer(resigned(trainer, policy, root=b"\5" * 32).signed)

    trio.run(scenario)


def test_a_policy_that_does_not_fit_its_root_is_left_for_the_next(tmp_path: Path, trainer: SmallTrainer) -> None:
    wrong = resigned(trainer, trainer.publish(EMBEDDED, 1), root=b"\5" * 32)
    right = trainer.publish(EMBEDDED, 2)

    async def scenario() -> None:
        async with downloading(tmp_path / "home", trainer) as download:
            download.follower.offer(wrong.signed)
            said = await download.until_said("policy_failed")
            assert "does not fit its files" in said.text
            download.follower.offer(right.signed)
            await download.until_ready(2)
            assert [held.version for held in download.ready] == [2]

    trio.run(scenario)


def test_a_policy_that_is_gone_from_the_trainer_is_left_for_the_next(tmp_path: Path, trainer: SmallTrainer) -> None:
    policy = trainer.publish(EMBEDDED, 1)
    trainer.blobs.clear()

    async def scenario() -> None:
        async with downloading(tmp_path / "home", trainer) as download:
            download.follower.offer(policy.signed)
            said = await download.until_said("policy_failed")
            assert "no longer has policy 1" in said.text
            again = trainer.publish(EMBEDDED, 1)
            download.follower.offer(again.signed)
            await download.until_ready(1)

    trio.run(scenario)


def test_a_policy_damaged_on_the_disk_since_is_fetched_again(tmp_path: Path, trainer: SmallTrainer) -> None:
    policy = trainer.publish(EMBEDDED, 1)

    async def first() -> None:
        async with downloading(tmp_path / "home", trainer) as download:
            download.follower.offer(policy.signed)
            held = await download.until_ready(1)
            (held.folder / "config.json").write_text("{}")

    async def second() -> None:
        async with downloading(tmp_path / "home", trainer) as download:
            download.follower.offer(policy.signed)
            held = await download.until_ready(1)
            assert policy_root(held.folder) == policy.manifest.root

    trio.run(first)
    trio.run(second)


def test_a_disk_without_room_is_waited_for(
    tmp_path: Path, trainer: SmallTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.weights._STORAGE_RETRY_SECONDS", 0.05)
    policy = trainer.publish(EMBEDDED, 1)
    free = [0]

    async def scenario() -> None:
        config = NodeConfig(address=trainer_address(trainer), disk_reserve_bytes=0)
        store = RunStore(tmp_path / "home", config, free_bytes=lambda folder: free[0])
        async with downloading(tmp_path / "home", trainer, store=store) as download:
            download.follower.offer(policy.signed)
            said = await download.until_said("storage")
            assert said.level is Level.ERROR
            assert "policy 1 needs" in said.text and "the download waits for it" in said.text
            assert trainer.blobs_served == 0
            free[0] = 10**9
            await download.until_ready(1)
            assert (await download.until_said("storage_over")).values == {"who": "the download"}

    trio.run(scenario)


def test_a_small_disk_is_seen_before_a_byte_is_fetched_and_how_much_is_missing_is_said(
    tiny_disk: Path,  # noqa: F811
    trainer: SmallTrainer,
) -> None:
    """A real file system of 256 KiB. The pieces and the folder made of them take twice the policy's size."""
    policy = trainer.publish(EMBEDDED, 1)

    async def scenario() -> None:
        store = RunStore(tiny_disk, NodeConfig(address=trainer_address(trainer), disk_reserve_bytes=0))
        async with downloading(tiny_disk, trainer, store=store) as download:
            download.follower.offer(policy.signed)
            said = (await download.until_said("storage")).text
            needed = size_text(2 * policy.manifest.size)
            assert re.search(
                rf"policy 1 needs {needed}, the disk of .* has \S+ KiB free: free \S+ [KM]iB more, or", said
            )
            assert trainer.blobs_served == 0 and not list((tiny_disk / "blobs").iterdir())

    trio.run(scenario)


def trainer_address(trainer: SmallTrainer):  # type: ignore[no-untyped-def]
    from protocol.run import RunAddress

    return RunAddress("/memory/1", trainer.identity.node, trainer.run)
