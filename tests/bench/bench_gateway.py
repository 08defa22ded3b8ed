"""The gateway without the model: leases, submissions and cheap checks over real libp2p, from nodes that answer from
a script.

    python tests/bench/bench_gateway.py [--traces 20000] [--nodes 4]

The gateway is the real process, bound to one core where there are two; the nodes run in a second process. Prints
traces a second of the gateway's wall and CPU time, its memory over the run, and what one core verifies of bare
Ed25519 signatures in the same run. Not measured: audits, the learner, large traces (these have about 30 tokens).
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

BAR_TRACES_PER_SECOND = 200
SLOTS = 32  # asked for at once
PASSED = 400  # audits of each node before
IN_FLIGHT = 8  # submissions of one node, as rlnode's


def make_run(path: Path, nodes: int) -> None:
    """A run whose nodes passed so many audits that next to none of their traces is drawn for one."""
    from protocol.run import EnvironmentShare
    from tests.trainer.scripted_node import calibrate, identity_of, trust
    from trainer.config import TrainerConfig
    from trainer.init import init_run
    from trainer.ledger import Ledger

    config = TrainerConfig(
        listen="/ip4/127.0.0.1/tcp/0", group_size=8, open_groups=64, groups_per_step=1_000, max_turn_tokens=14,
        max_tokens=64, audit_floor=1e-9, keep_traces=1_000,
    )  # fmt: skip
    shares = (EnvironmentShare("tools8@1", "", 1),)
    run = init_run(path, name="bench", policy="embedded", environments=shares, config=config)
    ledger = Ledger(run.folder.ledger)
    calibrate(run, ledger)
    for number in range(nodes):
        trust(ledger, identity_of(f"bench {number}"), PASSED)
    ledger.close()


# --- the nodes' process ---


def load(address: str, policy: Path, count: int, traces: int) -> None:
    """Play `count` nodes until they have submitted `traces` together."""
    import trio

    from protocol.run import RunAddress
    from tests.trainer.scripted_node import Script

    where = RunAddress.parse(address)
    script = Script(policy)
    left = [traces]

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            for number in range(count):
                nursery.start_soon(play_node, where, script, number, PASSED * count, left)

    trio.run(main)


async def play_node(where: Any, script: Any, number: int, cursor: int, left: list[int]) -> None:
    """One node: leases, traces, now and then a heartbeat."""
    import trio

    from protocol import messages
    from protocol.lease import Lease
    from protocol.net import p2p
    from tests.trainer.scripted_node import dialled, identity_of

    who = identity_of(f"bench {number}")
    async with p2p.open_host(who) as host, dialled(host, where.dial, who, where.run) as client:
        await client.hello()
        client.cursor = cursor

        async def submit(work: list[tuple[Lease, int]]) -> None:
            while work:
                lease, slot = work.pop()
                reply = await client.submit(script.trace(lease, slot, right=slot % 2 == 0))
                assert reply.receipt is not None, reply.verdict

        while left[0] > 0:
            reply = await client.ask(messages.GetLeases(SLOTS, (0,)), messages.LeasesReply)
            leases = [client.opened(signed) for signed in reply.leases]
            work = [(lease, slot.index) for lease in leases for slot in lease.slots]
            if not work:
                await trio.sleep(reply.retry_ms / 1000)
                continue
            left[0] -= len(work)
            async with trio.open_nursery() as nursery:
                for _ in range(IN_FLIGHT):
                    nursery.start_soon(submit, work)
            await client.beat()


# --- the measuring process ---


def measure(traces: int, nodes: int) -> int:
    import psutil

    from trainer.ledger import Ledger
    from trainer.rundir import open_run

    folder = Path(tempfile.mkdtemp(prefix="bench-gateway-"))
    children: list[subprocess.Popen[bytes]] = []
    try:
        make_run(folder / "run", nodes)
        run = open_run(folder / "run")
        cores = sorted(os.sched_getaffinity(0))
        gateway = start(["-m", "trainer.gateway", str(folder / "run")], cores[:1])
        children.append(gateway)
        address = wait_for_address(run.folder.address)
        watched = psutil.Process(gateway.pid)
        before = watched.cpu_times()
        began = time.monotonic()
        nodes_process = start(
            [__file__, "--load", address, "--policy", str(run.folder.policy(0)), "--traces", str(traces),
             "--nodes", str(nodes)], cores[1:] or cores,
        )  # fmt: skip
        children.append(nodes_process)
        ledger = Ledger(run.folder.ledger)
        samples = watch(ledger, watched, nodes_process, PASSED * nodes)
        wall = time.monotonic() - began
        after = watched.cpu_times()
        report(samples, wall, after.user + after.system - before.user - before.system)
        ledger.close()
        return nodes_process.returncode
    finally:
        for child in children:
            assert child.stdin is not None
            child.stdin.close()
            try:
                child.wait(timeout=15)
            except subprocess.TimeoutExpired:
                child.kill()
        shutil.rmtree(folder)


def start(arguments: list[str], cores: list[int]) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, *arguments], stdin=subprocess.PIPE, env=environment)
    os.sched_setaffinity(process.pid, cores)
    return process


def wait_for_address(path: Path) -> str:
    deadline = time.monotonic() + 60
    while not path.exists():
        if time.monotonic() > deadline:
            raise SystemExit("the gateway did not listen within 60 s")
        time.sleep(0.05)
    return path.read_text().strip()


def watch(ledger: Any, gateway: Any, nodes: subprocess.Popen[bytes], before: int) -> list[tuple[int, float]]:
    """(verdicts given, gateway's MiB) twice a second; takes complete groups away as a learner does."""
    samples = []
    while nodes.poll() is None or ledger.view("SELECT 1 FROM submissions WHERE state = 'RECEIVED' LIMIT 1"):
        with ledger.write():
            for outcome in ledger.complete_groups():
                ledger.drop_group(outcome.group_id, "taken by the benchmark")
        judged = ledger.view("SELECT COALESCE(MAX(sequence), 0) AS n FROM verdicts")[0]["n"]
        samples.append((judged - before, gateway.memory_info().rss / 2**20))
        time.sleep(0.5)
    return samples


def report(samples: list[tuple[int, float]], wall: float, cpu: float) -> None:
    import numpy as np

    judged = samples[-1][0]
    # The first quarter fills caches; what grows after that grows for ever.
    steady = [sample for sample in samples if sample[0] >= judged / 4]
    slope = np.polyfit([n for n, _ in steady], [mib for _, mib in steady], 1)[0] if len(steady) > 2 else float("nan")
    rate = judged / cpu
    lines = (
        f"{judged:,} traces judged in {wall:.1f} s: {judged / wall:.0f} traces/s of wall time",
        f"{rate:.0f} traces/s of its CPU time (bar {BAR_TRACES_PER_SECOND}), {1000 * cpu / judged:.2f} ms each",
        f"memory {samples[0][1]:.0f} MiB at first, {steady[0][1]:.0f} after a quarter, {samples[-1][1]:.0f} at the "
        f"end; slope {1024 * slope:.2f} KiB a trace",
        f"a trace costs as much as {verifications_per_second() / rate:.0f} bare signature verifications",
    )
    for line in lines:
        print(f"gateway: {line}")


def verifications_per_second() -> float:
    from protocol.identity import DOMAIN_TRACE, Identity, verify

    who, payload = Identity.generate(), os.urandom(1_000)
    signature = who.sign(DOMAIN_TRACE, payload)
    began, count = time.process_time(), 2_000
    for _ in range(count):
        verify(who.node, DOMAIN_TRACE, payload, signature)
    return count / (time.process_time() - began)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--traces", type=int, default=20_000)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--load", help=argparse.SUPPRESS)
    parser.add_argument("--policy", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.load:
        load(options.load, options.policy, options.nodes, options.traces)
        return 0
    return measure(options.traces, options.nodes)


if __name__ == "__main__":
    sys.exit(main())
