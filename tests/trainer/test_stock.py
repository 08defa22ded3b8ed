"""Tasks rendered ahead: an unforeseeable stream by weight, and what happens when an environment fails or hangs."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from protocol.environments import base
from protocol.environments.base import Message
from protocol.environments.tokenizer import PolicyTokenizer
from protocol.errors import EnvironmentFault
from protocol.run import EnvironmentShare
from trainer.init import EMBEDDED
from trainer.stock import AHEAD, Stock, Task, numbered

SECRET = b"\x05" * 32
TOOLS, GUESS = EnvironmentShare("tools8@1", "", 3), EnvironmentShare("guess@1", "", 1)
TOKENIZER = PolicyTokenizer.load(EMBEDDED)


def next_of(stock: Stock) -> Task:
    assert stock.wait_ready(10)
    task = stock.take()
    assert task is not None
    return task


def test_the_stream_is_the_same_for_one_secret_and_another_for_another() -> None:
    stream = [numbered(SECRET, number, (TOOLS, GUESS)) for number in range(20)]
    assert stream == [numbered(SECRET, number, (TOOLS, GUESS)) for number in range(20)]
    assert stream != [numbered(b"\x06" * 32, number, (TOOLS, GUESS)) for number in range(20)]
    assert len({index for _, index in stream}) == 20


def test_environments_come_by_their_weight() -> None:
    counts = Counter(numbered(SECRET, number, (TOOLS, GUESS))[0].name for number in range(8_000))
    assert abs(counts["tools8@1"] / 8_000 - 0.75) < 0.03  # six standard deviations


def test_tasks_come_in_the_order_of_the_stream_from_the_first_one_on() -> None:
    with Stock(SECRET, (TOOLS, GUESS), 7, lambda: TOKENIZER) as stock:
        tasks = [next_of(stock) for _ in range(2 * AHEAD)]
    expected = [numbered(SECRET, number, (TOOLS, GUESS)) for number in range(7, 7 + 2 * AHEAD)]
    assert [(task.environment, task.index) for task in tasks] == [(share.name, index) for share, index in expected]
    environment = base.load(tasks[0].environment)
    assert tasks[0].prompt == TOKENIZER.prompt_ids(environment.prompt(tasks[0].index))
    assert tasks[0].turn_tokens == environment.max_new_tokens


class Troubled:
    """An environment whose prompt does what the test says."""

    name = "tools8@1"
    max_turns = 2
    max_new_tokens = 14

    def __init__(self, prompt: Callable[[int], tuple[Message, ...]]) -> None:
        self._prompt = prompt

    def prompt(self, index: int) -> tuple[Message, ...]:
        return self._prompt(index)

    def step(self, index: int, replies: tuple[str, ...]) -> str | None:
        return None

    def reward(self, index: int, replies: tuple[str, ...]) -> float:
        return 0.0


def stock_with(monkeypatch: pytest.MonkeyPatch, prompt: Callable[[int], Any]) -> Stock:
    def load(name: str, parameters: str) -> base.GuardedEnvironment:
        return base.GuardedEnvironment(Troubled(prompt), name)

    monkeypatch.setattr(base, "load", load)
    return Stock(SECRET, (TOOLS,), 0, lambda: TOKENIZER)


def test_a_task_whose_environment_fails_is_said_once_and_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def prompt(index: int) -> tuple[Message, ...]:
        calls.append(index)
        if len(calls) == 1:
            raise RuntimeError("out of order")
        return (Message("user", "sum of 1 and 2"),)

    stock = stock_with(monkeypatch, prompt)
    with stock:
        assert next_of(stock).index == numbered(SECRET, 1, (TOOLS,))[1]
        fault = stock.fault()
        assert isinstance(fault, EnvironmentFault) and "RuntimeError: out of order" in str(fault)
        assert stock.fault() is None


def test_an_environment_that_hangs_holds_up_neither_asking_nor_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    leave = threading.Event()

    def prompt(index: int) -> tuple[Message, ...]:
        leave.wait(30)
        return (Message("user", "at last"),)

    with stock_with(monkeypatch, prompt) as stock:
        assert stock.take() is None
        assert not stock.wait_ready(0.05)
    leave.set()


def test_no_more_is_rendered_than_is_kept_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def prompt(index: int) -> tuple[Message, ...]:
        calls.append(index)
        return (Message("user", "sum of 1 and 2"),)

    with stock_with(monkeypatch, prompt) as stock:
        for taken in range(1, 4):
            next_of(stock)
            assert len(calls) <= AHEAD + taken
