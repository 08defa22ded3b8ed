"""Leases: permission, bound to one node, to draw the one completion each slot's seed allows (SPEC 8.4).

Not here: who gets which lease (trainer/dispatch.py) and the noise itself (noise.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from protocol import codec, identity, limits, noise
from protocol.errors import Code, DecodeError


@dataclass(frozen=True, slots=True)
class Slot:
    """One completion of a group: its index in the group and the seed of its noise."""

    index: Annotated[int, codec.UInt(limits.MAX_GROUP_SIZE - 1)]
    seed: Annotated[int, codec.UInt()]


@dataclass(frozen=True, slots=True)
class Lease:
    """SPEC 8.4. Signed by the trainer. Times are Unix milliseconds by the trainer's clock."""

    DOMAIN: ClassVar[bytes] = identity.DOMAIN_LEASE

    run: Annotated[bytes, codec.Bytes(32)]
    lease_id: Annotated[bytes, codec.Bytes(16)]
    node: Annotated[bytes, codec.Bytes(identity.NODE_ID_BYTES)]
    policy_version: Annotated[int, codec.UInt()]
    policy_root: Annotated[bytes, codec.Bytes(32)]
    environment: Annotated[str, codec.Text(limits.MAX_NAME_CHARACTERS)]
    parameters: Annotated[str, codec.Text(limits.MAX_TEXT_CHARACTERS)]
    task_index: Annotated[int, codec.UInt()]
    group_id: Annotated[bytes, codec.Bytes(16)]
    group_size: Annotated[int, codec.UInt(limits.MAX_GROUP_SIZE)]
    slots: Annotated[tuple[Slot, ...], codec.Many(codec.Object(Slot), limits.MAX_SLOTS_PER_LEASE)]
    prompt: Annotated[tuple[int, ...], codec.Tokens(limits.MAX_PROMPT_TOKENS)]
    temperature: Annotated[float, codec.Real()]
    max_turn_tokens: Annotated[int, codec.UInt(limits.MAX_TRACE_TOKENS)]  # generated in one turn
    max_tokens: Annotated[int, codec.UInt(limits.MAX_TRACE_TOKENS)]  # all tokens after the prompt
    issued_ms: Annotated[int, codec.UInt()]
    deadline_ms: Annotated[int, codec.UInt()]

    def seed_of(self, slot: int) -> int | None:
        """The seed of slot `slot`, or None when the lease does not hold it."""
        return next((each.seed for each in self.slots if each.index == slot), None)


def check_lease(lease: Lease) -> None:
    """SPEC 8.4: what must hold of a lease before a token is drawn. Raises DecodeError(MALFORMED)."""
    indices = [slot.index for slot in lease.slots]
    rules = (
        (lease.environment != "", "names no environment"),
        (indices == sorted(set(indices)) and indices != [], "holds no slot, or slots out of order"),
        (all(index < lease.group_size for index in indices), "holds a slot outside its group"),
        (len(lease.prompt) > 0, "has an empty prompt"),
        (lease.temperature > 0, "has a temperature that is not above 0"),
        (lease.max_turn_tokens > 0 and lease.max_tokens > 0, "allows no token"),
        (lease.issued_ms < lease.deadline_ms, "ends before it begins"),
    )
    for holds, fault in rules:
        if not holds:
            raise DecodeError(Code.MALFORMED, f"the lease {lease.lease_id.hex()} {fault}")


@dataclass(frozen=True, slots=True)
class SeedInput:
    """SPEC 8.5: what a slot's seed is bound to. Not the node: a slot leased again keeps its seed."""

    run: Annotated[bytes, codec.Bytes(32)]
    policy_root: Annotated[bytes, codec.Bytes(32)]
    environment: Annotated[str, codec.Text(limits.MAX_NAME_CHARACTERS)]
    parameters: Annotated[str, codec.Text(limits.MAX_TEXT_CHARACTERS)]
    task_index: Annotated[int, codec.UInt()]
    group_id: Annotated[bytes, codec.Bytes(16)]
    slot: Annotated[int, codec.UInt(limits.MAX_GROUP_SIZE - 1)]
    secret: Annotated[bytes, codec.Bytes(32)]


def slot_seed(bound_to: SeedInput) -> int:
    """SPEC 8.5: the seed of a slot, 64 bits."""
    return noise.slot_seed(codec.encode(bound_to))
