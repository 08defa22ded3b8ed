"""Who generates, with real processes: this machine's own engine in turns with the learner and without any node, and
beside an ordinary one."""

from __future__ import annotations

import json
import signal
from itertools import pairwise

import psutil
import pytest

from protocol.device_turns import ENGINE, LEARNER, turns
from tests.e2e.network import Network, Process, call, wait_until

pytestmark = pytest.mark.timeout(600)


def home_engine(serving: Process) -> psutil.Process:
    children = psutil.Process(serving.pid).children()
    return next(each for each in children if "--end-with-stdin" in each.cmdline())


def rates(network: Network) -> dict[str, set[tuple[float, bool]]]:
    """By peer id: at which rates its traces were drawn about, and whether by the operator's word."""
    from protocol.identity import peer_id

    found: dict[str, set[tuple[float, bool]]] = {}
    for row in network.ledger.view("SELECT node, draw_rate, draw_trusted FROM submissions WHERE drawn IS NOT NULL"):
        found.setdefault(peer_id(row["node"]), set()).add((row["draw_rate"], row["draw_trusted"] is not None))
    return found


@pytest.mark.parametrize("network", [{"staleness_limit": 2}], indirect=True)
def test_a_run_with_no_nodes_learns_by_its_own_engine_in_turns_with_the_learner(network: Network) -> None:
    serving = network.serve("--placement", "colocated", "--trust", "self")
    wait_until(lambda: network.versions() >= 3, 240, "three policy versions")
    shown = json.loads(call("trainer.cli", "status", network.run.path, "--json").stdout)
    (node,) = shown["nodes"]
    assert node["home"] and node["trusted"] and node["refused"] == 0
    assert "device" in {each["part"] for each in shown["waits"]}

    # Never both at once, and as many steps as turns of the learner.
    noted = turns(network.run.turns)
    assert all(before.to_ms <= after.from_ms for before, after in pairwise(noted))
    steps = network.ledger.steps()
    assert {each.who for each in noted} == {ENGINE, LEARNER}
    mine = [each for each in noted if each.who == LEARNER]
    for step, turn in zip(steps, mine, strict=False):
        assert turn.from_ms <= step.created_ms - 1000 * step.seconds + 2 and step.created_ms <= turn.to_ms
    assert all(step.staleness_max <= 1 for step in steps)

    # Whoever reads the log repeats the draws, and is told by whose word they are so few.
    log = network.folder / "log"
    assert call("trainer.cli", "export-log", network.run.path, log, "--no-traces", "--no-policies").returncode == 0
    checked = call("verify.cli", "audit", log, "--json")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert json.loads(checked.stdout)["notes"]["draws of nodes that the trainer's operator vouches for"] > 0

    engine = home_engine(serving)
    serving.send_signal(signal.SIGINT)
    assert serving.wait(30) in (0, 130), network.log("serve")
    assert not engine.is_running()


def test_the_home_engine_works_beside_an_ordinary_node_and_ends_with_the_trainer(network: Network) -> None:
    serving = network.serve("--placement", "both", "--trust", "self")
    ordinary = network.join("ordinary")
    wait_until(
        lambda: network.versions() >= 1 and len([row for row in network.nodes() if row["accepted"] >= 16]) == 2,
        240,
        "a policy version from both",
    )
    assert ordinary.poll() is None and not network.run.turns.exists()
    shown = json.loads(call("trainer.cli", "status", network.run.path, "--json").stdout)
    at_home, other = sorted(shown["nodes"], key=lambda node: not node["home"])
    assert (at_home["home"], at_home["trusted"], other["home"], other["trusted"]) == (True, True, False, False)
    drawn = rates(network)
    assert (0.05, True) in drawn[at_home["node"]] and {word for _, word in drawn[at_home["node"]]} == {True}
    assert (1.0, False) in drawn[other["node"]] and {word for _, word in drawn[other["node"]]} == {False}

    engine = home_engine(serving)
    serving.kill()
    serving.wait(30)
    engine.wait(30)
