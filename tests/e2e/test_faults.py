"""What machines do to people: processes killed at the worst moment, a trainer that is not there, a clock that is
wrong, a disk that is full. Real processes on loopback; each time it is said what is wrong, nothing is lost and
nobody is blamed. The whole list, with the tests of each entry: docs/bad-input.md."""

from __future__ import annotations

import contextlib
import json
import re
import resource
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from protocol.policy import policy_root
from protocol.run import RunAddress
from tests.e2e.network import Network, end, wait_until
from trainer.ledger import Ledger

pytestmark = pytest.mark.timeout(900)

PATIENCE = 300.0  # a machine may be ten times slower than the one this was written on


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    """A trainer that serves, verifies and never learns, so that the policy stays as it is. Nothing expires."""
    made = Network(tmp_path_factory.mktemp("calm"), groups_per_step=1000, lease_seconds=900.0)
    try:
        made.serve()
        yield made
    finally:
        made.close()


def outbox(network: Network, name: str) -> set[str]:
    """Digests of the traces that wait on the node's disk."""
    return {path.stem for path in (network.store(name) / "outbox").glob("*.trace")}


def received(network: Network, name: str) -> dict[str, str]:
    """Digest → state of everything the trainer holds of the node."""
    rows = network.ledger.view("SELECT digest, state FROM submissions WHERE node = ?", (network.node(name)["node"],))
    return {row["digest"].hex(): row["state"] for row in rows}


def unanswered(network: Network, name: str) -> int:
    """Slots of the leases on the node's disk that the trainer has no trace of."""
    leases = [path.stem.upper() for path in (network.store(name) / "leases").glob("*.lease")]
    rows = network.ledger.view("SELECT hex(lease_id) AS lease FROM slots WHERE state = 'LEASED'")
    return sum(row["lease"] in leases for row in rows)


def accepted(network: Network, name: str) -> int:
    return int(network.node(name).get("accepted", 0))


def assert_nothing_is_held_against(network: Network, name: str) -> None:
    node = network.node(name)
    assert (node["refused"], node["audits_failed"], node["expired"]) == (0, 0, 0), network.log(name)
    outcomes = network.ledger.view("SELECT DISTINCT outcome FROM verdicts WHERE node = ?", (node["node"],))
    assert [row["outcome"] for row in outcomes] == ["ACCEPTED"]


def assert_nothing_counts_twice(network: Network) -> None:
    twice = network.ledger.view(
        "SELECT group_id, slot, COUNT(*) AS n FROM submissions WHERE state = 'ACCEPTED' "
        "GROUP BY group_id, slot HAVING n > 1"
    )
    assert twice == []
    counted = network.ledger.view(
        "SELECT n.accepted, COUNT(s.digest) AS traces FROM nodes n JOIN submissions s ON s.node = n.node "
        "WHERE s.state = 'ACCEPTED' GROUP BY n.node"
    )
    assert all(row["accepted"] == row["traces"] for row in counted)


# --- a node killed ---


@pytest.mark.parametrize("moment", ["download", "generation", "submit"])
def test_a_node_killed_at_any_moment_goes_on_where_it_was_at_its_next_start(calm: Network, moment: str) -> None:
    killed = calm.join_faulty(moment, moment)
    assert killed.wait(PATIENCE) == -signal.SIGKILL, calm.log(moment)
    pieces = [path.stat().st_size for path in (calm.store(moment) / "blobs").glob("*") if path.suffix == ""]
    waiting = outbox(calm, moment)
    answered = waiting & set(received(calm, moment))
    # A lease whose every slot is answered, or waits to be sent, leaves nothing to give back.
    owed = unanswered(calm, moment) - len(waiting - answered)
    before = accepted(calm, moment)

    node = calm.join(moment, "--json")
    wait_until(lambda: accepted(calm, moment) >= before + 16, PATIENCE, "the node is at work again")
    wait_until(lambda: not waiting & outbox(calm, moment), PATIENCE, "what had waited was sent")
    assert node.poll() is None, calm.log(moment)
    wait_until(lambda: calm.node(moment)["returned"] >= owed, PATIENCE, "its leases were given back")
    node.send_signal(signal.SIGINT)
    assert node.wait(60) == 0, calm.log(moment)

    if moment == "download":
        (fetched,) = calm.events(moment, "policy_fetched")
        whole = sum(path.stat().st_size for path in policy_files(calm))
        assert len(pieces) >= 3 and fetched["bytes"] == whole - sum(pieces), "pieces that were here came again"
    if moment == "submit":
        assert answered, "the trainer had answered what the node still held"
        notes = [json.loads(line) for line in (calm.store(moment) / "receipts.log").read_text().splitlines()]
        receipts = {(note["trace"], note["receipt"]) for note in notes}
        assert waiting <= {digest for digest, _ in receipts}
        assert len(receipts) == len({digest for digest, _ in receipts}), "asked again, the receipt is the same"
    if waiting:
        (resumed,) = calm.events(moment, "resumed")
        assert f"{len(waiting)} traces of an earlier run of this node wait to be sent" in resumed["text"]
    wait_until(lambda: set(received(calm, moment).values()) == {"ACCEPTED"}, PATIENCE, "every trace is judged")
    assert waiting <= set(received(calm, moment))
    assert_nothing_is_held_against(calm, moment)
    assert_nothing_counts_twice(calm)


