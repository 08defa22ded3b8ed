"""Scores: what a value says for dishonesty, in nats, and what many of them say together (SPEC 10.8).

A table is made from honest values so that exp(score) averages at most 1 under honesty; sums of scores are then
evidence that may be looked at as often as one likes (docs/decisions/0007-scores.md). Pure: no model, no files.
Not here: collecting the honest values (calibrate.py), and single tokens or chunks over a limit (sampling.py,
toploc.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from protocol.calibration import Alternative, Calibration, ScoreTable
from protocol.errors import UsageError
from protocol.limits import MAX_SCORE_BINS, MAX_SCORE_NATS, NODE_EVIDENCE_NATS, PROOF_MIN_JUDGED_TOKENS
from verify.toploc import ChunkResult

Floats = NDArray[np.float64]

CONFIDENCE: Final = 1e-3  # with which a true tail may be above the bound of one edge
MARGIN_EDGES: Final = (0.0, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6)
_MARGIN_SLACK: Final = 1.5  # honest tails of margins times this: tasks differ in how open their tokens are
_MARGIN_FLOOR: Final = 1e-4  # least probability of a bin of margins under honesty
_NOISES: Final = (2, 4, 16)  # standard deviation of an alternative's logits, in those that explain the honest bound
_SPLICED: Final = 0.1  # share of tokens not drawn by the seed
# Alternatives of chunks: the honest probability to be above an edge raised to a power below 1 (Lehmann's), which
# needs no scale and so serves where honest errors are all zero too; and the share of chunks that are honest.
_RAISED: Final = {
    "up a little": (0.5, 0.0),
    "up": (0.25, 0.0),
    "half of them far up": (0.1, 0.5),
    "half of them beyond": (0.02, 0.5),
}
_FINEST: Final = 2 ** (1 / 16)  # ratio of neighbouring edges
_SMALLEST_EDGE: Final = 1 / 64
DRIFT: Final = 1.05  # honest mantissa errors may grow by so much as the policy is trained
_MOST_DRIFT: Final = 1.6


# --- making tables ---


def tail_bound(hits: int, count: int, confidence: float = CONFIDENCE) -> float:
    """An upper bound of a probability that was met `hits` times in `count`: the q above hits/count at which the
    binary relative entropy D(hits/count ‖ q) reaches ln(1/confidence)/count (Chernoff). 1 for no sample."""
    if count == 0:
        return 1.0
    share, room = hits / count, math.log(1 / confidence) / count
    low, high = share, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if _relative_entropy(share, middle) < room:
            low = middle
        else:
            high = middle
    return high


def _relative_entropy(p: float, q: float) -> float:
    if q >= 1.0:
        return math.inf if p < 1.0 else 0.0
    first = p * math.log(p / q) if p else 0.0
    return first + ((1 - p) * math.log((1 - p) / (1 - q)) if p < 1.0 else 0.0)


def tails(values: Floats, edges: Sequence[float]) -> Floats:
    """The share of values above each edge."""
    ordered = np.sort(values)
    above: Floats = 1.0 - np.searchsorted(ordered, edges, side="right") / max(1, len(ordered))
    return above


def bounded_tails(values: Floats, edges: Sequence[float]) -> Floats:
    """`tail_bound` of the share of values above each edge."""
    above = np.rint(tails(values, edges) * len(values)).astype(int)
    return np.array([tail_bound(int(hits), len(values)) for hits in above])


def make_table(edges: Sequence[float], honest: Floats, alternatives: Mapping[str, Floats]) -> ScoreTable:
    """The table from tails (probability above each edge, falling): honest ones, and those of each alternative.

    For every distribution whose tails are nowhere above `honest`, exp(score) averages at most 1: it does under
    `honest` itself, pooled or capped, and scores do not fall as values grow.
    """
    p0 = _masses(honest)
    found = (Alternative(name, _scores(p0, _masses(tail))) for name, tail in alternatives.items())
    return ScoreTable(tuple(float(edge) for edge in edges), tuple(found))


def _masses(tail: Floats) -> Floats:
    """Probability of each bin."""
    falling = np.minimum.accumulate(np.clip(tail, 0.0, 1.0))
    return -np.diff(falling, prepend=1.0, append=0.0)


def _scores(p0: Floats, p1: Floats) -> tuple[float, ...]:
    """ln(p1/p0) a bin, neighbours that fall pooled (which keeps the mean of exp at Σp1 = 1), capped above.

    Bins that neither reaches go with the next one: honesty's share of what is beyond its sample lies at the far end.
    """
    blocks: list[tuple[float, float, int]] = []
    empty = 0
    for mass0, mass1 in zip(p0.tolist(), p1.tolist(), strict=True):
        if mass0 == mass1 == 0:
            empty += 1
            continue
        block, empty = (mass0, mass1, empty + 1), 0
        # The ratio of the block before is at least this one's.
        while blocks and blocks[-1][1] * block[0] >= block[1] * blocks[-1][0]:
            last = blocks.pop()
            block = (last[0] + block[0], last[1] + block[1], last[2] + block[2])
        blocks.append(block)
    scores: list[float] = []
    for mass0, mass1, size in blocks:
        ratio = mass1 / mass0 if mass0 > 0 else math.inf
        # A bin the alternative never reaches clears a node of it no more than the cap accuses it.
        scores += [max(-float(MAX_SCORE_NATS), min(float(MAX_SCORE_NATS), _log(ratio)))] * size
    return tuple(scores + scores[-1:] * empty)


def _log(ratio: float) -> float:
    if ratio == 0:
        return -math.inf
    return math.log(ratio) if math.isfinite(ratio) else math.inf


def noise_tail(sigma: float, diversity: float, edges: Sequence[float]) -> Floats:
    """P(margin > edge) where each logit of the worker is off by a normal error of standard deviation sigma:
    G·s·[φ(τ/s) − (τ/s)·Q(τ/s)], s = √2·σ, G = 1 − Σp² averaged. Holds while sigma is well below 1."""
    s = math.sqrt(2) * sigma
    if s == 0:
        return np.zeros(len(edges))
    scaled = [edge / s for edge in edges]
    density = [math.exp(-x * x / 2) / math.sqrt(2 * math.pi) for x in scaled]
    above = [math.erfc(x / math.sqrt(2)) / 2 for x in scaled]
    return np.array([diversity * s * max(0.0, d - x * q) for x, d, q in zip(scaled, density, above, strict=True)])


def unseeded_tail(logprobs: Floats, temperatures: Floats, edges: Sequence[float] = MARGIN_EDGES) -> Floats:
    """P(margin·min(1, T) > edge) of tokens that were drawn without the seed.

    Given a token of probability p, the best of the others leads it by ln((1−p)/p) and a difference of two Gumbel
    variables, which is logistic. So exact for the contexts of the sample, from the verifier's own logprobs at T.
    """
    p = np.exp(np.minimum(logprobs, 0.0))
    scale = np.minimum(1.0, temperatures)
    with np.errstate(over="ignore"):
        found = [float(np.mean((1 - p) / ((1 - p) + p * np.exp(edge / scale)))) for edge in edges]
    return np.array(found)


def sigma_of(mismatches: int, count: int, diversity: float) -> float:
    """The standard deviation of the logits' error that explains so many margins above 0 (mismatch = 0.564·σ·G)."""
    return mismatches / count * math.sqrt(math.pi) / diversity if count and diversity > 0 else 0.0


