"""tools8@1: call the tool that the question asks for, then report its result. Two turns.

    user       remainder of 29 and 12
    assistant  <|call|>mod 29 12
    tool       5
    assistant  <|answer|>5

The task, so that any language can derive it: h = BLAKE2b-128(index as u64 little-endian, person "tools8@1");
a = 10 + u32le(h[0:4]) mod 22; b = 10 + u32le(h[4:8]) mod 22; the tool is number u32le(h[8:12]) mod 8 of TOOLS.
A tool runs on the arguments the model wrote (one or two digits each); a call that is not one gets `error`.
Reward 1 when the second reply is the right tool's result, else 0: the same number from another tool counts.
"""

from __future__ import annotations

import hashlib
import math
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from protocol.environments.base import Message

CALL: Final = "<|call|>"
ANSWER: Final = "<|answer|>"
_CALL: Final = re.compile(r"<\|call\|>([a-z]{3}) ([0-9]{1,2}) ([0-9]{1,2})")


@dataclass(frozen=True, slots=True)
class Tool:
    name: str
    asked_for: str  # the word of the question
    run: Callable[[int, int], int]


TOOLS: Final = (
    Tool("add", "sum", lambda a, b: a + b),
    Tool("sub", "difference", lambda a, b: a - b),
    Tool("mul", "product", lambda a, b: a * b),
    Tool("max", "larger", max),
    Tool("min", "smaller", min),
    Tool("mod", "remainder", lambda a, b: a % b),
    Tool("gcd", "divisor", math.gcd),
    Tool("cat", "joined", lambda a, b: a * 100 + b),
)
_BY_NAME: Final = {tool.name: tool for tool in TOOLS}


@dataclass(frozen=True, slots=True)
class Task:
    a: int
    b: int
    tool: Tool


def task(index: int) -> Task:
    digest = hashlib.blake2b(index.to_bytes(8, "little"), digest_size=16, person=b"tools8@1").digest()
    first, second, third, _ = struct.unpack("<4I", digest)
    return Task(10 + first % 22, 10 + second % 22, TOOLS[third % len(TOOLS)])


@dataclass(frozen=True, slots=True)
class Tools8:
    name: str = "tools8@1"
    max_turns: int = 2
    max_new_tokens: int = 14

    def prompt(self, index: int) -> tuple[Message, ...]:
        asked = task(index)
        return (Message("user", f"{asked.tool.asked_for} of {asked.a} and {asked.b}"),)

    def step(self, index: int, replies: tuple[str, ...]) -> str | None:
        last = replies[-1]
        if len(replies) >= self.max_turns or not last.startswith(CALL):
            return None
        call = _CALL.fullmatch(last)
        if call is None or call[1] not in _BY_NAME:
            return "error"
        try:
            return str(_BY_NAME[call[1]].run(int(call[2]), int(call[3])))
        except ZeroDivisionError:
            return "error"

    def reward(self, index: int, replies: tuple[str, ...]) -> float:
        asked = task(index)
        right = ANSWER + str(asked.tool.run(asked.a, asked.b))
        return float(len(replies) == self.max_turns and replies[-1] == right)
