"""SPEC 8.10: the built-in tasks, derived a second time."""

from __future__ import annotations

import hashlib
import math
import struct
from typing import Any

from section import Section

TOOLS = ("add", "sub", "mul", "max", "min", "mod", "gcd", "cat")
WORDS = ("sum", "difference", "product", "larger", "smaller", "remainder", "divisor", "joined")


def task_words(person: bytes, index: int) -> tuple[int, ...]:
    digest = hashlib.blake2b(index.to_bytes(8, "little"), digest_size=16, person=person).digest()
    return struct.unpack("<4I", digest)


def tool_result(tool: int, a: int, b: int) -> int:
    results = (a + b, a - b, a * b, max(a, b), min(a, b), a % b if b else 0, math.gcd(a, b), 100 * a + b)
    return results[tool]


def tools8_task(index: int) -> tuple[int, int, int]:
    first, second, third, _ = task_words(b"tools8@1", index)
    return third % 8, 10 + first % 22, 10 + second % 22


def guess_number(index: int) -> int:
    return 1 + task_words(b"guess@1", index)[0] % 20


def tasks() -> dict[str, Any]:
    section = Section("8.10")
    for index in (0, 1, 2, 41, 2**32, 2**64 - 1):
        tool, a, b = tools8_task(index)
        text = f"{WORDS[tool]} of {a} and {b}"
        section.good(
            "prompt",
            f"tools8_prompt_{index}",
            "the question",
            environment="tools8@1",
            index=index,
            value=[{"role": "user", "content": text}],
        )
        _tools8_rewards(section, index, str(tool_result(tool, a, b)))
    for reply, shown in (
        ("<|call|>add 12 30", "42"),
        ("<|call|>sub 12 30", "-18"),
        ("<|call|>mul 12 30", "360"),
        ("<|call|>max 12 30", "30"),
        ("<|call|>min 12 30", "12"),
        ("<|call|>mod 29 12", "5"),
        ("<|call|>gcd 12 30", "6"),
        ("<|call|>cat 12 30", "1230"),
        ("<|call|>cat 12 3", "1203"),
        ("<|call|>mod 12 0", "error"),
        ("<|call|>gcd 0 0", "0"),
        ("<|call|>add 05 7", "12"),
        ("<|call|>add 123 4", "error"),
        ("<|call|>add 12 30 ", "error"),
        ("<|call|>add  12 30", "error"),
        ("<|call|>add 12 30\n", "error"),
        ("<|call|>add -1 2", "error"),
        ("<|call|>ADD 12 30", "error"),
        ("<|call|>pow 12 30", "error"),
        ("<|call|>add \u0661 2", "error"),
        ("<|call|>", "error"),
        ("<|answer|>42", None),
        (" <|call|>add 12 30", None),
        ("", None),
    ):
        name = f"tools8_step_{len(section.valid)}"
        comment = "a call" if shown not in ("error", None) else "no call" if shown is None else "not a call"
        section.good("step", name, comment, environment="tools8@1", index=0, replies=[reply], value=shown)
    _guesses(section)
    _letters(section)
    return section.content()


def asked_letter(index: int) -> str:
    return "abcdfghlmnprstw"[task_words(b"letters@1", index)[0] % 15]


def _letters(section: Section) -> None:
    for index in (0, 1, 41, 2**64 - 1):
        asked = asked_letter(index)
        text = f"Write one sentence of six words. Every word must begin with the letter {asked.upper()}."
        task = {"environment": "letters@1", "index": index}
        section.good(
            "prompt", f"letters_prompt_{index}", "the question", **task, value=[{"role": "user", "content": text}]
        )
        section.good("step", f"letters_step_{index}", "one turn", **task, replies=["x"], value=None)
        one, two = asked + "a", asked.upper() + "b"
        for name, reply, right, words in (
            ("six", f"{one} {two} {one}c {one}d {one}e {one}f.", 6, 6),
            ("two", f"{one}, {two}!", 2, 5),
            ("repeated", f"{one} {one.upper()} {two}", 2, 5),
            ("single_letters", " ".join(asked * 6), 0, 6),
            ("apostrophe", f"{one}'{one}z 9{two}", 3, 5),
            ("twelve", " ".join(asked + chr(97 + i) * 2 for i in range(12)), 12, 12),
            ("thirteen", " ".join(asked + chr(97 + i) * 2 for i in range(13)), 0, 13),
            ("not_ascii", f"\u0130{one} {two}\u00e9{one}c", 3, 5),
            ("none", "", 0, 5),
        ):
            section.good(
                "reward",
                f"letters_{name}_{index}",
                "words that begin with it",
                **task,
                replies=[reply],
                value=right / words,
            )


def _tools8_rewards(section: Section, index: int, right: str) -> None:
    call = "<|call|>add 1 1"
    for name, replies, reward in (
        ("right", [call, "<|answer|>" + right], 1.0),
        ("padded", [call, "<|answer|>0" + right], 0.0),
        ("blank", [call, "<|answer|>" + right + " "], 0.0),
        ("bare", [call, right], 0.0),
        ("early", ["<|answer|>" + right], 0.0),
        ("cut_off", [call, ""], 0.0),
    ):
        comment = "the second reply decides"
        section.good(
            "reward",
            f"tools8_{name}_{index}",
            comment,
            environment="tools8@1",
            index=index,
            replies=replies,
            value=reward,
        )


def _guesses(section: Section) -> None:
    section.good(
        "prompt",
        "guess_prompt",
        "the same for every task",
        environment="guess@1",
        index=0,
        value=[{"role": "user", "content": "guess 1-20"}],
    )
    for index in (0, 1, 2, 41, 2**64 - 1):
        hidden = guess_number(index)
        outside = [str(each) for each in (0, 21, 999)]
        for reply in (*map(str, range(1, 21)), *outside, "007", "", "x", "1000", " 7", "7\n", "\u0667"):
            known = reply.isascii() and reply.isdigit() and len(reply) <= 3
            shown = None if not known or int(reply) == hidden else "higher" if int(reply) < hidden else "lower"
            name = f"guess_step_{index}_{len(section.valid)}"
            section.good("step", name, "one guess", environment="guess@1", index=index, replies=[reply], value=shown)
        five = [str(hidden % 20 + 1)] * 5
        section.good(
            "step",
            f"guess_five_{index}",
            "no sixth guess",
            environment="guess@1",
            index=index,
            replies=five,
            value=None,
        )
        for replies in (
            [str(hidden)],
            ["0", "999"],
            ["10"],
            ["10", "15"],
            ["10", "15", "5"],
            [str(max(1, hidden - 1)), str(min(20, hidden + 1))],
            ["10", "x"],
            [str(hidden), ""],
            ["999", "0", "10", "5", str(hidden)],
        ):
            name = f"guess_reward_{index}_{len(section.valid)}"
            value = _guess_reward(hidden, replies)
            section.good(
                "reward", name, "what the hints left", environment="guess@1", index=index, replies=replies, value=value
            )


def _guess_reward(hidden: int, replies: list[str]) -> float:
    if not all(reply.isascii() and reply.isdigit() and len(reply) <= 3 for reply in replies):
        return 0.0
    guesses = [int(reply) for reply in replies]
    if guesses[-1] == hidden:
        return 1.0
    left = [n for n in range(1, 21) if all(n > g if g < hidden else n < g for g in guesses if g != hidden)]
    return math.floor(math.log2(20 // len(left)) + 1e-9) / 10
