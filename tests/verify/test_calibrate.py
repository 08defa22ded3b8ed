"""Calibrations: measured on the embedded policy, refused where they would say nothing, and judging by one."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from protocol import codec
from protocol.calibration import Calibration, Pair, check_calibration
from protocol.envelope import Signed, seal, unseal
from protocol.environments.base import load
from protocol.errors import UsageError
from protocol.identity import Identity
from protocol.lease import Lease
from protocol.limits import NODE_EVIDENCE_NATS
from protocol.trace import Trace, TraceFile
from protocol.verdict import Check, CheckOutcome, Fingerprint, Outcome, Reason, Verdict
from verify.calibrate import (
    MIN_CHUNKS,
    MIN_TOKENS,
    Measured,
    Subject,
    TooFew,
    TooNoisy,
    calibrate,
    derive,
    draw_specimens,
    imitation_means,
    measure,
    round_to_int8,
)
from verify.check import DEAR, NEEDS_LOG, NO_CALIBRATION, node_check, unaudited, with_node
from verify.cli import main
from verify.files import read_evidence
from verify.finding import first_failure
from verify.judge import judge
from verify.model import PolicyModel
from verify.prefill import Verifier
from verify.reference import ReferenceRun, play
from verify.report import Judged, calibration_json, disagreement, unchecked
from verify.scores import power, table_scores
from verify.toploc import ChunkResult

torch.set_num_threads(1)
EMBEDDED = Path(__file__).parents[2] / "trainer" / "embedded"
TOOLS = ("tools8@1", "")
NOBODY = Subject(bytes(32), 0, bytes(32), Pair("reference", "float32", "cpu", "transformers", "float32", "cpu"))


@dataclass(frozen=True, slots=True)
class Pupil:
    """The embedded policy as worker and verifier, its calibration, and honest traces of a run."""

    verifier: Verifier
    calibration: Calibration
    run: ReferenceRun
    traces: list[tuple[Lease, Trace]]


@pytest.fixture(scope="module")
def pupil() -> Pupil:
    verifier = Verifier(EMBEDDED)
    calibration = calibrate(
        EMBEDDED, verifier, worker_dtype="float32", environments=[TOOLS], created_ms=7, worker_engine="reference"
    )
    run, environment = ReferenceRun.found(EMBEDDED, TOOLS[0], seed=5), load(*TOOLS)
    leases = [run.lease(task, environment) for task in range(1_000, 1_004)]
    slots = [(lease, slot.index) for lease in leases for slot in lease.slots]
    traces = play(PolicyModel(EMBEDDED, "float32", "cpu"), run.tokenizer, slots)
    return Pupil(verifier, calibration, run, [(lease, each) for (lease, _), each in zip(slots, traces, strict=True)])


def measured(traces: int = 40, tokens: int = 64, **changes: Any) -> list[Measured]:
    """Made up: honest float32, but for what `changes` replace."""
    drawn = np.random.default_rng(0)
    chunk = ChunkResult(0, 32, 0, 0, 0.0, 0.0, 128, 0)
    found = []
    for _ in range(traces):
        logprobs = np.log(drawn.uniform(0.05, 1.0, tokens))
        plain = Measured(np.zeros(tokens), np.zeros(tokens), logprobs, 1.0, (chunk, chunk), torch.zeros(tokens, 4))
        found.append(replace(plain, **changes))
    return found


# --- measuring ---


def test_the_embedded_policy_is_calibrated_and_the_object_is_valid(pupil: Pupil) -> None:
    found = pupil.calibration
    check_calibration(found)
    assert codec.decode(Calibration, codec.encode(found)) == found
    assert found.pair == Pair("reference", "float32", "cpu", "transformers", "float32", "cpu")
    assert found.sample.tokens >= MIN_TOKENS and found.sample.chunks >= MIN_CHUNKS
    assert found.sample.mismatches == 0 and found.limits.margin_hard == 0.01
    assert (found.run, found.policy_root, found.created_ms) == (bytes(32), pupil.run.root, 7)


def test_the_same_policy_gives_the_same_calibration(pupil: Pupil) -> None:
    again = calibrate(
        EMBEDDED, pupil.verifier, worker_dtype="float32", environments=[TOOLS], created_ms=7, worker_engine="reference"
    )
    assert again == pupil.calibration


def test_int8_weights_of_the_embedded_policy_are_told_within_32_traces(pupil: Pupil) -> None:
    worker = PolicyModel(EMBEDDED, "float32", "cpu")
    specimens = draw_specimens(worker, EMBEDDED, [("guess@1", "")], 32, 64)
    ours = measure(pupil.verifier, specimens)
    round_to_int8(worker)
    means = imitation_means(worker, specimens, ours)
    needed = power(pupil.calibration.proofs, means, random=np.random.default_rng(0), alternatives=9)
    assert needed.most_of <= 32


@pytest.mark.parametrize("environment", ["letters@1", "guess@1"])
def test_short_tasks_are_topped_up_until_there_is_enough(environment: str) -> None:
    specimens = draw_specimens(PolicyModel(EMBEDDED, "float32", "cpu"), EMBEDDED, [(environment, "")], 8, 64)
    assert sum(len(each.passage.generated) for each in specimens) >= MIN_TOKENS
    assert sum(len(each.passage.generated) % 32 >= 8 for each in specimens) + 2 * len(specimens) >= MIN_CHUNKS


def test_traces_of_trusted_nodes_calibrate_their_engine(pupil: Pupil) -> None:
    traces = [(trace, lease) for lease, trace in pupil.traces] * 3
    renamed = [(replace(trace, engine=replace(trace.engine, name="vllm")), lease) for trace, lease in traces]
    options: dict[str, Any] = {"worker_dtype": "float32", "environments": (), "created_ms": 0, "run": pupil.run.run}
    found = calibrate(EMBEDDED, pupil.verifier, trusted=renamed, **options)
    assert (found.pair.worker_engine, found.run, found.sample.traces) == ("vllm", pupil.run.run, 96)
    with pytest.raises(UsageError, match="one engine"):
        calibrate(EMBEDDED, pupil.verifier, trusted=[*renamed, traces[0]], **options)
    with pytest.raises(TooFew, match=r"more tokens and \d+ more chunks"):
        calibrate(EMBEDDED, pupil.verifier, trusted=renamed[:20], **options)


# --- deriving ---


def test_a_small_sample_says_how_many_more() -> None:
    with pytest.raises(TooFew, match="384 more tokens and 12 more chunks of 8 tokens or more"):
        derive(NOBODY, measured(10), np.full(8, 2.0), 0)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"margins": np.full(64, 0.006)}, "margin_hard"),
        ({"differences": np.full(64, 0.02)}, "logprob_tolerance|margin_hard"),
        ({"chunks": (ChunkResult(0, 32, 9, 0, 0.0, 0.0, 128, 0),) * 2}, "exponent_mismatches"),
        ({"chunks": (ChunkResult(0, 32, 0, 9, 0.0, 0.0, 128, 0),) * 2}, "sign_mismatches"),
        ({"chunks": (ChunkResult(0, 32, 0, 0, 0.2, 0.0, 128, 0),) * 2}, "mantissa_mean"),
        ({"chunks": (ChunkResult(0, 32, 0, 0, 0.0, 1.0, 128, 0),) * 2}, "mantissa_median"),
    ],
)
def test_a_pair_that_needs_more_than_the_ceiling_gets_no_calibration(change: dict[str, Any], what: str) -> None:
    with pytest.raises(TooNoisy, match=rf"too noisy to tell int8 from honest: use matching dtypes \(({what}) needs"):
        derive(NOBODY, measured(**change), np.full(8, 2.0), 0)


def test_a_pair_of_which_int8_looks_honest_gets_no_calibration() -> None:
    with pytest.raises(TooNoisy, match=r"int8 gives .* nats a chunk"):
        derive(NOBODY, measured(), np.zeros(8), 0)
    assert derive(NOBODY, measured(), np.full(8, 2.0), 0).sample.int8_nats > 1


def test_what_is_not_a_number_makes_no_limit() -> None:
    with pytest.raises(TooNoisy):
        derive(NOBODY, measured(differences=np.full(64, np.nan)), np.full(8, 2.0), 0)


# --- judging ---


def opened(pupil: Pupil, tmp_path: Path, number: int = 0, **parts: Any) -> Path:
    lease, trace = pupil.traces[number]
    file = replace(pupil.run.file(lease, trace), **parts)
    path = tmp_path / f"{number}.msgpack"
    path.write_bytes(codec.encode(file))
    return path


def sealed(pupil: Pupil, signer: Identity | None = None, **changes: Any) -> Signed:
    return seal(signer or pupil.run.trainer, replace(pupil.calibration, **changes))


def verdict_of(pupil: Pupil, file: Path, signer: Identity, calibration: bytes | None = None) -> Signed:
    evidence = read_evidence(file)
    lease, trace = evidence.lease, evidence.trace
    body = Verdict(
        run=lease.run,
        trace_digest=evidence.signed_trace.digest,
        lease_id=lease.lease_id,
        slot=trace.slot,
        node=trace.node,
        policy_version=lease.policy_version,
        policy_root=lease.policy_root,
        outcome=Outcome.ACCEPTED,
        reason=None,
        audited=True,
        reward=trace.reward,
        checks=(),
        calibration=calibration,
        scores=(),
        verifier=Fingerprint("", "", "", ""),
        judged_ms=0,
    )
    return seal(signer, body)


def by_name(judged: Judged) -> dict[str, tuple[CheckOutcome, str]]:
    return {check.name: (check.outcome, check.detail) for check in judged.checks}


def test_honest_traces_pass_by_the_calibration_in_their_file_and_are_scored(pupil: Pupil, tmp_path: Path) -> None:
    for number in range(3):
        path = opened(pupil, tmp_path, number, calibration=sealed(pupil))
        judged = judge(read_evidence(path), EMBEDDED)
        assert judged.outcome is Outcome.ACCEPTED
        found = by_name(judged)
        assert [name for name in found if name in DEAR] == list(DEAR)
        assert found["margin score"][0] is found["proof score"][0] is CheckOutcome.PASSED
        assert found["node"] == (CheckOutcome.SKIPPED, NEEDS_LOG)
        assert len(judged.scores) == 9 and max(judged.scores) < 0.5
        assert judged.calibration == sealed(pupil).digest


def test_without_a_calibration_the_scores_say_why_they_are_missing(pupil: Pupil, tmp_path: Path) -> None:
    judged = judge(read_evidence(opened(pupil, tmp_path)), EMBEDDED)
    assert judged.outcome is Outcome.ACCEPTED and judged.scores == () and judged.calibration is None
    for name in ("margin score", "proof score", "node"):
        assert by_name(judged)[name] == (CheckOutcome.SKIPPED, NO_CALIBRATION)
    assert {check.detail for check in unaudited()} == {"not drawn for audit"}


def test_checks_that_no_model_leaves_out_say_that_and_not_that_nobody_drew_the_trace(
    pupil: Pupil, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", str(opened(pupil, tmp_path)), "--policy", str(EMBEDDED), "--no-model"]) == 0
    told = capsys.readouterr().out
    assert "not run, --no-model was given: margins, margin score" in told and "drawn" not in told


def test_a_trace_with_small_errors_everywhere_is_refused_by_its_score(pupil: Pupil, tmp_path: Path) -> None:
    """Weights rounded to int8 pass limits as wide as bfloat16's; the sum over 20 chunks does not."""
    wide = replace(pupil.calibration.limits, mantissa_mean=128.0, mantissa_median=128.0)
    worker = PolicyModel(EMBEDDED, "float32", "cpu")
    round_to_int8(worker)
    environment = load(*TOOLS)
    lease = pupil.run.lease(77, environment)
    traces = play(worker, pupil.run.tokenizer, [(lease, slot.index) for slot in lease.slots])
    sums: tuple[float, ...] = ()
    from verify.check import audit_checks
    from verify.judge import recompute
    from verify.scores import add_scores

    refused = []
    for trace, ours in zip(traces, recompute(pupil.verifier, [(each, lease) for each in traces]), strict=True):
        held = replace(pupil.calibration, limits=replace(wide, margin_hard=9.0, logprob_tolerance=9.0))
        audited = audit_checks(trace, lease, ours, held.limits, held)
        checks = with_node(audited.checks, audited.scores, sums)
        refused.append(first_failure(checks))
        sums = add_scores(sums, audited.scores)
    assert refused[-1] is not None and refused[-1].reason is Reason.NODE_EVIDENCE
    assert refused[-1].value is not None and refused[-1].value > NODE_EVIDENCE_NATS
    assert refused[0] is None


