"""reasoning_gym:GENERATOR@1: single-turn tasks of the library reasoning_gym 0.1.25 (extra `reasoning-gym`).

Only the generators on base.REASONING_GYM exist here. The library's other scorers are not offered: nine of fifteen
probed ran code found in the answer, five generators depend on Python's hash seed, several accept wrong answers.
Even these run in a sandboxed subprocess (sandbox.py), one for this whole process.

The model is asked to end with `Answer:` and the answer alone; what follows the last `Answer:` is scored, or the
whole reply where there is none, without surrounding white space. Scores are cut to [0, 1] and rounded to six
places, because one scorer's exp() may differ in its last bit between machines.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from protocol.environments.base import Message
from protocol.environments.sandbox import CallRefused, Sandbox
from protocol.errors import UsageError

LIBRARY_VERSION: Final = "0.1.25"  # another release may give other tasks: then these names need an @2
PREFIX: Final = "reasoning_gym:"
DEFAULT_MAX_NEW_TOKENS: Final = 128
INSTRUCTION: Final = 'End your reply with "Answer:" and the answer alone.'
# Settings that are ours: the index chooses the task, and no file is read by name.
_RESERVED: Final = frozenset({"seed", "size", "data_file"})
_ANSWER: Final = re.compile("answer:", re.IGNORECASE | re.ASCII)


@functools.cache
def _sandbox() -> Sandbox:
    return Sandbox(Path(__file__).with_name("reasoning_gym_process.py"))


@dataclass(frozen=True, slots=True)
class ReasoningGym:
    name: str
    generator: str
    config: str  # JSON object: the generator's settings, keys sorted
    max_new_tokens: int
    max_turns: int = 1

    def prompt(self, index: int) -> tuple[Message, ...]:
        question = self._ask("question", index=index)
        return (Message("user", f"{question}\n\n{INSTRUCTION}"),)

    def step(self, index: int, replies: tuple[str, ...]) -> str | None:
        return None

    def reward(self, index: int, replies: tuple[str, ...]) -> float:
        score = float(self._ask("score", index=index, answer=final_answer(replies[-1])))
        return round(min(1.0, max(0.0, score)), 6)

    def _ask(self, what: str, **fields: object) -> Any:
        request = {"do": what, "generator": self.generator, "config": self.config, **fields}
        return _sandbox().call(request)


def final_answer(reply: str) -> str:
    found = list(_ANSWER.finditer(reply))
    return (reply[found[-1].end() :] if found else reply).strip()


def make(name: str, params: str) -> ReasoningGym:
    """`params` is empty or a JSON object: `max_new_tokens` (int) and `generator` (the generator's settings)."""
    generator = name.removeprefix(PREFIX).partition("@")[0]
    _require_library()
    config, max_new_tokens = _parse_params(name, params)
    environment = ReasoningGym(name, generator, config, max_new_tokens)
    try:
        environment._ask("make")
    except CallRefused as error:
        raise UsageError(f"environment {name} does not accept the parameters {params!r}: {error}") from error
    return environment


def _require_library() -> None:
    try:
        version = importlib.metadata.version("reasoning-gym")
    except importlib.metadata.PackageNotFoundError:
        raise UsageError("the tasks of reasoning_gym need the extra: pip install -e '.[reasoning-gym]'") from None
    if version != LIBRARY_VERSION:
        raise UsageError(
            f"reasoning_gym {version} is installed, these tasks are those of {LIBRARY_VERSION}: "
            "pip install -e '.[reasoning-gym]'"
        )


def _parse_params(name: str, params: str) -> tuple[str, int]:
    try:
        fields = json.loads(params) if params else {}
    except ValueError as error:
        raise UsageError(f"the parameters of {name} are not JSON: {error}") from error
    if not isinstance(fields, dict) or not set(fields) <= {"max_new_tokens", "generator"}:
        raise UsageError(f"the parameters of {name} are a JSON object with max_new_tokens and generator")
    settings = fields.get("generator", {})
    tokens = fields.get("max_new_tokens", DEFAULT_MAX_NEW_TOKENS)
    if not isinstance(settings, dict) or set(settings) & _RESERVED:
        raise UsageError(f"`generator` of {name} holds the generator's settings, without {sorted(_RESERVED)}")
    if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1:
        raise UsageError(f"`max_new_tokens` of {name} is a whole number from 1, not {tokens!r}")
    return json.dumps(settings, sort_keys=True), tokens
