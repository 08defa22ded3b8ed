"""`rltrainer publish --mirror`: what lies there afterwards, run after run."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import pytest

from protocol import codec
from protocol.envelope import Signed, unseal
from protocol.errors import UsageError
from protocol.policy import Manifest, policy_root
from protocol.run import EnvironmentShare
from trainer import cli
from trainer.config import TrainerConfig
from trainer.init import init_run
from trainer.ledger import Ledger
from trainer.mirror import write_mirror
from trainer.office import sign_manifest
from trainer.rundir import Run, load_run_identity, open_run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    path = tmp_path / "run"
    init_run(
        path,
        name="test",
        policy="embedded",
        environments=(EnvironmentShare("tools8@1", "", 1),),
        config=TrainerConfig(),
    )
    made = open_run(path)
    sign(made, 0)
    return made


def sign(run: Run, version: int) -> None:
    """As the gateway does once a policy is there."""
    ledger = Ledger(run.folder.ledger)
    root = policy_root(run.folder.policy(version))
    if version:
        with ledger.write():
            ledger.add_policy(version, root, 0)
    ledger.set_manifest(version, codec.encode(sign_manifest(run, load_run_identity(run), version, root)))
    ledger.close()


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_a_mirror_holds_the_signed_manifests_and_their_blobs_by_digest(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "mirror"
    assert cli.main(["publish", str(run.folder.path), "--mirror", str(out)]) == 0
    signed = codec.decode(Signed, (out / "latest.msgpack").read_bytes())
    manifest = unseal(Manifest, signed, signer=run.genesis.trainer)
    assert (out / "manifests" / "000000.msgpack").read_bytes() == (out / "latest.msgpack").read_bytes()
    digests = {blob.digest.hex() for file in manifest.files for blob in file.blobs}
    assert files(out / "blobs") == {f"{name[:2]}/{name}" for name in digests}
    for path in (out / "blobs").glob("*/*"):
        assert hashlib.sha256(path.read_bytes()).hexdigest() == path.name


def test_what_the_run_keeps_no_more_goes_and_what_is_there_stays(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "mirror"
    ledger = Ledger(run.folder.ledger, read_only=True)
    first = write_mirror(run, ledger, out)
    assert (first.versions, first.latest, first.removed) == (1, 0, 0)
    shutil.copytree(run.folder.policy(0), run.folder.policy(1))
    (run.folder.policy(1) / "notes.txt").write_text("new in this version")
    (run.folder.policy(0) / "tokenizer.json").touch()
    sign(run, 1)
    second = write_mirror(run, ledger, out)
    assert (second.versions, second.latest, second.written, second.removed) == (2, 1, 1, 0)
    shutil.rmtree(run.folder.policy(1))
    third = write_mirror(run, ledger, out)
    assert (third.versions, third.latest, third.written, third.removed) == (1, 0, 0, 1)
    assert files(out / "manifests") == {"000000.msgpack"}
    ledger.close()


def test_a_folder_of_something_else_is_left_alone(run: Run, tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_text("x")
    with pytest.raises(UsageError, match="holds other things"):
        write_mirror(run, Ledger(run.folder.ledger, read_only=True), tmp_path / "photos")
    assert files(tmp_path / "photos") == {"cat.jpg"}
