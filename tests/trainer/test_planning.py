"""What a run needs to keep decoding and its learner busy: the rules, what holds the others up, and the command."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from protocol.device_turns import ENGINE, Turn
from tests.trainer.fabricate import NOW, Gateway, make_run, one_thread
from trainer import planning
from trainer.cli import main
from trainer.ledger import Ledger
from trainer.ledger_rows import StepRow, SubmissionState
from trainer.planning import AUDITORS, LEARNER, NODES, ROLLOUTS, AuditTimes, Means, StepTimes, Stretch, TraceTimes

# 4 nodes of 16 slots; a rollout decodes for 2 of its 10 s. The learner takes 128 traces in 16 s.
WORKED = Means(
    held_seconds=1.0, slot_wait_seconds=0.0, rollout_seconds=10.0, decoding_seconds=2.0, verified_seconds=3.0,
    audit_seconds=0.5, audited_share=0.1, learned_share=1.0, step_seconds=16.0, step_traces=128.0,
    traces_per_second=8.0, nodes=4, slots=64, auditors=1,
)  # fmt: skip


def stretch(
    *, count: int = 256, gap: float = 0.125, rollout: float = 10.0, step_seconds: float = 16.0, start: int = 0
) -> Stretch:
    """The run of WORKED, measured: a trace every `gap` seconds, every tenth audited, a step for every 16 of them."""
    at = [start + round(each * gap * 1000) for each in range(count)]
    traces = [TraceTimes(ms, number % 10 == 0, 3.0, 1.0, 0.0, 2.0, rollout - 2.0) for number, ms in enumerate(at)]
    return Stretch(
        traces=tuple(traces),
        audits=tuple(AuditTimes(ms, 2, 1.0) for ms in at[::20]),
        steps=tuple(StepTimes(ms, 16, step_seconds / 8) for ms in at[::16]),
        nodes=4,
        slots=64,
        auditors=1,
    )


def joined(first: Stretch, then: Stretch) -> Stretch:
    return replace(
        then,
        traces=first.traces + then.traces,
        audits=first.audits + then.audits,
        steps=first.steps + then.steps,
    )


# --- in turns ---


def test_where_one_device_is_taken_in_turns_its_shares_are_told_and_no_nodes_advised() -> None:
    taken = [Turn(ENGINE, 0, 4_000), Turn(ENGINE, 9_000, 16_000), Turn("learner", 16_000, 19_000)]
    made = planning.in_turns(planning.plan(WORKED), WORKED, [*taken, Turn(ENGINE, 20_000, 30_000)], 10_000)
    assert made.device == ((ENGINE, 0.8), ("learner", 0.15), ("nobody", 0.05)) and made.bottleneck == "device"
    assert [part.name for part in made.parts] == [AUDITORS, LEARNER] and made.part(LEARNER).busy == 0.15
    lines = planning.as_table(WORKED, made, None)
    told = "device    in turns: home engine 80%, learner 15%, nobody 5% of the time  ← bottleneck; no nodes are needed"
    assert told in lines and not any(line.startswith((NODES, ROLLOUTS)) for line in lines)
    found = planning.as_object(WORKED, made, None)
    assert found["device"] == {"home_engine": 0.8, "learner": 0.15, "nobody": 0.05}
    assert "nodes" not in found["parts"]
    assert planning.in_turns(planning.plan(WORKED), WORKED, taken, 10**9).device == ()


# --- the rules ---


def test_64_slots_that_a_rollout_uses_a_fifth_of_its_time_take_320_rollouts() -> None:
    assert planning.rollouts_in_flight(64, 0.2) == 320
    assert planning.plan(WORKED).part(ROLLOUTS).wanted == 320


def test_rollouts_that_do_nothing_but_decode_need_no_more_than_the_slots() -> None:
    assert planning.rollouts_in_flight(64, 1.0) == 64


def test_what_no_node_keeps_in_flight_is_not_asked_of_it_but_of_the_environment() -> None:
    slow = replace(WORKED, decoding_seconds=0.1)

    assert planning.plan(slow).part(ROLLOUTS).wanted == 16 * 64
    assert "only faster environments fill the slots" in "\n".join(planning.as_table(slow, planning.plan(slow), None))


@pytest.mark.parametrize(
    ("step_traces", "step_seconds", "a_node", "nodes"),
    [(128, 16, 8.0, 1), (128, 16, 7.9, 2), (128, 4, 8.0, 4), (1024, 10, 3.0, 35), (1, 100, 50.0, 1)],
)
def test_so_many_nodes_as_give_what_the_learner_takes(
    step_traces: float, step_seconds: float, a_node: float, nodes: int
) -> None:
    assert planning.nodes_for(step_traces, step_seconds, a_node) == nodes


@pytest.mark.parametrize(
    ("arriving", "audited", "seconds", "auditors"),
    [(8.0, 0.1, 0.5, 1), (8.0, 1.0, 0.5, 4), (8.0, 1.0, 0.51, 5), (8.0, 0.0, 0.5, 1)],
)
def test_so_many_auditors_as_keep_up_with_what_is_drawn_for_audit(
    arriving: float, audited: float, seconds: float, auditors: int
) -> None:
    assert planning.auditors_for(arriving, audited, seconds) == auditors


def test_where_half_of_the_traces_are_not_learned_from_twice_as_many_nodes_and_auditors_are_wanted() -> None:
    whole = planning.plan(replace(WORKED, step_seconds=2.0, audited_share=1.0))
    half = planning.plan(replace(WORKED, step_seconds=2.0, audited_share=1.0, learned_share=0.5))
    for name in (NODES, AUDITORS):
        assert half.part(name).wanted == 2 * (whole.part(name).wanted or 0)


# --- which part holds the others up ---


@pytest.mark.parametrize(
    ("changes", "bottleneck"),
    [
        ({}, LEARNER),
        ({"step_seconds": 2.0, "audited_share": 0.05, "traces_per_second": 30.0}, NODES),
        ({"audited_share": 1.0, "traces_per_second": 2.0}, AUDITORS),
        ({"step_seconds": 2.0, "traces_per_second": 10.0}, ROLLOUTS),
    ],
)
def test_the_part_through_which_fewest_pass_is_the_bottleneck(changes: dict[str, Any], bottleneck: str) -> None:
    assert planning.plan(replace(WORKED, **changes)).bottleneck == bottleneck


def test_where_nothing_is_audited_the_auditors_bound_nothing() -> None:
    auditors = planning.plan(replace(WORKED, audited_share=0.0)).part(AUDITORS)

    assert (auditors.wanted, auditors.busy) == (1, 0.0)
    assert (
        planning.as_object(WORKED, planning.plan(replace(WORKED, audited_share=0.0)), None)["parts"]["auditors"][
            "most_traces_per_second"
        ]
        is None
    )


# --- what is measured ---


def test_the_means_of_a_stretch_are_those_it_was_made_of() -> None:
    of = planning.means(stretch())

    assert of.decoding_seconds == pytest.approx(WORKED.decoding_seconds)
    assert of.decoding_share == pytest.approx(0.2)
    assert of.audit_seconds == pytest.approx(WORKED.audit_seconds)
    assert of.audited_share == pytest.approx(0.1, abs=0.01)
    assert of.step_traces / of.step_seconds == pytest.approx(8.0)
    assert of.traces_per_second == pytest.approx(8.0, rel=0.01)
    assert of.learned_share == pytest.approx(1.0)


def test_waiting_for_a_slot_is_no_time_of_the_environment() -> None:
    """Of 12 s 2 are decoding and 2 waiting for a slot: with fewer in flight they would be gone."""
    crowded = stretch()
    crowded = replace(crowded, traces=tuple(replace(each, slot_wait=2.0) for each in crowded.traces))

    of = planning.means(crowded)

    assert of.slot_wait_seconds == pytest.approx(2.0)
    assert of.decoding_seconds == pytest.approx(2.0)
    assert planning.plan(of).part(ROLLOUTS).wanted == 320
    assert planning.plan(of).part(ROLLOUTS).have == 96  # 8 a second for 12 s


def test_traces_whose_nodes_told_nothing_count_as_traces_and_not_as_times() -> None:
    half = stretch()
    silent = [replace(each, held=None, slot_wait=None, decoding=None, tools=None) for each in half.traces]
    mixed = [each if number % 2 else silent[number] for number, each in enumerate(half.traces)]

    of = planning.means(replace(half, traces=tuple(mixed)))

    assert of.decoding_share == pytest.approx(0.2)
    assert of.traces_per_second == pytest.approx(8.0, rel=0.01)
    assert planning.missing(replace(half, traces=tuple(silent)))[0].startswith("rollouts: 0 traces whose nodes told")


def test_a_night_in_which_the_run_was_not_served_changes_no_rate() -> None:
    evening = stretch()
    morning = stretch(start=evening.traces[-1].at_ms + 8 * 3_600_000)

    assert planning.means(joined(evening, morning)).traces_per_second == pytest.approx(8.0, rel=0.01)


def test_what_is_missing_is_said() -> None:
    none = Stretch((), (), (), 0, 0, 1)

    assert [line.split(":")[0] for line in planning.missing(none)] == ["rollouts", "audits", "learner", "nodes"]
    assert planning.missing(stretch()) == []
    assert planning.moved(none) is None


# --- drift ---


def test_a_run_that_stays_as_it_was_has_not_drifted() -> None:
    assert planning.moved(stretch()) is None


def test_a_learner_that_grew_fast_moves_the_bottleneck_and_is_named() -> None:
    steady = stretch(count=768)
    last = stretch(count=256, step_seconds=4.0, start=steady.traces[-1].at_ms + 125)

    found = planning.moved(joined(steady, last))

    assert found is not None
    assert (found.before, found.now) == (LEARNER, ROLLOUTS)
    assert [name for name, _, _ in found.changed] == ["step_seconds"]
    of = planning.means(joined(steady, last))
    told = planning.as_table(of, planning.plan(of), found)
    moved_to = "from learner (train) to rollouts in flight (tool wait)"
    assert f"warning: the bottleneck moved {moved_to} in the last quarter" in told
    json.dumps(planning.as_object(of, planning.plan(of), found), allow_nan=False)


# --- the command ---


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run to which one node of 4 slots sent a trace a second, each of 10 s with 2 of decoding; all were audited, for
    half a second each, and learned from in 4 steps of 8 s."""
    run, ledger = make_run(tmp_path_factory.mktemp("plan") / "run", group_size=8)
    gateway = Gateway(run, ledger)
    with one_thread():
        drawn = gateway.draw(4, 0)
    digests = gateway.submit(drawn, proofs=())
    with closing(sqlite3.connect(run.folder.ledger)) as database, database:
        database.execute(
            "UPDATE submissions SET received_ms = ? + sequence * 1000, waited_ms = 1000, slot_ms = 0, "
            "prefill_ms = 500, decode_ms = 1500, tool_ms = 8000",
            (NOW + 12_000,),
        )
    for number in range(len(digests)):
        audit_and_accept(ledger, NOW + 14_000 + number * 1_000)
    for version in range(1, 5):
        step = StepRow(
            version=version, created_ms=NOW + 12_000 + version * 8_000, groups=1, traces=8, tokens=200, reward_mean=0.5,
            flat_groups=0, staleness_mean=0.0, staleness_max=0, loss=0.0, ess=1.0, kl=0.0, masked=0.0, clipped=0.0,
            entropy=1.0, ratio_mean=1.0, ratio_max=1.0, gradient_norm=1.0, learning_rate=1e-3, seconds=8.0,
        )  # fmt: skip
        ledger.record_step(step, bytes([version]) * 32, [])
    # Between two bursts: nothing is drawn at this moment.
    ledger.beat_node(
        gateway.node.node, NOW + 50_000, policy_version=0, tokens_per_second=0.0, slots_busy=0, slots_total=4,
        slots_waiting=0, cache_percent=None, unsent=0,
    )  # fmt: skip
    ledger.close()
    return run.folder.path


