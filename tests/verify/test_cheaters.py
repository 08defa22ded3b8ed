"""Every cheat by its name, against honest traces of the real engine and the real recomputation: each is refused
for its own reason, by a margin, and honest traces pass. Attacks: SPEC 13."""

from __future__ import annotations

import os
import shutil
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from node.transformers_engine import TransformersEngine
from protocol import codec
from protocol.calibration import Limits
from protocol.envelope import seal
from protocol.errors import UsageError
from protocol.identity import Identity
from protocol.lease import Lease
from protocol.trace import Span, SpanKind, Trace, TraceFile
from protocol.verdict import CheckOutcome, Fingerprint, Outcome, Reason, Verdict
from tests.studio import TRAINER, Rollout, first_rollout
from verify.cli import main
from verify.files import read_evidence, require_policy
from verify.judge import judge
from verify.report import Judged
from verify.toploc import ChunkResult, judge_proofs

SOMEONE = Identity(b"\x11" * 32)


@pytest.fixture
def verdict(studio, tmp_path: Path) -> Callable[[TraceFile], Judged]:
    def run(file: TraceFile) -> Judged:
        path = tmp_path / "trace.msgpack"
        path.write_bytes(codec.encode(file))
        return judge(read_evidence(path), studio.policy)

    return run


def refused(judged: Judged, reason: Reason) -> None:
    assert (judged.outcome, judged.reason) == (Outcome.REFUSED, reason), judged.detail
    failed = [check for check in judged.checks if check.outcome is CheckOutcome.FAILED]
    assert len(failed) == 1 and failed[0].reason is reason
    if failed[0].value is not None and failed[0].limit is not None and reason in (Reason.MARGIN, Reason.PROOF):
        assert failed[0].value > 1.5 * failed[0].limit, "refused, but not by a margin"


def generated_change(trace: Trace, place: int, token: int) -> Trace:
    tokens = list(trace.tokens)
    tokens[trace.generated()[place]] = token
    return replace(trace, tokens=tuple(tokens))


# --- honest ---


@pytest.mark.parametrize("environment", ["tools8@1", "guess@1"])
def test_honest_traces_pass_every_check_with_their_proofs_exact(studio, verdict, environment: str) -> None:
    for task in range(8):
        judged = verdict(studio.rollout(environment, task).file())
        assert judged.outcome is Outcome.ACCEPTED, (task, judged.detail)
        assert judged.audited
        left = {check.name for check in judged.checks if check.outcome is not CheckOutcome.PASSED}
        assert left == {"margin score", "proof score", "node"}, "all but what needs a calibration or a log"


# --- accounting ---


def test_a_trace_signed_by_another_key_is_refused(long_rollout, verdict) -> None:
    refused(verdict(long_rollout.file(node=SOMEONE)), Reason.SIGNATURE)


def test_a_token_changed_after_signing_is_refused(long_rollout, verdict) -> None:
    file = long_rollout.file()
    payload = codec.encode(generated_change(long_rollout.trace, 0, 50))
    refused(verdict(replace(file, trace=replace(file.trace, payload=payload))), Reason.SIGNATURE)


def test_a_copy_re_signed_under_another_identity_is_refused(long_rollout, verdict) -> None:
    stolen = replace(long_rollout.trace, node=SOMEONE.node)
    refused(verdict(long_rollout.file(trace=stolen, node=SOMEONE)), Reason.LEASE_NOT_YOURS)


def test_a_trace_of_another_run_is_refused(long_rollout, verdict) -> None:
    refused(verdict(long_rollout.file(trace=replace(long_rollout.trace, run=b"\x01" * 32))), Reason.WRONG_RUN)


def test_a_trace_for_a_lease_it_does_not_hold_is_refused(long_rollout, verdict) -> None:
    other = replace(long_rollout.trace, lease_id=b"\x02" * 16)
    refused(verdict(long_rollout.file(trace=other)), Reason.LEASE_UNKNOWN)


def test_a_slot_that_was_not_leased_is_refused(long_rollout, verdict) -> None:
    refused(verdict(long_rollout.file(trace=replace(long_rollout.trace, slot=3))), Reason.SLOT_NOT_LEASED)


