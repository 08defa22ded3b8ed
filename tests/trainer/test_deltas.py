"""The trainer's deltas: which are made, that each was checked, and how they get into manifests and onto the shelf."""

from __future__ import annotations

import hashlib
import shutil
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
from trainer.office import sign_manifest
from trainer.publish import prune_policies, write_policy
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
    on_disk = range(5, 33)
    assert bases(7, on_disk) == [6]
    assert bases(8, on_disk) == [7]  # version 4 is gone
    assert bases(12, on_disk) == [8, 11]
    assert bases(32, on_disk) == [16, 28, 31]
    assert bases(16, range(17)) == [0, 12, 15]
    assert bases(0, range(17)) == []


def test_a_delta_is_described_for_the_manifest_and_makes_the_policy(folder: RunFolder, tmp_path: Path) -> None:
    roots = {0: policy_root(folder.policy(0)), 1: step(folder, 1)}
    assert make_deltas(folder, 1, roots) == []
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
    (said,) = make_deltas(folder, 1, roots)
    assert said.startswith("no delta from policy 0 to 1, nodes fetch the files: delta: ")
    assert describe_deltas(folder, 1) == () and list(folder.deltas(1).iterdir()) == []


def test_a_delta_that_is_not_worth_it_is_not_published(folder: RunFolder) -> None:
    roots = {0: policy_root(folder.policy(0)), 1: step(folder, 1, scale=10.0)}
    (said,) = make_deltas(folder, 1, roots)
    assert "over half of their size" in said
    assert describe_deltas(folder, 1) == ()


def test_a_policy_in_another_layout_is_fetched_whole(folder: RunFolder) -> None:
    roots = {0: policy_root(folder.policy(0)), 1: step(folder, 1)}
    path = folder.policy(1) / "model.safetensors"
    path.rename(path.with_name("weights.safetensors"))
    (said,) = make_deltas(folder, 1, roots)
    assert "not laid out" in said


def test_what_a_killed_learner_left_of_a_delta_is_made_again(folder: RunFolder) -> None:
    roots = {0: policy_root(folder.policy(0)), 1: step(folder, 1)}
    left = folder.deltas(1) / f"000000-{roots[0].hex()}.ulpd1.tmp"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"half")
    assert describe_deltas(folder, 1) == ()
    assert make_deltas(folder, 1, roots) == []
    assert not left.exists() and len(describe_deltas(folder, 1)) == 1


def test_deltas_go_with_the_policies_they_lead_to(folder: RunFolder) -> None:
    roots = {0: policy_root(folder.policy(0))}
    for version in range(1, 6):
        roots[version] = step(folder, version)
        assert make_deltas(folder, version, roots) == []
    assert [each.base_version for each in describe_deltas(folder, 4)] == [0, 3]
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
    assert make_deltas(run.folder, 1, roots) == []
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
