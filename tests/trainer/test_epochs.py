"""Epochs of the log: closed in order and only when nothing of them can change, sealed by the gateway, and written as
files that an auditor who trusts nobody agrees with."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio

import trainer.export_log as exporting
import trainer.office
from protocol import codec, messages
from protocol.envelope import Signed, seal, unseal
from protocol.log import Epoch, epoch_root
from protocol.policy import policy_root
from protocol.run import EnvironmentShare
from protocol.verdict import Outcome, Reason, Verdict
from tests.trainer.scripted_node import Client, Script, Trainer, on_trio, trainer_at_work
from trainer.audit_draw import AuditChain
from trainer.cli import main
from trainer.config import TrainerConfig
from trainer.epochs import closable, epoch_log
from trainer.export_log import export_log
from trainer.init import init_run
from trainer.ledger import LeaseState, Ledger, SubmissionState
from trainer.rundir import Run, load_run_identity, load_secrets, open_run
from verify.draw import is_of_chain
from verify.log_source import FolderSource
from verify.rejudge import Rejudge
from verify.run_audit import Report, audit_run

SETTINGS: dict[str, Any] = {
    "group_size": 2, "open_groups": 4, "groups_per_step": 2, "max_turn_tokens": 14, "max_tokens": 64,
    "staleness_limit": 1, "staleness_target": 1,
}  # fmt: skip


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
        patch.setattr("trainer.gateway.TIDY_SECONDS", 0.05)
        yield


@pytest.fixture
def run(tmp_path: Path, template: Path) -> Run:
    shutil.copytree(template, tmp_path / "run")
    return open_run(tmp_path / "run")


@pytest.fixture(scope="module")
def script(template: Path) -> Script:
    return Script(template / "policies" / "000000")


def publish(at: Trainer | Run, ledger: Ledger, version: int) -> None:
    """As the learner does, with a policy that is the first one and a note."""
    folder = (at.run if isinstance(at, Trainer) else at).folder
    shutil.copytree(folder.policy(0), folder.policy(version))
    (folder.policy(version) / "note.txt").write_text(str(version))
    ledger.add_policy(version, policy_root(folder.policy(version)), 1)


async def answer(trainer: Trainer, client: Client, script: Script, version: int, slots: int = 4) -> None:
    """Lease, draw and hand in, and wait until all of it is judged."""
    leases = await client.leases(slots, (version,))
    handed = 0
    for lease in leases:
        for slot in lease.slots:
            assert (await client.submit(script.trace(lease, slot.index))).receipt is not None
            handed += 1
    while handed:
        trainer.audit()
        handed -= len(await client.beat())


async def closed(trainer: Trainer, count: int) -> None:
    while trainer.ledger.sealed() < count:
        await trio.sleep(0.01)


def audited(folder: Path) -> Report:
    source = FolderSource(folder)
    return audit_run(source, Rejudge(source, None, 0, "cpu"))


# --- when ---


def test_an_epoch_is_closable_once_nothing_of_it_can_change_and_in_order(run: Run) -> None:
    ledger, config = Ledger(run.folder.ledger), run.config
    ledger.set_manifest(0, b"signed")
    assert not closable(ledger, 0, config)
    ledger.add_policy(1, b"1" * 32, 1)
    ledger.set_manifest(1, b"signed")
    assert not closable(ledger, 0, config), "the learner may still use it"
    ledger.add_policy(2, b"2" * 32, 1)
    assert not closable(ledger, 0, config), "the newest is not out before it is signed"
    ledger.set_manifest(2, b"signed")
    assert closable(ledger, 0, config)
    assert not closable(ledger, 1, config)
    ledger.add_policy(3, b"3" * 32, 1)
    ledger.set_manifest(3, b"signed")
    assert not closable(ledger, 1, config), "one after the other"
    ledger.add_seal(0, b"seal")
    assert closable(ledger, 1, config) and not closable(ledger, 0, config)
    ledger.close()


@on_trio
async def test_what_is_open_or_waits_for_a_verdict_keeps_its_epoch_open(run: Run, script: Script) -> None:
    async with trainer_at_work(run) as trainer, trainer.node() as client:
        ledger = trainer.ledger
        assert ledger.is_settled(0)
        lease, other = (await client.leases(4))[:2]
        assert not ledger.is_settled(0), "groups and leases are open"
        receipt = await client.submit(script.trace(lease, lease.slots[0].index))
        assert receipt.receipt is not None
        while not ledger.waiting_audits():
            await client.beat()
        for group in ledger.open_groups():
            ledger.drop_group(group.group_id, "test")
        assert not ledger.is_settled(0), "leases are open"
        for each in (lease, other):
            ledger.end_lease(each.lease_id, LeaseState.EXPIRED)
        claimed = ledger.claim_audits("auditor-0", 0, 10)
        assert claimed and not ledger.is_settled(0), "an auditor is at work"
        ledger.release_claims("auditor-0", died_of=None)
        (verdict,) = await client.verdicts(1)
        assert verdict.reason is Reason.POLICY_MOVED_ON
        assert ledger.is_settled(0)


# --- sealing ---


@on_trio
async def test_the_gateway_seals_an_epoch_and_takes_nothing_of_it_afterwards(run: Run, script: Script) -> None:
    async with trainer_at_work(run) as trainer, trainer.node() as client:
        ledger = trainer.ledger
        await answer(trainer, client, script, 0)
        late = (await client.leases(1))[0]
        await client.ask(messages.ReturnLease(late.lease_id, "test"), messages.Returned)
        publish(trainer, ledger, 1)
        publish(trainer, ledger, 2)
        await closed(trainer, 1)

        log = epoch_log(ledger, 0)
        assert log is not None and log.epoch is not None
        epoch = unseal(Epoch, log.epoch, signer=run.genesis.trainer)
        assert (epoch.run, epoch.version, epoch.previous) == (run.run, 0, bytes(32))
        counts = (epoch.leases, epoch.submissions, epoch.verdicts)
        assert counts == (len(log.leases), len(log.submissions), len(log.verdicts)) and epoch.submissions == 4
        assert epoch.root == epoch_root(log)
        assert epoch.audit_value == AuditChain(load_secrets(run).audit).value(0)
        assert is_of_chain(run.genesis.audit_anchor, 0, epoch.audit_value)

        reply = await client.submit(script.trace(late, late.slots[0].index))
        assert reply.receipt is None and reply.verdict is not None
        rows = ledger.view("SELECT epoch, outcome, reason FROM verdicts ORDER BY sequence DESC LIMIT 1")
        assert rows == [{"epoch": 2, "outcome": Outcome.REFUSED, "reason": Reason.LEASE_EXPIRED}]
        assert await client.leases(4, (0,)) == []
        digest = ledger.view("SELECT digest FROM submissions LIMIT 1")[0]["digest"]
        asked = await client.ask(messages.AskAudit(digest), messages.AuditAsked)
        assert not asked.granted
        assert epoch_log(ledger, 0) == log


@on_trio
async def test_every_epoch_that_can_be_closed_is_closed_in_one_round(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of small steps makes more than one version a round."""
    monkeypatch.setattr("trainer.gateway.TIDY_SECONDS", 3600)
    with closing(Ledger(run.folder.ledger)) as ledger:
        for version in range(1, 7):
            publish(run, ledger, version)
    async with trainer_at_work(run) as trainer:
        await closed(trainer, 5)
        assert trainer.ledger.sealed() == 5, "the learner may still use the last two"


