"""One completion, played to its end: the engine draws a turn, the environment answers, again; then proofs, reward
and the signed trace.

Not here: which completion and when (worker.py), the rules (protocol/environments/rollout.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import trio

from node.engine import SequenceRequest, TurnDone
from node.engine_thread import EngineThread
from node.leases import SlotWork
from node.store import HeldPolicy
from node.tasks import Tasks
from protocol import codec, limits
from protocol.envelope import Signed, seal
from protocol.environments import rollout
from protocol.errors import DecodeError, EngineError
from protocol.identity import Identity
from protocol.messages import Timing
from protocol.trace import EngineDescriptor, Span, SpanKind, Trace


@dataclass(slots=True)
class _Turns:
    """What was drawn and answered so far."""

    spans: list[tuple[SpanKind, tuple[int, ...]]] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    replies: tuple[str, ...] = ()
    seconds: float = 0.0  # in the engine, with waiting for a slot
    queued: float = 0.0  # of these, for a slot
    prefill: float = 0.0  # of these
    tools: float = 0.0  # seconds, for the environment

    def add(self, turn: TurnDone, seconds: float) -> None:
        self.seconds += seconds
        self.queued += turn.queued
        self.prefill += turn.prefill
        self.spans.append((SpanKind.GENERATED, turn.tokens))
        self.logprobs.extend(turn.logprobs)

    @property
    def used(self) -> int:
        return sum(len(ids) for _, ids in self.spans)


@dataclass(frozen=True, slots=True)
class Drawn:
    """A completion, and the seconds that it was in the engine: of these `queued` for a slot and `prefill`. `tools`:
    seconds that it waited for its environment."""

    trace: Trace
    in_turns: float
    queued: float
    prefill: float
    tools: float

    def timing(self, waited: float) -> Timing:
        """As the trainer is told. `waited`: seconds from the lease until this was begun."""
        decode = self.in_turns - self.queued - self.prefill
        parts = (waited, self.queued, self.prefill, decode, self.tools)
        return Timing(*(min(2**32 - 1, max(0, round(1000 * each))) for each in parts))


async def draw(
    engine: EngineThread,
    work: SlotWork,
    held: HeldPolicy,
    tasks: Tasks,
    descriptor: EngineDescriptor,
    now_ms: Callable[[], int],
) -> Drawn:
    """The one completion that the slot's seed allows, under the policy in the engine (`held`).

    Raises EngineError, EnvironmentFault, PolicyError.
    """
    lease = work.lease
    started_ms = now_ms()
    environment = await tasks.environment(lease)
    turns = await _play(engine, work, held, tasks)
    proofs = await engine.finish(work.key)
    asked = trio.current_time()
    reward = await tasks.ask(lease, environment.reward, lease.task_index, turns.replies)
    turns.tools += trio.current_time() - asked
    trace = Trace(
        run=lease.run,
        lease_id=lease.lease_id,
        node=lease.node,
        policy_version=lease.policy_version,
        policy_root=lease.policy_root,
        slot=work.slot,
        tokens=tuple(token for _, ids in turns.spans for token in ids),
        spans=tuple(Span(int(kind), len(ids)) for kind, ids in turns.spans),
        logprobs=tuple(turns.logprobs),
        proofs=proofs,
        reward=reward,
        engine=descriptor,
        started_ms=started_ms,
        finished_ms=now_ms(),
    )
    return Drawn(trace, turns.seconds, turns.queued, turns.prefill, turns.tools)


async def _play(engine: EngineThread, work: SlotWork, held: HeldPolicy, tasks: Tasks) -> _Turns:
    """Turn and answer, until the rules of rollout.py say that the episode is over."""
    lease = work.lease
    environment, tokenizer = await tasks.environment(lease), await tasks.tokenizer(held)
    turns = _Turns()
    budget = rollout.turn_budget(lease.max_turn_tokens, lease.max_tokens, turns.used)
    began = trio.current_time()
    turn = await engine.first_turn(SequenceRequest(work.key, lease.prompt, work.seed, lease.temperature, budget))
    while True:
        over = trio.current_time()
        turns.add(turn, over - began)
        reply = rollout.reply_text(tokenizer, turn.tokens)
        turns.replies = (*turns.replies, reply or "")
        if reply is None:
            return turns
        observed = await tasks.ask(
            lease, rollout.next_observation, environment, tokenizer, lease.task_index, turns.replies
        )
        began = trio.current_time()
        turns.tools += began - over
        if observed is None or not rollout.has_room(observed, lease.max_tokens, turns.used):
            return turns
        turns.spans.append((SpanKind.OBSERVED, observed))
        budget = rollout.turn_budget(lease.max_turn_tokens, lease.max_tokens, turns.used)
        turn = await engine.next_turn(work.key, observed, budget)


def sealed(identity: Identity, trace: Trace) -> Signed:
    """The signed trace, read back as the trainer will read it: what this node signs, it is held to.

    Raises EngineError when it is not a trace that anyone would accept, for instance a logprob that is not finite.
    """
    signed = seal(identity, trace)
    try:
        codec.decode(Trace, signed.payload, most=limits.MAX_TRACE_BYTES)
    except DecodeError as error:
        raise EngineError(f"the engine drew what cannot be sent: {error}") from error
    return signed
