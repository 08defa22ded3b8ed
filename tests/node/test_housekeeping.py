"""`rlnode store`: what a home holds, what is damaged, what may go; beside a running node too."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest

from node.cli import main
from node.housekeeping import collect, look, verify
from node.store import Home, RunStore, run_folder, write_status
from protocol import codec
from protocol.envelope import seal
from protocol.errors import StorageError
from protocol.lease import Lease, Slot
from protocol.policy import Blob, Delta
from tests.node.test_store import MANIFEST, NODE, RUN, TRAINER, config, put_policy, trace

LEASE = Lease(
    run=RUN,
    lease_id=b"\4" * 16,
    node=NODE.node,
    policy_version=3,
    policy_root=MANIFEST.root,
    environment="tools8@1",
    parameters="",
    task_index=0,
    group_id=b"\5" * 16,
    group_size=4,
    slots=(Slot(0, 1),),
    prompt=(1,),
    temperature=1.0,
    max_turn_tokens=4,
    max_tokens=8,
    issued_ms=0,
    deadline_ms=1,
)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Versions 1 to 8: a trace of 2 is not sent, 3 is leased; a piece of an unfinished download."""
    store = RunStore(run_folder(tmp_path, RUN), config(keep_versions=8))
    for version in range(1, 9):
        put_policy(store, version)
    store.drop_blobs()
    store.put_trace(*trace(version=2))
    store.save_lease(LEASE.lease_id, seal(TRAINER, LEASE))
    data = b"a piece"
    store.put_blob(hashlib.sha256(data).digest(), data)
    return tmp_path


def versions(home: Path) -> list[int]:
    (holding,) = look(home)
    return [policy.version for policy in holding.policies]


def test_every_policy_is_listed_with_what_it_is_kept_for(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["store", "ls", "--home", str(home)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.rsplit("  ", 1)[1] for line in lines if "policy" in line] == [
        "may go", "1 unsent traces", "1 leases", "may go", "may go", "may go", "may go", "newest",
    ]  # fmt: skip
    assert main(["store", "ls", "--home", str(home), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["run"] == RUN.hex()[:16] and found["pieces"] == found["unsent_traces"] == found["leases"] == 1


def test_what_nothing_needs_is_given_up_and_what_is_leased_or_unsent_stays(home: Path) -> None:
    (run_folder(home, RUN) / "policies" / "v00000009-00.unfinished").mkdir()
    gone, freed = collect(home)
    assert gone == [*(f"policy {n}" for n in (1, 4, 5, 6, 7)), "1 pieces", "1 half-written files"]
    assert freed > 5 * MANIFEST.size
    assert versions(home) == [2, 3, 8]
    assert collect(home) == ([], 0)
    assert sorted(RunStore(run_folder(home, RUN), config()).held) == [2, 3, 8]


def test_beside_a_running_node_old_policies_alone_go(home: Path) -> None:
    write_status(home, {"run": RUN.hex(), "policy_version": 4})
    half = run_folder(home, RUN) / "policies" / "v00000009-00.unfinished"
    half.mkdir()
    with Home(home):
        reasons = {policy.version: policy.reasons for policy in look(home)[0].policies}
        gone, _ = collect(home)
    kept = ("one of the newest 3, for the running node",)
    assert (reasons[6], reasons[7], reasons[8]) == (kept, kept, ("newest",))
    assert gone == ["policy 1", "policy 5"]
    assert versions(home) == [2, 3, 4, 6, 7, 8]
    assert half.exists() and len(list((run_folder(home, RUN) / "blobs").iterdir())) == 1


def test_damage_is_found_and_named(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert list(verify(home)) == []
    assert main(["store", "verify", "--home", str(home)]) == 0
    folder = run_folder(home, RUN)
    (policy,) = (folder / "policies").glob("v00000005*")
    data = bytearray((policy / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (policy / "model.safetensors").write_bytes(data)
    (piece,) = (folder / "blobs").iterdir()
    piece.write_bytes(b"rot")
    capsys.readouterr()
    assert main(["store", "verify", "--home", str(home), "--json"]) == 1
    said = [json.loads(line)["path"] for line in capsys.readouterr().out.splitlines()]
    assert said == [str(policy), str(piece)]


@pytest.mark.parametrize("action", ["ls", "verify", "gc"])
def test_a_home_that_is_not_there_holds_nothing(
    tmp_path: Path, action: str, capsys: pytest.CaptureFixture[str]
) -> None:
    where = tmp_path / "none"
    assert look(where) == [] and list(verify(where)) == []
    assert main(["store", action, "--home", str(where)]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err == f"rlnode: no node has run in {where} yet: rlnode join ADDRESS\n"
    assert not where.exists()


# --- the budget of a node ---


def test_the_policies_used_least_make_room_and_no_more_of_them_than_needed(tmp_path: Path) -> None:
    store = RunStore(tmp_path, config(keep_versions=9))
    for version in range(1, 7):
        put_policy(store, version)
    store.drop_blobs()
    for version in (5, 4, 2, 1, 3, 6):
        store.held[version].touch()
    used = store.used_bytes()
    tight = RunStore(tmp_path, config(keep_versions=9, disk_bytes=used + 1_000))
    tight.make_room(MANIFEST.size + 2_000, "policy 7")
    assert sorted(tight.held) == [1, 2, 3, 6]


def test_what_is_needed_does_not_make_room(tmp_path: Path) -> None:
    store = RunStore(tmp_path, config(keep_versions=9))
    for version in range(1, 7):
        put_policy(store, version)
    store.drop_blobs()
    store.put_trace(*trace(version=1))
    store.save_lease(LEASE.lease_id, seal(TRAINER, LEASE))
    store.prune({2})
    store.pinned = frozenset({4})
    tight = RunStore(tmp_path, config(keep_versions=9, disk_bytes=store.used_bytes()))
    tight.prune({2})
    tight.pinned = frozenset({4})
    tight.make_room(MANIFEST.size - 1_000, "policy 7")
    assert sorted(tight.held) == [1, 2, 3, 4, 6]
    with pytest.raises(StorageError, match="policy 7 needs"):
        tight.make_room(2 * MANIFEST.size, "policy 7")
    assert sorted(tight.held) == [1, 2, 3, 4, 6]


def test_pieces_of_deltas_stay_as_long_as_the_policy_they_lead_to(tmp_path: Path) -> None:
    data = b"a delta"
    digest = hashlib.sha256(data).digest()
    manifest = replace(MANIFEST, version=2, deltas=(Delta(1, MANIFEST.root, "ULPD1", (Blob(digest, len(data)),)),))
    store = RunStore(tmp_path, config(keep_versions=1))
    put_policy(store, 2)
    store.put_blob(digest, data)
    folder = store.held[2].folder
    (folder / "manifest.msgpack").write_bytes(codec.encode(seal(TRAINER, manifest)))
    store = RunStore(tmp_path, config(keep_versions=1))
    store.drop_blobs()
    assert store.read_blob(digest) == data
    put_policy(store, 3)
    store.prune(())
    store.drop_blobs()
    assert store.read_blob(digest) is None
