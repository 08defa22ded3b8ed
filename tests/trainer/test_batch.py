"""Which groups make a batch, and the arrays the loss gets of them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from protocol import codec
from protocol.envelope import Signed
from protocol.errors import LocalError
from protocol.trace import EngineDescriptor, Span, SpanKind, Trace
from trainer.batch import Shaping, build, choose, crowding
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


def test_a_penalty_is_taken_from_the_rewards_of_long_completions_before_the_groups_mean() -> None:
    short, long = trace_bytes((10, 11), (Span(G, 2),)), trace_bytes(tuple(range(10, 20)), (Span(G, 10),))
    both = group(TrainingTrace(0, bytes(32), bytes(32), 1.0, short, None), TrainingTrace(1, b"", b"", 1.0, long, None))
    shaping = Shaping(length_penalty=0.5, length_ramp=4, most_tokens=12)
    assert [each.advantage for each in build([both], 5, shaping)] == [0.125, -0.125]
    assert [each.advantage for each in build([both], 5)] == [0.0, 0.0]


def test_completions_that_were_cut_off_count_in_their_group_alone() -> None:
    ended, cut = trace_bytes((10, 3), (Span(G, 2),)), trace_bytes((10, 11), (Span(G, 2),))
    traces = [TrainingTrace(slot, b"", b"", float(not slot), raw, None) for slot, raw in enumerate((ended, cut, cut))]
    found = build([group(*traces)], 5, Shaping(mask_overlong=True, stop_ids=frozenset({3})))
    assert [each.advantage for each in found] == [pytest.approx(2 / 3)]
    assert len(build([group(*traces)], 5)) == 3


def test_a_node_that_drew_too_much_is_put_off_while_groups_of_others_wait() -> None:
    drawers = {bytes([n]): nodes for n, nodes in enumerate((b"aa", b"aa", b"ab", b"bb", b"cc", b"aa"), start=1)}
    as_bytes = {group_id: tuple(bytes([node]) for node in nodes) for group_id, nodes in drawers.items()}
    assert crowding(as_bytes, wanted=4, share=0.5) == frozenset(ids(3))
    assert crowding(as_bytes, wanted=4, share=1.0) == frozenset()
    outcomes = [outcome(n, 5, 0, 1) for n in range(1, 7)]
    found = choose(outcomes, version=5, staleness_limit=8, wanted=4, put_off=frozenset(ids(3)))
    assert found.informative == ids(1, 2, 4, 5) and found.unusable == {}


def test_a_bound_on_a_nodes_share_does_not_stop_a_run_of_one_node() -> None:
    drawers = {bytes([n]): (b"a", b"a") for n in range(1, 7)}
    assert crowding(drawers, wanted=4, share=0.5) == frozenset(ids(5, 6))
    assert crowding({}, wanted=4, share=0.5) == frozenset()
