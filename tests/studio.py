"""Draws traces of the embedded policy with the real engine, honest ones and a cheater's. Shared by the suites."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from node.engine import SequenceRequest
from node.transformers_engine import TransformersEngine
from protocol.envelope import Signed, seal
from protocol.environments import base
from protocol.environments.rollout import has_room, next_observation, reply_text, turn_budget
from protocol.environments.tokenizer import PolicyTokenizer
from protocol.identity import Identity
from protocol.lease import Lease, SeedInput, Slot, slot_seed
from protocol.policy import policy_root
from protocol.run import EnvironmentShare, Genesis, run_id
from protocol.trace import Span, SpanKind, Trace, TraceFile
from protocol.verdict import Receipt

EMBEDDED = Path(__file__).parent.parent / "trainer" / "embedded"
TRAINER = Identity(hashlib.sha256(b"test trainer").digest())
NODE = Identity(hashlib.sha256(b"test node").digest())
ISSUED_MS = 1_700_000_000_000


@dataclass(frozen=True)
class Rollout:
    """An honest trace with its lease, and what is needed to make a file of it or of a changed copy."""

    genesis: Signed
    lease: Lease
    trace: Trace

    def file(
        self, *, trace: Trace | None = None, lease: Lease | None = None, node: Identity = NODE, late_ms: int = 0
    ) -> TraceFile:
        """The trace file, signed and receipted afresh by whoever is named."""
        lease = lease or self.lease
        signed = seal(node, trace or self.trace)
        receipt = Receipt(
            lease.run, signed.digest, lease.lease_id, self.trace.slot, node.node, ISSUED_MS + 1_000 + late_ms, 1
        )
        return TraceFile(self.genesis, seal(TRAINER, lease), signed, seal(TRAINER, receipt), None, None)


class Studio:
    """Draws honest rollouts of the embedded policy with the real engine."""

    def __init__(self, policy: Path = EMBEDDED) -> None:
        self.policy = policy
        self.root = policy_root(policy)
        self.engine = TransformersEngine(slots=16)
        self.engine.load(policy, self.root)
        self.tokenizer = PolicyTokenizer.load(policy)
        shares = (EnvironmentShare("tools8@1", "", 1), EnvironmentShare("guess@1", "", 1))
        genesis = Genesis("test run", TRAINER.node, ISSUED_MS - 1_000, shares, self.root, bytes(32))
        self.genesis = seal(TRAINER, genesis)
        self.run = run_id(self.genesis)

    def lease(self, environment: str = "tools8@1", task: int = 7, slots: int = 1, **changes: object) -> Lease:
        task_environment = base.load(environment)
        group = hashlib.sha256(f"{environment} {task}".encode()).digest()[:16]

        def seed(slot: int) -> int:
            return slot_seed(SeedInput(self.run, self.root, environment, "", task, group, slot, b"\x05" * 32))

        lease = Lease(
            run=self.run, lease_id=group[::-1], node=NODE.node, policy_version=0, policy_root=self.root,
            environment=environment, parameters="", task_index=task, group_id=group, group_size=8,
            slots=tuple(Slot(index, seed(index)) for index in range(slots)),
            prompt=self.tokenizer.prompt_ids(task_environment.prompt(task)), temperature=1.0,
            max_turn_tokens=task_environment.max_new_tokens, max_tokens=256,
            issued_ms=ISSUED_MS, deadline_ms=ISSUED_MS + 120_000,
        )  # fmt: skip
        return replace(lease, **changes)  # type: ignore[arg-type]

    def draw(
        self,
        lease: Lease,
        slot: int = 0,
        *,
        seed: int | None = None,
        temperature: float | None = None,
        prompt: tuple[int, ...] | None = None,
        engine: TransformersEngine | None = None,
    ) -> Trace:
        """One slot of a lease played to its end. The keyword arguments are what a cheater would change."""
        engine = engine or self.engine
        environment = base.load(lease.environment, lease.parameters)
        tokens: list[int] = []
        spans: list[Span] = []
        logprobs: list[float] = []
        replies: tuple[str, ...] = ()
        request = SequenceRequest(
            "draw", lease.prompt if prompt is None else prompt, lease.seed_of(slot) or 0 if seed is None else seed,
            lease.temperature if temperature is None else temperature,
            turn_budget(lease.max_turn_tokens, lease.max_tokens, 0),
        )  # fmt: skip
        engine.open(request)
        while True:
            turn = next(iter(_until_done(engine)))
            tokens += turn.tokens
            logprobs += turn.logprobs
            spans.append(Span(SpanKind.GENERATED, len(turn.tokens)))
            reply = reply_text(self.tokenizer, turn.tokens)
            replies = (*replies, reply or "")
            if reply is None:
                break
            observed = next_observation(environment, self.tokenizer, lease.task_index, replies)
            if observed is None or not has_room(observed, lease.max_tokens, len(tokens)):
                break
            tokens += observed
            spans.append(Span(SpanKind.OBSERVED, len(observed)))
            engine.extend("draw", observed, turn_budget(lease.max_turn_tokens, lease.max_tokens, len(tokens)))
        return Trace(
            run=lease.run, lease_id=lease.lease_id, node=lease.node, policy_version=lease.policy_version,
            policy_root=lease.policy_root, slot=slot, tokens=tuple(tokens), spans=tuple(spans),
            logprobs=tuple(logprobs), proofs=engine.finish("draw"),
            reward=environment.reward(lease.task_index, replies),
            engine=engine.descriptor(), started_ms=ISSUED_MS + 10, finished_ms=ISSUED_MS + 900,
        )  # fmt: skip

    def rollout(self, environment: str = "tools8@1", task: int = 7) -> Rollout:
        lease = self.lease(environment, task)
        return Rollout(self.genesis, lease, self.draw(lease))


def _until_done(engine: TransformersEngine) -> tuple:  # type: ignore[type-arg]
    for _ in range(10_000):
        if done := engine.step():
            return done
    raise AssertionError("the engine is stuck")


def first_rollout(studio: Studio, wanted: Callable[[Trace], bool]) -> Rollout:
    for task in range(200):
        rollout = studio.rollout(task=task)
        if wanted(rollout.trace):
            return rollout
    raise AssertionError("no such rollout among 200 tasks")
