"""Seeded sampling and margins: exact against the dense rule, right in distribution, clear about bad input."""

import math
import resource

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.errors import EngineError, UsageError
from protocol.noise import noise
from verify import sampling
from verify.sampling import judge_margins, margins, sample
from verify.thresholds import limits_for

torch.set_num_threads(1)


def dense(logits: torch.Tensor, seeds: list[int], positions: list[int], temperatures: list[float]) -> torch.Tensor:
    """logits/T + noise for every token: the rule as the specification writes it."""
    vocabulary = np.arange(logits.shape[1])
    rows = [noise(s, np.array([p]), vocabulary) for s, p in zip(seeds, positions, strict=True)]
    return logits / torch.tensor(temperatures)[:, None] + torch.from_numpy(np.stack(rows))


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@st.composite
def cases(draw: st.DrawFn) -> tuple[torch.Tensor, list[int], list[int], list[float]]:
    rows, vocabulary = draw(st.integers(1, 20)), draw(st.sampled_from([1, 2, 7, 104, 3000, 17_000]))
    scale = draw(st.sampled_from([0.0, 0.01, 1.0, 5.0, 30.0, 1e3, 1e6]))
    random = generator(draw(st.integers(0, 2**30)))
    logits = torch.randn(rows, vocabulary, generator=random) * scale + draw(st.sampled_from([0.0, -50.0, 1e4]))
    if draw(st.booleans()):
        logits = logits.round()  # ties
    if draw(st.booleans()):
        logits[torch.rand(logits.shape, generator=random) < 0.5] = -math.inf
        logits[:, 0] = 0.0
    seeds = draw(st.lists(st.integers(0, 2**64 - 1), min_size=rows, max_size=rows))
    positions = draw(st.lists(st.integers(0, 2**32 - 1), min_size=rows, max_size=rows))
    temperatures = draw(st.lists(st.sampled_from([0.1, 0.5, 0.8, 1.0, 2.0]), min_size=rows, max_size=rows))
    return logits, seeds, positions, temperatures


@settings(max_examples=150, deadline=None)
@given(cases())
def test_pruning_always_finds_the_token_of_the_dense_rule(
    case: tuple[torch.Tensor, list[int], list[int], list[float]],
) -> None:
    logits, seeds, positions, temperatures = case
    scores = dense(logits, seeds, positions, temperatures)
    tokens, logprobs = sample(logits, seeds, positions, temperatures)
    lowest = [int((row == row.max()).nonzero()[0]) for row in scores]
    assert tokens.tolist() == lowest
    z = (logits / torch.tensor(temperatures)[:, None]).double()
    expected = z.log_softmax(1).gather(1, tokens[:, None])[:, 0]
    size = z[z.isfinite()].abs().max().item()
    assert torch.allclose(logprobs.double(), expected, rtol=1e-6, atol=1e-5 + 4e-7 * size)


@settings(max_examples=80, deadline=None)
@given(cases(), st.integers(0, 2**30))
def test_margins_are_those_of_the_dense_rule(
    case: tuple[torch.Tensor, list[int], list[int], list[float]], seed: int
) -> None:
    logits, seeds, positions, temperatures = case
    logits = logits.clamp(min=-1e6)
    scores = dense(logits, seeds, positions, temperatures)
    claimed = torch.randint(0, logits.shape[1], (len(logits),), generator=generator(seed))
    expected = scores.amax(1) - scores.gather(1, claimed[:, None])[:, 0]
    assert torch.equal(margins(logits, seeds, positions, claimed, temperatures).margins, expected)


def test_equal_scores_go_to_the_lowest_id(monkeypatch: pytest.MonkeyPatch) -> None:
    # Real noise hardly ever ties: flatten it, in the rule and in the pruning alike.
    monkeypatch.setattr(sampling, "gumbel", lambda words: np.zeros(words.shape, dtype=np.float32))
    logits = torch.zeros(2, 300)
    logits[1, 200:] = 1.0
    monkeypatch.setattr(sampling, "_bounds", lambda total, lead: np.full(len(total), 2.0**60))
    assert sample(logits, [1, 2], [3, 4], [1.0, 1.0])[0].tolist() == [0, 200]