def test_the_node_check_is_left_out_after_a_failure_and_without_scores(pupil: Pupil) -> None:
    checks = unaudited()
    assert with_node(checks, (), (99.0,)) == checks
    assert with_node(checks, (1.0,), (2.0,))[-1].outcome is CheckOutcome.PASSED
    found = node_check((1.0,), (13.0,))
    assert (found.outcome, found.reason) == (CheckOutcome.FAILED, Reason.NODE_EVIDENCE)
    failed = (found, *checks[1:])
    assert with_node(failed, (1.0,), ()) == failed


def test_a_calibration_that_is_not_the_verdict_s_is_unusable(pupil: Pupil, tmp_path: Path) -> None:
    plain = opened(pupil, tmp_path)
    signed = sealed(pupil)
    for digest, usable in ((signed.digest, True), (bytes(32), False), (None, False)):
        verdict = verdict_of(pupil, plain, pupil.run.trainer, digest)
        path = opened(pupil, tmp_path, 1, calibration=signed, verdict=verdict)
        if usable:
            assert read_evidence(path).calibration is not None
        else:
            with pytest.raises(UsageError, match="not the one its verdict names"):
                read_evidence(path)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"pair": replace(NOBODY.pair, worker_engine="vllm")}, "holds for vllm float32 cpu, the trace comes from"),
        ({"pair": replace(NOBODY.pair, worker_device="cuda")}, "the trace comes from reference float32 cpu"),
        ({"run": b"\x07" * 32}, "made for the run 0707"),
        ({"pair": replace(NOBODY.pair, verifier_dtype="float16")}, "no limits were measured"),
    ],
)
def test_a_calibration_of_something_else_is_unusable(
    pupil: Pupil, tmp_path: Path, changes: dict[str, Any], why: str
) -> None:
    with pytest.raises(UsageError, match=why):
        read_evidence(opened(pupil, tmp_path, calibration=sealed(pupil, **changes)))