def audit_and_accept(ledger: Ledger, at_ms: int) -> None:
    [claimed] = ledger.claim_audits("auditor-0", at_ms, 1)
    ledger.finish_audit(claimed.sequence, b"audit", None)
    with ledger.write():
        ledger.judge(
            claimed, state=SubmissionState.ACCEPTED, reason=None, audited=True, reward=claimed.reward, checks=b"checks",
            verdict=b"verdict", judged_ms=at_ms + 500,
        )  # fmt: skip


def test_the_command_plans_from_what_the_ledger_of_a_run_tells(
    run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(run_folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)

    assert (found["missing"], found["bottleneck"], found["moved"]) == ([], LEARNER, None)
    wanted = {name: (part["have"], part["wanted"]) for name, part in found["parts"].items()}
    assert wanted == {"rollouts_in_flight": (10, 20), "nodes": (1, 1), "auditors": (1, 1), "learner": (1, None)}
    of = found["measured"]
    assert of["rollout_seconds"] == pytest.approx(10.0)
    assert of["decoding_share"] == pytest.approx(0.2)
    assert of["audit_seconds"] == pytest.approx(0.5)
    assert of["step_traces"] / of["step_seconds"] == pytest.approx(1.0)
    assert found["parts"]["auditors"]["most_traces_per_second"] == pytest.approx(2.0)
    assert found["parts"]["nodes"]["most_traces_per_second"] == pytest.approx(2.0)


def test_people_get_the_same_as_a_table(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(run_folder)]) == 0
    told = capsys.readouterr().out.splitlines()

    [marked] = [line for line in told if "bottleneck" in line]
    assert marked.startswith(LEARNER)
    assert any(line.split()[:5] == ["rollouts", "in", "flight", "10", "20"] for line in told)


def test_a_new_run_says_what_is_missing_and_ends_with_6(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, ledger = make_run(tmp_path / "run")
    ledger.close()

    assert main(["plan", str(run.folder.path)]) == 6
    told = capsys.readouterr().out
    assert "rollouts: 0 traces whose nodes told their times of 16: wait for more" in told
    assert "nodes: none has told how many slots it has" in told
    assert main(["plan", str(run.folder.path), "--json"]) == 6
    found = json.loads(capsys.readouterr().out)
    assert (len(found["missing"]), found["parts"]) == (4, None)
