"""A node asks for a re-audit: through the node that runs, or by itself; and a verdict that replaces another."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from node import reaudit
from node.reaudit import Answer
from node.report import Event, Report, Status
from node.verdicts import Verdicts
from protocol import messages
from protocol.errors import Code, LocalError, Refused, UsageError
from protocol.identity import Identity
from protocol.verdict import Fingerprint, Outcome, Reason, Verdict
from tests.node.rig import world

RUN, NODE = b"\1" * 32, Identity.generate().node


def log(folder: Path, *digests: str, name: str = "verdicts.log") -> None:
    (folder / name).write_text("".join(f'{{"trace":"{digest}"}}\n' for digest in digests) + '{"trace":"ab')


def test_a_trace_is_found_by_the_first_digits_of_its_digest(tmp_path: Path) -> None:
    log(tmp_path, "aa" * 32, "ab" * 32)
    log(tmp_path, "cd" * 32, name="verdicts.log.1")
    assert reaudit.find_trace(tmp_path, "aa") == b"\xaa" * 32
    assert reaudit.find_trace(tmp_path, "CD") == b"\xcd" * 32
    with pytest.raises(UsageError, match=r"2 traces in .* begin with a: give more digits"):
        reaudit.find_trace(tmp_path, "a")
    with pytest.raises(UsageError, match=r"no trace in .* begins with 77"):
        reaudit.find_trace(tmp_path, "77")


def test_a_node_at_work_asks_what_it_is_handed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as w:
            w.trainer.max_leases = 0
            asked: list[bytes] = []

            def answer(request: object) -> object:
                if not isinstance(request, messages.AskAudit):
                    return None
                asked.append(request.digest)
                if len(asked) == 1:
                    return messages.AuditAsked(True, "another auditor looks at it")
                return Refused(Code.NOT_FOUND, "there is no such trace")

            w.trainer.on_request = answer
            node = w.node()
            await node.until_said("connected")
            home = node.config.home
            (folder,) = (home / "runs").iterdir()
            (folder / "asked").mkdir()
            (folder / "asked" / "notes.ask").touch()
            found = await trio.to_thread.run_sync(reaudit.hand_over, home, folder, b"\1" * 32)
            assert found == Answer(True, "another auditor looks at it") and asked == [b"\1" * 32]
            found = await trio.to_thread.run_sync(reaudit.hand_over, home, folder, b"\2" * 32)
            assert found == Answer(False, "NOT_FOUND: there is no such trace")
            assert [path.name for path in (folder / "asked").iterdir()] == ["notes.ask"]
            assert len(node.said("reaudit")) == 2
            await w.trainer.cut_all()
            w.trainer.on_request = lambda request: Refused(Code.BUSY, "not now")
            with pytest.raises(LocalError, match="has no answer after 1 s: see rlnode status"):
                await trio.to_thread.run_sync(reaudit.hand_over, home, folder, b"\3" * 32, 1.0)
            await node.leave()
            with pytest.raises(LocalError, match="has ended meanwhile"):
                reaudit.hand_over(home, folder, b"\4" * 32)

    trio.run(scenario)


def verdict(outcome: Outcome, reason: Reason | None, at: int) -> Verdict:
    return Verdict(
        run=RUN, trace_digest=b"\5" * 32, lease_id=bytes(16), slot=0, node=NODE, policy_version=0, policy_root=RUN,
        outcome=outcome, reason=reason, audited=True, reward=None, checks=(), calibration=None, scores=(),
        verifier=Fingerprint("", "", "", ""), judged_ms=at,
    )  # fmt: skip


class Book(Verdicts):
    """Counts verdicts without a store."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.status = Status()
        report: Report = self.events.append
        super().__init__(RUN, NODE, NODE, None, report, self.status)  # type: ignore[arg-type]


def test_a_verdict_that_replaces_another_is_counted_in_its_stead() -> None:
    book = Book()
    refused, accepted = verdict(Outcome.REFUSED, Reason.MARGIN, 1), verdict(Outcome.ACCEPTED, None, 2)
    book.count(refused)
    book.count(refused)
    assert book.status.refused == {"MARGIN": 1} and len(book.events) == 1
    book.count(accepted)
    assert book.status.refused == {} and book.status.accepted == 1
    book.count(refused)
    assert book.status.accepted == 1, "an old one that comes late changes nothing"
    assert [event.name for event in book.events] == ["verdict"] * 2


def test_a_trainer_that_changes_a_final_verdict_is_told_on() -> None:
    book = Book()
    book.count(verdict(Outcome.ACCEPTED, None, 1))
    book.count(verdict(Outcome.REFUSED, Reason.PROOF, 2))
    assert [event.name for event in book.events] == ["verdict", "verdict_changed", "verdict"]
    assert "from ACCEPTED to REFUSED" in book.events[1].text
    assert book.status.accepted == 0 and book.status.refused == {"PROOF": 1}