def test_a_calibration_above_the_ceilings_or_by_another_signer_is_unusable(pupil: Pupil, tmp_path: Path) -> None:
    generous = replace(pupil.calibration.limits, mantissa_mean=1.0)
    with pytest.raises(UsageError, match=r"above the ceilings.*mantissa_mean 1, at most 0\.15"):
        read_evidence(opened(pupil, tmp_path, calibration=sealed(pupil, limits=generous)))
    with pytest.raises(UsageError, match="BAD_SIGNATURE"):
        read_evidence(opened(pupil, tmp_path, calibration=sealed(pupil, Identity.generate())))


def refusal(pupil: Pupil, file: Path, name: str, reason: Reason) -> Signed:
    """The trainer's refusal of a trace by one check."""
    accepted = codec.decode(Verdict, verdict_of(pupil, file, pupil.run.trainer, bytes(32)).payload)
    failed = Check(name, CheckOutcome.FAILED, reason, 20.0, NODE_EVIDENCE_NATS, None, None, "")
    return seal(
        pupil.run.trainer,
        replace(accepted, outcome=Outcome.REFUSED, reason=reason, reward=None, checks=(failed,), scores=(1.0,)),
    )


@pytest.mark.parametrize(
    ("name", "reason", "why"),
    [
        ("node", Reason.NODE_EVIDENCE, "calibration is not in the file"),
        ("proof score", Reason.PROOF, "calibration is not in the file"),
    ],
)
def test_a_refusal_by_a_check_that_only_the_trainer_can_do_is_no_disagreement(
    pupil: Pupil, tmp_path: Path, name: str, reason: Reason, why: str
) -> None:
    verdict = refusal(pupil, opened(pupil, tmp_path), name, reason)
    evidence = read_evidence(opened(pupil, tmp_path, verdict=verdict))
    assert evidence.verdict is not None
    judged = judge(evidence, EMBEDDED)
    assert disagreement(judged, evidence.signed_trace.digest, evidence.verdict) is None
    assert why in (unchecked(judged, evidence.verdict) or "")
    margins = refusal(pupil, opened(pupil, tmp_path), "margins", Reason.MARGIN)
    theirs = codec.decode(Verdict, margins.payload)
    assert "disagrees at check 'margins'" in (disagreement(judged, evidence.signed_trace.digest, theirs) or "")


