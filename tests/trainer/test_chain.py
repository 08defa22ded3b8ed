"""Where the time of a rollout went: its chain in the ledger, the sums over all, and what a person opens."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from protocol.messages import Timing
from tests.trainer.fabricate import ENVIRONMENT, NOW, make_run
from trainer import chain, telemetry, timeline
from trainer.chain import CLAIMED, Chain, Stage
from trainer.cli import main
from trainer.ledger import Ledger
from trainer.ledger_rows import GroupRow, NewSubmission, StepRow, SubmissionState
from trainer.rundir import Run
from trainer.telemetry import BUCKETS, Telemetry

NODES = (b"\1" * 32, b"\2" * 32)
TOLD = Timing(waited_ms=100, slot_ms=50, prefill_ms=30, decode_ms=400, tool_ms=200)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run, ledger = make_run(tmp_path_factory.mktemp("chain") / "run")
    ledger.close()
    return run.folder.path


@pytest.fixture
def made(tmp_path: Path, template: Path) -> Iterator[tuple[Run, Ledger]]:
    run, ledger = make_run(tmp_path / "run", template)
    with closing(ledger):
        yield run, ledger


def roll(ledger: Ledger, number: int, timing: Timing | None = TOLD, *, environment: str = ENVIRONMENT) -> bytes:
    """A group of two rollouts leased at NOW + 10 s × `number`; each arrives a second later. The digest of the first."""
    leased, group_id = NOW + 10_000 * number, number.to_bytes(16, "big")
    group = GroupRow(group_id, environment, "", number, 0, 2, (1, 2), 14, leased)
    ledger.add_group(group, [1, 2])
    ledger.add_lease(group_id, NODES[number % 2], group_id, [0, 1], b"signed", leased, leased + 60_000)
    for slot in range(2):
        new = NewSubmission(
            digest(number, slot), group_id, group_id, slot, NODES[number % 2], 0, leased + 1_000, b"trace", 30, timing
        )
        with ledger.write():
            ledger.add_submission(new, ledger.next_sequence(), b"receipt")
    return digest(number)


def digest(number: int, slot: int = 0) -> bytes:
    return (2 * number + slot).to_bytes(32, "big")


def accept(ledger: Ledger, number: int) -> None:
    """Verdicts: half a second after the receipt on the first, two seconds on the second, of which one is audited."""
    received = NOW + 10_000 * number + 1_000
    for slot, after in enumerate((500, 2_000)):
        row = ledger.submission(digest(number, slot))
        assert row is not None
        if slot == 0:
            ledger.send_to_audit(row.sequence, 1.0, b"checks")
            ledger.claim_audits("auditor-0", received + 200, 1)
            ledger.finish_audit(row.sequence, b"audit", None)
            row = ledger.submission(digest(number, slot))
            assert row is not None
        ledger.judge(
            row, state=SubmissionState.ACCEPTED, reason=None, audited=slot == 0, reward=float(slot), checks=b"checks",
            verdict=b"verdict", judged_ms=received + after,
        )  # fmt: skip


def learn(ledger: Ledger, version: int, *numbers: int) -> None:
    """A step of three seconds that was recorded eight seconds after the last of its rollouts arrived."""
    fields: dict[str, Any] = dict.fromkeys(StepRow.__slots__, 0)
    at = NOW + 10_000 * max(numbers) + 1_000 + 8_000
    step = StepRow(**{**fields, "version": version, "created_ms": at, "traces": 2 * len(numbers), "seconds": 3.0})
    ledger.record_step(step, bytes(32), [number.to_bytes(16, "big") for number in numbers])


def seconds(of: Chain) -> dict[Stage, float]:
    return {each.stage: round(each.seconds, 6) for each in of.spans()}


# --- one rollout ---


def test_the_stages_of_a_rollout_follow_each_other_from_its_lease_to_its_step(made: tuple[Run, Ledger]) -> None:
    _, ledger = made
    roll(ledger, 0)
    accept(ledger, 0)
    learn(ledger, 1, 0)

    first, second = chain.newest_learned(ledger, 10)

    assert seconds(first) == {
        Stage.QUEUE: 0.15, Stage.PREFILL: 0.03, Stage.DECODE: 0.4, Stage.TOOL: 0.2, Stage.HAND_IN: 0.22,
        Stage.VERIFY: 0.5, Stage.BATCH: 4.5, Stage.TRAIN: 3.0,
    }  # fmt: skip
    assert seconds(second)[Stage.VERIFY] == 2.0
    assert (first.audited, second.audited, first.auditor, first.batch) == (True, False, "auditor-0", 1)
    at: float = NOW
    for each in first.spans():
        assert each.start_ms == pytest.approx(at, abs=0.01)
        at += 1000 * each.seconds
    assert at == pytest.approx(NOW + 9_000)
    assert chain.complete_ms(ledger, first) == NOW + 3_000


def test_a_rollout_is_shown_as_far_as_it_has_come(made: tuple[Run, Ledger]) -> None:
    _, ledger = made
    roll(ledger, 0)
    [arrived, _] = chain.newest(ledger, 10)
    assert list(seconds(arrived)) == list(CLAIMED)
    assert chain.complete_ms(ledger, arrived) is None

    accept(ledger, 0)
    [judged, _] = chain.newest(ledger, 10)
    assert list(seconds(judged)) == [*CLAIMED, Stage.VERIFY]


@pytest.mark.parametrize("share", [1.5, 1_000.0])
def test_a_node_that_claims_more_than_the_trainer_saw_is_cut_down_to_that(
    made: tuple[Run, Ledger], share: float
) -> None:
    _, ledger = made
    names = Timing.__dataclass_fields__
    roll(ledger, 0, Timing(*(round(share * getattr(TOLD, name)) for name in names)))

    [found, _] = chain.newest(ledger, 10)

    assert sum(each.seconds for each in found.spans()) == pytest.approx(1.0)
    assert seconds(found)[Stage.HAND_IN] == 0.0
    assert seconds(found)[Stage.DECODE] == pytest.approx(400 / 780, abs=1e-5)


def test_a_node_that_says_nothing_has_its_part_in_one(made: tuple[Run, Ledger]) -> None:
    _, ledger = made
    roll(ledger, 0, None)
    accept(ledger, 0)
    [found, _] = chain.newest(ledger, 10)
    assert seconds(found) == {Stage.NODE: 1.0, Stage.VERIFY: 0.5}
    assert not any(each.claimed for each in found.spans())
    assert "the node did not say what its time went to" in timeline.waterfall(found, None)


def test_mean_and_95th_percentile() -> None:
    found = chain.spread(Stage.DECODE, [float(number) for number in range(1, 101)])
    assert found is not None and (found.count, found.mean, found.p95) == (100, 50.5, 95.0)
    assert chain.spread(Stage.DECODE, []) is None
    one = chain.spread(Stage.DECODE, [3.0])
    assert one is not None and one.p95 == 3.0


# --- all of them ---


def exposed(telemetry: Telemetry) -> dict[str, float]:
    class Once:
        def collect(self) -> Iterator[Any]:
            yield telemetry.family()

    registry = CollectorRegistry()
    registry.register(Once())
    lines = generate_latest(registry).decode().splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if line[0] != "#"}


def test_each_stage_is_a_histogram_to_which_each_rollout_adds_once(made: tuple[Run, Ledger]) -> None:
    _, ledger = made
    watched = Telemetry()
    for number in range(3):
        roll(ledger, number, None if number == 2 else TOLD)
        watched.catch_up(ledger)
        watched.catch_up(ledger)
        if number:
            accept(ledger, number)
        watched.catch_up(ledger)
    learn(ledger, 1, 1)
    watched.catch_up(ledger)
    found = exposed(watched)

    def of(stage: str, what: str, source: str, more: str = "") -> float:
        labels = f'environment="{ENVIRONMENT}",{more}source="{source}",stage="{stage}"'
        return found[f"rlcommons_stage_seconds_{what}{{{labels}}}"]

    assert of("decode", "count", "claimed") == 4  # one node said nothing
    assert of("decode", "sum", "claimed") == pytest.approx(1.6)
    assert of("node", "count", "seen") == 6
    assert of("verify", "count", "seen") == 4
    assert of("verify", "sum", "seen") == pytest.approx(5.0)
    assert of("verify", "bucket", "seen", 'le="0.5",') == 2
    assert of("batch_wait", "sum", "seen") == pytest.approx(7.5)
    assert of("train", "sum", "seen") == pytest.approx(6.0)
    buckets = [value for name, value in found.items() if "_bucket" in name and 'stage="decode"' in name]
    assert buckets == sorted(buckets) and len(buckets) == len(BUCKETS) + 1
    anew = Telemetry()
    anew.catch_up(ledger)
    assert exposed(anew) == found, "a process that was started again shows what the one before did"


def test_a_second_verdict_on_a_trace_is_no_second_wait_for_one(made: tuple[Run, Ledger]) -> None:
    _, ledger = made
    roll(ledger, 0)
    accept(ledger, 0)
    node, later = NODES[0], NOW + 9_000_000
    ledger.add_verdict(node, digest(0), SubmissionState.REFUSED, "MARGIN", True, later, b"signed")
    ledger.add_verdict(node, b"\xff" * 32, SubmissionState.REFUSED, "LEASE_UNKNOWN", False, later, b"signed")
    watched = Telemetry()
    watched.catch_up(ledger)
    [verify] = [row for row in watched.table() if row["stage"] is Stage.VERIFY]
    assert (verify["count"], verify["mean"]) == (2, 1.25)


def test_a_run_of_many_environments_has_a_bounded_number_of_labels(
    made: tuple[Run, Ledger], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(telemetry, "MOST_ENVIRONMENTS", 2)
    monkeypatch.setattr(telemetry, "_PAGE", 3)
    _, ledger = made
    for number in range(5):
        roll(ledger, number, environment=f"task{number}@1")
    watched = Telemetry()
    watched.catch_up(ledger)
    counts: dict[str, float] = defaultdict(float)
    for name, value in exposed(watched).items():
        if "_count" in name and 'stage="node"' in name:
            counts[name.split('environment="')[1].split('"')[0]] = value
    assert counts == {"task0@1": 2, "task1@1": 2, "other": 6}


# --- what a person opens ---


@pytest.fixture
def played(made: tuple[Run, Ledger]) -> Run:
    """Six rollouts of two nodes, the first four learned from in two steps."""
    run, ledger = made
    for number in range(3):
        roll(ledger, number)
        accept(ledger, number)
    learn(ledger, 1, 0)
    learn(ledger, 2, 1)
    return run


def test_a_trace_that_was_judged_twice_is_told_by_the_verdict_that_stands(
    made: tuple[Run, Ledger], capsys: pytest.CaptureFixture[str]
) -> None:
    run, ledger = made
    roll(ledger, 0)
    accept(ledger, 0)
    words = ["timeline", str(run.folder.path), "--digest", digest(0, 1).hex()]
    received = NOW + 1_000
    ledger.quarantine(NODES[0])
    assert main(words) == 0
    assert "accepted without an audit, and judged again now" in capsys.readouterr().out

    ledger.claim_audits("auditor-0", received + 3_000, 1)
    row = ledger.submission(digest(0, 1))
    assert row is not None
    ledger.finish_audit(row.sequence, b"audit", None)
    ledger.judge(
        row, state=SubmissionState.REFUSED, reason="MARGIN", audited=True, reward=None, checks=b"checks",
        verdict=b"verdict", judged_ms=received + 4_000,
    )  # fmt: skip
    assert main(words) == 0
    told = capsys.readouterr().out
    assert "refused (MARGIN) after an audit" in told and "verify: 3.00 s until auditor-0 began with it" in told
    assert main([*words, "--json"]) == 0
    (found,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert (found["state"], found["reason"], found["audited"]) == ("REFUSED", "MARGIN", True)
    assert (found["recomputed_ms"], found["judged_ms"]) == (received + 3_000, received + 4_000)
    assert found["stages"][-1]["stage"] == "verify" and found["stages"][-1]["seconds"] == 4.0


def test_a_trace_that_was_learned_from_is_told_by_the_verdict_that_let_it_in(made: tuple[Run, Ledger]) -> None:
    _, ledger = made
    roll(ledger, 0)
    accept(ledger, 0)
    received = NOW + 1_000
    for audited, after in ((True, 4_000), (True, 6_000)):  # a retro-audit, and one that the step did not wait for
        ledger.add_verdict(
            NODES[0], digest(0, 1), SubmissionState.ACCEPTED, None, audited, received + after, b"verdict"
        )
    learn(ledger, 1, 0)
    _, second = chain.newest_learned(ledger, 10)
    assert (seconds(second)[Stage.VERIFY], seconds(second)[Stage.BATCH], second.audited) == (4.0, 1.0, True)
    assert chain.complete_ms(ledger, second) == received + 4_000
    sums = Telemetry()
    sums.catch_up(ledger)
    batch = next(row for row in sums.table() if row["stage"] == Stage.BATCH)
    assert batch["mean"] == pytest.approx((4.5 + 1.0) / 2)


def test_a_terminal_shows_the_newest_that_was_learned_from_as_a_waterfall(
    played: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["timeline", str(played.folder.path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"trace {digest(1, 1).hex()[:16]}…")
    assert "accepted without an audit, in the step that made policy 2" in lines[1]
    shown = [line.split("█")[0].rstrip("▏▎▍▌▋▊▉ ").split() for line in lines[3:12]]
    assert shown[0] == ["queue", "wait", "*", "150", "ms"] and shown[5] == ["verify", "2.00", "s"]
    assert shown[8] == ["in", "all", "9.00", "s"]
    bars = [line[25:] for line in lines[3:11]]
    assert all(bar.strip() for bar in bars)
    starts = [len(bar) - len(bar.lstrip()) for bar in bars]
    assert starts == sorted(starts)
    assert any(line.startswith("* the node's own figures") for line in lines)


def test_one_trace_is_found_by_its_digest_and_a_wrong_one_is_told(
    played: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["timeline", str(played.folder.path), "--json", "--digest"]
    assert main([*words, digest(2).hex()]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["digest"], found["batch"]) == (digest(2).hex(), None)
    assert [each["stage"] for each in found["stages"]] == [*CLAIMED, "verify"]
    for wrong, told in (("0", "more than one trace digest"), ("f", "no trace whose digest"), ("g", "hex digits")):
        assert main([*words, wrong]) == 2
        assert told in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["timeline", str(played.folder.path), "--last", "0"])


def test_a_run_without_a_trace_says_so(made: tuple[Run, Ledger], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["timeline", str(made[0].folder.path), "--last", "5"]) == 2
    assert "no trace has arrived in this run yet" in capsys.readouterr().err


def test_the_last_rollouts_are_a_file_whose_slices_lie_within_each_other(
    played: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "last.json"
    assert main(["timeline", str(played.folder.path), "--last", "6", "-o", str(file)]) == 0
    assert "4 rollouts of 2 nodes" in capsys.readouterr().out
    events = json.loads(file.read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert len(names) == 3 and names[1] == "trainer" and "unchecked" in names[2]
    slices = [event for event in events if event["ph"] == "X"]
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in slices)
    _check_nested(slices)
    claimed = {event["name"] for event in slices if event["cat"] == "claimed"}
    assert claimed == {stage.words for stage in CLAIMED}
    assert {event["pid"] for event in slices if event["cat"] == "claimed"} == {2, 3}
    assert sorted(event["name"] for event in slices if event["name"].startswith("step")) == [
        "step to policy 1", "step to policy 2",
    ]  # fmt: skip
    # Two rollouts of a node at once have a line each; an arrow leads from each to its verdict and its step.
    assert {(event["pid"], event["tid"]) for event in slices if event["pid"] == 2} == {(2, 0), (2, 1)}
    arrows = defaultdict(list)
    for event in events:
        if event["ph"] in "stf":
            arrows[event["id"]].append((event["ts"], event["ph"]))
    assert [[phase for _, phase in sorted(each)] for each in arrows.values()] == [["s", "t", "f"]] * 4


def _check_nested(slices: list[dict[str, Any]]) -> None:
    """On each line, slices that overlap lie within each other: viewers show no others."""
    lines = defaultdict(list)
    for event in slices:
        lines[event["pid"], event["tid"]].append((event["ts"], -event["dur"]))
    for line in lines.values():
        open_until: list[int] = []
        for start, negative in sorted(line):
            while open_until and open_until[-1] <= start:
                open_until.pop()
            assert not open_until or start - negative <= open_until[-1]
            open_until.append(start - negative)
