"""A run without a network, a model or a ledger, on a virtual clock: nodes that ask dispatch for slots and take their
time, a learner that steps as soon as it may. Real are the choice of who draws what (dispatch.py, pacing.py) and of
what may be learned from (batch.py).

Not here: audits and refusals; every answer is accepted the moment it is in.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from random import Random

from trainer.batch import choose as choose_batch
from trainer.config import TrainerConfig
from trainer.dispatch import Asking, GroupView, Situation, SlotView, choose, stranded
from trainer.ledger_rows import GroupOutcome, SlotState
from trainer.ledger_use import STEPS, TRACES
from trainer.pacing import Consumption


@dataclass(frozen=True)
class NodeOf:
    """`draws`: seconds of a completion. Comes at `joins` and takes `fetches` seconds for a new policy."""

    slots: int
    draws: Callable[[Random], float]
    joins: float = 0.0
    fetches: float = 0.2


@dataclass
class Group:
    group_id: bytes
    version: int
    created: float
    teaches: bool
    slots: list[SlotView] = field(default_factory=list)

    @property
    def view(self) -> GroupView:
        return GroupView(self.group_id, self.version, int(self.created * 1000), tuple(self.slots))


@dataclass
class Outcome:
    staleness: Counter[int] = field(default_factory=Counter)  # of groups that were learned from
    dropped: int = 0
    idle: float = 0.0  # seconds the learner waited, from its first step on
    steps: int = 0
    causes: Counter[str] = field(default_factory=Counter)  # why nodes got less than they asked for

    @property
    def most(self) -> int:
        return max(self.staleness)


class PacedRun:
    """`share` of the groups teach something. `step_seconds` a step; a policy is fetchable `publish_seconds` later."""

    def __init__(
        self, config: TrainerConfig, nodes: list[NodeOf], *, step_seconds: float, share: float = 1.0,
        publish_seconds: float = 0.1, seed: int = 1,
    ) -> None:  # fmt: skip
        self.config, self.nodes, self.step_seconds, self.share = config, nodes, step_seconds, share
        self.publish_seconds = publish_seconds
        self.random = Random(seed)
        self.now = 0.0
        self.made = self.latest = 0
        self.open: dict[bytes, Group] = {}
        self.complete: list[Group] = []
        self.steps: deque[tuple[float, int, int]] = deque(maxlen=STEPS + 1)  # (at, informative, flat)
        self.stepping = False
        self.waits_since: float | None = None  # the learner, after its first step
        self.outcome = Outcome()
        self.busy = [0] * len(nodes)
        self.asks_again = [False] * len(nodes)
        self.held = [[0] for _ in nodes]
        self.took: list[deque[float]] = [deque(maxlen=TRACES) for _ in nodes]
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._order = itertools.count()
        self._names = itertools.count()
        for index, node in enumerate(nodes):
            self.at(node.joins, partial(self.ask, index))
        self.at(1.0, self.tidy)

    def at(self, when: float, what: Callable[[], object]) -> None:
        heapq.heappush(self._events, (when, next(self._order), what))

    def run(self, seconds: float) -> Outcome:
        while self._events and self._events[0][0] <= seconds:
            self.now, _, what = heapq.heappop(self._events)
            what()
        if self.waits_since is not None:
            self.outcome.idle += seconds - self.waits_since
        return self.outcome

    # --- nodes ---

    def ask(self, index: int) -> None:
        node, took = self.nodes[index], self.took[index]
        free = node.slots - self.busy[index]
        if free <= 0:
            return
        asking = Asking(
            bytes([index]) * 32, free, frozenset(self.held[index][-2:]), self.busy[index], False,
            sum(took) / len(took) if took else None,
        )  # fmt: skip
        plan = choose(asking, self.situation(), self.config)
        for grant in plan.grants:
            group = self.open[grant.group_id] if grant.group_id else self.begin(grant.version)
            for slot in grant.slots:
                group.slots[slot] = SlotView(slot, SlotState.LEASED, asking.node, 1, frozenset())
                self.busy[index] += 1
                seconds = node.draws(self.random)
                self.at(self.now + seconds, partial(self.answer, index, group, slot, seconds))
        if plan.cause:
            self.outcome.causes[plan.cause.partition(":")[0]] += 1
        if self.busy[index] < node.slots and not self.asks_again[index]:
            self.asks_again[index] = True
            self.at(self.now + plan.retry_ms / 1000, partial(self.retry, index))

    def retry(self, index: int) -> None:
        self.asks_again[index] = False
        self.ask(index)

    def situation(self) -> Situation:
        working = sum(node.joins <= self.now for node in self.nodes)
        groups = tuple(group.view for group in self.open.values())
        return Situation(self.latest, groups, working - 1, self.consumption(), int(self.now * 1000))

    def consumption(self) -> Consumption:
        """As ledger_use.py counts."""
        waiting = sum(group.teaches for group in self.complete)
        taught, flat = sum(step[1] for step in self.steps), sum(step[2] for step in self.steps)
        seconds = self.now - self.steps[0][0] if len(self.steps) > 1 else 0.0
        rate = (len(self.steps) - 1) / seconds if seconds > 0 else 0.0
        return Consumption(self.made, waiting, taught + waiting, taught + flat + len(self.complete), rate)

    def begin(self, version: int) -> Group:
        name = next(self._names).to_bytes(16, "big")
        free = [SlotView(i, SlotState.FREE, None, 0, frozenset()) for i in range(self.config.group_size)]
        group = self.open[name] = Group(name, version, self.now, self.random.random() < self.share, free)
        return group

    def answer(self, index: int, group: Group, slot: int, seconds: float) -> None:
        self.busy[index] -= 1
        self.took[index].append(seconds)
        if group.group_id in self.open:
            group.slots[slot] = SlotView(slot, SlotState.ACCEPTED, bytes([index]) * 32, 1, frozenset())
            if all(each.state is SlotState.ACCEPTED for each in group.slots):
                self.complete.append(self.open.pop(group.group_id))
                self.learn()
        self.ask(index)

    # --- the learner ---

    def learn(self) -> None:
        if self.stepping:
            return
        self.complete.sort(key=lambda group: (group.version, group.created))
        outcomes = [GroupOutcome(g.group_id, g.version, (0.0, float(g.teaches))) for g in self.complete]
        limit, wanted = self.config.staleness_limit, self.config.groups_per_step
        choice = choose_batch(outcomes, version=self.made, staleness_limit=limit, wanted=wanted)
        self.drop(set(choice.unusable))
        if len(choice.informative) < wanted:
            if self.waits_since is None and self.made:
                self.waits_since = self.now
            return
        if self.waits_since is not None:
            self.outcome.idle += self.now - self.waits_since
            self.waits_since = None
        self.stepping = True
        self.at(self.now + self.step_seconds, partial(self.commit, set(choice.informative), set(choice.flat)))

    def commit(self, taken: set[bytes], flat: set[bytes]) -> None:
        for group in self.complete:
            if group.group_id in taken:
                self.outcome.staleness[self.made - group.version] += 1
        self.complete = [group for group in self.complete if group.group_id not in taken | flat]
        self.steps.append((self.now, len(taken), len(flat)))
        self.made += 1
        self.outcome.steps += 1
        self.stepping = False
        self.at(self.now + self.publish_seconds, partial(self.publish, self.made))
        self.learn()

    def publish(self, version: int) -> None:
        self.latest = version
        for index, node in enumerate(self.nodes):
            self.at(self.now + node.fetches, partial(self.held[index].append, version))

    # --- the gateway's rounds ---

    def tidy(self) -> None:
        limit = self.config.staleness_limit
        self.drop({g.group_id for g in self.groups() if g.version < self.latest - limit})
        held = frozenset(version for versions in self.held for version in versions[-2:])
        views = [group.view for group in self.open.values()]
        gone = stranded(views, held, self.latest, int(self.now * 1000), self.config)
        self.drop({group_id for group_id, _ in gone})
        self.at(self.now + 1.0, self.tidy)

    def groups(self) -> list[Group]:
        return [*self.open.values(), *self.complete]

    def drop(self, names: set[bytes]) -> None:
        before = len(self.groups())
        self.open = {name: group for name, group in self.open.items() if name not in names}
        self.complete = [group for group in self.complete if group.group_id not in names]
        self.outcome.dropped += before - len(self.groups())
