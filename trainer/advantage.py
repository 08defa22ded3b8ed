"""How much better than its group each completion was. Pure.

Not here: which groups are learned from (batch.py) and what the advantage does to the policy (loss.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def advantages(rewards: Sequence[float]) -> tuple[float, ...]:
    """A = r − mean(group). Not divided by the standard deviation: that would weigh a task by how nearly
    decided it is (Dr. GRPO, arXiv 2503.20783, section 3)."""
    mean = math.fsum(rewards) / len(rewards)
    return tuple(reward - mean for reward in rewards)


def is_flat(rewards: Sequence[float]) -> bool:
    """Whether every completion earned the same, so that the group says nothing about what to prefer."""
    return min(rewards) == max(rewards)
