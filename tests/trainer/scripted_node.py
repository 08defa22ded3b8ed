"""A node without a model: it speaks the real messages and answers tools8 tasks from a script, right or wrong, with
traces that pass every check which needs no model. And a gateway for it to talk to, on the in-memory network.

Shared by the tests of the gateway and its benchmark. Not here: drawing tokens (studio.py, fabricate.py).
"""

from __future__ import annotations

import functools
import hashlib
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import trio

from protocol import codec, limits, messages
from protocol.calibration import Alternative, Calibration, Pair, Sample, ScoreTable
from protocol.envelope import Signed, seal, unseal
from protocol.environments.tokenizer import PolicyTokenizer
from protocol.environments.tools import ANSWER, CALL, Tools8, task
from protocol.identity import Identity
from protocol.lease import Lease
from protocol.messages import Version
from protocol.net.base import Host
from protocol.net.memory import Network
from protocol.net.session import Session
from protocol.trace import EngineDescriptor, Span, SpanKind, Trace
from protocol.verdict import CheckOutcome, Fingerprint, Reason, Verdict
from trainer.audit_result import AuditResult
from trainer.gateway import Gateway
from trainer.judge import Judge
from trainer.ledger import Ledger
from trainer.ledger_rows import CalibrationRow, SubmissionState
from trainer.office import Office, open_office
from trainer.pairs import pair_name, pair_of
from trainer.rundir import Run, load_run_identity
from verify.check import DEAR
from verify.finding import Finding, as_check, passed, skipped
from verify.structure import policy_shape
from verify.thresholds import limits_for
from verify.toploc import build_proofs

T = TypeVar("T")

ENGINE = EngineDescriptor("script", "1", "float32", "cpu", "reference")


