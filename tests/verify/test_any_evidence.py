"""The checks under any evidence: damaged honest traces, episodes of any tokens, any logits. Only documented errors.

The same examples every time. Not here: that a given lie is refused (test_cheaters.py); bytes (tests/fuzz).
"""

from __future__ import annotations

import math
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.environments import base
from protocol.environments.rollout import replay
from protocol.errors import EngineError, PolicyError, UsageError
from protocol.limits import MAX_TRACE_TOKENS
from protocol.trace import Span
from tests.fuzz.episode import EDIT, Stage, edited, made_stage
from tests.studio import NODE, Rollout, Studio
from verify.sampling import judge_margins, margins
from verify.structure import policy_shape
from verify.thresholds import limits_for
from verify.toploc import count_chunks

torch.set_num_threads(1)

ALWAYS_THE_SAME = settings(derandomize=True, deadline=5_000, max_examples=100, database=None)
EDITS = st.lists(
    st.tuples(
        st.integers(0, 8), st.integers(0, 60), st.integers(0, 255), st.integers(0, 400) | st.integers(0, 2**32 - 1)
    ),
    max_size=6,
)


@pytest.fixture(scope="module")
def stage(studio: Studio, long_rollout: Rollout) -> Stage:
    lease = long_rollout.lease
    environment = base.load(lease.environment, lease.parameters)
    return Stage(NODE, lease, policy_shape(studio.policy), environment, studio.tokenizer, long_rollout.trace)


def script(edits: list[tuple[int, int, int, int]], *, fit: bool) -> bytes:
    last = [(8, 0, 0, 0)] if fit else []
    return b"".join(EDIT.pack(*edit) for edit in [*edits, *last])


@ALWAYS_THE_SAME
@given(edits=EDITS, fit=st.booleans())
def test_a_damaged_honest_trace_gets_every_check_and_one_reason_at_most(
    stage: Stage, edits: list[tuple[int, int, int, int]], fit: bool
) -> None:
    assert stage.judge(stage.honest) is None
    damaged = edited(stage.honest, script(edits, fit=fit))

    stage.judge(damaged)
    stage.judge(stage.addressed(damaged))


STAGE = made_stage()


def test_the_longest_trace_is_checked_in_no_time_to_speak_of() -> None:
    lease = replace(STAGE.lease, max_turn_tokens=MAX_TRACE_TOKENS, max_tokens=MAX_TRACE_TOKENS)
    drawn = (min(set(range(64)) - STAGE.tokenizer.stop_ids),) * MAX_TRACE_TOKENS
    proofs = (STAGE.honest.proofs[0],) * count_chunks(MAX_TRACE_TOKENS)
    longest = replace(
        STAGE.honest, tokens=drawn, spans=(Span(0, MAX_TRACE_TOKENS),), logprobs=(-1.0,) * MAX_TRACE_TOKENS,
        proofs=proofs, reward=0.0,
    )  # fmt: skip

    started = time.process_time()
    assert replace(STAGE, lease=lease).judge(longest) is None
    assert time.process_time() - started < 3


@st.composite
def episodes(draw: st.DrawFn) -> list[tuple[int, list[int]]]:
    """Spans of any kind and tokens; many turns end with the stop token and say something an environment reads."""
    tokenizer = STAGE.tokenizer
    stop = min(tokenizer.stop_ids)
    said = st.sampled_from(
        ["<|call|>mod 29 12", "<|call|>mod 29 0", "<|answer|>5", "12", "999", "higher", "a b c", "", "٣"]
    )
    turn = said.map(lambda text: [*tokenizer.encode(text), stop])
    shown = st.sampled_from(["5", "error", "higher", "lower"]).map(lambda text: list(tokenizer.observation_ids(text)))
    anything = st.lists(st.integers(0, STAGE.shape.vocabulary_size - 1), max_size=12)
    honest = st.lists(st.tuples(turn, shown), min_size=1, max_size=7).map(
        lambda pairs: [(place % 2, ids) for place, ids in enumerate(ids for pair in pairs for ids in pair)]
    )
    free = st.lists(st.tuples(st.integers(0, 1), turn | shown | anything), max_size=12)
    spans = draw(honest | free)
    return spans[: draw(st.integers(0, len(spans)))]


@pytest.mark.parametrize("name", ["tools8@1", "guess@1", "letters@1"])
@ALWAYS_THE_SAME
@given(spans=episodes(), index=st.integers(0, 2**64 - 1), turn=st.integers(0, 40), most=st.integers(0, 200))
def test_any_episode_replays_to_a_reward_or_to_its_first_bad_span(
    name: str, spans: list[tuple[int, list[int]]], index: int, turn: int, most: int
) -> None:
    environment = base.load(name)
    prompt = STAGE.tokenizer.prompt_ids(environment.prompt(index))
    found = replay(environment, STAGE.tokenizer, index, prompt, spans, turn, most)

    assert found.prompt_matches and math.isfinite(found.reward)
    if found.matches:
        assert found.first_bad_span is None and found.detail == ""
    else:
        assert found.reward == 0 and found.detail
    if found.first_bad_span is not None:
        assert 0 <= found.first_bad_span <= len(spans)


EXTREME = st.floats(width=32) | st.sampled_from([0.0, -0.0, 3.4e38, -3.4e38, 1e-45, math.inf, -math.inf, math.nan])
NUMBERS = st.integers(0, 2**64 - 1) | st.sampled_from([-1, 2**32, 2**64])


@ALWAYS_THE_SAME
@given(
    data=st.data(),
    rows=st.integers(1, 4),
    vocabulary=st.sampled_from([1, 2, 300, 17_000]),
    temperature=st.floats() | st.sampled_from([1.0, 0.7, 1e-30, 1e-300, 1e300]),
)
def test_any_logits_give_margins_that_are_none_or_more(
    data: st.DataObject, rows: int, vocabulary: int, temperature: float
) -> None:
    logits = torch.from_numpy(np.random.default_rng(vocabulary + rows).normal(0, 5, (rows, vocabulary)))
    logits = logits.to(torch.float32)
    for _ in range(data.draw(st.integers(0, 3))):
        place = data.draw(st.integers(0, rows * vocabulary - 1))
        logits.view(-1)[place] = data.draw(EXTREME)
    seeds, positions = ([data.draw(NUMBERS) for _ in range(rows)] for _ in range(2))
    tokens = [data.draw(st.integers(0, vocabulary - 1) | st.integers(-3, 2**32)) for _ in range(rows)]

    try:
        found = margins(logits, seeds, positions, tokens, [temperature] * rows)
    except (UsageError, EngineError):
        return
    assert found.margins.shape == found.logprobs.shape == (rows,)
    assert not found.margins.isnan().any() and bool((found.margins >= 0).all())
    assert not found.logprobs.isnan().any()
    (judgement,) = judge_margins(found.margins, limits_for("float32", "float32"), temperature)
    assert judgement.span is None or 0 <= judgement.span[0] < judgement.span[1] <= rows


@pytest.mark.parametrize(
    "config",
    [
        '{"vocab_size": 1e999, "hidden_size": 2}',
        '{"vocab_size": 4, "hidden_size": 0}',
        '{"vocab_size": -4, "hidden_size": 2}',
        '{"text_config": ' * 5_000,
        '{"text_config": []}',
        "[]",
    ],
    ids=["endless", "nothing hidden", "negative", "deep", "a list inside", "a list"],
)
def test_a_config_without_usable_sizes_is_a_policy_error(config: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(config)

    with pytest.raises(PolicyError, match="does not give vocab_size and hidden_size"):
        policy_shape(tmp_path)
