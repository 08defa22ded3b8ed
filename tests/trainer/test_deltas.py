"""The trainer's deltas: which are made, that each was checked, and how they get into manifests and onto the shelf."""

from __future__ import annotations

import hashlib
import shutil
from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import trainer.deltas
from protocol import codec
from protocol.identity import Identity
from protocol.policy import Manifest, check_manifest, describe, policy_root
from protocol.policy_delta import delta_between, fill
from protocol.run import EnvironmentShare
from trainer.config import TrainerConfig
from trainer.deltas import bases, delta_files, describe_deltas, make_deltas
from trainer.init import EMBEDDED, init_run
from trainer.ledger import Ledger
from trainer.office import fill_shelf, sign_manifest
from trainer.publish import prune_policies, retire_policy, write_policy
from trainer.rundir import Run, RunFolder, load_run_identity
from trainer.shelf import Shelf, read_blob


def step(folder: RunFolder, version: int, *, scale: float = 1e-3) -> bytes:
    """Make policy `version` from the one before: some values move a little. Its root."""
    generator = torch.Generator().manual_seed(version)
    weights = load_file(folder.policy(version - 1) / "model.safetensors")
    moved = {
        name: (each.float() * (1 + scale * torch.randn(each.shape, generator=generator)))
        for name, each in weights.items()
    }
    return write_policy(folder.policy(version - 1), folder.policy(version), moved)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    found = RunFolder(tmp_path / "run")
    shutil.copytree(EMBEDDED, found.policy(0))
    return found


def test_every_version_has_a_delta_from_the_one_before_and_some_from_earlier_ones() -> None:
    assert bases(0) == []
    assert bases(1) == [0]
    assert bases(7) == [6]
    assert bases(12) == [8, 11]
    assert bases(16) == [0, 12, 15]
    assert bases(32) == [16, 28, 31]


def test_a_delta_is_described_for_the_manifest_and_makes_the_policy(folder: RunFolder, tmp_path: Path) -> None:
    roots = {0: policy_root(folder.policy(0)), 1: step(folder, 1)}
    assert make_deltas(folder, 1, roots.get) == []
    (delta,) = describe_deltas(folder, 1)
    assert (delta.base_version, delta.base_root, delta.codec) == (0, roots[0], "ULPD1")
    manifest = Manifest(bytes(32), 1, roots[1], describe(folder.policy(1)), 0, 1, (delta,))
    check_manifest(manifest)
    assert 2 * delta.size < manifest.size
    target = tmp_path / "made"
    target.mkdir()
    for path in folder.policy(1).iterdir():
        if path.suffix != ".safetensors":
            shutil.copy(path, target)
    (file,) = delta_files(folder, 1)
    fill(folder.policy(0), target, [file.read_bytes()], manifest)
    assert policy_root(target) == roots[1]


