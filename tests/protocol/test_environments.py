"""The contract of a task, the built-in tasks, and the replay of episodes over token ids."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from protocol.environments import guess, letters, tools
from protocol.environments.base import GuardedEnvironment, Message, available, load
from protocol.environments.rollout import (
    has_room,
    next_observation,
    replay,
    reply_text,
    turn_budget,
)
from protocol.environments.tokenizer import PolicyTokenizer
from protocol.errors import EnvironmentFault, UsageError
from protocol.limits import MAX_REPLY_CHARACTERS
from protocol.trace import SpanKind

GENERATED, OBSERVED = SpanKind.GENERATED, SpanKind.OBSERVED
EMBEDDED = Path(__file__).parents[2] / "trainer" / "embedded"
TURN, EPISODE = 14, 64  # tokens
# What the specification in each module's docstring gives, computed apart from the code.
KNOWN_TOOLS8 = [("mul", 19, 20), ("add", 13, 26), ("sub", 23, 12)]
KNOWN_LETTERS = "cwswdcat"
KNOWN_GUESS = [1, 14, 8, 16, 16, 4]


@pytest.fixture(scope="module")
def tokenizer() -> PolicyTokenizer:
    return PolicyTokenizer.load(EMBEDDED)


# --- the registry ---


def test_an_unknown_environment_is_refused_with_a_list_of_those_that_exist() -> None:
    with pytest.raises(UsageError, match=r"no environment 'maze@1'; available: .*guess@1.*tools8@1"):
        load("maze@1")


def test_every_built_in_name_is_listed() -> None:
    assert {"tools8@1", "guess@1", "reasoning_gym:chain_sum@1"} <= set(available())


@pytest.mark.parametrize("name", ["tools8@1", "guess@1", "letters@1"])
def test_an_environment_without_parameters_refuses_some(name: str) -> None:
    with pytest.raises(UsageError, match="takes no parameters"):
        load(name, "hard")


def install(folder: Path, source: str, entry: str) -> None:
    """Makes `folder` look like site-packages with one distribution that registers an environment."""
    (folder / "their_tasks.py").write_text(source)
    info = folder / "their_tasks-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-tasks\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[rlcommons.environments]\n{entry}\n")


THEIRS = """
from protocol.environments.base import Message

class Echo:
    name, max_turns, max_new_tokens = "echo@1", 1, 8
    def __init__(self, params): self.word = params or "word"
    def prompt(self, index): return (Message("user", self.word),)
    def step(self, index, replies): return None
    def reward(self, index, replies): return float(replies[-1] == self.word)
