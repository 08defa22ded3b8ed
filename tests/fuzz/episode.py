"""An honest episode made without a model, edits of its trace, and the cheap checks over what comes out.

The proofs are of random states: the checks that need no model cannot tell. Not here: drawing (tests/studio.py).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from protocol import codec, limits
from protocol.envelope import seal
from protocol.environments import base
from protocol.environments.base import Environment
from protocol.environments.tokenizer import PolicyTokenizer
from protocol.identity import Identity
from protocol.lease import Lease, Slot
from protocol.trace import EngineDescriptor, Span, SpanKind, Trace
from protocol.verdict import Check, CheckOutcome
from verify.check import CHEAP, cheap_checks
from verify.structure import PolicyShape, policy_shape
from verify.toploc import build_proofs

EMBEDDED = Path(__file__).parent.parent.parent / "trainer" / "embedded"
NODE = Identity(b"\x31" * 32)
TASK = 7
REPLIES = ("<|call|>add 20 22", "<|answer|>42")


@dataclass(frozen=True)
class Stage:
    """An honest trace and all that the cheap checks hold it against."""

    node: Identity
    lease: Lease
    shape: PolicyShape
    environment: Environment
    tokenizer: PolicyTokenizer
    honest: Trace

    def addressed(self, trace: Trace) -> Trace:
        """The trace as an answer to this stage's lease."""
        ours = self.honest
        return replace(
            trace, run=ours.run, lease_id=ours.lease_id, node=ours.node, slot=ours.slot,
            policy_version=ours.policy_version, policy_root=ours.policy_root,
        )  # fmt: skip

    def judge(self, trace: Trace) -> Check | None:
        """The check that fails. Whatever the trace holds, the checks are all there and fit into a verdict."""
        result = cheap_checks(
            seal(self.node, trace), trace, self.lease, run=self.lease.run, shape=self.shape,
            environment=self.environment, tokenizer=self.tokenizer, received_ms=self.lease.issued_ms + 1,
        )  # fmt: skip
        assert tuple(check.name for check in result.checks) == CHEAP
        for check in result.checks:
            assert codec.decode(Check, codec.encode(check)) == check
        failed = [check for check in result.checks if check.outcome is CheckOutcome.FAILED]
        assert [check.reason for check in failed] == ([] if result.reason is None else [result.reason])
        assert (result.reward is not None and math.isfinite(result.reward)) is (not failed)
        return failed[0] if failed else None


def made_stage() -> Stage:
    """tools8@1 under the embedded policy, played by hand."""
    tokenizer = PolicyTokenizer.load(EMBEDDED)
    environment = base.load("tools8@1")
    lease = Lease(
        run=b"\x01" * 32, lease_id=b"\x02" * 16, node=NODE.node, policy_version=0, policy_root=b"\x03" * 32,
        environment="tools8@1", parameters="", task_index=TASK, group_id=b"\x04" * 16, group_size=8,
        slots=(Slot(0, 5),), prompt=tokenizer.prompt_ids(environment.prompt(TASK)), temperature=1.0,
        max_turn_tokens=32, max_tokens=256, issued_ms=1_000, deadline_ms=9_000,
    )  # fmt: skip
    shape = policy_shape(EMBEDDED)
    return Stage(NODE, lease, shape, environment, tokenizer, _played(lease, shape, environment, tokenizer))


def _played(lease: Lease, shape: PolicyShape, environment: Environment, tokenizer: PolicyTokenizer) -> Trace:
    tokens: list[int] = []
    spans: list[Span] = []
    for turn, text in enumerate(REPLIES):
        drawn = (*tokenizer.encode(text), min(tokenizer.stop_ids))
        shown = environment.step(lease.task_index, REPLIES[: turn + 1])
        observed = () if shown is None else tokenizer.observation_ids(shown)
        tokens += (*drawn, *observed)
        spans += [Span(SpanKind.GENERATED, len(drawn))] + [Span(SpanKind.OBSERVED, len(observed))] * bool(observed)
    generated = sum(span.length for span in spans if span.kind == SpanKind.GENERATED)
    states = np.random.default_rng(1).integers(0x3000, 0x4000, (generated, shape.hidden_size), dtype=np.uint16)
    return Trace(
        run=lease.run, lease_id=lease.lease_id, node=lease.node, policy_version=0, policy_root=lease.policy_root,
        slot=0, tokens=tuple(tokens), spans=tuple(spans), logprobs=(-0.5,) * generated, proofs=build_proofs(states),
        reward=environment.reward(lease.task_index, REPLIES),
        engine=EngineDescriptor("reference", "1", "float32", "cpu", "reference"), started_ms=2_000, finished_ms=3_000,
    )  # fmt: skip


