"""What a person reads who gives one of the three commands something it cannot use: one line that names it and says
what to do, the documented exit code, no traceback, and nothing changed. The whole list: docs/bad-input.md."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from protocol.identity import Identity, save_identity
from protocol.run import EnvironmentShare, RunAddress
from trainer.config import TrainerConfig
from trainer.init import EMBEDDED, init_run

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
NOBODY = RunAddress("/ip4/127.0.0.1/tcp/9", Identity(b"\1" * 32).node, b"\2" * 32)
SOMEONE_ELSE = 12_345
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")


def said(code: int, module: str, *words: object) -> str:
    """The one line on stderr of a command that ends with this exit code."""
    done = subprocess.run(
        [sys.executable, "-m", module, *map(str, words)],
        cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    return lines[0]


# --- keys ---


def give_away(path: Path) -> None:
    os.chown(path, SOMEONE_ELSE, SOMEONE_ELSE)


KEY_FAULTS = [
    pytest.param(lambda key: key.chmod(0o640), "chmod 600", id="readable by others"),
    pytest.param(lambda key: key.write_bytes(b"not a key"), "is not a key file", id="not a key"),
    pytest.param(give_away, f"belongs to user id {SOMEONE_ELSE}, not to you", id="someone else's", marks=needs_root),
]


@pytest.mark.parametrize(("spoil", "told"), KEY_FAULTS)
def test_a_node_whose_key_cannot_be_used_does_not_start_and_keeps_the_file(
    tmp_path: Path, spoil: Callable[[Path], object], told: str
) -> None:
    key = tmp_path / "key"
    save_identity(Identity.generate(), key)
    spoil(key)
    before = (key.read_bytes(), key.stat().st_mode, key.stat().st_uid)
    line = said(3, "node.cli", "join", NOBODY, "--cpu", "--home", tmp_path)
    assert str(key) in line and told in line
    assert (key.read_bytes(), key.stat().st_mode, key.stat().st_uid) == before


def test_a_node_whose_key_is_gone_makes_no_new_one_while_its_traces_wait(tmp_path: Path) -> None:
    outbox = tmp_path / "runs" / "0202020202020202" / "outbox"
    outbox.mkdir(parents=True)
    (outbox / f"{'ab' * 32}.trace").write_bytes(b"signed with the key that is gone")
    line = said(3, "node.cli", "join", NOBODY, "--cpu", "--home", tmp_path)
    assert f"{tmp_path / 'key'} is gone" in line and "rlnode key restore FILE" in line
    assert not (tmp_path / "key").exists()


@pytest.mark.parametrize("data", [b"", b"hello\n", b"\xe3\x00\xff"])
def test_a_damaged_address_is_named_with_what_to_do(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "address").write_bytes(data)
    line = said(2, "node.cli", "join", "--cpu", "--home", tmp_path)
    assert line == f"rlnode: {tmp_path / 'address'} is damaged: give the address again, rlnode join ADDRESS"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    shares = (EnvironmentShare("tools8@1", "", 1),)
    config = TrainerConfig(listen="/ip4/127.0.0.1/tcp/0", page_port=0)
    return init_run(tmp_path / "run", name="test", policy="embedded", environments=shares, config=config).folder.path


def test_a_trainer_whose_key_or_secret_cannot_be_used_does_not_start(run: Path) -> None:
    for name in ("run.key", "secret"):
        path = run / "keys" / name
        path.chmod(0o644)
        assert f"chmod 600 {path}" in said(3, "trainer.cli", "serve", run)
        path.chmod(0o600)
        kept = path.read_bytes()
        path.write_bytes(b"nonsense")
        assert str(path) in said(3, "trainer.cli", "serve", run)
        path.unlink()
        line = said(3, "trainer.cli", "serve", run)
        assert str(path) in line and "restore" in line
        assert not path.exists(), "a new one would be another run's"
        path.write_bytes(kept)
        path.chmod(0o600)


@needs_root
def test_a_trainer_does_not_serve_a_run_of_someone_else(run: Path) -> None:
    give_away(run / "keys" / "run.key")
    assert f"belongs to user id {SOMEONE_ELSE}, not to you" in said(3, "trainer.cli", "serve", run)


# --- policies and traces ---


@pytest.mark.parametrize(
    ("missing", "told"),
    [
        ("tokenizer.json", "has no tokenizer.json: save the model and its fast tokenizer there"),
        ("chat_template.jinja", "no chat_template"),
        ("config.json", "no config.json"),
        ("model.safetensors", "no .safetensors file: a policy is a Hugging Face model folder"),
        ("model.safetensors", "save the model and its fast tokenizer there (`model.save_pretrained`"),
    ],
)
def test_no_run_is_made_of_a_policy_that_lacks_a_part(tmp_path: Path, missing: str, told: str) -> None:
    policy = tmp_path / "policy"
    shutil.copytree(EMBEDDED, policy)
    (policy / missing).unlink()
    line = said(2, "trainer.cli", "init", tmp_path / "run", "--policy", policy)
    assert line.startswith("rltrainer: ") and told in line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["policy"], "something was left behind"


@pytest.mark.parametrize(("data", "told"), [(b"", "cannot be judged"), (b"\xff" * 300, "cannot be judged")])
def test_what_is_no_trace_file_has_no_verdict(tmp_path: Path, data: bytes, told: str) -> None:
    path = tmp_path / "trace.msgpack"
    path.write_bytes(data)
    assert told in said(2, "verify.cli", "check", path, "--policy", EMBEDDED)
