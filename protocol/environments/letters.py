"""letters@1: write a short sentence whose words all begin with one letter. One turn, shaped reward.

The task for policies that speak but have learned no format: any instruction model earns a little and can earn more.
The letter: h = BLAKE2b-128(index as u64 little-endian, person "letters@1"); LETTERS[u32le(h[0:4]) mod 15].
Words are runs of A-Z and a-z, compared without case. Reward = different words of two letters or more that begin
with the letter / max(all words, 5), and 0 for more than 12 words.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Final

from protocol.environments.base import Message

LETTERS: Final = "abcdfghlmnprstw"
FEWEST, MOST = 5, 12
_WORD: Final = re.compile(r"[a-z]+")


def letter(index: int) -> str:
    digest = hashlib.blake2b(index.to_bytes(8, "little"), digest_size=16, person=b"letters@1").digest()
    return LETTERS[int.from_bytes(digest[:4], "little") % len(LETTERS)]


@dataclass(frozen=True, slots=True)
class Letters:
    name: str = "letters@1"
    max_turns: int = 1
    max_new_tokens: int = 32

    def prompt(self, index: int) -> tuple[Message, ...]:
        asked = letter(index).upper()
        return (Message("user", f"Write one sentence of six words. Every word must begin with the letter {asked}."),)

    def step(self, index: int, replies: tuple[str, ...]) -> str | None:
        return None

    def reward(self, index: int, replies: tuple[str, ...]) -> float:
        # ASCII only before lower(): a few other letters turn into a-z there.
        words = _WORD.findall("".join(c.lower() if c.isascii() else c for c in replies[-1]))
        if len(words) > MOST:
            return 0.0
        right = {word for word in words if len(word) > 1 and word.startswith(letter(index))}
        return len(right) / max(len(words), FEWEST)
