"""reasoning_gym behind its allow-list and its sandbox, and the sandbox by itself."""

from __future__ import annotations

import gc
import importlib.metadata
from collections.abc import Iterator
from pathlib import Path

import pytest

from protocol.environments import reasoning_gym
from protocol.environments.base import REASONING_GYM, load
from protocol.environments.sandbox import CallRefused, Sandbox
from protocol.errors import EnvironmentFault, UsageError

PROCESS = Path(reasoning_gym.__file__).with_name("reasoning_gym_process.py")


@pytest.fixture(scope="module", autouse=True)
def end_the_shared_process() -> Iterator[None]:
    yield
    reasoning_gym._sandbox().close()
    gc.collect()


def ask(what: str, generator: str, **fields: object) -> object:
    return reasoning_gym._sandbox().call({"do": what, "generator": generator, "config": "{}", **fields})


# --- the tasks ---


@pytest.mark.parametrize("name", REASONING_GYM)
def test_every_allowed_generator_asks_and_scores(name: str) -> None:
    environment = load(name)
    for index in (0, 1, 2**64 - 1):
        (message,) = environment.prompt(index)
        assert message.role == "user" and message.content.endswith('"Answer:" and the answer alone.')
        assert environment.prompt(index) == (message,)
        assert environment.step(index, ("Answer: 1",)) is None
        assert environment.reward(index, ("I do not know",)) < 0.5
        assert environment.reward(index, ("",)) == 0.0


def test_right_answers_earn_one_and_wrong_ones_less() -> None:
    gcd = load("reasoning_gym:gcd@1")
    (message,) = gcd.prompt(3)
    numbers = [int(word) for word in message.content.split(": ")[1].split(". ")[0].split(", ")]
    divisor = max(d for d in range(1, min(numbers) + 1) if all(number % d == 0 for number in numbers))
    assert gcd.reward(3, (f"Both share it. Answer: {divisor}",)) == 1.0
    assert gcd.reward(3, (f"Answer: {divisor + 1}",)) == 0.0
    backward = load("reasoning_gym:spell_backward@1")
    word = backward.prompt(8)[0].content.split("): ")[1].split("\n")[0]
    assert backward.reward(8, (word[::-1],)) == 1.0
    assert backward.reward(8, (word + "!",)) < 1.0
    bits = load("reasoning_gym:count_bits@1")
    number = int(bits.prompt(2)[0].content.split("number ")[1].split("?")[0])
    assert bits.reward(2, (f"Answer: {number.bit_count()}",)) == 1.0


def test_tasks_are_the_same_in_another_process() -> None:
    other = Sandbox(PROCESS)
    for generator in ("chain_sum", "letter_counting", "number_sequence", "calendar_arithmetic"):
        fields = {"generator": generator, "config": "{}", "index": 2**40 + 7}
        assert other.call({"do": "question", **fields}) == ask("question", generator, index=2**40 + 7)
    other.close()


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        ("12", "12"),
        (" so 12 \n", "so 12"),
        ("Answer: 12", "12"),
        ("Answer: 1\nno, ANSWER:\n 12 ", "12"),
        ("the answer: is it", "is it"),
        ("Answer:", ""),
        ("İ answer: 12", "12"),
    ],
)
def test_what_follows_the_last_answer_mark_is_scored(reply: str, answer: str) -> None:
    assert reasoning_gym.final_answer(reply) == answer


