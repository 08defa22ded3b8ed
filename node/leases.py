"""The leases a node holds and how far each of their slots is. Pure: no clock, no disk, no network.

A slot goes WAITING → DRAWING → UNSENT → settled. A lease is gone when all its slots are settled, or, once it is
given back, when the traces already drawn are settled and the return is sent: a trace that arrived after its
lease was returned would be refused. Not here: who gets which lease (the trainer decides).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from protocol.lease import Lease


class _State(Enum):
    WAITING = 1
    DRAWING = 2
    UNSENT = 3


@dataclass(slots=True)
class _Held:
    lease: Lease
    slots: dict[int, _State]
    taken: float = 0.0
    cause: str | None = None  # set once it is to be given back


@dataclass(frozen=True, slots=True)
class SlotWork:
    """One completion to draw. `taken`: when the lease was, by the clock of whoever took it."""

    lease: Lease
    slot: int
    seed: int
    taken: float = 0.0

    @property
    def key(self) -> str:
        """Names the sequence in the engine, and the slot to a person."""
        return f"{self.lease.lease_id.hex()}/{self.slot}"


@dataclass(frozen=True, slots=True)
class GiveBack:
    """A lease whose return can be sent now."""

    lease_id: bytes
    cause: str


@dataclass(slots=True)
class LeaseBook:
    """All leases of one node, first come first drawn within a policy version."""

    _held: dict[bytes, _Held] = field(default_factory=dict)
    _returns: deque[GiveBack] = field(default_factory=deque)

    def take(self, lease: Lease, now: float = 0.0) -> bool:
        """Hold a lease. False when it is held already."""
        if lease.lease_id in self._held:
            return False
        self._held[lease.lease_id] = _Held(lease, {slot.index: _State.WAITING for slot in lease.slots}, now)
        return True

    def resume(self, lease: Lease, unsent: Iterable[int], cause: str) -> None:
        """Hold a lease of an earlier process: only what it finished counts, the rest is given back."""
        held = _Held(lease, dict.fromkeys(unsent, _State.UNSENT), cause=cause)
        self._held[lease.lease_id] = held
        self._return_if_due(held)

    def next_slot(self, version: int) -> SlotWork | None:
        """A slot to draw under this policy version, which is then being drawn."""
        for held in self._held.values():
            if held.lease.policy_version != version or held.cause is not None:
                continue
            for slot in held.lease.slots:
                if held.slots.get(slot.index) is _State.WAITING:
                    held.slots[slot.index] = _State.DRAWING
                    return SlotWork(held.lease, slot.index, slot.seed, held.taken)
        return None

    def drawn(self, lease_id: bytes, slot: int) -> None:
        """The slot's trace is on the disk."""
        if lease_id in self._held:
            self._held[lease_id].slots[slot] = _State.UNSENT

    def settled(self, lease_id: bytes, slot: int) -> bool:
        """The trainer acknowledged or refused the slot's trace. True when that was the last of its lease."""
        held = self._held.get(lease_id)
        if held is None:
            return True
        held.slots.pop(slot, None)
        if held.slots:
            return False
        if held.cause is None:
            del self._held[lease_id]
            return True
        self._return_if_due(held)
        return False

    def give_back(self, lease_id: bytes, cause: str) -> None:
        """Nothing more is drawn under the lease; its return is due when what was drawn is settled."""
        held = self._held.get(lease_id)
        if held is None or held.cause is not None:
            return
        held.cause = cause
        held.slots = {slot: state for slot, state in held.slots.items() if state is _State.UNSENT}
        self._return_if_due(held)

    def give_back_all(self, cause: str, *, version: int | None = None) -> tuple[bytes, ...]:
        """Give back what has slots to draw (of one policy version, or all). Which leases that are."""
        due = tuple(
            held.lease.lease_id
            for held in self._held.values()
            if held.cause is None
            and (version is None or held.lease.policy_version == version)
            and any(state is not _State.UNSENT for state in held.slots.values())
        )
        for lease_id in due:
            self.give_back(lease_id, cause)
        return due

    def _return_if_due(self, held: _Held) -> None:
        if not held.slots and held.cause is not None:
            self._returns.append(GiveBack(held.lease.lease_id, held.cause))

    def returns(self) -> tuple[GiveBack, ...]:
        """Returns that can be sent, until `returned`."""
        return tuple(self._returns)

    def returned(self, give_back: GiveBack) -> None:
        """The trainer knows."""
        self._returns.remove(give_back)
        self._held.pop(give_back.lease_id, None)

    def is_empty(self) -> bool:
        """Nothing is left to draw, to send or to give back."""
        return not self._held

    def is_drawing(self, work: SlotWork) -> bool:
        """False once the slot's lease was given back."""
        held = self._held.get(work.lease.lease_id)
        return held is not None and held.slots.get(work.slot) is _State.DRAWING

    def waiting(self, version: int | None = None) -> int:
        """Slots not begun (of one policy version, or all)."""
        return self._count(_State.WAITING, version)

    def drawing(self) -> int:
        return self._count(_State.DRAWING, None)

    def _count(self, wanted: _State, version: int | None) -> int:
        return sum(
            state is wanted
            for held in self._held.values()
            if version is None or held.lease.policy_version == version
            for state in held.slots.values()
        )

    def versions(self) -> frozenset[int]:
        """Policy versions with a slot still to draw: their weights stay."""
        return frozenset(
            held.lease.policy_version
            for held in self._held.values()
            if any(state is not _State.UNSENT for state in held.slots.values())
        )

    def expired(self, now_ms: int) -> tuple[bytes, ...]:
        """Leases past their deadline with slots still to draw."""
        return tuple(
            held.lease.lease_id
            for held in self._held.values()
            if held.cause is None
            and held.lease.deadline_ms <= now_ms
            and any(state is not _State.UNSENT for state in held.slots.values())
        )
