"""Parts of the trainer that have work and do none, and what people are told each part waits for."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from protocol.identity import Identity
from tests.trainer.fabricate import NOW, Gateway, make_run, one_thread
from trainer import rates
from trainer.child import life, note_start, say_ready
from trainer.leasing import Leasing
from trainer.ledger import Ledger
from trainer.place import locked
from trainer.rundir import Run
from trainer.serve import _Room
from trainer.stall import MOST_RESTARTS, STARTING_SECONDS, Seen, Stuck, Watch
from trainer.summary import summary
from trainer.view import notes
from trainer.waits import as_it_stands, lasted, waits

# --- what is seen ---


def test_a_part_that_moves_or_owes_nothing_is_left_alone() -> None:
    watch = Watch(10.0)
    for second in range(100):
        assert watch.look(Seen("gateway", "checks traces", second // 9), second) is None
        assert watch.look(Seen("learner", "", 0), second) is None


def test_a_part_that_has_work_and_does_none_is_started_again_and_at_last_given_up() -> None:
    watch = Watch(10.0)
    answers = [watch.look(Seen("learner", "makes policy 4", 3), second) for second in range(35)]
    told = [answer for answer in answers if answer is not None]
    cause = "no progress for 10 s (stall_seconds): makes policy 4"
    assert told == [Stuck("learner", cause, hopeless=number == MOST_RESTARTS) for number in range(MOST_RESTARTS + 1)]


def test_time_in_which_a_part_owed_nothing_does_not_count_and_progress_forgives_restarts() -> None:
    watch = Watch(10.0)
    assert watch.look(Seen("auditor", "", 0), 0) is None
    assert watch.look(Seen("auditor", "", 0), 100) is None
    assert watch.look(Seen("auditor", "a trace to audit", 0), 105) is None
    for number in range(5):  # moved, stuck, started again, moved for long, stuck, …
        seen = Seen("auditor", "a trace to audit", number + 1)
        assert watch.look(seen, 200 * number + 200) is None
        stuck = watch.look(seen, 200 * number + 211)
        assert stuck is not None and not stuck.hopeless


def test_a_part_that_moves_only_because_it_was_started_again_is_given_up_too() -> None:
    watch = Watch(10.0)
    for number in range(3):
        assert watch.look(Seen("gateway", "its sign of life", number), 20 * number) is None
        stuck = watch.look(Seen("gateway", "its sign of life", number), 20 * number + 11)
        assert stuck is not None and stuck.hopeless == (number == MOST_RESTARTS)


def test_what_a_part_needs_to_start_is_not_held_against_it() -> None:
    watch = Watch(10.0)
    assert watch.look(Seen("learner", "makes policy 4", 3, None), 0) is None
    assert watch.look(Seen("learner", "makes policy 4", 3, None), STARTING_SECONDS) is None
    ready = STARTING_SECONDS - 5
    other = Watch(10.0)
    assert other.look(Seen("learner", "makes policy 4", 3, None), 0) is None
    assert other.look(Seen("learner", "makes policy 4", 3, ready), ready + 9) is None
    stuck = other.look(Seen("learner", "makes policy 4", 3, ready), ready + 10)
    assert stuck is not None and stuck.cause == "no progress for 10 s (stall_seconds): makes policy 4"


def test_a_part_that_never_is_ready_or_again_and_again_is_not_waited_for_without_end() -> None:
    for ready in (None, STARTING_SECONDS + 9.0):
        watch = Watch(10.0)
        assert watch.look(Seen("learner", "is starting", 3, ready), 0) is None
        stuck = watch.look(Seen("learner", "is starting", 3, ready), STARTING_SECONDS + 10)
        assert stuck is not None and stuck.part == "learner"


# --- what people are told ---


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Run, Ledger]]:
    with one_thread():
        run, ledger = make_run(tmp_path_factory.mktemp("waits") / "run", group_size=4, groups_per_step=2)
        with closing(ledger):
            yield run, ledger


def told(run: Run, ledger: Ledger) -> dict[str, tuple[str, int | None]]:
    return {row["part"]: (row["what"], row["since_ms"]) for row in waits(ledger, run.config, NOW)}


def test_every_part_says_what_it_does_or_waits_for_and_since_when(made: tuple[Run, Ledger]) -> None:
    run, ledger = made
    created = ledger.view("SELECT created_ms FROM policies")[0]["created_ms"]
    assert told(run, ledger)["gateway"] == ("signs the latest policy", created)
    ledger.set_manifest(0, b"signed")
    first = told(run, ledger)
    assert first["gateway"] == ("waits for traces of nodes: none is connected", None)
    assert first["auditors"] == ("wait for a trace that is drawn for audit", None)
    assert first["learner"] == ("waits for groups: 0 of 2 whose rewards differ are complete", created)

    gateway = Gateway(run, ledger)
    digests = gateway.submit(gateway.draw(6, 0), proofs=())
    assert told(run, ledger)["auditors"] == ("24 traces to audit, none taken up yet", NOW)
    ledger.claim_audits("auditor-0", NOW + 7, 3)
    assert told(run, ledger)["auditor-0"] == ("recomputes 3 traces of policy 0", NOW + 7)
    ledger.release_claims("auditor-0", died_of=None)
    gateway.accept(digests)
    assert told(run, ledger)["learner"][0] == "makes policy 1"
    assert told(run, ledger)["gateway"] == ("waits for traces of 1 node", NOW)


def test_a_trainer_below_its_disk_limit_says_that_it_accepts_nothing_and_how_much_to_free(
    made: tuple[Run, Ledger], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, ledger = made
    usage = shutil.disk_usage(run.folder.path)
    room = _Room(run.folder.path)
    assert not room.changed()
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", lambda path: usage._replace(free=200 * 2**20 + 5))
        short = "the trainer's disk is nearly full (200 MiB free): nothing is accepted until there is room: free 56 MiB"
        short += " more"
        assert told(run, ledger)["gateway"] == (f"accepts nothing: {short}", None)
        ledger.add_event(NOW + 9, "disk", short)
        assert told(run, ledger)["gateway"] == (f"accepts nothing: {short}", NOW + 9)
        assert room.changed() and room.told == short and not room.changed()
    assert "accepts nothing" not in told(run, ledger)["gateway"][0]
    assert room.changed() and "there is room" in room.told


def test_every_node_says_what_it_does_or_waits_for(made: tuple[Run, Ledger]) -> None:
    run, ledger = made
    node = Identity.generate()

    def doing() -> str:
        rows = summary(ledger, run.config, NOW + 5_000)["nodes"]
        row = next(row for row in rows if row["node"] == node.peer_id)
        return f"{row['doing']} {lasted(row['doing_since_ms'], NOW + 5_000)}".strip()

    def beats(version: int | None, busy: int) -> None:
        rest = dict(tokens_per_second=0.0, slots_total=8, slots_waiting=0, cache_percent=None, unsent=0)
        ledger.beat_node(node.node, NOW, policy_version=version, slots_busy=busy, **rest)  # type: ignore[arg-type]

    ledger.see_node(node.node, NOW, "rlcommons", "engine")
    assert doing() == "fetches policy 0 (has told of none)"
    beats(0, 3)
    assert doing() == "draws 3 of its 8 slots at once"
    beats(7, 3)
    assert doing().startswith("has policy 7, the latest here is 0") and doing().endswith("with --published 7")
    beats(0, 0)
    assert doing() == "asks for a lease"
    ledger.note_node_wait(node.node, "2 groups are being drawn already", NOW)
    assert doing() == "waits for a lease: 2 groups are being drawn already for 5 s"
    ledger.lose_node(node.node)
    assert doing() == "is away for 5 s"


def test_why_a_node_gets_no_lease_is_kept_with_the_time_since_when(made: tuple[Run, Ledger]) -> None:
    run, ledger = made
    node = Identity.generate()
    ledger.see_node(node.node, NOW, "rlcommons", "engine")
    leasing = Leasing(run, ledger, node, bytes(32), None, None)  # type: ignore[arg-type]

    def kept() -> tuple[str, int]:
        row = ledger.view("SELECT waits, waits_ms FROM nodes WHERE node = ?", (node.node,))[0]
        return row["waits"], row["waits_ms"]

    for second, why in enumerate(("16 groups wait", "17 groups wait", "its audits", "")):
        leasing._note_wait(node.node, why, NOW + second)
        assert kept() == [("16 groups wait", NOW), ("16 groups wait", NOW), ("its audits", NOW), ("", NOW + 3)][second]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "for 0 s"), (119, "for 119 s"), (120, "for 2 min"), (7199, "for 119 min"), (7200, "for 2 h")],
)
def test_how_long_something_lasts_is_told_in_whole_numbers(seconds: int, text: str) -> None:
    assert lasted(NOW, NOW + 1000 * seconds) == text and lasted(None, NOW) == ""


# --- what of it runs ---


def test_a_run_that_nobody_serves_says_so_and_a_part_says_that_it_starts(made: tuple[Run, Ledger]) -> None:
    run, ledger = made
    node = Identity.generate()
    ledger.see_node(node.node, NOW, "rlcommons", "engine")

    def found() -> dict[str, Any]:
        return {**as_it_stands(summary(ledger, run.config, NOW), run.folder), **rates.told(ledger, run.config)}

    def learner() -> tuple[str, int | None]:
        return next((row["what"], row["since_ms"]) for row in found()["waits"] if row["part"] == "learner")

    run.folder.address.write_text("of the gateway that was killed\n")
    unserved = found()
    assert not unserved["served"] and {row["what"] for row in unserved["waits"]} == {"is not served"}
    assert not any(row["connected"] for row in unserved["nodes"])
    first, *others = (text.plain for text in notes(run, unserved))
    assert first.startswith("not served  ") and first.endswith(f"`rltrainer serve {run.folder.path}` goes on with it")
    assert not any(text.startswith("join") for text in others)
    with locked(run):
        begun = time.time_ns() // 1_000_000
        note_start(run.folder.path, "learner")
        what, since = learner()
        assert what == "is starting" and since is not None and since >= begun
        say_ready(run.folder.path, "learner")
        ready = life(run.folder.path, "learner")
        assert ready is not None and ready.ready_ms is not None
        assert learner()[1] == ready.ready_ms, "no time from before its process"
        assert found()["served"] and notes(run, found())[0].plain.startswith("join")
