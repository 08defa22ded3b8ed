"""The environments and tokenizers behind the tasks of leases, kept, called beside the engine and never waited for
without end.

Not here: the rules of an episode (protocol/environments/rollout.py), who plays it (episode.py).
"""

from __future__ import annotations

import contextlib
import importlib.metadata
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final, TypeVar

import trio

from node.config import NodeConfig
from node.store import HeldPolicy
from protocol.environments import base
from protocol.environments.tokenizer import PolicyTokenizer
from protocol.errors import EnvironmentFault, UsageError
from protocol.lease import Lease

T = TypeVar("T")

THREAD_NAME: Final = "rlnode environment"
_ENVIRONMENTS_KEPT: Final = 64


class Tasks:
    """What a node needs to know of the tasks it is leased."""

    def __init__(self, config: NodeConfig) -> None:
        self._seconds = config.environment_seconds
        self._tokenizers_kept = config.keep_versions
        self._threads = trio.CapacityLimiter(config.environment_threads)
        self._tokenizers: OrderedDict[bytes, PolicyTokenizer] = OrderedDict()
        self._environments: OrderedDict[tuple[str, str], base.GuardedEnvironment] = OrderedDict()

    async def environment(self, lease: Lease) -> base.GuardedEnvironment:
        """Raises EnvironmentFault when this node has it not."""
        key = (lease.environment, lease.parameters)
        if key not in self._environments:
            try:
                self._environments[key] = await trio.to_thread.run_sync(base.load, *key)
            except UsageError as error:
                raise EnvironmentFault(str(error)) from error
            if len(self._environments) > _ENVIRONMENTS_KEPT:
                self._environments.popitem(last=False)
        return self._environments[key]

    async def tokenizer(self, held: HeldPolicy) -> PolicyTokenizer:
        """Raises PolicyError."""
        if held.root not in self._tokenizers:
            self._tokenizers[held.root] = await trio.to_thread.run_sync(PolicyTokenizer.load, held.folder)
            if len(self._tokenizers) > self._tokenizers_kept:
                self._tokenizers.popitem(last=False)
        return self._tokenizers[held.root]

    async def ask(self, lease: Lease, function: Callable[..., T], *arguments: Any) -> T:
        """What an environment answers, in a thread. Raises EnvironmentFault, also when it takes too long: the
        thread is then left behind and its place stays taken until it ends."""
        with trio.move_on_after(self._seconds):
            # trio-typing, which libp2p brings along, describes an older trio.
            return await trio.to_thread.run_sync(  # type: ignore[call-arg]
                function, *arguments, thread_name=THREAD_NAME, limiter=self._threads, abandon_on_cancel=True
            )
        raise EnvironmentFault(
            f"environment {lease.environment}, task {lease.task_index}: no answer within {self._seconds:g} s"
        )

    async def check_prompt(self, lease: Lease, held: HeldPolicy, trainer_software: str) -> None:
        """Raises EnvironmentFault naming both sides' versions when the task renders to another prompt here."""
        environment = await self.environment(lease)
        tokenizer = await self.tokenizer(held)
        messages = await self.ask(lease, environment.prompt, lease.task_index)
        # SPEC 8.4: the prompt of a lease is the task rendered by the policy's own tokenizer.
        ours = await trio.to_thread.run_sync(tokenizer.prompt_ids, messages)
        if ours != lease.prompt:
            raise EnvironmentFault(
                f"task {lease.task_index} of {lease.environment} renders to another prompt here ({len(ours)} "
                f"tokens) than in the lease ({len(lease.prompt)}): this node has {_versions()}, the trainer "
                f"{trainer_software}; bring both to the same versions"
            )


def _versions() -> str:
    """Of what decides how a task is rendered."""
    named = []
    for package in ("rlcommons", "tokenizers", "jinja2"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            named.append(f"{package} {importlib.metadata.version(package)}")
    return ", ".join(named)
