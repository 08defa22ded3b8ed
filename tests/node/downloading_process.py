"""A process that downloads what the trainer has, over libp2p, until it is killed or done. For test_resume.py."""

from __future__ import annotations

from pathlib import Path

import trio

from protocol.identity import Identity
from protocol.net.p2p import open_host
from protocol.run import RunAddress
from tests.node.fetching_node import fetching_node


def download(home: Path, address: str, blobs_in_flight: int) -> None:
    """Returns when policy 0 is here."""
    trio.run(_download, home, RunAddress.parse(address), blobs_in_flight)


async def _download(home: Path, address: RunAddress, blobs_in_flight: int) -> None:
    who = Identity.generate()
    async with (
        open_host(who) as host,
        fetching_node(home, host, who, address, blobs_in_flight=blobs_in_flight) as node,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(node.follow, address)
        await node.until_ready(0, seconds=120)
        nursery.cancel_scope.cancel()
