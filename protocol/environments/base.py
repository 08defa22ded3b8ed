"""The contract of a task: a prompt from an index, observations from replies, a reward from the end state.

Here: the interface, the registry, and the guard between an environment and everyone who calls it.
Not here: token ids. An environment sees and returns text; rollout.py turns ids into text and back.

An environment is three pure functions of (index, replies), so the trainer replays an episode instead of
believing it. Replies are untrusted text: an environment matches them, it never evaluates them. A third
party's package adds one through the entry point group `rlcommons.environments`: the entry point's name is
the whole registry name, such as `maze@1`, and its object takes the params string and returns the Environment.
"""

from __future__ import annotations

import importlib.metadata
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Protocol, TypeVar

from protocol.errors import EnvironmentFault, LocalError, UsageError
from protocol.limits import MAX_REPLY_CHARACTERS, MAX_SPANS

ENTRY_POINT_GROUP: Final = "rlcommons.environments"
MAX_INDEX: Final = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a prompt. `role` is a word of chat templates: system, user, assistant, tool."""

    role: str
    content: str


class Environment(Protocol):
    """What a task author writes. Pure: the same arguments give the same answer on every machine, for ever;
    another answer is another version, and so another name.

    `replies` holds the model's turns so far, at least one, each without its stop token and at most
    MAX_REPLY_CHARACTERS long. A turn that was cut off before its stop token arrives as the empty string and
    is the last one (rollout.py), so text that the model did not finish never earns anything.
    """

    @property
    def name(self) -> str:
        """Registry name with version, such as `tools8@1`."""

    @property
    def max_turns(self) -> int:
        """Turns of the model, at least 1. After so many the episode is over whatever `step` says."""

    @property
    def max_new_tokens(self) -> int:
        """Tokens one turn needs at most, its stop token included; what a lease allows unless the run says more."""

    def prompt(self, index: int) -> tuple[Message, ...]:
        """The conversation that opens task `index` (u64)."""

    def step(self, index: int, replies: tuple[str, ...]) -> str | None:
        """What the model sees after its last reply; None when the episode is over."""

    def reward(self, index: int, replies: tuple[str, ...]) -> float:
        """Finite. Also asked about an episode that ended early for want of tokens."""


T = TypeVar("T")
Factory = Callable[[str], Environment]


def _tools8(params: str) -> Environment:
    from protocol.environments.tools import Tools8

    _refuse_params("tools8@1", params)
    return Tools8()


def _guess(params: str) -> Environment:
    from protocol.environments.guess import Guess

    _refuse_params("guess@1", params)
    return Guess()


def _letters(params: str) -> Environment:
    from protocol.environments.letters import Letters

    _refuse_params("letters@1", params)
    return Letters()


def _refuse_params(name: str, params: str) -> None:
    if params:
        raise UsageError(f"environment {name} takes no parameters; leave them out instead of {params!r}")


def _reasoning_gym(name: str) -> Factory:
    def make(params: str) -> Environment:
        from protocol.environments import reasoning_gym

        return reasoning_gym.make(name, params)

    return make


# Generators of reasoning_gym whose scorers were read and probed; reasoning_gym.py says why no others.
REASONING_GYM: Final = tuple(
    f"reasoning_gym:{generator}@1"
    for generator in (
        "basic_arithmetic",
        "calendar_arithmetic",
        "chain_sum",
        "count_bits",
        "gcd",
        "letter_counting",
        "number_sequence",
        "simple_equations",
        "spell_backward",
    )
)
BUILT_IN: Final[Mapping[str, Factory]] = MappingProxyType(
    {
        "tools8@1": _tools8,
        "guess@1": _guess,
        "letters@1": _letters,
        **{name: _reasoning_gym(name) for name in REASONING_GYM},
    }
)


def load(name: str, params: str = "") -> GuardedEnvironment:
    """The environment registered as `name`, guarded. `params` is text of the environment's own choosing.

    Raises UsageError for an unknown name (listing what exists) or for params it cannot use, EnvironmentFault
    when a third party's code fails to load.
    """
    factory = BUILT_IN.get(name) or _installed_factory(name)
    if factory is None:
        raise UsageError(f"there is no environment {name!r}; available: {', '.join(available())}")
    try:
        return GuardedEnvironment(factory(params), name)
    except (UsageError, LocalError):
        raise
    except Exception as error:
        raise EnvironmentFault(f"environment {name} could not be made: {_one_line(error)}") from error


def available() -> tuple[str, ...]:
    """Names that `load` knows, sorted."""
    installed = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
    return tuple(sorted({*BUILT_IN, *(point.name for point in installed)}))


def _installed_factory(name: str) -> Factory | None:
    points = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP, name=name)
    if not points:
        return None
    if len(points) > 1:
        owners = ", ".join(sorted(point.value for point in points))
        raise UsageError(f"environment {name} is registered more than once ({owners}): uninstall all but one")
    try:
        factory: Factory = next(iter(points)).load()
    except Exception as error:
        raise EnvironmentFault(f"environment {name} could not be loaded: {_one_line(error)}") from error
    return factory


class GuardedEnvironment:
    """An environment as everyone calls it: whatever goes wrong inside is an EnvironmentFault, a fault of this
    machine or of the task's author and never a node's; whatever comes out keeps the contract."""

    __slots__ = ("_inner", "max_new_tokens", "max_turns", "name")

    def __init__(self, inner: Environment, name: str) -> None:
        if inner.name != name:
            raise EnvironmentFault(f"environment {name} calls itself {inner.name!r}")
        if not 1 <= inner.max_turns <= MAX_SPANS // 2 or inner.max_new_tokens < 1:
            raise EnvironmentFault(f"environment {name} needs 1 to {MAX_SPANS // 2} turns of at least one token")
        self._inner = inner
        self.name = name
        self.max_turns = inner.max_turns
        self.max_new_tokens = inner.max_new_tokens

    def prompt(self, index: int) -> tuple[Message, ...]:
        messages = self._call("prompt", index, lambda: self._inner.prompt(index))
        if not isinstance(messages, tuple) or not messages or not all(map(_is_message, messages)):
            raise self._fault("prompt", index, "did not return a non-empty tuple of Message with text")
        return messages

    def step(self, index: int, replies: tuple[str, ...]) -> str | None:
        shown = self._shown("step", index, replies)
        if len(shown) >= self.max_turns:
            return None
        observation = self._call("step", index, lambda: self._inner.step(index, shown))
        if observation is None:
            return None
        if not _is_text(observation):
            raise self._fault("step", index, f"returned no text of at most {MAX_REPLY_CHARACTERS} characters")
        return observation

    def reward(self, index: int, replies: tuple[str, ...]) -> float:
        shown = self._shown("reward", index, replies)
        value = self._call("reward", index, lambda: self._inner.reward(index, shown))
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise self._fault("reward", index, f"returned {value!r}, not a finite number")
        return float(value)

    def _shown(self, what: str, index: int, replies: tuple[str, ...]) -> tuple[str, ...]:
        if not 1 <= len(replies) <= self.max_turns:
            raise self._fault(what, index, f"was asked about {len(replies)} turns of 1 to {self.max_turns}")
        return tuple(reply[:MAX_REPLY_CHARACTERS] for reply in replies)

    def _call(self, what: str, index: int, function: Callable[[], T]) -> T:
        if not 0 <= index <= MAX_INDEX:
            raise self._fault(what, index, "was asked about an index that is no u64")
        try:
            return function()
        except EnvironmentFault:
            raise
        except Exception as error:
            raise self._fault(what, index, f"raised {_one_line(error)}") from error

    def _fault(self, what: str, index: int, happened: str) -> EnvironmentFault:
        return EnvironmentFault(f"environment {self.name}, task {index}: {what} {happened}")


def _is_message(value: object) -> bool:
    return isinstance(value, Message) and _is_text(value.role) and _is_text(value.content)


def _is_text(value: object) -> bool:
    """Text a tokenizer can read: no lone surrogates, and not endless."""
    if not isinstance(value, str) or len(value) > MAX_REPLY_CHARACTERS:
        return False
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
