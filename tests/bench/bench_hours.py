"""Eight simulated hours of a run with 200 nodes: is memory flat, and has every wait a name?

    python tests/bench/bench_hours.py [--hours 8] [--nodes 200] [--every 2000]

The real gateway with all that is behind it (sessions, leasing, clerk, inbox, judge with its checks and replay, draw,
verdicts, epochs, pruning, a ledger on SQLite) in this process, on a virtual clock: trio's for its loops and Unix time
for all it writes. 200 real sessions over the in-memory network, whose nodes answer tools8 from a script: they ask for
8 slots, draw for some minutes, hand in, and ask again after EVERY seconds at the earliest, which makes some 2,500
traces an hour; a heartbeat is sent every 40 s (rlnode: 10), so that the whole takes a few minutes of CPU. Some nodes
vanish in the middle of their work, some hand in what replay refuses, some fail their audits. Auditor and learner are
stand-ins that write what the real ones write, through the ledger's own functions; a version is the policy's folder
with other bytes. Not here: the model, blobs, libp2p, the page.

Every simulated minute `rltrainer status` is asked what each part and each node waits for. Bars: no wait without a name
and none since a time to come; resident memory over the last two thirds grows by less than 1 % an hour. This process
also holds the 200 nodes.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
import psutil
import trio
import trio.testing

from protocol import codec, messages
from protocol.envelope import seal
from protocol.heap import few_heaps
from protocol.identity import Identity
from protocol.lease import Lease
from protocol.net.memory import Network
from protocol.policy import policy_root
from protocol.run import EnvironmentShare
from protocol.trace import Trace
from protocol.verdict import Reason
from tests.trainer.scripted_node import Client, Script, audit_result, calibrate, dialled, identity_of
from trainer.batch import choose
from trainer.config import TrainerConfig
from trainer.gateway import Gateway
from trainer.ledger import Ledger
from trainer.ledger_rows import StepRow
from trainer.office import Office, open_office
from trainer.rundir import Run, open_run
from trainer.summary import summary

BAR_PERCENT = 1.0  # of memory an hour
TICK_SECONDS = 10.0  # virtual: the gateway's loops come to their turn so often
BEAT_SECONDS = 40.0  # a session ends after 45 s of silence
SLOTS = 8
SLOWEST = 400.0  # seconds of drawing
FLAKY, WRONG, CHEATING = 10, 6, 4  # nodes of 200
AWAY_SECONDS = 600.0
LEARNER_SECONDS = 30.0  # between looks of the stand-in
_NUMBER = re.compile(r"[\d,.]*\d")

CONFIG = TrainerConfig(
    listen="/ip4/127.0.0.1/tcp/0", group_size=8, groups_per_step=16, open_groups=256, max_turn_tokens=14,
    max_tokens=64, lease_seconds=900.0, keep_traces=2_000,
)  # fmt: skip


class World:
    """The clock, what is counted, and which nodes are in the middle of a request."""

    def __init__(self, clock: trio.testing.MockClock, script: Script, every: float) -> None:
        self.clock = clock
        self.script = script
        self.every = every
        self.start_ms = time.time_ns() // 1_000_000
        self.asking = 0
        self.nameless: list[str] = []
        self.names: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()

    def now_ms(self) -> int:
        return self.start_ms + int(self.clock.current_time() * 1000)


# --- a node ---


class Node:
    def __init__(self, world: World, network: Network, gateway: str, run: bytes, number: int) -> None:
        self.world, self.network, self.gateway, self.run = world, network, gateway, run
        self.who: Identity = identity_of(f"hours {number}")
        self.random = Random(number)
        self.flaky = number < FLAKY
        self.wrong = FLAKY <= number < FLAKY + WRONG
        self.holds = {0}
        self.cursor = 0
        self.told = 0

    async def live(self) -> None:
        """Sessions, one after the other; most nodes have one."""
        await trio.sleep(self.random.uniform(0, self.world.every))
        while True:
            async with (
                self.network.host(self.who, listen=()) as host,
                dialled(host, self.gateway, self.who, self.run) as client,
            ):
                await self._asked(client.hello(clock_ms=self.world.now_ms()))
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._beat, client)
                    await self._work(client)
                    nursery.cancel_scope.cancel()
            self.world.counts["sessions lost"] += 1
            await trio.sleep(AWAY_SECONDS)

    async def _work(self, client: Client) -> None:
        """Until the node vanishes."""
        while True:
            begun = trio.current_time()
            leases = await self._leases(client)
            await trio.sleep(self.random.uniform(SLOWEST / 4, SLOWEST))
            if self.flaky and self.random.random() < 0.3:
                return
            async with trio.open_nursery() as nursery:
                for lease in leases:
                    for slot in lease.slots:
                        nursery.start_soon(self._hand_in, client, self._trace(lease, slot.index))
            await trio.sleep(max(0.0, begun + self.world.every * self.random.uniform(0.7, 1.3) - trio.current_time()))

    async def _leases(self, client: Client) -> list[Lease]:
        while True:
            request = messages.GetLeases(SLOTS, tuple(sorted(self.holds)))
            reply: messages.LeasesReply = await self._asked(client.ask(request, messages.LeasesReply))
            self.world.counts["requests for leases"] += 1
            if reply.leases:
                return [client.opened(signed) for signed in reply.leases]
            self.world.names[f"node is told: {_NUMBER.sub('#', reply.cause)}"] += 1
            if not reply.cause.strip():
                self.world.nameless.append("a node got no lease and no reason")
            await trio.sleep(max(10.0, reply.retry_ms / 1000))

    def _trace(self, lease: Lease, slot: int) -> Trace:
        now_ms = self.world.now_ms()
        trace = self.world.script.trace(lease, slot, right=self.random.random() < 0.5)
        reward = 0.5 if self.wrong and self.random.random() < 0.2 else trace.reward
        return replace(trace, started_ms=lease.issued_ms, finished_ms=now_ms, reward=reward)

    async def _hand_in(self, client: Client, trace: Trace) -> None:
        reply: messages.Submitted = await self._asked(client.send(seal(self.who, trace)))
        self.world.counts["traces" if reply.receipt else "traces turned away"] += 1

    async def _beat(self, client: Client) -> None:
        while True:
            await trio.sleep(BEAT_SECONDS)
            beat = messages.Heartbeat(self.world.now_ms(), max(self.holds), 12.5, 1, SLOTS, 0, None, 0, self.cursor)
            reply: messages.HeartbeatReply = await self._asked(client.ask(beat, messages.HeartbeatReply))
            self.world.counts["heartbeats"] += 1
            self.cursor = reply.verdict_cursor
            client.announced.clear()
            if reply.latest_version != self.told:
                self.told = reply.latest_version  # by the next heartbeat it has been fetched
            elif self.told not in self.holds:
                self.holds = {self.told, max(self.holds)}

    async def _asked(self, request: Any) -> Any:
        self.world.asking += 1
        try:
            return await request
        finally:
            self.world.asking -= 1


# --- stand-ins for auditor and learner ---


class Auditor:
    def __init__(self, run: Run, calibration: bytes, cheating: frozenset[bytes]) -> None:
        self._ledger = Ledger(run.folder.ledger)
        self._cheating = cheating
        scored = replace(audit_result(), calibration=calibration, scores=(-0.05, -0.05))
        self._passed, self._failed = codec.encode(scored), codec.encode(audit_result(Reason.MARGIN))

    def turn(self, now_ms: int) -> int:
        answered = 0
        while rows := self._ledger.claim_audits("auditor-0", now_ms, 64):
            with self._ledger.write():
                for row in rows:
                    answer = self._failed if row.node in self._cheating else self._passed
                    self._ledger.finish_audit(row.sequence, answer, np.full(30, -0.5, np.float32))
            answered += len(rows)
        return answered


class Learner:
    def __init__(self, run: Run) -> None:
        self._run = run
        self._ledger = Ledger(run.folder.ledger)

    def turn(self, now_ms: int) -> bool:
        """Whether there was enough for a step."""
        config, version = self._run.config, self._version()
        choice = choose(
            self._ledger.complete_groups(), version=version, staleness_limit=config.staleness_limit,
            wanted=config.groups_per_step,
        )  # fmt: skip
        with self._ledger.write():
            for group_id, cause in choice.unusable.items():
                self._ledger.drop_group(group_id, cause)
        if len(choice.informative) < config.groups_per_step:
            return False
        groups = self._ledger.training_groups(choice.informative)
        ages = [version - each.group.policy_version for each in groups]
        traces = sum(len(each.traces) for each in groups)
        root = self._make(version)
        row = StepRow(
            version + 1, now_ms, len(groups), traces, 30 * traces, choice.reward_mean, len(choice.flat),
            sum(ages) / len(ages), max(ages), 0.1, 0.9, 1e-3, 0.0, 0.0, 1.0, 1.0, 1.1, 0.5, 1e-4, 1.0,
        )  # fmt: skip
        self._ledger.record_step(row, root, (*choice.informative, *choice.flat))
        old = self._run.folder.policy(version - config.keep_policies)
        if version >= config.keep_policies and old.exists():
            shutil.rmtree(old)
        return True

    def _version(self) -> int:
        latest = self._ledger.policy()
        assert latest is not None
        return latest[0]

    def _make(self, version: int) -> bytes:
        """The next policy: other bytes at the end of its weights."""
        folder = self._run.folder.policy(version + 1)
        shutil.copytree(self._run.folder.policy(version), folder)
        weights = next(folder.glob("*.safetensors"))
        with weights.open("r+b") as file:
            file.seek(-4, 2)
            file.write((version + 1).to_bytes(4, "little"))
        return policy_root(folder)


# --- the hours ---


async def simulate(world: World, run: Run, office: Office, options: argparse.Namespace) -> list[tuple[float, float]]:
    """(hour, MiB) every minute."""
    network = Network()
    cheating = frozenset(identity_of(f"hours {FLAKY + WRONG + each}").node for each in range(CHEATING))
    ledger = Ledger(run.folder.ledger)
    auditor, learner = Auditor(run, calibrate(run, ledger), cheating), Learner(run)
    looking = Ledger(run.folder.ledger, read_only=True)
    process, samples = psutil.Process(), []
    async with network.host(office.signer) as host, trio.open_nursery() as nursery:
        await nursery.start(Gateway(office).run, host)
        for number in range(options.nodes):
            nursery.start_soon(Node(world, network, host.addresses[0], run.run, number).live)
        for tick in range(1, int(options.hours * 3600 / TICK_SECONDS) + 1):
            world.clock.jump(TICK_SECONDS)
            await settle(world, office, looking)
            now_ms, second = world.now_ms(), tick * TICK_SECONDS
            world.counts["audits"] += auditor.turn(now_ms)
            if second % LEARNER_SECONDS == 0:
                world.counts["versions"] += learner.turn(now_ms)
            if second % 60 == 0:
                look(world, looking, run, now_ms)
                samples.append((second / 3600, process.memory_info().rss / 2**20))
            if second % 1800 == 0:
                print(f"{second / 3600:4.1f} h: {samples[-1][1]:.1f} MiB, {dict(world.counts)}, "
                      f"{time.process_time():.0f} CPU s", flush=True)  # fmt: skip
        nursery.cancel_scope.cancel()
    return samples


async def settle(world: World, office: Office, looking: Ledger) -> None:
    """Until nobody waits for an answer and everything handed in has its first decision: no time passes meanwhile."""
    while True:
        await trio.testing.wait_all_tasks_blocked()
        await office.clerk.do(lambda: None)
        await trio.testing.wait_all_tasks_blocked()
        if world.asking == 0 and not looking.owed().received:
            return
        await trio.to_thread.run_sync(time.sleep, 0.001)


def look(world: World, looking: Ledger, run: Run, now_ms: int) -> None:
    """What a person is told that everybody waits for."""
    found = summary(looking, run.config, now_ms)
    begun = now_ms - world.start_ms > 600_000
    for wait in found["waits"]:
        world.names[f"{wait['part']} {_NUMBER.sub('#', wait['what'])}"] += 1
        since = wait["since_ms"]
        waits = not wait["what"].startswith("as nodes ask")  # how leases stand is told also when nothing waits
        if not wait["what"].strip() or (since is None and begun and waits) or (since or 0) > now_ms:
            world.nameless.append(f"{wait['part']}: {wait}")
    for node in found["nodes"]:
        world.names[f"node {_NUMBER.sub('#', node['doing'])}"] += 1
        if not node["doing"].strip() or (node["doing_since_ms"] or 0) > now_ms + 1000 * CONFIG.lease_seconds:
            world.nameless.append(f"node: {node['doing']!r} since {node['doing_since_ms']}")


def report(world: World, samples: list[tuple[float, float]], ledger: Ledger) -> bool:
    hours = samples[-1][0]
    steady = np.array([each for each in samples if each[0] >= hours / 3])
    slope = float(np.polyfit(steady[:, 0], steady[:, 1], 1)[0])
    percent = 100 * slope / float(steady[:, 1].mean())
    third = len(steady) // 3
    drift = 100 * float(steady[-third:, 1].mean() / steady[:third, 1].mean() - 1)
    print(f"\n{hours:g} simulated hours, {time.process_time():.0f} CPU s: " + ", ".join(
        f"{count:,} {what}" for what, count in sorted(world.counts.items())
    ))  # fmt: skip
    for row in ledger.view("SELECT outcome, reason, COUNT(*) AS n FROM verdicts GROUP BY outcome, reason"):
        print(f"  verdicts {row['outcome']} {row['reason'] or ''}: {row['n']:,}")
    for row in ledger.view("SELECT state, cause, COUNT(*) AS n FROM groups GROUP BY state, cause"):
        print(f"  groups {row['state']} {row['cause'] or ''}: {row['n']:,}")
    sealed = ledger.sealed()
    print(
        f"  epochs closed: {sealed:,}; the ledger: {ledger.folder.joinpath('ledger.sqlite').stat().st_size >> 20} MiB"
    )
    print("what was waited for, by the times it was told:")
    for name, count in world.names.most_common():
        print(f"  {count:8,}  {name}")
    each = max(1, len(samples) // 8)
    print("MiB: " + ", ".join(f"{mib:.1f} at {hour:.1f} h" for hour, mib in samples[each - 1 :: each]))
    print(
        f"memory over the last two thirds: {slope:+.2f} MiB an hour, {percent:+.2f} % of {steady[:, 1].mean():.0f} MiB "
        f"(bar {BAR_PERCENT:g} %); last third of it against first {drift:+.2f} %"
    )
    print(f"waits without a name: {len(world.nameless)} (bar 0)" + "".join(f"\n  {w}" for w in world.nameless[:5]))
    return percent < BAR_PERCENT and not world.nameless


def make(path: Path) -> None:
    from trainer.init import init_run

    init_run(path, name="bench", policy="embedded", environments=(EnvironmentShare("tools8@1", "", 1),), config=CONFIG)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hours", type=float, default=8.0)
    parser.add_argument("--nodes", type=int, default=200)
    parser.add_argument("--every", type=float, default=2_000.0)
    parser.add_argument("--make", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.make:
        make(options.make)
        return 0
    few_heaps()
    with tempfile.TemporaryDirectory() as name:
        # In a process of its own, as it needs torch, which the gateway does not.
        subprocess.run([sys.executable, __file__, "--make", str(Path(name) / "run")], check=True)
        run = open_run(Path(name) / "run")
        clock = trio.testing.MockClock()
        world = World(clock, Script(run.folder.policy(0)), options.every)
        with open_office(run, world.now_ms) as office:
            samples = trio.run(simulate, world, run, office, options, clock=clock)
        ledger = Ledger(run.folder.ledger, read_only=True)
        met = report(world, samples, ledger)
        ledger.close()
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
