"""The gateway as a node meets it: real messages over the in-memory network, a real ledger, no model."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import shutil
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import trio

import trainer.inbox
import trainer.leasing
import trainer.office
from protocol import codec, limits, messages
from protocol.calibration import Calibration
from protocol.envelope import Signed, seal, unseal
from protocol.environments import base
from protocol.errors import Code, ConnectionLost, Refused, RemoteError, Unreachable
from protocol.identity import peer_id
from protocol.lease import SeedInput, slot_seed
from protocol.limits import NODE_EVIDENCE_NATS
from protocol.log import Draw
from protocol.messages import Version
from protocol.net.base import Stream
from protocol.net.memory import Nat
from protocol.net.session import Session
from protocol.policy import Manifest, check_manifest
from protocol.run import EnvironmentShare, open_genesis, open_membership
from protocol.trace import Trace
from protocol.verdict import CheckOutcome, Outcome, Reason, Receipt, Verdict, check_verdict, may_replace
from tests.trainer.leased import Story
from tests.trainer.scripted_node import (
    ENGINE,
    Client,
    Script,
    Trainer,
    audit_result,
    calibrate,
    dialled,
    held,
    identity_of,
    made_up_calibration,
    on_trio,
    trainer_at_work,
    trust,
)
from trainer.audit_draw import AuditChain
from trainer.config import TrainerConfig, write_config
from trainer.export_log import export_log
from trainer.gateway import relay_limits
from trainer.init import init_run
from trainer.ledger import Ledger
from trainer.ledger_rows import TIMES, CalibrationRow, GroupState, SlotState, SubmissionState
from trainer.network import network_line, read_network
from trainer.pairs import pair_name, pair_of
from trainer.rundir import Run, load_secrets, open_run
from trainer.summary import summary
from verify.check import CHEAP, DEAR
from verify.draw import is_drawn
from verify.finding import Finding, as_check
from verify.log_source import FolderSource
from verify.rejudge import Rejudge
from verify.run_audit import audit_run
from verify.standing import newest_audits, rate, sampling_rate

SHARES = (EnvironmentShare("tools8@1", "", 1),)
SETTINGS: dict[str, Any] = {
    "group_size": 4, "open_groups": 4, "groups_per_step": 2, "max_turn_tokens": 14, "max_tokens": 64,
}  # fmt: skip


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run") / "template"
    init_run(path, name="test", policy="embedded", environments=SHARES, config=TrainerConfig(**SETTINGS))
    return path


@pytest.fixture(scope="module", autouse=True)
def one_chain() -> Iterator[None]:
    """Every start of a gateway hashes a million times; all of these runs have one secret."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer.office, "AuditChain", functools.cache(AuditChain))
        yield


MakeRun = Callable[..., Run]


@pytest.fixture
def make_run(tmp_path: Path, template: Path, monkeypatch: pytest.MonkeyPatch) -> MakeRun:
    """`audits`: new nodes are audited, as they must be; without, most of the gateway is tested with less ado."""

    def make(*, audits: bool = False, **settings: Any) -> Run:
        monkeypatch.setattr(trainer.inbox, "is_drawn", is_drawn if audits else lambda *_: False)
        path = tmp_path / "run"
        shutil.copytree(template, path)
        write_config(TrainerConfig(**{**SETTINGS, **settings}), path / "config.toml")
        return open_run(path)

    return make


@pytest.fixture(scope="module")
def script(template: Path) -> Script:
    return Script(template / "policies" / "000000")


async def refusal(client: Client, request: Any, cls: type = messages.Submitted) -> Refused:
    with pytest.raises(Refused) as caught:
        await client.ask(request, cls)
    return caught.value


# --- hello ---


@on_trio
async def test_hello_is_answered_with_the_run_the_policy_and_the_time(make_run: MakeRun) -> None:
    async with trainer_at_work(make_run()) as trainer, trainer.dial(identity_of("node")) as client:
        welcome = await client.hello()
        genesis = open_genesis(welcome.genesis, run=trainer.run.run, trainer=trainer.office.signer.node)
        manifest = unseal(Manifest, welcome.manifest, signer=genesis.trainer)
        check_manifest(manifest)
        assert manifest.root == genesis.first_policy_root and manifest.version == 0
        assert abs(welcome.clock_ms - time.time() * 1000) < 10_000
        row = trainer.ledger.view("SELECT * FROM nodes")[0]
        assert row["connected"] == 1 and row["software"] == "scripted node 1"


@on_trio
async def test_a_node_of_another_protocol_version_is_told_both_versions_and_what_to_upgrade(make_run: MakeRun) -> None:
    async with trainer_at_work(make_run()) as trainer, trainer.dial(identity_of("node")) as client:
        with pytest.raises(Refused, match=r"speaks protocol 9\.3.*speaks 1\.0: upgrade the trainer") as caught:
            await client.hello(versions=(Version(9, 3),))
        assert caught.value.code is Code.VERSION_MISMATCH


@on_trio
async def test_a_node_of_another_run_is_told_which_run_this_is(make_run: MakeRun) -> None:
    async with trainer_at_work(make_run()) as trainer, trainer.dial(identity_of("node")) as client:
        with pytest.raises(Refused, match=trainer.run.run.hex()[:16]) as caught:
            await client.hello(run=b"\x01" * 32)
        assert caught.value.code is Code.WRONG_RUN


