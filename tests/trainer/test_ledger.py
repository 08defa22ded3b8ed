"""The record of a run: atomic, durable, and shared by several processes."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from protocol.errors import StorageError, UsageError
from trainer import summary, view
from trainer.ledger import EVENTS_BETWEEN, EVENTS_KEPT, Ledger
from trainer.ledger_rows import (
    SCHEMA_VERSION,
    GroupRow,
    GroupState,
    LeaseState,
    NewSubmission,
    Published,
    Reaudit,
    SlotState,
    StepRow,
    SubmissionState,
)

NODE, OTHER = b"N" * 32, b"O" * 32
GROUP = b"G" * 16


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    made = Ledger.create(tmp_path / "ledger.sqlite")
    made.add_policy(0, b"r" * 32, 1)
    for node in (NODE, OTHER):
        made.see_node(node, 1, "test", "test")
    return made


def add_group(ledger: Ledger, group_id: bytes = GROUP, version: int = 0) -> None:
    ledger.add_group(GroupRow(group_id, "tools8@1", "", 2**64 - 1, version, 2, (1, 2, 3), 14, 5), [2**64 - 1, 7])


def submit(ledger: Ledger, slot: int, *, lease: bytes = b"L" * 16, node: bytes = NODE, group: bytes = GROUP) -> bytes:
    digest = bytes([slot]) * 16 + node[:16]
    new = NewSubmission(digest, lease, group, slot, node, 0, 10, b"trace", 30)
    with ledger.write():
        ledger.add_submission(new, ledger.next_sequence(), b"receipt")
    return digest


def judge(ledger: Ledger, digest: bytes, state: SubmissionState, *, audited: bool = False, reward: float = 1.0) -> None:
    row = ledger.submission(digest)
    assert row is not None
    reason = None if state is SubmissionState.ACCEPTED else "MARGIN"
    ledger.judge(
        row, state=state, reason=reason, audited=audited, reward=reward, checks=b"", verdict=b"v", judged_ms=20
    )


def test_numbers_of_64_bits_survive(ledger: Ledger) -> None:
    add_group(ledger)
    found = ledger.group(GROUP)
    assert found is not None and found[0].task_index == 2**64 - 1 and found[0].prompt == (1, 2, 3)
    assert ledger.slots_of(GROUP)[0].seed == 2**64 - 1


def test_a_group_is_complete_when_its_last_slot_is_accepted(ledger: Ledger) -> None:
    add_group(ledger)
    ledger.add_lease(b"L" * 16, NODE, GROUP, [0, 1], b"signed", 1, 100)
    judge(ledger, submit(ledger, 0), SubmissionState.ACCEPTED, reward=0.0)
    assert ledger.count_groups(GroupState.COMPLETE) == 0
    assert ledger.lease(b"L" * 16) == (NODE, b"signed", LeaseState.OPEN)
    judge(ledger, submit(ledger, 1), SubmissionState.ACCEPTED)
    assert ledger.count_groups(GroupState.COMPLETE) == 1 and ledger.count_informative() == 1
    lease = ledger.lease(b"L" * 16)
    assert lease is not None and lease[2] is LeaseState.CLOSED


def test_a_refused_slot_is_free_again_with_its_seed_and_remembers_who_was_refused(ledger: Ledger) -> None:
    add_group(ledger)
    ledger.add_lease(b"L" * 16, NODE, GROUP, [0], b"signed", 1, 100)
    judge(ledger, submit(ledger, 0), SubmissionState.REFUSED)
    slot = ledger.slots_of(GROUP)[0]
    assert (slot.state, slot.node, slot.seed, slot.attempts) == (SlotState.FREE, None, 2**64 - 1, 1)
    assert ledger.refused_answers() == [(GROUP, 0, NODE)]


def test_a_verdict_on_a_copy_does_not_touch_the_one_on_the_original(ledger: Ledger) -> None:
    add_group(ledger)
    ledger.add_lease(b"L" * 16, NODE, GROUP, [0], b"signed", 1, 100)
    digest = submit(ledger, 0)
    judge(ledger, digest, SubmissionState.ACCEPTED)
    ledger.add_verdict(OTHER, digest, SubmissionState.REFUSED, "SIGNATURE", False, 30, b"refusal")
    assert ledger.verdict(digest, NODE) == b"v" and ledger.verdict(digest, OTHER) == b"refusal"
    assert ledger.receipt(digest, OTHER) is None
    counts = {row["node"]: (row["accepted"], row["refused"]) for row in ledger.view("SELECT * FROM nodes")}
    assert counts == {NODE: (1, 0), OTHER: (0, 1)}


def test_a_trace_counts_as_what_the_newest_verdict_on_it_says(ledger: Ledger) -> None:
    def node() -> tuple[int, int]:
        row = ledger.view("SELECT accepted, refused FROM nodes WHERE node = ?", (NODE,))[0]
        return row["accepted"], row["refused"]

    def counted() -> tuple[int, int, dict[str, int]]:
        found = summary.counts(ledger)
        return found["accepted"], found["refused"], found["refusals"]

    add_group(ledger)
    ledger.add_lease(b"L" * 16, NODE, GROUP, [0, 1], b"signed", 1, 100)
    first, second = submit(ledger, 0), submit(ledger, 1)
    for digest in (first, second):
        judge(ledger, digest, SubmissionState.ACCEPTED)
    ledger.add_verdict(NODE, b"x" * 32, SubmissionState.REFUSED, "LEASE_UNKNOWN", False, 20, b"v")
    assert (node(), counted()) == ((2, 1), (2, 1, {"LEASE_UNKNOWN": 1}))
    # Accepted unseen, then audited: one is refused, the other accepted once more.
    assert ledger.quarantine(NODE) == 2
    assert counted()[0] == 0 and summary.counts(ledger)["traces"]["AUDIT"] == 2
    for digest, outcome in ((first, SubmissionState.REFUSED), (second, SubmissionState.ACCEPTED)):
        row = ledger.submission(digest)
        assert row is not None
        ledger.finish_audit(row.sequence, b"audit", None)
        judge(ledger, digest, outcome, audited=True)
    assert (node(), counted()) == ((1, 2), (1, 2, {"LEASE_UNKNOWN": 1, "MARGIN": 1}))
    given = {(row["outcome"], row["reason"]): row["n"] for row in summary.counts(ledger)["verdicts"]}
    assert given == {("ACCEPTED", None): 3, ("REFUSED", "LEASE_UNKNOWN"): 1, ("REFUSED", "MARGIN"): 1}
    # The re-audit that its node asks for takes the refusal back.
    row = ledger.submission(first)
    assert row is not None
    ledger.ask_reaudit(row.sequence)
    assert counted() == (1, 2, {"LEASE_UNKNOWN": 1, "MARGIN": 1})
    ledger.finish_audit(row.sequence, b"audit", None)
    judge(ledger, first, SubmissionState.ACCEPTED, audited=True)
    assert (node(), counted()) == ((2, 1), (2, 1, {"LEASE_UNKNOWN": 1}))


def test_the_latest_audits_of_a_node_come_newest_first(ledger: Ledger) -> None:
    for number, outcome in enumerate(
        (SubmissionState.ACCEPTED, SubmissionState.REFUSED, SubmissionState.NOT_JUDGED, SubmissionState.ACCEPTED)
    ):
        ledger.add_verdict(NODE, bytes([number]) * 32, outcome, None, True, number, b"")
    ledger.add_verdict(NODE, b"u" * 32, SubmissionState.REFUSED, "STRUCTURE", False, 9, b"")
    last = ledger.last_verdict()
    assert ledger.latest_audits(NODE, last) == [True, False, True]
    assert ledger.latest_audits(NODE, last - 2) == [False, True], "as it was before the last of them"
    assert ledger.latest_audits(OTHER, last) == []
    assert ledger.latest_audits(NODE, 0) == []


def test_only_what_may_still_be_learned_from_is_judged_again(ledger: Ledger) -> None:
    add_group(ledger)
    ledger.add_lease(b"L" * 16, NODE, GROUP, [0, 1], b"signed", 1, 100)
    digests = [submit(ledger, slot) for slot in (0, 1)]
    for digest in digests:
        row = ledger.submission(digest)
        assert row is not None
        ledger.send_to_audit(row.sequence, 1.0, b"checks")
        ledger.finish_audit(row.sequence, b"result", None)
        judge(ledger, digest, SubmissionState.ACCEPTED, audited=True)
    assert ledger.count_groups(GroupState.COMPLETE) == 1
    assert ledger.judge_again(NODE, 1) == 0, "of another policy version"
    assert ledger.judge_again(OTHER, 0) == 0
    assert ledger.judge_again(NODE, 0) == 2
    assert ledger.count_groups(GroupState.OPEN) == 1
    assert [row.audit for row in ledger.submissions(SubmissionState.AUDITED, 9)] == [b"result"] * 2
    before = ledger.last_verdict()
    for digest in digests:
        judge(ledger, digest, SubmissionState.ACCEPTED, audited=True)
    assert ledger.count_groups(GroupState.COMPLETE) == 1
    assert ledger.last_verdict() == before and ledger.audit_record(NODE) == (2, 0), "the verdicts stand"
    step = StepRow(1, 1, 1, 2, 60, 1.0, 0, 0.0, 0, 0.0, 1.0, 0.0, 0.0, 0.0, 2.0, 1.0, 1.0, 1.0, 1e-6, 1.0)
    ledger.record_step(step, b"root", [GROUP])
    assert ledger.judge_again(NODE, 0) == 0, "it is learned from already"


@pytest.mark.parametrize("outcome", [SubmissionState.ACCEPTED, SubmissionState.REFUSED])
def test_what_a_re_audit_accepted_is_judged_once_more_like_any_other(ledger: Ledger, outcome: SubmissionState) -> None:
    """After NODE_EVIDENCE: its slot is learned from or free again, never answered with nothing to judge."""
    add_group(ledger)
    ledger.add_lease(b"L" * 16, NODE, GROUP, [0, 1], b"signed", 1, 100)
    first, second = submit(ledger, 0), submit(ledger, 1)
    judge(ledger, first, SubmissionState.REFUSED, audited=True)
    judge(ledger, second, SubmissionState.ACCEPTED, audited=True)
    audit_again(ledger, first, SubmissionState.ACCEPTED)
    assert ledger.count_groups(GroupState.COMPLETE) == 1
    given = ledger.last_verdict()
    assert ledger.judge_again(NODE, 0) == 1 and ledger.count_groups(GroupState.OPEN) == 1
    judge(ledger, first, outcome, audited=True)
    if outcome is SubmissionState.ACCEPTED:
        assert ledger.last_verdict() == given, "the verdict stands"
        assert ledger.audit_record(NODE) == (2, 0)
    else:
        assert ledger.audit_record(NODE) == (1, 1)
        slot = ledger.slots_of(GROUP)[0]
        assert (slot.state, slot.node) == (SlotState.FREE, None)
        ledger.add_lease(b"M" * 16, OTHER, GROUP, [0], b"signed", 1, 100)
        judge(ledger, submit(ledger, 0, lease=b"M" * 16, node=OTHER), SubmissionState.ACCEPTED)
    row = ledger.submission(first)
    assert row is not None and (row.state, row.reaudit) == (outcome, Reaudit.DONE)
    (group,) = ledger.training_groups([GROUP])
    assert [trace.slot for trace in group.traces] == [0, 1]


def audit_again(ledger: Ledger, digest: bytes, outcome: SubmissionState) -> None:
    """The re-audit that its node asks for."""
    row = ledger.submission(digest)
    assert row is not None
    ledger.ask_reaudit(row.sequence)
    ledger.finish_audit(row.sequence, b"audit", None)
    judge(ledger, digest, outcome, audited=True)


def test_bodies_of_old_traces_are_forgotten_and_everything_else_is_kept(ledger: Ledger) -> None:
    add_group(ledger)
    ledger.add_lease(b"L" * 16, NODE, GROUP, [0, 1], b"signed", 1, 100)
    digests = [submit(ledger, slot) for slot in (0, 1)]
    for digest in digests:
        judge(ledger, digest, SubmissionState.ACCEPTED)
    assert ledger.prune_traces(keep=0) == 0, "a complete group is still to be learned from"
    ledger.drop_group(GROUP, "stale")
    assert ledger.prune_traces(keep=1) == 1
    assert ledger.prune_traces(keep=0) == 1
    assert [row["trace"] for row in ledger.view("SELECT trace FROM submissions")] == [None, None]
    assert ledger.verdict(digests[0], NODE) == b"v"


def test_stale_groups_are_dropped_with_the_cause(ledger: Ledger) -> None:
    add_group(ledger, b"a" * 16, version=0)
    add_group(ledger, b"b" * 16, version=3)
    assert ledger.drop_stale_groups(3, "older than 8 policy versions") == 1
    assert [row.group_id for row in ledger.open_groups()] == [b"b" * 16]
    assert ledger.view("SELECT cause FROM groups WHERE state = 'DROPPED'") == [
        {"cause": "older than 8 policy versions"}
    ]


# --- crashes and full disks ---


def test_a_part_that_raises_is_undone_alone(ledger: Ledger) -> None:
    with ledger.write():
        ledger.add_event(1, "kept", "before")
        with pytest.raises(ZeroDivisionError), ledger.part():
            ledger.add_event(1, "undone", "")
            raise ZeroDivisionError
        ledger.add_event(1, "kept", "after")
    assert [row["text"] for row in ledger.view("SELECT text FROM events")] == ["before", "after"]


def test_many_events_of_one_kind_push_out_none_of_another(ledger: Ledger) -> None:
    ledger.add_event(1, "alarm", "KL")
    with ledger.write():
        for number in range(EVENTS_KEPT + 5 * EVENTS_BETWEEN):
            ledger.add_event(2, "audit", str(number))
    kept = [row["text"] for row in ledger.view("SELECT text FROM events ORDER BY id")]
    assert kept[0] == "KL" and kept[-1] == str(EVENTS_KEPT + 5 * EVENTS_BETWEEN - 1)
    assert EVENTS_KEPT < len(kept) <= EVENTS_KEPT + EVENTS_BETWEEN


def test_a_transaction_that_raises_leaves_nothing(ledger: Ledger) -> None:
    with pytest.raises(ZeroDivisionError), ledger.write():
        ledger.add_event(1, "undone", "")
        raise ZeroDivisionError
    assert ledger.view("SELECT * FROM events") == []


@pytest.mark.parametrize("round_", range(3))
def test_a_writer_killed_at_any_point_loses_nothing_it_acknowledged(
    ledger: Ledger, tmp_path: Path, round_: int
) -> None:
    writer = subprocess.Popen(
        [sys.executable, str(Path(__file__).parent / "ledger_writer.py"), str(tmp_path / "ledger.sqlite")],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert writer.stdout is not None
    acknowledged = [int(writer.stdout.readline()) for _ in range(5 + 7 * round_)]
    writer.kill()  # in the middle of the next transaction, wherever that is
    acknowledged += [int(line) for line in writer.stdout.read().split()]
    writer.wait()
    writer.stdout.close()
    rows = ledger.view("SELECT at_ms, kind FROM events ORDER BY id")
    first = [row["at_ms"] for row in rows if row["kind"] == "first"]
    second = [row["at_ms"] for row in rows if row["kind"] == "second"]
    assert first == second, "no half transaction"
    assert first[: len(acknowledged)] == acknowledged
    assert len(first) <= len(acknowledged) + 1
    ledger.add_event(1, "after", "the ledger goes on")


def test_a_full_disk_is_a_storage_error_that_leaves_nothing_half_done(ledger: Ledger) -> None:
    pages = ledger.view("PRAGMA page_count")[0]["page_count"]
    ledger.view(f"PRAGMA max_page_count = {pages + 2}")
    with pytest.raises(StorageError, match="full"), ledger.write():
        for number in range(100):
            with ledger.part():
                ledger.add_event(number, "big", "x" * 1_000)
    assert ledger.view("SELECT * FROM events") == []
    ledger.view("PRAGMA max_page_count = 100000")
    ledger.add_event(1, "small", "there is room again")
    assert len(ledger.view("SELECT * FROM events")) == 1


def test_another_connection_sees_that_something_changed(ledger: Ledger, tmp_path: Path) -> None:
    other = Ledger(tmp_path / "ledger.sqlite", read_only=True)
    before = other.change_counter()
    assert other.change_counter() == before
    ledger.add_event(1, "news", "")
    assert other.change_counter() != before
    other.close()


def test_a_read_only_connection_cannot_write(ledger: Ledger, tmp_path: Path) -> None:
    other = Ledger(tmp_path / "ledger.sqlite", read_only=True)
    with pytest.raises(StorageError, match="readonly"):
        other.add_event(1, "news", "")
    other.close()


def test_a_writer_waits_for_another_process_transaction(ledger: Ledger, tmp_path: Path) -> None:
    other = Ledger(tmp_path / "ledger.sqlite")
    inside, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with other.write():
            other.add_event(1, "held", "")
            inside.set()
            leave.wait(10)

    holder = threading.Thread(target=hold)
    holder.start()
    inside.wait(10)
    timer = threading.Timer(0.1, leave.set)
    timer.start()
    ledger.add_event(2, "waited", "")
    holder.join()
    assert [row["kind"] for row in ledger.view("SELECT kind FROM events ORDER BY id")] == ["held", "waited"]
    other.close()


def test_a_ledger_of_another_format_is_refused(tmp_path: Path, ledger: Ledger) -> None:
    database = sqlite3.connect(tmp_path / "ledger.sqlite")
    database.execute("PRAGMA user_version = 99")
    database.close()
    with pytest.raises(UsageError, match=f"format 99, of a newer rlcommons; this one reads {SCHEMA_VERSION}"):
        Ledger(tmp_path / "ledger.sqlite")
    with pytest.raises(UsageError, match="rltrainer init"):
        Ledger(tmp_path / "none.sqlite")


@pytest.mark.parametrize("keep", [0, 5_000])
def test_a_damaged_ledger_says_so_and_what_to_do(ledger: Ledger, tmp_path: Path, keep: int) -> None:
    ledger.close()
    damaged = tmp_path / "damaged.sqlite"
    damaged.write_bytes((tmp_path / "ledger.sqlite").read_bytes()[:keep])
    with pytest.raises(StorageError, match="restore it from a backup"):
        Ledger(damaged)


def test_it_is_known_how_fast_nodes_got_a_version_and_what_following_it_costs(tmp_path: Path) -> None:
    ledger = Ledger.create(tmp_path / "ledger.sqlite")
    ledger.add_policy(0, b"r" * 32, 1_000)
    ledger.set_manifest(0, b"signed", Published(1_000, 500_000, None))
    ledger.add_policy(1, b"s" * 32, 2_000)
    ledger.note_arrivals({(1, b"a"): 2_050})  # not signed yet: a node cannot have it
    ledger.set_manifest(1, b"signed", Published(2_100, 500_000, 2_500))
    ledger.note_arrivals({(0, b"a"): 1_500, (1, b"a"): 2_600, (1, b"b"): 3_100, (99, b"b"): 3_100})
    ledger.note_arrivals({(1, b"a"): 9_000, (1, b"c"): 7_100})
    newest, first = summary.policies(ledger)
    assert (newest["version"], newest["ratio"], newest["nodes"]) == (1, 200, 3)
    assert (newest["median_seconds"], newest["slowest_seconds"]) == (1.0, 5.0)
    assert (first["version"], first["ratio"], first["nodes"], first["median_seconds"]) == (0, None, 1, 0.5)
    ledger.set_manifest(1, b"signed anew", Published(90_000, 500_000, 2_500))
    assert summary.policies(ledger)[0]["published_ms"] == 2_100
    assert summary.following(ledger) == {"versions": 1, "bytes": 500_000, "delta_bytes": 2_500}
    assert view.policy_line(summary.policies(ledger)) == (
        "version 1: 500.0 kB, delta 2.5 kB, 200× smaller, with 3 nodes in 1.0 s (slowest 5.0 s)"
    )
    ledger.see_node(b"c", 7_000, "rlcommons", "transformers")  # a node that came later is not slow
    assert summary.policies(ledger)[0]["slowest_seconds"] == 1.0


def test_arrivals_of_old_versions_are_forgotten(tmp_path: Path) -> None:
    ledger = Ledger.create(tmp_path / "ledger.sqlite")
    for version in (0, 300):
        ledger.add_policy(version, b"r" * 32, 0)
        ledger.set_manifest(version, b"signed", Published(0, 1, None))
        ledger.note_arrivals({(0, b"a"): 1, (version, b"b"): 1})
    assert [row["version"] for row in ledger.view("SELECT version FROM arrivals ORDER BY version")] == [300]
