"""The objective of one learner step (docs/decisions/0006-loss.md). Pure torch: tensors in, tensors out.

For every generated token, with log μ from our own pass over the policy that drew it, log π of the policy being
trained and the advantage A of its completion:

    keep  = 0 where A > 0 and π − μ > δ, or A < 0 and π − μ < −δ; else 1        δ = mask_difference = 0.2
    w     = min(exp(log π − log μ), c)                                           c = ratio_cap = 4
    loss  = Σ_tokens ( −keep · A · w + β · (log π − log μ)² ) / N                β = log_ratio_penalty = 1e-3

N is a constant, so a token weighs the same in a long completion and a short one, in this step and the next
(Dr. GRPO, arXiv 2503.20783). keep stops a token that has already moved far enough in the direction its advantage
asks for; by difference of probabilities, not by ratio, since a ratio is large for rare tokens that hardly moved
(as PRIME-RL's default loss). Beyond the cap c the weight is constant and the policy term has no gradient, so one
token of a stale completion cannot dominate; the penalty still pulls it back. The penalty is what keeps π near μ
where the advantage is silent. Log-softmax is in float32 whatever the model computes in.

Not here: where log μ comes from and what is done with the gradient (learner.py).
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

_FIGURES_MOST: Final = 50.0  # log ratios are cut here in the figures, whose squares must stay finite


@dataclass(frozen=True, slots=True)
class LossSettings:
    """The constants above, and the temperature the completions were drawn at."""

    mask_difference: float
    ratio_cap: float
    log_ratio_penalty: float
    tokens: float  # N
    temperature: float = 1.0


@dataclass(frozen=True, slots=True)
class LossSums:
    """Sums over generated tokens, so that micro-batches add up exactly. r = exp(log π − log μ), not capped."""

    tokens: int = 0
    loss: float = 0.0
    ratios: float = 0.0
    squares: float = 0.0
    divergence: float = 0.0  # r − 1 − log r, an estimate of KL(μ‖π) that is never negative
    masked: int = 0

    def __add__(self, other: LossSums) -> LossSums:
        names = [field.name for field in dataclasses.fields(self)]
        return LossSums(**{name: getattr(self, name) + getattr(other, name) for name in names})

    @property
    def ess(self) -> float:
        """Effective sample size over tokens, as a share of them: (Σr)² / (N Σr²). 1 when nothing drifted."""
        return self.ratios**2 / (self.tokens * self.squares) if self.squares else 0.0

    @property
    def kl(self) -> float:
        """KL(μ‖π), nats a token (Schulman's k3)."""
        return self.divergence / max(self.tokens, 1)

    @property
    def masked_share(self) -> float:
        return self.masked / max(self.tokens, 1)


def token_logprobs(logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    """log softmax(logits / T) of each row's token, float32 [N]. logits [N, V], tokens int64 [N]."""
    return -F.cross_entropy(logits.float() / temperature, tokens, reduction="none")


def token_losses(logprobs: Tensor, mu: Tensor, advantages: Tensor, settings: LossSettings) -> tuple[Tensor, LossSums]:
    """Each token's term of the loss, already divided by N, and the sums; all [n], any float dtype.

    logprobs carries the gradient; mu and advantages (the completion's, repeated) do not.
    """
    log_ratio = logprobs - mu
    moved = logprobs.detach().exp() - mu.exp()
    too_far = torch.where(advantages > 0, moved, torch.where(advantages < 0, -moved, 0.0)) > settings.mask_difference
    # As a clamp on the logarithm: exp of a large difference would be infinite, and its gradient NaN.
    weight = log_ratio.clamp(max=math.log(settings.ratio_cap)).exp()
    gain = torch.where(too_far, 0.0, advantages * weight)
    losses = (settings.log_ratio_penalty * log_ratio.square() - gain) / settings.tokens
    return losses, _sums(losses, log_ratio, too_far)


@torch.no_grad()
def _sums(losses: Tensor, log_ratio: Tensor, too_far: Tensor) -> LossSums:
    wide = log_ratio.double()
    ratio = wide.clamp(max=_FIGURES_MOST).exp()
    parts = (
        losses.double().sum(),
        ratio.sum(),
        ratio.square().sum(),
        (ratio - 1 - wide.clamp(max=_FIGURES_MOST)).sum(),
    )
    loss, ratios, squares, divergence = torch.stack(parts).tolist()
    return LossSums(losses.numel(), loss, ratios, squares, divergence, int(too_far.sum()))
