"""A short session with the trainer: hello, a question, goodbye. For commands that are run beside a node or without.

Not here: the session of a node at work (session.py).
"""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

import trio

from node.session import hello_of
from protocol import limits, messages
from protocol.errors import Code, RemoteError
from protocol.identity import Identity
from protocol.net import p2p
from protocol.net.session import Session
from protocol.run import RunAddress
from protocol.trace import EngineDescriptor

_DIAL_SECONDS: Final = 15.0


@dataclass(frozen=True, slots=True)
class Welcomed:
    """A session after its hello. `ahead`: by how many seconds this machine's clock is before the trainer's."""

    session: Session
    welcome: messages.Welcome
    ahead: float


@asynccontextmanager
async def visiting(address: RunAddress, who: Identity, device: str) -> AsyncIterator[Welcomed]:
    """Say hello, and goodbye at the end. Raises NetError, or RemoteError with the trainer's refusal."""
    async with p2p.open_host(who) as host:
        stream = await host.open(address.dial, messages.SESSION_PROTOCOL, seconds=_DIAL_SECONDS)
        session = Session(stream)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(session.run, _refuse, _ignore)
            began = time.time()
            body = await session.request(
                messages.pack(hello_of(address.run, _descriptor(device))),
                seconds=limits.REQUEST_SECONDS,
                what="greeting the trainer",
            )
            welcome = messages.expect(messages.Welcome, body)
            yield Welcomed(session, welcome, (began + time.time()) / 2 - welcome.clock_ms / 1000)
            await session.close()
            nursery.cancel_scope.cancel()


def _descriptor(device: str) -> EngineDescriptor:
    """What `rlnode join` would say of its engine."""
    dtype = "float32" if device == "cpu" else "bfloat16"
    try:
        version = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        version = "none"
    return EngineDescriptor("transformers", version, dtype, device, "reference")


async def _refuse(body: bytes) -> bytes:
    raise RemoteError(Code.UNEXPECTED_MESSAGE, "only looking")


async def _ignore(body: bytes) -> None:
    pass
