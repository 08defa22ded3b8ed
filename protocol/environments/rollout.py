"""When a turn ends, what follows it, and the replay of a whole episode: pure functions over token ids.

The node calls turn_budget, reply_text, next_observation and has_room turn by turn; the trainer calls replay over
the finished trace. Both run the same lines, so an honest trace replays id for id. Not here: whether the policy
drew these tokens (verify/sampling.py), limits on the bytes of a trace.

An episode is spans that alternate: a generated one is a turn with its stop token, an observed one what the
environment answers. `used` counts every token after the prompt, both kinds. `max_turn_tokens` and `max_tokens`
are the lease's. The rules, in order, after each turn:

1. A turn holds at most turn_budget tokens. Its first stop token is its last token; without one it holds exactly
   turn_budget tokens and was cut off. A cut-off turn ends the episode; the environment is shown the empty string
   for it, so half a number is never taken for an answer and a turn that never stops earns nothing.
2. Otherwise the environment's `step` decides: None ends the episode.
3. Otherwise the observation must fit with at least one token after it: used + observation + 1 <= max_tokens.
   If it does not, the episode ends before the observation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from protocol.environments.base import Environment, Message
from protocol.trace import SpanKind

Ids = Sequence[int]


class Codec(Protocol):
    """What an episode needs of a tokenizer; PolicyTokenizer is the one that ships."""

    stop_ids: frozenset[int]

    def decode(self, ids: Sequence[int]) -> str: ...

    def prompt_ids(self, messages: Sequence[Message]) -> tuple[int, ...]: ...

    def observation_ids(self, observation: str) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True)
class Replay:
    """What an episode should have been. Everything matches and `finished` for an honest trace; then `reward` is
    the environment's. After a mismatch the rest was not replayed and `reward` is 0."""

    prompt_matches: bool
    turns_match: bool  # stop rules and alternation
    observations_match: bool
    first_bad_span: int | None
    expected: tuple[int, ...] | None  # ids that belong in the bad span; None where no span belongs there
    detail: str  # one line for a verdict; empty when nothing is wrong
    finished: bool  # the episode was over after the last span
    reward: float
    replies: tuple[str, ...]

    @property
    def matches(self) -> bool:
        return self.prompt_matches and self.turns_match and self.observations_match and self.finished


def turn_budget(max_turn_tokens: int, max_tokens: int, used: int) -> int:
    """Tokens the next turn may hold, its stop token included; never negative."""
    return max(0, min(max_turn_tokens, max_tokens - used))


def reply_text(tokenizer: Codec, generated_ids: Ids) -> str | None:
    """The turn as the environment reads it: without its stop token. None when the turn was cut off."""
    if not generated_ids or generated_ids[-1] not in tokenizer.stop_ids:
        return None
    return tokenizer.decode(generated_ids[:-1])


def next_observation(
    environment: Environment, tokenizer: Codec, index: int, replies: tuple[str, ...]
) -> tuple[int, ...] | None:
    """Ids that follow the stop token of the last reply; None when the environment calls the episode over."""
    observation = environment.step(index, replies)
    return None if observation is None else tokenizer.observation_ids(observation)


def has_room(observation_ids: Ids, max_tokens: int, used: int) -> bool:
    """Whether the observation and one more token fit (rule 3)."""
    return used + len(observation_ids) + 1 <= max_tokens


def replay(
    environment: Environment,
    tokenizer: Codec,
    index: int,
    prompt_ids: Ids,
    spans: Sequence[tuple[int, Ids]],
    max_turn_tokens: int,
    max_tokens: int,
) -> Replay:
    """Plays the episode of task `index` again with the model's turns taken from `spans` (Trace.pieces).

    Raises what the environment or the tokenizer raises (EnvironmentFault, PolicyError): a fault of this side,
    never the node's.
    """
    if tuple(prompt_ids) != tokenizer.prompt_ids(environment.prompt(index)):
        return _mismatch("prompt", None, None, "the prompt is not the one this task renders to", ())
    if not spans:
        return _mismatch("turns", 0, None, "there is no generated token", ())
    replies: tuple[str, ...] = ()
    used = 0
    for position in range(0, len(spans), 2):
        kind, ids = spans[position]
        if kind != SpanKind.GENERATED:
            return _mismatch("turns", position, None, "an observation stands where a turn belongs", replies)
        fault = turn_fault(tokenizer.stop_ids, ids, turn_budget(max_turn_tokens, max_tokens, used))
        if fault:
            return _mismatch("turns", position, None, fault, replies)
        used += len(ids)
        reply = reply_text(tokenizer, ids)
        replies = (*replies, "" if reply is None else reply)
        expected = None if reply is None else next_observation(environment, tokenizer, index, replies)
        if expected is not None and not has_room(expected, max_tokens, used):
            expected = None
        if position + 1 == len(spans):
            return _ended(environment, index, replies, finished=expected is None)
        fault = _observation_fault(spans[position + 1], expected)
        if fault:
            return _mismatch("observations", position + 1, expected, fault, replies)
        used += len(spans[position + 1][1])
    return _mismatch("turns", len(spans), None, "the trace ends with an observation", replies)


def turn_fault(stop_ids: frozenset[int], ids: Ids, budget: int) -> str:
    """Why `ids` cannot be one turn under rule 1; empty when they can."""
    early = not stop_ids.isdisjoint(ids[:-1])
    stops = early or (bool(ids) and ids[-1] in stop_ids)
    if not ids:
        return "the turn is empty"
    if len(ids) > budget:
        return f"the turn has {len(ids)} tokens, {budget} were allowed"
    if not stops and len(ids) < budget:
        return f"the turn ends after {len(ids)} tokens without a stop token, {budget} were allowed"
    if early:
        first = next(place for place, token in enumerate(ids) if token in stop_ids)
        return f"{len(ids) - 1 - first} tokens follow the stop token"
    return ""


def _observation_fault(span: tuple[int, Ids], expected: tuple[int, ...] | None) -> str:
    kind, ids = span
    if expected is None:
        return "the episode was over before"
    if kind != SpanKind.OBSERVED or tuple(ids) != expected:
        return "not what the environment shows"
    return ""


def _ended(environment: Environment, index: int, replies: tuple[str, ...], finished: bool) -> Replay:
    reward = environment.reward(index, replies) if finished else 0.0
    detail = "" if finished else "the trace stops before the episode is over"
    return Replay(True, True, True, None, None, detail, finished, reward, replies)


def _mismatch(
    what: str, span: int | None, expected: tuple[int, ...] | None, detail: str, replies: tuple[str, ...]
) -> Replay:
    return Replay(
        prompt_matches=what != "prompt",
        turns_match=what != "turns",
        observations_match=what != "observations",
        first_bad_span=span,
        expected=expected,
        detail=detail if span is None else f"span {span}: {detail}",
        finished=False,
        reward=0.0,
        replies=replies,
    )