@on_trio
async def test_a_draft_is_dropped_when_something_of_the_epoch_has_moved_meanwhile(run: Run, script: Script) -> None:
    async with trainer_at_work(run) as trainer, trainer.node() as client:
        await answer(trainer, client, script, 0)
        draft = trainer.office.registrar.draft(0, 1)
        digest = trainer.ledger.view("SELECT digest FROM submissions LIMIT 1")[0]["digest"]
    ledger = Ledger(run.folder.ledger)
    for version in (1, 2):
        publish(run, ledger, version)
        ledger.set_manifest(version, b"signed")
    for group in ledger.open_groups():
        ledger.drop_group(group.group_id, "test")
    for lease in ledger.view("SELECT lease_id FROM leases WHERE state = 'OPEN'"):
        ledger.end_lease(lease["lease_id"], LeaseState.EXPIRED)
    ledger.drop_stale_groups(1, "test")
    node = ledger.view("SELECT node FROM submissions LIMIT 1")[0]["node"]
    ledger.add_verdict(node, digest, SubmissionState.REFUSED, Reason.MARGIN, True, 1, b"another")
    assert closable(ledger, 0, run.config)
    assert not trainer.office.registrar.record(ledger, draft)
    assert ledger.sealed() == 0
    ledger.close()


# --- the log as files ---