def test_a_delta_that_does_not_come_out_exactly_is_dropped_with_the_reason(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    roots = {0: policy_root(folder.policy(0)), 1: step(folder, 1)}
    right = delta_between

    def one_bit_off(base: Path, new: Path) -> list[bytes]:
        stream = bytearray(b"".join(right(base, new)))
        stream[len(stream) // 2] ^= 4
        return [bytes(stream)]

    monkeypatch.setattr(trainer.deltas, "delta_between", one_bit_off)
    (said,) = make_deltas(folder, 1, roots.get)
    assert said.startswith("no delta from policy 0 to 1, nodes fetch the files: delta: ")
    assert describe_deltas(folder, 1) == () and list(folder.deltas(1).iterdir()) == []


def test_a_delta_that_is_not_worth_it_is_not_published(folder: RunFolder) -> None:
    roots = {0: policy_root(folder.policy(0)), 1: step(folder, 1, scale=10.0)}
    (said,) = make_deltas(folder, 1, roots.get)
    assert "over half of their size" in said
    assert describe_deltas(folder, 1) == ()


def test_a_policy_in_another_layout_is_fetched_whole(folder: RunFolder) -> None:
    roots = {0: policy_root(folder.policy(0)), 1: step(folder, 1)}
    path = folder.policy(1) / "model.safetensors"
    path.rename(path.with_name("weights.safetensors"))
    (said,) = make_deltas(folder, 1, roots.get)
    assert "not laid out" in said


def test_what_a_killed_learner_left_of_a_delta_is_made_again(folder: RunFolder) -> None:
    roots = {0: policy_root(folder.policy(0)), 1: step(folder, 1)}
    left = folder.deltas(1) / f"000000-{roots[0].hex()}.ulpd1.tmp"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"half")
    assert describe_deltas(folder, 1) == ()
    assert make_deltas(folder, 1, roots.get) == []
    assert not left.exists() and len(describe_deltas(folder, 1)) == 1


def test_a_policy_that_is_kept_no_longer_gives_no_delta(folder: RunFolder) -> None:
    roots = {0: policy_root(folder.policy(0))}
    for version in range(1, 5):
        roots[version] = step(folder, version)
    retire_policy(folder, 0)
    assert make_deltas(folder, 4, roots.get) == []
    assert [each.base_version for each in describe_deltas(folder, 4)] == [3]
    del roots[3]  # what the ledger knows nothing of is nobody's base
    assert make_deltas(folder, 4, roots.get) == [] and describe_deltas(folder, 4) == ()


def test_deltas_go_with_the_policies_they_lead_to(folder: RunFolder) -> None:
    roots = {0: policy_root(folder.policy(0))}
    for version in range(1, 6):
        roots[version] = step(folder, version)
        assert make_deltas(folder, version, roots.get) == []
    assert [each.base_version for each in describe_deltas(folder, 4)] == [0, 3]
    retire_policy(folder, 3)
    assert folder.versions() == [0, 1, 2, 4, 5] and not folder.deltas(3).exists()
    prune_policies(folder, newest=5, keep=2)
    assert folder.versions() == [4, 5]
    assert sorted(path.name for path in folder.deltas(5).parent.iterdir()) == ["000004", "000005"]
    assert [each.base_version for each in describe_deltas(folder, 4)] == [0, 3]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    shares = (EnvironmentShare("tools8@1", "", 1),)
    return init_run(tmp_path / "signed", name="t", policy="embedded", environments=shares, config=TrainerConfig())


def test_the_signed_manifest_names_the_deltas_and_the_shelf_has_their_blobs(run: Run) -> None:
    roots = {0: run.genesis.first_policy_root, 1: step(run.folder, 1)}
    assert make_deltas(run.folder, 1, roots.get) == []
    mine: Identity = load_run_identity(run)
    signed = sign_manifest(run, mine, 1, roots[1])
    manifest = codec.decode(Manifest, signed.payload)
    check_manifest(manifest)
    shelf = Shelf(run.folder)
    shelf.put(signed, manifest)
    (delta,) = manifest.deltas
    for blob in delta.blobs:
        place = shelf.blob(blob.digest)
        assert place is not None
        assert hashlib.sha256(read_blob(place)).digest() == blob.digest


def test_the_shelf_holds_the_newest_versions_however_many_the_run_keeps(run: Run) -> None:
    mine: Identity = load_run_identity(run)
    shelf = Shelf(run.folder, most=2)
    digests = []
    for version in range(4):
        root = step(run.folder, version) if version else run.genesis.first_policy_root
        signed = sign_manifest(run, mine, version, root)
        shelf.put(signed, manifest := codec.decode(Manifest, signed.payload))
        digests.append(next(f.blobs[0].digest for f in manifest.files if f.name.endswith(".safetensors")))
    assert (shelf.manifest(1), shelf.root(1), shelf.blob(digests[1])) == (None, None, None)
    assert shelf.latest == 3 and shelf.root(2) is not None
    assert all(shelf.blob(digest) is not None for digest in digests[2:])


def test_a_start_puts_the_newest_versions_on_the_shelf_and_signs_all(run: Run) -> None:
    with closing(Ledger(run.folder.ledger)) as ledger:
        for version in range(1, 6):
            ledger.add_policy(version, step(run.folder, version), 1)
        shelf = Shelf(run.folder, most=2)
        fill_shelf(run, load_run_identity(run), ledger, shelf)
        assert ledger.unsigned_policies() == []
        assert [version for version in range(6) if shelf.root(version) is not None] == [4, 5] and shelf.latest == 5