def test_settings_reach_the_generator() -> None:
    params = '{"max_new_tokens": 16, "generator": {"min_word_len": 3, "max_word_len": 3}}'
    environment = load("reasoning_gym:spell_backward@1", params)
    words = [environment.prompt(index)[0].content.split("): ")[1].split("\n")[0] for index in range(20)]
    assert {len(word) for word in words} == {3} and environment.max_new_tokens == 16


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ("words", "are not JSON"),
        ("[]", "are a JSON object"),
        ('{"difficulty": 1}', "are a JSON object"),
        ('{"generator": {"seed": 1}}', "without"),
        ('{"generator": {"data_file": "/etc/passwd"}}', "without"),
        ('{"generator": {"min_word_len": 0}}', "does not accept"),
        ('{"generator": {"colour": 1}}', "does not accept"),
        ('{"max_new_tokens": 0}', "whole number from 1"),
        ('{"max_new_tokens": true}', "whole number from 1"),
    ],
)
def test_parameters_it_cannot_use_are_refused(params: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load("reasoning_gym:spell_backward@1", params)


# --- what is kept out ---


@pytest.mark.parametrize(
    "generator", ["countdown", "n_queens", "spiral_matrix", "puzzle24", "word_ladder", "", "../gcd"]
)
def test_a_generator_that_is_not_on_the_list_does_not_exist(generator: str) -> None:
    with pytest.raises(UsageError, match="there is no environment"):
        load(f"reasoning_gym:{generator}@1")


@pytest.mark.parametrize("name", REASONING_GYM)
def test_code_in_an_answer_is_not_executed(name: str, tmp_path: Path) -> None:
    probe = tmp_path / "probe"
    environment = load(name)
    for payload in (
        f"__import__('os').system('touch {probe}')",
        f"[open({str(probe)!r}, 'w')]",
        f"Answer: __import__('pathlib').Path({str(probe)!r}).touch()",
    ):
        assert environment.reward(0, (payload,)) < 1.0
    assert not probe.exists()


def test_a_scorer_that_runs_what_it_scores_finds_nothing_it_may_do(tmp_path: Path) -> None:
    """The second wall: `n_queens` evaluates the answer; asked past the allow-list, it still does no harm."""
    seen = tmp_path / "seen"
    seen.write_text("x")
    for harm in (
        f"__import__('os').system('touch {tmp_path}/probe')",
        f"open('{tmp_path}/probe', 'w')",
        f"__import__('os').remove('{seen}')",
        f"__import__('subprocess').run(['touch', '{tmp_path}/probe'])",
        "__import__('socket').create_connection(('127.0.0.1', 9))",
    ):
        ask("score", "n_queens", index=0, answer=f"[{harm}]")
    assert [path.name for path in tmp_path.iterdir()] == ["seen"]


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(UsageError, match=r"pip install -e '\.\[reasoning-gym\]'"):
        load("reasoning_gym:gcd@1")


def test_another_release_of_the_library_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.1.26")
    with pytest.raises(UsageError, match=r"0\.1\.26 is installed, these tasks are those of 0\.1\.25"):
        load("reasoning_gym:gcd@1")


# --- the sandbox by itself ---

FIRST_LINE = "import json, os, sys, time\nrequest = json.loads(sys.stdin.readline())\n"


def sandbox(tmp_path: Path, source: str, seconds: float = 20.0) -> Sandbox:
    script = tmp_path / "process.py"
    script.write_text(FIRST_LINE + source)
    return Sandbox(script, call_seconds=seconds, start_seconds=0.0)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("os._exit(3)", r"died \(exit status 3\)"),
        ("os.kill(os.getpid(), 11)", r"died \(exit status -11\)"),
        ("print('nonsense')", "not JSON"),
        ("print('[]')", "not a reply"),
        ("""print('{"ok": 1, "error": 2}')""", "not a reply"),
        ("sys.stdout.write('x' * 2_000_000)", "answered with over 1048576 bytes"),
    ],
)
def test_a_process_that_dies_or_speaks_nonsense_is_a_fault_and_never_a_reward(
    tmp_path: Path, source: str, message: str
) -> None:
    with pytest.raises(EnvironmentFault, match=message):
        sandbox(tmp_path, source).call({"do": "score"})


def test_a_process_that_hangs_is_ended_at_the_deadline(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match=r"did not answer within 0\.3 s"):
        sandbox(tmp_path, "time.sleep(60)", seconds=0.3).call({"do": "score"})


def test_a_process_that_died_is_replaced_by_the_next_call(tmp_path: Path) -> None:
    once = sandbox(tmp_path, "if request == {'die': 1}: os._exit(1)\nprint('{\"ok\": 2}', flush=True)\ntime.sleep(60)")
    with pytest.raises(EnvironmentFault):
        once.call({"die": 1})
    assert once.call({"die": 0}) == 2
    once.close()


def test_a_refusal_is_told_from_a_crash(tmp_path: Path) -> None:
    refusing = sandbox(tmp_path, """print('{"error": "ValueError: no"}', flush=True)\ntime.sleep(60)""")
    with pytest.raises(CallRefused, match="ValueError: no"):
        refusing.call({})
    refusing.close()


def test_the_process_sees_nothing_of_our_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "key")
    asked = sandbox(tmp_path, "print(json.dumps({'ok': sorted(os.environ)}), flush=True)\ntime.sleep(60)")
    names = asked.call({})
    assert "SECRET" not in names and "PYTHONHASHSEED" in names
    asked.close()


def test_a_task_that_burns_its_processor_time_is_ended(tmp_path: Path) -> None:
    limits = f"sys.path.insert(0, {str(PROCESS.parent)!r})\nimport reasoning_gym_process as process\n"
    burning = sandbox(tmp_path, limits + "process.limit_cpu(0)\nwhile True: pass")
    with pytest.raises(EnvironmentFault, match=r"died \(exit status -24\)"):
        burning.call({})