# --- the commands ---


def answer(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, Any]:
    code = main(["check", "--policy", str(EMBEDDED), "--json", *map(str, arguments)])
    out, err = capsys.readouterr()
    return code, json.loads(out) if out else err


def test_check_takes_a_calibration_of_one_s_own(
    pupil: Pupil, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "own.calibration"
    own.write_bytes(codec.encode(sealed(pupil, Identity.generate())))
    code, found = answer(capsys, opened(pupil, tmp_path), "--calibration", own)
    assert (code, found["outcome"], len(found["scores"])) == (0, "ACCEPTED", 9)
    assert found["calibration"] == sealed(pupil).digest.hex()
    own.write_bytes(b"\x00")
    code, error = answer(capsys, opened(pupil, tmp_path), "--calibration", own)
    assert code == 2 and "is not a calibration" in error


def test_check_takes_a_verdict_from_a_file_and_none_of_another_key(
    pupil: Pupil, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, beside = opened(pupil, tmp_path), tmp_path / "verdict"
    beside.write_bytes(codec.encode(verdict_of(pupil, path, pupil.run.trainer)))
    code, found = answer(capsys, path, "--verdict", beside)
    assert code == 0 and found["trainer"]["agrees"]
    other = opened(pupil, tmp_path, 1)
    code, error = answer(capsys, other, "--verdict", beside)
    assert code == 2 and f"{beside} is the verdict on another trace" in error and "wrote with it" in error
    beside.write_bytes(codec.encode(verdict_of(pupil, path, Identity.generate())))
    code, error = answer(capsys, path, "--verdict", beside)
    assert code == 2 and "no verdict of this run's trainer" in error


def test_calibrate_writes_a_signed_calibration_and_makes_its_key(
    pupil: Pupil, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, key = tmp_path / "out", tmp_path / "key"
    folder = tmp_path / "traces"
    folder.mkdir()
    for number in range(len(pupil.traces)):
        (folder / f"{number}.msgpack").write_bytes(opened(pupil, tmp_path, number).read_bytes())
    arguments = ["calibrate", "--policy", EMBEDDED, "--worker-dtype", "float32", "--verifier-dtype", "float32"]
    common = [str(each) for each in (*arguments, "--key", key, "--out", out)]
    assert main([*common, "--traces", str(folder)]) == 2
    assert "more tokens" in capsys.readouterr().err and not out.exists() and not key.exists()
    assert main([*common, "--worker-engine", "reference"]) == 0
    told = capsys.readouterr().out
    assert "nats a chunk" in told and "mantissa mean" in told
    assert re.search(r"^policy   root [0-9a-f]{16}…$", told, re.M), "a folder does not say which version it is"
    signed = codec.decode(Signed, out.read_bytes())
    found = unseal(Calibration, signed, signer=signed.signer)
    assert found.limits == pupil.calibration.limits and found.margins == pupil.calibration.margins
    assert calibration_json(found, out)["policy_version"] is None
    assert calibration_json(replace(found, run=b"\1" * 32, policy_version=7), out)["policy_version"] == 7
    assert main(common) == 2 and "exists already" in capsys.readouterr().err


def test_calibrate_refuses_a_pair_that_is_too_noisy_and_traces_that_are_not_honest(
    pupil: Pupil, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    arguments = ["calibrate", "--policy", EMBEDDED, "--worker-dtype", "bfloat16", "--out", out, "--key", tmp_path / "k"]
    common = [str(each) for each in arguments]
    assert main([*common, "--verifier-dtype", "float32"]) == 1
    assert "too noisy to tell int8 from honest: use matching dtypes" in capsys.readouterr().err
    assert main([*common, "--verifier-dtype", "float16"]) == 2
    assert "no limits were measured" in capsys.readouterr().err
    lease, trace = pupil.traces[0]
    forged = pupil.run.file(lease, replace(trace, reward=trace.reward + 1))
    (tmp_path / "forged.msgpack").write_bytes(codec.encode(forged))
    assert main([*common, "--verifier-dtype", "bfloat16", "--traces", str(tmp_path)]) == 2
    assert "is not honest: REFUSED (REWARD)" in capsys.readouterr().err
    assert not out.exists()


def test_a_table_of_the_embedded_policy_says_nothing_against_honest_traces(pupil: Pupil) -> None:
    specimens = draw_specimens(PolicyModel(EMBEDDED, "float32", "cpu"), EMBEDDED, [("guess@1", "")], 64, 64)
    for each in measure(pupil.verifier, specimens):
        assert max(table_scores(pupil.calibration.margins, each.margins)) < 0
        assert max(table_scores(pupil.calibration.proofs, each.mantissa_means)) <= 0


def test_trace_files_keep_their_calibration(pupil: Pupil) -> None:
    lease, trace = pupil.traces[0]
    file = pupil.run.file(lease, trace, calibration=sealed(pupil))
    assert codec.decode(TraceFile, codec.encode(file)) == file
