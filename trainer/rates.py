"""What becomes of the slots that are leased, by the length of their completions, their reward and their environment.

Long completions are the ones that run past a deadline or are too old when they are done, and where they are also the
ones that succeed, a policy learns to be brief and wrong. So it is said when one kind is lost more than the others.
A lease that ran out is counted with the trace that its slot gave in the end: the same seed gives the same trace. Not
here: reading the slots (ledger_use.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from trainer.config import TrainerConfig
from trainer.ledger import Ledger
from trainer.ledger_use import SettledSlot

WINDOW: Final = 2048  # slots, of the newest groups that are over
LEAST: Final = 40  # leases of a kind before anything is concluded of it
CLEARLY: Final = 0.1  # of the leases of one kind that must come to nothing beyond those of the others
DEVIATIONS: Final = 4.0  # of such a difference by chance; a dozen kinds are looked at for weeks
NEVER_SHARE: Final = 0.02  # of all slots, that ran past two deadlines and were never drawn
# Of slots without an accepted trace. What a refused one says of its length and reward may be a lie.
REFUSED, UNJUDGED, NEVER = "only refused", "never judged", "never drawn"
UNKNOWN: Final = (REFUSED, UNJUDGED, NEVER)
LENGTH, REWARD, ENVIRONMENT = "length", "reward", "environment"


@dataclass(frozen=True, slots=True)
class Rate:
    """Leases of slots of one kind, each counted once: as `expired`, `returned`, `refused`, `unanswered` (its group was
    given up before), or `completed`. Of the completed: `used` in a batch, `stale`, or `given_up` with their group for
    another reason. `lag_mean`, `lag_most`: versions between the policy that drew the used ones and the one that
    learned."""

    by: str
    kind: str
    leased: int
    expired: int
    returned: int
    refused: int
    unanswered: int
    completed: int
    used: int
    stale: int
    given_up: int
    lag_mean: float | None
    lag_most: int | None

    @property
    def counted(self) -> int:
        """Leases whose end says something of their kind: a refusal is the node's."""
        return self.leased - self.refused


@dataclass(slots=True)
class _Sums:
    """Of the slots of one kind, as they come."""

    leased: int = 0
    expired: int = 0
    returned: int = 0
    refused: int = 0
    completed: int = 0
    used: int = 0
    stale: int = 0
    lags: int = 0
    lag_most: int | None = None

    def add(self, slot: SettledSlot) -> None:
        self.leased += slot.leased
        self.expired += slot.expired
        self.returned += slot.returned
        self.refused += slot.refused
        self.completed += slot.completed
        self.used += slot.used
        self.stale += slot.stale and bool(slot.completed)
        if slot.lag is not None:
            self.lags += slot.lag
            self.lag_most = slot.lag if self.lag_most is None else max(self.lag_most, slot.lag)


