"""The loss against a slow float64 reference written from its definition, token by token."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from protocol.errors import UsageError
from trainer.config import NAMED, TrainerConfig
from trainer.loss import LOSSES, LossSettings, LossSums, Tokens, token_logprobs, token_losses

SETTINGS = LossSettings(mask_difference=0.2, ratio_cap=4.0, log_ratio_penalty=1e-3, tokens=100.0)


@dataclass
class Token:
    loss: float
    slope: float  # d loss / d log π
    ratio: float
    masked: bool


def reference(log_pi: float, log_mu: float, advantage: float) -> Token:
    pi, mu = math.exp(log_pi), math.exp(log_mu)
    difference = log_pi - log_mu
    ratio = math.exp(difference)
    masked = (advantage > 0 and pi - mu > 0.2) or (advantage < 0 and pi - mu < -0.2)
    loss, slope = 1e-3 * difference**2, 2e-3 * difference
    if not masked:
        loss -= advantage * min(ratio, 4.0)
        slope -= advantage * ratio if ratio < 4.0 else 0.0
    return Token(loss / 100, slope / 100, ratio, masked)


def losses_of(
    log_pi: Tensor,
    log_mu: Tensor,
    advantage: Tensor,
    settings: LossSettings = SETTINGS,
    counts: list[int] | None = None,
) -> tuple[Tensor, LossSums]:
    return token_losses(Tokens(log_pi, log_mu, advantage, counts or [len(log_pi)]), settings)


def drawn(count: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """log π, log μ, A in float64, over all regions of the loss."""
    generator = torch.Generator().manual_seed(seed)
    log_pi = -torch.rand(count, generator=generator, dtype=torch.float64) * 4
    log_mu = (log_pi + torch.randn(count, generator=generator, dtype=torch.float64)).clamp(max=-1e-3)
    return log_pi, log_mu, torch.randn(count, generator=generator, dtype=torch.float64)


def test_losses_gradients_and_sums_equal_the_definition() -> None:
    log_pi, log_mu, advantage = drawn(2000, 0)
    expected = [reference(*values) for values in zip(log_pi.tolist(), log_mu.tolist(), advantage.tolist(), strict=True)]
    regions = {(each.masked, each.ratio > 4) for each in expected}
    assert regions == {(False, False), (False, True), (True, False), (True, True)}
    log_pi.requires_grad_(True)
    losses, sums = losses_of(log_pi, log_mu, advantage)
    losses.sum().backward()
    assert log_pi.grad is not None
    torch.testing.assert_close(losses.detach(), torch.tensor([e.loss for e in expected], dtype=torch.float64))
    torch.testing.assert_close(log_pi.grad, torch.tensor([e.slope for e in expected], dtype=torch.float64))
    ratios = [each.ratio for each in expected]
    assert sums.tokens == 2000 and sums.masked == sum(each.masked for each in expected)
    assert sums.loss == pytest.approx(sum(each.loss for each in expected))
    assert sums.ess == pytest.approx(sum(ratios) ** 2 / (2000 * sum(ratio**2 for ratio in ratios)))
    assert sums.kl == pytest.approx(sum(ratio - 1 - math.log(ratio) for ratio in ratios) / 2000)


def test_the_gradient_is_the_slope_of_the_loss() -> None:
    log_pi, log_mu, advantage = drawn(60, 1)
    # Away from the mask's and the cap's edges, where the loss is not smooth.
    moved, ratio = log_pi.exp() - log_mu.exp(), (log_pi - log_mu).exp()
    smooth = ((moved.abs() - 0.2).abs() > 1e-2) & ((ratio - 4).abs() > 1e-1)
    log_pi, log_mu, advantage = log_pi[smooth].requires_grad_(True), log_mu[smooth], advantage[smooth]
    assert torch.autograd.gradcheck(lambda x: losses_of(x, log_mu, advantage)[0], (log_pi,))


# d loss · 100 / d log π without the penalty, of one token with ratio r and advantage A, from the papers' formulas.
def slope_of(name: str, r: float, advantage: float) -> float:
    low, high, cap = 0.2, 0.28, 4.0
    if name in ("grpo", "two-sided"):
        beyond = r > 1 + high if advantage > 0 else r < 1 - low
        return 0.0 if beyond or (name == "two-sided" and r > cap) else -advantage * r
    if name == "cispo":
        return -advantage * min(r, 1 + high)
    assert name == "token-tis"
    return -advantage * min(r, cap)


@pytest.mark.parametrize("name", ["grpo", "two-sided", "cispo", "token-tis"])
def test_the_gradient_of_each_loss_by_token_is_its_papers(name: str) -> None:
    log_pi, log_mu, advantage = drawn(2000, 6)
    settings = replace(SETTINGS, name=name, log_ratio_penalty=0.0, clip_low=0.2, clip_high=0.28)
    ratios = (log_pi - log_mu).exp().tolist()
    log_pi.requires_grad_(True)
    losses, sums = losses_of(log_pi, log_mu, advantage, settings)
    losses.sum().backward()
    expected = [slope_of(name, r, a) for r, a in zip(ratios, advantage.tolist(), strict=True)]
    torch.testing.assert_close(log_pi.grad, torch.tensor(expected, dtype=torch.float64) / 100)
    cut = sum(s != -a * r for s, r, a in zip(expected, ratios, advantage.tolist(), strict=True))
    assert sums.clipped == cut > 0 and sums.masked == 0
    # What is logged is raw: capped and clipped alike.
    assert sums.ratio_max == pytest.approx(max(ratios)) and sums.ratio_mean == pytest.approx(sum(ratios) / 2000)


def test_gspo_clips_whole_completions_by_the_geometric_mean_of_their_ratios() -> None:
    counts = [5, 1, 14, 20]
    log_pi, log_mu, _ = drawn(40, 7)
    log_mu = log_pi + 0.1 * (log_mu - log_pi)
    advantage = torch.tensor([1.0, -1.0, -0.5, 2.0], dtype=torch.float64).repeat_interleave(torch.tensor(counts))
    settings = replace(SETTINGS, name="gspo", log_ratio_penalty=0.0, clip_low=0.02, clip_high=0.03)
    log_pi.requires_grad_(True)
    losses, sums = losses_of(log_pi, log_mu, advantage, settings, counts)
    losses.sum().backward()
    expected, clipped = [], 0
    for pi, mu, gain in zip(log_pi.detach().split(counts), log_mu.split(counts), (1.0, -1.0, -0.5, 2.0), strict=True):
        ratio = math.exp(float((pi - mu).mean()))
        beyond = ratio > 1.03 if gain > 0 else ratio < 0.98
        clipped += beyond * len(pi)
        expected += [0.0 if beyond else -gain * ratio / 100] * len(pi)
    torch.testing.assert_close(log_pi.grad, torch.tensor(expected, dtype=torch.float64))
    assert 0 < sums.clipped == clipped < 40


@pytest.mark.parametrize("name", ["grpo", "two-sided", "gspo"])
def test_the_gradient_of_a_clipped_loss_is_its_slope(name: str) -> None:
    log_pi, log_mu, advantage = drawn(60, 8)
    settings = replace(SETTINGS, name=name, clip_low=0.2, clip_high=0.28)
    ratio = (log_pi - log_mu).exp()
    smooth = ((ratio - 0.8).abs() > 1e-2) & ((ratio - 1.28).abs() > 1e-2) & ((ratio - 4).abs() > 1e-1)
    log_pi, log_mu, advantage = log_pi[smooth].requires_grad_(True), log_mu[smooth], advantage[smooth]
    counts = [len(log_pi) - 20, 20]
    assert torch.autograd.gradcheck(lambda x: losses_of(x, log_mu, advantage, settings, counts)[0], (log_pi,))


@pytest.mark.parametrize("name", ["cispo", "token-tis"])
def test_the_gradient_of_a_weighted_loss_is_the_slope_of_its_logprobs_at_fixed_weights(name: str) -> None:
    log_pi, log_mu, advantage = drawn(60, 9)
    settings = replace(SETTINGS, name=name, log_ratio_penalty=0.0)
    weight = (log_pi - log_mu).exp().clamp(max=5.0 if name == "cispo" else 4.0)
    log_pi.requires_grad_(True)
    losses_of(log_pi, log_mu, advantage, settings)[0].sum().backward()
    assert torch.autograd.gradcheck(lambda x: -(weight * advantage * x) / 100, (log_pi,))
    torch.testing.assert_close(log_pi.grad, -(weight * advantage) / 100)


def test_a_configuration_knows_exactly_the_losses_there_are() -> None:
    assert set(NAMED["loss"]) == set(LOSSES)
    with pytest.raises(UsageError, match=r"loss = 'ppo' is not known; known: difference, grpo, two-sided, cispo"):
        TrainerConfig(loss="ppo")
    with pytest.raises(UsageError, match=r"advantage = 'gae' is not known; known: mean, grpo, rloo"):
        TrainerConfig(advantage="gae")


def test_entropy_is_estimated_from_what_mu_drew() -> None:
    generator = torch.Generator().manual_seed(10)
    pi = torch.softmax(torch.randn(12, generator=generator, dtype=torch.float64), 0)
    mu = torch.softmax(pi.log() + 0.3 * torch.randn(12, generator=generator, dtype=torch.float64), 0)
    tokens = torch.multinomial(mu, 20_000, replacement=True, generator=generator)
    _, sums = losses_of(pi.log()[tokens], mu.log()[tokens], torch.ones(20_000, dtype=torch.float64))
    assert sums.entropy == pytest.approx(-float((pi * pi.log()).sum()), abs=0.02)
    assert sums.kl == pytest.approx(float((mu * (mu / pi).log()).sum()), abs=0.01)


def test_micro_batches_add_up_to_the_whole_batch() -> None:
    log_pi, log_mu, advantage = drawn(300, 2)
    whole = losses_of(log_pi, log_mu, advantage)[1]
    total = LossSums()
    for part in (slice(0, 50), slice(50, 51), slice(51, 300)):
        total += losses_of(log_pi[part], log_mu[part], advantage[part])[1]
    assert (total.tokens, total.masked) == (whole.tokens, whole.masked)
    for name in ("loss", "ess", "kl", "entropy", "ratio_mean", "ratio_max"):
        assert getattr(total, name) == pytest.approx(getattr(whole, name))


def test_a_token_weighs_the_same_whatever_the_length_of_its_completion() -> None:
    log_pi, log_mu, advantage = drawn(10, 3)
    alone = losses_of(log_pi[:1], log_mu[:1], advantage[:1])[0]
    among = losses_of(log_pi, log_mu, advantage)[0]
    assert alone[0] == among[0]


def test_a_policy_that_has_not_moved_learns_by_advantage_alone() -> None:
    log_mu = torch.tensor([-0.5, -2.0], dtype=torch.float64)
    log_pi = log_mu.clone().requires_grad_(True)
    losses, sums = losses_of(log_pi, log_mu, torch.tensor([0.75, -0.25], dtype=torch.float64))
    losses.sum().backward()
    torch.testing.assert_close(log_pi.grad, torch.tensor([-0.75, 0.25], dtype=torch.float64) / 100)
    assert (sums.ess, sums.kl, sums.masked_share) == (1.0, 0.0, 0.0)


@pytest.mark.parametrize("name", LOSSES)
def test_a_ratio_beyond_float_range_gives_a_finite_gradient_and_finite_figures(name: str) -> None:
    settings = replace(SETTINGS, name=name)
    log_pi = torch.tensor([-1e-6, -1e-6], requires_grad=True)
    losses, sums = losses_of(log_pi, torch.tensor([-500.0, -500.0]), torch.tensor([1.0, -1.0]), settings)
    losses.sum().backward()
    assert all(math.isfinite(figure) for figure in (sums.loss, sums.ess, sums.kl)) and sums.kl > 1e-2
    assert torch.isfinite(losses).all() and log_pi.grad is not None and torch.isfinite(log_pi.grad).all()


def test_logprobs_are_of_the_tempered_softmax_in_float32() -> None:
    logits = torch.randn(5, 17, generator=torch.Generator().manual_seed(4)) * 3
    tokens = torch.tensor([0, 3, 16, 7, 7])
    expected = torch.log_softmax(logits.double() / 0.7, dim=1).gather(1, tokens[:, None])[:, 0]
    found = token_logprobs(logits.bfloat16(), tokens, 0.7)
    assert found.dtype == torch.float32
    torch.testing.assert_close(token_logprobs(logits, tokens, 0.7).double(), expected, atol=1e-5, rtol=1e-5)
    rounded = torch.log_softmax(logits.bfloat16().double() / 0.7, dim=1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(found.double(), rounded, atol=1e-5, rtol=1e-5)