@pytest.mark.parametrize("scale", [0.3, 6.0])
def test_a_large_vocabulary_and_more_rows_than_a_block_agree_with_the_dense_rule(scale: float) -> None:
    logits = torch.randn(37, 49152, generator=generator(3)) * scale
    seeds, positions = list(range(37)), list(range(100, 137))
    scores = dense(logits, seeds, positions, [1.0] * 37)
    tokens, logprobs = sample(logits, seeds, positions, [1.0] * 37)
    assert torch.equal(tokens, scores.argmax(1))
    result = margins(logits, seeds, positions, tokens, [1.0] * 37)
    assert torch.equal(result.margins, torch.zeros(37))
    assert torch.equal(result.logprobs, logprobs)
    shifted = margins(logits, seeds, positions, (tokens + 1) % 49152, [1.0] * 37)
    assert (shifted.margins > 0).all()


def test_the_dense_twin_for_accelerators_draws_the_same_tokens() -> None:
    logits = torch.randn(40, 20_000, generator=generator(4)) * 3
    seeds, positions, temperatures = list(range(40)), list(range(40)), [0.7] * 40
    tokens, logprobs = sample(logits, seeds, positions, temperatures)
    prefixes = sampling._prefixes(seeds, positions)
    theirs, their_logprobs = sampling._sample_dense(logits, prefixes, temperatures)
    assert torch.equal(tokens, theirs)
    assert torch.allclose(logprobs, their_logprobs, atol=1e-5)
    claimed = torch.randint(0, 20_000, (40,), generator=generator(5))
    ours = margins(logits, seeds, positions, claimed, temperatures)
    twin = sampling._margins_dense(logits, prefixes, claimed.numpy(), temperatures)
    assert torch.allclose(ours.margins, twin.margins, atol=1e-5)
    assert torch.allclose(ours.logprobs, twin.logprobs, atol=1e-5)


def test_a_row_does_not_depend_on_the_rows_beside_it() -> None:
    logits = torch.randn(33, 2000, generator=generator(6)) * 4
    seeds, positions = list(range(33)), list(range(33))
    together = sample(logits, seeds, positions, [0.9] * 33)
    for row in range(33):
        alone = sample(logits[row : row + 1], seeds[row : row + 1], positions[row : row + 1], [0.9])
        assert torch.equal(alone[0][0], together[0][row]) and torch.equal(alone[1][0], together[1][row])


def test_seeds_of_a_signed_tensor_are_the_same_64_bits() -> None:
    logits = torch.randn(2, 500, generator=generator(7))
    seeds = [2**64 - 1, 2**63 + 12345]
    signed = torch.tensor([s - 2**64 for s in seeds])
    assert torch.equal(sample(logits, seeds, [1, 2], [1.0] * 2)[0], sample(logits, signed, [1, 2], [1.0] * 2)[0])


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
def test_seeded_argmax_follows_the_softmax(temperature: float) -> None:
    """Chi-square over 60 tokens: 99.9 % of honest runs stay under the bound (Wilson and Hilferty)."""
    row = torch.randn(60, generator=generator(8)) * 1.5
    draws = 12_000
    tokens, _ = sample(row.expand(draws, 60), [99] * draws, list(range(draws)), [temperature] * draws)
    expected = (row / temperature).softmax(0) * draws
    seen = torch.bincount(tokens, minlength=60).float()
    rare = expected < 5
    if bool(rare.any()):
        expected = torch.cat((expected[~rare], expected[rare].sum()[None]))
        seen = torch.cat((seen[~rare], seen[rare].sum()[None]))
    freedom = len(seen) - 1
    bound = freedom * (1 - 2 / (9 * freedom) + 3.09 * math.sqrt(2 / (9 * freedom))) ** 3
    assert float(((seen - expected) ** 2 / expected).sum()) < bound


@pytest.mark.parametrize("sigma", [0.02, 0.1])
def test_the_mismatch_of_noisy_logits_is_what_theory_says(sigma: float) -> None:
    """P(mismatch) = 0.564·σ·G with G = 1 − Σp²."""
    rows = 20_000
    logits = torch.randn(rows, 100, generator=generator(9)) * 2
    seeds, positions, temperatures = [5] * rows, list(range(rows)), [1.0] * rows
    worker = logits + sigma * torch.randn(logits.shape, generator=generator(10))
    tokens, _ = sample(worker, seeds, positions, temperatures)
    missed = float((margins(logits, seeds, positions, tokens, temperatures).margins > 0).float().mean())
    diversity = float((1 - (logits.softmax(1) ** 2).sum(1)).mean())
    expected = 0.564 * sigma * diversity
    assert missed == pytest.approx(expected, abs=4 * math.sqrt(expected / rows) + 0.05 * expected)


