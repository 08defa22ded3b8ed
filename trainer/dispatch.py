"""Who gets which slots. Pure: the gateway describes the situation, `choose` says what to lease, the gateway acts.

The order: slots that came free again (same seed, so the group is finished), then open groups, those of older
policies first, then new ones, as far as the learner will use them soon enough. Not here: how much that is (pacing.py),
making groups and signing leases (leasing.py), how far a node is trusted (standing.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from protocol import limits
from trainer.config import TrainerConfig
from trainer.ledger_rows import TOO_STALE, SlotState
from trainer.pacing import Consumption, most_open, versions_meanwhile, why_begin_nothing

SPREAD_SECONDS: Final = 5.0  # so long a group waits for other nodes before one node may draw all of it
PROBATION_SHARE: Final = 0.25  # of one group: what a node may hold that failed an audit not long ago
_FORSAKEN_LEASES: Final = 10  # an open group that nobody works on is given up after so many leases' time
_RETRY_MS: Final = 250  # an idle node asks so often at most, a little less often for each other node
_RETRY_PER_NODE_MS: Final = 20
_RETRY_MOST_MS: Final = 5_000


@dataclass(frozen=True, slots=True)
class SlotView:
    """`node` holds it or answered it; `refused` are the nodes whose answer to it was refused."""

    index: int
    state: SlotState
    node: bytes | None
    attempts: int
    refused: frozenset[bytes]


@dataclass(frozen=True, slots=True)
class GroupView:
    """An open group."""

    group_id: bytes
    version: int
    created_ms: int
    slots: tuple[SlotView, ...]


@dataclass(frozen=True, slots=True)
class Asking:
    """The node that asks: for how many slots, under which policies, and what it holds already. `trace_seconds`: from
    lease to receipt, as its traces took lately; None where there are none."""

    node: bytes
    slots: int
    versions: frozenset[int]
    leased: int
    on_probation: bool
    trace_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Situation:
    """`latest`: the newest policy that nodes may fetch. `groups`: all open ones, oldest first. `others`: other trusted
    nodes that ask for work."""

    latest: int
    groups: tuple[GroupView, ...]
    others: int
    consumption: Consumption
    now_ms: int


@dataclass(frozen=True, slots=True)
class Grant:
    """Slots of one group for one lease. `group_id` None: of a new group under policy `version`."""

    group_id: bytes | None
    version: int
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """`cause` says why there are fewer slots than asked for; empty when there are not."""

    grants: tuple[Grant, ...]
    retry_ms: int
    cause: str


def choose(asking: Asking, situation: Situation, config: TrainerConfig) -> Plan:
    """What `asking` is leased now."""
    retry_ms = min(_RETRY_MOST_MS, _RETRY_MS + _RETRY_PER_NODE_MS * situation.others)
    usable = _usable(asking, situation, config)
    room = min(asking.slots, _allowance(asking, situation, config) - asking.leased)
    if not usable or room <= 0:
        return Plan((), retry_ms, _why_nothing(asking, situation, config, usable))
    draft = _Draft(asking, situation, config, room)
    drawable = [group for group in situation.groups if group.version in usable]
    draft.take(drawable, _freed, config.group_size)
    # Soon nobody holds an older policy any more: what was begun under it is finished by whoever still does.
    draft.take([group for group in drawable if group.version < situation.latest], _fresh, config.group_size)
    draft.take(drawable, _fresh, draft.share)
    cause = draft.open_groups(max(usable))
    draft.take([group for group in drawable if _old_enough(group, situation)], _fresh, config.group_size)
    return Plan(tuple(draft.grants())[: limits.MAX_LEASES_PER_REPLY], retry_ms, cause if draft.room else "")


def stranded(
    groups: Iterable[GroupView], held: frozenset[int], latest: int, now_ms: int, config: TrainerConfig
) -> Iterator[tuple[bytes, str]]:
    """Open groups that nobody will finish: (group, cause). `held`: policy versions that some node can draw under."""
    for group in groups:
        free = [slot for slot in group.slots if slot.state is SlotState.FREE]
        pending = any(slot.state in (SlotState.LEASED, SlotState.ANSWERED) for slot in group.slots)
        age = (now_ms - group.created_ms) / 1000
        if any(slot.attempts >= config.slot_attempts for slot in free):
            yield group.group_id, f"a slot was leased {config.slot_attempts} times without an accepted trace"
        elif pending or not free:
            continue
        elif group.version < latest and group.version not in held and age > config.lease_seconds:
            yield group.group_id, f"{TOO_STALE}: no node holds its policy any more"
        elif age > _FORSAKEN_LEASES * config.lease_seconds:
            yield group.group_id, "no node would or might draw what was left of it"


def _usable(asking: Asking, situation: Situation, config: TrainerConfig) -> frozenset[int]:
    """The versions the node holds that the learner will still want when the trace is in."""
    oldest = situation.latest - config.staleness_limit
    in_time = situation.consumption.made + _meanwhile(asking, situation) - config.staleness_limit
    held = asking.versions
    return frozenset(version for version in held if oldest < version <= situation.latest and in_time <= version)


def _meanwhile(asking: Asking, situation: Situation) -> int:
    """Policies the learner makes while the node draws one trace, of what others draw."""
    if not situation.others:
        return 0  # alone it sets the pace
    return versions_meanwhile(situation.consumption, asking.trace_seconds)


def _allowance(asking: Asking, situation: Situation, config: TrainerConfig) -> int:
    """Slots the node may hold at once: nobody may sit on all the work that others wait for."""
    if asking.on_probation:
        return max(1, int(config.group_size * PROBATION_SHARE))
    everything = most_open(situation.consumption, config) * config.group_size
    return math.ceil(everything * config.node_group_share) if situation.others else everything


def _why_nothing(asking: Asking, situation: Situation, config: TrainerConfig, usable: frozenset[int]) -> str:
    meanwhile = _meanwhile(asking, situation)
    if not usable and meanwhile and situation.latest in asking.versions:
        return (
            f"a trace takes this node {asking.trace_seconds:.0f} s, the learner makes {meanwhile} policies meanwhile, "
            f"{config.staleness_limit} may lie between: give it fewer slots, or wait until the learner is slower"
        )
    if not usable:
        held = ", ".join(map(str, sorted(asking.versions))) or "none"
        return f"the policy is at version {situation.latest}, this node holds {held}: fetch the latest"
    if asking.slots == 0:
        return ""
    if asking.on_probation:
        return f"{asking.leased} slots are leased to this node already: few until its audits pass again"
    return f"{asking.leased} slots are leased to this node already: answer those first"


def _freed(slot: SlotView) -> bool:
    return slot.attempts > 0


def _fresh(slot: SlotView) -> bool:
    return slot.attempts == 0


def _old_enough(group: GroupView, situation: Situation) -> bool:
    return situation.now_ms - group.created_ms >= SPREAD_SECONDS * 1000


class _Draft:
    """A plan in the making."""

    def __init__(self, asking: Asking, situation: Situation, config: TrainerConfig, room: int) -> None:
        self._asking = asking
        self._situation = situation
        self._config = config
        self.room = room
        # Slots of one group that one node draws while others want theirs.
        self.share = max(1, int(config.group_size * config.node_group_share)) if situation.others else config.group_size
        self._taken: dict[bytes, tuple[int, list[int]]] = {}
        self._new: list[Grant] = []

    def take(self, groups: Iterable[GroupView], wanted: Callable[[SlotView], bool], most: int) -> None:
        """Take free slots that are `wanted`, until the node has `most` of a group."""
        for group in groups:
            _, taken = self._taken.setdefault(group.group_id, (group.version, []))
            held = sum(slot.node == self._asking.node for slot in group.slots) + len(taken)
            for slot in group.slots:
                if self.room <= 0:
                    return
                if held < most and wanted(slot) and self._may_have(slot) and slot.index not in taken:
                    taken.append(slot.index)
                    held += 1
                    self.room -= 1

    def open_groups(self, version: int) -> str:
        """Open new groups while there is room; why not, when there is room left."""
        refusal = self._why_no_new(version)
        while self.room > 0 and not refusal:
            count = min(self.room, self.share, limits.MAX_SLOTS_PER_LEASE)
            self._new.append(Grant(None, version, tuple(range(count))))
            self.room -= count
            refusal = self._why_no_new(version)
        return refusal

    def grants(self) -> Iterator[Grant]:
        """Oldest groups first, each at most as long as a lease may be."""
        most = limits.MAX_SLOTS_PER_LEASE
        for group_id, (version, slots) in self._taken.items():
            for start in range(0, len(slots), most):
                yield Grant(group_id, version, tuple(sorted(slots)[start : start + most]))
        yield from self._new

    def _may_have(self, slot: SlotView) -> bool:
        # A node that was refused on a slot does not get that slot again, or a cheater could keep it busy for ever.
        worn = slot.attempts >= self._config.slot_attempts
        return slot.state is SlotState.FREE and not worn and self._asking.node not in slot.refused

    def _why_no_new(self, version: int) -> str:
        config, situation = self._config, self._situation
        if situation.latest - version > config.staleness_target:
            return f"the policy is at version {situation.latest}, this node's newest is {version}: fetch the latest"
        # Only groups this node could finish count: those of a version that no node holds any more block nobody.
        counted = len(self._new) + sum(
            group.version in self._asking.versions or all(slot.state is not SlotState.FREE for slot in group.slots)
            for group in situation.groups
        )
        paced = why_begin_nothing(situation.consumption, counted, version, config)
        if paced:
            return paced
        if counted >= most_open(situation.consumption, config):
            return f"{counted} groups are being drawn already"
        return ""
