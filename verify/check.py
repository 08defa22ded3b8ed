"""The ordered checks of a trace, from envelope to proofs (SPEC 10.1): cheap before dear, each with its reason.

The trainer runs `cheap_checks` on every trace and `audit_checks` on those drawn for audit; `rlverify check` runs
both. Every verdict lists the same checks in the same order; after the first failure the rest are skipped.
Not here: the checks themselves, and what only a ledger knows (trainer/inbox.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from protocol.envelope import Signed
from protocol.environments.base import Environment
from protocol.environments.rollout import Codec
from protocol.lease import Lease
from protocol.trace import Trace
from protocol.verdict import Check, Reason
from verify.accounting import check_run, check_signature, lease_findings
from verify.environment import environment_findings, replay_trace
from verify.finding import Finding, as_check, first_failure, skipped
from verify.structure import PolicyShape, structure_findings
from verify.thresholds import Limits

if TYPE_CHECKING:
    from verify.evidence import Recomputed

CHEAP = (
    "signature", "run", "lease", "slot", "deadline", "structure", "length", "token range", "policy", "engine",
    "proof form", "stop rules", "observations", "reward",
)  # fmt: skip
DEAR = ("margins", "logprobs", "proofs")


@dataclass(frozen=True, slots=True)
class CheapResult:
    """`checks` are all of CHEAP in order. `reason` is None when all passed; then `reward` is the replay's."""

    checks: tuple[Check, ...]
    reason: Reason | None
    reward: float | None


def cheap_checks(
    signed: Signed,
    trace: Trace,
    lease: Lease,
    *,
    run: bytes,
    shape: PolicyShape,
    environment: Environment,
    tokenizer: Codec,
    received_ms: int | None,
) -> CheapResult:
    """Every check that needs no model (SPEC 10.1 steps 1 to 12).

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
    signed: Signed,
    trace: Trace,
    lease: Lease,
    run: bytes,
    shape: PolicyShape,
    environment: Environment,
    tokenizer: Codec,
    received_ms: int | None,
    reward: list[float],
) -> Iterator[Finding]:
    yield check_signature(signed, trace)
    yield check_run(trace, run)
    yield from lease_findings(trace, lease, received_ms)
    yield from structure_findings(trace, lease, shape)
    found = replay_trace(trace, lease, environment, tokenizer)
    reward.append(found.reward)
    yield from environment_findings(trace, found)


def audit_checks(trace: Trace, lease: Lease, ours: Recomputed, limits: Limits) -> tuple[Check, ...]:
    """The checks that need the policy (SPEC 10.1 steps 13 to 15): all of DEAR in order."""
    # Brings in torch, which a gateway that runs the cheap checks alone does not carry.
    from verify.evidence import evidence_findings

    return _in_order(DEAR, evidence_findings(trace, lease.temperature, ours, limits), "an earlier check failed")


def unaudited() -> tuple[Check, ...]:
    """DEAR for a trace that was not drawn for audit."""
    return tuple(skipped(name, "not drawn for audit") for name in DEAR)


def not_reached() -> tuple[Check, ...]:
    """DEAR for a trace that failed a check before them."""
    return tuple(skipped(name, "an earlier check failed") for name in DEAR)


def _in_order(names: tuple[str, ...], findings: Iterator[Finding], why: str) -> tuple[Check, ...]:
    checks: list[Check] = []
    for finding in findings:
        checks.append(as_check(finding))
        if not finding.passed:
            break
    done = {check.name for check in checks}
    return tuple(checks) + tuple(skipped(name, why) for name in names if name not in done)
