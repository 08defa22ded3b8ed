"""The ordered checks of a trace, from envelope to proofs (SPEC 10.1): cheap before dear, each with its reason.

The trainer runs `cheap_checks` on every trace and `audit_checks` on those drawn for audit; `rlverify check` runs
both. Every verdict lists the same checks in the same order; after the first failure the rest are skipped.
Not here: the checks themselves, and what only a ledger knows (trainer/inbox.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from protocol.calibration import Calibration, Limits
from protocol.envelope import Signed
from protocol.environments.base import Environment
from protocol.environments.rollout import Codec
from protocol.lease import Lease
from protocol.limits import NODE_EVIDENCE_NATS
from protocol.trace import Trace
from protocol.verdict import Check, Reason
from verify.accounting import check_run, check_signature, lease_findings
from verify.environment import environment_findings, replay_trace
from verify.finding import Finding, as_check, blames, first_failure, passed, skipped
from verify.structure import PolicyShape, structure_findings

if TYPE_CHECKING:
    from verify.evidence import Recomputed

CHEAP = (
    "signature", "run", "lease", "slot", "deadline", "structure", "length", "token range", "policy", "engine",
    "proof form", "stop rules", "observations", "reward",
)  # fmt: skip
DEAR = ("margins", "margin score", "logprobs", "proofs", "proof score", "node")


NO_CALIBRATION: Final = "no calibration for this pair of engines"
NEEDS_LOG: Final = "needs the run's log"
NOT_DRAWN: Final = "not drawn for audit"
NO_MODEL: Final = "--no-model was given"


@dataclass(frozen=True, slots=True)
class Audited:
    """`checks` are all of DEAR in order. `scores` are the trace's S_j (SPEC 10.8), also where a check failed; empty
    without a calibration."""

    checks: tuple[Check, ...]
    scores: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class CheapResult:
    """`checks` are all of CHEAP in order. `reason` is None when all passed; then `reward` is the replay's."""

    checks: tuple[Check, ...]
    reason: Reason | None
    reward: float | None


def cheap_checks(
    signed: Signed | None,
    trace: Trace,
    lease: Lease,
    *,
    run: bytes,
    shape: PolicyShape,
    environment: Environment,
    tokenizer: Codec,
    received_ms: int | None,
) -> CheapResult:
    """Every check that needs no model (SPEC 10.1 steps 1 to 12). `signed` None: the signature was verified, and its
    signer is the trace's node; that is a quarter of what the others take together.

    Raises EnvironmentFault or PolicyError when the replay fails on this side: the trace is then not judged.
    """
    reward: list[float] = []
    findings = _cheap_findings(signed, trace, lease, run, shape, environment, tokenizer, received_ms, reward)
    checks = _in_order(CHEAP, findings, "an earlier check failed")
    failure = first_failure(checks)
    if failure is not None:
        return CheapResult(checks, failure.reason, None)
    return CheapResult(checks, None, reward[0])


def _cheap_findings(
    signed: Signed | None,
    trace: Trace,
    lease: Lease,
    run: bytes,
    shape: PolicyShape,
    environment: Environment,
    tokenizer: Codec,
    received_ms: int | None,
    reward: list[float],
) -> Iterator[Finding]:
    yield passed("signature") if signed is None else check_signature(signed, trace)
    yield check_run(trace, run)
    yield from lease_findings(trace, lease, received_ms)
    yield from structure_findings(trace, lease, shape)
    found = replay_trace(trace, lease, environment, tokenizer)
    reward.append(found.reward)
    yield from environment_findings(trace, found)


def audit_checks(
    trace: Trace,
    lease: Lease,
    ours: Recomputed,
    limits: Limits,
    calibration: Calibration | None = None,
    *,
    missing: str = NO_CALIBRATION,
) -> Audited:
    """The checks that need the policy (SPEC 10.1 steps 13 to 18). `limits` are the calibration's where there is one;
    `missing` says why there is none.

    `node` is SKIPPED: only who has the run's log can do it, with `node_check`.
    """
    # Brings in torch, which a gateway that runs the cheap checks alone does not carry.
    from verify.evidence import evidence_findings, score_findings
    from verify.scores import trace_scores

    findings = {each.name: each for each in evidence_findings(trace, lease.temperature, ours, limits)}
    scores: tuple[float, ...] = ()
    if calibration is not None:
        scores = trace_scores(calibration, ours.margins, lease.temperature, ours.chunks)
        findings |= {each.name: each for each in score_findings(trace, ours, calibration, scores)}
        missing = NEEDS_LOG
    ordered = (as_check(findings[name]) if name in findings else skipped(name, missing) for name in DEAR)
    return Audited(_until_failure(ordered), scores)


def node_check(scores: Sequence[float], previous: Sequence[float], provisional: bool = False) -> Check:
    """Step 18: the last of DEAR, for who has the run's log. scores: of this trace. previous: the sums over the
    node's earlier traces of this policy version and calibration, empty for none. provisional: that calibration is."""
    from verify.scores import node_evidence

    found = node_evidence(previous, scores)
    detail = f"evidence of {found:.2f} nats, this trace and those before it together"
    told = Reason.PAIR_EVIDENCE if provisional else Reason.NODE_EVIDENCE
    reason = told if found > NODE_EVIDENCE_NATS else None
    return as_check(Finding("node", reason, detail, found, NODE_EVIDENCE_NATS))


def with_node(
    checks: tuple[Check, ...], scores: Sequence[float], previous: Sequence[float], provisional: bool = False
) -> tuple[Check, ...]:
    """The checks of a verdict, or DEAR alone, with `node` carried out where it may be: there are scores, and no
    earlier check failed."""
    if not scores or first_failure(checks) is not None:
        return checks
    found = node_check(scores, previous, provisional)
    return tuple(found if check.name == "node" else check for check in checks)


def unaudited(why: str = NOT_DRAWN) -> tuple[Check, ...]:
    """DEAR for a trace that no model was run for."""
    return tuple(skipped(name, why) for name in DEAR)


def not_reached() -> tuple[Check, ...]:
    """DEAR for a trace that failed a check before them."""
    return tuple(skipped(name, "an earlier check failed") for name in DEAR)


def _until_failure(checks: Iterable[Check]) -> tuple[Check, ...]:
    kept: list[Check] = []
    for check in checks:
        failed = first_failure(kept)
        ended = failed is not None and blames(failed)
        kept.append(skipped(check.name, "an earlier check failed") if ended else check)
    return tuple(kept)


def _in_order(names: tuple[str, ...], findings: Iterator[Finding], why: str) -> tuple[Check, ...]:
    checks: list[Check] = []
    for finding in findings:
        checks.append(as_check(finding))
        if not finding.passed:
            break
    done = {check.name for check in checks}
    return tuple(checks) + tuple(skipped(name, why) for name in names if name not in done)
