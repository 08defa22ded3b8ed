"""The loss against a slow float64 reference written from its definition, token by token."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from trainer.loss import LossSettings, LossSums, token_logprobs, token_losses

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
    losses, sums = token_losses(log_pi, log_mu, advantage, SETTINGS)
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
    assert torch.autograd.gradcheck(lambda x: token_losses(x, log_mu, advantage, SETTINGS)[0], (log_pi,))


def test_micro_batches_add_up_to_the_whole_batch() -> None:
    log_pi, log_mu, advantage = drawn(300, 2)
    whole = token_losses(log_pi, log_mu, advantage, SETTINGS)[1]
    total = LossSums()
    for part in (slice(0, 50), slice(50, 51), slice(51, 300)):
        total += token_losses(log_pi[part], log_mu[part], advantage[part], SETTINGS)[1]
    assert (total.tokens, total.masked) == (whole.tokens, whole.masked)
    for name in ("loss", "ess", "kl"):
        assert getattr(total, name) == pytest.approx(getattr(whole, name))


def test_a_token_weighs_the_same_whatever_the_length_of_its_completion() -> None:
    log_pi, log_mu, advantage = drawn(10, 3)
    alone = token_losses(log_pi[:1], log_mu[:1], advantage[:1], SETTINGS)[0]
    among = token_losses(log_pi, log_mu, advantage, SETTINGS)[0]
    assert alone[0] == among[0]


def test_a_policy_that_has_not_moved_learns_by_advantage_alone() -> None:
    log_mu = torch.tensor([-0.5, -2.0], dtype=torch.float64)
    log_pi = log_mu.clone().requires_grad_(True)
    losses, sums = token_losses(log_pi, log_mu, torch.tensor([0.75, -0.25], dtype=torch.float64), SETTINGS)
    losses.sum().backward()
    torch.testing.assert_close(log_pi.grad, torch.tensor([-0.75, 0.25], dtype=torch.float64) / 100)
    assert (sums.ess, sums.kl, sums.masked_share) == (1.0, 0.0, 0.0)


def test_a_ratio_beyond_float_range_gives_a_finite_gradient_and_finite_figures() -> None:
    log_pi = torch.tensor([-1e-6, -1e-6], requires_grad=True)
    losses, sums = token_losses(log_pi, torch.tensor([-500.0, -500.0]), torch.tensor([1.0, -1.0]), SETTINGS)
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
