"""What a node tells its owner: events as they happen, and where it stands now.

Not here: how they are shown (display.py).
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

RATE_SECONDS: Final = 20.0  # rates shown are means over so long
STOPPED: Final = "stopped"  # the state of a node that ended in order
KILLED: Final = "killed"  # and of one that did not


class Level(StrEnum):
    DETAIL = "detail"  # for a script or a fault report; a person is not shown it
    INFO = "info"
    WARNING = "warning"  # the node goes on; something was lost or is late
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened. `name` is stable, for scripts; `text` is one line for a person."""

    name: str
    text: str
    level: Level = Level.INFO
    values: Mapping[str, Any] = field(default_factory=dict)


Report = Callable[[Event], None]


class Meter:
    """A rate over the last RATE_SECONDS."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._counts: deque[tuple[float, int]] = deque()
        self._sum = 0

    def add(self, count: int) -> None:
        self._counts.append((self._clock(), count))
        self._sum += count
        self._forget()

    def _forget(self) -> None:
        oldest = self._clock() - RATE_SECONDS
        while self._counts and self._counts[0][0] < oldest:
            self._sum -= self._counts.popleft()[1]

    def rate(self) -> float:
        """Per second."""
        self._forget()
        return self._sum / max(1.0, min(RATE_SECONDS, self._clock() - self._began))


@dataclass(slots=True)
class Status:
    """Where the node stands: the panel, status.json and the heartbeat read it."""

    node: str = ""
    run: str = ""
    trainer: str = ""
    state: str = "starting"  # what it is doing, in a few words
    connected: bool = False
    lost_because: str = ""  # why it is not connected; empty: it is, or has not tried yet
    engine: str = ""
    policy_version: int | None = None  # in the engine
    latest_version: int | None = None  # published
    slots_busy: int = 0  # sequences being decoded
    slots_total: int = 0
    turns_waiting: int = 0  # for a slot
    in_flight: int = 0  # completions begun: in a slot, waiting for one, or for their environment
    cache_used: float | None = None  # share of the room for keys and values; None where the engine has no fixed one
    leases_waiting: int = 0
    unsent: int = 0
    traces_drawn: int = 0
    traces_received: int = 0  # by the trainer, with a receipt
    leases_returned: int = 0
    reward_sum: float = 0.0
    accepted: int = 0
    refused: Counter[str] = field(default_factory=Counter)  # by reason
    not_judged: Counter[str] = field(default_factory=Counter)
    last_refusal: str = ""
    download: str = ""  # progress of the policy being fetched, for a person
    downloading: dict[str, Any] = field(default_factory=dict)  # the same in figures; empty when there is none
    policies_by_delta: int = 0  # policies that came since the start
    policies_whole: int = 0
    delta_bytes: tuple[int, int] = (0, 0)  # fetched for those that came by delta, and their own size
    fetched: Counter[str] = field(default_factory=Counter)  # bytes of policies by kind: node, mirror, trainer
    given_bytes: int = 0  # to other nodes, pieces of policies
    giving: Meter = field(default_factory=Meter)
    disk_waits: dict[str, str] = field(default_factory=dict)  # what waits for the disk → why, for a person
    relays: int = 0  # that keep a place for this node; 0 where it is reached without
    behind_nat: bool = False  # as relays see it; one on this machine cannot tell
    tokens: Meter = field(default_factory=Meter)
    started: float = field(default_factory=time.time)

    def followed(self, fetched: int, size: int, *, by_delta: bool) -> None:
        """A policy is here."""
        if by_delta:
            self.policies_by_delta += 1
            self.delta_bytes = self.delta_bytes[0] + fetched, self.delta_bytes[1] + size
        else:
            self.policies_whole += 1

    def plain(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "node": self.node,
            "run": self.run,
            "trainer": self.trainer,
            "state": self.state,
            "connected": self.connected,
            "lost_because": self.lost_because,
            "engine": self.engine,
            "policy_version": self.policy_version,
            "latest_version": self.latest_version,
            "slots_busy": self.slots_busy,
            "slots_total": self.slots_total,
            "turns_waiting": self.turns_waiting,
            "in_flight": self.in_flight,
            "cache_used": None if self.cache_used is None else round(self.cache_used, 3),
            "slots_waiting": self.leases_waiting,
            "unsent_traces": self.unsent,
            "traces_drawn": self.traces_drawn,
            "traces_received": self.traces_received,
            "leases_returned": self.leases_returned,
            "mean_reward": round(self.reward_sum / self.traces_drawn, 4) if self.traces_drawn else None,
            "accepted": self.accepted,
            "refused": dict(self.refused),
            "not_judged": dict(self.not_judged),
            "last_refusal": self.last_refusal,
            "tokens_per_second": round(self.tokens.rate(), 1),
            "download": self.download,
            "downloading": self.downloading,
            "policies_by_delta": self.policies_by_delta,
            "policies_whole": self.policies_whole,
            "delta_bytes": self.delta_bytes[0],
            "delta_policy_bytes": self.delta_bytes[1],
            "fetched_bytes": {kind: self.fetched[kind] for kind in ("node", "mirror", "trainer")},
            "given_bytes": self.given_bytes,
            "giving_bytes_per_second": int(self.giving.rate()),
            "disk_waits": dict(self.disk_waits),
            "relays": self.relays,
            "behind_nat": self.behind_nat,
            "started": self.started,
            "written": time.time(),
        }


def at_rest(plain: dict[str, Any]) -> dict[str, Any]:
    """What is still true of a status once its process is gone, which may have been before it could say so."""
    now = Status().plain()
    moment = (
        "connected", "lost_because", "slots_busy", "slots_total", "turns_waiting", "in_flight", "cache_used",
        "slots_waiting", "tokens_per_second", "download", "downloading", "giving_bytes_per_second", "disk_waits",
        "relays", "behind_nat",
    )  # fmt: skip
    state = STOPPED if plain["state"] == STOPPED else KILLED
    return {**plain, **{name: now[name] for name in moment}, "state": state}


def noted(report: Report, status: Status) -> Report:
    """The same report, which also keeps in the status what waits for the disk."""

    def note(event: Event) -> None:
        if event.name == "storage" and "who" in event.values:
            status.disk_waits[event.values["who"]] = event.text
        elif event.name == "storage_over":
            status.disk_waits.pop(event.values["who"], None)
        report(event)

    return note
