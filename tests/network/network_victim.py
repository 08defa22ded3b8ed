"""The process that tests/network/test_hostile_peers.py attacks: a host as rltrainer opens it."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import sys
from pathlib import Path

import trio

sys.path.insert(0, str(Path(__file__).parent))

from network_worlds import BOOM, ECHO, SINK, STATISTICS, boom, echo, sink

from protocol.identity import Identity
from protocol.net import p2p
from protocol.net.base import HostLimits, Stream


async def stop_with_the_test(scope: trio.CancelScope) -> None:
    """The test holds our standard input: when it dies, however, so do we."""
    await trio.to_thread.run_sync(sys.stdin.read, abandon_on_cancel=True)
    scope.cancel()


async def main() -> None:
    # All attackers and honest peers share the loopback address here.
    limits = HostLimits(connections_per_address=600)
    async with (
        trio.open_nursery() as nursery,
        p2p.open_host(Identity.generate(), listen=("/ip4/127.0.0.1/tcp/0",), limits=limits) as host,
    ):

        async def statistics(stream: Stream) -> None:
            while True:
                await stream.receive(seconds=60, what="waiting for a question")
                answer = {**dataclasses.asdict(host.statistics()), "descriptors": len(os.listdir("/proc/self/fd"))}
                await stream.send(json.dumps(answer).encode(), seconds=10, what="answering")

        for protocol, handler in ((ECHO, echo), (SINK, sink), (BOOM, boom), (STATISTICS, statistics)):
            host.serve(protocol, handler)
        print(json.dumps({"address": host.addresses[0]}), flush=True)
        nursery.start_soon(stop_with_the_test, nursery.cancel_scope)
        await trio.sleep_forever()


logging.disable(logging.CRITICAL)
trio.run(main)
