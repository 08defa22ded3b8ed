"""Judges a recomputed trace: margins, logprobs, proofs (SPEC 10.1 steps 13 to 15).

Not here: recomputing (prefill.py), the statistics (sampling.py, toploc.py) and their limits (thresholds.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from protocol.trace import Trace
from protocol.verdict import Reason
from verify.finding import Finding, passed
from verify.sampling import judge_margins
from verify.thresholds import Judgement, Limits, at_temperature
from verify.toploc import ChunkResult, judge_proofs


@dataclass(frozen=True, slots=True)
class Recomputed:
    """Our own numbers for the generated tokens of one trace, in order: float32 [n] each, and each proof
    held against our hidden states."""

    margins: NDArray[np.float32]
    logprobs: NDArray[np.float32]
    chunks: tuple[ChunkResult, ...]


def evidence_findings(trace: Trace, temperature: float, ours: Recomputed, limits: Limits) -> Iterator[Finding]:
    """Steps 13 to 15 of SPEC 10.1, in order."""
    offsets = trace.generated()
    for judgement in judge_margins(ours.margins, limits, temperature):
        yield _finding("margins", Reason.MARGIN, judgement, offsets)
    yield _finding("logprobs", Reason.LOGPROB, _judge_logprobs(trace, temperature, ours, limits), offsets)
    yield _finding("proofs", Reason.PROOF, judge_proofs(ours.chunks, limits), offsets)


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