def policy_files(network: Network) -> list[Path]:
    names = ("*.json", "*.jinja", "*.safetensors")
    return [path for name in names for path in network.run.policy(0).glob(name)]


# --- a trainer that is away ---


def test_a_node_that_finds_nobody_says_so_and_joins_by_itself_once_the_trainer_is_there(
    network: Network,
) -> None:
    serving = network.serve()
    address = network.address
    end(serving)
    node = network.join("early", "--json")
    wait_until(lambda: len(network.events("early", "disconnected")) >= 2, PATIENCE, "two tries")
    said = network.events("early", "disconnected")[0]["text"]
    assert "nobody listens there" in said and "next try in" in said
    network.serve()
    assert network.address == address
    wait_until(lambda: accepted(network, "early") >= 1, PATIENCE, "a trace is accepted")
    assert node.poll() is None


@pytest.fixture
def quick(tmp_path: Path) -> Iterator[Network]:
    """A trainer that learns from every two groups, however old, and keeps every policy."""
    made = Network(tmp_path, groups_per_step=2, lease_seconds=900.0, staleness_limit=900, keep_policies=1000)
    try:
        yield made
    finally:
        made.close()


def test_a_trainer_killed_in_a_step_or_while_it_publishes_loses_no_version_and_uses_no_group_twice(
    quick: Network,
) -> None:
    made = []
    for point in ("learned", "policy renamed", "step renamed"):
        dying = quick.serve_until(point)
        if not made:
            node = quick.join("honest", "--json")
        assert dying.wait(PATIENCE) == -signal.SIGKILL, quick.log("serve")
        made.append(quick.versions())
    assert made == [0, 0, 0], "each was killed before its step was in the ledger"
    quick.serve()
    wait_until(lambda: quick.versions() >= 3, PATIENCE, "three policy versions")
    wait_until(lambda: (quick.node("honest")["policy_version"] or 0) >= 2, PATIENCE, "the node draws from one")
    assert node.poll() is None, quick.log("honest")
    assert len(quick.events("honest", "connected")) >= 2

    steps = quick.ledger.steps()
    assert [step.version for step in steps] == list(range(1, len(steps) + 1))
    taken = quick.ledger.view("SELECT batch, COUNT(*) AS n FROM groups WHERE state = 'TAKEN' GROUP BY batch")
    used = {row["batch"]: row["n"] for row in taken}
    assert all(used[step.version] == step.groups + step.flat_groups for step in steps)
    for version, root, _ in (quick.ledger.policy(step.version) or (0, b"", None) for step in steps[:2]):
        assert policy_root(quick.run.policy(version)) == root
    assert_nothing_is_held_against(quick, "honest")
    assert_nothing_counts_twice(quick)


# --- a node that cannot work here ---


@pytest.mark.parametrize(
    ("fault", "code", "told"),
    [
        ("clock", "CLOCK_SKEW", r"clock is (3,[56]\d\d s|60 minutes) ahead of the trainer's.*timedatectl set-ntp true"),
        (
            "version",
            "VERSION_MISMATCH",
            r"this node speaks protocol 9\.3, the trainer speaks 1\.0: upgrade the trainer",
        ),
    ],
)
def test_a_node_that_cannot_work_here_ends_with_the_reason_and_what_to_do(
    calm: Network, fault: str, code: str, told: str
) -> None:
    node = calm.join_faulty(fault, fault)
    assert node.wait(PATIENCE) == 1, calm.log(fault)
    (failed,) = calm.events(fault, "failed")
    assert failed["error"] == code and re.search(told, failed["text"]), failed
    assert calm.node(fault) == {}, "a node that never joined has no record to spoil"