def test_a_trace_after_its_deadline_is_refused(long_rollout, verdict) -> None:
    refused(verdict(long_rollout.file(late_ms=120_000)), Reason.LEASE_EXPIRED)


# --- structure ---


def test_an_empty_trace_is_refused(long_rollout, verdict) -> None:
    empty = replace(long_rollout.trace, tokens=(), spans=(), logprobs=(), proofs=())
    refused(verdict(long_rollout.file(trace=empty)), Reason.STRUCTURE)


@pytest.mark.parametrize(
    "change",
    [
        lambda spans: spans[:-1],
        lambda spans: (*spans, Span(SpanKind.OBSERVED, 1)),
        lambda spans: (Span(SpanKind.OBSERVED, spans[0].length), *spans[1:]),
        lambda spans: (spans[0], Span(SpanKind.GENERATED, spans[1].length), *spans[2:]),
        lambda spans: (Span(SpanKind.GENERATED, 0), *spans),
    ],
    ids=["gap", "beyond the end", "begins observed", "not alternating", "empty span"],
)
def test_spans_that_do_not_fit_are_refused(long_rollout, verdict, change) -> None:
    changed = replace(long_rollout.trace, spans=tuple(change(long_rollout.trace.spans)))
    refused(verdict(long_rollout.file(trace=changed)), Reason.STRUCTURE)


def test_missing_logprobs_are_refused(long_rollout, verdict) -> None:
    changed = replace(long_rollout.trace, logprobs=long_rollout.trace.logprobs[:-1])
    refused(verdict(long_rollout.file(trace=changed)), Reason.STRUCTURE)


def test_a_trace_longer_than_its_lease_is_refused(long_rollout, verdict) -> None:
    shorter = replace(long_rollout.lease, max_tokens=len(long_rollout.trace.tokens) - 1)
    refused(verdict(long_rollout.file(lease=shorter)), Reason.TOO_LONG)


def test_a_token_id_outside_the_vocabulary_is_refused(long_rollout, verdict) -> None:
    refused(verdict(long_rollout.file(trace=generated_change(long_rollout.trace, 2, 10_000))), Reason.TOKEN_RANGE)


def test_another_policy_than_leased_is_refused(long_rollout, verdict) -> None:
    other = replace(long_rollout.trace, policy_version=1, policy_root=b"\x03" * 32)
    refused(verdict(long_rollout.file(trace=other)), Reason.POLICY)


def test_an_engine_of_a_dtype_without_limits_is_refused(long_rollout, verdict) -> None:
    other = replace(long_rollout.trace, engine=replace(long_rollout.trace.engine, dtype="float16"))
    refused(verdict(long_rollout.file(trace=other)), Reason.ENGINE)


# --- replay ---


def test_tokens_after_the_stop_token_are_refused(long_rollout, verdict) -> None:
    trace = long_rollout.trace
    spans = (*trace.spans[:-1], Span(SpanKind.GENERATED, trace.spans[-1].length + 1))
    padded = replace(trace, tokens=(*trace.tokens, trace.tokens[-1]), spans=spans, logprobs=(*trace.logprobs, -0.5))
    refused(verdict(long_rollout.file(trace=padded)), Reason.STOP_RULE)


def test_a_trace_cut_off_before_its_end_is_refused(long_rollout, verdict) -> None:
    trace = long_rollout.trace
    first = trace.spans[0].length
    cut = replace(
        trace, tokens=trace.tokens[: first - 1], spans=(Span(SpanKind.GENERATED, first - 1),),
        logprobs=trace.logprobs[: first - 1], proofs=short_proofs(trace, first - 1),
    )  # fmt: skip
    refused(verdict(long_rollout.file(trace=cut)), Reason.STOP_RULE)


