"""A download that is killed (-9) at random points goes on: at most the pieces in flight are fetched again."""

from __future__ import annotations

import multiprocessing
import shutil
from multiprocessing.process import BaseProcess
from pathlib import Path
from random import Random

import trio

from protocol.limits import MAX_BLOB_BYTES
from protocol.net.p2p import open_host
from protocol.policy import policy_root
from tests.node.downloading_process import download
from tests.node.rig import EMBEDDED
from tests.node.small_trainer import SmallTrainer

KILLS = 10
IN_FLIGHT = 2
PIECES = 18


def started(home: Path, address: str) -> BaseProcess:
    """A process of its own, forked from one that has the libraries loaded."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.node.downloading_process"])
    process = context.Process(target=download, args=(home, address, IN_FLIGHT))
    process.start()
    return process


def test_a_download_killed_at_ten_random_points_fetches_again_at_most_what_was_in_flight(tmp_path: Path) -> None:
    folder, home, random = tmp_path / "policy", tmp_path / "home", Random(8)
    shutil.copytree(EMBEDDED, folder)
    (folder / "notes.txt").write_bytes(random.randbytes(PIECES * MAX_BLOB_BYTES))
    trainer = SmallTrainer()
    policy = trainer.publish(folder, 0)
    total = len(trainer.blobs)
    points = sorted(random.sample(range(1, total - 1), KILLS))

    def stored() -> int:
        return len([each for each in (home / "blobs").glob("*") if "." not in each.name])

    async def kill_after(process: BaseProcess, pieces: int) -> None:
        """At a random moment after so many pieces are on the disk."""
        served = trainer.blobs_served
        await trainer.until(lambda: stored() >= pieces or trainer.blobs_served >= served + total)
        await trio.sleep(random.uniform(0, 0.1))
        process.kill()
        await trio.to_thread.run_sync(process.join)

    async def scenario() -> None:
        async with open_host(trainer.identity, listen=("/ip4/127.0.0.1/tcp/0",)) as host:
            trainer.serve(host)
            address = str(trainer.address(host))
            for killed, point in enumerate(points, 1):
                await kill_after(await trio.to_thread.run_sync(started, home, address), point)
                assert trainer.blobs_served - stored() <= IN_FLIGHT * killed, "more than what was in flight was lost"
            process = await trio.to_thread.run_sync(started, home, address)
            await trio.to_thread.run_sync(process.join)
            assert process.exitcode == 0
            assert total <= trainer.blobs_served <= total + KILLS * IN_FLIGHT
            (whole,) = (home / "policies").iterdir()
            assert policy_root(whole) == policy.manifest.root

    trio.run(scenario)