def on_trio(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run an async test under trio, with a deadline."""

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        async def limited() -> None:
            with trio.fail_after(60):
                await test(**fixtures)

        trio.run(limited)

    return run


class Script:
    """Plays tools8 episodes under a lease, as a node's tokenizer and environment would."""

    def __init__(self, policy: Path) -> None:
        self._tokenizer = PolicyTokenizer.load(policy)
        self._hidden = policy_shape(policy).hidden_size
        self._stop = min(self._tokenizer.stop_ids)
        self._random = np.random.default_rng(0)
        self._made: dict[int, tuple[bytes, ...]] = {}

    def trace(self, lease: Lease, slot: int, *, right: bool = True) -> Trace:
        """A finished episode: reward 1 when `right`, else 0."""
        environment = Tools8()
        asked = task(lease.task_index)
        replies: tuple[str, ...] = ("none",)
        if right:
            result = asked.tool.run(asked.a, asked.b)
            replies = (f"{CALL}{asked.tool.name} {asked.a} {asked.b}", f"{ANSWER}{result}")
        tokens: list[int] = []
        spans: list[Span] = []
        for turn, reply in enumerate(replies, start=1):
            drawn = (*self._tokenizer.encode(reply), self._stop)
            tokens += drawn
            spans.append(Span(SpanKind.GENERATED, len(drawn)))
            if turn < len(replies):
                shown = environment.step(lease.task_index, replies[:turn])
                assert shown is not None
                observed = self._tokenizer.observation_ids(shown)
                tokens += observed
                spans.append(Span(SpanKind.OBSERVED, len(observed)))
        generated = sum(span.length for span in spans if span.kind == SpanKind.GENERATED)
        now_ms = time.time_ns() // 1_000_000
        return Trace(
            run=lease.run, lease_id=lease.lease_id, node=lease.node, policy_version=lease.policy_version,
            policy_root=lease.policy_root, slot=slot, tokens=tuple(tokens), spans=tuple(spans),
            logprobs=(-0.5,) * generated, proofs=self._proofs(generated),
            reward=environment.reward(lease.task_index, replies), engine=ENGINE, started_ms=now_ms, finished_ms=now_ms,
        )  # fmt: skip

    def _proofs(self, generated: int) -> tuple[bytes, ...]:
        """Proofs of states that nobody computed: of the right form, and false."""
        if generated not in self._made:
            hidden = self._random.standard_normal((generated, self._hidden), dtype=np.float32)
            self._made[generated] = build_proofs((hidden.view(np.uint32) >> 16).astype(np.uint16))
        return self._made[generated]


class Client:
    """A node's end of a session."""

    def __init__(self, who: Identity, session: Session, run: bytes) -> None:
        self.who = who
        self.session = session
        self.run = run
        self.cursor = 0
        self.announced: list[Signed] = []

    async def ask(self, request: Any, cls: type[T]) -> T:
        body = await self.session.request(messages.pack(request), seconds=30, what="asking the gateway")
        return messages.expect(cls, body)

    async def hello(self, **changes: Any) -> messages.Welcome:
        fields: dict[str, Any] = {
            "versions": (Version(*limits.PROTOCOL_VERSION),),
            "run": self.run,
            "software": "scripted node 1",
            "clock_ms": time.time_ns() // 1_000_000,
            "engine": ENGINE,
            **changes,
        }
        return await self.ask(messages.Hello(**fields), messages.Welcome)

    async def leases(self, slots: int = 8, versions: tuple[int, ...] = (0,)) -> list[Lease]:
        reply = await self.ask(messages.GetLeases(slots, versions), messages.LeasesReply)
        return [self.opened(signed) for signed in reply.leases]

    def opened(self, signed: Signed) -> Lease:
        return unseal(Lease, signed)

    async def submit(self, trace: Trace) -> messages.Submitted:
        return await self.send(seal(self.who, trace))

    async def send(self, signed: Signed, timing: messages.Timing | None = None) -> messages.Submitted:
        return await self.ask(messages.Submit(signed, timing), messages.Submitted)

    async def beat(self) -> list[Verdict]:
        """The verdicts since the last heartbeat."""
        beat = messages.Heartbeat(time.time_ns() // 1_000_000, 0, 12.5, 1, 4, 2, 35, 0, self.cursor)
        reply = await self.ask(beat, messages.HeartbeatReply)
        self.cursor = reply.verdict_cursor
        return [unseal(Verdict, signed) for signed in reply.verdicts]

    async def verdicts(self, count: int) -> list[Verdict]:
        """The next `count` verdicts."""
        found: list[Verdict] = []
        while len(found) < count:
            found += await self.beat()
        return found

    async def _note(self, body: bytes) -> None:
        self.announced.append(messages.expect(messages.Announce, body).manifest)


async def _refuse(body: bytes) -> bytes:
    raise AssertionError("a trainer asks a node nothing")


@asynccontextmanager
async def dialled(host: Host, address: str, who: Identity, run: bytes) -> AsyncIterator[Client]:
    """A session over a new stream, before its hello."""
    stream = await host.open(address, messages.SESSION_PROTOCOL, seconds=10)
    session = Session(stream)
    client = Client(who, session, run)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(session.run, _refuse, client._note)
        yield client
        with trio.CancelScope(shield=True, deadline=trio.current_time() + 1):
            await session.close()
        nursery.cancel_scope.cancel()


@dataclass
class Trainer:
    """A gateway at work on a network, and the ledger as an auditor or learner sees it."""

    network: Network
    office: Office
    gateway: Gateway
    host: Host
    ledger: Ledger

    @property
    def run(self) -> Run:
        return self.office.run

    @property
    def address(self) -> str:
        return self.host.addresses[0]

    @asynccontextmanager
    async def dial(self, who: Identity) -> AsyncIterator[Client]:
        """A session before its hello."""
        async with (
            self.network.host(who, listen=()) as host,
            dialled(host, self.address, who, self.run.run) as client,
        ):
            yield client

    @asynccontextmanager
    async def node(self, name: str = "node") -> AsyncIterator[Client]:
        """A node that has said hello."""
        async with self.dial(identity_of(name)) as client:
            await client.hello()
            yield client

    def audit(
        self,
        reason: Reason | None = None,
        by: str = "auditor-0",
        calibration: bytes | None = None,
        scores: tuple[float, ...] = (),
        provisional: bool = False,
    ) -> int:
        """Answer every waiting audit as an auditor would: passed, or failed for `reason`. How many."""
        result = replace(audit_result(reason), calibration=calibration, scores=scores, provisional=provisional)
        return answer_audits(self.ledger, result, by)


def answer_audits(ledger: Ledger, result: AuditResult, by: str = "auditor-0") -> int:
    """What an auditor does with every audit that waits, with one answer for all of them; how many."""
    rows = ledger.claim_audits(by, 0, 1_000)
    for row in rows:
        ledger.finish_audit(row.sequence, codec.encode(result), np.zeros(1, np.float32) if result.scores else None)
    return len(rows)


def trust(ledger: Ledger, who: Identity, audits: int) -> int:
    """Let a node have passed so many audits before; where its cursor must begin, for no verdict tells of them."""
    with ledger.write():
        for number in range(audits):
            digest = hashlib.sha256(f"{who.peer_id} {number}".encode()).digest()
            ledger.add_verdict(who.node, digest, SubmissionState.ACCEPTED, None, True, 0, b"")
    return ledger.last_verdict()


def calibrate(run: Run, ledger: Ledger, engine: EngineDescriptor = ENGINE, provisional: bool = False) -> bytes:
    """Let the pair of this engine and the trainer's auditors be calibrated; the calibration's digest."""
    pair = pair_of(engine, run.config)
    if provisional:
        pair = replace(pair, worker_engine="", worker_device="")
    signed = seal(load_run_identity(run), made_up_calibration(run, pair))
    row = CalibrationRow(signed.digest, pair_name(pair), 0, 0, signed.payload, provisional, codec.encode(signed))
    ledger.add_calibration(row)
    return signed.digest


def made_up_calibration(run: Run, pair: Pair) -> Calibration:
    """As if measured on a run's first policy: one alternative a table, and limits as of float32."""
    table = ScoreTable((0.5,), (Alternative("off", (-0.5, 0.25)),))
    quantiles = (0.0, 0.0, 0.0, 0.0, 0.01)
    sample = Sample(200, 8_000, 250, 0, 0.0, quantiles, quantiles, quantiles, quantiles, quantiles, 3.0)
    return Calibration(
        run.run, 0, run.genesis.first_policy_root, pair, limits_for(pair.worker_dtype, pair.verifier_dtype),
        table, table, sample, 1_700_000_000_000,
    )  # fmt: skip


@contextmanager
def held(judge: Judge) -> Iterator[None]:
    """The judge begins nothing until the block ends, and then finds all of it."""
    gate, turn = threading.Event(), judge._turn
    judge._turn = lambda: turn() if gate.wait(30) else 0  # type: ignore[method-assign]
    yield
    gate.set()


def audit_result(reason: Reason | None = None) -> AuditResult:
    checks = tuple(as_check(passed(name)) for name in DEAR)
    if reason is not None:
        failed = as_check(Finding(DEAR[0], reason, "made up by the test", 2.0, 1.0))
        checks = (failed, *(skipped(name, "an earlier check failed") for name in DEAR[1:]))
    assert reason is None or checks[0].outcome is CheckOutcome.FAILED
    return AuditResult(checks, Fingerprint("test", "test", "float32", "cpu"), None, "")


def identity_of(name: str) -> Identity:
    return Identity(hashlib.sha256(name.encode()).digest())


@asynccontextmanager
async def trainer_at_work(run: Run, **settings: Any) -> AsyncIterator[Trainer]:
    """The gateway of a run on a network of its own."""
    network = Network()
    ledger = Ledger(run.folder.ledger)
    try:
        with open_office(run) as office:
            async with network.host(office.signer) as host, trio.open_nursery() as nursery:
                gateway = Gateway(office, **settings)
                await nursery.start(gateway.run, host)
                yield Trainer(network, office, gateway, host, ledger)
                nursery.cancel_scope.cancel()
    finally:
        ledger.close()