# --- edits ---

EDIT = struct.Struct("<BHBI")  # what, where, how many places it takes, value
_MOST_EDITS = 24
_LONG = 2_048  # tokens by repetition: longer ones find no more and cost the drivers their speed


def edited(trace: Trace, script: bytes) -> Trace:
    """The trace after the edits of a script of any bytes; it can still be encoded."""
    for what, place, taken, value in list(EDIT.iter_unpack(script[: len(script) // EDIT.size * EDIT.size]))[
        :_MOST_EDITS
    ]:
        trace = _EDITS[what % len(_EDITS)](trace, place, taken, value)
    return trace


def _put(items: tuple[Any, ...], place: int, taken: int, item: Any, most: int) -> tuple[Any, ...]:
    """`taken` mod 8 items from `place` on replaced by `taken` div 8 copies of `item`."""
    place %= len(items) + 1
    return (*items[:place], *[item] * (taken // 8), *items[place + taken % 8 :])[:most]


def _tokens(trace: Trace, place: int, taken: int, value: int) -> Trace:
    return replace(trace, tokens=_put(trace.tokens, place, taken, value, limits.MAX_TRACE_TOKENS))


def _spans(trace: Trace, place: int, taken: int, value: int) -> Trace:
    span = Span(value % 2, (value >> 1) % (limits.MAX_TRACE_TOKENS + 1))
    return replace(trace, spans=_put(trace.spans, place, taken, span, limits.MAX_SPANS))


def _logprobs(trace: Trace, place: int, taken: int, value: int) -> Trace:
    (logprob,) = struct.unpack("<f", value.to_bytes(4, "little"))
    logprob = logprob if math.isfinite(logprob) else 0.0
    return replace(trace, logprobs=_put(trace.logprobs, place, taken, logprob, limits.MAX_TRACE_TOKENS))


def _proofs(trace: Trace, place: int, taken: int, value: int) -> Trace:
    proof = value.to_bytes(4, "little") * 64 + b"\xff\xd9"
    return replace(trace, proofs=_put(trace.proofs, place, taken, proof[: value % 259], limits.MAX_PROOFS))


def _proof_bytes(trace: Trace, place: int, taken: int, value: int) -> Trace:
    if not trace.proofs:
        return trace
    proof = trace.proofs[taken % len(trace.proofs)]
    start = place % (len(proof) + 1)
    changed = (proof[:start] + value.to_bytes(2, "big") + proof[start + 2 :])[:258] if value < 2**16 else proof[:start]
    return replace(trace, proofs=tuple(changed if each is proof else each for each in trace.proofs))


def _times(trace: Trace, place: int, taken: int, value: int) -> Trace:
    return replace(trace, started_ms=value << taken % 33, finished_ms=place << taken % 33)


def _words(trace: Trace, place: int, taken: int, value: int) -> Trace:
    dtype = ("float32", "bfloat16", "", "\ud7ff\0’", "float16")[place % 5]
    rewards = (0.0, 1.0, -0.0, 1e308, -1e308, 5e-324, value / 7)
    engine = replace(trace.engine, dtype=dtype)
    return replace(trace, engine=engine, reward=rewards[taken % len(rewards)], slot=value % limits.MAX_GROUP_SIZE)


def _longer(trace: Trace, place: int, taken: int, value: int) -> Trace:
    return replace(trace, tokens=(trace.tokens * (1 + taken % 16))[:_LONG])


def _made_to_fit(trace: Trace, place: int, taken: int, value: int) -> Trace:
    """The last span takes what is left; as many logprobs and proofs as that needs. So the replay is reached."""
    spans = list(trace.spans[:-1])
    rest = len(trace.tokens) - sum(span.length for span in spans)
    if rest > 0 and len(spans) < limits.MAX_SPANS:
        spans.append(Span(len(spans) % 2, rest))
    drawn = min(sum(span.length for span in spans if span.kind == 0), limits.MAX_TRACE_TOKENS)
    logprobs = (*trace.logprobs, *[-1.0] * drawn)[:drawn]
    proofs = [*trace.proofs, *[trace.proofs[0] if trace.proofs else b""] * -(-drawn // 32)][: -(-drawn // 32)]
    return replace(trace, spans=tuple(spans), logprobs=logprobs, proofs=tuple(proofs))


_EDITS: tuple[Callable[[Trace, int, int, int], Trace], ...] = (
    _tokens,
    _spans,
    _logprobs,
    _proofs,
    _proof_bytes,
    _times,
    _words,
    _longer,
    _made_to_fit,
)