def test_a_node_with_the_address_of_another_run_ends_naming_both(calm: Network) -> None:
    address = RunAddress.parse(calm.address)
    other = RunAddress(address.multiaddr, address.trainer, b"\x07" * 32)
    words = [*calm.words_to_join("stray"), "--json"]
    node = calm.start("stray", [str(other) if word == calm.address else word for word in words])
    assert node.wait(PATIENCE) == 1, calm.log("stray")
    (failed,) = calm.events("stray", "failed")
    assert failed["error"] == "WRONG_RUN" and address.run.hex()[:16] in failed["text"]
    assert "0707070707070707" in failed["text"] and "copy the address" in failed["text"]
    assert calm.node("stray") == {}


# --- a full disk ---


def test_a_node_with_a_full_disk_waits_saying_what_for_and_loses_no_trace(calm: Network) -> None:
    """A limit on the size of files is a full disk that can be lifted from outside, without root."""

    def room_for(size: int) -> None:
        resource.prlimit(node.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

    # Its words go through a pipe: they must get out of a machine that can write no file.
    pipe = calm.start("full", ["cat"], stdin=subprocess.PIPE)
    assert pipe.stdin is not None
    node = calm.start("full", [*calm.words_to_join("full"), "--json"], stdout=pipe.stdin)
    pipe.stdin.close()
    room_for(50_000)
    wait_until(lambda: len(calm.events("full", "storage")) >= 1, PATIENCE, "the node says what it waits for")
    said = calm.events("full", "storage")[0]["text"]
    assert said.startswith("the disk is full: storing a piece of the policy needs 207") and "free some" in said
    assert "the download waits for it" in said
    room_for(resource.RLIM_INFINITY)
    wait_until(lambda: accepted(calm, "full") >= 8, PATIENCE, "the node works once there is room")

    told = len(calm.events("full", "storage"))
    room_for(100)
    wait_until(lambda: len(calm.events("full", "storage")) > told, PATIENCE, "a disk full of traces is said")
    assert "the disk is full" in calm.events("full", "storage")[told]["text"]
    assert node.poll() is None
    before = accepted(calm, "full")
    room_for(resource.RLIM_INFINITY)
    wait_until(lambda: accepted(calm, "full") >= before + 32, PATIENCE, "the node goes on")
    node.send_signal(signal.SIGINT)
    assert node.wait(60) == 0, calm.log("full")
    drawn = {event["trace"] for event in calm.events("full", "trace_drawn")}
    wait_until(lambda: set(received(calm, "full").values()) == {"ACCEPTED"}, PATIENCE, "every trace is judged")
    assert drawn == set(received(calm, "full")) | outbox(calm, "full")
    assert_nothing_is_held_against(calm, "full")
    assert calm.events("full", "trace_refused") == []


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small file system, with room for a run beside what a trainer keeps free (256 MiB)."""
    where = tmp_path / "disk"
    where.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=600m", "tmpfs", where], capture_output=True).returncode:
        pytest.skip("mounting a small file system needs root")
    yield where
    subprocess.run(["umount", "--lazy", where], check=True)


def test_a_trainer_with_a_full_disk_makes_nodes_wait_and_goes_on_when_there_is_room(disk: Path, quick: Network) -> None:
    quick.ledger.close()
    shutil.move(quick.run.path, disk / "run")
    quick.run.path.symlink_to(disk / "run")
    quick.ledger = Ledger(quick.run.ledger, read_only=True)
    serving = quick.serve()
    node = quick.join("honest", "--json")
    wait_until(lambda: quick.versions() >= 1, PATIENCE, "the first policy version")

    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    wait_until(lambda: len(about_the_disk(quick)) >= 1, PATIENCE, "the node is told why it waits")
    assert node.poll() is None and serving.poll() is None
    before, versions = accepted(quick, "honest"), quick.versions()
    ballast.unlink()
    wait_until(lambda: quick.versions() >= versions + 2, PATIENCE, "the run goes on once there is room")
    # Groups that were complete already may have made those two versions.
    wait_until(lambda: accepted(quick, "honest") > before, PATIENCE, "traces are accepted again")
    assert node.poll() is None and serving.poll() is None
    steps = [step.version for step in quick.ledger.steps()]
    assert steps == list(range(1, len(steps) + 1))
    assert_nothing_is_held_against(quick, "honest")
    assert_nothing_counts_twice(quick)
    end(node)
    end(serving)


def about_the_disk(network: Network) -> list[str]:
    """What the node said of the trainer's disk."""
    said = [event["text"] for kind in ("busy", "no_leases", "idle") for event in network.events("honest", kind)]
    return [text for text in said if "disk is nearly full" in text or "cannot write now" in text]
