"""A node that follows policies by delta: the same files with fewer bytes, and the files themselves where it fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import trio

from node.config import NodeConfig
from node.store import RunStore
from node.weights import file_blobs
from protocol import codec
from protocol.envelope import seal
from protocol.errors import Code, RemoteError
from protocol.policy import Blob, policy_root
from protocol.run import RunAddress
from tests.node.rig import EMBEDDED
from tests.node.small_trainer import Policy, SmallTrainer
from tests.node.stepping import step
from tests.node.test_weights import Download, downloading


@pytest.fixture
def trainer() -> SmallTrainer:
    return SmallTrainer()


def publish_steps(trainer: SmallTrainer, folder: Path, last: int, *, skips: tuple[int, ...] = (1,)) -> list[Policy]:
    """Versions 0 to `last`, each with deltas over `skips` versions."""
    made = [trainer.publish(EMBEDDED, 0)]
    for version in range(1, last + 1):
        new = step(made[-1].folder, folder / f"v{version}", version)
        bases = sorted(version - skip for skip in skips if version >= skip)
        made.append(trainer.publish(new, version, deltas_from=bases))
    return made


def resigned(trainer: SmallTrainer, policy: Policy, **changes: object) -> Policy:
    """A policy under a manifest that is signed and says something else; what the trainer shows from now on."""
    manifest = replace(policy.manifest, **changes)  # type: ignore[arg-type]
    changed = Policy(manifest, seal(trainer.identity, manifest), policy.folder)
    trainer.policies[manifest.version] = changed
    return changed


def trainer_address(trainer: SmallTrainer) -> RunAddress:
    return RunAddress("/ip4/127.0.0.1/tcp/4001", trainer.identity.node, trainer.run)


def values(download: Download, name: str = "policy_fetched") -> Mapping[str, object]:
    """Of the last event of a name."""
    return [event for event in download.events if event.name == name][-1].values


async def follow(download: Download, policy: Policy) -> None:
    download.follower.offer(policy.signed)
    held = await download.until_ready(policy.manifest.version)
    # The very same files, whichever way they came.
    for path in policy.folder.iterdir():
        assert (held.folder / path.name).read_bytes() == path.read_bytes()
    assert policy_root(held.folder) == policy.manifest.root


def test_the_next_version_comes_by_delta_and_is_the_same_byte_for_byte(tmp_path: Path, trainer: SmallTrainer) -> None:
    first, second = publish_steps(trainer, tmp_path, 1)

    async def scenario() -> None:
        async with downloading(tmp_path / "home", trainer) as download:
            await follow(download, first)
            await follow(download, second)
            found = values(download)
            assert found["deltas"] == [(0, 1)]
            assert found["bytes"] == second.manifest.deltas[0].size < second.manifest.size / 10
            assert download.status.policies_by_delta == download.status.policies_whole == 1

    trio.run(scenario)


def test_several_versions_behind_it_goes_through_those_between(tmp_path: Path, trainer: SmallTrainer) -> None:
    versions = publish_steps(trainer, tmp_path, 4)

    async def scenario() -> None:
        async with downloading(tmp_path / "home", trainer) as download:
            await follow(download, versions[0])
            await follow(download, versions[4])
            assert values(download)["deltas"] == [(0, 1), (1, 2), (2, 3), (3, 4)]
            # What was only built on is gone.
            assert sorted(download.store.held) == [0, 4]

    trio.run(scenario)


def test_a_skip_delta_is_taken_where_it_is_less_to_fetch(tmp_path: Path, trainer: SmallTrainer) -> None:
    versions = publish_steps(trainer, tmp_path, 4, skips=(1, 4))

    async def scenario() -> None:
        async with downloading(tmp_path / "home", trainer) as download:
            await follow(download, versions[0])
            await follow(download, versions[4])
            assert values(download)["deltas"] == [(0, 4)]

    trio.run(scenario)


def test_what_a_node_followed_by_delta_it_can_give_to_others_both_ways(tmp_path: Path, trainer: SmallTrainer) -> None:
    first, second = publish_steps(trainer, tmp_path, 1)

    async def scenario() -> None:
        async with downloading(tmp_path / "home", trainer) as download:
            await follow(download, first)
            await follow(download, second)

    trio.run(scenario)
    store = RunStore(tmp_path / "home", NodeConfig(address=trainer_address(trainer)))
    wanted = {*file_blobs(second.manifest), *(blob.digest for blob in second.manifest.deltas[0].blobs)}
    assert all(store.has_blob(digest) and store.read_blob(digest) for digest in wanted)


def test_a_base_that_is_not_here_is_no_way(tmp_path: Path, trainer: SmallTrainer) -> None:
    _, second = publish_steps(trainer, tmp_path, 1)

    async def scenario() -> None:
        async with downloading(tmp_path / "home", trainer) as download:
            await follow(download, second)
            assert values(download)["deltas"] == []

    trio.run(scenario)


def other_root(policy: Policy) -> dict[str, object]:
    (delta,) = policy.manifest.deltas
    return {"deltas": (replace(delta, base_root=b"\5" * 32),)}


def other_codec(policy: Policy) -> dict[str, object]:
    (delta,) = policy.manifest.deltas
    return {"deltas": (replace(delta, codec="ULPD9"),)}


@pytest.mark.parametrize("change", [other_root, other_codec])
def test_a_delta_from_another_root_or_in_an_unknown_codec_is_passed_over(
    tmp_path: Path, trainer: SmallTrainer, change: object
) -> None:
    first, second = publish_steps(trainer, tmp_path, 1)
    changed = resigned(trainer, second, **change(second))  # type: ignore[operator]

    async def scenario() -> None:
        async with downloading(tmp_path / "home", trainer) as download:
            await follow(download, first)
            await follow(download, changed)
            assert values(download)["deltas"] == []
            assert not [event for event in download.events if event.name == "delta_failed"]

    trio.run(scenario)


def test_a_delta_that_does_not_make_what_was_signed_is_said_once_and_the_files_are_fetched(
    tmp_path: Path, trainer: SmallTrainer
) -> None:
    first, second = publish_steps(trainer, tmp_path, 1)
    (delta,) = trainer.publish(step(EMBEDDED, tmp_path / "other", 9), 1, deltas_from=[0]).manifest.deltas
    wrong = resigned(trainer, second, deltas=(delta,))

    async def scenario() -> None:
        async with downloading(tmp_path / "home", trainer) as download:
            await follow(download, first)
            await follow(download, wrong)
            (said,) = [event for event in download.events if event.name == "delta_failed"]
            assert "the delta does not lead to policy 1" in said.text and "the files last" in said.text
            assert values(download)["deltas"] == []
            assert 0 in download.store.held  # it was in order

    trio.run(scenario)


def test_a_base_that_rotted_on_the_disk_is_removed_and_the_files_are_fetched(
    tmp_path: Path, trainer: SmallTrainer
) -> None:
    first, second = publish_steps(trainer, tmp_path, 1)

    async def scenario() -> None:
        async with downloading(tmp_path / "home", trainer) as download:
            await follow(download, first)
            path = download.store.held[0].folder / "model.safetensors"
            data = bytearray(path.read_bytes())
            data[-1] ^= 1
            path.write_bytes(data)
            await follow(download, second)
            (said,) = [event for event in download.events if event.name == "delta_failed"]
            assert "policy 0 is damaged on this disk: removed" in said.text
            assert sorted(download.store.held) == [1]

    trio.run(scenario)


def test_a_leg_that_fails_midway_keeps_what_worked_before(tmp_path: Path, trainer: SmallTrainer) -> None:
    versions = publish_steps(trainer, tmp_path, 3)
    (other,) = trainer.publish(step(versions[2].folder, tmp_path / "other", 77), 3, deltas_from=[2]).manifest.deltas
    wrong = resigned(trainer, versions[3], deltas=(other,))

    async def scenario() -> None:
        async with downloading(tmp_path / "home", trainer) as download:
            await follow(download, versions[0])
            await follow(download, wrong)
            assert sorted(download.store.held) == [0, 2, 3]

    trio.run(scenario)


def test_a_delta_that_nobody_has_any_more_is_gone_around(tmp_path: Path, trainer: SmallTrainer) -> None:
    first, second = publish_steps(trainer, tmp_path, 1)
    for blob in second.manifest.deltas[0].blobs:
        del trainer.blobs[blob.digest]

    async def scenario() -> None:
        async with downloading(tmp_path / "home", trainer) as download:
            await follow(download, first)
            await follow(download, second)
            (said,) = [event for event in download.events if event.name == "delta_failed"]
            assert "no longer has policy 1 by delta" in said.text

    trio.run(scenario)


def test_a_delta_of_which_nothing_comes_is_given_up_for_the_files(tmp_path: Path, trainer: SmallTrainer) -> None:
    first, second = publish_steps(trainer, tmp_path, 1)
    stalled = {blob.digest for blob in second.manifest.deltas[0].blobs}
    trainer.on_blob = lambda digest, data: b"" if digest in stalled else data

    async def scenario() -> None:
        async with downloading(tmp_path / "home", trainer, stalled_seconds=0.2) as download:
            await follow(download, first)
            await follow(download, second)
            (said,) = [event for event in download.events if event.name == "delta_failed"]
            assert "nothing of it came for" in said.text

    trio.run(scenario)


def test_wrong_bytes_for_a_delta_cost_the_peer_and_not_the_policy(tmp_path: Path, trainer: SmallTrainer) -> None:
    first, second = publish_steps(trainer, tmp_path, 1)
    lies = {blob.digest for blob in second.manifest.deltas[0].blobs}

    def lie_once(digest: bytes, data: bytes) -> bytes:
        if digest in lies:
            lies.discard(digest)
            return bytes([data[0] ^ 1]) + data[1:]
        return data

    trainer.on_blob = lie_once

    async def scenario() -> None:
        async with downloading(tmp_path / "home", trainer) as download:
            await follow(download, first)
            await follow(download, second)
            assert values(download)["deltas"] == [(0, 1)]
            assert [event.name for event in download.events].count("blob_wrong") == 1

    trio.run(scenario)


def test_manifests_with_deltas_that_cannot_be_are_refused_before_a_byte_is_fetched(
    tmp_path: Path, trainer: SmallTrainer
) -> None:
    _, second = publish_steps(trainer, tmp_path, 1)
    (delta,) = second.manifest.deltas
    huge = tuple(Blob(bytes([i]) * 32, 4 * 2**20) for i in range(8))
    cases: list[dict[str, object]] = [
        {"deltas": (replace(delta, base_version=1),)},
        {"deltas": (delta, delta)},
        {"deltas": (replace(delta, blobs=()),)},
        {"deltas": (replace(delta, blobs=(replace(delta.blobs[0], length=0),)),)},
        {"deltas": (replace(delta, blobs=(*delta.blobs, *huge)),)},
    ]

    async def scenario() -> None:
        async with downloading(tmp_path / "home", trainer) as download:
            for case in cases:
                with pytest.raises(RemoteError) as caught:
                    download.follower.offer(resigned(trainer, second, **case).signed)
                assert caught.value.code == Code.MALFORMED
            assert trainer.blobs_served == 0

    trio.run(scenario)


def test_an_expired_manifest_is_taken_from_the_trainer_alone(tmp_path: Path, trainer: SmallTrainer) -> None:
    expired = resigned(trainer, trainer.publish(EMBEDDED, 0), expires_ms=1_000)

    async def scenario() -> None:
        async with downloading(tmp_path / "home", trainer) as download:
            with pytest.raises(RemoteError, match="has expired"):
                download.follower.offer(expired.signed, heard_from="a mirror", now_ms=1_001)
            assert download.follower.latest is None
            await follow(download, expired)

    trio.run(scenario)


def test_a_disk_too_full_for_a_delta_is_told_with_how_much_is_missing(tmp_path: Path, trainer: SmallTrainer) -> None:
    first, second = publish_steps(trainer, tmp_path, 1)
    free = {"bytes": 10 * 2**20}
    config = NodeConfig(address=trainer_address(trainer), home=tmp_path / "home", disk_reserve_bytes=0)
    store = RunStore(tmp_path / "home", config, free_bytes=lambda folder: free["bytes"])

    async def scenario() -> None:
        async with downloading(tmp_path / "home", trainer, store=store) as download:
            await follow(download, first)
            free["bytes"], served = 1_024, trainer.blobs_served
            download.follower.offer(second.signed)
            said = await download.until_said("storage")
            assert "policy 1 needs" in said.text and "has 1.0 KiB free: free" in said.text
            assert "waits for it" in said.text
            assert trainer.blobs_served == served

    trio.run(scenario)


# --- kills ---

_APPLIER = """
import os, sys
from pathlib import Path
from node.config import NodeConfig
from node.store import RunStore
from protocol import codec
from protocol.envelope import Signed
from protocol.policy import Manifest
from protocol.run import RunAddress
home, signed, sections = Path(sys.argv[1]), codec.decode(Signed, Path(sys.argv[2]).read_bytes()), int(sys.argv[3])
manifest = codec.decode(Manifest, signed.payload)
left = [sections]
def kill_at_last():
    left[0] -= 1
    if left[0] < 0:
        os.kill(os.getpid(), 9)
