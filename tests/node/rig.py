"""A real node against a small trainer, both in this process over the memory network.

Not here: what a test asserts.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import trio

from node.config import NodeConfig
from node.engine import Engine
from node.join import join, make_engine
from node.report import Event, Status
from protocol.errors import RLCommonsError
from protocol.net import memory
from protocol.net.base import Host
from tests.node.small_trainer import SmallTrainer

EMBEDDED = Path(__file__).parents[2] / "trainer" / "embedded"
DEADLINE_SECONDS = 120.0  # of a whole test, on a machine with ten others: it should fail, not hang


@dataclass
class Node:
    """A running node and what it said."""

    config: NodeConfig
    status: Status = field(default_factory=Status)
    stop: trio.Event = field(default_factory=trio.Event)
    ended: trio.Event = field(default_factory=trio.Event)
    events: list[Event] = field(default_factory=list)
    failure: RLCommonsError | None = None
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    _said: trio.Event = field(default_factory=trio.Event)

    def report(self, event: Event) -> None:
        self.events.append(event)
        self._said.set()
        self._said = trio.Event()

    async def until_said(self, name: str, count: int = 1) -> Event:
        """Wait until the node has reported `name` so often; the last of them."""
        with trio.fail_after(DEADLINE_SECONDS):
            while len(found := self.said(name)) < count:
                await self._said.wait()
        return found[count - 1]

    def said(self, name: str) -> list[Event]:
        return [event for event in self.events if event.name == name]

    async def leave(self) -> None:
        """Stop in order and wait for the end."""
        self.stop.set()
        with trio.fail_after(DEADLINE_SECONDS):
            await self.ended.wait()

    async def die(self) -> None:
        """End at once, without a word to the trainer, as after kill -9; the disk stays as it is."""
        self.scope.cancel()
        with trio.fail_after(DEADLINE_SECONDS):
            await self.ended.wait()


@dataclass
class World:
    """The network, the trainer and the nursery that nodes run in."""

    network: memory.Network
    trainer: SmallTrainer
    host: Host
    nursery: trio.Nursery
    folder: Path

    def node(self, name: str = "home", *, make: Callable[[NodeConfig], Engine] = make_engine, **changes: Any) -> Node:
        """Start a node with a home of this name."""
        config = NodeConfig(
            address=self.trainer.address(self.host), home=self.folder / name, slots=8, threads=1, disk_reserve_bytes=0
        )
        node = Node(replace(config, **changes))
        self.nursery.start_soon(self._run, node, make)
        return node

    async def _run(self, node: Node, make: Callable[[NodeConfig], Engine]) -> None:
        try:
            with node.scope:
                await join(
                    node.config,
                    node.report,
                    node.status,
                    node.stop,
                    open_host=lambda who: self.network.host(who, listen=()),
                    make=make,
                )
        except RLCommonsError as error:
            node.failure = error
        finally:
            node.ended.set()


@asynccontextmanager
async def world(folder: Path, *, publish: bool = True, seconds: float = DEADLINE_SECONDS) -> AsyncIterator[World]:
    import node.transformers_engine  # noqa: F401  # many seconds the first time, and not of the test's own

    network = memory.Network()
    trainer = SmallTrainer()
    if publish:
        trainer.publish(EMBEDDED, 0)
    with trio.fail_after(seconds):
        async with network.host(trainer.identity) as host, trio.open_nursery() as nursery:
            trainer.serve(host)
            yield World(network, trainer, host, nursery, folder)
            nursery.cancel_scope.cancel()


def another_policy(folder: Path, seed: int = 1) -> Path:
    """The embedded policy with its weights moved a little: same shape, other root."""
    import shutil

    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(EMBEDDED, folder)
    path = folder / "model.safetensors"
    torch.manual_seed(seed)
    tensors = {name: value + 0.01 * torch.randn_like(value) for name, value in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})
    return folder
