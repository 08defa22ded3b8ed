"""The whole loop with real processes on loopback: a policy that learns from verified traces, a cheating node that
is refused for a reason anyone can recompute, and a trainer that may be killed at any point."""

from __future__ import annotations

import json
import signal
import time
import urllib.request

import pytest

from tests.e2e.network import Network, call, wait_until

pytestmark = pytest.mark.timeout(600)


def refused_for(network: Network, reason: str) -> int:
    query = "SELECT COUNT(*) AS n FROM verdicts WHERE outcome = 'REFUSED' AND reason = ?"
    count: int = network.ledger.view(query, (reason,))[0]["n"]
    return count


# A short staleness lets the first epochs be closed within the test.
@pytest.mark.parametrize("network", [{"staleness_limit": 2, "staleness_target": 1}], indirect=True)
def test_a_policy_learns_from_verified_traces_and_a_cheating_node_is_refused(network: Network) -> None:
    serving = network.serve()
    honest, cheater = network.join("honest"), network.join_cheater()
    wait_until(lambda: network.versions() >= 3, 240, "three policy versions")
    wait_until(lambda: refused_for(network, "MARGIN") >= 3, 120, "the cheater is refused")
    assert (honest.poll(), cheater.poll()) == (None, None), network.log("honest") + network.log("cheater")

    # The honest node lost nothing by it, and only accepted traces were learned from.
    best = max(network.nodes(), key=lambda node: node["accepted"])
    worst = max(network.nodes(), key=lambda node: node["audits_failed"])
    assert best["node"] != worst["node"]
    assert (best["refused"], best["audits_failed"]) == (0, 0)
    trained = network.ledger.view(
        "SELECT s.state, s.node FROM submissions s JOIN slots t ON t.digest = s.digest "
        "JOIN groups g ON g.group_id = t.group_id WHERE g.state = 'TAKEN'"
    )
    assert trained and {row["state"] for row in trained} == {"ACCEPTED"}

    # Where the time of a rollout went: nodes say their part of it, the trainer knows how long that was.
    shown = call("trainer.cli", "timeline", network.run.path, "--last", "40", "--json", "-o", network.folder / "last")
    assert shown.returncode == 0, shown.stderr
    rollouts = [json.loads(line) for line in shown.stdout.splitlines()]
    assert len(rollouts) == 40 and all(each["told"] is not None for each in rollouts)
    for each in rollouts:
        told = sum(stage["seconds"] for stage in each["stages"] if stage["claimed"])
        assert told == pytest.approx((each["received_ms"] - each["leased_ms"]) / 1000)
        assert [stage["stage"] for stage in each["stages"][-3:]] == ["verify", "batch_wait", "train"]
        assert each["told"]["prefill"] + each["told"]["decode"] > 0
    assert json.loads((network.folder / "last").read_text())["traceEvents"]
    with urllib.request.urlopen(network.run.page.read_text().strip() + "metrics", timeout=60) as answer:
        metrics = answer.read().decode()
    assert 'rlcommons_stage_seconds_count{environment="tools8@1",source="claimed",stage="decode"}' in metrics
    planned = call("trainer.cli", "plan", network.run.path, "--json")
    assert planned.returncode == 0 and json.loads(planned.stdout)["parts"]["nodes"]["have"] >= 1, planned.stdout

    # Anyone can recompute both verdicts offline. (Of one that NODE_EVIDENCE refuses: with what else its node drew.)
    refused = network.ledger.view(
        "SELECT hex(digest) AS digest FROM verdicts WHERE outcome = 'REFUSED' AND reason = 'MARGIN' "
        "ORDER BY sequence DESC LIMIT 1"
    )[0]["digest"]
    for options, code, outcome in (((), 0, "ACCEPTED"), (("--digest", refused.lower()), 1, "REFUSED")):
        exported = call(
            "trainer.cli", "export-trace", network.run.path, "-o", network.folder / "trace.msgpack", "--json", *options
        )
        assert exported.returncode == 0, exported.stderr
        where = json.loads(exported.stdout)
        checked = call("verify.cli", "check", where["file"], "--policy", where["policy"], "--json")
        assert checked.returncode == code, checked.stdout + checked.stderr
        found = json.loads(checked.stdout)
        assert found["outcome"] == outcome
        assert found["trainer"]["agrees"], found["trainer"]
    assert found["reason"] == "MARGIN"

    # And so the whole run, from the log that is exported while it is served.
    wait_until(lambda: network.ledger.sealed() >= 1, 60, "the first epoch is closed")
    log = network.folder / "log"
    exported = call("trainer.cli", "export-log", network.run.path, log)
    assert exported.returncode == 0, exported.stderr
    checked = call("verify.cli", "audit", log, "--sample", "4", "--json")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    found = json.loads(checked.stdout)
    assert found["agrees"] and found["sealed"] >= 1 and found["checked"]["draws"] > 0
    # Those refused by the model can be reached again only where they were in the sample.
    unread = found["unchecked"].get("refusals by a check that was not run here", 0)
    assert found["checked"]["verdicts reached again"] + unread == found["checked"]["traces replayed"] > 100

    # Ctrl-C ends everything soon and in order.
    begun = time.monotonic()
    for process in (honest, cheater, serving):
        process.send_signal(signal.SIGINT)
    assert honest.wait(30) in (0, 130) and serving.wait(30) in (0, 130), network.log("serve")
    assert time.monotonic() - begun < 30


def test_the_trainer_killed_at_any_point_goes_on_and_nodes_come_back_by_themselves(network: Network) -> None:
    serving = network.serve()
    port_line = network.address
    node = network.join("honest")
    wait_until(lambda: network.versions() >= 1, 240, "the first policy version")
    before = network.versions()
    serving.kill()
    serving.wait()

    # The address must stay the same for nodes that are out there: listen on the port that was taken.
    port = port_line.split("/")[4]
    settings = network.run.config
    settings.write_text(settings.read_text().replace("127.0.0.1/tcp/0", f"127.0.0.1/tcp/{port}"))
    network.serve()
    assert network.address == port_line
    wait_until(lambda: network.versions() >= before + 2, 240, "two more versions after the kill")
    assert node.poll() is None, network.log("honest")

    steps = [step.version for step in network.ledger.steps()]
    assert steps == list(range(1, len(steps) + 1)), "a version was skipped or made twice"
    twice = network.ledger.view(
        "SELECT group_id, slot, COUNT(*) AS n FROM submissions WHERE state = 'ACCEPTED' "
        "GROUP BY group_id, slot HAVING n > 1"
    )
    assert twice == [], "a slot was counted twice"
    assert all(row["refused"] == 0 for row in network.nodes()), "an honest node was blamed"
