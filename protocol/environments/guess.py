"""guess@1: find a number from 1 to 20 in at most five guesses, with `higher` or `lower` after each.

The number: h = BLAKE2b-128(index as u64 little-endian, person "guess@1"); 1 + u32le(h[0:4]) mod 20.
Reward 1 when the last guess is right. Otherwise a tenth for each time the hints halved what was left (with r
numbers left, floor(log2(20 / r)) tenths, at most .4), and 0 once any reply is not a number. Tenths of a whole
number, so every machine computes the same reward.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Final

from protocol.environments.base import Message

LARGEST: Final = 20
_NUMBER: Final = re.compile(r"[0-9]{1,3}")


def number(index: int) -> int:
    digest = hashlib.blake2b(index.to_bytes(8, "little"), digest_size=16, person=b"guess@1").digest()
    return 1 + int.from_bytes(digest[:4], "little") % LARGEST


@dataclass(frozen=True, slots=True)
class Guess:
    name: str = "guess@1"
    max_turns: int = 5
    max_new_tokens: int = 4

    def prompt(self, index: int) -> tuple[Message, ...]:
        return (Message("user", f"guess 1-{LARGEST}"),)

    def step(self, index: int, replies: tuple[str, ...]) -> str | None:
        last = replies[-1]
        if len(replies) >= self.max_turns or not _NUMBER.fullmatch(last) or int(last) == number(index):
            return None
        return "higher" if int(last) < number(index) else "lower"

    def reward(self, index: int, replies: tuple[str, ...]) -> float:
        if not all(_NUMBER.fullmatch(reply) for reply in replies):
            return 0.0
        hidden = number(index)
        guesses = [int(reply) for reply in replies]
        if guesses[-1] == hidden:
            return 1.0
        low = max([1, *(guess + 1 for guess in guesses if guess < hidden)])
        high = min([LARGEST, *(guess - 1 for guess in guesses if guess > hidden)])
        halvings = (LARGEST // (high - low + 1)).bit_length() - 1
        return halvings / 10
