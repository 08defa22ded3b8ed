"""A node's home: whole files or none, one process at a time, nothing lost by a kill or a full disk."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from node import doctor
from node.config import DISK_RESERVE_BYTES, NodeConfig
from node.store import (
    HeldPolicy,
    Home,
    RunStore,
    load_address,
    lock_holder,
    read_status,
    save_address,
    write_status,
    write_whole,
)
from protocol import codec
from protocol.envelope import Signed, seal
from protocol.errors import KeyFileError, PolicyError, StorageError
from protocol.identity import Identity
from protocol.limits import MAX_BLOB_BYTES
from protocol.policy import Manifest, describe, policy_root
from protocol.run import RunAddress
from protocol.trace import EngineDescriptor, Span, Trace
from protocol.verdict import Receipt

EMBEDDED = Path(__file__).parents[2] / "trainer" / "embedded"
TRAINER = Identity(b"\1" * 32)
NODE = Identity(b"\2" * 32)
RUN = b"\3" * 32
ADDRESS = RunAddress("/ip4/127.0.0.1/tcp/4001", TRAINER.node, RUN)
MANIFEST = Manifest(RUN, 1, policy_root(EMBEDDED), describe(EMBEDDED), 0, 0)


def config(**changes: object) -> NodeConfig:
    return replace(NodeConfig(address=ADDRESS, disk_reserve_bytes=0), **changes)  # type: ignore[arg-type]


def trace(slot: int = 0, version: int = 1) -> tuple[Signed, Trace]:
    value = Trace(
        run=RUN,
        lease_id=b"\4" * 16,
        node=NODE.node,
        policy_version=version,
        policy_root=MANIFEST.root,
        slot=slot,
        tokens=(5, 6),
        spans=(Span(0, 2),),
        logprobs=(-0.5, -0.25),
        proofs=(b"\0" * 10,),
        reward=1.0,
        engine=EngineDescriptor("transformers", "5", "float32", "cpu", "reference"),
        started_ms=1,
        finished_ms=2,
    )
    return seal(NODE, value), value


def put_all_blobs(store: RunStore, manifest: Manifest = MANIFEST) -> None:
    for file in manifest.files:
        data = (EMBEDDED / file.name).read_bytes()
        for number, blob in enumerate(file.blobs):
            store.put_blob(blob.digest, data[number * MAX_BLOB_BYTES :][: blob.length])


def put_policy(store: RunStore, version: int) -> None:
    manifest = replace(MANIFEST, version=version)
    put_all_blobs(store)
    store.assemble(manifest, seal(TRAINER, manifest))


# --- the home ---


def test_two_nodes_cannot_use_one_home(tmp_path: Path) -> None:
    with Home(tmp_path):
        script = f"from node.store import Home; from pathlib import Path; Home(Path({str(tmp_path)!r})).__enter__()"
        second = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
        assert second.returncode != 0
        assert f"another rlnode (process {os.getpid()}) uses {tmp_path}" in second.stderr
        assert lock_holder(tmp_path) == os.getpid()
    assert lock_holder(tmp_path) is None
    with Home(tmp_path):
        pass


def test_a_killed_node_leaves_no_lock_behind(tmp_path: Path) -> None:
    script = (
        "import os; from node.store import Home; from pathlib import Path\n"
        f"Home(Path({str(tmp_path)!r})).__enter__(); os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == -9
    with Home(tmp_path):
        pass


def test_a_key_is_made_once_and_kept(tmp_path: Path) -> None:
    with Home(tmp_path) as home:
        first, made = home.load_or_make_identity()
        assert made
        again, made = home.load_or_make_identity()
        assert not made and again.node == first.node
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600


def test_a_damaged_key_is_an_error_and_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("gibberish")
    (tmp_path / "key").chmod(0o600)
    with Home(tmp_path) as home, pytest.raises(KeyFileError, match="is not a key file"):
        home.load_or_make_identity()
    assert (tmp_path / "key").read_text() == "gibberish"


def test_a_lost_key_is_not_replaced_while_its_traces_wait(tmp_path: Path) -> None:
    with Home(tmp_path) as home:
        home.run(RUN, config()).put_trace(*trace())
        with pytest.raises(KeyFileError, match="rlnode key restore"):
            home.load_or_make_identity()


def test_the_address_and_the_status_are_remembered(tmp_path: Path) -> None:
    assert load_address(tmp_path) is None
    assert read_status(tmp_path) is None
    save_address(tmp_path, ADDRESS)
    write_status(tmp_path, {"state": "drawing"})
    assert load_address(tmp_path) == ADDRESS
    assert read_status(tmp_path) == {"state": "drawing"}


# --- blobs and policies ---


def test_bytes_with_another_digest_are_never_stored(tmp_path: Path) -> None:
    store = RunStore(tmp_path, config())
    with pytest.raises(ValueError):
        store.put_blob(b"\0" * 32, b"other bytes")
    assert list((tmp_path / "blobs").iterdir()) == []


def test_a_policy_gets_its_name_when_it_is_whole(tmp_path: Path) -> None:
    store = RunStore(tmp_path, config())
    put_policy(store, 1)
    (folder,) = (tmp_path / "policies").iterdir()
    assert folder.name == f"v00000001-{MANIFEST.root.hex()[:16]}"
    assert policy_root(folder) == MANIFEST.root
    assert RunStore(tmp_path, config()).held[1].root == MANIFEST.root


def test_a_kill_while_a_policy_is_put_together_costs_no_blob(tmp_path: Path) -> None:
    store = RunStore(tmp_path, config())
    put_all_blobs(store)
    half_made = tmp_path / "policies" / "v00000001-0011223344556677.unfinished"
    half_made.mkdir()
    (half_made / "model.safetensors").write_bytes(b"half")
    blobs = sorted(path.name for path in (tmp_path / "blobs").iterdir())
    (tmp_path / "blobs" / "00ff.unfinished").write_bytes(b"half a blob")
    again = RunStore(tmp_path, config())
    assert not half_made.exists() and again.held == {}
    assert sorted(path.name for path in (tmp_path / "blobs").iterdir()) == blobs


def test_files_that_do_not_fit_the_signed_root_leave_nothing_behind(tmp_path: Path) -> None:
    store = RunStore(tmp_path, config())
    put_all_blobs(store)
    lying = replace(MANIFEST, root=b"\6" * 32)
    with pytest.raises(PolicyError, match="signed a manifest that does not fit"):
        store.assemble(lying, seal(TRAINER, lying))
    assert store.held == {} and list((tmp_path / "policies").iterdir()) == []


def test_a_policy_damaged_on_the_disk_is_noticed_and_removed(tmp_path: Path) -> None:
    store = RunStore(tmp_path, config())
    put_policy(store, 1)
    held = store.held[1]
    assert store.check_held(1) == held
    data = bytearray((held.folder / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (held.folder / "model.safetensors").write_bytes(data)
    assert store.check_held(1) is None
    assert not held.folder.exists()


def test_a_damaged_blob_counts_as_missing(tmp_path: Path) -> None:
    store = RunStore(tmp_path, config())
    put_all_blobs(store)
    digest = MANIFEST.files[0].blobs[0].digest
    (tmp_path / "blobs" / digest.hex()).write_bytes(b"rot")
    assert store.read_blob(digest) is None


def test_pieces_of_a_policy_held_are_found_in_its_files(tmp_path: Path) -> None:
    store = RunStore(tmp_path, config())
    put_policy(store, 1)
    store.drop_blobs()
    for file in MANIFEST.files:
        for blob in file.blobs:
            assert store.read_blob(blob.digest) is not None


def test_the_last_three_policies_and_those_in_use_or_unsent_are_kept(tmp_path: Path) -> None:
    store = RunStore(tmp_path, config(keep_versions=3))
    for version in range(1, 8):
        put_policy(store, version)
    store.put_trace(*trace(version=2))
    store.prune(in_use={3})
    assert sorted(store.held) == [2, 3, 5, 6, 7]
    assert sorted(RunStore(tmp_path, config()).held) == [2, 3, 5, 6, 7]


# --- traces on their way ---


def test_an_unsent_trace_survives_and_is_forgotten_only_with_its_receipt(tmp_path: Path) -> None:
    signed, value = trace()
    RunStore(tmp_path, config()).put_trace(signed, value)
    store = RunStore(tmp_path, config())
    assert list(store.unsent) == [signed.digest]
    assert store.read_trace(signed.digest) == signed
    receipt = seal(TRAINER, Receipt(RUN, signed.digest, value.lease_id, 0, NODE.node, 3, 0))
    store.settle(signed.digest, receipt)
    assert store.unsent == {} and RunStore(tmp_path, config()).unsent == {}
    (line,) = (tmp_path / "receipts.log").read_text().splitlines()
    noted = json.loads(line)
    assert noted["trace"] == signed.digest.hex()
    assert codec.decode(Signed, bytes.fromhex(noted["receipt"])) == receipt


def test_refused_traces_are_kept_for_an_appeal_up_to_a_bound(tmp_path: Path) -> None:
    store = RunStore(tmp_path, config(keep_refused=2))
    for slot in range(4):
        signed, value = trace(slot)
        store.put_trace(signed, value)
        store.refuse(signed.digest)
    assert store.unsent == {}
    assert len(list((tmp_path / "refused").iterdir())) == 2


def test_whoever_is_looking_through_the_outbox_is_not_disturbed_by_what_comes_and_goes(tmp_path: Path) -> None:
    store = RunStore(tmp_path, config())
    for slot in range(3):
        store.put_trace(*trace(slot))
    seen: list[bytes] = []
    for digest in store.unsent:
        store.refuse(digest)
        store.put_trace(*trace(len(seen) + 10))
        seen.append(digest)
    assert len(seen) == 3 and len(store.unsent) == 3


def test_a_file_in_the_outbox_that_is_no_trace_is_put_aside(tmp_path: Path) -> None:
    RunStore(tmp_path, config())
    (tmp_path / "outbox" / "00.trace").write_bytes(b"gibberish")
    assert RunStore(tmp_path, config()).unsent == {}
    assert (tmp_path / "refused" / "00.trace").exists()


def test_logs_turn_over_at_their_size(tmp_path: Path) -> None:
    store = RunStore(tmp_path, config(log_bytes=4_000))
    signed, value = trace()
    receipt = seal(TRAINER, Receipt(RUN, signed.digest, value.lease_id, 0, NODE.node, 3, 0))
    for _ in range(30):
        store.put_trace(signed, value)
        store.settle(signed.digest, receipt)
    sizes = [(tmp_path / name).stat().st_size for name in ("receipts.log", "receipts.log.1")]
    assert max(sizes) <= 4_000


def test_a_line_that_a_kill_cut_off_spoils_no_other(tmp_path: Path) -> None:
    RunStore(tmp_path, config()).note_verdicts([({"outcome": "ACCEPTED"}, trace()[0])], 1)
    log = tmp_path / "verdicts.log"
    log.write_bytes(log.read_bytes() + b'{"outcome":"ACC')
    store = RunStore(tmp_path, config())
    for number in (2, 3):
        store.note_verdicts([({"outcome": number}, trace()[0])], number)
    whole, torn, *more = log.read_text().splitlines()
    assert torn == '{"outcome":"ACC' and [json.loads(line)["outcome"] for line in (whole, *more)] == ["ACCEPTED", 2, 3]


def test_one_piece_may_be_stored_by_several_at_once(tmp_path: Path) -> None:
    store, data = RunStore(tmp_path, config()), os.urandom(MAX_BLOB_BYTES)
    digest = hashlib.sha256(data).digest()
    for _ in range(5):
        with ThreadPoolExecutor(4) as pool:
            for done in [pool.submit(store.put_blob, digest, data) for _ in range(4)]:
                done.result()
        assert [path.name for path in (tmp_path / "blobs").iterdir()] == [digest.hex()]
        assert store.read_blob(digest) == data


def test_the_verdict_cursor_moves_after_the_log_is_written(tmp_path: Path) -> None:
    store = RunStore(tmp_path, config())
    assert store.verdict_cursor == 0
    store.note_verdicts([({"outcome": "ACCEPTED"}, trace()[0])], 7)
    assert RunStore(tmp_path, config()).verdict_cursor == 7
    assert json.loads((tmp_path / "verdicts.log").read_text())["outcome"] == "ACCEPTED"


# --- a full disk ---


def test_too_little_space_is_told_before_a_download_with_how_much_is_missing(tmp_path: Path) -> None:
    store = RunStore(tmp_path, config(), free_bytes=lambda folder: 1024 * 1024)
    with pytest.raises(StorageError, match=r"needs 3\.0 MiB.*has 1\.0 MiB.*free 2\.0 MiB"):
        store.check_space(3 * 1024 * 1024, "policy 7")


def test_what_stays_for_the_rest_of_the_machine_is_said_and_counted(tmp_path: Path) -> None:
    mib = 1024 * 1024
    store = RunStore(tmp_path, config(disk_reserve_bytes=256 * mib), free_bytes=lambda folder: 200 * mib)
    told = (
        rf"policy 7 needs 3\.0 MiB, the disk of {tmp_path} has 200\.0 MiB free, and keeps 256\.0 MiB free for the "
        r"rest of the machine: free 59\.0 MiB more, or use another disk"
    )
    with pytest.raises(StorageError, match=told):
        store.make_room(3 * mib, "policy 7")
    store = RunStore(tmp_path, config(disk_reserve_bytes=256 * mib), free_bytes=lambda folder: 259 * mib)
    store.make_room(3 * mib, "policy 7")


@pytest.mark.parametrize(
    ("policies", "level", "told"),
    [
        (1, "act", "free, and keeps 256.0 MiB free for the rest of the machine: no new policy is fetched before "),
        (3, "warning", "more than these may be needed: free "),
        (6, "ok", " MiB free, and keeps 256.0 MiB"),
    ],
)
def test_doctor_counts_the_disk_as_a_node_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policies: int, level: str, told: str
) -> None:
    usage = shutil.disk_usage(tmp_path)
    free = DISK_RESERVE_BYTES + policies * MANIFEST.size
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=free))
    found = doctor._disk(tmp_path, MANIFEST)
    assert (str(found.level), told in found.text) == (level, True), found.text


@pytest.mark.parametrize("looked", ["used_ns", "touch"])
def test_a_policy_that_goes_while_another_thread_looks_through_them_disturbs_nobody(
    tmp_path: Path, looked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A download made room while the worker gave up older policies: the node ended with a KeyError."""
    store = RunStore(tmp_path / "run", config(keep_versions=5))
    for version in (1, 2, 3, 4):
        put_policy(store, version)
    look = getattr(HeldPolicy, looked)

    def while_another_drops(held: HeldPolicy) -> object:
        store._drop_policies([1, 2])
        return look(held)

    monkeypatch.setattr(HeldPolicy, looked, while_another_drops)
    store.make_room(1, "a download")
    store.prune([1, 2, 3])
    assert sorted(store.held) == [3, 4]


