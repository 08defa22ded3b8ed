"""Verdicts for people and for scripts, whether two of them agree (SPEC 14), and calibrations for people.

Not here: reaching a verdict (judge.py).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protocol import codec, identity
from protocol.calibration import Calibration, Limits, Pair, Sample
from protocol.limits import NODE_EVIDENCE_NATS, PROOF_CHUNK_TOKENS
from protocol.outputs import printable
from protocol.verdict import Check, CheckOutcome, Fingerprint, Outcome, Reason, Verdict
from verify.finding import first_failure


@dataclass(frozen=True, slots=True)
class Judged:
    """What this machine found of one trace. `audited`: the checks that need the policy were run."""

    outcome: Outcome
    reason: Reason | None
    checks: tuple[Check, ...]
    audited: bool
    reward: float | None
    verifier: Fingerprint
    detail: str = ""
    calibration: bytes | None = None  # digest of the one it was judged by
    scores: tuple[float, ...] = ()  # SPEC 10.8


def disagreement(ours: Judged, digest: bytes, theirs: Verdict) -> str | None:
    """Why the trainer's verdict is not ours, naming the check; None when they agree.

    Measured values may differ within the limits, so outcomes are compared, check by check; a check only one
    side ran is no disagreement.
    """
    if theirs.trace_digest != digest:
        return f"it is on another trace, {theirs.trace_digest.hex()[:16]}…; this one is {digest.hex()[:16]}…"
    mine = {check.name: check for check in ours.checks}
    for check in theirs.checks:
        other = mine.get(check.name)
        if other is None or CheckOutcome.SKIPPED in (check.outcome, other.outcome):
            continue
        if other.outcome is not check.outcome:
            return f"disagrees at check '{check.name}': the trainer says {check.outcome}, here it is {other.outcome}"
    if theirs.outcome is Outcome.NOT_JUDGED or unchecked(ours, theirs) is not None:
        return None
    if ours.outcome is not theirs.outcome and (theirs.audited or ours.outcome is Outcome.ACCEPTED):
        return f"disagrees: the trainer says {_said(theirs)}, here it is {_said(ours)}"
    return _wrong_reward(ours, theirs)


def _wrong_reward(ours: Judged, theirs: Verdict) -> str | None:
    """SPEC 8.8: an accepted trace's reward is the trainer's own, from the replay."""
    if theirs.outcome is not Outcome.ACCEPTED or ours.reward is None:
        return None
    if theirs.reward is not None and math.isclose(theirs.reward, ours.reward, rel_tol=1e-6, abs_tol=1e-6):
        return None
    said = "none" if theirs.reward is None else f"{theirs.reward}"
    return f"disagrees about the reward: the trainer says {said}, here it is {ours.reward}"


def _said(verdict: Judged | Verdict) -> str:
    return f"{verdict.outcome}" if verdict.reason is None else f"{verdict.outcome} ({verdict.reason})"


def unchecked(ours: Judged, theirs: Verdict) -> str | None:
    """Why the check by which the trainer refused could not be repeated here; None where it could, or none failed."""
    failed = first_failure(theirs.checks)
    skip = None if failed is None else next((check for check in ours.checks if check.name == failed.name), None)
    if skip is None or skip.outcome is not CheckOutcome.SKIPPED or ours.reason is not None:
        return None
    return f"check '{skip.name}' was not repeated here: {skip.detail}"


def worth_knowing(ours: Judged, pair: Pair) -> tuple[str, ...]:
    """What is no reason to refuse, of a calibration's pair that these checks were run by."""
    device, engine = ours.verifier.device.partition(":")[0], ours.verifier.engine.partition(" ")[0]
    if not ours.audited or (engine, device) == (pair.verifier_engine, pair.verifier_device):
        return ()
    # SPEC 10.6: what fits a trace is settled by its worker; another verifier only measures a little otherwise.
    return (
        f"the calibration was measured by {pair.verifier_engine} on {pair.verifier_device} and is used here by "
        f"{engine} on {device}: values near a limit may fall on its other side; recompute there, or calibrate "
        "here with `rlverify calibrate` and give --calibration",
    )


def as_json(ours: Judged, digest: bytes, theirs: Verdict | None, notes: Sequence[str] = ()) -> dict[str, Any]:
    """SPEC 14: the JSON verdict of `rlverify check --json`."""
    why = None if theirs is None else disagreement(ours, digest, theirs)
    return {
        "spec": "1.0",
        "trace": digest.hex(),
        "outcome": str(ours.outcome),
        "reason": None if ours.reason is None else str(ours.reason),
        "detail": ours.detail,
        "audited": ours.audited,
        "reward": ours.reward,
        "checks": [
            {
                "name": check.name,
                "outcome": str(check.outcome),
                "reason": None if check.reason is None else str(check.reason),
                "value": check.value,
                "limit": check.limit,
                "span": None if check.start is None else [check.start, check.end],
                "detail": check.detail,
            }
            for check in ours.checks
        ],
        "calibration": None if ours.calibration is None else ours.calibration.hex(),
        "scores": list(ours.scores),
        "notes": list(notes),
        "verifier": {name: getattr(ours.verifier, name) for name in ("software", "engine", "dtype", "device")},
        "trainer": None
        if theirs is None
        else {
            "outcome": str(theirs.outcome),
            "reason": None if theirs.reason is None else str(theirs.reason),
            "audited": theirs.audited,
            "agrees": why is None,
            "disagreement": why,
        },
    }


