"""Tasks that give traces of a wanted length, for controls and calibration: an environment's own tasks one after
the other, and a writing task that any language model can go on with.

Not in the registry: no run leases these.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Final

from protocol.environments import base
from protocol.environments.base import Environment, GuardedEnvironment, Message
from protocol.environments.tokenizer import PolicyTokenizer
from protocol.limits import MAX_SPANS

WRITING: Final = "writing"
_TASKS_APART: Final = 1 << 20  # tasks that follow task i: i + 1 · 2^20, i + 2 · 2^20, …
# Special tokens stand for many characters, so a task made of them is asked for more than the bare ratio.
_SLACK: Final = 2.5
_SENTENCES: Final = 8  # one writing task in so many is a sentence
_WORD: Final = re.compile(r"[a-z]+")
_THINGS: Final = (
    "a river", "an old clock", "two friends", "the winter", "a lighthouse", "bread", "a lost key", "the moon",
    "a small shop", "rain", "a bridge", "the market", "a violin", "my neighbour", "a train", "the garden", "salt",
    "a letter", "the sea", "a map",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Writing:
    """A story, which goes on until it is cut off; one task in eight is a sentence, which stops by itself."""

    max_new_tokens: int
    name: str = WRITING
    max_turns: int = 1

    def prompt(self, index: int) -> tuple[Message, ...]:
        digest = hashlib.blake2b(index.to_bytes(8, "little"), digest_size=8, person=b"writing").digest()
        first, second = _THINGS[digest[0] % len(_THINGS)], _THINGS[digest[1] % len(_THINGS)]
        what = "a long story" if index % _SENTENCES else "one short sentence"
        return (Message("user", f"Write {what} about {first} and {second}."),)

    def step(self, index: int, replies: tuple[str, ...]) -> str | None:
        return None

    def reward(self, index: int, replies: tuple[str, ...]) -> float:
        words = _WORD.findall(replies[-1].lower())
        return len(set(words)) / max(len(words), 20)


@dataclass(frozen=True, slots=True)
class LongTask:
    """The tasks of `inner` one after the other in one episode, until the model has written `characters`."""

    inner: Environment
    characters: int
    max_turns: int = MAX_SPANS // 2

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def max_new_tokens(self) -> int:
        return self.inner.max_new_tokens

    def prompt(self, index: int) -> tuple[Message, ...]:
        return self.inner.prompt(_task(index, 0))

    def step(self, index: int, replies: tuple[str, ...]) -> str | None:
        if sum(map(len, replies)) >= self.characters:
            return None
        number, start = self._place(index, replies)
        if start == len(replies):
            return self.inner.prompt(_task(index, number))[-1].content
        return self.inner.step(_task(index, number), replies[start:])

    def reward(self, index: int, replies: tuple[str, ...]) -> float:
        """The mean of the tasks' rewards."""
        rewards: list[float] = []
        start = 0
        for end in range(1, len(replies) + 1):
            task = _task(index, len(rewards))
            if end == len(replies) or self.inner.step(task, replies[start:end]) is None:
                rewards.append(self.inner.reward(task, replies[start:end]))
                start = end
        return sum(rewards) / len(rewards)

    def _place(self, index: int, replies: tuple[str, ...]) -> tuple[int, int]:
        """The number of the task that comes next and its first reply's place."""
        number, start = 0, 0
        for end in range(1, len(replies) + 1):
            if self.inner.step(_task(index, number), replies[start:end]) is None:
                number, start = number + 1, end
        return number, start


def _task(index: int, number: int) -> int:
    return index + number * _TASKS_APART


def long_task(tokenizer: PolicyTokenizer, name: str | None, tokens: int) -> GuardedEnvironment:
    """An environment whose episodes hold about `tokens` generated ones or more: writing, or the registered `name`'s
    tasks. Raises UsageError for an unknown name."""
    inner = Writing(tokens) if name is None else base.load(name)
    text = inner.prompt(0)[-1].content
    a_token = len(text) / max(1, len(tokenizer.encode(text)))
    slack = 1.0 if name is None else _SLACK
    return GuardedEnvironment(LongTask(inner, round(slack * tokens * a_token)), inner.name)
