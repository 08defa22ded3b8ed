"""What becomes of leases, by length, reward and environment: read from a real ledger, counted once, and said when one
kind is lost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.trainer.leased import NODE, NOW, OTHER, Story
from trainer.config import TrainerConfig
from trainer.ledger import Ledger
from trainer.ledger_rows import TOO_STALE, LeaseState, SubmissionState
from trainer.ledger_use import RECENT_SECONDS
from trainer.rates import line, told

CONFIG = TrainerConfig(group_size=2)


@pytest.fixture
def story(tmp_path: Path) -> Iterator[Story]:
    with closing(Ledger.create(tmp_path / "ledger.sqlite")) as ledger, ledger.write():
        ledger.add_policy(0, b"r" * 32, NOW)
        for node in (NODE, OTHER):
            ledger.see_node(node, NOW, "test", "test")
        yield Story(ledger)


def rows(story: Story, by: str) -> dict[str, dict[str, object]]:
    return {row["kind"]: row for row in told(story.ledger, CONFIG)["rates"] if row["by"] == by}


def test_every_lease_of_a_slot_is_counted_once_with_the_trace_it_gave_in_the_end(story: Story) -> None:
    group = story.group(version=0)
    first = story.lease(group, 0, 1)
    story.answer(group, first, 0, 100, 0.0)
    story.ledger.end_lease(first, LeaseState.EXPIRED)
    second = story.lease(group, 1, node=OTHER)
    story.answer(group, second, 1, 300, 0.3, node=OTHER, state=SubmissionState.REFUSED)
    third = story.lease(group, 1)
    story.ledger.end_lease(third, LeaseState.RETURNED)
    story.answer(group, story.lease(group, 1), 1, 257, 1.0)
    assert told(story.ledger, CONFIG)["rates"] == [], "groups that are not over say nothing yet"
    story.learn([group], version=3)
    short, long = rows(story, "length").values()
    names = ("kind", "leased", "completed", "expired", "returned", "refused", "unanswered", "used", "stale", "lag_most")
    assert [short[name] for name in names] == ["65-128 tokens", 1, 1, 0, 0, 0, 0, 1, 0, 2]
    assert [long[name] for name in names] == ["257-512 tokens", 4, 1, 1, 1, 1, 0, 1, 0, 2]
    assert list(rows(story, "reward")) == ["0", "1"]
    assert rows(story, "environment")["tools8@1"]["leased"] == 5


def test_what_was_too_old_or_given_up_is_told_apart_from_what_was_used(story: Story) -> None:
    used, stale, given_up = (story.drawn((20, 40)) for _ in range(3))
    story.learn([used])
    story.ledger.drop_group(stale, f"{TOO_STALE}: 9 versions behind, 8 may be")
    story.ledger.drop_group(given_up, "a step was refused")
    open_slot = story.group()
    story.answer(open_slot, story.lease(open_slot, 0, 1), 0, 20, 0.0)
    story.ledger.drop_stale_groups(1, f"{TOO_STALE}: more than 8 versions behind")
    short = rows(story, "length")["17-32 tokens"]
    assert (short["used"], short["stale"], short["given_up"], short["completed"]) == (1, 2, 1, 4)
    never = rows(story, "length")["never drawn"]
    assert (never["leased"], never["unanswered"], never["completed"]) == (1, 1, 0)
    assert line(told(story.ledger, CONFIG)["rates"]) == (
        "of the last 8 slots leased 87.5% completed, 0.0% expired, 0.0% returned, 0.0% refused, 37.5% stale, 25.0% "
        "used, 0.0 versions later (most 0)"
    )


def test_what_was_drawn_and_refused_or_not_judged_is_not_told_as_never_drawn(story: Story) -> None:
    group = story.group()
    first = story.lease(group, 0, 1)
    story.answer(group, first, 0, 100, 1.0, state=SubmissionState.REFUSED)
    story.answer(group, first, 1, 100, 1.0, state=SubmissionState.NOT_JUDGED)
    story.lease(group, 0, node=OTHER)
    other = story.group()
    story.lease(other, 0)
    for each in (group, other):
        story.ledger.drop_group(each, "given up")
    for by in ("length", "reward"):
        found = {kind: (row["leased"], row["refused"], row["unanswered"]) for kind, row in rows(story, by).items()}
        assert found == {"never drawn": (1, 0, 1), "never judged": (1, 0, 1), "only refused": (2, 1, 1)}


def test_long_traces_that_run_out_are_said_to_be_lost_and_successful_ones_with_them(story: Story) -> None:
    story.learn(story.spread(40))
    losses = told(story.ledger, CONFIG)["losses"]
    assert losses == [
        "long traces are being lost: of the leases of 257-512 tokens 67% end in a batch, of the others 100%; most of "
        "the rest expired (20 of 60 leases)",
        "successful traces are being lost: of the leases of reward 1 67% end in a batch, of the others 100%; most of "
        "the rest expired (20 of 60 leases)",
    ]


def test_an_environment_whose_groups_grow_too_old_is_named(story: Story) -> None:
    for number in range(30):
        story.learn([story.drawn((20, 20), environment="guess@1")], version=number + 1)
        slow = story.drawn((20, 20), environment="letters@1")
        if number % 3:
            story.ledger.drop_group(slow, f"{TOO_STALE}: 9 versions behind, 8 may be")
    (loss,) = told(story.ledger, CONFIG)["losses"]
    assert loss.startswith("traces of letters@1 are being lost: of the leases of letters@1 0% end in a batch, of the ")
    assert "stale (40 of 40 leases)" in loss


def test_a_seed_that_nobody_draws_in_time_is_a_long_trace_that_is_lost(story: Story) -> None:
    for number in range(30):
        story.learn([story.drawn((20, 20))], version=number + 1)
    worn = story.group()
    lease = story.lease(worn, 0, 1)
    story.answer(worn, lease, 0, 20, 0.0)
    story.ledger.end_lease(lease, LeaseState.EXPIRED)
    for _ in range(3):
        story.ledger.end_lease(story.lease(worn, 1), LeaseState.EXPIRED)
    story.ledger.drop_group(worn, "a slot was leased 4 times without an accepted trace")
    assert told(story.ledger, CONFIG)["losses"] == [], "one of sixty"
    other = story.group()
    for _ in range(2):
        story.ledger.end_lease(story.lease(other, 0, 1), LeaseState.EXPIRED)
    story.ledger.drop_group(other, "a slot was leased 2 times without an accepted trace")
    (loss,) = told(story.ledger, CONFIG)["losses"]
    assert "long traces are being lost: 3 of 64 slots ran past two deadlines" in loss and "lease_token_seconds" in loss


def test_few_leases_or_small_differences_are_no_alarm(story: Story) -> None:
    for number in range(19):
        group = story.group()
        first = story.lease(group, 0, 1)
        story.answer(group, first, 0, 50, 0.0)
        story.ledger.end_lease(first, LeaseState.EXPIRED)
        story.answer(group, story.lease(group, 1), 1, 500, 1.0)
        story.learn([group], version=number + 1)
    assert told(story.ledger, CONFIG)["losses"] == [], "19 leases of the short ones"


# --- what dispatch reads ---


def test_consumption_counts_every_complete_group_once(story: Story) -> None:
    assert story.ledger.consumption(NOW).share == 1.0, "before anything is measured"
    flat, teaches = story.drawn((20, 20), rewards=(1.0, 1.0)), story.drawn((20, 20))
    of = story.ledger.consumption(NOW)
    assert (of.made, of.waiting, of.taught, of.judged, of.steps_per_second) == (0, 1, 1, 2, 0.0)
    story.learn([flat, teaches], version=1, at_ms=NOW + 1_000, flat=1)
    of = story.ledger.consumption(NOW + 1_000)
    assert (of.made, of.waiting, of.taught, of.judged, of.steps_per_second) == (1, 0, 1, 2, 0.0)
    story.learn([story.drawn((20, 20))], version=2, at_ms=NOW + 5_000)
    story.drawn((20, 20), rewards=(0.5, 0.5))
    of = story.ledger.consumption(NOW + 11_000)
    assert (of.made, of.waiting, of.taught, of.judged, of.steps_per_second) == (2, 0, 2, 4, 0.1)
    assert of.share == 3 / 5


def test_a_nodes_time_is_that_of_its_recent_traces(story: Story) -> None:
    assert story.ledger.trace_seconds(NODE, NOW) is None
    group = story.group()
    story.answer(group, story.lease(group, 0), 0, 20, 0.0, received_ms=NOW + 4_000)
    story.answer(group, story.lease(group, 1, node=OTHER), 1, 20, 0.0, node=OTHER, received_ms=NOW + 40_000)
    assert story.ledger.trace_seconds(NODE, NOW + 50_000) == 4.0
    assert story.ledger.trace_seconds(OTHER, NOW + 50_000) == 40.0
    assert story.ledger.trace_seconds(NODE, NOW + 4_000 + int(RECENT_SECONDS * 1000)) is None, "it is tried again"
