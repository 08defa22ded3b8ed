"""One process of test_nat.py: a trainer that relays and gives no blobs, or a node behind NAT.

    nat_process.py trainer KEY | nat_process.py node KEY FOLDER ADDRESS

Prints a JSON object a line; answers "figures" and "fetch" on its standard input, and ends with it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import trio

sys.path.insert(0, str(Path(__file__).parents[2]))

from protocol import codec, messages
from protocol.identity import Identity
from protocol.net import p2p
from protocol.net.base import Host, RelayLimits
from protocol.policy import Manifest
from protocol.run import RunAddress
from tests.node.fetching_node import FetchingNode, fetching_node
from tests.node.small_trainer import SmallTrainer

EMBEDDED = Path(__file__).parents[2] / "trainer" / "embedded"


def say(**values: Any) -> None:
    print(json.dumps(values), flush=True)


async def answer_questions(host: Host, node: FetchingNode | None, scope: trio.CancelScope) -> None:
    while question := await trio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True):
        if node is not None and question.strip() == "fetch":
            say(fetched=await fetch_again(node))
            continue
        figures = host.statistics()
        say(
            relayed_bytes=figures.relayed_bytes,
            reservations=figures.reservations,
            punched=figures.punched,
            punches_failed=figures.punches_failed,
        )
    scope.cancel()


async def fetch_again(node: FetchingNode) -> int:
    """Ask the other node for every piece once more: it takes the way that is best now."""
    (source,) = node.swarm.nodes()
    (held,) = node.store.held.values()
    manifest = codec.decode(Manifest, held.manifest.payload)
    return sum([len(await source.fetch(blob, seconds=20)) for file in manifest.files for blob in file.blobs])


async def trainer(key: bytes) -> None:
    small = SmallTrainer(Identity(key))
    small.publish(EMBEDDED, 0)
    async with p2p.open_host(small.identity, listen=("/ip4/0.0.0.0/tcp/4001",)) as host, trio.open_nursery() as nursery:
        small.serve(host)
        host.serve(messages.BLOB_PROTOCOL, refuse)
        host.relay(RelayLimits(), lambda node: True)
        multiaddr = next(each for each in host.addresses if "/127." not in each).partition("/p2p/")[0]
        say(address=str(RunAddress(multiaddr, small.identity.node, small.run)))
        await answer_questions(host, None, nursery.cancel_scope)


async def refuse(stream: Any) -> None:
    await stream.reset()


async def node(key: bytes, folder: Path, address: RunAddress) -> None:
    who = Identity(key)
    async with (
        p2p.open_host(who, listen=("/ip4/0.0.0.0/tcp/4002",)) as host,
        fetching_node(folder, host, who, address) as at_work,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(at_work.follow, address)
        nursery.start_soon(tell_when_ready, at_work)
        nursery.start_soon(tell_relays, at_work)
        await answer_questions(host, at_work, nursery.cancel_scope)


async def tell_when_ready(at_work: FetchingNode) -> None:
    await at_work.until_ready(0)
    fetched = at_work.said("policy_fetched")
    say(ready=0, by_source=fetched[-1].values["bytes_by_source"] if fetched else {})


async def tell_relays(at_work: FetchingNode) -> None:
    event = await at_work.until_said("relay")
    say(reached_at=event.values["address"])


def main() -> None:
    role, key, *rest = sys.argv[1:]
    if role == "trainer":
        trio.run(trainer, bytes.fromhex(key))
    else:
        trio.run(node, bytes.fromhex(key), Path(rest[0]), RunAddress.parse(rest[1]))


main()
