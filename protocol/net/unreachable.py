"""Why a stream could not be opened: one sentence a cause, the same for every transport."""

from __future__ import annotations

from protocol.errors import Unreachable
from protocol.net.base import Address


def _because(target: Address, cause: str) -> Unreachable:
    return Unreachable(f"{target} cannot be reached: {cause}")


def nobody_listens(target: Address) -> Unreachable:
    return _because(target, "nobody listens there (connection refused); is it running?")


def no_answer(target: Address, seconds: float) -> Unreachable:
    return _because(target, f"no answer within {seconds:g} s; it may be off, overloaded or behind a firewall")


def other_peer(target: Address, found: str) -> Unreachable:
    return _because(target, f"{found} answered there instead; the address is old, or somebody listens in its place")


def does_not_speak(target: Address, protocol: str) -> Unreachable:
    return _because(
        target,
        f"it answers but does not speak {protocol}; one of the two programs is of another version or has another job",
    )


def hung_up(target: Address, how: str) -> Unreachable:
    return _because(target, f"it hung up ({how}); it may be full, or have banned this node")


def no_node(target: Address, how: str) -> Unreachable:
    return _because(target, f"what answers there is no node of this network ({how})")


def relay_declined(target: Address, via: Address, cause: str) -> Unreachable:
    return Unreachable(f"{target} cannot be reached: the relay at {via} does not help: {cause}")


def is_ourselves(target: Address) -> Unreachable:
    return _because(target, "it is this node itself; do two machines share one key file?")


def is_banned(target: Address) -> Unreachable:
    return _because(target, "this node banned it for breaking the protocol")


def restarting(target: Address) -> Unreachable:
    return _because(target, "this node's own network is restarting; try again in a second")


def other(target: Address, cause: str) -> Unreachable:
    return _because(target, cause)
