"""How far a node is trusted, from its latest audits: how many of its traces are recomputed, how much work it gets.

Pure. Not here: the mathematics of the rate (verify/standing.py), the draw itself (audit_draw.py) and who gets which
slot (dispatch.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from trainer.config import TrainerConfig
from verify.standing import deterrence, sampling_rate

DETECTION: Final = 0.99  # of cheats by one audit, as the controls find: what the stake a person is shown assumes


@dataclass(frozen=True, slots=True)
class Standing:
    """`rate`: share of the node's traces that are audited, of pairs that are calibrated. `on_probation`: it failed an
    audit not long ago."""

    rate: float
    on_probation: bool


def standing(audits: Sequence[bool], config: TrainerConfig, *, trusted: bool = False) -> Standing:
    """SPEC 10.7. `audits`: the newest of a node, newest first, True where it passed. `trusted`: a person vouches for
    it, and it has not lied since.

    Everything is audited until so many passed in a row: for a new node, and again after a failed audit.
    """
    if trusted:
        return Standing(config.audit_floor, on_probation=False)
    on_probation = not all(audits[: config.audit_first])
    return Standing(sampling_rate(audits, config.audit_first, config.audit_floor), on_probation)


def stake(rate: float) -> float:
    """How many times what one cheat gains a node must stand to lose for cheating not to pay, audited at `rate`."""
    return deterrence(rate, DETECTION)