def spread(differences: Floats, logprobs: Floats) -> float:
    """The standard deviation of the logits' error that explains differences of logprobs: a logprob moves by 1 − p
    times what its logit moves by against the others."""
    moved = float(np.mean((1 - np.exp(np.minimum(logprobs, 0.0))) ** 2))
    return math.sqrt(float(np.mean(differences**2)) / moved) if moved > 0 else 0.0


def margin_table(margins: Floats, logprobs: Floats, temperatures: Floats) -> ScoreTable:
    """From honest margins·min(1, T), and the verifier's logprobs of the same tokens [n]."""
    edges = MARGIN_EDGES
    honest = _honest_margins(margins, edges, logprobs, temperatures)
    unseeded = unseeded_tail(logprobs, temperatures, edges)
    diversity = float(unseeded[0])
    # A policy that is sure of nearly every token leaves the seed little to decide, and margins little to say.
    sigma = min(1.0, float(honest[0]) * math.sqrt(math.pi) / max(diversity, 1e-3))
    alternatives = {
        f"noise {times}": np.minimum(unseeded, np.maximum(honest, noise_tail(times * sigma, diversity, edges)))
        for times in _NOISES
    }
    alternatives["spliced"] = (1 - _SPLICED) * honest + _SPLICED * np.maximum(honest, unseeded)
    alternatives["unseeded"] = np.maximum(honest, unseeded)
    return make_table(edges, honest, alternatives)