def test_the_budget_counts_what_the_home_holds_already(tmp_path: Path) -> None:
    store = RunStore(tmp_path, config(disk_bytes=400_000))
    put_policy(store, 1)
    with pytest.raises(StorageError, match="--disk leaves"):
        store.check_space(300_000, "policy 2")


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    where = tmp_path / "disk"
    where.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(where)], capture_output=True)
    if mount.returncode:
        pytest.skip("mounting a small file system needs root")
    yield where
    subprocess.run(["umount", str(where)], check=True)


def test_a_full_disk_is_a_storage_error_and_the_old_file_stays(tiny_disk: Path) -> None:
    path = tiny_disk / "file"
    write_whole(path, b"old", "a test")
    with pytest.raises(StorageError, match=r"the disk is full: a test needs 1\.0 MiB"):
        write_whole(path, b"x" * 1024 * 1024, "a test")
    assert path.read_bytes() == b"old"
    assert [each.name for each in tiny_disk.iterdir()] == ["file"]


def test_a_trace_that_does_not_fit_the_disk_fits_once_there_is_room(tiny_disk: Path) -> None:
    store = RunStore(tiny_disk, config())
    ballast = tiny_disk / "ballast"
    with pytest.raises(OSError), ballast.open("wb") as file:
        while True:
            file.write(b"x" * 4096)
            file.flush()
    with pytest.raises(StorageError, match="the disk is full"):
        store.put_trace(*trace())
    ballast.unlink()
    store.put_trace(*trace())
    assert len(RunStore(tiny_disk, config()).unsent) == 1
