"""Nodes whose trainer is killed: who lacks the newest policy has it from who has it. Real processes on loopback."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from node.peers import PeerBook
from protocol.identity import load_identity
from protocol.policy import policy_root
from tests.e2e.network import Network, end, wait_until

PATIENCE = 300.0  # a machine may be ten times slower than the one this was written on


@pytest.fixture
def quick(tmp_path: Path) -> Iterator[Network]:
    """A trainer that learns from every two groups, however old."""
    made = Network(tmp_path, groups_per_step=2, lease_seconds=900.0, staleness_limit=900, keep_policies=1000)
    try:
        yield made
    finally:
        made.close()


def fetched(network: Network, name: str) -> list[int]:
    """Versions that a node said it has fetched."""
    return [event["version"] for event in network.events(name, "policy_fetched")]


def knows(network: Network, name: str, other: str) -> bool:
    """Whether it has the address of the other one on its disk."""
    theirs = load_identity(network.home(other) / "key").node
    peers = PeerBook(network.store(name) / "peers.msgpack", b"").peers
    return theirs in peers and bool(peers[theirs].addresses)


def test_a_killed_trainer_is_not_missed_by_a_node_that_lacks_what_another_has(quick: Network) -> None:
    trainer = quick.serve()
    first = quick.join("first", "--json")
    second = quick.join("second", "--json")
    wait_until(lambda: bool(fetched(quick, "first") and fetched(quick, "second")), PATIENCE, "both have a policy")
    wait_until(lambda: knows(quick, "second", "first"), PATIENCE, "the second was told of the first")
    wait_until(lambda: knows(quick, "first", "second"), PATIENCE, "the first, whom it may serve")
    end(second)
    lacks = max(fetched(quick, "second"))
    wait_until(lambda: max(fetched(quick, "first")) > lacks, PATIENCE, "the first has a newer one")
    trainer.send_signal(signal.SIGKILL)
    trainer.wait()
    wait_until(lambda: bool(quick.events("first", "disconnected")), PATIENCE, "the trainer is gone")
    before = len(fetched(quick, "second"))

    quick.join("second", "--json")
    wait_until(lambda: len(fetched(quick, "second")) > before, PATIENCE, "it has one that it lacked")
    assert first.poll() is None, quick.log("first")
    event = quick.events("second", "policy_fetched")[before]
    assert event["version"] == max(fetched(quick, "first")) > lacks
    assert set(event["bytes_by_source"]) == {"node"}
    (found,) = quick.events("second", "manifest_found")
    assert found["text"].endswith(("while the trainer is away", "before the trainer was reached"))
    (folder,) = (quick.store("second") / "policies").glob(f"v{event['version']:08d}-*")
    assert policy_root(folder).hex() == event["root"]