@pytest.mark.parametrize(("hours", "where"), [(1, "ahead of"), (-1, "behind")])
@on_trio
async def test_a_clock_off_by_an_hour_is_refused_with_the_offset(make_run: MakeRun, hours: int, where: str) -> None:
    async with trainer_at_work(make_run()) as trainer, trainer.dial(identity_of("node")) as client:
        with pytest.raises(Refused, match=f"3,(600|599) s {where} the trainer's") as caught:
            await client.hello(clock_ms=time.time_ns() // 1_000_000 + hours * 3_600_000)
        assert caught.value.code is Code.CLOCK_SKEW


@on_trio
async def test_an_engine_whose_dtype_nobody_measured_is_not_admitted(make_run: MakeRun) -> None:
    async with trainer_at_work(make_run()) as trainer, trainer.dial(identity_of("node")) as client:
        with pytest.raises(Refused, match="float16") as caught:
            await client.hello(engine=dataclasses.replace(ENGINE, dtype="float16"))
        assert caught.value.code is Code.ENGINE_NOT_ADMITTED


@on_trio
async def test_nothing_is_answered_before_hello(make_run: MakeRun) -> None:
    async with trainer_at_work(make_run()) as trainer, trainer.dial(identity_of("node")) as client:
        error = await refusal(client, messages.GetLeases(1, (0,)))
        assert error.code is Code.UNEXPECTED_MESSAGE and "before Hello" in str(error)


@on_trio
async def test_a_message_that_only_trainers_send_is_refused_and_the_session_goes_on(make_run: MakeRun) -> None:
    async with trainer_at_work(make_run()) as trainer, trainer.node() as client:
        assert (await refusal(client, messages.Returned())).code is Code.UNEXPECTED_MESSAGE
        assert await client.leases(1)


@on_trio
async def test_garbage_in_a_request_is_refused_and_the_session_goes_on(make_run: MakeRun) -> None:
    async with trainer_at_work(make_run()) as trainer, trainer.node() as client:
        for body in (b"", b"\x00", b"\xff garbage", bytes([6]) + b"\xc1", bytes([6])):
            with pytest.raises(Refused) as caught:
                await client.session.request(body, seconds=10, what="sending garbage")
            assert caught.value.code is Code.MALFORMED
        assert await client.leases(1)


@on_trio
async def test_garbage_instead_of_a_session_ends_that_session_alone(make_run: MakeRun) -> None:
    async with trainer_at_work(make_run()) as trainer, trainer.node("honest") as honest:
        async with trainer.network.host(identity_of("garbler"), listen=()) as host:
            stream = await host.open(trainer.address, messages.SESSION_PROTOCOL, seconds=5)
            await stream.send(b"\xde\xad\xbe\xef and more", seconds=5, what="sending garbage")
            with pytest.raises(ConnectionLost):
                await stream.receive(seconds=10, what="waiting to be thrown out")
        assert await honest.leases(1)


@on_trio
async def test_a_second_session_with_the_same_key_ends_the_first_which_is_told_why(make_run: MakeRun) -> None:
    async with (
        trainer_at_work(make_run()) as trainer,
        trainer.node("twin") as first,
        trainer.node("twin") as second,
    ):
        error = await refusal(first, messages.GetLeases(1, (0,)))
        assert error.code is Code.UNEXPECTED_MESSAGE and "in use on two machines" in str(error)
        assert await second.leases(1)
        assert trainer.ledger.view("SELECT connected FROM nodes")[0]["connected"] == 1


# --- policies and blobs ---


@on_trio
async def test_blobs_are_served_by_digest_and_make_up_the_policy(make_run: MakeRun) -> None:
    async with (
        trainer_at_work(make_run()) as trainer,
        trainer.network.host(identity_of("node"), listen=()) as host,
        dialled(host, trainer.address, identity_of("node"), trainer.run.run) as client,
    ):
        manifest = unseal(Manifest, (await client.hello()).manifest)
        stream = await host.open(trainer.address, messages.BLOB_PROTOCOL, seconds=5)
        session = Session(stream)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(session.run, None, None)
            for file in manifest.files:
                pieces = []
                for blob in file.blobs:
                    body = await session.request(
                        messages.pack(messages.GetBlob(blob.digest)), seconds=10, what="fetching"
                    )
                    pieces.append(messages.expect(messages.BlobReply, body).data)
                assert b"".join(pieces) == (trainer.run.folder.policy(0) / file.name).read_bytes()
            with pytest.raises(Refused) as caught:
                await session.request(messages.pack(messages.GetBlob(b"\0" * 32)), seconds=10, what="fetching")
            assert caught.value.code is Code.NOT_FOUND
            nursery.cancel_scope.cancel()


@on_trio
async def test_a_policy_damaged_on_our_disk_is_our_fault_and_is_not_sent(make_run: MakeRun) -> None:
    run = make_run()
    async with trainer_at_work(run) as trainer, trainer.network.host(identity_of("node"), listen=()) as host:
        signed = trainer.office.shelf.manifest()
        assert signed is not None
        manifest = unseal(Manifest, signed)
        (run.folder.policy(0) / "tokenizer.json").write_bytes(b"damaged")
        digest = next(file for file in manifest.files if file.name == "tokenizer.json").blobs[0].digest
        session = Session(await host.open(trainer.address, messages.BLOB_PROTOCOL, seconds=5))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(session.run, None, None)
            with pytest.raises(Refused) as caught:
                await session.request(messages.pack(messages.GetBlob(digest)), seconds=10, what="fetching")
            assert caught.value.code is Code.INTERNAL
            nursery.cancel_scope.cancel()


def publish(trainer: Trainer, version: int) -> bytes:
    """A next policy, as the learner leaves it: a folder and a row."""
    from protocol.policy import policy_root

    folder = trainer.run.folder.policy(version)
    shutil.copytree(trainer.run.folder.policy(0), folder)
    (folder / "generation_config.json").write_text(f'{{"eos_token_id": 3, "version": {version}}}\n')
    root = policy_root(folder)
    trainer.ledger.add_policy(version, root, time.time_ns() // 1_000_000)
    return root


@on_trio
async def test_a_policy_the_learner_published_is_signed_and_announced(make_run: MakeRun) -> None:
    async with trainer_at_work(make_run()) as trainer, trainer.node() as client:
        root = publish(trainer, 1)
        while not client.announced:
            await client.beat()
        manifest = unseal(Manifest, client.announced[0], signer=trainer.office.signer.node)
        assert manifest.version == 1 and manifest.root == root
        reply = await client.ask(messages.GetManifest(None), messages.ManifestReply)
        assert reply.manifest == client.announced[0]
        assert [lease.policy_root for lease in await client.leases(1, (1,))] == [root]
        error = await refusal(client, messages.GetManifest(7))
        assert error.code is Code.NOT_FOUND and "latest is 1" in str(error)


# --- leases ---


@on_trio
async def test_a_lease_is_signed_and_bound_to_the_node_and_to_seeds_nobody_can_foresee(make_run: MakeRun) -> None:
    run = make_run()
    async with trainer_at_work(run) as trainer, trainer.node() as client:
        (lease,) = await client.leases(4)
        assert lease.node == client.who.node and lease.run == run.run
        assert [slot.index for slot in lease.slots] == [0, 1, 2, 3]
        secret = load_secrets(run).seeds
        assert lease.slots[2].seed == slot_seed(
            SeedInput(run.run, lease.policy_root, "tools8@1", "", lease.task_index, lease.group_id, 2, secret)
        )
        assert lease.max_turn_tokens == 14 and lease.max_tokens == 64 and lease.temperature == 1.0
        assert lease.deadline_ms - lease.issued_ms == 120_000


@on_trio
async def test_a_lease_given_back_is_leased_again_with_the_same_seed(make_run: MakeRun) -> None:
    async with trainer_at_work(make_run()) as trainer, trainer.node("a") as a, trainer.node("b") as b:
        (lease,) = await a.leases(2)
        await a.ask(messages.ReturnLease(lease.lease_id, "going to sleep"), messages.Returned)
        (again,) = await b.leases(2)
        assert again.group_id == lease.group_id and again.slots == lease.slots and again.lease_id != lease.lease_id
        returned = trainer.ledger.view("SELECT returned, expired FROM nodes WHERE node = ?", (a.who.node,))[0]
        assert returned == {"returned": 2, "expired": 0}


@on_trio
async def test_nobody_gives_back_the_lease_of_another(make_run: MakeRun) -> None:
    async with trainer_at_work(make_run()) as trainer, trainer.node("a") as a, trainer.node("b") as b:
        (lease,) = await a.leases(1)
        error = await refusal(b, messages.ReturnLease(lease.lease_id, "not mine"))
        assert error.code is Code.NOT_FOUND
        assert trainer.ledger.leased_slots(a.who.node) == 1


@on_trio
async def test_an_expired_lease_frees_its_slots_and_counts_on_the_node(make_run: MakeRun) -> None:
    async with trainer_at_work(make_run(lease_seconds=0.001)) as trainer, trainer.node("a") as a:
        (lease,) = await a.leases(3)
        expired = {"expired": 0}
        while expired["expired"] == 0:
            await trio.sleep(0.05)
            expired = trainer.ledger.view("SELECT expired FROM nodes")[0]
        assert expired["expired"] == 3
        assert {row.state for row in trainer.ledger.slots_of(lease.group_id)} == {SlotState.FREE}


@on_trio
async def test_an_environment_that_raises_costs_no_node_anything(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer.office, "STOCK_SECONDS", 0.0)
    with monkeypatch.context() as patch:
        patch.setattr(base, "load", lambda name, parameters: base.GuardedEnvironment(Broken(), name))
        async with trainer_at_work(make_run()) as at_work, at_work.node() as client:
            reply = await client.ask(messages.GetLeases(4, (0,)), messages.LeasesReply)
            while "being prepared" in reply.cause:
                reply = await client.ask(messages.GetLeases(4, (0,)), messages.LeasesReply)
            assert reply.leases == () and "a fault of the trainer" in reply.cause and reply.retry_ms > 0
            event = at_work.ledger.view("SELECT text FROM events WHERE kind = 'environment'")[0]
            assert "RuntimeError: out of order" in event["text"]
            assert at_work.ledger.groups_made() == 0


class Broken:
    """An environment with a bug."""

    name = "tools8@1"
    max_turns = 2
    max_new_tokens = 14

    def prompt(self, index: int) -> Any:
        raise RuntimeError("out of order")

    step = reward = prompt


# --- submissions ---


@on_trio
async def test_an_honest_trace_is_receipted_judged_and_completes_its_group(make_run: MakeRun, script: Script) -> None:
    async with trainer_at_work(make_run()) as trainer, trainer.node() as client:
        (lease,) = await client.leases(4)
        traces = [script.trace(lease, slot, right=slot < 2) for slot in range(4)]
        for number, trace in enumerate(traces, start=1):
            reply = await client.submit(trace)
            assert reply.receipt is not None and reply.verdict is None
            receipt = unseal(Receipt, reply.receipt, signer=trainer.office.signer.node)
            assert receipt.trace_digest == seal(client.who, trace).digest
            assert (receipt.sequence, receipt.slot, receipt.node) == (number, trace.slot, client.who.node)
        verdicts = await client.verdicts(4)
        for verdict in verdicts:
            check_verdict(verdict)
            assert verdict.outcome is Outcome.ACCEPTED and not verdict.audited
            assert [check.name for check in verdict.checks] == [*CHEAP, *DEAR]
        assert sorted(verdict.reward or 0.0 for verdict in verdicts) == [0.0, 0.0, 1.0, 1.0]
        assert trainer.ledger.count_groups(GroupState.COMPLETE) == 1
        assert trainer.ledger.count_informative() == 1
        node = trainer.ledger.view("SELECT accepted, refused, leased FROM nodes")[0]
        assert node == {"accepted": 4, "refused": 0, "leased": 4}


@on_trio
async def test_the_same_trace_again_gets_the_same_receipt_and_counts_once(make_run: MakeRun, script: Script) -> None:
    async with trainer_at_work(make_run()) as trainer, trainer.node() as client:
        (lease,) = await client.leases(1)
        signed = seal(client.who, script.trace(lease, 0))
        timings = (messages.Timing(1, 2, 3, 4, 5), messages.Timing(9, 9, 9, 9, 9), None)
        replies = [await client.send(signed, timing) for timing in timings]
        assert len({reply.receipt for reply in replies}) == 1
        # What its node says of its time holds as it was said first.
        assert list(trainer.ledger.view(f"SELECT {TIMES} FROM submissions")[0].values()) == [1, 2, 3, 4, 5]
        await client.verdicts(1)
        late = await client.send(signed)
        assert late.receipt == replies[0].receipt
        assert late.verdict is not None and unseal(Verdict, late.verdict).outcome is Outcome.ACCEPTED
        assert trainer.ledger.view("SELECT COUNT(*) AS n FROM submissions")[0]["n"] == 1
        assert trainer.ledger.view("SELECT accepted FROM nodes")[0]["accepted"] == 1


def turned_away(reply: messages.Submitted, trainer: Trainer) -> Verdict:
    """The signed refusal of a trace that was not taken in."""
    assert reply.receipt is None and reply.verdict is not None
    verdict = unseal(Verdict, reply.verdict, signer=trainer.office.signer.node)
    check_verdict(verdict)
    assert verdict.outcome is Outcome.REFUSED
    failed = [check for check in verdict.checks if check.outcome is CheckOutcome.FAILED]
    assert [check.reason for check in failed] == [verdict.reason] and failed[0].detail
    return verdict


@on_trio
async def test_a_slot_answered_with_other_bytes_is_refused_as_redeemed(make_run: MakeRun, script: Script) -> None:
    async with trainer_at_work(make_run()) as trainer, trainer.node() as client:
        (lease,) = await client.leases(1)
        await client.submit(script.trace(lease, 0))
        other = await client.submit(script.trace(lease, 0, right=False))
        assert turned_away(other, trainer).reason is Reason.LEASE_REDEEMED
        assert [each.outcome for each in await client.verdicts(2)].count(Outcome.ACCEPTED) == 1


@on_trio
async def test_the_lease_of_another_node_cannot_be_redeemed(make_run: MakeRun, script: Script) -> None:
    async with trainer_at_work(make_run()) as trainer, trainer.node("a") as a, trainer.node("b") as b:
        (lease,) = await a.leases(1)
        theirs = dataclasses.replace(script.trace(lease, 0), node=b.who.node)
        assert turned_away(await b.submit(theirs), trainer).reason is Reason.LEASE_NOT_YOURS
        assert (await a.submit(script.trace(lease, 0))).receipt is not None


@on_trio
async def test_a_copied_trace_is_refused_to_the_copycat_and_stands_for_its_author(
    make_run: MakeRun, script: Script
) -> None:
    async with trainer_at_work(make_run()) as trainer, trainer.node("author") as author, trainer.node("cat") as cat:
        (lease,) = await author.leases(1)
        signed = seal(author.who, script.trace(lease, 0))
        await author.send(signed)
        await author.verdicts(1)
        resigned = Signed(signed.payload, cat.who.node, cat.who.sign(Trace.DOMAIN, signed.payload))
        for copy in (signed, resigned):
            assert turned_away(await cat.send(copy), trainer).reason is Reason.SIGNATURE
        again = await author.send(signed)
        assert again.verdict is not None and unseal(Verdict, again.verdict).outcome is Outcome.ACCEPTED
        counts = {row["node"]: row["accepted"] for row in trainer.ledger.view("SELECT node, accepted FROM nodes")}
        assert counts == {author.who.node: 1, cat.who.node: 0}


@on_trio
async def test_a_trace_of_another_run_or_of_no_lease_or_slot_is_refused(make_run: MakeRun, script: Script) -> None:
    async with trainer_at_work(make_run()) as trainer, trainer.node() as client:
        (lease,) = await client.leases(1)
        honest = script.trace(lease, 0)
        for change, reason in (
            ({"run": b"\x07" * 32}, Reason.WRONG_RUN),
            ({"lease_id": b"\x07" * 16}, Reason.LEASE_UNKNOWN),
            ({"slot": 3}, Reason.SLOT_NOT_LEASED),
        ):
            reply = await client.submit(dataclasses.replace(honest, **change))
            assert turned_away(reply, trainer).reason is reason
        assert (await client.submit(honest)).receipt is not None, "the lease is still good"


@on_trio
async def test_a_late_trace_is_refused_as_expired_and_not_counted_as_cheating(
    make_run: MakeRun, script: Script
) -> None:
    async with trainer_at_work(make_run(lease_seconds=0.001)) as trainer, trainer.node() as client:
        (lease,) = await client.leases(1)
        await trio.sleep(0.01)
        verdict = turned_away(await client.submit(script.trace(lease, 0)), trainer)
        assert verdict.reason is Reason.LEASE_EXPIRED
        assert trainer.ledger.view("SELECT refused FROM nodes")[0]["refused"] == 0


@on_trio
async def test_a_trace_under_a_lease_that_was_given_back_is_refused_as_expired(
    make_run: MakeRun, script: Script
) -> None:
    async with trainer_at_work(make_run()) as trainer, trainer.node() as client:
        (lease,) = await client.leases(1)
        await client.ask(messages.ReturnLease(lease.lease_id, "no more"), messages.Returned)
        verdict = turned_away(await client.submit(script.trace(lease, 0)), trainer)
        assert verdict.reason is Reason.LEASE_EXPIRED
        assert any("given back" in check.detail for check in verdict.checks)


def raw_trace(trace: Trace, **fields: bytes) -> bytes:
    """Canonical bytes of a trace with some byte strings replaced, past what our own types would hold."""
    import msgpack

    return bytes(msgpack.packb({**codec.to_plain(trace), **fields}, use_bin_type=True))


@on_trio
async def test_what_is_no_trace_is_an_error_and_holds_nobody_to_anything(make_run: MakeRun, script: Script) -> None:
    async with trainer_at_work(make_run()) as trainer, trainer.node() as client:
        (lease,) = await client.leases(1)
        honest = script.trace(lease, 0)
        payload = codec.encode(honest)

        async def send(payload: bytes) -> Refused:
            signature = client.who.sign(Trace.DOMAIN, payload)
            return await refusal(client, messages.Submit(Signed(payload, client.who.node, signature)))

        truncated = await send(payload[:-10])
        assert truncated.code is Code.MALFORMED
        trailing = await send(payload + b"\0")
        assert trailing.code is Code.MALFORMED
        nans = struct.pack("<f", float("nan")) * len(honest.logprobs)
        not_a_number = await send(raw_trace(honest, logprobs=nans))
        assert not_a_number.code is Code.MALFORMED and "logprobs: value 0 is not finite" in str(not_a_number)
        huge = await send(b"\xc4" + b"\0" * (limits.MAX_TRACE_BYTES + 1))
        assert huge.code is Code.TOO_LARGE
        long = await send(raw_trace(honest, tokens=b"\0" * 4 * (limits.MAX_TRACE_TOKENS + 1)))
        assert long.code is Code.TOO_LARGE
        forged = Signed(payload, client.who.node, b"\x01" * 64)
        assert (await refusal(client, messages.Submit(forged))).code is Code.BAD_SIGNATURE
        assert trainer.ledger.view("SELECT COUNT(*) AS n FROM verdicts")[0]["n"] == 0
        assert (await client.submit(honest)).receipt is not None


@on_trio
async def test_a_trace_that_fails_a_cheap_check_is_refused_with_its_reason(make_run: MakeRun, script: Script) -> None:
    run = make_run()
    async with trainer_at_work(run) as trainer, trainer.node() as client:
        cases: list[tuple[Reason, Callable[[Trace], dict[str, Any]]]] = [
            (Reason.STRUCTURE, lambda t: {"tokens": (), "spans": (), "logprobs": (), "proofs": ()}),
            (Reason.STRUCTURE, lambda t: {"logprobs": t.logprobs[:-1]}),
            (Reason.TOKEN_RANGE, lambda t: {"tokens": (4_000_000_000, *t.tokens[1:])}),
            (Reason.POLICY, lambda t: {"policy_version": 3}),
            (Reason.PROOF_FORM, lambda t: {"proofs": ()}),
            (Reason.REWARD, lambda t: {"reward": 0.25}),
            (Reason.OBSERVATION, lambda t: {"tokens": _other_observation(t)}),
        ]
        leases = await client.leases(len(cases))
        slots = [(lease, slot.index) for lease in leases for slot in lease.slots]
        for (lease, slot), (_, change) in zip(slots, cases, strict=True):
            trace = script.trace(lease, slot)
            reply = await client.submit(dataclasses.replace(trace, **change(trace)))
            assert reply.receipt is not None, "it answers a lease, so it is kept as evidence"
        verdicts = await client.verdicts(len(cases))
        assert [verdict.reason for verdict in verdicts] == [reason for reason, _ in cases]
        states = {row.state for lease in leases for row in trainer.ledger.slots_of(lease.group_id)}
        assert SlotState.ANSWERED not in states and SlotState.ACCEPTED not in states
        assert trainer.ledger.view("SELECT refused FROM nodes")[0]["refused"] == len(cases)
        again = [each.group_id for each in await client.leases(8)]
        assert not set(again) & {lease.group_id for lease in leases[:1]}, "refused slots go to other nodes"


def _other_observation(trace: Trace) -> tuple[int, ...]:
    place = trace.spans[0].length
    return (*trace.tokens[:place], trace.tokens[place] + 1, *trace.tokens[place + 1 :])


@on_trio
async def test_an_environment_that_fails_while_judging_leaves_the_trace_unjudged_and_the_slot_free(
    make_run: MakeRun, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with trainer_at_work(make_run()) as trainer, trainer.node() as client:
        (lease,) = await client.leases(1)
        broken = base.GuardedEnvironment(Broken(), "tools8@1")
        monkeypatch.setitem(trainer.office.judge._examiner._environments, ("tools8@1", ""), broken)
        await client.submit(script.trace(lease, 0))
        (verdict,) = await client.verdicts(1)
        assert verdict.outcome is Outcome.NOT_JUDGED and verdict.reason is Reason.ENVIRONMENT_FAULT
        assert trainer.ledger.view("SELECT refused, accepted FROM nodes")[0] == {"refused": 0, "accepted": 0}
        assert trainer.ledger.slots_of(lease.group_id)[0].state is SlotState.FREE


@on_trio
async def test_a_bug_in_a_check_leaves_the_trace_unjudged_and_the_gateway_running(
    make_run: MakeRun, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    import trainer.inbox

    def bug(*arguments: Any, **named: Any) -> Any:
        raise IndexError("off by one")

    async with trainer_at_work(make_run()) as trainer_, trainer_.node() as client:
        (lease,) = await client.leases(2)
        with monkeypatch.context() as patch:
            patch.setattr(trainer.inbox, "cheap_checks", bug)
            await client.submit(script.trace(lease, 0))
            (verdict,) = await client.verdicts(1)
        assert verdict.reason is Reason.VERIFIER_FAULT
        assert "off by one" in trainer_.ledger.view("SELECT text FROM events WHERE kind = 'fault'")[0]["text"]
        await client.submit(script.trace(lease, 1))
        assert (await client.verdicts(1))[0].outcome is Outcome.ACCEPTED


@on_trio
async def test_a_trace_of_a_group_that_was_given_up_is_not_judged(make_run: MakeRun, script: Script) -> None:
    async with trainer_at_work(make_run()) as trainer, trainer.node() as client:
        (lease,) = await client.leases(1)
        trainer.ledger.drop_group(lease.group_id, "older than 8 policy versions")
        assert (await client.submit(script.trace(lease, 0))).receipt is not None
        assert (await client.verdicts(1))[0].reason is Reason.POLICY_MOVED_ON


# --- audits ---


def draws(trainer: Trainer) -> dict[bytes, Draw | None]:
    """The recorded draws, by trace digest."""
    columns = "draw_seen, draw_floor, draw_rate, drawn, draw_trusted"
    return {
        row["digest"]: None
        if row["drawn"] is None
        else Draw(row["draw_seen"], row["draw_floor"], row["draw_rate"], bool(row["drawn"]), row["draw_trusted"])
        for row in trainer.ledger.view(f"SELECT digest, {columns} FROM submissions")
    }


@on_trio
async def test_a_new_node_is_audited_in_full(make_run: MakeRun, script: Script) -> None:
    run = make_run(audits=True, audit_first=8)
    async with trainer_at_work(run) as trainer, trainer.node() as client:
        calibrate(trainer.run, trainer.ledger)
        slots = [(lease, slot.index) for lease in await client.leases(16) for slot in lease.slots]
        for place in slots[:8]:
            await client.submit(script.trace(*place))
        while trainer.ledger.waiting_audits() < 8:
            await client.beat()
        assert trainer.audit() == 8
        verdicts = await client.verdicts(8)
        assert all(verdict.audited and verdict.outcome is Outcome.ACCEPTED for verdict in verdicts)
        assert verdicts[0].verifier.dtype == "float32"
        assert set(draws(trainer).values()) == {Draw(0, 0.05, 1.0, True, None)}
        await client.submit(script.trace(*slots[8]))
        while len(found := set(draws(trainer).values()) - {None}) < 2:
            await client.beat()
        (last,) = found - {Draw(0, 0.05, 1.0, True, None)}
        assert last is not None and (last.seen, last.floor, last.rate) == (8, 0.05, rate(8, 0, 0.05))


@on_trio
async def test_a_draw_can_be_repeated_from_what_the_ledger_says_of_it(make_run: MakeRun, script: Script) -> None:
    run = make_run(audits=True)
    async with trainer_at_work(run) as trainer, trainer.node() as client:
        calibrate(trainer.run, trainer.ledger)
        client.cursor = trust(trainer.ledger, client.who, 100)
        traces = [script.trace(lease, slot.index) for lease in await client.leases(16) for slot in lease.slots]
        for trace in traces:
            await client.submit(trace)
        verdicts = []
        while None in draws(trainer).values():
            verdicts += await client.beat()
        value = AuditChain(load_secrets(run).audit).value(0)
        audits = newest_audits([(bytes([number]) * 32, True, Outcome.ACCEPTED) for number in range(100)])
        for digest, draw in draws(trainer).items():
            assert draw is not None and draw.seen >= 100
            assert draw.rate == sampling_rate(audits, run.config.audit_first, draw.floor)
            assert draw.drawn is is_drawn(value, digest, draw.rate)
        drawn = [draw.drawn for draw in draws(trainer).values() if draw is not None]
        assert len(drawn) == 16 and trainer.ledger.waiting_audits() == drawn.count(True)
        verdicts += await client.verdicts(drawn.count(False) - len(verdicts))
        assert {verdict.audited for verdict in verdicts} == {False}
        node = trainer.ledger.view("SELECT rate FROM nodes")[0]
        assert node["rate"] == pytest.approx(0.47, abs=0.005)


@on_trio
async def test_a_trusted_node_is_audited_in_full_while_its_pair_of_engines_is_not_calibrated(
    make_run: MakeRun, script: Script
) -> None:
    async with trainer_at_work(make_run(audits=True)) as trainer, trainer.node() as client:
        calibrate(trainer.run, trainer.ledger, dataclasses.replace(ENGINE, name="another"))
        client.cursor = trust(trainer.ledger, client.who, 400)
        (lease,) = await client.leases(4)
        for slot in range(4):
            await client.submit(script.trace(lease, slot))
        while trainer.ledger.waiting_audits() < 4:
            await client.beat()
        assert {draw.rate for draw in draws(trainer).values() if draw is not None} == {1.0}


@on_trio
async def test_a_node_that_joins_is_shown_with_the_rate_of_its_first_trace(make_run: MakeRun) -> None:
    async with trainer_at_work(make_run(audits=True, audit_floor=0.25)) as trainer:
        trainer.ledger.name_nodes(home=None, always=(), anew=(identity_of("one").node,))

        async def shown(name: str) -> float:
            async with trainer.node(name) as client:
                (row,) = trainer.ledger.view("SELECT rate FROM nodes WHERE node = ?", (client.who.node,))
            return float(row["rate"])

        assert await shown("one") == 1.0, "its pair of engines is not calibrated"
        calibrate(trainer.run, trainer.ledger)
        assert (await shown("one"), await shown("two")) == (0.25, 1.0)


@on_trio
async def test_a_node_that_a_person_trusts_is_audited_at_the_floor_from_its_first_trace_until_it_lies(
    make_run: MakeRun, script: Script
) -> None:
    async with trainer_at_work(make_run(audits=True, audit_floor=0.25)) as trainer, trainer.node() as client:
        calibrate(trainer.run, trainer.ledger)
        trainer.ledger.name_nodes(home=None, always=(), anew=(client.who.node,))
        slots = [(lease, slot.index) for lease in await client.leases(16) for slot in lease.slots]
        for place in slots[:8]:
            await client.submit(script.trace(*place))
        while len([draw for draw in draws(trainer).values() if draw is not None]) < 8:
            await client.beat()
        early = [draw for draw in draws(trainer).values() if draw is not None]
        assert {(draw.rate, draw.trusted) for draw in early} == {(0.25, 0)}
        unseen = sum(not draw.drawn for draw in early)
        # A lie about the reward is found on all traces, and costs what was given on trust alone.
        reply = await client.submit(dataclasses.replace(script.trace(*slots[8]), reward=123.0))
        assert reply.receipt is not None
        lie = codec.decode(Receipt, reply.receipt.payload).trace_digest
        while trainer.ledger.trusted():
            await client.beat()
        for place in slots[9:]:
            await client.submit(script.trace(*place))
        while None in (found := [draw for digest, draw in draws(trainer).items() if digest != lie]):
            await client.beat()
        assert {(draw.rate, draw.trusted) for draw in found if draw is not None and draw.trusted is None} == {
            (1.0, None)
        }
        assert trainer.ledger.waiting_audits() == 15, "what was let in on trust as well"
        told = trainer.ledger.view("SELECT text FROM events WHERE kind = 'trust'")
        name = peer_id(client.who.node)
        assert [row["text"] for row in told] == [
            f"node {name}, which you trusted, was refused for REWARD: it is audited like a stranger from now on, "
            f"{unseen} traces that trust let in go to audit; to trust it again, serve the run with --trust {name}"
        ]
        shown = summary(trainer.ledger, trainer.run.config, 1)["nodes"][0]
        assert (shown["trusted"], shown["lied"], shown["rate"]) == (False, "REWARD", 1.0)
        # Only a person brings it back.
        trainer.ledger.name_nodes(home=None, always=(client.who.node,), anew=())
        assert not trainer.ledger.trusted()
        trainer.ledger.name_nodes(home=None, always=(), anew=(client.who.node,))
        assert trainer.ledger.trusted() == {client.who.node}


@on_trio
async def test_what_an_audit_found_counts_for_every_draw_after_it(make_run: MakeRun, script: Script) -> None:
    """A failed audit and a new trace that wait for the judge together: the trace is drawn by the failure."""
    async with trainer_at_work(make_run(audits=True)) as trainer, trainer.node() as client:
        calibrate(trainer.run, trainer.ledger)
        slots = [(lease, slot.index) for lease in await client.leases(8) for slot in lease.slots]
        await client.submit(script.trace(*slots[0]))
        while trainer.ledger.waiting_audits() == 0:
            await client.beat()
        client.cursor = trust(trainer.ledger, client.who, 400)
        judge = trainer.office.judge
        with held(judge):
            trainer.audit(Reason.MARGIN)
            for place in slots[1:]:
                await client.submit(script.trace(*place))
        while trainer.ledger.waiting_audits() < len(slots) - 1:
            await client.beat()
        later = [draw for draw in draws(trainer).values() if draw is not None and draw.seen]
        assert {(draw.rate, draw.drawn) for draw in later} == {(1.0, True)}
        assert all(draw.seen >= 401 for draw in later), "the failure is the 401st verdict"


@on_trio
async def test_a_failed_audit_refuses_the_trace_and_sends_what_was_trusted_to_audit(
    make_run: MakeRun, script: Script
) -> None:
    async with trainer_at_work(make_run()) as trainer, trainer.node("cheater") as client:
        (lease,) = await client.leases(4)
        for slot in range(4):
            await client.submit(script.trace(lease, slot))
        await client.verdicts(4)
        assert trainer.ledger.count_groups(GroupState.COMPLETE) == 1
        assert trainer.ledger.quarantine(client.who.node) == 4  # as after a failed audit of another trace
        assert trainer.ledger.count_groups(GroupState.COMPLETE) == 0
        assert trainer.audit(Reason.MARGIN) == 4
        verdicts = await client.verdicts(4)
        assert {(v.outcome, v.reason, v.audited) for v in verdicts} == {(Outcome.REFUSED, Reason.MARGIN, True)}
        node = trainer.ledger.view("SELECT accepted, refused, audits_failed FROM nodes")[0]
        assert node == {"accepted": 0, "refused": 4, "audits_failed": 4}
        assert (
            "failed an audit (MARGIN)" in trainer.ledger.view("SELECT text FROM events WHERE kind = 'audit'")[0]["text"]
        )


@on_trio
async def test_a_node_that_failed_an_audit_is_audited_in_full_and_gets_little_work(
    make_run: MakeRun, script: Script
) -> None:
    run = make_run(audits=True)
    async with trainer_at_work(run) as trainer, trainer.node("cheater") as cheater, trainer.node("honest") as honest:
        (lease,) = (await cheater.leases(1))[:1]
        await cheater.submit(script.trace(lease, lease.slots[0].index))
        while trainer.ledger.waiting_audits() == 0:
            await cheater.beat()
        trainer.audit(Reason.PROOF)
        await cheater.verdicts(1)
        little = await cheater.leases(16)
        assert sum(len(each.slots) for each in little) == 1
        (again,) = await honest.leases(1)
        assert (again.group_id, again.slots) == (lease.group_id, lease.slots), "same slot, same seed, another node"


@on_trio
async def test_an_auditor_that_could_not_judge_costs_the_node_nothing(make_run: MakeRun, script: Script) -> None:
    async with trainer_at_work(make_run(audits=True)) as trainer, trainer.node() as client:
        (lease,) = await client.leases(1)
        await client.submit(script.trace(lease, 0))
        while not (rows := trainer.ledger.claim_audits("auditor-0", 0, 10)):
            await client.beat()
        fault = dataclasses.replace(audit_result(), checks=(), fault=Reason.POLICY_UNAVAILABLE, error="disk gone")
        trainer.ledger.finish_audit(rows[0].sequence, codec.encode(fault), None)
        (verdict,) = await client.verdicts(1)
        assert verdict.outcome is Outcome.NOT_JUDGED and verdict.reason is Reason.POLICY_UNAVAILABLE
        assert trainer.ledger.audit_record(client.who.node) == (0, 0)


@on_trio
async def test_an_audit_of_a_group_that_was_given_up_is_not_waited_for(make_run: MakeRun, script: Script) -> None:
    async with trainer_at_work(make_run(audits=True)) as trainer, trainer.node() as client:
        (lease,) = await client.leases(1)
        await client.submit(script.trace(lease, 0))
        while trainer.ledger.waiting_audits() == 0:
            await client.beat()
        trainer.ledger.drop_group(lease.group_id, "older than 8 policy versions")
        assert (await client.verdicts(1))[0].reason is Reason.POLICY_MOVED_ON


@on_trio
async def test_a_node_whose_every_trace_is_slightly_off_is_refused_with_all_it_drew(
    make_run: MakeRun, script: Script, tmp_path: Path
) -> None:
    async with trainer_at_work(run := make_run(audits=True)) as trainer, trainer.node("off") as client:
        digest = calibrate(trainer.run, trainer.ledger)
        slots = [(lease, slot.index) for lease in await client.leases(8) for slot in lease.slots]

        async def pass_audits(places: list[Any], scores: tuple[float, ...]) -> None:
            for place in places:
                await client.submit(script.trace(*place))
            while trainer.ledger.waiting_audits() < len(places):
                await client.beat()
            trainer.audit(calibration=digest, scores=scores)

        # Alone each says e^2 to 1: nothing. ln((e^14 + e^7) / 2) = 13.3 is below ln 10^6 = 13.8, one more is not.
        await pass_audits(slots[:7], (2.0, 1.0))
        accepted = await client.verdicts(7)
        assert {verdict.outcome for verdict in accepted} == {Outcome.ACCEPTED}
        assert all((each.calibration, each.scores) == (digest, (2.0, 1.0)) for each in accepted)
        assert trainer.ledger.count_groups(GroupState.COMPLETE) == 1
        await pass_audits(slots[7:8], (2.0, 1.0))
        refused = await client.verdicts(8)
        assert {verdict.reason for verdict in refused} == {Reason.NODE_EVIDENCE}
        assert {verdict.trace_digest for verdict in accepted} < {verdict.trace_digest for verdict in refused}
        earlier = {verdict.trace_digest: verdict for verdict in accepted}
        for verdict in refused:
            check_verdict(verdict)
            assert verdict.trace_digest not in earlier or may_replace(verdict, earlier[verdict.trace_digest])
            (node,) = [check for check in verdict.checks if check.name == "node"]
            assert node.value == pytest.approx(math.log((math.exp(16) + math.exp(8)) / 2)), "each trace counts once"
        assert trainer.ledger.count_groups(GroupState.COMPLETE) == 0, "none of it is learned from"
        found = trainer.ledger.view("SELECT accepted, refused, audits_passed, audits_failed FROM nodes")[0]
        assert found == {"accepted": 0, "refused": 8, "audits_passed": 0, "audits_failed": 8}
        assert not any(trainer.ledger.latest_audits(client.who.node, trainer.ledger.last_verdict()))
        text = trainer.ledger.view("SELECT text FROM events WHERE kind = 'audit' ORDER BY id")[0]["text"]
        assert "7 that passed one under policy version 0 are judged again" in text
        export_log(run, trainer.ledger, tmp_path / "log", traces=True, policies=True)
    source = FolderSource(tmp_path / "log")
    report = audit_run(source, Rejudge(source, None, 0, "cpu"))
    assert report.disagreements == [] and report.counts["scores"] == 15, "who has the log comes to the same"


@on_trio
async def test_scores_of_a_pair_that_nobody_measured_keep_a_trace_from_the_learner_and_blame_nobody(
    make_run: MakeRun, script: Script, tmp_path: Path
) -> None:
    async with trainer_at_work(run := make_run(audits=True)) as trainer, trainer.node("new engine") as client:
        engine = dataclasses.replace(ENGINE, dtype="bfloat16")
        digest = calibrate(trainer.run, trainer.ledger, engine, provisional=True)
        (lease,) = await client.leases(2)
        for slot, outcome, reason in (
            (0, Outcome.ACCEPTED, None),
            (1, Outcome.NOT_JUDGED, Reason.PAIR_EVIDENCE),
        ):
            await client.submit(dataclasses.replace(script.trace(lease, slot), engine=engine))
            while trainer.ledger.waiting_audits() == 0:
                await client.beat()
            trainer.audit(calibration=digest, scores=(8.0, 7.0), provisional=True)
            (verdict,) = await client.verdicts(1)
            check_verdict(verdict)
            assert (verdict.outcome, verdict.reason) == (outcome, reason)
            assert (verdict.audited, verdict.calibration, verdict.scores) == (True, digest, (8.0, 7.0))
        failed = [check for check in verdict.checks if check.reason is not None]
        assert [check.name for check in failed] == ["node"] and failed[0].value > NODE_EVIDENCE_NATS
        assert trainer.ledger.audit_record(client.who.node) == (1, 0), "neither passed nor failed"
        assert trainer.ledger.calibrated_pairs() == set()
        assert trainer.ledger.view("SELECT * FROM events WHERE kind = 'audit'") == []
        export_log(run, trainer.ledger, tmp_path / "log", traces=True, policies=True)
    source = FolderSource(tmp_path / "log")
    assert audit_run(source, Rejudge(source, None, 0, "cpu")).disagreements == []


@on_trio
async def test_what_an_auditor_measured_is_signed_and_stands_beside_the_verdicts(
    make_run: MakeRun, script: Script
) -> None:
    run = make_run(audits=True)
    async with trainer_at_work(run) as trainer, trainer.node() as client:
        calibration = made_up_calibration(run, pair_of(ENGINE, run.config))
        body = codec.encode(calibration)
        digest = hashlib.sha256(body).digest()
        trainer.ledger.add_calibration(CalibrationRow(digest, pair_name(calibration.pair), 0, 0, body, False, None))
        while (row := trainer.ledger.calibration(digest)) is None or row.signed is None:
            await client.beat()
        signed = codec.decode(Signed, row.signed)
        assert signed.digest == digest and unseal(Calibration, signed, signer=run.genesis.trainer) == calibration
        assert trainer.ledger.calibrated_pairs() == {"script float32 cpu by transformers float32 cpu"}


# --- restarts and a full disk ---


@on_trio
async def test_what_waits_for_the_learner_holds_back_leases_and_does_so_after_a_restart(
    make_run: MakeRun, script: Script
) -> None:
    run = make_run(staleness_target=0)
    cause = "waiting for the learner: 1 groups wait, 1 in flight, enough for 1 steps (staleness_target 0)"
    async with trainer_at_work(run) as trainer, trainer.node() as client:
        (lease,) = await client.leases(4)
        for slot in range(4):
            await client.submit(script.trace(lease, slot, right=slot < 2))
        await client.verdicts(4)
        (lease,) = await client.leases(8)
        assert len(lease.slots) == 4 and lease.deadline_ms - lease.issued_ms == 120_000
        reply = await client.ask(messages.GetLeases(8, (0,)), messages.LeasesReply)
        assert (reply.leases, reply.cause) == ((), cause)
    async with trainer_at_work(run) as trainer, trainer.node() as client:
        reply = await client.ask(messages.GetLeases(8, (0,)), messages.LeasesReply)
        assert (reply.leases, reply.cause) == ((), cause)
        shown = summary(trainer.ledger, run.config, time.time_ns() // 1_000_000)
        told = {row["part"]: row["what"] for row in shown["waits"]}
        assert told["leases"] == cause and cause in trainer.ledger.view("SELECT waits FROM nodes")[0]["waits"]


@on_trio
async def test_a_kind_of_trace_that_is_being_lost_is_an_alarm_once(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer.leasing, "LOSSES_SECONDS", 0.0)
    run = make_run()
    with closing(Ledger(run.folder.ledger)) as ledger, ledger.write():
        story = Story(ledger)
        story.learn(story.spread(40))
    async with trainer_at_work(run) as at_work:
        query = "SELECT text FROM events WHERE kind = 'alarm' ORDER BY text"
        while not (alarms := at_work.ledger.view(query)):
            await trio.sleep(0.05)
        at_work.office.leasing.tidy(frozenset(), int(time.time() * 1000))
        assert at_work.ledger.view(query) == alarms
        assert [alarm["text"].partition(":")[0] for alarm in alarms] == [
            "long traces are being lost", "successful traces are being lost"
        ]  # fmt: skip


@on_trio
async def test_completions_that_may_be_long_get_more_time(make_run: MakeRun) -> None:
    run = make_run(max_turn_tokens=14, lease_token_seconds=0.5, max_tokens=4096)
    async with trainer_at_work(run) as trainer, trainer.node() as client:
        (short,) = await client.leases(1)
        assert short.deadline_ms - short.issued_ms == 120_000, "two turns of 14 tokens, whatever max_tokens is"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(trainer.office.leasing._stock, "turns", lambda *_: 100)
            (long,) = await client.leases(1)
        assert long.deadline_ms - long.issued_ms == 120_000 + (1400 - 1024) * 500


@on_trio
async def test_leases_receipts_and_verdicts_outlive_the_gateway(make_run: MakeRun, script: Script) -> None:
    run = make_run(audits=True)
    async with trainer_at_work(run) as trainer, trainer.node() as client:
        (lease,) = await client.leases(3)
        first = seal(client.who, script.trace(lease, 0))
        receipt = (await client.send(first)).receipt
        while trainer.ledger.waiting_audits() == 0:
            await client.beat()
    async with trainer_at_work(run) as trainer, trainer.node() as client:
        assert (await client.send(first)).receipt == receipt
        assert (await client.submit(script.trace(lease, 1))).receipt is not None
        while trainer.ledger.waiting_audits() < 2:
            await client.beat()
        trainer.audit()
    async with trainer_at_work(run) as trainer, trainer.node() as client:
        verdicts = await client.verdicts(2)
        assert {verdict.outcome for verdict in verdicts} == {Outcome.ACCEPTED}
        assert trainer.ledger.view("SELECT accepted FROM nodes")[0]["accepted"] == 2
        assert trainer.ledger.view("SELECT COUNT(*) AS n FROM submissions")[0]["n"] == 2


@on_trio
async def test_what_was_received_and_not_yet_judged_is_judged_after_a_restart(
    make_run: MakeRun, script: Script
) -> None:
    run = make_run()
    async with trainer_at_work(run) as trainer, trainer.node() as client:
        (lease,) = await client.leases(1)
        await client.submit(script.trace(lease, 0))
        await client.verdicts(1)
    ledger = Ledger(run.folder.ledger)
    with ledger.write():  # as if the process had died between receipt and verdict
        ledger._db.execute("DELETE FROM verdicts")
        ledger._db.execute("UPDATE submissions SET state = ?", (SubmissionState.RECEIVED,))
        ledger._db.execute("UPDATE slots SET state = ? WHERE digest IS NOT NULL", (SlotState.ANSWERED,))
    ledger.close()
    async with trainer_at_work(run) as trainer, trainer.node() as client:
        assert (await client.verdicts(1))[0].outcome is Outcome.ACCEPTED


@on_trio
async def test_a_full_disk_makes_nodes_wait_and_loses_nothing(make_run: MakeRun, script: Script) -> None:
    async with trainer_at_work(make_run()) as trainer, trainer.node() as client:
        (lease,) = await client.leases(4)
        writer = trainer.office.writer
        pages = writer.view("PRAGMA page_count")[0]["page_count"]
        await trainer.office.clerk.do(lambda: None)
        writer.view(f"PRAGMA max_page_count = {pages}")
        padded = [dataclasses.replace(script.trace(lease, slot)) for slot in range(4)]
        outcomes = []
        for trace in padded:
            try:
                outcomes.append(await client.submit(trace))
            except Refused as error:
                assert error.code is Code.BUSY and "full" in str(error)
                outcomes.append(error)
        assert any(isinstance(outcome, Refused) for outcome in outcomes)
        writer.view("PRAGMA max_page_count = 1000000")
        for trace in padded:
            assert (await client.submit(trace)).receipt is not None
        assert {verdict.outcome for verdict in await client.verdicts(4)} == {Outcome.ACCEPTED}


@on_trio
async def test_a_nearly_full_disk_pauses_the_run_with_the_cause_and_goes_on_when_there_is_room(
    make_run: MakeRun, script: Script
) -> None:
    async with trainer_at_work(make_run(), disk_reserve=2**60) as trainer, trainer.node() as client:
        error = await refusal(client, messages.GetLeases(1, (0,)))
        assert error.code is Code.BUSY and "disk is nearly full" in str(error)
        await client.beat()
        trainer.gateway._disk_reserve = 0
        with trio.fail_after(10):
            while True:
                try:
                    assert await client.leases(1)
                    break
                except Refused:
                    await trio.sleep(0.05)
        texts = [row["text"] for row in trainer.ledger.view("SELECT text FROM events WHERE kind = 'disk'")]
        assert "nearly full" in texts[0] and "room" in texts[1]


@on_trio
async def test_heartbeats_reach_the_ledger_and_a_lost_node_is_marked_away(make_run: MakeRun) -> None:
    async with trainer_at_work(make_run()) as trainer:
        async with trainer.node() as client:
            speed = 0.0
            while speed == 0.0:
                await client.beat()
                speed = trainer.ledger.view("SELECT tokens_per_second AS s FROM nodes")[0]["s"]
            assert speed == 12.5
        while trainer.ledger.view("SELECT connected FROM nodes")[0]["connected"]:
            await trio.sleep(0.01)


@on_trio
async def test_verdicts_too_large_for_one_reply_come_in_several(make_run: MakeRun, script: Script) -> None:
    async with trainer_at_work(make_run()) as trainer, trainer.node() as client:
        (lease,) = (await client.leases(1))[:1]
        trace = script.trace(lease, 0)
        detail = as_check(Finding("structure", Reason.STRUCTURE, "x" * limits.MAX_TEXT_CHARACTERS))
        notary = trainer.office.inbox.notary
        large = notary.verdict(trace, b"d" * 32, client.who.node, Reason.STRUCTURE, (detail,) * limits.MAX_CHECKS)
        with trainer.ledger.write():
            for number in range(100):
                digest = number.to_bytes(32, "big")
                trainer.ledger.add_verdict(
                    client.who.node, digest, SubmissionState.REFUSED, "STRUCTURE", False, 1, codec.encode(large)
                )
        first = await client.beat()
        assert 10 < len(first) < 100
        assert len(first) + len(await client.verdicts(100 - len(first))) == 100


def test_a_secret_of_another_run_is_refused_at_start(make_run: MakeRun) -> None:
    from protocol.errors import LocalError
    from trainer.office import open_office
    from trainer.rundir import Secrets, save_secrets

    run = make_run()
    run.folder.secret.unlink()
    save_secrets(Secrets(b"\1" * 32, b"\2" * 32), run.folder.secret)
    with pytest.raises(LocalError, match="not the secret of this run"), open_office(run):
        pass


# --- who else is there ---


@on_trio
async def test_nodes_are_named_to_each_other_while_they_are_connected(make_run: MakeRun) -> None:
    address = "/ip4/203.0.113.7/tcp/4001"

    async def others(client: Client, about: tuple[bytes, ...] = ()) -> tuple[messages.Peer, ...]:
        request = messages.GetPeers(0, (address,), (0,), about)
        return (await client.ask(request, messages.PeersReply)).peers

    async with trainer_at_work(make_run()) as trainer, trainer.node("first") as first:
        assert await others(first) == ()
        async with trainer.node("second") as second:
            (found,) = await others(second)
            assert found == messages.Peer(first.who.node, (address,), (0,))
            (found,) = await others(first, about=(second.who.node,))
            assert found.node == second.who.node
        while await others(first):
            await trio.sleep(0.01)


@on_trio
async def test_who_has_not_said_hello_is_told_of_nobody(make_run: MakeRun) -> None:
    async with trainer_at_work(make_run()) as trainer, trainer.dial(identity_of("node")) as client:
        found = await refusal(client, messages.GetPeers(None, (), (), ()), messages.PeersReply)
        assert found.code is Code.UNEXPECTED_MESSAGE


@on_trio
async def test_a_node_is_given_the_trainers_word_to_show_to_others(make_run: MakeRun) -> None:
    async with trainer_at_work(make_run()) as trainer, trainer.node() as client:
        reply = await client.ask(messages.GetPeers(None, (), (), ()), messages.PeersReply)
        genesis = trainer.run.genesis
        told = {"run": trainer.run.run, "trainer": genesis.trainer, "node": client.who.node}
        now_ms = time.time_ns() // 1_000_000
        assert open_membership(reply.membership, **told, now_ms=now_ms + 6 * 86_400_000)
        with pytest.raises(RemoteError, match="expired"):
            open_membership(reply.membership, **told, now_ms=now_ms + 8 * 86_400_000)


@on_trio
async def test_the_trainer_relays_for_nodes_with_a_session_alone_and_shows_what_it_carried(make_run: MakeRun) -> None:
    async with trainer_at_work(make_run()) as trainer:
        member, stranger = identity_of("node"), identity_of("stranger")
        async with (
            trainer.network.host(member, nat=Nat.RANDOM_PORTS) as behind,
            trainer.network.host(stranger) as guest,
            dialled(behind, trainer.address, member, trainer.run.run) as client,
        ):
            behind.serve("/echo", _echo)
            with pytest.raises(Unreachable):
                await behind.reserve(trainer.address, seconds=5)
            await client.hello()
            reservation = await behind.reserve(trainer.address, seconds=5)
            with pytest.raises(Unreachable):
                await guest.reserve(trainer.address, seconds=5)
            stream = await guest.open(reservation.address, "/echo", seconds=5)
            await stream.send(bytes(100_000), seconds=5, what="sending")
            await stream.receive(seconds=5, what="waiting for the echo")
            while (found := read_network(trainer.run.folder)) is None or not found["relayed_bytes"]:
                await trio.sleep(0.05)
            assert found["reservations"] == 1 and found["relayed_bytes"] >= 200_000
            assert "0.2 MB relayed between nodes (1 can be reached through here, 1 circuits now)" in network_line(found)


async def _echo(stream: Stream) -> None:
    await stream.send(await stream.receive(seconds=5, what="waiting"), seconds=5, what="echoing")
    await trio.sleep_forever()


@on_trio
async def test_a_trainer_that_is_told_to_is_no_relay(make_run: MakeRun) -> None:
    run, who = make_run(relay_mib_per_second=0.0), identity_of("node")
    async with trainer_at_work(run) as trainer, trainer.network.host(who) as host:
        with pytest.raises(Unreachable, match="it is no relay"):
            await host.reserve(trainer.address, seconds=5)


def test_the_limits_of_the_trainer_as_a_relay_are_its_settings() -> None:
    found = relay_limits(TrainerConfig(relay_mib_per_second=3.0, relay_nodes=5, relay_circuit_minutes=2.0))
    assert found is not None
    assert (found.bytes_per_second, found.reservations, found.circuit_seconds) == (3 * 2**20, 5, 120)
