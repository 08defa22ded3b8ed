"""Do the parts of a trace fit together, and are they of the policy that was leased? Needs no model
(SPEC 10.1 steps 4 to 9).

Not covered: whether turns stop where they must and what the environment says (environment.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from protocol.errors import PolicyError
from protocol.lease import Lease
from protocol.outputs import cause
from protocol.trace import SpanKind, Trace
from protocol.verdict import Reason
from verify.finding import Finding, passed
from verify.thresholds import measured_dtypes
from verify.toploc import ProofError, check_form


@dataclass(frozen=True, slots=True)
class PolicyShape:
    """What the checks need to know of a policy without loading it."""

    vocabulary_size: int
    hidden_size: int


def policy_shape(folder: Path) -> PolicyShape:
    """Read from config.json (a multimodal policy's `text_config` counts). Raises PolicyError."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        text = config.get("text_config", config)
        sizes = int(text["vocab_size"]), int(text["hidden_size"])
        if min(sizes) < 1:
            raise ValueError
        return PolicyShape(*sizes)
    except OSError as error:
        raise PolicyError(f"{path} cannot be read: {cause(error)}: save the model there again") from None
    except (ValueError, LookupError, ArithmeticError, TypeError, AttributeError, RecursionError):
        raise PolicyError(
            f"{path} does not give vocab_size and hidden_size as whole numbers above 0: it is no config.json of a "
            "language model; save the model there again (`model.save_pretrained`)"
        ) from None


def structure_findings(trace: Trace, lease: Lease, shape: PolicyShape) -> Iterator[Finding]:
    """Steps 4 to 9 of SPEC 10.1, in order."""
    yield _check_spans(trace)
    yield _check_length(trace, lease)
    yield _check_token_range(trace, shape)
    yield _check_policy(trace, lease)
    yield _check_engine(trace)
    yield _check_proof_form(trace, shape)


def _check_spans(trace: Trace) -> Finding:
    # SPEC 10.1 step 4: spans alternate, begin with GENERATED, are not empty and cover the tokens exactly;
    # there is one logprob a generated token, not above 0.
    kinds = [span.kind for span in trace.spans]
    covered = sum(span.length for span in trace.spans)
    generated = sum(span.length for span in trace.spans if span.kind == SpanKind.GENERATED)
    expected = [SpanKind.GENERATED if place % 2 == 0 else SpanKind.OBSERVED for place in range(len(kinds))]
    faults = (
        (not trace.tokens, "the trace is empty"),
        (kinds != expected, "spans do not alternate beginning with a generated one"),
        (any(span.length == 0 for span in trace.spans), "a span is empty"),
        (covered != len(trace.tokens), f"spans cover {covered} tokens of {len(trace.tokens)}"),
        (len(trace.logprobs) != generated, f"{len(trace.logprobs)} logprobs for {generated} generated tokens"),
        (max(trace.logprobs, default=0.0) > 0, "a logprob is above 0"),
        (trace.finished_ms < trace.started_ms, "it was finished before it was started"),
    )
    fault = next((text for found, text in faults if found), None)
    return passed("structure") if fault is None else Finding("structure", Reason.STRUCTURE, fault)


def _check_length(trace: Trace, lease: Lease) -> Finding:
    # SPEC 10.1 step 5: no more tokens after the prompt than the lease allows.
    value, limit = float(len(trace.tokens)), float(lease.max_tokens)
    if value > limit:
        detail = f"{len(trace.tokens)} tokens, the lease allows {lease.max_tokens}"
        return Finding("length", Reason.TOO_LONG, detail, value, limit, (lease.max_tokens, len(trace.tokens)))
    return passed("length", value=value, limit=limit)


def _check_token_range(trace: Trace, shape: PolicyShape) -> Finding:
    # SPEC 10.1 step 6: every token id is below the policy's vocabulary size.
    worst = max(trace.tokens, default=0)
    limit = float(shape.vocabulary_size - 1)
    if worst >= shape.vocabulary_size:
        place = trace.tokens.index(worst)
        detail = f"token id {worst}, the policy has {shape.vocabulary_size}"
        return Finding("token range", Reason.TOKEN_RANGE, detail, float(worst), limit, (place, place + 1))
    return passed("token range", value=float(worst), limit=limit)


def _check_policy(trace: Trace, lease: Lease) -> Finding:
    # SPEC 10.1 step 7: drawn from the leased version and root.
    if (trace.policy_version, trace.policy_root) != (lease.policy_version, lease.policy_root):
        return Finding(
            "policy",
            Reason.POLICY,
            f"drawn from version {trace.policy_version} ({trace.policy_root.hex()[:16]}…), "
            f"leased was {lease.policy_version} ({lease.policy_root.hex()[:16]}…)",
        )
    return passed("policy")


def _check_engine(trace: Trace) -> Finding:
    # SPEC 10.1 step 8: an audit recomputes in the worker's dtype, so it must be one that limits exist for.
    dtype = trace.engine.dtype
    if dtype not in measured_dtypes():
        known = ", ".join(measured_dtypes())
        return Finding("engine", Reason.ENGINE, f"computed in {dtype!r:.20}, limits exist for {known}")
    return passed("engine", dtype)


def _check_proof_form(trace: Trace, shape: PolicyShape) -> Finding:
    # SPEC 10.1 step 9: exactly ⌈L/32⌉ proofs, each of its exact length and decodable.
    try:
        check_form(trace.proofs, len(trace.logprobs), shape.hidden_size)
    except ProofError as error:
        return Finding("proof form", Reason.PROOF_FORM, str(error))
    return passed("proof form", f"{len(trace.proofs)} proofs")
