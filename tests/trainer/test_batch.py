"""Which groups make a batch, and the arrays the loss gets of them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol import codec
from protocol.envelope import Signed
from protocol.errors import LocalError
from protocol.trace import EngineDescriptor, Span, SpanKind, Trace
from trainer.batch import build, choose, micro_batches, padded
from trainer.ledger_rows import CompleteGroup, GroupOutcome, GroupRow, TrainingTrace

G, O = SpanKind.GENERATED, SpanKind.OBSERVED  # noqa: E741


def outcome(name: int, version: int, *rewards: float | None) -> GroupOutcome:
    return GroupOutcome(bytes([name]), version, rewards)


def ids(*names: int) -> tuple[bytes, ...]:
    return tuple(bytes([name]) for name in names)


def test_the_oldest_groups_whose_rewards_differ_are_chosen() -> None:
    outcomes = [outcome(1, 5, 0, 1), outcome(2, 5, 1, 0), outcome(3, 6, 0, 1)]
    found = choose(outcomes, version=6, staleness_limit=8, wanted=2)
    assert found.informative == ids(1, 2) and found.flat == () and found.unusable == {}
    assert found.reward_mean == 0.5


def test_flat_groups_older_than_the_batch_are_used_up_with_it_and_count_in_its_mean_reward() -> None:
    outcomes = [outcome(1, 5, 0, 0), outcome(2, 5, 0, 1), outcome(3, 5, 0, 0), outcome(4, 5, 1, 0), outcome(5, 5, 1, 1)]
    found = choose(outcomes, version=5, staleness_limit=8, wanted=2)
    assert found.informative == ids(2, 4) and found.flat == ids(1, 3)
    assert found.reward_mean == 0.25


def test_flat_groups_after_the_last_informative_one_wait_for_the_next_batch() -> None:
    outcomes = [outcome(1, 5, 0, 1), outcome(2, 5, 1, 1), outcome(3, 5, 1, 1)]
    found = choose(outcomes, version=5, staleness_limit=8, wanted=4)
    assert found.informative == ids(1) and found.flat == ()


def test_groups_staler_than_the_limit_and_rewards_that_are_no_number_can_never_be_used() -> None:
    outcomes = [outcome(1, 1, 0, 1), outcome(2, 2, 0, 1), outcome(3, 9, 0, None), outcome(4, 9, 0, math.nan)]
    found = choose(outcomes, version=10, staleness_limit=8, wanted=4)
    assert found.informative == ids(2)
    assert found.unusable == {
        bytes([1]): "too stale: 9 versions behind, 8 may be",
        bytes([3]): "a reward is not a number",
        bytes([4]): "a reward is not a number",
    }


def test_what_decides_about_a_group_does_not_hold_who_drew_it() -> None:
    assert set(GroupOutcome.__slots__) == {"group_id", "policy_version", "rewards"}


def trace_bytes(tokens: tuple[int, ...], spans: tuple[Span, ...]) -> bytes:
    fields: dict[str, Any] = dict(
        run=bytes(32), lease_id=bytes(16), node=bytes(32), policy_version=3, policy_root=bytes(32), slot=0,
        tokens=tokens, spans=spans, logprobs=(), proofs=(), reward=1.0,
        engine=EngineDescriptor("e", "1", "float32", "cpu", "reference"), started_ms=0, finished_ms=1,
    )  # fmt: skip
    return codec.encode(Signed(codec.encode(Trace(**fields)), bytes(32), bytes(64)))


def group(*traces: TrainingTrace, size: int | None = None) -> CompleteGroup:
    row = GroupRow(b"g" * 16, "tools8@1", "", 7, 3, size or len(traces), (2, 5, 6), 14, 0)
    return CompleteGroup(row, traces)


def test_a_completion_marks_the_drawn_tokens_and_leaves_the_environments_out() -> None:
    raw = trace_bytes((10, 11, 20, 21, 12), (Span(G, 2), Span(O, 2), Span(G, 1)))
    mu = np.array([-1, -2, -3], dtype=np.float32)
    first = TrainingTrace(0, bytes(32), bytes(32), 1.0, raw, mu)
    second = TrainingTrace(1, bytes(32), bytes(32), 0.0, raw, None)
    one, other = build([group(first, second)], version=5)
    assert one.ids.tolist() == [2, 5, 6, 10, 11, 20, 21, 12]
    assert one.generated.tolist() == [3, 4, 7]
    assert one.mask.tolist() == [False, False, False, True, True, False, False, True]
    assert one.mu is mu and other.mu is None
    assert (one.advantage, other.advantage) == (0.5, -0.5)
    assert (one.staleness, one.policy_version) == (2, 3)


def test_rows_of_the_ledger_that_do_not_fit_together_are_our_fault() -> None:
    raw = trace_bytes((10, 11), (Span(G, 2),))
    short = TrainingTrace(0, bytes(32), bytes(32), 1.0, raw, np.zeros(1, dtype=np.float32))
    with pytest.raises(LocalError, match="1 logprobs for 2 drawn tokens"):
        build([group(short, short)], version=5)
    with pytest.raises(LocalError, match="has 1 accepted traces, not 2"):
        build([group(short, size=2)], version=5)


@given(st.lists(st.integers(1, 300), min_size=1, max_size=60), st.integers(1, 1000))
def test_micro_batches_hold_every_completion_once_and_no_more_padded_tokens_than_allowed(
    lengths: list[int], most: int
) -> None:
    packs = micro_batches(lengths, most)
    assert sorted(index for pack in packs for index in pack) == list(range(len(lengths)))
    for pack in packs:
        assert len(pack) == 1 or max(lengths[index] for index in pack) * len(pack) <= most


def test_padding_is_on_the_right() -> None:
    table = padded([np.array([1, 2, 3]), np.array([4])])
    assert table.tolist() == [[1, 2, 3], [4, 0, 0]]