def short_proofs(trace: Trace, tokens: int) -> tuple[bytes, ...]:
    return trace.proofs[: -(-tokens // 32)]


def test_a_suppressed_stop_token_is_refused(long_rollout, verdict) -> None:
    trace = long_rollout.trace
    stop = trace.spans[0].length - 1
    refused(verdict(long_rollout.file(trace=generated_change(trace, stop, 50))), Reason.STOP_RULE)


def test_an_early_stop_token_is_refused_by_its_margin(studio, long_rollout, verdict) -> None:
    trace = long_rollout.trace
    last = len(trace.generated()) - 1
    place = trace.generated()[last - 1]
    early = replace(
        trace, tokens=(*trace.tokens[:place], trace.tokens[-1]),
        spans=(*trace.spans[:-1], Span(SpanKind.GENERATED, trace.spans[-1].length - 1)),
        logprobs=trace.logprobs[:-1], reward=0.0,
    )  # fmt: skip
    judged = verdict(long_rollout.file(trace=early))
    assert judged.outcome is Outcome.REFUSED and judged.reason in (Reason.MARGIN, Reason.REWARD)


def test_a_forged_observation_is_refused(long_rollout, verdict) -> None:
    trace = long_rollout.trace
    tokens = list(trace.tokens)
    tokens[trace.spans[0].length + 1] ^= 1
    refused(verdict(long_rollout.file(trace=replace(trace, tokens=tuple(tokens)))), Reason.OBSERVATION)


def test_a_forged_reward_is_refused(long_rollout, verdict) -> None:
    forged = replace(long_rollout.trace, reward=1.0 - long_rollout.trace.reward)
    refused(verdict(long_rollout.file(trace=forged)), Reason.REWARD)


# --- the draw ---


def cheat(studio, verdict, draw: Callable[[Lease], Trace], *reasons: Reason, wanted: int = 4) -> None:
    """Draw the cheater's way until `wanted` traces are not the one honest completion: each is refused for `reasons`."""
    dishonest = 0
    for task in range(60):
        lease = studio.lease(task=task)
        trace = draw(lease)
        if trace.tokens == studio.draw(lease).tokens:
            continue
        dishonest += 1
        judged = verdict(Rollout(studio.genesis, lease, trace).file())
        assert judged.outcome is Outcome.REFUSED, f"task {task} passed"
        assert judged.reason in reasons, judged.detail
        if dishonest == wanted:
            return
    raise AssertionError(f"the cheater drew the honest completion in all but {dishonest} of 60 tasks")


def test_tokens_drawn_with_another_seed_are_refused(studio, verdict) -> None:
    cheat(studio, verdict, lambda lease: studio.draw(lease, seed=12345), Reason.MARGIN)


def test_the_best_of_four_is_refused(studio, verdict) -> None:
    def best(lease: Lease) -> Trace:
        return max((studio.draw(lease, seed=seed) for seed in range(4)), key=lambda trace: trace.reward)

    cheat(studio, verdict, best, Reason.MARGIN)


def test_another_temperature_is_refused(studio, verdict) -> None:
    # Two tokens may nearly tie under the right temperature too; the logprobs still give the wrong one away.
    cheat(studio, verdict, lambda lease: studio.draw(lease, temperature=0.5), Reason.MARGIN, Reason.LOGPROB)


def test_another_prompt_is_refused(studio, verdict) -> None:
    def other(lease: Lease) -> Trace:
        return studio.draw(lease, prompt=studio.lease(task=lease.task_index + 1).prompt)

    cheat(studio, verdict, other, Reason.MARGIN)


def test_one_edited_token_is_refused_even_with_fresh_proofs(studio, verdict) -> None:
    """The observation still replays: only a token that the tool ignores, its leading call mark, would not."""

    def edited(lease: Lease) -> Trace:
        trace = studio.draw(lease)
        place = trace.generated()[-2]
        wrong = generated_change(trace, len(trace.generated()) - 2, 20 if trace.tokens[place] != 20 else 21)
        return replace(wrong, reward=0.0)

    cheat(studio, verdict, edited, Reason.MARGIN, Reason.REWARD)


# --- the model ---


def other_model(studio, folder: Path, change: Callable[[torch.Tensor], torch.Tensor]) -> TransformersEngine:
    shutil.copytree(studio.policy, folder)
    tensors = load_file(folder / "model.safetensors")
    changed = {
        name: change(value.float()).to(value.dtype) if value.dim() == 2 else value for name, value in tensors.items()
    }
    save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})
    engine = TransformersEngine(slots=4)
    engine.load(folder, b"\x04" * 32)
    return engine


