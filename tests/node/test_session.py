"""The conversation with a trainer that restarts, refuses, lies, is busy or is not there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import trio

from node.report import Level
from protocol import limits, messages
from protocol.envelope import seal
from protocol.errors import Code, RemoteError
from protocol.identity import Identity
from protocol.messages import Version
from protocol.verdict import Outcome, Reason
from tests.node.rig import EMBEDDED, Node, World, world
from tests.node.small_trainer import SmallTrainer


def run_folder(node: Node) -> Path:
    return node.config.home / "runs" / node.config.address.run.hex()[:16]


async def until_ended(node: Node) -> None:
    with trio.fail_after(90):
        await node.ended.wait()


# --- joining ---


def test_a_node_keeps_trying_while_the_trainer_is_not_there_and_then_works(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as w:
            address = w.trainer.address(w.host)
            absent = SmallTrainer(identity=w.trainer.identity)
            node = w.node(address=type(address)("/memory/77", absent.identity.node, w.trainer.run))
            said = await node.until_said("disconnected", 2)
            assert "nobody listens there" in said.text and "next try in" in said.text
            assert "nobody listens there" in node.status.lost_because
            async with w.network.host(absent.identity, listen=("/memory/77",)) as host:
                w.trainer.serve(host)
                await w.trainer.until(lambda: len(w.trainer.traces) >= 1)
                assert node.status.lost_because == ""
                await node.leave()
            assert node.failure is None

    trio.run(scenario)


@pytest.mark.parametrize(
    ("protocol", "told"),
    [
        (Version(2, 0), "rlnode 0.0 speaks protocol 1.0, rltrainer 9.9 speaks 2.0: upgrade rlnode 0.0"),
        (Version(0, 9), "rlnode 0.0 speaks protocol 1.0, rltrainer 9.9 speaks 0.9: upgrade rltrainer 9.9"),
    ],
)
def test_another_protocol_version_ends_the_node_naming_both_and_what_to_upgrade(
    tmp_path: Path, protocol: Version, told: str
) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as w:
            w.trainer.protocol = protocol
            node = w.node()
            await until_ended(node)
            assert isinstance(node.failure, RemoteError)
            assert node.failure.code == Code.VERSION_MISMATCH and told in str(node.failure)

    trio.run(scenario)


def test_an_address_of_another_run_ends_the_node(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as w:
            address = w.trainer.address(w.host)
            node = w.node(address=type(address)(address.multiaddr, address.trainer, b"\5" * 32))
            await until_ended(node)
            assert isinstance(node.failure, RemoteError) and node.failure.code == Code.WRONG_RUN

    trio.run(scenario)


def test_a_trainer_that_shows_the_genesis_of_another_run_is_not_believed(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as w:
            other = SmallTrainer(identity=w.trainer.identity, group_size=3)
            other.genesis = seal(Identity.generate(), messages_genesis(w))
            manifest = w.trainer.policies[0].signed

            def lie(request: Any) -> Any:
                if isinstance(request, messages.Hello):
                    return messages.Welcome(Version(1, 0), "x", other.genesis, manifest, w.trainer.now())
                return None

            w.trainer.on_request = lie
            node = w.node()
            said = await node.until_said("disconnected")
            assert "the genesis is signed by" in said.text
            assert w.trainer.leases == {}

    trio.run(scenario)


def messages_genesis(w: World):  # type: ignore[no-untyped-def]
    from protocol.codec import decode
    from protocol.run import Genesis

    return decode(Genesis, w.trainer.genesis.payload)


@pytest.mark.parametrize(("offset", "told"), [(3_600_000, "60 minutes behind"), (-7_200_000, "2.0 hours ahead of")])
def test_a_clock_that_is_off_by_an_hour_ends_the_node_naming_by_how_much(
    tmp_path: Path, offset: int, told: str
) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as w:
            w.trainer.clock_offset_ms = offset
            node = w.node()
            await until_ended(node)
            assert isinstance(node.failure, RemoteError) and node.failure.code == Code.CLOCK_SKEW
            assert f"this machine's clock is {told} the trainer's" in str(node.failure)
            assert "timedatectl" in str(node.failure)

    trio.run(scenario)


def test_deadlines_are_kept_by_the_trainers_clock(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as w:
            w.trainer.clock_offset_ms = -200_000  # leases look long expired by this machine's clock
            w.trainer.max_leases = 2
            node = w.node()
            await w.trainer.until(lambda: len(w.trainer.traces) == 8)
            assert w.trainer.returned == {} and node.failure is None
            trace = next(iter(w.trainer.traces.values()))
            assert abs(trace.finished_ms - w.trainer.now()) < 30_000

    trio.run(scenario)


def test_a_banned_node_ends_with_the_trainers_reason(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as w:
            w.trainer.on_request = lambda request: RemoteError(Code.BANNED, "banned: 20 traces failed MARGIN")
            node = w.node()
            await until_ended(node)
            assert str(node.failure) == "banned: 20 traces failed MARGIN"

    trio.run(scenario)


def test_a_key_in_use_on_two_machines_ends_the_node_instead_of_taking_turns_for_ever(tmp_path: Path) -> None:
    told = "another session of this key took over: the key is in use on two machines; give each its own"

    def take_over(request: Any) -> Any:
        return None if isinstance(request, messages.Hello) else RemoteError(Code.UNEXPECTED_MESSAGE, told)

    async def scenario() -> None:
        async with world(tmp_path) as w:
            w.trainer.on_request = take_over
            node = w.node()
            await until_ended(node)
            assert str(node.failure) == told
            assert len(w.trainer.hellos) == 3

    trio.run(scenario)


# --- a connection that breaks ---


def test_a_node_outlives_a_trainer_restart_and_loses_no_trace(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path, publish=False) as w:
            trainer = SmallTrainer(max_leases=4)
            trainer.publish(EMBEDDED, 0)
            trainer.on_request = lambda request: (
                RemoteError(Code.BUSY, "later")
                if isinstance(request, messages.Submit) and len(trainer.traces) >= 6
                else None
            )
            async with w.network.host(trainer.identity, listen=("/memory/50",)) as host:
                trainer.serve(host)
                node = w.node(address=trainer.address(host))
                await node.until_said("no_leases")
                await trainer.until(lambda: len(trainer.traces) >= 6)
            await node.until_said("disconnected", 2)
            trainer.on_request = None
            async with w.network.host(trainer.identity, listen=("/memory/50",)) as host:
                trainer.serve(host)
                await trainer.until(lambda: len(trainer.traces) == 16)
                await node.leave()
            slots = {(trace.lease_id, trace.slot) for trace in trainer.traces.values()}
            assert len(slots) == 16 and trainer.returned == {}
            assert node.failure is None and len(node.said("connected")) == 2

    trio.run(scenario)


def test_a_submission_whose_answer_was_lost_is_sent_again_byte_for_byte(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as w:
            w.trainer.max_leases = 1
            lost = 0

            def lose_the_answer(request: Any) -> Any:
                nonlocal lost
                if isinstance(request, messages.Submit) and lost < 2:
                    lost += 1
                    w.trainer._answer(b"", request)  # it is on the trainer's disk, and then the line breaks
                    w.nursery.start_soon(w.trainer.cut_all)
                    return ConnectionResetError()
                return None

            w.trainer.on_request = lose_the_answer
            node = w.node()
            await w.trainer.until(lambda: len(w.trainer.traces) == 4 and w.trainer.submissions >= 5)
            await node.leave()
            assert len(w.trainer.traces) == 4  # the same digests: nothing counts twice
            assert list((run_folder(node) / "outbox").iterdir()) == []
            assert len((run_folder(node) / "receipts.log").read_text().splitlines()) == 4

    trio.run(scenario)


def test_traces_of_a_killed_node_are_sent_and_its_leases_given_back_at_the_next_start(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as w:
            w.trainer.max_leases = 3
            w.trainer.on_request = lambda request: (
                RemoteError(Code.BUSY, "later") if isinstance(request, messages.Submit) else None
            )
            first = w.node()
            await first.until_said("trace_drawn", 2)
            await first.die()
            unsent = {path.stem for path in (run_folder(first) / "outbox").iterdir()}
            leased = len(list((run_folder(first) / "leases").iterdir()))
            assert len(unsent) >= 2 and leased >= 1
            w.trainer.on_request = None
            second = w.node()
            await w.trainer.until(lambda: {digest.hex() for digest in w.trainer.traces} >= unsent)
            await w.trainer.until(lambda: len(w.trainer.returned) >= leased)
            assert set(w.trainer.returned.values()) == {"the node was started again"}
            # What their time went to is not on the disk.
            assert {w.trainer.timings[bytes.fromhex(digest)] for digest in unsent} == {None}
            await second.leave()
            assert list((run_folder(first) / "leases").iterdir()) == []

    trio.run(scenario)


def test_stopping_gives_leases_back_and_sends_what_is_finished(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as w:
            node = w.node(stop_seconds=20)
            await w.trainer.until(lambda: len(w.trainer.traces) >= 8)
            await node.leave()
            answered = {(trace.lease_id, trace.slot) for trace in w.trainer.traces.values()}
            for lease in w.trainer.leases.values():
                whole = all((lease.lease_id, slot.index) in answered for slot in lease.slots)
                assert whole or w.trainer.returned[lease.lease_id] == "the node is stopping"
            assert list((run_folder(node) / "outbox").iterdir()) == []

    trio.run(scenario)


# --- what the trainer answers ---


def test_a_busy_trainer_is_asked_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as w:
            seen: dict[str, int] = {}

            def busy_once(request: Any) -> Any:
                name = type(request).__name__
                seen[name] = seen.get(name, 0) + 1
                if name in ("GetLeases", "Submit", "Heartbeat") and seen[name] == 1:
                    return RemoteError(Code.BUSY, "over your share now")
                return None

            w.trainer.on_request = busy_once
            w.trainer.max_leases = 1
            node = w.node()
            await w.trainer.until(lambda: len(w.trainer.traces) == 4 and len(w.trainer.heartbeats) >= 1)
            assert node.failure is None and len(node.said("connected")) == 1

    trio.run(scenario)


def test_a_trace_refused_on_the_spot_is_shown_with_its_reason_and_kept(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as w:
            w.trainer.max_leases = 1

            def refuse(request: Any) -> Any:
                if not isinstance(request, messages.Submit):
                    return None
                from protocol.envelope import unseal
                from protocol.trace import Trace

                trace = unseal(Trace, request.trace)
                verdict = w.trainer.judge(request.trace.digest, trace, Outcome.REFUSED, Reason.LEASE_EXPIRED)
                return messages.Submitted(None, verdict)

            w.trainer.on_request = refuse
            node = w.node()
            said = await node.until_said("trace_refused", 4)
            assert said.level is Level.WARNING and "LEASE_EXPIRED" in said.text
            assert node.status.refused == {"LEASE_EXPIRED": 4}
            await node.leave()
            assert len(list((run_folder(node) / "refused").iterdir())) == 4
            assert list((run_folder(node) / "outbox").iterdir()) == []

    trio.run(scenario)


def test_a_trace_the_trainer_cannot_read_does_not_block_the_others(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as w:
            w.trainer.max_leases = 2
            refused: list[bytes] = []

            def refuse_first(request: Any) -> Any:
                if isinstance(request, messages.Submit) and not refused:
                    refused.append(request.trace.digest)
                    return RemoteError(Code.MALFORMED, "the trainer cannot read this")
                return None

            w.trainer.on_request = refuse_first
            node = w.node()
            await w.trainer.until(lambda: len(w.trainer.traces) == 7)
            said = await node.until_said("trace_refused")
            assert "MALFORMED: the trainer cannot read this" in said.text

    trio.run(scenario)


def test_a_receipt_for_another_trace_is_not_believed(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as w:
            w.trainer.max_leases = 1
            lies = 0

            def swap_receipt(request: Any) -> Any:
                nonlocal lies
                if not isinstance(request, messages.Submit) or lies:
                    return None
                lies += 1
                answer = w.trainer._answer(b"", request)
                trace = next(iter(w.trainer.traces.values()))
                w.trainer.traces[b"\0" * 32] = trace
                wrong = w.trainer.receipt(b"\0" * 32, trace)
                del w.trainer.traces[b"\0" * 32]
                return messages.Submitted(wrong, answer.verdict)

            w.trainer.on_request = swap_receipt
            node = w.node()
            said = await node.until_said("disconnected")
            assert "receipt is not for the trace that was sent" in said.text
            await w.trainer.until(lambda: len(w.trainer.traces) == 4 and w.trainer.submissions >= 5)
            await node.leave()
            assert list((run_folder(node) / "outbox").iterdir()) == []

    trio.run(scenario)


def test_verdicts_are_verified_counted_once_logged_and_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "HEARTBEAT_SECONDS", 0.05)

    async def scenario() -> None:
        async with world(tmp_path) as w:
            w.trainer.max_leases = 2
            node = w.node()
            await node.until_said("verdict", 8)
            trace = next(iter(w.trainer.traces.values()))
            w.trainer.verdicts.append(w.trainer.judge(b"\7" * 32, trace, Outcome.REFUSED, Reason.MARGIN))
            said = await node.until_said("verdict", 9)
            assert said.level is Level.WARNING and "a trace was refused, MARGIN" in said.text
            assert node.status.accepted == 8 and node.status.refused == {"MARGIN": 1}
            await w.trainer.until(lambda: w.trainer.heartbeats[-1].verdict_cursor == 9)
            await node.leave()
            lines = (run_folder(node) / "verdicts.log").read_text().splitlines()
            assert [json.loads(line)["outcome"] for line in lines] == ["ACCEPTED"] * 8 + ["REFUSED"]

    trio.run(scenario)


def test_a_verdict_that_the_trainer_did_not_sign_is_not_believed(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as w:
            w.trainer.max_leases = 1
            node = w.node()
            await w.trainer.until(lambda: len(w.trainer.traces) == 4)
            digest, trace = next(iter(w.trainer.traces.items()))
            stranger = SmallTrainer()
            stranger.run = w.trainer.run
            w.trainer.verdicts[:] = [stranger.judge(digest, trace, Outcome.REFUSED, Reason.PROOF)]
            await w.trainer.cut_all()  # the next session begins with a heartbeat
            said = await node.until_said("disconnected", 2)
            assert "the verdict is signed by" in said.text
            assert node.status.refused == {}

    trio.run(scenario)


def test_a_new_policy_is_found_by_heartbeat_when_its_announcement_was_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "HEARTBEAT_SECONDS", 0.05)

    async def scenario() -> None:
        async with world(tmp_path) as w:
            node = w.node()
            await node.until_said("policy_loaded")
            w.trainer.publish(EMBEDDED, 1)
            said = await node.until_said("policy_loaded", 2)
            assert said.values["version"] == 1
            await w.trainer.until(lambda: w.trainer.heartbeats[-1].policy_version == 1)

    trio.run(scenario)


def test_an_empty_answer_is_waited_out_and_its_cause_is_told_when_it_lasts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.session._IDLE_SECONDS", 0.5)

    async def scenario() -> None:
        async with world(tmp_path) as w:
            w.trainer.max_leases = 0
            asked, why = 0, "every task is leased, 3 wait"

            def count(request: Any) -> Any:
                nonlocal asked
                if isinstance(request, messages.GetLeases):
                    asked += 1
                    return messages.LeasesReply((), 60, why)
                return None

            w.trainer.on_request = count
            node = w.node()
            await w.trainer.until(lambda: asked >= 4)
            (said,) = node.said("no_leases")
            assert said.level is Level.DETAIL and "every task is leased" in said.text
            told = await node.until_said("idle")
            assert told.level is Level.INFO and "every task is leased" in told.text
            before = asked
            await w.trainer.until(lambda: asked >= before + 10)
            why, before = "every task is leased, 4 wait", asked
            await w.trainer.until(lambda: asked >= before + 10)
            assert len(node.said("no_leases")) == 1 and len(node.said("idle")) == 1
            why = "the trainer's disk is nearly full"  # another cause, not another number in it
            told = await node.until_said("idle", 2)
            assert "disk is nearly full" in told.text and len(node.said("no_leases")) == 2

    trio.run(scenario)


def test_leases_are_asked_for_while_the_engine_still_has_some(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as w:
            open_slots: list[int] = []

            def watch(request: Any) -> Any:
                if isinstance(request, messages.GetLeases):
                    open_slots.append(w.trainer.group_size * len(w.trainer.leases) - len(w.trainer.traces))
                return None

            w.trainer.on_request = watch
            w.node(slots=4)
            await w.trainer.until(lambda: len(w.trainer.traces) >= 60)
            assert open_slots[0] == 0 and min(open_slots[1:]) > 0
            # Four in the engine, a lot that waits, four traces on their way, and the rest of a group.
            assert max(open_slots) <= 16

    trio.run(scenario)
