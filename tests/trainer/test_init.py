"""Making a run: whole or not at all, from every kind of policy, with secrets that only the owner reads."""

from __future__ import annotations

import dataclasses
import json
import shutil
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import trainer.init
from protocol.errors import KeyFileError, PolicyError, StorageError, UsageError
from protocol.policy import policy_root
from protocol.run import EnvironmentShare
from trainer.audit_draw import AuditChain
from trainer.config import TrainerConfig
from trainer.init import EMBEDDED, init_run
from trainer.ledger import Ledger
from trainer.rundir import Run, load_run_identity, load_secrets, open_run

TOOLS = (EnvironmentShare("tools8@1", "", 1),)


@pytest.fixture(autouse=True)
def short_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain of a million hashes takes longer than everything else here."""
    monkeypatch.setattr(trainer.init, "AuditChain", lambda secret: AuditChain(secret, length=8))


def make(path: Path, policy: str | Path = "embedded", environments: tuple[EnvironmentShare, ...] = TOOLS) -> Run:
    return init_run(path, name="a run", policy=str(policy), environments=environments, config=TrainerConfig())


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    folder = tmp_path / "policy"
    shutil.copytree(EMBEDDED, folder)
    return folder


def test_a_run_holds_key_secrets_genesis_settings_policy_and_an_empty_ledger(tmp_path: Path) -> None:
    run = make(tmp_path / "run")
    assert load_run_identity(run).node == run.genesis.trainer
    assert run.genesis.name == "a run" and run.genesis.environments == TOOLS
    assert run.genesis.audit_anchor == AuditChain(load_secrets(run).audit, length=8).anchor
    assert run.genesis.first_policy_root == policy_root(run.folder.policy(0))
    ledger = Ledger(run.folder.ledger)
    assert ledger.policy() == (0, run.genesis.first_policy_root, None)
    ledger.close()
    assert open_run(run.folder.path) == run


def test_only_the_owner_reads_key_and_secrets(tmp_path: Path) -> None:
    run = make(tmp_path / "run")
    for path in (run.folder.key, run.folder.secret):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    run.folder.secret.chmod(0o644)
    with pytest.raises(KeyFileError, match="chmod 600"):
        load_secrets(run)
    run.folder.secret.unlink()
    with pytest.raises(KeyFileError, match="restore it from a backup"):
        load_secrets(run)


def test_two_runs_have_nothing_secret_in_common(tmp_path: Path) -> None:
    one, other = make(tmp_path / "one"), make(tmp_path / "other")
    assert one.run != other.run
    assert load_secrets(one) != load_secrets(other)
    assert "…" in repr(load_secrets(one))


def test_an_existing_run_is_never_touched(tmp_path: Path) -> None:
    run = make(tmp_path / "run")
    with pytest.raises(UsageError, match="exists already"):
        make(tmp_path / "run")
    assert open_run(tmp_path / "run") == run


def test_a_run_may_be_made_in_an_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    make(tmp_path / "run")


def test_an_init_that_fails_or_was_killed_leaves_nothing_in_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".run.making" / "keys").mkdir(parents=True)  # of one that was killed

    def fail(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(trainer.init, "write_config", fail)
        with pytest.raises(StorageError, match="No space left"):
            make(tmp_path / "run")
    assert list(tmp_path.iterdir()) == []
    make(tmp_path / "run")


@pytest.mark.parametrize("name", ["", "  ", "\x1b[31mred", "two\nlines", "\u202eback"])
def test_a_name_that_a_terminal_cannot_show_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match=r"--name .* is not a name that a terminal can show"):
        init_run(tmp_path / "run", name=name, policy="embedded", environments=TOOLS, config=TrainerConfig())
    assert list(tmp_path.iterdir()) == []


# --- policies ---


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: (folder / "tokenizer.json").unlink(), "no tokenizer.json"),
        (lambda folder: (folder / "config.json").unlink(), "no config.json"),
        (lambda folder: (folder / "model.safetensors").unlink(), "no .safetensors file"),
        (lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"), "pickle"),
        (lambda folder: (folder / "tokenizer.json").write_text("{"), "not a tokenizer"),
        (lambda folder: (folder / "chat_template.jinja").unlink(), "no chat_template"),
        (lambda folder: (folder / "chat_template.jinja").write_text("{{ messages }}"), "multi|more than one turn"),
    ],
)
def test_a_folder_that_is_no_usable_policy_is_refused_before_anything_is_made(
    tmp_path: Path, policy: Path, spoil: Callable[[Path], object], message: str
) -> None:
    spoil(policy)
    with pytest.raises(PolicyError, match=message):
        make(tmp_path / "run", policy)
    assert not (tmp_path / "run").exists()


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="nowhere is not a folder"):
        make(tmp_path / "run", tmp_path / "nowhere")


def test_weights_are_published_in_bfloat16_and_the_configuration_says_so(tmp_path: Path, policy: Path) -> None:
    weights = load_file(policy / "model.safetensors")
    wide = {name: tensor.float() + 1e-6 for name, tensor in weights.items()}
    wide["steps"] = torch.tensor([3])
    save_file(wide, policy / "model.safetensors")
    config = json.loads((policy / "config.json").read_text())
    del config["dtype"]
    (policy / "config.json").write_text(json.dumps({**config, "torch_dtype": "float32"}))
    (policy / "README.md").write_text("not part of a policy")
    run = make(tmp_path / "run", policy)
    published = load_file(run.folder.policy(0) / "model.safetensors")
    assert published.keys() == wide.keys()
    assert published["steps"].dtype is torch.int64
    for name, tensor in published.items():
        assert torch.equal(tensor, wide[name].to(torch.bfloat16) if tensor.is_floating_point() else wide[name])
    assert json.loads((run.folder.policy(0) / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert not (run.folder.policy(0) / "README.md").exists()


def test_a_head_that_repeats_the_embedding_is_published_once(tmp_path: Path, policy: Path) -> None:
    weights = load_file(policy / "model.safetensors")
    assert "lm_head.weight" not in weights
    save_file({**weights, "lm_head.weight": weights["model.embed_tokens.weight"].clone()}, policy / "model.safetensors")
    run = make(tmp_path / "run", policy)
    assert load_file(run.folder.policy(0) / "model.safetensors").keys() == weights.keys()


def test_a_sharded_policy_stays_sharded_with_a_true_index(tmp_path: Path, policy: Path) -> None:
    weights = {name: tensor.float() for name, tensor in load_file(policy / "model.safetensors").items()}
    (policy / "model.safetensors").unlink()
    names = sorted(weights)
    files = {name: f"model-0000{1 + (i % 2)}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: weights[name] for name in names if files[name] == file}, policy / file)
    index = {"metadata": {"total_size": 1}, "weight_map": files}
    (policy / "model.safetensors.index.json").write_text(json.dumps(index))
    run = make(tmp_path / "run", policy)
    made = json.loads((run.folder.policy(0) / "model.safetensors.index.json").read_text())
    assert made["weight_map"] == files
    assert made["metadata"]["total_size"] == 2 * sum(tensor.numel() for tensor in weights.values())


def test_without_the_hub_client_a_hub_policy_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UsageError, match=r"pip install -e .\.\[hub\]"):
        make(tmp_path / "run", "hub:org/name")


def test_a_hub_that_cannot_be_reached_is_said_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub")

    def unreachable(*arguments: object, **named: object) -> str:
        raise ConnectionError("Name or service\nnot known")

    monkeypatch.setattr(hub, "snapshot_download", unreachable)
    with pytest.raises(UsageError, match=r"org/name could not be fetched.*Name or service not known"):
        make(tmp_path / "run", "hub:org/name@main")


def test_a_hub_policy_is_taken_at_its_revision(tmp_path: Path, policy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub")
    asked: list[tuple[str, object]] = []

    def download(name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((name, revision))
        assert not any(pattern.endswith(".bin") for pattern in allow_patterns)
        return str(policy)

    monkeypatch.setattr(hub, "snapshot_download", download)
    make(tmp_path / "run", "hub:org/name@abc123")
    assert asked == [("org/name", "abc123")]


# --- environments ---


@pytest.mark.parametrize(
    ("environments", "message"),
    [
        ((), "at least one environment"),
        ((EnvironmentShare("nothing@1", "", 1),), "no environment 'nothing@1'"),
        ((EnvironmentShare("tools8@1", "", 0),), "weight"),
        (
            (EnvironmentShare("guess@1", "", 1), TOOLS[0], dataclasses.replace(TOOLS[0], weight=2)),
            r"--environment tools8@1 is given twice: give it once, .* \(--environment tools8@1=2\)",
        ),
        (
            (EnvironmentShare("letters@1", "x" * 1025, 1),),
            r"--environment letters@1:x+…: .* 1,025 characters: give 1,02",
        ),
    ],
)
def test_environments_that_cannot_be_are_refused(
    tmp_path: Path, environments: tuple[EnvironmentShare, ...], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        make(tmp_path / "run", environments=environments)
    assert not (tmp_path / "run").exists()


def test_a_name_that_no_genesis_holds_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--name has 257 characters: give 256 at most"):
        init_run(tmp_path / "run", name="n" * 257, policy="embedded", environments=TOOLS, config=TrainerConfig())
    assert list(tmp_path.iterdir()) == []
