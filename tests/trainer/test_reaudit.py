"""A second audit on request: who gets one, who does it, and what follows from its verdict."""

from __future__ import annotations

import dataclasses
import functools
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import trainer.office
from protocol import codec, messages
from protocol.envelope import seal
from protocol.lease import Lease
from protocol.run import EnvironmentShare
from protocol.verdict import Outcome, Reason, Verdict, check_verdict, may_replace
from tests.trainer import fabricate
from tests.trainer.scripted_node import Client, Script, Trainer, audit_result, calibrate, on_trio, trainer_at_work
from trainer.audit_draw import AuditChain
from trainer.audit_result import AuditResult
from trainer.config import TrainerConfig, write_config
from trainer.init import init_run
from trainer.ledger import Ledger
from trainer.ledger_rows import GroupState, SlotState, SubmissionState
from trainer.rundir import Run, open_run
from trainer.serve import Supervisor, children_of
from verify.finding import first_failure

SETTINGS: dict[str, Any] = {
    "group_size": 2, "open_groups": 4, "groups_per_step": 2, "max_turn_tokens": 14, "max_tokens": 64,
    "audit_floor": 1.0, "keep_traces": 1, "node_group_share": 1.0,
}  # fmt: skip
AGAIN = "auditor-second"


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run") / "template"
    shares = (EnvironmentShare("tools8@1", "", 1),)
    init_run(path, name="test", policy="embedded", environments=shares, config=TrainerConfig(**SETTINGS))
    return path


