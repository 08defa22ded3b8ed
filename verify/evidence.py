"""Judges a recomputed trace: margins, logprobs, proofs, and what they say together (SPEC 10.1 steps 13 to 17).

Not here: recomputing (prefill.py), the statistics (sampling.py, toploc.py, scores.py) and their limits
(thresholds.py, calibrate.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from protocol.calibration import Calibration, Limits
from protocol.limits import NODE_EVIDENCE_NATS
from protocol.trace import Trace
from protocol.verdict import Reason
from verify.finding import Finding, passed
from verify.sampling import judge_margins
from verify.scores import evidence, mantissa_means, margin_part, proof_part
from verify.thresholds import Judgement, at_temperature
from verify.toploc import ChunkResult, judge_proofs


@dataclass(frozen=True, slots=True)
class Recomputed:
    """Our own numbers for the generated tokens of one trace, in order: float32 [n] each, and each proof
    held against our hidden states."""

    margins: NDArray[np.float32]
    logprobs: NDArray[np.float32]
    chunks: tuple[ChunkResult, ...]


def evidence_findings(trace: Trace, temperature: float, ours: Recomputed, limits: Limits) -> Iterator[Finding]:
    """Margins, logprobs and proofs against limits."""
    offsets = trace.generated()
    for judgement in judge_margins(ours.margins, limits, temperature):
        yield _finding("margins", Reason.MARGIN, judgement, offsets)
    yield _finding("logprobs", Reason.LOGPROB, _judge_logprobs(trace, temperature, ours, limits), offsets)
    yield _finding("proofs", Reason.PROOF, judge_proofs(ours.chunks, limits), offsets)


def score_findings(
    trace: Trace, ours: Recomputed, calibration: Calibration, scores: Sequence[float]
) -> Iterator[Finding]:
    """The margin score and the proof score of one trace (SPEC 10.8)."""
    tokens, chunks = len(ours.margins), len(mantissa_means(ours.chunks))
    margins, proofs = (Reason.MARGIN, Reason.PROOF) if not calibration.provisional else (Reason.PAIR_EVIDENCE,) * 2
    parts = (
        ("margin score", margins, margin_part(calibration, scores), calibration.margins, f"{tokens} tokens"),
        ("proof score", proofs, proof_part(calibration, scores), calibration.proofs, f"{chunks} chunks"),
    )
    offsets = trace.generated()
    for name, reason, sums, table, of in parts:
        found = evidence(sums)
        likeliest = table.alternatives[max(range(len(sums)), key=sums.__getitem__)].name
        detail = f"evidence of {found:.2f} nats from {of}, most for '{likeliest}'"
        ok = found <= NODE_EVIDENCE_NATS
        judgement = Judgement(ok, found, NODE_EVIDENCE_NATS, None if ok else (0, len(offsets)), detail)
        yield _finding(name, reason, judgement, offsets)


def _judge_logprobs(trace: Trace, temperature: float, ours: Recomputed, limits: Limits) -> Judgement:
    differences = np.abs(np.asarray(trace.logprobs, dtype=np.float64) - ours.logprobs)
    limit = at_temperature(limits.logprob_tolerance, temperature)
    worst = int(differences.argmax())
    ok = bool(differences[worst] <= limit)
    detail = f"token {worst} claims {trace.logprobs[worst]:.4f}, ours is {ours.logprobs[worst]:.4f}"
    return Judgement(ok, float(differences[worst]), limit, None if ok else (worst, worst + 1), detail)


def _finding(name: str, reason: Reason, judgement: Judgement, offsets: tuple[int, ...]) -> Finding:
    """`offsets` turns positions among the generated tokens into places in the trace's tokens."""
    if judgement.ok:
        return passed(name, judgement.detail, value=judgement.value, limit=judgement.limit)
    span = None
    if judgement.span is not None:
        start, end = judgement.span
        span = (offsets[start], offsets[min(end, len(offsets)) - 1] + 1)
    return Finding(name, reason, judgement.detail, judgement.value, judgement.limit, span)
