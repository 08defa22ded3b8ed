"""From evidence to a verdict: the cheap checks, then the recomputation (SPEC 10.1).

`recompute` is what the trainer's auditor runs too, so both judge by the same lines. A fault of this machine gives
NOT_JUDGED, never a refusal.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from protocol.environments.base import load
from protocol.environments.tokenizer import PolicyTokenizer
from protocol.errors import EngineError, EnvironmentFault, LocalError
from protocol.lease import Lease
from protocol.trace import Trace
from protocol.verdict import Check, Fingerprint, Outcome, Reason, outcome_of
from verify.check import NO_CALIBRATION, NO_MODEL, audit_checks, cheap_checks, not_reached, unaudited
from verify.evidence import Recomputed
from verify.files import Evidence, receipt_fits
from verify.finding import first_failure
from verify.report import Judged
from verify.structure import policy_shape
from verify.thresholds import limits_for
from verify.toploc import compare_many

if TYPE_CHECKING:
    from verify.prefill import Verifier


@cache
def software() -> str:
    """This rlcommons, as verdicts name it."""
    return importlib.metadata.version("rlcommons")


def recompute(verifier: Verifier, pairs: Sequence[tuple[Trace, Lease]]) -> list[Recomputed]:
    """Our own numbers for traces that passed the cheap checks, in the order given.

    Raises EngineError when this machine could not compute them.
    """
    from verify.prefill import Passage

    passages = []
    for trace, lease in pairs:
        seed = lease.seed_of(trace.slot)
        if seed is None:
            raise EngineError(f"slot {trace.slot} is not leased: the cheap checks were not run first")
        passages.append(Passage(lease.prompt, trace.tokens, trace.generated(), seed, lease.temperature))
    ours = verifier.recompute(passages)
    compared = compare_many([(each.hidden, trace.proofs) for each, (trace, _) in zip(ours, pairs, strict=True)])
    return [
        Recomputed(each.margins.numpy(), each.logprobs.numpy(), tuple(chunks))
        for each, chunks in zip(ours, compared, strict=True)
    ]


def fingerprint(verifier: Verifier | None) -> Fingerprint:
    """With what a verdict was computed; None where no model was run."""
    if verifier is None:
        return Fingerprint(software(), "", "", "")
    found = verifier.fingerprint
    engine = f"{found.engine} {found.engine_version}, torch {found.torch_version}"
    return Fingerprint(software(), engine[:64], found.dtype, found.device[:64])


def judge(evidence: Evidence, policy: Path, *, device: str = "cpu", with_model: bool = True) -> Judged:
    """The verdict of this machine on a trace file. `policy` must be the leased one (files.require_policy).

    Judged by the evidence's calibration, in the dtype of its verifier; without one by the limits of the trace's
    dtype, and without scores.
    """
    trace, lease = evidence.trace, evidence.lease
    receipt = evidence.receipt
    try:
        cheap = cheap_checks(
            evidence.signed_trace,
            trace,
            lease,
            run=evidence.run,
            shape=policy_shape(policy),
            environment=load(lease.environment, lease.parameters),
            tokenizer=PolicyTokenizer.load(policy),
            received_ms=receipt.received_ms if receipt is not None and receipt_fits(evidence) else None,
        )
    except EnvironmentFault as error:
        return _not_judged(Reason.ENVIRONMENT_FAULT, str(error))
    if cheap.reason is not None:
        return _judged(cheap.checks + not_reached(), audited=False, reward=None, verifier=None)
    if not with_model:
        return _judged(cheap.checks + unaudited(NO_MODEL), audited=False, reward=cheap.reward, verifier=None)
    from verify.prefill import Verifier

    measure = evidence.calibration
    dtype = trace.engine.dtype if measure is None else measure.calibration.pair.verifier_dtype
    try:
        verifier = Verifier(policy, dtype, device)
        ours = recompute(verifier, [(trace, lease)])[0]
    except LocalError as error:
        return _not_judged(Reason.VERIFIER_FAULT, str(error))
    if measure is None:
        named = evidence.verdict is not None and evidence.verdict.calibration is not None
        missing = "the verdict's calibration is not in the file" if named else NO_CALIBRATION
        dear = audit_checks(trace, lease, ours, limits_for(dtype, dtype), missing=missing)
    else:
        dear = audit_checks(trace, lease, ours, measure.calibration.limits, measure.calibration)
    judged = _judged(cheap.checks + dear.checks, audited=True, reward=cheap.reward, verifier=verifier)
    return replace(judged, scores=dear.scores, calibration=None if measure is None else measure.digest)


def _judged(checks: tuple[Check, ...], *, audited: bool, reward: float | None, verifier: Verifier | None) -> Judged:
    failure = first_failure(checks)
    reason, detail = (None, "") if failure is None else (failure.reason, failure.detail)
    return Judged(outcome_of(reason), reason, checks, audited, reward, fingerprint(verifier), detail)


def _not_judged(reason: Reason, detail: str) -> Judged:
    return Judged(Outcome.NOT_JUDGED, reason, (), False, None, fingerprint(None), detail)
