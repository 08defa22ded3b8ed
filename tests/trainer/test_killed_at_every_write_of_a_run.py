"""Gateway, auditor, learner and records as processes of their own, killed (-9) at each of their writes: what was
admitted is neither lost nor there twice, credit stays, versions only go up, and the curve goes on.

`make test-crash`. Which writes there are is found out by letting each part do its work once, watched
(dying_part.py); each is then tried the first time and the last that it comes.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from protocol import codec
from protocol.envelope import Signed, seal, unseal
from protocol.errors import NetError, RemoteError, Unreachable
from protocol.net import p2p
from protocol.policy import policy_root
from protocol.run import RunAddress
from protocol.verdict import Outcome, Receipt, Verdict
from tests.trainer.fabricate import Gateway, make_run, one_thread
from tests.trainer.scripted_node import Client, Script, answer_audits, audit_result, dialled, identity_of
from trainer import learner as learner_module
from trainer.event_files import EventFile
from trainer.ledger import Ledger
from trainer.rundir import Run, open_run

ROOT = Path(learner_module.__file__).parents[1]
SMALL: dict[str, Any] = dict(
    listen="/ip4/127.0.0.1/tcp/0",
    group_size=4,
    groups_per_step=2,
    lease_seconds=1800.0,
    loss_tokens=100,
    learning_rate=1e-3,
    warmup_steps=1,
)
TRACES = 8
SECONDS = 120.0  # for what takes some on an idle machine

pytestmark = [pytest.mark.crash, pytest.mark.timeout(3600)]


class Dying:
    """The process that forks those that die."""

    def __init__(self) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        words = [sys.executable, "-m", "tests.trainer.dying_part"]
        self._process = subprocess.Popen(
            words, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, do: str, **more: Any) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps({"do": do, **more}), file=self._process.stdin, flush=True)
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def once(self, part: str, run: Path, **more: Any) -> int:
        """A part from its start to its end, as subprocess tells it: minus the signal, or the exit code."""
        self.ask("start", part=part, run=str(run), **more)
        return int(self.ask("wait")["ended"])

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with one_thread():
        run, ledger = make_run(tmp_path_factory.mktemp("template") / "run", **SMALL)
        ledger.close()
    return run.folder.path


@pytest.fixture(scope="module")
def dying(template: Path) -> Iterator[Dying]:
    made = Dying()
    made.ask("warm", run=str(template))
    yield made
    made.close()


def writes(points: Path) -> list[tuple[str, int]]:
    counts = Counter(points.read_text().splitlines())
    return [(name, number) for name, count in counts.items() for number in sorted({1, count})]


def at_each_write(
    dying: Dying, part: str, start: Path, where: Path, only: Callable[[str], bool] = lambda name: True
) -> Iterator[tuple[str, Path]]:
    """(point, a run in which the part was killed there and then did its work to the end)."""
    whole = where / "whole"
    shutil.copytree(start, whole)
    assert dying.once(part, whole, note=str(where / "points")) == 0
    yield "never", whole
    for number, (point, occurrence) in enumerate(each for each in writes(where / "points") if only(each[0])):
        run = where / str(number)
        shutil.copytree(start, run)
        name = f"{point}, time {occurrence}"
        assert dying.once(part, run, point=point, occurrence=occurrence) == -9, name
        assert dying.once(part, run) == 0, name
        yield name, run
        shutil.rmtree(run)


# --- the learner ---


def test_a_learner_killed_at_any_write_goes_on_with_the_same_policies_and_the_same_curve(
    dying: Dying, template: Path, tmp_path: Path
) -> None:
    with one_thread():
        run, ledger = make_run(tmp_path / "drawn", template, **SMALL)
        with closing(ledger):
            Gateway(run, ledger).admit(12, 0)
    wanted: tuple[object, ...] | None = None
    tried = []
    for point, folder in at_each_write(dying, "learner", run.folder.path, tmp_path):
        found = open_run(folder).folder
        with closing(Ledger(found.ledger, read_only=True)) as after:
            assert after.damage() == [], point
            policies = [(version, after.root(version) or b"") for version in after.versions()]
            assert [version for version, _ in policies] == [0, 1, 2], point
            assert all(policy_root(found.policy(version)) == root for version, root in policies), point
            groups = after.view("SELECT group_id, state, batch FROM groups ORDER BY group_id")
            curve = [(row.version, row.reward_mean, row.loss, row.traces) for row in after.steps()]
        assert not [*found.path.rglob("*.tmp")], point
        state = (policies, groups, curve, sorted(path.name for path in found.learner.iterdir()))
        wanted = wanted or state
        assert state == wanted, point
        tried.append(point)
    assert len(tried) > 40, tried


# --- an auditor ---


def test_an_auditor_killed_at_any_write_answers_every_trace_once_and_blames_nobody(
    dying: Dying, template: Path, tmp_path: Path
) -> None:
    with one_thread():
        run, ledger = make_run(tmp_path / "drawn", template, **SMALL)
        with closing(ledger):
            gateway = Gateway(run, ledger)
            gateway.submit(gateway.draw(3, 0))
    tried = []
    for point, folder in at_each_write(dying, "auditor", run.folder.path, tmp_path):
        with closing(Ledger(open_run(folder).folder.ledger, read_only=True)) as after:
            assert after.damage() == [], point
            states = after.view("SELECT state, claimed_by, audit IS NULL AS lost, mu IS NULL AS blind FROM submissions")
        answered = {"state": "AUDITED", "claimed_by": None, "lost": 0, "blind": 0}
        assert states == [answered] * 12, point
        tried.append(point)
    assert len(tried) >= 7, tried


# --- records ---


def test_records_killed_at_any_write_have_each_step_once(dying: Dying, template: Path, tmp_path: Path) -> None:
    with one_thread():
        run, ledger = make_run(tmp_path / "drawn", template, **SMALL)
        with closing(ledger):
            Gateway(run, ledger).admit(12, 0)
    assert dying.once("learner", run.folder.path) == 0
    for point, folder in at_each_write(dying, "records", run.folder.path, tmp_path):
        found = open_run(folder).folder
        lines = [json.loads(line)["version"] for line in found.metrics.read_text().splitlines()]
        assert (lines, EventFile(found.tensorboard).last) == ([1, 2], 2), point


# --- the gateway ---


class Node:
    """A scripted node that never gives up: it keeps leases and receipts, and sends again what has none."""

    def __init__(self, run: Run) -> None:
        self.who = identity_of("node")
        self._run = run
        self._script = Script(run.folder.policy(0))
        self.traces: dict[bytes, Signed] = {}
        self.receipts: dict[bytes, Signed] = {}
        self.verdicts: dict[bytes, list[Verdict]] = {}
        self._cursor = 0

    async def work(self, client: Client, ledger: Ledger) -> None:
        """Until each of its traces has a receipt and a verdict."""
        client.cursor = self._cursor
        await client.hello()
        while len(self.traces) < TRACES:
            for lease in await client.leases(TRACES - len(self.traces)):
                for slot in lease.slots:
                    signed = seal(self.who, self._script.trace(lease, slot.index))
                    self.traces[signed.digest] = signed
        for digest, signed in self.traces.items():
            await self._submit(client, digest, signed)
        while len(self.verdicts) < len(self.traces):
            answer_audits(ledger, audit_result())
            for verdict in await client.beat():
                self.verdicts.setdefault(verdict.trace_digest, []).append(verdict)
            self._cursor = client.cursor

    async def _submit(self, client: Client, digest: bytes, signed: Signed) -> None:
        before = self.receipts.get(digest)
        reply = await client.send(signed)
        assert reply.receipt is not None, reply
        assert before is None or reply.receipt == before, "asked again, the receipt is the same"
        self.receipts[digest] = reply.receipt


@contextmanager
def answering(dying: Dying, run: Run, **more: Any) -> Iterator[None]:
    """A gateway that listens, or was killed before it could."""
    run.folder.address.unlink(missing_ok=True)
    dying.ask("start", part="gateway", run=str(run.folder.path), **more)
    deadline = time.monotonic() + SECONDS
    while not run.folder.address.exists() and dying.ask("poll")["ended"] is None:
        assert time.monotonic() < deadline, "the gateway does not listen"
        time.sleep(0.02)
    try:
        yield
    finally:
        dying.ask("end")


async def served(dying: Dying, run: Run, node: Node, **more: Any) -> bool:
    """Whether the node was served to the end; not, where the gateway was killed."""
    with answering(dying, run, **more), closing(Ledger(run.folder.ledger)) as ledger:
        if not run.folder.address.exists():
            return False
        try:
            with trio.fail_after(SECONDS):
                async with (
                    p2p.open_host(node.who) as host,
                    dialled(host, RunAddress.parse(run.folder.address.read_text()).dial, node.who, run.run) as client,
                ):
                    await node.work(client, ledger)
                    return True
        except* (NetError, Unreachable, RemoteError):
            pass  # it was killed
    return False


def check_run(run: Run, node: Node, point: str) -> None:
    assert len(node.receipts) == len(node.traces) and len(node.traces) >= TRACES, point
    assert {len(each) for each in node.verdicts.values()} == {1}, f"{point}: one verdict a trace"
    assert {each.outcome for found in node.verdicts.values() for each in found} == {Outcome.ACCEPTED}, point
    sequences = sorted(unseal(Receipt, receipt).sequence for receipt in node.receipts.values())
    assert sequences == list(range(1, len(node.traces) + 1)), point
    with closing(Ledger(run.folder.ledger, read_only=True)) as ledger:
        assert ledger.damage() == [], point
        rows = ledger.view("SELECT digest, state, receipt FROM submissions")
        assert {row["digest"] for row in rows} == set(node.traces), f"{point}: nothing lost, nothing made up"
        assert {row["state"] for row in rows} == {"ACCEPTED"}, point
        assert all(codec.decode(Signed, row["receipt"]) == node.receipts[row["digest"]] for row in rows), point
        assert ledger.view("SELECT COUNT(*) AS n FROM verdicts") == [{"n": len(rows)}], point
        credit = ledger.view("SELECT accepted, refused, audits_failed, expired FROM nodes")
        assert credit == [{"accepted": len(rows), "refused": 0, "audits_failed": 0, "expired": 0}], point
        signed = ledger.view("SELECT version FROM policies WHERE manifest IS NOT NULL ORDER BY version")
        assert [row["version"] for row in signed] == [0, 1], point


def test_a_gateway_killed_at_any_write_loses_no_trace_counts_none_twice_and_keeps_the_credit(
    dying: Dying, template: Path, tmp_path: Path
) -> None:
    async def story() -> int:
        whole = gateway_run(template, tmp_path / "whole")
        node = Node(whole)
        assert await served(dying, whole, node, note=str(tmp_path / "points"))
        check_run(whole, node, "never")
        # A transaction is one write: what is within it is SQLite's to undo.
        points = [each for each in writes(tmp_path / "points") if not each[0].startswith("change of")]
        killed = 0
        for number, (point, occurrence) in enumerate(points):
            run = gateway_run(template, tmp_path / str(number))
            node, name = Node(run), f"{point}, time {occurrence}"
            died = not await served(dying, run, node, point=point, occurrence=occurrence)
            killed += died
            assert not died or dying.ask("poll")["ended"] == -9, name
            assert await served(dying, run, node), name
            check_run(run, node, name)
            shutil.rmtree(run.folder.path)
        assert len(points) > 15 and killed > len(points) // 2, (killed, points)
        return killed

    trio.run(story)


def gateway_run(template: Path, path: Path) -> Run:
    """A run whose learner has just made a policy, which is still to be signed."""
    shutil.copytree(template, path)
    run = open_run(path)
    shutil.copytree(run.folder.policy(0), run.folder.policy(1))
    with closing(Ledger(run.folder.ledger)) as ledger:
        ledger.add_policy(1, policy_root(run.folder.policy(1)), 1_700_000_000_000)
    return run
