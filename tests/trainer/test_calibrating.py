"""What an auditor judges a pair of engines by: measured by itself, from a person's file, or the ceilings."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import trainer.calibrating
from protocol import codec
from protocol.calibration import Calibration, Pair, check_calibration
from protocol.envelope import seal
from protocol.identity import Identity
from protocol.limits import NODE_EVIDENCE_NATS
from protocol.trace import EngineDescriptor
from protocol.verdict import CheckOutcome, Reason
from tests.trainer.fabricate import ENGINE, Gateway, make_run, one_thread
from tests.trainer.scripted_node import made_up_calibration
from trainer.audit import Auditor
from trainer.audit_result import AuditResult
from trainer.ledger import Ledger
from trainer.ledger_rows import SubmissionState
from trainer.pairs import own_pair, pair_name, pair_of
from trainer.rundir import Run
from verify.calibrate import TooNoisy, round_to_int8
from verify.finding import first_failure
from verify.scores import node_evidence
from verify.thresholds import limits_for

VLLM = EngineDescriptor("vllm", "1", "float32", "cuda:NVIDIA H200", "vllm-v2")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run, ledger = make_run(tmp_path_factory.mktemp("template") / "run")
    ledger.close()
    return run.folder.path


@pytest.fixture
def made(tmp_path: Path, template: Path) -> tuple[Run, Ledger, Gateway]:
    run, ledger = make_run(tmp_path / "run", template, group_size=4)
    gateway = Gateway(run, ledger)
    ledger.set_manifest(0, b"signed by the gateway")
    return run, ledger, gateway


def results(ledger: Ledger) -> list[AuditResult]:
    return [codec.decode(AuditResult, row.audit or b"") for row in ledger.submissions(SubmissionState.AUDITED, 100)]


def events(ledger: Ledger, kind: str = "calibration") -> list[str]:
    return [row["text"] for row in ledger.view("SELECT text FROM events WHERE kind = ? ORDER BY id", (kind,))]


def note(ledger: Ledger, pair: Pair) -> Any:
    return {row["pair"]: row["note"] for row in ledger.view("SELECT pair, note FROM pairs")}[pair_name(pair)]


def never(*_: Any, **__: Any) -> Calibration:
    raise AssertionError("measured a pair that nobody asked for")


def test_an_auditor_measures_the_runs_own_pair_when_the_run_starts_and_others_when_they_appear(
    made: tuple[Run, Ledger, Gateway], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, ledger, gateway = made
    Auditor(run, ledger, "auditor-0").begin()
    (row,) = ledger.calibrations()
    found = codec.decode(Calibration, row.body)
    check_calibration(found)
    assert found.pair == own_pair(run.config) and (found.run, found.policy_version) == (run.run, 0)
    assert row.signed is None and ledger.calibrated_pairs() == set(), "an auditor has no key"
    assert events(ledger)[0].startswith("transformers float32 cpu by transformers float32 cpu: calibrated on")
    drawn = gateway.draw(1, 0)
    gateway.submit(drawn, engine=replace(ENGINE, name="transformers"))
    monkeypatch.setattr(trainer.calibrating, "calibrate", never)
    again = Auditor(run, ledger, "auditor-0")
    again.begin()
    assert again.turn() == 4
    for result in results(ledger):
        assert first_failure(result.checks) is None
        assert result.calibration == row.digest and len(result.scores) > 2 and max(result.scores) <= 0
        outcomes = {check.name: check.outcome for check in result.checks}
        assert outcomes["margin score"] is outcomes["proof score"] is CheckOutcome.PASSED
        assert outcomes["node"] is CheckOutcome.SKIPPED
    monkeypatch.undo()
    gateway.submit(gateway.draw(1, 0))  # by the engine "reference"
    assert again.turn() == 4
    assert [each.pair for each in ledger.calibrations()] == [row.pair, pair_name(pair_of(ENGINE, run.config))]
    assert results(ledger)[-1].calibration == ledger.calibrations()[1].digest


def test_a_pair_that_cannot_be_measured_here_is_new_and_said_so_once(
    made: tuple[Run, Ledger, Gateway], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, ledger, gateway = made
    monkeypatch.setattr(trainer.calibrating, "calibrate", never)
    auditor = Auditor(run, ledger, "auditor-0")
    for _ in range(2):
        gateway.submit(gateway.draw(1, 0), engine=VLLM)
        assert auditor.turn() == 4
    for result in results(ledger):
        assert first_failure(result.checks) is None and (result.calibration, result.scores) == (None, ())
        skipped = [check.name for check in result.checks if check.outcome is CheckOutcome.SKIPPED]
        assert skipped == ["margin score", "proof score", "node"]
    assert len(events(ledger)) == 1 and "audited in full and judged by the ceilings" in events(ledger)[0]
    assert "rlverify calibrate --traces" in note(ledger, pair_of(VLLM, run.config))


def test_a_bfloat16_pair_that_nobody_measured_is_scored_provisionally_and_blamed_for_nothing(
    made: tuple[Run, Ledger, Gateway],
) -> None:
    run, ledger, _ = made
    engine = replace(VLLM, dtype="bfloat16")
    auditor = Auditor(run, ledger, "auditor-0")
    honest = Gateway(run, ledger, seed=1, dtype="bfloat16")
    honest.submit(honest.draw(8, 0), engine=engine)
    while auditor.turn():
        pass
    rows = sorted(ledger.calibrations(), key=lambda row: row.provisional)
    own, given = (codec.decode(Calibration, row.body) for row in rows)
    assert given.provisional and not own.provisional and given.proofs.edges > own.proofs.edges
    assert (given.pair.worker_engine, given.pair.worker_device) == ("", "") and given.limits == limits_for(
        "bfloat16", "bfloat16"
    )
    found = results(ledger)
    assert len(found) == 32 and all(first_failure(each.checks) is None and each.provisional for each in found)
    assert node_evidence((), sums_of(found)) < 0, "honest traces of an engine nobody measured clear themselves"
    # Weights rounded to int8: nearly every trace passes each limit by itself. How a processor rounds decides whether
    # one draw in a hundred goes past the hard margin; that check stands beside the evidence, and may refuse.
    cheat = Gateway(run, ledger, seed=2, dtype="bfloat16")
    round_to_int8(cheat.actor(0).model)
    cheat.submit(cheat.draw(8, 0), engine=engine)
    while auditor.turn():
        pass
    found = results(ledger)[32:]
    failed = [check.reason for each in found if (check := first_failure(each.checks)) is not None]
    assert node_evidence((), sums_of(found)) > NODE_EVIDENCE_NATS and set(failed) <= {
        Reason.PAIR_EVIDENCE,
        Reason.MARGIN,
    }
    assert failed.count(Reason.MARGIN) < len(found) // 4
    name = pair_name(pair_of(engine, run.config))
    assert ledger.calibrated_pairs() == set() and len(ledger.calibrations()) == 2
    assert "rlverify calibrate --traces" in note(ledger, pair_of(engine, run.config)), name


def test_a_new_pair_is_measured_on_the_first_traces_of_a_node_that_is_trusted(
    made: tuple[Run, Ledger, Gateway],
) -> None:
    run, ledger, gateway = made
    auditor = Auditor(run, ledger, "auditor-0")
    gateway.submit(gateway.draw(2, 0), engine=VLLM)
    assert auditor.turn() == 8
    assert ledger.calibrations() == [], "nobody is trusted, so strangers do not say what honest is"
    ledger.name_nodes(home=None, always=(), anew=(gateway.node.node,))
    gateway.submit(gateway.draw(2, 0), engine=VLLM)
    assert auditor.turn() == 8
    assert ledger.calibrations() == [] and "--trust" in note(ledger, pair_of(VLLM, run.config))
    gateway.submit(gateway.draw(24, 0), engine=VLLM)
    while auditor.turn():
        pass
    (row,) = ledger.calibrations()
    found = codec.decode(Calibration, row.body)
    check_calibration(found)
    assert found.pair == pair_of(VLLM, run.config) and not found.provisional and found.sample.tokens >= 1024
    assert "by traces of trusted nodes" in events(ledger)[-1] and note(ledger, found.pair) is None
    assert results(ledger)[-1].calibration == row.digest


def sums_of(found: list[AuditResult]) -> tuple[float, ...]:
    return tuple(map(sum, zip(*(each.scores for each in found), strict=True)))


def put(run: Run, calibration: Calibration, name: str = "vllm.msgpack") -> None:
    """What `rlverify calibrate` writes, under a key of whoever measured."""
    run.folder.calibrations.mkdir(exist_ok=True)
    signed = seal(Identity(b"\x05" * 32), calibration)
    (run.folder.calibrations / name).write_bytes(codec.encode(signed))


def test_a_persons_file_makes_a_pair_calibrated_while_the_run_goes_on(made: tuple[Run, Ledger, Gateway]) -> None:
    run, ledger, gateway = made
    auditor = Auditor(run, ledger, "auditor-0")
    gateway.submit(gateway.draw(1, 0), engine=VLLM)
    auditor.turn()
    pair = pair_of(VLLM, run.config)
    put(run, replace(made_up_calibration(run, pair), run=bytes(32), policy_version=7))
    gateway.submit(gateway.draw(1, 0), engine=VLLM)
    auditor.turn()
    (row,) = ledger.calibrations()
    adopted = codec.decode(Calibration, row.body)
    assert (adopted.run, adopted.policy_version) == (run.run, 0), "as of this run, and of the version with that root"
    assert [result.calibration for result in results(ledger)] == [None] * 4 + [row.digest] * 4
    assert note(ledger, pair) is None
    assert events(ledger)[-1].startswith(f"{pair_name(pair)}: calibrated from vllm.msgpack")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"policy_root": b"\x09" * 32}, "a policy that is none of this run"),
        ({"run": b"\x09" * 32}, "a policy that is none of this run"),
        ({"verifier_device": "cuda"}, "this trainer's are another"),
        ({"verifier_engine": "vllm"}, "this trainer's are another"),
        ({"logprob_tolerance": 0.02}, "above the ceilings: logprob_tolerance 0.02"),
    ],
)
def test_a_file_that_does_not_fit_is_not_used_and_said_why(
    made: tuple[Run, Ledger, Gateway], changes: dict[str, Any], why: str
) -> None:
    run, ledger, _ = made
    calibration = made_up_calibration(run, pair_of(VLLM, run.config))
    for name, value in changes.items():
        for part in ("pair", "limits"):
            if name in {field.name for field in dataclasses.fields(getattr(calibration, part))}:
                calibration = replace(calibration, **{part: replace(getattr(calibration, part), **{name: value})})
        if hasattr(calibration, name):
            calibration = replace(calibration, **{name: value})
    put(run, calibration)
    Auditor(run, ledger, "auditor-0").begin()
    assert [row.pair for row in ledger.calibrations()] == [pair_name(own_pair(run.config))]
    (text,) = events(ledger, "fault")
    assert text.startswith("calibration vllm.msgpack is not used") and why in text


def test_a_file_that_is_no_calibration_is_not_used_and_said_why(made: tuple[Run, Ledger, Gateway]) -> None:
    run, ledger, _ = made
    run.folder.calibrations.mkdir()
    (run.folder.calibrations / "damaged.msgpack").write_bytes(b"\xc1 damaged")
    Auditor(run, ledger, "auditor-0").begin()
    (text,) = events(ledger, "fault")
    assert "damaged.msgpack is not a calibration" in text


@pytest.mark.parametrize("error", [TooNoisy("this pair is too noisy"), MemoryError("no room"), OSError("disk gone")])
def test_a_pair_that_could_not_be_measured_stays_new_and_nobody_is_blamed(
    made: tuple[Run, Ledger, Gateway], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    run, ledger, gateway = made
    tries: list[int] = []

    def fail(*_: Any, **about: Any) -> Calibration:
        tries.append(about["policy_version"])
        raise error

    monkeypatch.setattr(trainer.calibrating, "calibrate", fail)
    auditor = Auditor(run, ledger, "auditor-0")
    auditor.begin()
    for _ in range(2):
        gateway.submit(gateway.draw(1, 0), engine=replace(ENGINE, name="transformers"))
        assert auditor.turn() == 4
    assert tries == [0], "tried once"
    assert all(first_failure(result.checks) is None and result.fault is None for result in results(ledger))
    (text,) = events(ledger)
    assert str(error) in text and str(error) in note(ledger, own_pair(run.config))


def test_a_measurement_that_ended_an_auditor_is_not_tried_again(
    made: tuple[Run, Ledger, Gateway], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, ledger, _ = made
    ledger.try_pair(pair_name(own_pair(run.config)), 0, 0)  # and then it was killed
    monkeypatch.setattr(trainer.calibrating, "calibrate", never)
    Auditor(run, ledger, "auditor-0").begin()
    assert "an auditor ended while it measured this pair on policy version 0" in events(ledger)[0]


def test_no_stranger_fills_the_ledger_with_names_of_engines(made: tuple[Run, Ledger, Gateway]) -> None:
    _, ledger, _ = made
    news = [ledger.note_pair(f"engine {number}", 0, "new") for number in range(1000)]
    assert news.count(True) == 64 and len(ledger.view("SELECT * FROM pairs")) == 64