def with_noise(share: float) -> Callable[[torch.Tensor], torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return lambda w: w + torch.randn(w.shape, generator=generator) * w.std() * share


def quantised(bits: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(w: torch.Tensor) -> torch.Tensor:
        scale = w.abs().amax(1, keepdim=True).clamp_min(1e-9) / (2 ** (bits - 1) - 1)
        return (w / scale).round() * scale

    return change


@pytest.mark.parametrize(
    "change",
    [lambda w: w + 1e-3 * w.sign(), with_noise(0.01), with_noise(0.1), quantised(8), quantised(4)],
    ids=["the previous version", "1 % noise", "10 % noise", "int8", "int4"],
)
def test_a_node_that_swaps_in_another_model_is_refused(studio, verdict, tmp_path: Path, change) -> None:
    engine = other_model(studio, tmp_path / "other", change)
    for task in range(6):
        lease = studio.lease(task=task)
        judged = verdict(Rollout(studio.genesis, lease, studio.draw(lease, engine=engine)).file())
        assert judged.outcome is Outcome.REFUSED, f"task {task} passed: {judged.checks[-3:]}"
        assert judged.reason in (Reason.MARGIN, Reason.LOGPROB, Reason.PROOF)


# --- claims and proofs ---


def test_forged_logprobs_are_refused(long_rollout, verdict) -> None:
    forged = tuple(value * 0.5 for value in long_rollout.trace.logprobs)
    refused(verdict(long_rollout.file(trace=replace(long_rollout.trace, logprobs=forged))), Reason.LOGPROB)


def zero(proof: bytes) -> bytes:
    return proof[:2] + bytes(len(proof) - 2)


def constant(proof: bytes) -> bytes:
    return proof[:2] + struct.pack(">H", 0x3F80) + bytes(len(proof) - 4)


def modulus_zero(proof: bytes) -> bytes:
    return bytes(2) + proof[2:]


@pytest.mark.parametrize(
    "change",
    [
        lambda proofs: tuple(zero(proof) for proof in proofs),
        lambda proofs: tuple(constant(proof) for proof in proofs),
        lambda proofs: tuple(modulus_zero(proof) for proof in proofs),
        lambda proofs: (),
        lambda proofs: (*proofs, proofs[0]),
        lambda proofs: tuple(proof[:-1] for proof in proofs),
        lambda proofs: tuple(proof[:-2] for proof in proofs),
        lambda proofs: tuple(b"" for _ in proofs),
        lambda proofs: tuple(proof[:-2] + b"\xff\xff" for proof in proofs),
    ],
    ids=["zero", "constant", "modulus 0", "none", "one extra", "odd length", "truncated", "empty", "over the field"],
)
def test_proofs_that_are_not_proofs_are_refused(long_rollout, verdict, change) -> None:
    forged = replace(long_rollout.trace, proofs=change(long_rollout.trace.proofs))
    refused(verdict(long_rollout.file(trace=forged)), Reason.PROOF_FORM)


def test_a_proof_of_noise_is_refused(long_rollout, verdict) -> None:
    noise = np.random.default_rng(1)
    forged = tuple(
        proof[:2] + noise.integers(1, 65_497, (len(proof) - 2) // 2).astype(">u2").tobytes()
        for proof in long_rollout.trace.proofs
    )
    refused(verdict(long_rollout.file(trace=replace(long_rollout.trace, proofs=forged))), Reason.PROOF)


def test_a_proof_replayed_from_another_trace_is_refused(studio, long_rollout, verdict) -> None:
    length = len(long_rollout.trace.logprobs)

    def same_length(trace: Trace) -> bool:
        return len(trace.logprobs) == length and trace.tokens != long_rollout.trace.tokens

    other = first_rollout(studio, same_length)
    forged = replace(long_rollout.trace, proofs=other.trace.proofs)
    refused(verdict(long_rollout.file(trace=forged)), Reason.PROOF)


# --- files that cannot be judged ---


def test_a_lease_the_trainer_did_not_sign_cannot_be_judged(long_rollout, verdict) -> None:
    forged = replace(long_rollout.file(), lease=seal(SOMEONE, long_rollout.lease))
    with pytest.raises(UsageError, match="is signed by"):
        verdict(forged)


def test_a_verdict_of_the_trainers_that_contradicts_itself_cannot_be_judged(long_rollout, verdict) -> None:
    lease, digest = long_rollout.lease, long_rollout.file().trace.digest
    contradiction = Verdict(
        run=lease.run, trace_digest=digest, lease_id=lease.lease_id, slot=0, node=lease.node,
        policy_version=lease.policy_version, policy_root=lease.policy_root, outcome=Outcome.ACCEPTED,
        reason=Reason.MARGIN, audited=True, reward=None, checks=(), calibration=None, scores=(),
        verifier=Fingerprint("x", "", "", ""), judged_ms=1,
    )  # fmt: skip
    with pytest.raises(UsageError, match="a verdict cannot be ACCEPTED for the reason MARGIN"):
        verdict(replace(long_rollout.file(), verdict=seal(TRAINER, contradiction)))


def test_another_policys_folder_cannot_be_used(studio, long_rollout, tmp_path: Path) -> None:
    other_model(studio, tmp_path / "other", with_noise(0.1)).close()
    with pytest.raises(UsageError, match="give that version's folder"):
        require_policy(tmp_path / "other", long_rollout.lease)


@pytest.mark.parametrize("keep", [0, 1, 100, -1])
def test_a_cut_off_file_cannot_be_judged(long_rollout, tmp_path: Path, keep: int) -> None:
    path = tmp_path / "cut.msgpack"
    path.write_bytes(codec.encode(long_rollout.file())[:keep])
    with pytest.raises(UsageError, match="cannot be judged"):
        read_evidence(path)


def test_a_file_of_a_gigabyte_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "huge.msgpack"
    with path.open("wb") as file:
        file.truncate(1 << 30)
    with pytest.raises(UsageError, match="at most"):
        read_evidence(path)


@pytest.mark.parametrize("device", ["cuda:99", "foo", "cpu:x", "cpu:99999999999"])
def test_a_device_that_is_not_there_gives_no_verdict(long_rollout, studio, tmp_path: Path, capsys, device: str) -> None:
    path = tmp_path / "trace.msgpack"
    path.write_bytes(codec.encode(long_rollout.file()))
    assert main(["check", str(path), "--policy", str(studio.policy), "--device", device]) == 2
    assert f"{device}" in capsys.readouterr().err


@pytest.mark.parametrize("place", ["/dev/zero", "a pipe", "a folder"])
def test_what_is_no_regular_file_is_refused_unread(long_rollout, studio, tmp_path: Path, capsys, place: str) -> None:
    path = Path(place)
    if place == "a pipe":
        path = tmp_path / "pipe"
        os.mkfifo(path)
    elif place == "a folder":
        path = tmp_path
    assert main(["check", str(path), "--policy", str(studio.policy)]) == 2
    assert "is not a regular file" in capsys.readouterr().err


def test_limits_of_zero_refuse_what_is_not_exact_and_are_no_fault_of_ours() -> None:
    nothing = Limits(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    exact = ChunkResult(0, 32, 0, 0, 0.0, 0.0, 128, 0)
    assert judge_proofs([exact], nothing).ok
    assert not judge_proofs([replace(exact, mantissa_mean=0.01)], nothing).ok


def test_a_bug_of_ours_is_no_refusal(monkeypatch, long_rollout, studio, tmp_path: Path, capsys) -> None:
    path = tmp_path / "trace.msgpack"
    path.write_bytes(codec.encode(long_rollout.file()))

    def broken(*arguments: object, **options: object) -> None:
        raise ZeroDivisionError("made by the test")

    monkeypatch.setattr("verify.judge.judge", broken)
    assert main(["check", str(path), "--policy", str(studio.policy)]) == 3
    assert "this is a bug of rlverify" in capsys.readouterr().err