address = RunAddress("/ip4/127.0.0.1/tcp/4001", signed.signer, manifest.run)
store = RunStore(home, NodeConfig(address=address, disk_reserve_bytes=0))
store.apply(manifest, signed, manifest.deltas[0], kill_at_last)
"""


@pytest.mark.parametrize("sections", [0, 3, 11])
def test_a_node_killed_while_it_applies_a_delta_goes_on_with_what_it_has(
    tmp_path: Path, trainer: SmallTrainer, sections: int
) -> None:
    first, second = publish_steps(trainer, tmp_path, 1)
    home = tmp_path / "home"

    async def as_far_as_the_blobs() -> None:
        async with downloading(home, trainer) as download:
            await follow(download, first)
            for blob in second.manifest.deltas[0].blobs:
                download.store.put_blob(blob.digest, trainer.blobs[blob.digest])

    async def started_again() -> None:
        async with downloading(home, trainer) as download:
            assert sorted(path.name for path in (home / "policies").iterdir()) == [download.store.held[0].folder.name]
            served = trainer.blobs_served
            await follow(download, second)
            assert values(download)["deltas"] == [(0, 1)]
            assert trainer.blobs_served == served

    trio.run(as_far_as_the_blobs)
    signed = tmp_path / "signed"
    signed.write_bytes(codec.encode(second.signed))
    command = [sys.executable, "-c", _APPLIER, str(home), str(signed), str(sections)]
    root = Path(__file__).parents[2]
    killed = subprocess.run(command, timeout=60, cwd=root, env={**os.environ, "PYTHONPATH": str(root)})
    assert killed.returncode == -signal.SIGKILL
    assert [path.name for path in (home / "policies").iterdir() if path.name.endswith(".unfinished")]
    trio.run(started_again)


def test_a_node_that_is_stopped_while_it_applies_a_delta_stops(tmp_path: Path, trainer: SmallTrainer) -> None:
    first, second = publish_steps(trainer, tmp_path, 1)
    home = tmp_path / "home"

    async def scenario() -> None:
        async with downloading(home, trainer) as download:
            await follow(download, first)
            reading = trio.Event()
            token = trio.lowlevel.current_trio_token()
            right = download.store.read_blob
            deltas = {blob.digest for blob in second.manifest.deltas[0].blobs}

            def tell(digest: bytes) -> bytes | None:
                if digest in deltas and (home / "blobs" / digest.hex()).exists():
                    token.run_sync_soon(reading.set)
                return right(digest)

            download.store.read_blob = tell  # type: ignore[method-assign]
            download.follower.offer(second.signed)
            await reading.wait()

    trio.run(scenario)
    assert not [path for path in (home / "policies").iterdir() if path.name.endswith(".unfinished")]
