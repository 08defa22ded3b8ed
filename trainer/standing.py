"""How far a node is trusted, from its latest audits: how many of its traces are recomputed, how much work it gets.

Pure. Not here: the draw itself (audit_draw.py) and who gets which slot (dispatch.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainer.config import TrainerConfig


@dataclass(frozen=True, slots=True)
class Standing:
    """`rate`: share of the node's traces that are audited. `on_probation`: it failed an audit not long ago."""

    rate: float
    on_probation: bool


def audits_that_count(config: TrainerConfig) -> int:
    """How many of a node's latest audits `standing` looks at."""
    return config.audit_first


def standing(latest_audits: Sequence[bool], config: TrainerConfig) -> Standing:
    """SPEC 10.6. `latest_audits`: the newest `audits_that_count` audits of a node, True where it passed.

    Everything is audited until so many passed in a row: for a new node, and again after a failed audit.
    """
    on_probation = not all(latest_audits)
    proven = len(latest_audits) >= audits_that_count(config) and not on_probation
    return Standing(config.audit_rate if proven else 1.0, on_probation)
