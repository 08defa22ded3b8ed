"""Scores: never too sure under honesty, whatever is honest within the sample's bounds; quick against cheats."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from protocol.calibration import Alternative, Calibration, Limits, Pair, Sample, ScoreTable, check_calibration
from protocol.errors import UsageError
from protocol.limits import MAX_SCORE_BINS, MAX_SCORE_NATS, NODE_EVIDENCE_NATS
from protocol.verdict import Check, CheckOutcome, Reason
from verify.check import _until_failure
from verify.finding import Finding, as_check, first_failure, passed
from verify.scores import (
    MARGIN_EDGES,
    add_scores,
    bins,
    bounded_tails,
    chunk_table,
    evidence,
    make_table,
    margin_part,
    margin_table,
    node_evidence,
    noise_tail,
    power,
    proof_part,
    sigma_of,
    spread,
    table_scores,
    tail_bound,
    tails,
    trace_scores,
    unseeded_tail,
)
from verify.toploc import ChunkResult

Floats = NDArray[np.float64]
ONES = np.ones(4_096)


def random(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def probabilities(count: int, seed: int = 0) -> Floats:
    """Of drawn tokens, as a policy of middling certainty has them; a quarter of them is certain."""
    drawn = random(seed)
    return np.where(drawn.random(count) < 0.25, 1.0, np.clip(drawn.beta(2.0, 1.5, count), 1e-3, 1.0))


def unseeded_margins(p: Floats, seed: int = 1) -> Floats:
    with np.errstate(divide="ignore"):
        return np.maximum(0.0, np.log((1 - p) / p) + random(seed).logistic(size=len(p)))


def noisy_margins(sigma: float, count: int, seed: int = 2) -> Floats:
    """Of a policy of two likely tokens whose logits the worker has with an error: no formula in it."""
    drawn = random(seed)
    z = np.concatenate([drawn.normal(0, 2, (count, 6)), np.zeros((count, 1))], axis=1)
    noise = drawn.gumbel(size=z.shape)
    chosen = (z + noise + drawn.normal(0, sigma, z.shape)).argmax(axis=1)
    scores = z + noise
    return scores.max(axis=1) - scores[np.arange(count), chosen]


def chunks(*means: float, length: int = 32) -> list[ChunkResult]:
    return [ChunkResult(32 * n, length, 0, 0, mean, 0.0, 128, 0) for n, mean in enumerate(means)]


def table(*scores: tuple[float, ...], edges: tuple[float, ...] = (0.0, 1.0)) -> ScoreTable:
    return ScoreTable(edges, tuple(Alternative(str(n), each) for n, each in enumerate(scores)))


def calibration(margins: ScoreTable, proofs: ScoreTable) -> Calibration:
    pair = Pair("engine", "float32", "cpu", "engine", "float32", "cpu")
    limits = Limits(0.01, 0.0, 8.0, 8.0, 0.15, 0.5, 0.01)
    sample = Sample(1, 1, 1, 0, 0.0, (), (), (), (), (), 1.0)
    return Calibration(bytes(32), 0, bytes(32), pair, limits, margins, proofs, sample, 0)


def bfloat16_like(traces: int, seed: int, size: float = 1.0) -> list[Floats]:
    """Mantissa means of two chunks a trace: about 1.45, with what a trace has in common and what a chunk has."""
    drawn = random(seed)
    return [size * (drawn.normal(1.45, 0.05) + drawn.normal(0, 0.08, 2)) for _ in range(traces)]


# --- bounds ---


def test_the_bound_of_a_tail_is_above_what_was_seen_and_shrinks_with_the_sample() -> None:
    assert tail_bound(0, 0) == 1.0
    assert tail_bound(0, 1_000) == pytest.approx(math.log(1_000) / 1_000, rel=0.01)
    assert tail_bound(10, 10) == 1.0
    sizes = [tail_bound(n // 10, n) for n in (10, 100, 1_000, 10_000)]
    assert sizes == sorted(sizes, reverse=True) and sizes[-1] > 0.1


def test_the_bound_of_a_tail_fails_as_rarely_as_it_says() -> None:
    for true in (0.002, 0.05, 0.4):
        hits = random(3).binomial(500, true, 20_000)
        failed = np.mean([bound < true for bound in map({n: tail_bound(n, 500) for n in set(hits)}.get, hits)])
        assert failed <= 1e-3


def test_a_value_on_an_edge_is_in_the_bin_below_it() -> None:
    found = table((0.0, 1.0, 2.0))
    assert bins(found, [0.0, 1e-9, 1.0, 1.1, 1e9]).tolist() == [0, 1, 1, 2, 2]
    assert tails(np.array([0.0, 1.0, 2.0]), [0.0, 1.0, 2.0]).tolist() == pytest.approx([2 / 3, 1 / 3, 0.0])


# --- tables ---


@pytest.mark.parametrize("sigma", [0.0, 0.02, 0.1])
def test_a_table_of_margins_is_one_that_travels(sigma: float) -> None:
    margins = noisy_margins(sigma, 2_048)
    found = margin_table(margins, np.log(probabilities(2_048)), np.ones(2_048))
    check_calibration(calibration(found, chunk_table(bfloat16_like(32, 4))))
    assert [each.name for each in found.alternatives] == ["noise 2", "noise 4", "noise 16", "spliced", "unseeded"]


@pytest.mark.parametrize("size", [0.0, 0.01, 1.0, 20.0])
def test_a_table_of_chunks_is_one_that_travels(size: float) -> None:
    found = chunk_table(bfloat16_like(32, 5, size))
    check_calibration(calibration(table((0.0, 0.0, 0.0)), found))
    assert len(found.edges) < MAX_SCORE_BINS
    for each in found.alternatives:
        assert each.scores[0] < 0 < each.scores[-1] <= MAX_SCORE_NATS


def test_scores_average_to_one_under_every_distribution_within_the_bound() -> None:
    drawn = random(6)
    edges = tuple(np.sort(drawn.random(20)))
    for _ in range(50):
        honest = np.sort(drawn.random(20))[::-1]
        found = make_table(edges, honest, {"a": np.sort(drawn.random(20))[::-1], "b": np.sort(honest**0.3)[::-1]})
        for _ in range(20):
            below = np.minimum.accumulate(honest * drawn.random(20))
            masses = -np.diff(below, prepend=1.0, append=0.0)
            for each in found.alternatives:
                assert math.fsum(masses * np.exp(each.scores)) <= 1 + 1e-9


def test_pooling_keeps_the_average_at_one_and_the_order() -> None:
    found = make_table((1.0, 2.0, 3.0), np.array([0.5, 0.25, 0.1]), {"a": np.array([0.7, 0.2, 0.1])})
    masses = np.array([0.5, 0.25, 0.15, 0.1])
    (scores,) = (each.scores for each in found.alternatives)
    assert math.fsum(masses * np.exp(scores)) == pytest.approx(1.0)
    assert scores[0] < scores[1] and list(scores) == sorted(scores)


def test_what_lies_beyond_the_sample_speaks_as_loudly_as_its_far_end() -> None:
    found = chunk_table([np.zeros(2)] * 32)
    for each in found.alternatives:
        assert each.scores[1] == each.scores[-1] > 1.0


def test_a_policy_that_is_sure_of_every_token_leaves_margins_nothing_to_say() -> None:
    found = margin_table(np.zeros(2_048), np.full(2_048, -1e-6), np.ones(2_048))
    check_calibration(calibration(found, chunk_table(bfloat16_like(32, 4))))
    for each in found.alternatives:
        assert max(each.scores) == pytest.approx(0.0, abs=1e-9)


def test_chunks_of_a_trace_that_are_all_alike_widen_the_allowance() -> None:
    drawn = random(7)
    alike = [np.full(40, drawn.lognormal(0, 0.3)) for _ in range(64)]
    apart = [np.array([value]) for value in np.concatenate(alike)]
    wide, narrow = chunk_table(alike), chunk_table(apart)
    typical = np.full(200, 1.5)
    assert table_scores(wide, typical)[0] < table_scores(narrow, typical)[0]


# --- theory ---


@pytest.mark.parametrize("sigma", [0.02, 0.1])
def test_margins_of_noisy_logits_are_those_of_the_formula(sigma: float) -> None:
    count = 400_000
    drawn = random(8)
    z = np.zeros((count, 2))
    z[:, 0] = drawn.normal(0, 2, count)
    noise = drawn.gumbel(size=z.shape)
    scores = z + noise
    chosen = (scores + drawn.normal(0, sigma, z.shape)).argmax(axis=1)
    margins = scores.max(axis=1) - scores[np.arange(count), chosen]
    p = np.exp(z[:, 0]) / (1 + np.exp(z[:, 0]))
    diversity = float(np.mean(1 - p**2 - (1 - p) ** 2))
    edges = [0.0, sigma, 2 * sigma, 4 * sigma]
    assert tails(margins, edges) == pytest.approx(noise_tail(sigma, diversity, edges), rel=0.1, abs=1e-4)
    seen = int(np.count_nonzero(margins > 0))
    assert sigma_of(seen, count, diversity) == pytest.approx(sigma, rel=0.05)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_margins_without_the_seed_are_those_of_the_formula(temperature: float) -> None:
    drawn = random(9)
    z = drawn.normal(0, 1.5, (60_000, 7))
    p = np.exp(z) / np.exp(z).sum(axis=1, keepdims=True)
    tokens = (z + drawn.gumbel(size=z.shape)).argmax(axis=1)
    scores = z + drawn.gumbel(size=z.shape)  # another seed's noise
    rows = np.arange(len(z))
    scaled = (scores.max(axis=1) - scores[rows, tokens]) * min(1.0, temperature)
    expected = unseeded_tail(np.log(p[rows, tokens]), np.full(len(z), temperature))
    assert tails(scaled, MARGIN_EDGES) == pytest.approx(expected, abs=0.01)


def test_differences_of_logprobs_tell_the_size_of_the_error() -> None:
    p = probabilities(50_000)
    differences = (1 - p) * random(10).normal(0, 0.03, 50_000)
    assert spread(differences, np.log(p)) == pytest.approx(0.03, rel=0.05)
    assert spread(np.zeros(5), np.zeros(5)) == 0.0


# --- sums ---


def test_a_trace_is_scored_by_its_scaled_margins_and_its_judged_chunks() -> None:
    held = calibration(table((-1.0, 1.0, 2.0), (-0.5, 0.25, 4.0)), table((-1.0, 0.0, 3.0), edges=(0.5, 2.0)))
    found = trace_scores(held, [0.0, 0.4, 3.0], 0.5, [*chunks(0.5, 9.0), *chunks(9.0, length=7)])
    assert found == (2.0, 3.75, 2.0)
    assert margin_part(held, found) == (2.0, 3.75) and proof_part(held, found) == (2.0,)
    assert trace_scores(held, [3.0], 2.0, []) == (2.0, 4.0, 0.0)


def test_evidence_is_the_logarithm_of_the_mean() -> None:
    assert evidence([0.0, 0.0, 0.0]) == pytest.approx(0.0)
    assert evidence([800.0, -900.0]) == pytest.approx(800 - math.log(2))
    assert evidence([]) == -math.inf
    assert node_evidence((), (1.0, 2.0)) == evidence((1.0, 2.0))
    assert node_evidence((3.0, 1.0), (1.0, 2.0)) == evidence((4.0, 3.0))
    with pytest.raises(UsageError, match="not of one calibration"):
        add_scores((1.0,), (1.0, 2.0))


# --- how often it errs, and how soon it sees ---


def highest_evidence(steps: NDArray[np.float64]) -> Floats:
    """The highest E a node ever has; steps [nodes, values, J]."""
    sums = np.cumsum(steps, axis=1)
    top = sums.max(axis=2, keepdims=True)
    along = top[..., 0] + np.log(np.exp(sums - top).mean(axis=2))
    return along.max(axis=1)


def test_honest_nodes_keep_to_the_bound_of_ville_at_the_worst_that_the_table_allows_for() -> None:
    """Values drawn from the bound itself, which no honest node reaches: still P(E ever > ln k) ≤ 1/k."""
    edges = MARGIN_EDGES
    honest = np.clip(1.5 * bounded_tails(noisy_margins(0.05, 2_048), edges), 1e-3, 1.0)
    alternatives = {"a": np.maximum(honest, honest**0.5), "b": np.maximum(honest, honest**0.2)}
    found = make_table(edges, honest, alternatives)
    masses = -np.diff(honest, prepend=1.0, append=0.0)
    columns = np.array([each.scores for each in found.alternatives]).T
    steps = columns[random(11).choice(len(masses), (4_000, 400), p=masses)]
    reached = highest_evidence(steps)
    for k in (5, 20, 100):
        assert np.mean(reached > math.log(k)) <= 1 / k


@pytest.mark.parametrize("seed", range(3))
def test_honest_nodes_are_not_suspected_by_a_table_of_another_sample(seed: int) -> None:
    """As it is used: calibrated on 32 traces, then 1,000 nodes of 100 traces, heavy tails among their margins."""
    found = chunk_table(bfloat16_like(32, seed))
    fresh = np.array(bfloat16_like(100_000, 1_000 + seed))
    columns = np.array([each.scores for each in found.alternatives]).T
    steps = columns[bins(found, fresh)].reshape(1_000, 200, -1)
    assert highest_evidence(steps).max() < NODE_EVIDENCE_NATS

    margins = noisy_margins(0.02, 2_048, seed)
    scores = margin_table(margins, np.log(probabilities(2_048, seed)), np.ones(2_048))
    heavy = noisy_margins(0.02, 400_000, 100 + seed)
    heavy[random(seed).random(400_000) < 1e-4] = 0.3
    columns = np.array([each.scores for each in scores.alternatives]).T
    steps = columns[bins(scores, heavy)].reshape(400, 1_000, -1)
    assert highest_evidence(steps).max() < NODE_EVIDENCE_NATS


def test_honest_errors_may_grow_by_a_twentieth_as_the_policy_is_trained() -> None:
    found = chunk_table(bfloat16_like(64, 12))
    grown = np.concatenate(bfloat16_like(20_000, 13, 1.05))
    columns = np.array([each.scores for each in found.alternatives]).T
    assert (np.exp(columns[bins(found, grown)]).mean(axis=0) <= 1).all()


def test_unseeded_spliced_and_coarse_tokens_are_told_soon() -> None:
    p = probabilities(4_096)
    found = margin_table(noisy_margins(0.01, 4_096), np.log(p), ONES)
    unseeded = unseeded_margins(p)
    spliced = np.where(random(14).random(4_096) < 0.1, unseeded, 0.0)
    options = {"random": random(15), "alternatives": 9, "runs": 100}
    assert power(found, unseeded, **options).most_of <= 64  # type: ignore[arg-type]
    assert power(found, spliced, **options).mean <= 512  # type: ignore[arg-type]
    assert power(found, noisy_margins(0.4, 4_096), **options).mean <= 512  # type: ignore[arg-type]
    assert power(found, np.zeros(64), most=1_000, **options).mean == math.inf  # type: ignore[arg-type]


def test_rounded_weights_are_told_within_32_traces_of_two_chunks() -> None:
    found = chunk_table(bfloat16_like(32, 16))
    int8 = np.concatenate(bfloat16_like(500, 17, 2.15 / 1.45))
    assert power(found, int8, random=random(18), alternatives=9).most_of <= 64
    half = np.where(random(19).random(1_000) < 0.5, int8, np.concatenate(bfloat16_like(500, 20)))
    assert power(found, half, random=random(21), alternatives=9).mean <= 128


def test_a_check_that_blames_nobody_hides_none_that_does() -> None:
    def failed(name: str, reason: Reason) -> Check:
        return as_check(Finding(name, reason))

    pair, proof = failed("margin score", Reason.PAIR_EVIDENCE), failed("proofs", Reason.PROOF)
    score = failed("proof score", Reason.PROOF)
    assert first_failure((pair, as_check(passed("logprobs")))) == pair
    assert first_failure((pair, proof)) == proof
    kept = _until_failure((as_check(passed("margins")), pair, as_check(passed("logprobs")), proof, score))
    assert [each.outcome for each in kept] == [
        CheckOutcome.PASSED, CheckOutcome.FAILED, CheckOutcome.PASSED, CheckOutcome.FAILED, CheckOutcome.SKIPPED,
    ]  # fmt: skip
