"""Half an hour of the embedded run with four nodes: two honest, one that cheats, one that is killed (-9) again and
again. Long: `make test-long`; RLCOMMONS_LONG_MINUTES shortens it."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections import Counter

import pytest

from protocol import codec
from protocol.envelope import Signed
from protocol.verdict import CheckOutcome, Outcome, Reason, Verdict
from tests.e2e.network import Network, Process, call, end, wait_until
from trainer.rundir import open_run
from trainer.waits import waits

MINUTES = float(os.environ.get("RLCOMMONS_LONG_MINUTES", "30"))
FIRST, LAST = 3, 10  # steps whose mean reward is the curve's begin and its end
LIVES = (20.0, 60.0)  # seconds the flaky node lives

pytestmark = [pytest.mark.long, pytest.mark.timeout(MINUTES * 60 + 1200)]


def rewards(network: Network) -> list[float]:
    return [step.reward_mean for step in network.ledger.steps()]


class Flaky:
    """A node that is killed after a while, whatever it does, and started again."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._random = random.Random(7)
        self.deaths = 0
        self._start()

    def _start(self) -> None:
        self.process: Process = self._network.join("flaky")
        self._until = time.monotonic() + self._random.uniform(*LIVES)

    def look(self) -> None:
        assert self.process.poll() is None, self._network.log("flaky")
        if time.monotonic() > self._until:
            self.process.kill()
            self.process.wait()
            self.deaths += 1
            self._start()


def watch(network: Network, flaky: Flaky) -> Counter[str]:
    """Until the time is over; what parts and nodes waited for, by their first words."""
    met: Counter[str] = Counter()
    config = open_run(network.run.path).config
    until = time.monotonic() + MINUTES * 60
    while time.monotonic() < until:
        flaky.look()
        for each in waits(network.ledger, config, time.time_ns() // 1_000_000):
            assert each["what"], f"{each['part']} waits for something without a name"
            met[f"{each['part']}: {' '.join(each['what'].split()[:2])}"] += 1
        time.sleep(2)
    return met


def verdicts(network: Network) -> list[Verdict]:
    rows = network.ledger.view("SELECT signed FROM verdicts ORDER BY sequence")
    return [codec.decode(Verdict, codec.decode(Signed, row["signed"]).payload) for row in rows]


# An epoch is closed soon, so that most of the log is sealed when it is audited.
@pytest.mark.parametrize("network", [{"staleness_limit": 4, "keep_traces": 100_000}], indirect=True)
def test_half_an_hour_with_a_cheat_and_a_flaky_node_ends_with_the_curve_up_and_nothing_lost(network: Network) -> None:
    serving = network.serve()
    honest = [network.join(name, "--json") for name in ("one", "two")]
    cheater, flaky = network.join_cheater(), Flaky(network)
    wait_until(lambda: network.versions() >= 1, 240, "the first policy version")
    met = watch(network, flaky)
    assert [each.poll() for each in (serving, cheater, *honest)] == [None] * 4, network.log("serve")
    assert flaky.deaths >= MINUTES / 2

    # Nodes send what is finished before they end; what the killed one had drawn it hands in when it is started again.
    for each in (cheater, *honest, flaky.process):
        end(each)
    wait_until(lambda: not open_submissions(network), 120, "every trace has its verdict")
    serving.send_signal(signal.SIGINT)
    assert serving.wait(60) in (0, 130), network.log("serve")

    curve = rewards(network)
    begun, ended = (sum(part) / len(part) for part in (curve[:FIRST], curve[-LAST:]))
    assert ended > 0.6 and ended > begun + 0.25, curve

    nothing_lost(network)
    every_refusal_explained(network)
    print(f"\n{MINUTES:g} minutes, {len(curve)} versions, reward {begun:.2f} to {ended:.2f}, {flaky.deaths} deaths")
    print(f"waits: {dict(met.most_common(12))}")

    log = network.folder / "log"
    exported = call("trainer.cli", "export-log", network.run.path, log)
    assert exported.returncode == 0, exported.stderr
    checked = call("verify.cli", "audit", log, "--sample", "1", "--json")
    found = json.loads(checked.stdout)
    assert checked.returncode == 0 and found["agrees"], found["disagreements"][:5]
    print(f"log: {found['epochs']} epochs, {found['sealed']} sealed, {found['checked']}")


def open_submissions(network: Network) -> int:
    query = "SELECT COUNT(*) AS n FROM submissions WHERE state IN ('RECEIVED', 'AUDIT', 'AUDITED')"
    return int(network.ledger.view(query)[0]["n"])


def nothing_lost(network: Network) -> None:
    steps = [step.version for step in network.ledger.steps()]
    assert steps == list(range(1, len(steps) + 1)), "a version was skipped or made twice"
    view = network.ledger.view
    numbers = [row["sequence"] for row in view("SELECT sequence FROM submissions ORDER BY sequence")]
    assert numbers == list(range(1, len(numbers) + 1)), "a receipt's number is missing"
    assert view("SELECT 1 FROM submissions WHERE state = 'ACCEPTED' GROUP BY group_id, slot HAVING COUNT(*) > 1") == []
    learned = view(
        "SELECT s.state, COUNT(*) AS n FROM submissions s JOIN slots t ON t.digest = s.digest "
        "JOIN groups g ON g.group_id = t.group_id WHERE g.state = 'TAKEN' GROUP BY s.state"
    )
    assert {row["state"] for row in learned} == {"ACCEPTED"}, learned
    # Credit: what the ledger counts for a node is what its verdicts say.
    newest: dict[tuple[bytes, bytes], Verdict] = {(each.node, each.trace_digest): each for each in verdicts(network)}
    accepted = Counter(node for (node, _), each in newest.items() if each.outcome is Outcome.ACCEPTED)
    assert {row["node"]: row["accepted"] for row in network.nodes() if row["accepted"]} == dict(accepted)


def every_refusal_explained(network: Network) -> None:
    cheater, flaky = (network.node(name)["node"] for name in ("cheater", "flaky"))
    refused: Counter[tuple[str, str]] = Counter()
    for each in verdicts(network):
        if each.outcome is Outcome.ACCEPTED:
            continue
        failed = [check for check in each.checks if check.outcome is CheckOutcome.FAILED]
        assert failed and failed[0].reason is each.reason and failed[0].detail, each
        if each.outcome is Outcome.REFUSED and each.node != cheater:
            # Killed between drawing and handing in: late is no lie, and is not held against it.
            assert each.node == flaky and each.reason is Reason.LEASE_EXPIRED, f"an honest node: {failed[0]}"
        name = {cheater: "cheater", flaky: "flaky"}.get(each.node, "honest")
        refused[name, str(each.reason)] += 1
    print(f"\nnot accepted: {dict(refused)}")
    assert refused["cheater", "MARGIN"] > 10
    # A policy that has learned is nearly certain of its tokens: there any seed draws the same, and that is honest.
    row = network.node("cheater")
    assert row["refused"] > 0 and row["audits_failed"] > 0, row
    assert all(each["audits_failed"] == 0 for each in network.nodes() if each["node"] != cheater)