@pytest.fixture(scope="module", autouse=True)
def one_chain() -> Iterator[None]:
    """Every start of a gateway hashes a million times; all of these runs have one secret."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer.office, "AuditChain", functools.cache(AuditChain))
        yield


@pytest.fixture
def run(tmp_path: Path, template: Path) -> Run:
    shutil.copytree(template, tmp_path / "run")
    return open_run(tmp_path / "run")


@pytest.fixture(scope="module")
def script(template: Path) -> Script:
    return Script(template / "policies" / "000000")


async def refused(trainer: Trainer, client: Client, script: Script) -> tuple[Lease, bytes, Verdict]:
    """A trace that an audit refused: its lease, digest and verdict."""
    (lease,) = (await client.leases(1))[:1]
    signed = seal(client.who, script.trace(lease, lease.slots[0].index))
    await client.send(signed)
    while trainer.ledger.waiting_audits() == 0:
        await client.beat()
    trainer.audit(Reason.MARGIN)
    (verdict,) = await client.verdicts(1)
    assert verdict.outcome is Outcome.REFUSED and verdict.audited
    return lease, signed.digest, verdict


async def ask(client: Client, digest: bytes) -> messages.AuditAsked:
    return await client.ask(messages.AskAudit(digest), messages.AuditAsked)


def state_of(trainer: Trainer, digest: bytes) -> SubmissionState:
    row = trainer.ledger.submission(digest)
    assert row is not None
    return row.state


@on_trio
async def test_a_re_audit_is_another_auditors_and_its_acceptance_undoes_the_failed_audit(
    run: Run, script: Script
) -> None:
    async with trainer_at_work(run) as trainer, trainer.node() as client:
        lease, digest, before = await refused(trainer, client, script)
        assert (await ask(client, digest)).granted
        again = await ask(client, digest)
        assert again.granted and "another auditor" in again.text, "the answer may have been lost"
        assert trainer.audit(None) == 0, "the auditor that refused it does not get it"
        assert trainer.audit(None, by=AGAIN) == 1
        (after,) = await client.verdicts(1)
        assert (after.trace_digest, after.outcome, after.audited) == (digest, Outcome.ACCEPTED, True)
        assert may_replace(after, before) and after.reward == 1.0
        assert trainer.ledger.audit_record(client.who.node) == (1, 0)
        assert trainer.ledger.latest_audits(client.who.node, 10) == [True]
        counts = trainer.ledger.view("SELECT accepted, refused FROM nodes")[0]
        assert counts == {"accepted": 1, "refused": 0}
        slot = lease.slots[0].index
        assert trainer.ledger.slot(lease.group_id, slot) == (SlotState.ACCEPTED, lease.lease_id)
        assert state_of(trainer, digest) is SubmissionState.ACCEPTED
        assert not (await ask(client, digest)).granted


@on_trio
async def test_what_a_re_audit_accepted_may_be_refused_with_all_that_its_node_drew_and_its_slot_is_drawn_again(
    run: Run, script: Script
) -> None:
    async with trainer_at_work(run) as trainer, trainer.node("off") as client, trainer.node("b") as other:
        by = calibrate(trainer.run, trainer.ledger)
        lease, digest, _ = await refused(trainer, client, script)
        assert (await ask(client, digest)).granted
        assert trainer.audit(by=AGAIN, calibration=by, scores=(9.0, 8.0)) == 1
        (back,) = await client.verdicts(1)
        assert back.outcome is Outcome.ACCEPTED
        (another,) = (await client.leases(1))[:1]
        second = seal(client.who, script.trace(another, another.slots[0].index))
        await client.send(second)
        while trainer.ledger.waiting_audits() == 0:
            await client.beat()
        trainer.audit(calibration=by, scores=(9.0, 8.0))
        verdicts = await client.verdicts(2)
        assert [each.reason for each in verdicts] == [Reason.NODE_EVIDENCE] * 2
        assert {each.trace_digest for each in verdicts} == {digest, second.digest}
        assert may_replace(verdicts[1], back) and check_verdict(verdicts[1]) is None
        assert trainer.ledger.audit_record(client.who.node) == (0, 2)
        events = [row["text"] for row in trainer.ledger.view("SELECT text FROM events WHERE kind = 'audit'")]
        assert sum("was audited again, as asked for: ACCEPTED" in text for text in events) == 1
        assert not any("as asked for: REFUSED" in text for text in events), "nobody asked for that"
        answer = await ask(client, digest)
        assert not answer.granted and "one re-audit a trace" in answer.text
        for each in [each for each in await other.leases(8) if each.group_id == lease.group_id]:
            for slot in each.slots:
                assert (await other.submit(script.trace(each, slot.index))).receipt is not None
        while trainer.ledger.waiting_audits() < 2:
            await other.beat()
        trainer.audit()
        await other.verdicts(2)
        (group,) = trainer.ledger.training_groups([lease.group_id])
        assert [trace.node for trace in group.traces] == [other.who.node] * 2


@on_trio
async def test_a_trace_whose_slot_went_to_another_is_credited_and_not_learned_from(run: Run, script: Script) -> None:
    async with trainer_at_work(run) as trainer, trainer.node("a") as client, trainer.node("b") as other:
        lease, digest, _ = await refused(trainer, client, script)
        assert (await ask(client, digest)).granted
        leases = [each for each in await other.leases(8) if each.group_id == lease.group_id]
        assert sorted(slot.index for each in leases for slot in each.slots) == [0, 1]
        trainer.audit(None, by=AGAIN)
        (verdict,) = await client.verdicts(1)
        assert verdict.outcome is Outcome.ACCEPTED
        assert state_of(trainer, digest) is SubmissionState.CREDITED
        assert trainer.ledger.latest_audits(client.who.node, 10) == [True]
        for each in leases:
            for slot in each.slots:
                assert (await other.submit(script.trace(each, slot.index))).receipt is not None
        while trainer.ledger.waiting_audits() < 2:
            await other.beat()
        trainer.audit()
        await other.verdicts(2)
        assert trainer.ledger.group_state(lease.group_id) is GroupState.COMPLETE
        (group,) = trainer.ledger.training_groups([lease.group_id])
        assert [trace.node for trace in group.traces] == [other.who.node] * 2


@on_trio
async def test_a_second_refusal_is_final_and_counts_once(run: Run, script: Script) -> None:
    async with trainer_at_work(run) as trainer, trainer.node() as client:
        lease, digest, before = await refused(trainer, client, script)
        assert (await ask(client, digest)).granted
        assert trainer.audit(Reason.PROOF, by=AGAIN) == 1
        (after,) = await client.verdicts(1)
        assert after.reason is Reason.PROOF and may_replace(after, before)
        assert trainer.ledger.audit_record(client.who.node) == (0, 1)
        assert trainer.ledger.latest_audits(client.who.node, 10) == [False]
        assert trainer.ledger.slot(lease.group_id, lease.slots[0].index) == (SlotState.FREE, None)
        answer = await ask(client, digest)
        assert not answer.granted and "one re-audit a trace" in answer.text


@on_trio
async def test_a_re_audit_that_refuses_is_a_failed_audit_as_any_other(run: Run, script: Script) -> None:
    async with trainer_at_work(run) as trainer, trainer.node("off") as client:
        by = calibrate(trainer.run, trainer.ledger)
        _, digest, _ = await refused(trainer, client, script)
        (lease,) = (await client.leases(1))[:1]
        await client.submit(script.trace(lease, lease.slots[0].index))
        while trainer.ledger.waiting_audits() == 0:
            await client.beat()
        trainer.audit(calibration=by, scores=(9.0, 8.0))
        (accepted,) = await client.verdicts(1)
        assert accepted.outcome is Outcome.ACCEPTED
        assert (await ask(client, digest)).granted
        trainer.audit(by=AGAIN, calibration=by, scores=(9.0, 8.0))
        verdicts = await client.verdicts(2)
        assert [each.reason for each in verdicts] == [Reason.NODE_EVIDENCE] * 2
        assert [each.trace_digest for each in verdicts] == [digest, accepted.trace_digest]


@on_trio
async def test_a_re_audit_that_cannot_judge_leaves_the_refusal_and_may_be_asked_for_again(
    run: Run, script: Script
) -> None:
    async with trainer_at_work(run) as trainer, trainer.node() as client:
        _, digest, _ = await refused(trainer, client, script)
        assert (await ask(client, digest)).granted
        (row,) = trainer.ledger.claim_audits(AGAIN, 0, 10, reaudits_only=True)
        fault = dataclasses.replace(audit_result(), checks=(), fault=Reason.POLICY_UNAVAILABLE, error="disk gone")
        trainer.ledger.finish_audit(row.sequence, codec.encode(fault), None)
        while state_of(trainer, digest) is not SubmissionState.REFUSED:
            assert await client.beat() == []
        assert trainer.ledger.latest_audits(client.who.node, 10) == [False]
        assert (await ask(client, digest)).granted
        assert trainer.audit() == 0, "it is still another's than the first auditor's"


@on_trio
async def test_a_trace_that_kills_the_auditors_of_its_re_audit_stays_refused(run: Run, script: Script) -> None:
    async with trainer_at_work(run) as trainer, trainer.node() as client:
        _, digest, _ = await refused(trainer, client, script)
        assert (await ask(client, digest)).granted
        for _ in range(2):
            assert len(trainer.ledger.claim_audits(AGAIN, 0, 10)) == 1
            trainer.ledger.release_claims(AGAIN, died_of="it was killed")
        (row,) = trainer.ledger.claim_audits(AGAIN, 0, 10)
        fault = dataclasses.replace(audit_result(), checks=(), fault=Reason.VERIFIER_FAULT, error="2 auditors died")
        trainer.ledger.finish_audit(row.sequence, codec.encode(fault), None)
        while state_of(trainer, digest) is not SubmissionState.REFUSED:
            assert await client.beat() == []
        assert trainer.ledger.latest_audits(client.who.node, 10) == [False]
        assert not (await ask(client, digest)).granted


@on_trio
async def test_what_was_not_refused_by_an_audit_is_not_audited_again(run: Run, script: Script) -> None:
    async with trainer_at_work(run) as trainer, trainer.node("a") as client, trainer.node("b") as other:
        _, digest, _ = await refused(trainer, client, script)
        assert "no trace" in (await ask(client, b"\7" * 32)).text
        assert "no trace" in (await ask(other, digest)).text
        (lease,) = (await client.leases(1))[:1]
        waiting = seal(client.who, script.trace(lease, lease.slots[0].index))
        await client.send(waiting)
        while trainer.ledger.waiting_audits() == 0:
            await client.beat()
        assert "is AUDIT and was not refused" in (await ask(client, waiting.digest)).text
        trainer.audit()
        await client.verdicts(1)
        assert "is ACCEPTED and was not refused" in (await ask(client, waiting.digest)).text


@on_trio
async def test_nothing_of_a_closed_epoch_is_audited_again_and_what_waits_keeps_it_open(
    run: Run, script: Script
) -> None:
    async with trainer_at_work(run) as trainer, trainer.node() as client:
        lease, digest, _ = await refused(trainer, client, script)
        trainer.ledger.drop_group(lease.group_id, "for the test")
        assert trainer.ledger.is_settled(0)
        trainer.ledger.add_seal(0, b"seal")
        assert "whose epoch is closed" in (await ask(client, digest)).text
        with trainer.ledger.write():
            trainer.ledger._db.execute("DELETE FROM epochs")
        assert (await ask(client, digest)).granted
        assert not trainer.ledger.is_settled(0)


@on_trio
async def test_a_re_audit_needs_the_trace_and_its_policy(run: Run, script: Script) -> None:
    async with trainer_at_work(run) as trainer, trainer.node() as client:
        lease, digest, _ = await refused(trainer, client, script)
        shelf = trainer.office.shelf
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shelf, "root", lambda version: None)
            assert "policy version 0, which the trainer no longer keeps" in (await ask(client, digest)).text
        trainer.ledger.drop_group(lease.group_id, "for the test")
        trainer.ledger.prune_traces(0)
        assert "no longer kept by the trainer" in (await ask(client, digest)).text


# --- the second auditor ---


def test_a_run_with_several_auditors_needs_no_second_one(run: Run) -> None:
    write_config(TrainerConfig(auditors=2), run.folder.config)
    names = [child.name for child in children_of(open_run(run.folder.path))]
    assert names == ["gateway", "auditor-0", "auditor-1", "learner", "records", "page"]


def test_a_second_auditor_runs_while_a_re_audit_waits_and_accepts_an_honest_trace(
    tmp_path: Path, template: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    run, ledger = fabricate.make_run(tmp_path / "run", template, group_size=2)
    gateway = fabricate.Gateway(run, ledger)
    digest, untouched = gateway.submit(gateway.draw(1, 0))
    wrongly_refused(ledger)
    (second,) = [child for child in children_of(run) if child.reaudits]
    supervisor = Supervisor(run, ledger, [second])
    try:
        supervisor.look()
        assert second.process is None, "nobody has asked"
        row = ledger.submission(digest)
        assert row is not None
        ledger.ask_reaudit(row.sequence)
        until(lambda: ledger.submissions(SubmissionState.AUDITED, 10), supervisor.look)
        until(lambda: second.process is None, supervisor.look)
    finally:
        supervisor.stop()
    assert supervisor.news == [], "it came and went as it should"
    (answered,) = ledger.submissions(SubmissionState.AUDITED, 10)
    assert answered.digest == digest and answered.audit is not None
    result = codec.decode(AuditResult, answered.audit)
    assert result.fault is None and first_failure(result.checks) is None
    other = ledger.submission(untouched)
    assert other is not None and other.state is SubmissionState.AUDIT, "ordinary audits are not its work"
    ledger.close()


def wrongly_refused(ledger: Ledger) -> None:
    """The first waiting trace gets a refusal of auditor-0 that it does not deserve."""
    (row,) = ledger.claim_audits("auditor-0", 0, 1)
    ledger.finish_audit(row.sequence, codec.encode(audit_result(Reason.MARGIN)), None)
    ledger.judge(
        row, state=SubmissionState.REFUSED, reason=Reason.MARGIN, audited=True, reward=None, checks=b"", verdict=b"v",
        judged_ms=1,
    )  # fmt: skip


def until(holds: Callable[[], object], turn: Callable[[], object], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it did not happen"
        turn()
        time.sleep(0.01)