def _honest_margins(margins: Floats, edges: Sequence[float], logprobs: Floats, temperatures: Floats) -> Floats:
    """Tails that honest margins stay under: bounded by the sample, with slack. A sample of n tokens bounds no tail
    below about 7/n, so away from 0 the bound is that of normal errors twice as large as the sample allows, or what
    was seen, whichever is more; and no bin is given less than the floor."""
    bound = _MARGIN_SLACK * bounded_tails(margins, edges)
    seen = _MARGIN_SLACK * tails(margins, edges)
    diversity = float(unseeded_tail(logprobs, temperatures, edges)[0])
    sigma = float(bound[0]) * math.sqrt(math.pi) / max(diversity, 1e-3)
    normal = noise_tail(2 * sigma, diversity, edges)
    floor = _MARGIN_FLOOR * np.arange(len(edges), 0, -1)
    return np.clip(np.minimum(bound, np.maximum(normal, 2 * seen)), floor, 1.0)


def chunk_table(traces: Sequence[Floats]) -> ScoreTable:
    """From the mantissa means of honest chunks, one array a trace.

    The allowance for drift is widened until the traces as wholes average exp(sum of scores) ≤ 1: chunks of one
    trace resemble each other, and a node hands in whole traces. Raises UsageError where no allowance does it.
    """
    values = np.concatenate([*traces, np.zeros(0)])
    edges = _chunk_edges(values)
    drift = DRIFT
    while drift < _MOST_DRIFT:
        honest = bounded_tails(values * drift, edges)
        alternatives = {
            name: share * honest + (1 - share) * honest**exponent for name, (exponent, share) in _RAISED.items()
        }
        table = make_table(edges, honest, alternatives)
        if _holds_for(table, traces):
            return table
        drift *= DRIFT
    raise UsageError("honest traces differ so much from each other that small errors cannot be told from them")


def _chunk_edges(values: Floats) -> tuple[float, ...]:
    low = max(_SMALLEST_EDGE, float(values.min(initial=math.inf)) / 2 if len(values) else 0.0)
    high = max(4.0, 6.0 * float(values.max(initial=0.0)))
    most = MAX_SCORE_BINS - 1
    ratio = max(_FINEST, (high / low) ** (1 / (most - 1)))
    count = min(most, math.ceil(math.log(high / low) / math.log(ratio)) + 1)
    return tuple(low * ratio**step for step in range(count))


def _holds_for(table: ScoreTable, traces: Sequence[Floats]) -> bool:
    sums = np.array([table_scores(table, values) for values in traces if len(values)])
    return len(sums) == 0 or bool((np.exp(sums).mean(axis=0) <= 1.0).all())


# --- using tables ---


def bins(table: ScoreTable, values: NDArray[Any] | Sequence[float]) -> NDArray[np.intp]:
    """SPEC 10.8: the bin of a value is the number of edges below it."""
    return np.searchsorted(np.asarray(table.edges), np.asarray(values, dtype=np.float64), side="left")


