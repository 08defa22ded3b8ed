"""The objective of one learner step (docs/decisions/0006-loss.md). Pure torch: tensors in, tensors out.

For every generated token, with log μ from our own pass over the policy that drew it, log π of the policy being
trained, r = exp(log π − log μ) and the advantage A of its completion:

    loss = Σ_tokens ( −gain + β · (log π − log μ)² ) / N         β = log_ratio_penalty

and `gain` by the name in the configuration, with c = ratio_cap, l = clip_low, h = clip_high, sg: no gradient:

    difference  keep · A · min(r, c)                keep = 0 where A > 0 and π − μ > δ, or A < 0 and π − μ < −δ
    grpo        min(A · r, A · clip(r, 1 − l, 1 + h))
    two-sided   min(A · min(r, c), A · clip(r, 1 − l, 1 + h))
    cispo       sg(min(r, 1 + h)) · A · log π
    token-tis   sg(min(r, c)) · A · log π
    gspo        as grpo, with the geometric mean of r over the completion for each of its tokens

N is a constant, so a token weighs the same in a long completion and a short one, in this step and the next
(Dr. GRPO, arXiv 2503.20783); none of these divides by a completion's length, as some of the papers do. The penalty
pulls π back to μ where the advantage is silent, under every name; 0 leaves it out. Log-softmax is in float32
whatever the model computes in.

Not here: where log μ comes from and what is done with the gradient (learner.py).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

_FIGURES_MOST: Final = 50.0  # log ratios are cut here in the figures, whose squares must stay finite


@dataclass(frozen=True, slots=True)
class LossSettings:
    """The constants above, and the temperature the completions were drawn at. A clip of 0 is the loss's own."""

    mask_difference: float  # δ
    ratio_cap: float
    log_ratio_penalty: float
    tokens: float  # N
    temperature: float = 1.0
    name: str = "difference"
    clip_low: float = 0.0
    clip_high: float = 0.0

    def clips(self) -> tuple[float, float]:
        low, high = CLIPS.get(self.name, (0.0, 0.0))
        return self.clip_low or low, self.clip_high or high


@dataclass(frozen=True, slots=True)
class LossSums:
    """Sums over generated tokens, so that micro-batches add up exactly. r is neither capped nor clipped."""

    tokens: int = 0
    loss: float = 0.0
    ratios: float = 0.0
    squares: float = 0.0
    divergence: float = 0.0  # r − 1 − log r, an estimate of KL(μ‖π) that is never negative
    surprise: float = 0.0  # −r · log π
    ratio_max: float = 0.0
    masked: int = 0  # left out for having moved too far
    clipped: int = 0  # whose ratio was cut, so that their gradient is another than A · r · ∇ log π

    def __add__(self, other: LossSums) -> LossSums:
        names = [field.name for field in dataclasses.fields(self)]
        added = {name: getattr(self, name) + getattr(other, name) for name in names}
        return LossSums(**{**added, "ratio_max": max(self.ratio_max, other.ratio_max)})

    @property
    def ess(self) -> float:
        """Effective sample size over tokens, as a share of them: (Σr)² / (N Σr²). 1 when nothing drifted."""
        return self.ratios**2 / (self.tokens * self.squares) if self.squares else 0.0

    @property
    def kl(self) -> float:
        """KL(μ‖π), nats a token (Schulman's k3)."""
        return self.divergence / max(self.tokens, 1)

    @property
    def entropy(self) -> float:
        """Of π, nats a token, estimated from the tokens μ drew: Σ −r log π / Σ r. Costs no pass over the logits."""
        return self.surprise / self.ratios if self.ratios else 0.0

    @property
    def ratio_mean(self) -> float:
        """1 in expectation, however far π is from μ; far from 1, μ is not what drew the tokens."""
        return self.ratios / max(self.tokens, 1)

    @property
    def masked_share(self) -> float:
        return self.masked / max(self.tokens, 1)

    @property
    def clipped_share(self) -> float:
        return self.clipped / max(self.tokens, 1)


