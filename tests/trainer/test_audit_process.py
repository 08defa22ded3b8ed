"""The auditor: honest traces pass, changed ones fail by the right check, and faults of ours cost nobody anything."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import trainer.calibrating
from protocol import codec
from protocol.errors import EngineError
from protocol.verdict import CheckOutcome, Reason
from tests.trainer.fabricate import Gateway, make_run, one_thread
from trainer import audit
from trainer.audit import Auditor
from trainer.audit_result import AuditResult
from trainer.ledger import Ledger
from trainer.ledger_rows import SubmissionRow, SubmissionState
from trainer.rundir import Run
from verify.check import DEAR


@pytest.fixture(autouse=True)
def _by_the_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without measuring pairs first (test_calibrating.py does)."""
    monkeypatch.setattr(trainer.calibrating, "IMITATED", ())


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
    return run, ledger, Gateway(run, ledger)


def answers(ledger: Ledger) -> list[tuple[SubmissionRow, AuditResult]]:
    rows = ledger.submissions(SubmissionState.AUDITED, 1000)
    return [(row, codec.decode(AuditResult, row.audit or b"")) for row in rows]


def failure(result: AuditResult) -> Reason | None:
    return next((check.reason for check in result.checks if check.outcome is CheckOutcome.FAILED), None)


def test_honest_traces_pass_every_check_and_their_logprobs_are_kept(made: tuple[Run, Ledger, Gateway]) -> None:
    run, ledger, gateway = made
    drawn = gateway.draw(3, 0)
    gateway.submit(drawn)
    assert Auditor(run, ledger, "a").turn() == 12
    found = answers(ledger)
    assert len(found) == 12
    for _, result in found:
        assert [check.name for check in result.checks] == list(DEAR)
        passed = [check.name for check in result.checks if check.outcome is CheckOutcome.PASSED]
        assert passed == ["margins", "logprobs", "proofs"], result
        assert result.fault is None and result.verifier.dtype == "float32"
    gateway.accept([row.digest for row, _ in found])
    groups = ledger.training_groups([group.group_id for group, _ in drawn])
    for group, (_, episodes) in zip(groups, drawn, strict=True):
        for trace, episode in zip(group.traces, episodes, strict=True):
            assert trace.mu is not None
            np.testing.assert_allclose(trace.mu, episode.logprobs, atol=1e-4)


def test_a_token_that_was_not_drawn_a_false_logprob_and_a_foreign_proof_each_fail_by_name(
    made: tuple[Run, Ledger, Gateway],
) -> None:
    run, ledger, gateway = made
    drawn = gateway.draw(1, 0)
    _, (first, second, third, _) = drawn[0]
    other = next(token for token in range(10, 106) if token != first.tokens[2])
    changes: dict[int, dict[str, Any]] = {
        0: {"tokens": (*first.tokens[:2], other, *first.tokens[3:])},
        1: {"logprobs": (second.logprobs[0] - 0.5, *second.logprobs[1:])},
        2: {"proofs": _foreign_proofs(gateway, len(third.hidden))},
    }
    gateway.submit(drawn, changes)
    Auditor(run, ledger, "a").turn()
    assert [failure(result) for _, result in answers(ledger)] == [Reason.MARGIN, Reason.LOGPROB, Reason.PROOF, None]


def _foreign_proofs(gateway: Gateway, length: int) -> tuple[bytes, ...]:
    """Of a completion of another task. Not of the same group: its completions may well be equal, and then so are
    their proofs. `length`: generated tokens, for a proof must have the form that the form check asks for."""
    while True:
        group, episodes = gateway.draw(1, 0)[0]
        for slot, episode in enumerate(episodes):
            if len(episode.hidden) == length:
                return gateway.trace(gateway.lease(group, episodes), slot, episode).proofs


def test_audits_are_claimed_one_policy_version_at_a_time_and_the_policy_is_swapped(
    made: tuple[Run, Ledger, Gateway],
) -> None:
    run, ledger, gateway = made
    gateway.submit(gateway.draw(1, 0))
    _publish_changed(run, ledger)
    gateway.submit(gateway.draw(2, 1))
    auditor = Auditor(run, ledger, "a")
    assert [auditor.turn() for _ in range(3)] == [4, 8, 0]
    assert [failure(result) for _, result in answers(ledger)] == [None] * 12


def _publish_changed(run: Run, ledger: Ledger) -> None:
    """Policy 1: policy 0 with every weight moved by a little."""
    from trainer.publish import write_policy
    from verify.model import PolicyModel

    generator = torch.Generator().manual_seed(5)
    weights = PolicyModel(run.folder.policy(0), "float32", "cpu").parameters()
    moved = {
        name: weight.detach() * (1 + 0.05 * torch.randn(weight.shape, generator=generator))
        for name, weight in weights.items()
    }
    ledger.add_policy(1, write_policy(run.folder.policy(0), run.folder.policy(1), moved), 1)


def test_traces_drawn_from_another_version_than_they_claim_are_refused(made: tuple[Run, Ledger, Gateway]) -> None:
    run, ledger, gateway = made
    _publish_changed(run, ledger)
    gateway.actors[1] = gateway.actor(0)
    gateway.submit(gateway.draw(2, 1))
    Auditor(run, ledger, "a").turn()
    assert all(failure(result) is not None for _, result in answers(ledger))


