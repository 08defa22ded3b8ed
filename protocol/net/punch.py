"""Hole punching: two nodes that talk through a relay dial each other at the same moment, so that both NATs let it pass.

The node behind the relay asks, the one that came through it answers; each says where it is seen to come from. It works
where a NAT keeps a port whomever one talks to, and not where every connection gets a port at random. Source: DCUtR.
Not here: the messages' bytes (circuit.py), what becomes of the connection (p2p.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import trio

from protocol.net import circuit, protobuf
from protocol.net.circuit import PunchKind
from protocol.net.wire import Wire
from protocol.net.yamux import Channel

TRIES: Final = 3
MEET_SECONDS: Final = 4.0  # a lost SYN is sent again after 1 s and after 3
_AGAIN_SECONDS: Final = 0.2  # after a refusal: the other side had not dialled yet
_MOST_DELAY_SECONDS: Final = 2.0

Endpoint = tuple[str, int]
Dial = Callable[[str, int], Awaitable[Wire]]


async def ask(channel: Channel, ours: Sequence[Endpoint]) -> list[Endpoint]:
    """Say where we are; returns where the other is, at the moment to dial it.

    Raises Malformed, ChannelClosed or trio.TooSlowError.
    """
    asked = trio.current_time()
    await protobuf.send(channel, circuit.punch(PunchKind.CONNECT, list(ours)))
    theirs = circuit.candidates(await circuit.receive(channel), PunchKind.CONNECT)
    there_and_back = trio.current_time() - asked
    await protobuf.send(channel, circuit.punch(PunchKind.SYNC, []))
    await trio.sleep(min(there_and_back / 2, _MOST_DELAY_SECONDS))
    return theirs


async def answer(channel: Channel, ours: Sequence[Endpoint]) -> list[Endpoint]:
    """The other side of `ask`."""
    theirs = circuit.candidates(await circuit.receive(channel), PunchKind.CONNECT)
    await protobuf.send(channel, circuit.punch(PunchKind.CONNECT, list(ours)))
    circuit.candidates(await circuit.receive(channel), PunchKind.SYNC)
    return theirs


async def meet(dial: Dial, theirs: Sequence[Endpoint], seconds: float = MEET_SECONDS) -> Wire | None:
    """The first of these that answers within the time; None when none does."""
    found: list[Wire] = []
    with trio.move_on_after(seconds):
        async with trio.open_nursery() as nursery:
            for host, port in theirs:
                nursery.start_soon(_insist, dial, host, port, found, nursery.cancel_scope)
    for late in found[1:]:
        await late.close()
    return found[0] if found else None


async def _insist(dial: Dial, host: str, port: int, found: list[Wire], scope: trio.CancelScope) -> None:
    while True:
        with contextlib.suppress(OSError):
            found.append(await dial(host, port))
            scope.cancel()
            return
        await trio.sleep(_AGAIN_SECONDS)
