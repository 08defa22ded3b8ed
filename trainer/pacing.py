"""How much may be begun, so that it is learned from while it is fresh. Pure.

Work waits twice: while it is drawn, and then, complete, for the learner, which takes the oldest first and for each
version as many groups as a step has, of those that teach something. So a group begun now is used as many versions
later as there are whole steps' worth of such groups before it, drawn or not: what is counted is the queue, and no
clock is needed. How many of the groups that are still drawn will teach something follows from those before them.

    versions until used = versions its policy is behind + (waiting + share · being drawn) // groups_per_step

Where that is more than `staleness_target`, nothing new is begun: a node waits rather than a trace. A node much slower
than the others is not covered by that, as theirs overtake its own: what it would hand in beyond `staleness_limit` is
not leased to it, which does need the clock. Not here: who gets which slots (dispatch.py), reading the ledger
(ledger_use.py), how old a group may be when it is learned from (batch.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from trainer.config import TrainerConfig

LUCK: Final = 3.0  # standard deviations: by so much more of the groups being drawn may teach something than usual
SCARCE: Final = 0.25  # below this share of groups that teach something, no more are drawn at once: a lease reads all
BASE_TOKENS: Final = 1024  # drawn tokens for which lease_seconds is enough


@dataclass(frozen=True, slots=True)
class Consumption:
    """How the learner consumes, as the ledger tells: nothing of it is lost with a process.

    `made`: the newest policy version it has made, signed or not. `waiting`: complete groups that teach something and
    that made no version yet; those of a step that is being computed are among them. `taught` of the last `judged`
    complete groups taught something. `steps_per_second`: of the last steps, up to now; 0.0 before the second.
    """

    made: int
    waiting: int
    taught: int = 0
    judged: int = 0
    steps_per_second: float = 0.0

    @property
    def share(self) -> float:
        """Of complete groups that teach something. One that does is taken for granted: before anything is measured
        every group counts, so that a run begins with as much as it will surely use and no more."""
        return (self.taught + 1) / (self.judged + 1)


@dataclass(frozen=True, slots=True)
class Queue:
    """What stands before a group begun now: `waiting` for the learner, and `drawing` of which `share` will."""

    waiting: int
    drawing: int
    share: float
    judged: int  # complete groups of which the share was measured

    @property
    def usual(self) -> float:
        return self.waiting + self.share * self.drawing

    @property
    def most(self) -> float:
        """With luck: each group's rewards differ or not by itself, and the share was measured of groups that did so."""
        single = self.share * (1 - self.share)
        spread = LUCK * math.sqrt(single * self.drawing * (1 + self.drawing / (self.judged + 1)))
        return self.waiting + min(self.drawing, self.share * self.drawing + spread)


def queue_of(consumption: Consumption, drawing: int) -> Queue:
    return Queue(consumption.waiting, drawing, consumption.share, consumption.judged)


def versions_until_used(queue: Queue, config: TrainerConfig) -> int:
    """Policies that the learner makes before it takes a group begun now."""
    return math.floor(queue.most / config.groups_per_step + 1e-9)


def why_begin_nothing(of: Consumption, drawing: int, version: int, config: TrainerConfig) -> str:
    """Why no group of policy `version` is begun beside `drawing` open ones; "" where one may be."""
    behind = of.made - version
    if behind > config.staleness_target:
        return f"policy {of.made} is being published, this node's newest is {version}: {_target(config)}"
    queue = queue_of(of, drawing)
    if behind + versions_until_used(queue, config) <= config.staleness_target:
        return ""
    # Luck is no reason to let the learner wait: what its next step lacks is always begun.
    if queue.usual < config.groups_per_step:
        return ""
    return holding(queue, config)


def holding(queue: Queue, config: TrainerConfig) -> str:
    """Why nothing is begun, as a node and people are told it."""
    return f"waiting for the learner: {standing(queue, config)}"


def standing(queue: Queue, config: TrainerConfig) -> str:
    """What stands before a group begun now, for people."""
    steps = math.floor(queue.usual / config.groups_per_step + 1e-9)
    counted = f"{queue.waiting} groups wait, {queue.drawing} in flight"
    return f"{counted}, enough for {steps} steps ({_target(config)})"


def _target(config: TrainerConfig) -> str:
    return f"staleness_target {config.staleness_target}"


def most_open(of: Consumption, config: TrainerConfig) -> int:
    """Groups to be drawn at once: `open_groups` where all teach something, more where few do."""
    return math.ceil(config.open_groups / max(SCARCE, of.share) - 1e-9)


def versions_meanwhile(of: Consumption, seconds: float | None) -> int:
    """Policies that the learner makes in so many seconds; 0 where nobody knows how many those are."""
    return 0 if seconds is None else math.floor(seconds * of.steps_per_second)


def lease_seconds(config: TrainerConfig, drawn_tokens: int) -> float:
    """How long a lease lasts whose completions may draw so many tokens each. Long ones get longer: a deadline that is
    the same for all keeps the short completions of a task and loses the long ones, which is a bias nobody sees."""
    return config.lease_seconds + config.lease_token_seconds * max(0, drawn_tokens - BASE_TOKENS)
