"""How much better than its group each completion was, by the name in the configuration. Pure.

Not here: which groups are learned from (batch.py) and what the advantage does to the policy (loss.py).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

_LEAST_DEVIATION: Final = 1e-4  # of rewards that differ in their last digits only


def mean(rewards: Sequence[float]) -> tuple[float, ...]:
    """A = r − mean(group). Not divided by the standard deviation: that would weigh a task by how nearly
    decided it is (Dr. GRPO, arXiv 2503.20783, section 3)."""
    middle = math.fsum(rewards) / len(rewards)
    return tuple(reward - middle for reward in rewards)


def grpo(rewards: Sequence[float]) -> tuple[float, ...]:
    """A = (r − mean(group)) / std(group), the sample's (DeepSeekMath, arXiv 2402.03300, section 4.1)."""
    scale = statistics.stdev(rewards) + _LEAST_DEVIATION
    return tuple(gain / scale for gain in mean(rewards))


def rloo(rewards: Sequence[float]) -> tuple[float, ...]:
    """A = r − mean(the others of the group): a baseline that the completion itself is not in, so the gradient is
    unbiased (arXiv 2402.14740). n / (n − 1) times `mean`."""
    others = len(rewards) - 1
    total = math.fsum(rewards)
    return tuple(reward - (total - reward) / others for reward in rewards)


ADVANTAGES: Final[Mapping[str, Callable[[Sequence[float]], tuple[float, ...]]]] = MappingProxyType(
    {"mean": mean, "grpo": grpo, "rloo": rloo}
)


def length_penalty(drawn: int, *, most: int, ramp: int) -> float:
    """0 up to most − ramp drawn tokens, from there linearly to −1 at `most` (DAPO's soft overlong punishment,
    arXiv 2503.14476, section 3.4)."""
    return -min(1.0, max(0.0, (drawn - (most - ramp)) / ramp))


def is_flat(rewards: Sequence[float]) -> bool:
    """Whether every completion earned the same, so that the group says nothing about what to prefer."""
    return min(rewards) == max(rewards)