def told(ledger: Ledger, config: TrainerConfig) -> dict[str, Any]:
    """`rates`: one row a kind, by environment, by length and by reward, in order of these; `losses`: what is being
    lost, as texts. One slot is held at a time: the gateway looks for as long as a run is served, and would keep what
    thousands of them take for a moment."""
    kinds: dict[tuple[str, Any, str], _Sums] = {}
    slots = never = 0
    for slot in ledger.settled_slots(max(1, WINDOW // config.group_size)):
        environment = slot.environment
        for kind in ((ENVIRONMENT, environment, environment), (LENGTH, *_length(slot)), (REWARD, *_reward(slot))):
            kinds.setdefault(kind, _Sums()).add(slot)
        slots += 1
        never += slot.expired >= 2 and not slot.answered
    found = [
        _rate(by, kind, sums)
        for wanted in (ENVIRONMENT, LENGTH, REWARD)
        for (by, _, kind), sums in sorted(
            ((key, kinds[key]) for key in kinds if key[0] == wanted), key=lambda each: each[0]
        )
    ]
    return {"rates": [asdict(each) for each in found], "losses": [*losses(found), *_never_drawn(never, slots, config)]}


def _rate(by: str, kind: str, of: _Sums) -> Rate:
    return Rate(
        by=by,
        kind=kind,
        leased=of.leased,
        expired=of.expired,
        returned=of.returned,
        refused=of.refused,
        unanswered=max(0, of.leased - of.expired - of.returned - of.refused - of.completed),
        completed=of.completed,
        used=of.used,
        stale=of.stale,
        given_up=of.completed - of.used - of.stale,
        lag_mean=None if of.lag_most is None else of.lags / of.used,
        lag_most=of.lag_most,
    )


def _length(slot: SettledSlot) -> tuple[float, str]:
    """Doubling: up to 16 tokens, 17 to 32, 33 to 64, and so on."""
    if slot.tokens is None:
        return math.inf, _unknown(slot)
    power = max(4, (slot.tokens - 1).bit_length())
    return power, f"{0 if power == 4 else 2 ** (power - 1) + 1}-{2**power} tokens"


def _unknown(slot: SettledSlot) -> str:
    if slot.refused:
        return REFUSED
    return UNJUDGED if slot.answered else NEVER


def _reward(slot: SettledSlot) -> tuple[float, str]:
    """Quarters of what most environments give, 0 to 1, with 0 and 1 on their own."""
    reward = slot.reward
    if reward is None:
        return math.inf, _unknown(slot)
    if reward < 0 or reward > 1:
        return (-1, "below 0") if reward < 0 else (5, "above 1")
    if reward in (0, 1):
        return (-0.5, "0") if reward == 0 else (4.5, "1")
    quarter = min(3, int(reward * 4))
    return quarter, f"{quarter / 4:g}-{(quarter + 1) / 4:g}"


# --- what is being lost ---


def losses(found: Sequence[Rate]) -> list[str]:
    """Kinds of which clearly fewer leases end in a batch than of the others."""
    lost = []
    for by in (LENGTH, REWARD, ENVIRONMENT):
        of_kind = [each for each in found if each.by == by and each.kind not in UNKNOWN]
        for place, each in enumerate(of_kind):
            others = [*of_kind[:place], *of_kind[place + 1 :]]
            if _clearly_fewer(each, others):
                lost.append(f"{_name(by, of_kind, place)} are being lost: {_figures(each, others)}")
    return lost


def _clearly_fewer(each: Rate, others: Sequence[Rate]) -> bool:
    n, m = each.counted, sum(other.counted for other in others)
    if n < LEAST or m < LEAST:
        return False
    here, there = each.used / n, sum(other.used for other in others) / m
    overall = (each.used + sum(other.used for other in others)) / (n + m)
    chance = math.sqrt(overall * (1 - overall) * (1 / n + 1 / m))
    return there - here >= CLEARLY and there - here > DEVIATIONS * chance


def _name(by: str, of_kind: Sequence[Rate], place: int) -> str:
    """By the side of the others it is on."""
    if by == ENVIRONMENT:
        return f"traces of {of_kind[place].kind}"
    below = sum(each.counted for each in of_kind[:place])
    above = sum(each.counted for each in of_kind[place + 1 :])
    names = ("long traces", "short traces") if by == LENGTH else ("successful traces", "unsuccessful traces")
    return names[0] if below >= above else names[1]


def _figures(each: Rate, others: Sequence[Rate]) -> str:
    there = sum(other.used for other in others) / sum(other.counted for other in others)
    what = each.kind if each.by != REWARD else f"reward {each.kind}"
    ends = ("expired", "returned", "unanswered", "stale", "given_up")
    most = max(ends, key=lambda name: int(getattr(each, name)))
    why = f"most of the rest {most.replace('_', ' ')} ({getattr(each, most)} of {each.leased} leases)"
    return f"of the leases of {what} {each.used / each.counted:.0%} end in a batch, of the others {there:.0%}; {why}"


def _never_drawn(never: int, slots: int, config: TrainerConfig) -> list[str]:
    if slots < LEAST or never < NEVER_SHARE * slots:
        return []
    # Two nodes are not away for the same seed by chance: it is the trace that takes so long.
    return [
        f"long traces are being lost: {never} of {slots} slots ran past two deadlines or more and were never "
        f"drawn; raise lease_token_seconds ({config.lease_token_seconds:g}) or lease_seconds "
        f"({config.lease_seconds:g}), or lower max_tokens ({config.max_tokens})"
    ]


# --- for people ---


def line(found: Sequence[dict[str, Any]]) -> str:
    """All slots together, of `told`'s rates; "" before any group is over."""
    every = [each for each in found if each["by"] == ENVIRONMENT]
    leased = sum(each["leased"] for each in every)
    if not leased:
        return ""
    shares = {name: sum(each[name] for each in every) / leased for name in _SHOWN}
    lags = [(each["lag_mean"] * each["used"], each["used"], each["lag_most"]) for each in every if each["used"]]
    used = sum(lag[1] for lag in lags)
    lag = f", {sum(lag[0] for lag in lags) / used:.1f} versions later (most {max(lag[2] for lag in lags)})"
    ends = ", ".join(f"{shares[name]:.1%} {name}" for name in _SHOWN)
    return f"of the last {leased:,} slots leased {ends}{lag if used else ''}"


_SHOWN: Final = ("completed", "expired", "returned", "refused", "stale", "used")
