"""Receipts and verdicts, and the closed list of reasons (SPEC 8.7, 8.8, 11.2)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, ClassVar, Final

from protocol import codec, identity, limits
from protocol.errors import Code, DecodeError


class Outcome(StrEnum):
    ACCEPTED = "ACCEPTED"
    REFUSED = "REFUSED"
    NOT_JUDGED = "NOT_JUDGED"  # a fault of ours; never counts against the node


class Reason(StrEnum):
    """Why a trace was refused or not judged. Append-only (SPEC 11.2), in the order of the checks."""

    SIGNATURE = "SIGNATURE"  # not signed by the node it names
    WRONG_RUN = "WRONG_RUN"
    LEASE_UNKNOWN = "LEASE_UNKNOWN"
    LEASE_NOT_YOURS = "LEASE_NOT_YOURS"
    LEASE_EXPIRED = "LEASE_EXPIRED"
    LEASE_REDEEMED = "LEASE_REDEEMED"  # the slot was answered before, with other bytes
    SLOT_NOT_LEASED = "SLOT_NOT_LEASED"
    STRUCTURE = "STRUCTURE"  # spans, lengths or counts that do not fit together
    TOO_LONG = "TOO_LONG"  # more tokens than the lease allows
    TOKEN_RANGE = "TOKEN_RANGE"  # an id outside the policy's vocabulary
    POLICY = "POLICY"  # another version or root than leased
    ENGINE = "ENGINE"  # of a dtype nobody has measured limits for
    STOP_RULE = "STOP_RULE"  # tokens after a stop token, or stopped too early
    OBSERVATION = "OBSERVATION"  # replay gives other observed tokens
    REWARD = "REWARD"  # replay gives another reward
    MARGIN = "MARGIN"  # not the tokens this policy and this seed allow
    LOGPROB = "LOGPROB"  # claimed logprobs are not the policy's
    PROOF_FORM = "PROOF_FORM"  # missing, extra or malformed proofs
    PROOF = "PROOF"  # activations differ
    NODE_EVIDENCE = "NODE_EVIDENCE"  # within limits, but not together with the node's other traces of this policy
    # not judged
    PAIR_EVIDENCE = "PAIR_EVIDENCE"  # as NODE_EVIDENCE or a score, by a provisional calibration
    VERIFIER_FAULT = "VERIFIER_FAULT"
    ENVIRONMENT_FAULT = "ENVIRONMENT_FAULT"
    POLICY_UNAVAILABLE = "POLICY_UNAVAILABLE"
    POLICY_MOVED_ON = "POLICY_MOVED_ON"  # staler than the learner may use


NOT_JUDGED_REASONS: Final = frozenset(
    {
        Reason.PAIR_EVIDENCE,
        Reason.VERIFIER_FAULT,
        Reason.ENVIRONMENT_FAULT,
        Reason.POLICY_UNAVAILABLE,
        Reason.POLICY_MOVED_ON,
    }
)


def outcome_of(reason: Reason | None) -> Outcome:
    """The outcome that goes with a verdict's reason (SPEC 11.2)."""
    if reason is None:
        return Outcome.ACCEPTED
    return Outcome.NOT_JUDGED if reason in NOT_JUDGED_REASONS else Outcome.REFUSED


class CheckOutcome(StrEnum):
    PASSED = "PASSED"
    FAILED = "FAILED"
    SKIPPED = "SKIPPED"  # an earlier check failed, or the trace was not drawn for audit


@dataclass(frozen=True, slots=True)
class Check:
    """One check in order: what was measured, the limit, and where in `tokens` (SPEC 8.8)."""

    name: Annotated[str, codec.Text(64)]
    outcome: Annotated[CheckOutcome, codec.Choice(CheckOutcome)]
    reason: Annotated[Reason | None, codec.Maybe(codec.Choice(Reason))]
    value: Annotated[float | None, codec.Maybe(codec.Real())]
    limit: Annotated[float | None, codec.Maybe(codec.Real())]
    start: Annotated[int | None, codec.Maybe(codec.UInt())]
    end: Annotated[int | None, codec.Maybe(codec.UInt())]
    detail: Annotated[str, codec.Text(limits.MAX_TEXT_CHARACTERS)]


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """With what a verdict was computed. Empty strings where no model was run."""

    software: Annotated[str, codec.Text(64)]  # rlcommons version
    engine: Annotated[str, codec.Text(64)]
    dtype: Annotated[str, codec.Text(16)]
    device: Annotated[str, codec.Text(64)]


