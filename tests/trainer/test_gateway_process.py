"""The gateway as a process of its own, over real libp2p, killed while nodes submit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio

from protocol.envelope import Signed, seal, unseal
from protocol.errors import NetError, Unreachable
from protocol.net import p2p
from protocol.run import EnvironmentShare, RunAddress
from protocol.verdict import Outcome, Receipt
from tests.trainer.scripted_node import Client, Script, answer_audits, audit_result, dialled, identity_of, on_trio
from trainer.config import TrainerConfig
from trainer.init import init_run
from trainer.ledger import Ledger
from trainer.rundir import Run

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
ROUNDS = 2  # kills
TRACES = 64


@pytest.fixture
def run(tmp_path: Path) -> Run:
    config = TrainerConfig(listen="/ip4/127.0.0.1/tcp/0", group_size=8, max_turn_tokens=14, max_tokens=64)
    shares = (EnvironmentShare("tools8@1", "", 1),)
    return init_run(tmp_path / "run", name="test", policy="embedded", environments=shares, config=config)


@contextmanager
def gateway(run: Run, ended_by: Callable[[subprocess.Popen[bytes]], None]) -> Iterator[subprocess.Popen[bytes]]:
    """The process, listening."""
    run.folder.address.unlink(missing_ok=True)
    words = [sys.executable, "-m", "trainer.gateway", str(run.folder.path)]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, env=ENVIRONMENT)
    assert process.stdin is not None
    try:
        deadline = time.monotonic() + 60
        while not run.folder.address.exists():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        yield process
        ended_by(process)
        process.wait(timeout=15)
    finally:
        process.kill()
        process.wait()
        process.stdin.close()


def by_closing_stdin(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    process.stdin.close()


def address_of(run: Run) -> str:
    return RunAddress.parse(run.folder.address.read_text()).dial


def test_a_gateway_ends_with_its_parent_and_comes_back_on_the_same_port(run: Run) -> None:
    with gateway(run, by_closing_stdin) as process:
        before = address_of(run)
    assert process.returncode == 0
    with gateway(run, by_closing_stdin) as process:
        assert address_of(run) == before
    assert process.returncode == 0


async def submit_all(client: Client, traces: dict[bytes, Signed], receipts: dict[bytes, Signed]) -> None:
    """Everything without a receipt, several at once, until the connection breaks."""
    waiting = [signed for digest, signed in traces.items() if digest not in receipts]

    async def work() -> None:
        while waiting:
            signed = waiting.pop()
            reply = await client.send(signed)
            assert reply.receipt is not None
            receipts[signed.digest] = reply.receipt

    async with trio.open_nursery() as nursery:
        for _ in range(4):
            nursery.start_soon(work)


async def audit(run: Run, receipts: dict[bytes, Signed]) -> None:
    """The auditor beside the gateway, until all is answered."""
    ledger = Ledger(run.folder.ledger)
    while len(receipts) < TRACES or ledger.view("SELECT 1 FROM submissions WHERE state IN ('RECEIVED', 'AUDIT')"):
        answer_audits(ledger, audit_result())
        await trio.sleep(0.02)
    ledger.close()


@on_trio
async def test_a_gateway_killed_while_nodes_submit_loses_nothing_and_counts_nothing_twice(run: Run) -> None:
    who = identity_of("node")
    script = Script(run.folder.policy(0))
    traces: dict[bytes, Signed] = {}
    receipts: dict[bytes, Signed] = {}
    async with p2p.open_host(who) as host:
        for round_ in range(ROUNDS + 1):
            with gateway(run, lambda process: os.kill(process.pid, signal.SIGKILL)) as process:
                try:
                    async with dialled(host, address_of(run), who, run.run) as client:
                        await client.hello()
                        if not traces:
                            leases = await client.leases(TRACES)
                            work = [(lease, slot.index) for lease in leases for slot in lease.slots]
                            signed = [seal(who, script.trace(*place)) for place in work]
                            traces = {each.digest: each for each in signed}
                        kept = dict(receipts)
                        async with trio.open_nursery() as nursery:
                            nursery.start_soon(submit_all, client, traces, receipts)
                            nursery.start_soon(audit, run, receipts)
                            if round_ < ROUNDS:
                                while len(receipts) < TRACES * (round_ + 1) // (ROUNDS + 1):
                                    await trio.sleep(0)
                                process.kill()
                        verdicts = await client.verdicts(TRACES)
                except* (NetError, Unreachable):
                    assert round_ < ROUNDS, "only a killed gateway hangs up"
                for digest, receipt in kept.items():
                    assert receipts[digest] == receipt
    assert len(receipts) == len(traces) == TRACES
    sequences = [unseal(Receipt, receipt).sequence for receipt in receipts.values()]
    assert sorted(sequences) == list(range(1, TRACES + 1))
    assert {verdict.trace_digest for verdict in verdicts} == set(traces)
    assert {verdict.outcome for verdict in verdicts} == {Outcome.ACCEPTED}
    ledger = Ledger(run.folder.ledger, read_only=True)
    assert ledger.view("SELECT COUNT(*) AS n FROM submissions")[0]["n"] == TRACES
    assert ledger.view("SELECT COUNT(*) AS n FROM verdicts")[0]["n"] == TRACES
    assert ledger.view("SELECT accepted, leased FROM nodes")[0] == {"accepted": TRACES, "leased": TRACES}
    ledger.close()