def test_a_policy_that_is_missing_or_damaged_on_our_disk_blames_nobody(made: tuple[Run, Ledger, Gateway]) -> None:
    run, ledger, gateway = made
    gateway.submit(gateway.draw(1, 0))
    weights = run.folder.policy(0) / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-2] + bytes([whole[-2] ^ 1, whole[-1]]))
    auditor = Auditor(run, ledger, "a")
    auditor.turn()
    assert {result.fault for _, result in answers(ledger)} == {Reason.POLICY_UNAVAILABLE}
    gateway.submit(gateway.draw(1, 0))
    shutil.rmtree(run.folder.policy(0))
    auditor.turn()
    assert {result.fault for _, result in answers(ledger)} == {Reason.POLICY_UNAVAILABLE}
    assert all("is not" in result.error for _, result in answers(ledger))


def test_one_trace_that_breaks_the_verifier_does_not_hide_the_others(
    made: tuple[Run, Ledger, Gateway], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, ledger, gateway = made
    digests = gateway.submit(gateway.draw(1, 0))
    real = audit.recompute
    calls: list[int] = []

    def failing(verifier: Any, pairs: Any) -> Any:
        calls.append(len(pairs))
        if any(trace.slot == 2 for trace, _ in pairs):
            raise EngineError("the logits are not finite")
        return real(verifier, pairs)

    monkeypatch.setattr(audit, "recompute", failing)
    Auditor(run, ledger, "a").turn()
    assert calls == [4, 1, 1, 1, 1]
    found = {row.digest: result for row, result in answers(ledger)}
    assert [found[digest].fault for digest in digests] == [None, None, Reason.VERIFIER_FAULT, None]
    assert found[digests[2]].error == "the logits are not finite" and found[digests[2]].checks == ()


def test_a_dtype_nobody_measured_is_our_gap_and_not_the_nodes(made: tuple[Run, Ledger, Gateway]) -> None:
    run, ledger, gateway = made
    drawn = gateway.draw(1, 0)
    from dataclasses import replace

    from tests.trainer.fabricate import ENGINE

    gateway.submit(drawn, {0: {"engine": replace(ENGINE, dtype="float16")}})
    Auditor(run, ledger, "a").turn()
    assert sorted(str(result.fault) for _, result in answers(ledger)) == ["None"] * 3 + ["VERIFIER_FAULT"]


def test_what_a_killed_auditor_had_claimed_is_audited_by_its_successor(made: tuple[Run, Ledger, Gateway]) -> None:
    run, ledger, gateway = made
    gateway.submit(gateway.draw(1, 0))
    assert len(ledger.claim_audits("a", 1, 10)) == 4
    assert Auditor(run, ledger, "b").turn() == 0
    successor = Auditor(run, ledger, "a")
    assert sum(iter(successor.turn, 0)) == 4
    assert [result.fault for _, result in answers(ledger)] == [None] * 4


def test_a_trace_that_two_auditors_died_on_is_left_unjudged(made: tuple[Run, Ledger, Gateway]) -> None:
    run, ledger, gateway = made
    gateway.submit(gateway.draw(1, 0))
    for _ in range(2):
        ledger.claim_audits("a", 1, 1)
        ledger.release_claims("a", died_of="the auditor was killed by SIGKILL")
    assert sum(iter(Auditor(run, ledger, "a").turn, 0)) == 4
    assert [result.fault for _, result in answers(ledger)] == [Reason.VERIFIER_FAULT, None, None, None]


def test_what_a_dead_auditor_had_claimed_beside_a_trace_is_not_suspected_twice(
    made: tuple[Run, Ledger, Gateway],
) -> None:
    run, ledger, gateway = made
    gateway.submit(gateway.draw(1, 0))
    claimed = [len(ledger.claim_audits("a", 1, 10))]
    for _ in range(2):
        ledger.release_claims("a", died_of="the auditor was killed by SIGKILL")
        claimed.append(len(ledger.claim_audits("a", 1, 10)))
    assert claimed == [4, 1, 1], "a whole batch, then the first of them alone"
    assert sum(iter(Auditor(run, ledger, "a").turn, 0)) == 4
    assert [result.fault for _, result in answers(ledger)] == [Reason.VERIFIER_FAULT, None, None, None]


def test_auditors_that_were_told_to_end_cast_no_suspicion_on_what_they_had_claimed(
    made: tuple[Run, Ledger, Gateway], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, ledger, gateway = made
    gateway.submit(gateway.draw(1, 0))

    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(audit, "recompute", interrupted)
        for _ in range(3):
            with pytest.raises(KeyboardInterrupt):
                audit.serve(run, ledger, "a")
    assert Auditor(run, ledger, "a").turn() == 4
    assert [result.fault for _, result in answers(ledger)] == [None] * 4


def test_the_process_answers_audits_and_ends_with_its_parent(made: tuple[Run, Ledger, Gateway]) -> None:
    run, ledger, gateway = made
    gateway.submit(gateway.draw(2, 0))
    command = [sys.executable, "-m", "trainer.audit", str(run.folder.path), "--name", "auditor-0"]
    root = Path(audit.__file__).parents[1]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, cwd=root)
    try:
        counter = audit.Changes(ledger)
        while ledger.waiting_audits():
            assert counter.wait(60), "the auditor process answered nothing within 60 s"
        assert child.stdin is not None
        child.stdin.close()
        assert child.wait(30) == 0
    finally:
        child.kill()
        child.wait()
        assert child.stderr is not None
        child.stderr.close()
    assert [failure(result) for _, result in answers(ledger)] == [None] * 8


def test_reading_a_result_needs_no_torch() -> None:
    code = "import sys, trainer.audit_result; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(audit.__file__).parents[1]).returncode == 0