@dataclass(frozen=True, slots=True)
class Receipt:
    """SPEC 8.7. The trainer has the trace on disk. Signed before it is decided whether to audit."""

    DOMAIN: ClassVar[bytes] = identity.DOMAIN_RECEIPT

    run: Annotated[bytes, codec.Bytes(32)]
    trace_digest: Annotated[bytes, codec.Bytes(32)]
    lease_id: Annotated[bytes, codec.Bytes(16)]
    slot: Annotated[int, codec.UInt(limits.MAX_GROUP_SIZE - 1)]
    node: Annotated[bytes, codec.Bytes(identity.NODE_ID_BYTES)]
    received_ms: Annotated[int, codec.UInt()]
    sequence: Annotated[int, codec.UInt()]  # position in the trainer's log of submissions


@dataclass(frozen=True, slots=True)
class Verdict:
    """SPEC 8.8. Signed by the trainer. `reason` is nil exactly when ACCEPTED."""

    DOMAIN: ClassVar[bytes] = identity.DOMAIN_VERDICT

    run: Annotated[bytes, codec.Bytes(32)]
    trace_digest: Annotated[bytes, codec.Bytes(32)]
    lease_id: Annotated[bytes, codec.Bytes(16)]
    slot: Annotated[int, codec.UInt(limits.MAX_GROUP_SIZE - 1)]
    node: Annotated[bytes, codec.Bytes(identity.NODE_ID_BYTES)]
    policy_version: Annotated[int, codec.UInt()]
    policy_root: Annotated[bytes, codec.Bytes(32)]
    outcome: Annotated[Outcome, codec.Choice(Outcome)]
    reason: Annotated[Reason | None, codec.Maybe(codec.Choice(Reason))]
    audited: Annotated[bool, codec.Flag()]
    reward: Annotated[float | None, codec.Maybe(codec.Real())]
    checks: Annotated[tuple[Check, ...], codec.Many(codec.Object(Check), limits.MAX_CHECKS)]
    # SPEC 10.8: digest of the Calibration it was judged by, and the trace's score against each of its alternatives,
    # those of margins first. Nil and empty where none was used.
    calibration: Annotated[bytes | None, codec.Maybe(codec.Bytes(32))]
    scores: Annotated[tuple[float, ...], codec.Many(codec.Real(), 2 * limits.MAX_ALTERNATIVES)]
    verifier: Annotated[Fingerprint, codec.Object(Fingerprint)]
    judged_ms: Annotated[int, codec.UInt()]


def may_replace(later: Verdict, earlier: Verdict) -> bool:
    """SPEC 8.8: whether a trainer may give `later` on a trace it gave `earlier` on. One case is a re-audit: whether
    the node asked for one, and once, the two verdicts do not say."""
    if earlier.outcome is Outcome.NOT_JUDGED:
        return True
    if not later.audited or later.outcome is Outcome.NOT_JUDGED:
        return False
    return not earlier.audited or earlier.outcome is Outcome.REFUSED or later.reason is Reason.NODE_EVIDENCE


def check_verdict(verdict: Verdict) -> None:
    """SPEC 8.8: outcome, reason and checks tell one story. Raises DecodeError(MALFORMED)."""
    if verdict.outcome is not outcome_of(verdict.reason):
        raise DecodeError(Code.MALFORMED, f"a verdict cannot be {verdict.outcome} for the reason {verdict.reason}")
    if verdict.scores and (verdict.calibration is None or not verdict.audited):
        raise DecodeError(Code.MALFORMED, "a verdict with scores names no calibration, or was not audited")
    for check in verdict.checks:
        if (check.outcome is CheckOutcome.FAILED) != (check.reason is not None):
            raise DecodeError(Code.MALFORMED, f"check {check.name}: {check.outcome}, reason {check.reason}")
