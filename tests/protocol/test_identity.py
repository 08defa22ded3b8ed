"""Key files and signatures. Single faults of peer ids and signatures: tests/vectors/identity.json."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol import identity
from protocol.errors import DecodeError, KeyFileError, SignatureError
from protocol.identity import Identity, load_identity, peer_id, save_identity, verify

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")


@pytest.fixture
def who() -> Identity:
    return Identity(bytes(range(32)))


def test_a_saved_key_is_loaded_again(who: Identity, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "key"
    save_identity(who, path)

    assert load_identity(path).node == who.node
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_key_file_is_never_overwritten(who: Identity, tmp_path: Path) -> None:
    path = tmp_path / "key"
    save_identity(who, path)

    with pytest.raises(KeyFileError, match="exists already"):
        save_identity(Identity.generate(), path)
    assert load_identity(path).node == who.node


def test_a_missing_key_file_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(KeyFileError, match=r"no key file at .* restore a backup"):
        load_identity(tmp_path / "key")


def test_a_key_file_others_can_read_is_refused_with_the_remedy(who: Identity, tmp_path: Path) -> None:
    path = tmp_path / "key"
    save_identity(who, path)
    path.chmod(0o644)

    with pytest.raises(KeyFileError, match=f"chmod 600 {path}"):
        load_identity(path)


def test_a_file_that_is_no_key_is_told_so_whoever_may_read_it(tmp_path: Path) -> None:
    path = tmp_path / "trace.msgpack"
    path.write_bytes(b"\x82\xff" * 99)
    path.chmod(0o644)

    with pytest.raises(KeyFileError, match="is not a key file: it should hold 64 hex digits"):
        load_identity(path)


@needs_root
def test_someone_else_s_key_file_is_refused(who: Identity, tmp_path: Path) -> None:
    path = tmp_path / "key"
    save_identity(who, path)
    os.chown(path, 12_345, 12_345)

    with pytest.raises(KeyFileError, match="belongs to user id 12345, not to you"):
        load_identity(path)


@needs_root
def test_an_unreadable_key_file_is_a_clear_error(who: Identity, tmp_path: Path) -> None:
    """Root reads everything, so a process without its rights looks."""
    path = tmp_path / "key"
    save_identity(who, path)
    path.chmod(0)
    os.chown(path, 12_345, 12_345)
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    program = (
        "import os, sys, pathlib\n"
        "from protocol.identity import load_identity\n"
        "os.setuid(12345)\n"
        "try: load_identity(pathlib.Path(sys.argv[1]))\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True, timeout=60)

    assert done.stdout.startswith("KeyFileError cannot read the key file"), done


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_key_file_its_owner_may_not_read_is_a_clear_error(who: Identity, tmp_path: Path) -> None:
    path = tmp_path / "key"
    save_identity(who, path)
    path.chmod(0)

    with pytest.raises(KeyFileError, match="cannot read the key file"):
        load_identity(path)


@pytest.mark.parametrize("garbage", [b"", b"hello\n", b"00" * 31, b"00" * 33, b"\xff\xfe", b"zz" * 32])
def test_a_file_that_is_no_key_is_refused(garbage: bytes, tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_bytes(garbage)
    path.chmod(0o600)

    with pytest.raises(KeyFileError):
        load_identity(path)


def test_a_folder_in_place_of_a_key_file_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)

    with pytest.raises(KeyFileError, match="cannot read the key file"):
        load_identity(tmp_path)


def test_a_key_that_cannot_be_written_is_a_clear_error(who: Identity, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(KeyFileError, match="cannot write the key file"):
        save_identity(who, tmp_path / "file" / "key")


def test_a_key_that_finds_no_room_leaves_nothing(who: Identity, small_disk: Path) -> None:
    fill(small_disk)

    with pytest.raises(KeyFileError, match="No space left on device: choose another place, or make room"):
        save_identity(who, small_disk / "key")
    assert not (small_disk / "key").exists()


def fill(disk: Path) -> None:
    with contextlib.suppress(OSError), (disk / "filler").open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    where = tmp_path / "disk"
    where.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(where)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root can make a small disk")
    yield where
    subprocess.run(["umount", str(where)], check=True)


def test_the_private_key_shows_in_no_representation(who: Identity) -> None:
    assert who.private_bytes.hex() not in repr(who) + str(who)
    assert who.peer_id in repr(who)


def test_no_domain_is_the_beginning_of_another() -> None:
    domains = [value for name, value in vars(identity).items() if name.startswith("DOMAIN_")]

    assert len(set(domains)) == len(domains) == 9
    assert not [(a, b) for a in domains for b in domains if a != b and b.startswith(a)]


@given(st.binary(min_size=32, max_size=32))
def test_a_peer_id_holds_its_key(node: bytes) -> None:
    assert identity.node_from_peer_id(peer_id(node)) == node
    assert peer_id(node).startswith("12D3Koo")


@given(st.text(max_size=80))
def test_any_text_is_a_peer_id_or_a_decode_error(text: str) -> None:
    try:
        node = identity.node_from_peer_id(text)
    except DecodeError:
        return
    assert peer_id(node) == text


@given(st.binary(max_size=40), st.binary(min_size=64, max_size=64), st.binary(max_size=40))
def test_no_bytes_pass_as_a_signature_and_none_raise_anything_else(
    node: bytes, signature: bytes, payload: bytes
) -> None:
    with pytest.raises(SignatureError):
        verify(node, identity.DOMAIN_TRACE, payload, signature)
