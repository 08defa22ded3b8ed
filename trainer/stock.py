"""Tasks of the run, rendered ahead by a thread of their own, so that a slow environment keeps nobody's leases or
receipts waiting.

Which task comes when is a stream that nodes cannot foresee. Not here: who gets them (dispatch.py, leasing.py).
"""

from __future__ import annotations

import hashlib
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from protocol import limits
from protocol.environments import base
from protocol.environments.tokenizer import PolicyTokenizer
from protocol.errors import EnvironmentFault, PolicyError
from protocol.run import EnvironmentShare

AHEAD: Final = 32  # tasks ready at any time: more than one reply of leases needs
_FAULT_SECONDS: Final = 1.0  # between tries of an environment that fails
_END_SECONDS: Final = 1.0  # an environment that hangs does not hold up the end


@dataclass(frozen=True, slots=True)
class Task:
    """A task with its prompt in the policy's token ids. `turn_tokens`: what its environment needs in one turn."""

    environment: str
    parameters: str
    index: int
    prompt: tuple[int, ...]
    turn_tokens: int


def numbered(secret: bytes, number: int, shares: tuple[EnvironmentShare, ...]) -> tuple[EnvironmentShare, int]:
    """The environment and index of the run's task `number`."""
    digest = hashlib.blake2b(
        number.to_bytes(8, "little"), digest_size=16, key=secret, person=b"rlcommons-task-1"
    ).digest()
    place = int.from_bytes(digest[:8], "little") % sum(share.weight for share in shares)
    for share in shares:
        if place < share.weight:
            return share, int.from_bytes(digest[8:], "little")
        place -= share.weight
    raise AssertionError("weights add up to their sum")


class Stock:
    """`with Stock(…)`: renders from task number `first` on until the block ends."""

    def __init__(
        self,
        secret: bytes,
        shares: tuple[EnvironmentShare, ...],
        first: int,
        tokenizer: Callable[[], PolicyTokenizer],
    ) -> None:
        self._secret = secret
        self._shares = shares
        self._number = first
        self._tokenizer = tokenizer
        self._environments = {
            (share.name, share.parameters): base.load(share.name, share.parameters) for share in shares
        }
        self._ready: deque[Task] = deque()
        self._fault: EnvironmentFault | None = None
        self._changed = threading.Condition()
        self._ending = False
        self._thread = threading.Thread(target=self._run, name="stock", daemon=True)

    def __enter__(self) -> Stock:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        with self._changed:
            self._ending = True
            self._changed.notify_all()
        self._thread.join(_END_SECONDS)

    def take(self) -> Task | None:
        """The next task; None when none is ready yet."""
        with self._changed:
            self._changed.notify_all()
            return self._ready.popleft() if self._ready else None

    def turns(self, environment: str, parameters: str) -> int:
        """Turns that a completion has at most."""
        return self._environments[environment, parameters].max_turns

    def fault(self) -> EnvironmentFault | None:
        """The latest failure of an environment since the last call, whose task was passed over."""
        with self._changed:
            fault, self._fault = self._fault, None
            return fault

    def wait_ready(self, seconds: float) -> bool:
        """Wait until a task is ready, at most `seconds`; whether one is."""
        with self._changed:
            return self._changed.wait_for(lambda: bool(self._ready), seconds)

    def _run(self) -> None:
        while self._wait_for_room():
            share, index = numbered(self._secret, self._number, self._shares)
            self._number += 1
            try:
                self._put(self._render(share, index))
            except EnvironmentFault as fault:
                self._note(fault)

    def _wait_for_room(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._ending or len(self._ready) < AHEAD)
            return not self._ending

    def _put(self, task: Task) -> None:
        with self._changed:
            self._ready.append(task)
            self._changed.notify_all()

    def _note(self, fault: EnvironmentFault) -> None:
        with self._changed:
            self._fault = fault
            self._changed.wait_for(lambda: self._ending, _FAULT_SECONDS)

    def _render(self, share: EnvironmentShare, index: int) -> Task:
        environment = self._environments[share.name, share.parameters]
        try:
            prompt = self._tokenizer().prompt_ids(environment.prompt(index))
        except PolicyError as error:
            raise EnvironmentFault(f"environment {share.name}, task {index}: {error}") from error
        if not 0 < len(prompt) <= limits.MAX_PROMPT_TOKENS:
            raise EnvironmentFault(f"environment {share.name}, task {index}: a prompt of {len(prompt)} tokens")
        return Task(share.name, share.parameters, index, prompt, environment.max_new_tokens)