def print_verdict(ours: Judged, node: bytes, digest: bytes, theirs: Verdict | None, notes: Sequence[str] = ()) -> None:
    """The checks as a table, then the outcome in one line."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    skips = [check for check in ours.checks if check.outcome is CheckOutcome.SKIPPED]
    table = Table(box=None, pad_edge=False)
    for heading in ("check", "", "value", "limit", "tokens", "detail"):
        table.add_column(heading, overflow="fold", justify="right" if heading in ("value", "limit") else "left")
    styles = {CheckOutcome.PASSED: "green", CheckOutcome.FAILED: "bold red"}
    for check in ours.checks:
        if check.outcome is CheckOutcome.SKIPPED:
            continue
        outcome = Text(check.outcome.lower(), style=styles[check.outcome])
        span = "" if check.start is None else f"{check.start}:{check.end}"
        detail = Text(printable(check.detail))
        table.add_row(check.name, outcome, _number(check.value), _number(check.limit), span, detail)
    console = Console(highlight=False, markup=False)
    console.print(table)
    for cause, names in _by_reason(skips):
        console.print(f"not run, {printable(cause)}: {', '.join(names)}", style="dim")
    colour = {Outcome.ACCEPTED: "green", Outcome.REFUSED: "red", Outcome.NOT_JUDGED: "yellow"}[ours.outcome]
    reason = f" ({ours.reason}{': ' + printable(ours.detail) if ours.detail else ''})" if ours.reason else ""
    audited = "" if ours.audited or ours.outcome is not Outcome.ACCEPTED else " by the checks that need no model"
    console.print(
        Text(str(ours.outcome), style=f"bold {colour}").append(f"{audited}{reason}", style="not bold default")
    )
    console.print(f"node {identity.peer_id(node)}", soft_wrap=True)
    for note in notes:
        console.print(f"worth knowing: {printable(note)}", style="yellow", soft_wrap=True)
    if theirs is not None:
        why = disagreement(ours, digest, theirs)
        said = _said(theirs)
        agrees = " but ".join(filter(None, ("agrees", unchecked(ours, theirs))))
        console.print(f"trainer's verdict {said}: {printable(agrees if why is None else why)}")


def print_calibration(calibration: Calibration) -> None:
    """What was measured, and what follows from it."""
    pair, sample, limits = calibration.pair, calibration.sample, calibration.limits
    worker = f"{pair.worker_engine} {pair.worker_dtype} {pair.worker_device}"
    verifier = f"{pair.verifier_engine} {pair.verifier_dtype} {pair.verifier_device}"
    print(f"pair     {printable(worker)}, recomputed by {printable(verifier)}")
    version = _version_of(calibration)
    print(f"policy   {'' if version is None else f'version {version}, '}root {calibration.policy_root.hex()[:16]}…")
    print(f"sample   {sample.traces} traces, {sample.tokens} tokens, {sample.chunks} chunks; ", end="")
    print(f"{sample.mismatches} tokens with a margin above 0, logits' error {sample.sigma:.3g}")
    print(f"{'':18} {'half':>9} {'90 %':>9} {'99 %':>9} {'99.9 %':>9} {'largest':>9} {'limit':>9}")
    rows = (
        ("margin", sample.margins, limits.margin_hard),
        ("logprob", sample.logprobs, limits.logprob_tolerance),
        ("exponents", sample.exponents, limits.exponent_mismatches),
        ("mantissa mean", sample.mantissa_means, limits.mantissa_mean),
        ("mantissa median", sample.mantissa_medians, limits.mantissa_median),
    )
    for name, quantiles, limit in rows:
        print(f"{name:18} {' '.join(f'{each:9.3g}' for each in (*quantiles, limit))}")
    alternatives = len(calibration.margins.alternatives) + len(calibration.proofs.alternatives)
    chunks = math.ceil((NODE_EVIDENCE_NATS + math.log(alternatives)) / sample.int8_nats)
    print(f"int8     {sample.int8_nats:.3g} nats a chunk: told after {chunks} chunks of {PROOF_CHUNK_TOKENS} tokens")


def calibration_json(calibration: Calibration, file: Path) -> dict[str, Any]:
    """SPEC 14: the JSON object of `rlverify calibrate --json`."""
    parts = (("pair", Pair), ("limits", Limits), ("sample", Sample))
    return {
        "spec": "1.0",
        "file": str(file),
        "calibration": hashlib.sha256(codec.encode(calibration)).hexdigest(),
        "policy_version": _version_of(calibration),
        "policy_root": calibration.policy_root.hex(),
        **{key: {name: getattr(getattr(calibration, key), name) for name in cls.__slots__} for key, cls in parts},
    }


def _version_of(calibration: Calibration) -> int | None:
    """None for a folder that nobody said the run of: what it holds has a root, and no version."""
    return None if calibration.run == bytes(32) else calibration.policy_version


def _by_reason(skips: Sequence[Check]) -> list[tuple[str, list[str]]]:
    """The names of skipped checks under each reason, in order."""
    found: dict[str, list[str]] = {}
    for check in skips:
        found.setdefault(check.detail, []).append(check.name)
    return list(found.items())


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
