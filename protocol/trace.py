"""Traces: what a node says it drew under a lease, with the evidence (SPEC 8.6), and the file that
carries one to an auditor (SPEC 8.9).

Token ids are the truth; text is never re-encoded. Not here: whether a trace is honest (verify/).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated, ClassVar

from protocol import codec, identity, limits
from protocol.envelope import Signed


class SpanKind(IntEnum):
    GENERATED = 0  # drawn by the policy
    OBSERVED = 1  # the environment's answer, as token ids


@dataclass(frozen=True, slots=True)
class Span:
    """A run of tokens of one kind. Spans alternate, begin with GENERATED and cover `tokens` exactly."""

    kind: Annotated[int, codec.UInt(1)]
    length: Annotated[int, codec.UInt(limits.MAX_TRACE_TOKENS)]


@dataclass(frozen=True, slots=True)
class EngineDescriptor:
    """What drew the tokens. `dtype` decides in which precision the audit recomputes."""

    name: Annotated[str, codec.Text(64)]  # "transformers", "vllm"
    version: Annotated[str, codec.Text(64)]
    dtype: Annotated[str, codec.Text(16)]  # "float32", "bfloat16"
    device: Annotated[str, codec.Text(64)]  # "cpu", "cuda:NVIDIA H200"
    runner: Annotated[str, codec.Text(64)]  # which sampler path: "reference", "vllm-v2", …


@dataclass(frozen=True, slots=True)
class Trace:
    """SPEC 8.6. Signed by the node. `tokens` begin after the lease's prompt."""

    DOMAIN: ClassVar[bytes] = identity.DOMAIN_TRACE

    run: Annotated[bytes, codec.Bytes(32)]
    lease_id: Annotated[bytes, codec.Bytes(16)]
    node: Annotated[bytes, codec.Bytes(identity.NODE_ID_BYTES)]
    policy_version: Annotated[int, codec.UInt()]
    policy_root: Annotated[bytes, codec.Bytes(32)]
    slot: Annotated[int, codec.UInt(limits.MAX_GROUP_SIZE - 1)]
    tokens: Annotated[tuple[int, ...], codec.Tokens(limits.MAX_TRACE_TOKENS)]
    spans: Annotated[tuple[Span, ...], codec.Many(codec.Object(Span), limits.MAX_SPANS)]
    logprobs: Annotated[tuple[float, ...], codec.Floats(limits.MAX_TRACE_TOKENS)]  # one a generated token
    proofs: Annotated[tuple[bytes, ...], codec.Many(codec.Bytes(0, 2 + 2 * limits.PROOF_TOP_K), limits.MAX_PROOFS)]
    reward: Annotated[float, codec.Real()]  # telemetry: the trainer computes its own
    engine: Annotated[EngineDescriptor, codec.Object(EngineDescriptor)]
    started_ms: Annotated[int, codec.UInt()]
    finished_ms: Annotated[int, codec.UInt()]

    def pieces(self) -> tuple[tuple[SpanKind, tuple[int, ...]], ...]:
        """The tokens cut at the spans: (kind, ids) in order. Spans must cover the tokens."""
        result = []
        start = 0
        for span in self.spans:
            result.append((SpanKind(span.kind), self.tokens[start : start + span.length]))
            start += span.length
        return tuple(result)

    def generated(self) -> tuple[int, ...]:
        """Offsets into `tokens` of the generated ones, ascending."""
        offsets: list[int] = []
        start = 0
        for span in self.spans:
            if span.kind == SpanKind.GENERATED:
                offsets.extend(range(start, start + span.length))
            start += span.length
        return tuple(offsets)


@dataclass(frozen=True, slots=True)
class TraceFile:
    """SPEC 8.9: everything an auditor needs beside the policy folder. `rlverify check` reads it."""

    genesis: Annotated[Signed, codec.Object(Signed)]
    lease: Annotated[Signed, codec.Object(Signed)]
    trace: Annotated[Signed, codec.Object(Signed)]
    receipt: Annotated[Signed | None, codec.Maybe(codec.Object(Signed))]
    verdict: Annotated[Signed | None, codec.Maybe(codec.Object(Signed))]
    calibration: Annotated[Signed | None, codec.Maybe(codec.Object(Signed))]  # the one the verdict names