def table_scores(table: ScoreTable, values: NDArray[Any] | Sequence[float]) -> tuple[float, ...]:
    """The sum of the values' scores, one an alternative."""
    places = bins(table, values)
    return tuple(math.fsum(np.asarray(each.scores)[places].tolist()) for each in table.alternatives)


def trace_scores(
    calibration: Calibration,
    margins: NDArray[Any] | Sequence[float],
    temperature: float,
    chunks: Sequence[ChunkResult],
) -> tuple[float, ...]:
    """SPEC 10.8: S_j of one trace, nats; alternatives of margins first, each table in its order."""
    scaled = np.asarray(margins, dtype=np.float64) * min(1.0, temperature)
    return table_scores(calibration.margins, scaled) + table_scores(calibration.proofs, mantissa_means(chunks))


def mantissa_means(chunks: Sequence[ChunkResult]) -> Floats:
    """Of the judged chunks (SPEC 10.5.4)."""
    return np.array([each.mantissa_mean for each in chunks if each.length >= PROOF_MIN_JUDGED_TOKENS])


def margin_part(calibration: Calibration, scores: Sequence[float]) -> tuple[float, ...]:
    return tuple(scores[: len(calibration.margins.alternatives)])


def proof_part(calibration: Calibration, scores: Sequence[float]) -> tuple[float, ...]:
    return tuple(scores[len(calibration.margins.alternatives) :])


def evidence(sums: Sequence[float]) -> float:
    """SPEC 10.8: E = ln of the mean of exp(S_j), nats. Above NODE_EVIDENCE_NATS once in 10^6 honest nodes."""
    if not sums:
        return -math.inf
    highest = max(sums)
    return highest + math.log(math.fsum(math.exp(each - highest) for each in sums) / len(sums))


def add_scores(previous: Sequence[float], scores: Sequence[float]) -> tuple[float, ...]:
    """The sums after one more trace; `previous` is empty for none. Raises UsageError for sums of another table."""
    if previous and len(previous) != len(scores):
        raise UsageError(f"{len(previous)} sums and {len(scores)} scores are not of one calibration")
    return tuple(a + b for a, b in zip(previous, scores, strict=True)) if previous else tuple(scores)


def node_evidence(previous: Sequence[float], scores: Sequence[float]) -> float:
    """E of a node after this trace; `previous` are the sums S_j of its traces before, empty for none."""
    return evidence(add_scores(previous, scores))


# --- power ---


@dataclass(frozen=True, slots=True)
class Power:
    """How many values a cheat gives before the evidence is enough: the mean and the 99 % quantile of the
    simulations, infinite where more than `most` were needed."""

    mean: float
    most_of: float


def power(
    table: ScoreTable,
    values: NDArray[Any] | Sequence[float],
    *,
    random: np.random.Generator,
    alternatives: int | None = None,
    threshold: float = NODE_EVIDENCE_NATS,
    runs: int = 400,
    most: int = 4_096,
) -> Power:
    """Values are drawn again and again from `values` until E is above the threshold.

    alternatives: over how many E averages, those of the other table included (they are taken to say nothing).
    """
    columns = np.array([each.scores for each in table.alternatives]).T  # [bins, J]
    places = bins(table, values)
    others = (alternatives or columns.shape[1]) - columns.shape[1]
    needed = np.full(runs, np.inf)
    for run in range(runs):
        drawn = places[random.integers(0, len(places), most)]
        sums = np.cumsum(columns[drawn], axis=0)
        highest = np.maximum(sums.max(axis=1), 0.0)
        total = np.exp(sums - highest[:, None]).sum(axis=1) + others * np.exp(-highest)
        reached = np.flatnonzero(highest + np.log(total / (columns.shape[1] + others)) > threshold)
        if len(reached):
            needed[run] = reached[0] + 1
    return Power(float(needed.mean()), float(np.quantile(needed, 0.99, method="higher")))