@on_trio
async def test_the_log_of_a_run_that_is_served_is_written_and_agreed_with(
    run: Run, script: Script, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "log"
    async with trainer_at_work(run) as trainer, trainer.node() as client:
        for version in range(4):
            if version:
                publish(trainer, trainer.ledger, version)
                while trainer.office.shelf.latest < version:
                    await trio.sleep(0.01)
            await answer(trainer, client, script, version, slots=8)
        lease = (await client.leases(2, (3,)))[0]
        wrong = script.trace(lease, lease.slots[0].index)
        await client.submit(wrong)
        await closed(trainer, 2)
        words = ["export-log", str(run.folder.path), str(out)]
        assert main([*words, "--json"]) == 0
        first = json.loads(capsys.readouterr().out)
        assert (first["epochs"], first["sealed"], first["policies"]) == (4, 2, 4) and first["traces"] >= 32
        report = audited(out)
        assert [f"{each.where}: {each.what}" for each in report.disagreements] == []
        assert (report.epochs, report.sealed) == (4, 2)
        assert report.counts["receipts"] == first["traces"]
        assert report.counts["draws"] == 16 and report.counts["rates"] >= 32

        # Again: what is closed is not written twice, what has moved is.
        marks = {path: path.stat().st_mtime_ns for path in sorted(out.rglob("*.msgpack"))}
        publish(trainer, trainer.ledger, 4)
        await closed(trainer, 3)
        assert main(words) == 0
        assert "5 epochs, 3 of them closed" in capsys.readouterr().out
        same = {path.relative_to(out).as_posix() for path, mark in marks.items() if path.stat().st_mtime_ns == mark}
        assert {"epochs/000000.msgpack", "epochs/000001.msgpack"} <= same
        assert not {"epochs/000002.msgpack", "epochs/000003.msgpack"} & same
        assert not audited(out).disagreeing


@on_trio
async def test_a_verdict_given_while_the_log_is_written_accuses_nobody(
    run: Run, script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with trainer_at_work(run) as trainer, trainer.node() as client:
        await answer(trainer, client, script, 0)
        write_epochs = exporting._write_epochs

        def judged_again(ledger: Ledger, folder: Path, first: int) -> int:
            after = write_epochs(ledger, folder, first)
            row = ledger.submission(ledger.submitted(0)[0])
            assert row is not None
            newest = ledger.verdict(row.digest, row.node)
            assert newest is not None
            verdict = codec.decode(Verdict, codec.decode(Signed, newest).payload)
            again = codec.encode(seal(load_run_identity(run), replace(verdict, judged_ms=verdict.judged_ms + 1)))
            trainer.ledger.add_verdict(row.node, row.digest, row.state, None, verdict.audited, 0, again)
            return after

        monkeypatch.setattr(exporting, "_write_epochs", judged_again)
        export_log(run, Ledger(run.folder.ledger, read_only=True), tmp_path / "log", traces=True, policies=True)
    report = audited(tmp_path / "log")
    assert [f"{each.where}: {each.what}" for each in report.disagreements] == []
    assert report.counts["traces replayed"] > 0


def test_a_folder_of_another_run_is_left_alone(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "log"
    out.mkdir()
    (out / "log.json").write_text(json.dumps({"run": "ab" * 32, "sealed": 3}))
    assert main(["export-log", str(run.folder.path), str(out)]) == 2
    assert "the log of another run" in capsys.readouterr().err
    (out / "log.json").write_text("[]")
    assert main(["export-log", str(run.folder.path), str(out)]) == 2
    assert "not of a log" in capsys.readouterr().err


def test_traces_and_policies_can_be_left_out(run: Run, tmp_path: Path) -> None:
    ledger = Ledger(run.folder.ledger, read_only=True)
    done = export_log(run, ledger, tmp_path / "log", traces=False, policies=False)
    assert (done.epochs, done.traces, done.policies) == (0, 0, 0), "no policy is signed before the gateway has run"
    assert not list((tmp_path / "log" / "policies").iterdir())
    ledger.close()
