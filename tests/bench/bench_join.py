"""From `rlnode join` to its first lease, on loopback, weights present, after imports (bar: under 3 s).

    python tests/bench/bench_join.py [--rounds 3]

The trainer is a real `rltrainer serve`; the node runs in this process, so that imports can be left out. The first
join fetches the policy and is not counted. Beside it: a bare dial and hello-sized round trip of the same host, as
the floor.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import trio
from local_run import serving  # first: it puts the repository on the path

import protocol.net.p2p
from node.config import NodeConfig
from node.join import join, make_engine
from node.report import Status
from protocol.identity import Identity
from protocol.messages import SESSION_PROTOCOL
from protocol.run import RunAddress


async def until_first_lease(config: NodeConfig) -> float:
    """Seconds from the call to the first lease in hand."""
    status, stop = Status(), trio.Event()
    begun = time.perf_counter()
    taken = 0.0
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: join(config, lambda event: None, status, stop))
        with trio.fail_after(60):
            while not (status.leases_waiting or status.slots_busy or status.traces_drawn):
                await trio.sleep(0.005)
        taken = time.perf_counter() - begun
        stop.set()
    return taken


async def floor(address: RunAddress) -> float:
    """Seconds to make a host, dial the trainer and open a session stream."""
    begun = time.perf_counter()
    async with protocol.net.p2p.open_host(Identity.generate()) as host:
        await host.open(address.dial, SESSION_PROTOCOL, seconds=20)
        return time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder)) as (_, line):
        address = RunAddress.parse(line)
        config = NodeConfig(address=address, home=Path(folder) / "home", threads=1)
        make_engine(config).close()  # imports of the engine
        trio.run(until_first_lease, config)
        joins = [trio.run(until_first_lease, config) for _ in range(rounds)]
        dials = [trio.run(floor, address) for _ in range(rounds)]
    join_s, dial_s = statistics.median(joins), statistics.median(dials)
    print(f"join to first lease {join_s:.2f} s (bar 3 s), bare dial {dial_s:.2f} s, ratio {join_s / dial_s:.1f}")


if __name__ == "__main__":
    main()