def test_memory_beyond_the_arguments_does_not_grow_with_the_rows() -> None:
    def peak(rows: int) -> int:
        logits = torch.randn(1, 20_000, generator=generator(11)).bfloat16().expand(rows, 20_000)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        margins(logits, [1] * rows, list(range(rows)), [0] * rows, [1.0] * rows)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before

    peak(100)
    assert peak(1000) < 20_000  # KiB; a float32 copy of these logits would be 80,000


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_worker_with_broken_logits_draws_nothing(value: float) -> None:
    logits = torch.zeros(3, 50)
    logits[2, 7] = value
    with pytest.raises(EngineError, match="row 2"):
        sample(logits, [1] * 3, [1] * 3, [1.0] * 3)


def test_a_row_that_forbids_every_token_draws_nothing() -> None:
    with pytest.raises(EngineError):
        sample(torch.full((1, 50), -math.inf), [1], [1], [1.0])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_verifier_with_broken_logits_gives_no_margin(value: float) -> None:
    logits = torch.zeros(20, 50)
    logits[18, 7] = value
    for run in (margins, dense_margins):
        with pytest.raises(EngineError, match="not finite"):
            run(logits, [1] * 20, [1] * 20, [3] * 20, [1.0] * 20)


def dense_margins(
    logits: torch.Tensor, seeds: list[int], positions: list[int], tokens: list[int], temperatures: list[float]
) -> sampling.MarginResult:
    return sampling._margins_dense(logits, sampling._prefixes(seeds, positions), np.array(tokens), temperatures)


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan, math.inf])
def test_an_impossible_temperature_is_named(temperature: float) -> None:
    with pytest.raises(UsageError, match="temperature"):
        sample(torch.zeros(1, 5), [1], [1], [temperature])


@pytest.mark.parametrize("token", [-1, 5])
def test_a_claimed_token_outside_the_vocabulary_is_named(token: int) -> None:
    with pytest.raises(UsageError, match="below 5"):
        margins(torch.zeros(1, 5), [1], [1], [token], [1.0])


def test_rows_and_arguments_must_match() -> None:
    with pytest.raises(UsageError, match="as many"):
        sample(torch.zeros(2, 5), [1], [1, 2], [1.0, 1.0])
    with pytest.raises(UsageError, match="rows, vocabulary"):
        sample(torch.zeros(5), [1], [1], [1.0])


def test_no_float32_token_may_exceed_the_hard_margin() -> None:
    limits = limits_for("float32", "float32")
    (fine,) = judge_margins([0.0, limits.margin_hard, 0.0], limits)
    (forced,) = judge_margins([0.0] * 9000 + [0.3, 0.0], limits)
    assert fine.ok and fine.span is None
    assert not forced.ok and forced.value == pytest.approx(0.3) and forced.span == (9000, 9001)


def test_bfloat16_has_a_budget_that_short_traces_do_not_reach() -> None:
    limits = limits_for("bfloat16", "bfloat16")
    over = limits.margin_hard + 0.1
    assert not judge_margins([0.0] * 4094 + [over], limits)[0].ok
    assert judge_margins([0.0] * 4095 + [over], limits)[0].ok
    assert not judge_margins([0.0] * 4094 + [over, over], limits)[0].ok


def test_a_low_temperature_widens_the_margin_as_it_widens_the_error() -> None:
    limits = limits_for("float32", "float32")
    assert not judge_margins([0.05], limits)[0].ok
    assert judge_margins([0.05], limits, temperature=0.1)[0].ok


def test_a_margin_that_is_not_a_number_is_over_the_limit() -> None:
    assert not judge_margins([0.0, math.nan], limits_for("float32", "float32"))[0].ok


def test_an_unmeasured_pair_has_no_limits() -> None:
    with pytest.raises(UsageError, match="worker's dtype"):
        limits_for("float16", "float32")
