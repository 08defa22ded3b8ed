"""`rlverify policy`: is a folder what a signed manifest names."""

from __future__ import annotations

import json
import re
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest

from protocol import codec
from protocol.envelope import seal
from protocol.identity import Identity, peer_id
from protocol.policy import Blob, Manifest, PolicyFile, describe, policy_root
from verify.cli import main

ROOT = Path(__file__).parents[2]
EMBEDDED = ROOT / "trainer" / "embedded"
TRAINER = Identity(b"\1" * 32)
STRANGER = Identity(b"\2" * 32)
NOW = time.time_ns() // 1_000_000
MANIFEST = Manifest(b"\3" * 32, 7, policy_root(EMBEDDED), describe(EMBEDDED), NOW, NOW + 3_600_000)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(EMBEDDED, tmp_path / "policy"))


def check(folder: Path, manifest: Manifest = MANIFEST, *options: str, signer: Identity = TRAINER) -> int:
    path = folder.parent / "manifest.msgpack"
    path.write_bytes(codec.encode(seal(signer, manifest)))
    return main(["policy", str(folder), "--manifest", str(path), *options])


def test_the_folder_that_was_signed_is_confirmed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(folder, MANIFEST, "--trainer", peer_id(TRAINER.node), "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert said["agrees"] and said["version"] == 7 and said["root"] == MANIFEST.root.hex()
    assert {each["name"] for each in said["checks"]} == {"signature", "expiry", "file", "root"}
    assert check(folder) == 0
    assert "the folder is policy 7" in capsys.readouterr().out


def test_a_changed_weight_is_named_with_its_place(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert check(folder) == 1
    said = capsys.readouterr().out
    assert "this is not policy 7" in said and "model.safetensors differs in its piece 0" in said
    assert said.count("FAIL") == 2  # the file and the root


def test_files_that_are_missing_added_or_of_another_size_are_named(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "generation_config.json").unlink()
    (folder / "more.txt").write_text("x")
    (folder / "tokenizer_config.json").write_text("{}")
    assert check(folder) == 1
    said = capsys.readouterr().out
    for text in ("generation_config.json is missing", "more.txt is not in the manifest", "has 2 bytes, the manifest"):
        assert text in said


def test_a_manifest_signed_by_another_key_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(folder, MANIFEST, "--trainer", peer_id(TRAINER.node), signer=STRANGER) == 1
    assert f"(signed by {peer_id(STRANGER.node)})" in capsys.readouterr().out
    assert check(folder, signer=STRANGER) == 0
    assert "give --trainer to say whose it must be" in capsys.readouterr().out


def test_a_forged_signature_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder.parent / "forged.msgpack"
    signed = seal(STRANGER, MANIFEST)
    path.write_bytes(codec.encode(replace(signed, signer=TRAINER.node)))
    assert main(["policy", str(folder), "--manifest", str(path)]) == 1
    assert "FAIL  signature" in capsys.readouterr().out


def test_an_expired_manifest_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(folder, replace(MANIFEST, expires_ms=1_000)) == 1
    assert "it was valid until 1970-01-01 00:00 UTC" in capsys.readouterr().out


def test_a_manifest_that_cannot_be_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    escaping = PolicyFile("../../key.json", (Blob(b"\1" * 32, 5),))
    assert check(folder, replace(MANIFEST, files=(escaping,))) == 1
    assert "FAIL  manifest" in capsys.readouterr().out


def test_a_name_in_a_manifest_drives_no_terminal(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evil = PolicyFile("\x1b[31mEVIL\n.json", (Blob(b"\1" * 32, 5),))
    assert check(folder, replace(MANIFEST, files=(evil,))) == 1
    said = capsys.readouterr().out
    assert r"'\x1b[31mEVIL\n.json' cannot be a file of a policy" in said and "\x1b" not in said


def test_a_safetensors_header_that_points_outside_the_file_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    header = b'{"a":{"dtype":"BF16","shape":[4],"data_offsets":[0,8000000000]}}'
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    assert check(folder) == 1
    assert "the tensors end at byte" in capsys.readouterr().out


@pytest.mark.parametrize("content", [b"", b"\x80", b"{}", bytes(5_000_000)], ids=["empty", "cut off", "json", "huge"])
def test_what_is_no_manifest_is_unusable(folder: Path, content: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder.parent / "manifest.msgpack"
    path.write_bytes(content)
    assert main(["policy", str(folder), "--manifest", str(path)]) == 2
    assert str(path) in capsys.readouterr().err


def test_a_folder_of_pickles_is_unusable_and_says_how_to_convert(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert check(folder) == 2
    assert re.search(r"pytorch_model\.bin is a pickle.*safe_serialization=True", capsys.readouterr().err)


def test_its_arguments_are_those_of_the_specification() -> None:
    spec = (ROOT / "SPEC.md").read_text()
    told = spec[spec.index("    rlverify policy FOLDER") :].partition("    rlverify audit")[0]
    for argument in ("--manifest FILE", "--trainer PEER_ID", "--json"):
        assert f"`{argument}`" in told