def token_logprobs(logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    """log softmax(logits / T) of each row's token, float32 [N]. logits [N, V], tokens int64 [N]."""
    return -F.cross_entropy(logits.float() / temperature, tokens, reduction="none")


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """Generated tokens of whole completions, one completion after the other; all [n], any float dtype.

    logprobs carries the gradient; mu and advantages (the completion's, repeated) do not. counts: tokens of each
    completion, [completions], adding up to n.
    """

    logprobs: Tensor
    mu: Tensor
    advantages: Tensor
    counts: Sequence[int]


@dataclass(frozen=True, slots=True, eq=False)
class Gains:
    """What a loss makes of each token: the gain [n] with its gradient, and which tokens it masked and clipped."""

    gain: Tensor
    masked: Tensor
    clipped: Tensor


def token_losses(batch: Tokens, settings: LossSettings) -> tuple[Tensor, LossSums]:
    """Each token's term of the loss [n], already divided by N, and the sums."""
    gains = LOSSES[settings.name](batch, settings)
    log_ratio = batch.logprobs - batch.mu
    losses = (settings.log_ratio_penalty * log_ratio.square() - gains.gain) / settings.tokens
    return losses, _sums(losses, batch.logprobs, log_ratio, gains)


def difference(batch: Tokens, settings: LossSettings) -> Gains:
    """keep stops a token that has already moved far enough in the direction its advantage asks for; by difference of
    probabilities, not by ratio, since a ratio is large for rare tokens that hardly moved (as PRIME-RL's default).
    Beyond the cap the weight is constant and there is no gradient, so one token of a stale completion cannot
    dominate. docs/decisions/0006-loss.md has the measurements."""
    moved = batch.logprobs.detach().exp() - batch.mu.exp()
    ahead = torch.where(batch.advantages > 0, moved, torch.where(batch.advantages < 0, -moved, 0.0))
    masked = ahead > settings.mask_difference
    capped = _log_ratio(batch) > math.log(settings.ratio_cap)
    gain = torch.where(masked, 0.0, batch.advantages * _ratio(batch.logprobs - batch.mu, settings.ratio_cap))
    return Gains(gain, masked, capped & ~masked)


def grpo(batch: Tokens, settings: LossSettings) -> Gains:
    """PPO's clip (arXiv 1707.06347) as GRPO uses it (DeepSeekMath, arXiv 2402.03300). clip_high above clip_low is
    DAPO's clip-higher (arXiv 2503.14476): room for rare tokens to become likely; it takes 0.28."""
    return _clipped(batch.logprobs - batch.mu, batch.advantages, settings, most=math.inf)


def two_sided(batch: Tokens, settings: LossSettings) -> Gains:
    """INTELLECT-2's clip (arXiv 2505.07291): grpo's lets a ratio grow without bound where A < 0, and one token of a
    stale completion then dominates; here it is capped at ratio_cap, their δ = 4."""
    return _clipped(batch.logprobs - batch.mu, batch.advantages, settings, most=settings.ratio_cap)


def gspo(batch: Tokens, settings: LossSettings) -> Gains:
    """Clips whole completions by the geometric mean of their ratios (arXiv 2507.18071): reward is of the sequence,
    and so is what may be trusted of it. The paper's clips are three orders below the others'."""
    counts = torch.as_tensor(batch.counts, device=batch.mu.device)
    owner = torch.repeat_interleave(counts)
    log_ratio = batch.logprobs - batch.mu
    sums = torch.zeros(len(counts), dtype=log_ratio.dtype, device=log_ratio.device).index_add(0, owner, log_ratio)
    return _clipped((sums / counts)[owner], batch.advantages, settings, most=math.inf)


def cispo(batch: Tokens, settings: LossSettings) -> Gains:
    """MiniMax-M1's (arXiv 2506.13585): clipping cuts the weight of a token, never its gradient, so rare tokens on
    which a line of thought turns go on being learned. The default cap of 5 is ScaleRL's (arXiv 2510.13786)."""
    return _weighted(batch, 1.0 + settings.clips()[1])


def token_tis(batch: Tokens, settings: LossSettings) -> Gains:
    """Truncated importance sampling by token (IMPALA's ρ̄, arXiv 1802.01561): REINFORCE, corrected for who drew the
    token as far as the cap allows. Differs from cispo in where the cap comes from: a bound on variance, not a clip."""
    return _weighted(batch, settings.ratio_cap)


def _log_ratio(batch: Tokens) -> Tensor:
    return batch.logprobs.detach() - batch.mu


def _ratio(log_ratio: Tensor, most: float) -> Tensor:
    """min(exp(log_ratio), most)."""
    # As a clamp on the logarithm: exp of a large difference would be infinite, and its gradient NaN.
    return log_ratio.clamp(max=min(math.log(most), _FIGURES_MOST)).exp()


def _clipped(log_ratio: Tensor, advantages: Tensor, settings: LossSettings, most: float) -> Gains:
    low, high = settings.clips()
    ratio = _ratio(log_ratio, most)
    held = ratio.clamp(1.0 - low, 1.0 + high)
    gain = torch.minimum(advantages * ratio, advantages * held)
    found = log_ratio.detach().exp()
    up, down = advantages > 0, advantages < 0
    clipped = (up & (found > 1.0 + high)) | (down & ((found < 1.0 - low) | (found > most)))
    return Gains(gain, torch.zeros_like(clipped), clipped)


def _weighted(batch: Tokens, most: float) -> Gains:
    log_ratio = _log_ratio(batch)
    clipped = log_ratio > math.log(most)
    gain = _ratio(log_ratio, most) * batch.advantages * batch.logprobs
    return Gains(gain, torch.zeros_like(clipped), clipped)


LOSSES: Final[Mapping[str, Callable[[Tokens, LossSettings], Gains]]] = MappingProxyType(
    {
        "difference": difference,
        "grpo": grpo,
        "two-sided": two_sided,
        "cispo": cispo,
        "token-tis": token_tis,
        "gspo": gspo,
    }
)
# (l, h) of the papers, where a loss clips.
CLIPS: Final[Mapping[str, tuple[float, float]]] = MappingProxyType(
    {"grpo": (0.2, 0.2), "two-sided": (0.2, 0.2), "cispo": (0.0, 4.0), "gspo": (3e-4, 4e-4)}
)


@torch.no_grad()
def _sums(losses: Tensor, logprobs: Tensor, log_ratio: Tensor, gains: Gains) -> LossSums:
    wide = log_ratio.double().clamp(max=_FIGURES_MOST)
    ratio = wide.exp()
    parts = {
        "loss": losses.double().sum(),
        "ratios": ratio.sum(),
        "squares": ratio.square().sum(),
        "divergence": (ratio - 1 - wide).sum(),
        "surprise": -(ratio * logprobs.double()).sum(),
        "ratio_max": ratio.max(),
    }
    figures = dict(zip(parts, torch.stack(list(parts.values())).tolist(), strict=True))
    return LossSums(tokens=losses.numel(), masked=int(gains.masked.sum()), clipped=int(gains.clipped.sum()), **figures)