"""


def test_a_third_party_registers_an_environment_by_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, THEIRS, "echo@1 = their_tasks:Echo")
    monkeypatch.syspath_prepend(tmp_path)
    environment = load("echo@1", "yes")
    assert "echo@1" in available()
    assert environment.reward(0, ("yes",)) == 1.0


def test_a_third_party_that_cannot_be_imported_is_an_environment_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, THEIRS, "broken@1 = their_missing_tasks:Echo")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(EnvironmentFault, match=r"broken@1 could not be loaded: ModuleNotFoundError"):
        load("broken@1")


# --- the guard ---


@dataclass
class Scripted:
    """An environment that answers with whatever a test gives it."""

    name: str = "scripted@1"
    max_turns: int = 3
    max_new_tokens: int = 8
    prompt_answer: object = (Message("user", "hello"),)
    step_answer: object = "seen"
    reward_answer: object = 0.5
    seen: tuple[str, ...] = ()

    def prompt(self, index: int) -> object:
        return self.prompt_answer

    def step(self, index: int, replies: tuple[str, ...]) -> object:
        self.seen = replies
        return self.step_answer

    def reward(self, index: int, replies: tuple[str, ...]) -> object:
        if isinstance(self.reward_answer, Exception):
            raise self.reward_answer
        return self.reward_answer


def guarded(inner: Scripted) -> GuardedEnvironment:
    return GuardedEnvironment(inner, "scripted@1")  # type: ignore[arg-type]


@pytest.mark.parametrize("error", [ValueError("no"), ZeroDivisionError(), RecursionError(), MemoryError()])
def test_an_environment_that_raises_is_a_fault_of_this_side(error: Exception) -> None:
    environment = guarded(Scripted(reward_answer=error))
    with pytest.raises(EnvironmentFault, match=rf"scripted@1, task 7: reward raised {type(error).__name__}"):
        environment.reward(7, ("x",))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, "1.0", 1j])
def test_a_reward_that_is_no_finite_number_is_a_fault(value: object) -> None:
    with pytest.raises(EnvironmentFault, match="not a finite number"):
        guarded(Scripted(reward_answer=value)).reward(0, ("x",))


@pytest.mark.parametrize("value", [5, b"x", "\ud800", "x" * (MAX_REPLY_CHARACTERS + 1)])
def test_an_observation_that_is_no_readable_text_is_a_fault(value: object) -> None:
    with pytest.raises(EnvironmentFault, match="returned no text"):
        guarded(Scripted(step_answer=value)).step(0, ("x",))


@pytest.mark.parametrize("value", [(), [Message("user", "x")], ("x",), (Message("user", "\ud800"),), None])
def test_a_prompt_that_is_no_conversation_is_a_fault(value: object) -> None:
    with pytest.raises(EnvironmentFault, match="non-empty tuple of Message"):
        guarded(Scripted(prompt_answer=value)).prompt(0)


@pytest.mark.parametrize("index", [-1, 2**64])
def test_an_index_that_is_no_u64_is_a_fault(index: int) -> None:
    with pytest.raises(EnvironmentFault, match="no u64"):
        load("tools8@1").prompt(index)


def test_an_environment_never_sees_more_of_a_reply_than_the_limit() -> None:
    inner = Scripted()
    guarded(inner).step(0, ("x" * (MAX_REPLY_CHARACTERS + 5),))
    assert inner.seen == ("x" * MAX_REPLY_CHARACTERS,)


def test_the_last_allowed_turn_ends_the_episode_whatever_step_says() -> None:
    environment = guarded(Scripted(max_turns=2))
    assert environment.step(0, ("a",)) == "seen"
    assert environment.step(0, ("a", "b")) is None


def test_more_replies_than_turns_are_a_fault() -> None:
    with pytest.raises(EnvironmentFault, match="asked about 4 turns"):
        guarded(Scripted()).reward(0, ("a",) * 4)


def test_an_environment_that_calls_itself_something_else_is_a_fault() -> None:
    with pytest.raises(EnvironmentFault, match="calls itself 'scripted@2'"):
        guarded(Scripted(name="scripted@2"))


# --- tools8@1 ---


def test_tools8_tasks_are_derived_as_specified() -> None:
    known = [(tools.task(index).tool.name, tools.task(index).a, tools.task(index).b) for index in (0, 1, 2**64 - 1)]
    assert known == KNOWN_TOOLS8


def test_tools8_asks_for_each_tool_about_equally_often() -> None:
    names = [tools.task(index).tool.name for index in range(4000)]
    assert all(400 < names.count(tool.name) < 600 for tool in tools.TOOLS)


def right_replies(index: int) -> tuple[str, str]:
    task = tools.task(index)
    return (
        f"<|call|>{task.tool.name} {task.a} {task.b}",
        f"<|answer|>{task.tool.run(task.a, task.b)}",
    )


@pytest.mark.parametrize("index", range(24))
def test_tools8_pays_the_right_tool_and_its_result(index: int) -> None:
    environment = load("tools8@1")
    call, answer = right_replies(index)
    assert environment.step(index, (call,)) == answer.removeprefix("<|answer|>")
    assert environment.step(index, (call, answer)) is None
    assert environment.reward(index, (call, answer)) == 1.0
    assert environment.reward(index, (call, answer + " ")) == 0.0
    assert environment.reward(index, (answer,)) == 0.0


@pytest.mark.parametrize(
    ("reply", "observation"),
    [
        ("<|call|>add 2 3", "5"),
        ("<|call|>sub 2 3", "-1"),
        ("<|call|>cat 2 30", "230"),
        ("<|call|>mod 2 0", "error"),
        ("<|call|>mod 2", "error"),
        ("<|call|>pow 2 3", "error"),
        ("<|call|>add 2 3\n", "error"),
        ("<|call|>add 2 333", "error"),
        ("<|call|>add ２ 3", "error"),
        ("<|call|>__import__('os').system('true')", "error"),
        ("<|answer|>5", None),
        ("add 2 3", None),
        ("", None),
    ],
)
def test_tools8_answers_a_call_and_ends_at_anything_else(reply: str, observation: str | None) -> None:
    assert load("tools8@1").step(3, (reply,)) == observation


# --- guess@1 ---


def first_index_of(number: int) -> int:
    return next(index for index in itertools.count() if guess.number(index) == number)


def test_guess_numbers_are_derived_as_specified() -> None:
    assert [guess.number(index) for index in range(6)] == KNOWN_GUESS
    assert {guess.number(index) for index in range(400)} == set(range(1, 21))


def test_guess_hints_until_the_number_is_found() -> None:
    environment, index = load("guess@1"), first_index_of(7)
    assert environment.step(index, ("10",)) == "lower"
    assert environment.step(index, ("10", "5")) == "higher"
    assert environment.step(index, ("10", "5", "7")) is None
    assert environment.step(index, ("10", "5", "6", "6", "6")) is None


@pytest.mark.parametrize(
    ("replies", "reward"),
    [
        (("7",), 1.0),
        (("10", "7"), 1.0),
        (("20",), 0.0),
        (("10",), 0.1),
        (("10", "5"), 0.2),
        (("10", "5", "6"), 0.2),
        (("8", "5"), 0.3),
        (("8", "6"), 0.4),
        (("999",), 0.0),
        (("10", "seven"), 0.0),
        (("seven", "7"), 0.0),
        (("10", ""), 0.0),
        (("٧",), 0.0),
    ],
)
def test_guess_pays_for_what_the_hints_ruled_out(replies: tuple[str, ...], reward: float) -> None:
    assert load("guess@1").reward(first_index_of(7), replies) == reward


# --- letters@1 ---


def test_letters_are_derived_as_specified() -> None:
    assert "".join(letters.letter(index) for index in range(8)) == KNOWN_LETTERS
    assert {letters.letter(index) for index in range(400)} == set(letters.LETTERS)


@pytest.mark.parametrize(
    ("reply", "reward"),
    [
        ("Silent snakes slowly swim south.", 1.0),
        ("Silent snakes slowly swim south, Sam said so soon.", 1.0),
        ("silent SILENT Silent silent silent", 0.2),
        ("Silent snakes slowly swim", 0.8),
        ("s s s s s", 0.0),
        ("Every snake swims.", 0.4),
        ("\u017filent \u212aite", 0.0),
        ("sa sb sc sd se sf sg sh si sj sk sl sm", 0.0),
        ("", 0.0),
    ],
)
def test_letters_pays_for_different_words_with_the_letter(reply: str, reward: float) -> None:
    index = next(index for index in itertools.count() if letters.letter(index) == "s")
    assert "letter S." in load("letters@1").prompt(index)[0].content
    assert load("letters@1").reward(index, (reply,)) == reward


# --- episodes over token ids ---


@dataclass(frozen=True)
class Episode:
    environment: GuardedEnvironment
    index: int
    prompt: tuple[int, ...]
    spans: tuple[tuple[int, tuple[int, ...]], ...]
    max_tokens: int = EPISODE


def play(
    tokenizer: PolicyTokenizer,
    name: str,
    index: int,
    replies: tuple[str, ...],
    max_tokens: int = EPISODE,
) -> Episode:
    """Rolls out as a node does, with `replies` for what the policy draws (their stop token left off)."""
    environment = load(name)
    prompt = tokenizer.prompt_ids(environment.prompt(index))
    (stop,) = tokenizer.stop_ids
    spans: list[tuple[int, tuple[int, ...]]] = []
    said: tuple[str, ...] = ()
    used = 0
    for reply in replies:
        budget = turn_budget(TURN, max_tokens, used)
        drawn = (*tokenizer.encode(reply), stop)[:budget]
        spans.append((GENERATED, drawn))
        used += len(drawn)
        text = reply_text(tokenizer, drawn)
        if text is None:
            break
        said = (*said, text)
        observation = next_observation(environment, tokenizer, index, said)
        if observation is None or not has_room(observation, max_tokens, used):
            break
        spans.append((OBSERVED, observation))
        used += len(observation)
    return Episode(environment, index, prompt, tuple(spans), max_tokens)


def replayed(tokenizer: PolicyTokenizer, episode: Episode, edit: Callable[[list], object] | None = None):  # type: ignore[no-untyped-def,type-arg]
    spans = list(episode.spans)
    if edit is not None:
        edit(spans)
    return replay(episode.environment, tokenizer, episode.index, episode.prompt, spans, TURN, episode.max_tokens)


@pytest.mark.parametrize("index", [0, 5, 2**64 - 1])
def test_an_honest_episode_replays_with_its_reward(tokenizer: PolicyTokenizer, index: int) -> None:
    episode = play(tokenizer, "tools8@1", index, right_replies(index))
    found = replayed(tokenizer, episode)
    assert found.matches and found.reward == 1.0 and found.detail == ""
    assert found.replies == right_replies(index)
    assert [kind for kind, _ in episode.spans] == [GENERATED, OBSERVED, GENERATED]


def test_a_long_game_replays(tokenizer: PolicyTokenizer) -> None:
    index = first_index_of(7)
    episode = play(tokenizer, "guess@1", index, ("10", "5", "8", "6", "7"), max_tokens=200)
    found = replayed(tokenizer, episode)
    assert found.matches and found.reward == 1.0 and len(episode.spans) == 9


def test_a_forged_observation_is_found_with_what_belongs_there(tokenizer: PolicyTokenizer) -> None:
    episode = play(tokenizer, "tools8@1", 5, right_replies(5))
    forged = tokenizer.observation_ids("77")
    found = replayed(tokenizer, episode, lambda spans: spans.__setitem__(1, (OBSERVED, forged)))
    assert not found.observations_match and found.turns_match
    assert found.first_bad_span == 1 and found.expected == episode.spans[1][1]
    assert found.reward == 0.0


def test_another_prompt_is_found(tokenizer: PolicyTokenizer) -> None:
    episode = play(tokenizer, "tools8@1", 5, right_replies(5))
    found = replay(episode.environment, tokenizer, 6, episode.prompt, episode.spans, TURN, EPISODE)
    assert not found.prompt_matches and not found.matches


def test_tokens_after_the_stop_token_are_found(tokenizer: PolicyTokenizer) -> None:
    episode = play(tokenizer, "tools8@1", 5, right_replies(5))
    padded = (*episode.spans[2][1], *tokenizer.stop_ids)
    found = replayed(tokenizer, episode, lambda spans: spans.__setitem__(2, (GENERATED, padded)))
    assert not found.turns_match and found.detail == "span 2: 1 tokens follow the stop token"


def test_a_suppressed_stop_token_is_found(tokenizer: PolicyTokenizer) -> None:
    episode = play(tokenizer, "tools8@1", 5, right_replies(5))
    short = episode.spans[2][1][:-1]
    found = replayed(tokenizer, episode, lambda spans: spans.__setitem__(2, (GENERATED, short)))
    assert not found.turns_match and "without a stop token, 14 were allowed" in found.detail


def test_a_turn_over_its_budget_is_found(tokenizer: PolicyTokenizer) -> None:
    episode = play(tokenizer, "tools8@1", 5, ("nonsense",))
    long = tokenizer.encode("x" * (TURN + 1))
    found = replayed(tokenizer, episode, lambda spans: spans.__setitem__(0, (GENERATED, long)))
    assert not found.turns_match and "15 tokens, 14 were allowed" in found.detail


def test_an_episode_that_stops_too_early_is_not_finished(tokenizer: PolicyTokenizer) -> None:
    episode = play(tokenizer, "tools8@1", 5, right_replies(5))
    found = replayed(tokenizer, episode, lambda spans: spans.__delitem__(slice(1, None)))
    assert not found.finished and found.observations_match and found.reward == 0.0
    ends_with_observation = replayed(tokenizer, episode, lambda spans: spans.pop())
    assert not ends_with_observation.turns_match


def test_spans_after_the_end_are_found(tokenizer: PolicyTokenizer) -> None:
    episode = play(tokenizer, "tools8@1", 5, right_replies(5))
    more = (OBSERVED, tokenizer.observation_ids("more"))
    found = replayed(tokenizer, episode, lambda spans: spans.append(more))
    assert not found.observations_match and found.first_bad_span == 3 and found.expected is None


@pytest.mark.parametrize("spans", [[], [(GENERATED, ())], [(OBSERVED, (5,))]])
def test_spans_that_are_no_episode_are_found(tokenizer: PolicyTokenizer, spans: list) -> None:  # type: ignore[type-arg]
    environment = load("tools8@1")
    prompt = tokenizer.prompt_ids(environment.prompt(0))
    assert not replay(environment, tokenizer, 0, prompt, spans, TURN, EPISODE).turns_match


def test_a_cut_off_turn_ends_the_episode_and_earns_nothing(tokenizer: PolicyTokenizer) -> None:
    call, answer = right_replies(0)
    without_room_for_the_stop_token = 11 + len(tokenizer.observation_ids(answer[10:])) + len(answer[10:]) + 1
    episode = play(tokenizer, "tools8@1", 0, (call, answer), without_room_for_the_stop_token)
    assert tokenizer.decode(episode.spans[2][1]) == answer
    found = replayed(tokenizer, episode)
    assert found.matches and found.replies == (call, "") and found.reward == 0.0


def test_an_observation_without_room_for_one_more_token_ends_the_episode(tokenizer: PolicyTokenizer) -> None:
    call, answer = right_replies(0)
    needed = 11 + len(tokenizer.observation_ids(answer[10:])) + 1
    fits = play(tokenizer, "tools8@1", 0, (call, answer), needed)
    assert len(fits.spans) == 3 and len(fits.spans[2][1]) == 1 and replayed(tokenizer, fits).matches
    full = play(tokenizer, "tools8@1", 0, (call, answer), needed - 1)
    found = replayed(tokenizer, full)
    assert len(full.spans) == 1 and found.matches and found.reward == 0.0


@pytest.mark.parametrize(
    ("turn", "total", "used", "budget"),
    [(14, 64, 0, 14), (14, 64, 55, 9), (14, 64, 64, 0), (14, 64, 70, 0), (100, 64, 0, 64)],
)
def test_a_turn_fits_both_its_own_and_the_leases_bound(turn: int, total: int, used: int, budget: int) -> None:
    assert turn_budget(turn, total, used) == budget
