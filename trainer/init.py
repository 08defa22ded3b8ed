"""Make a run folder: key, secrets, first policy, genesis, settings and an empty ledger.

Everything is built in a folder beside the final one and renamed into place, so a run exists whole or not at all.
Not here: reading a run (rundir.py).
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from protocol import codec, identity
from protocol.envelope import seal
from protocol.environments import base
from protocol.errors import DecodeError, PolicyError, UsageError
from protocol.limits import MAX_NAME_CHARACTERS, MAX_TEXT_CHARACTERS
from protocol.outputs import cause, unwritable
from protocol.policy import policy_files, policy_root
from protocol.run import EnvironmentShare, Genesis, check_genesis
from trainer.audit_draw import AuditChain
from trainer.config import TrainerConfig, write_config
from trainer.ledger import Ledger
from trainer.rundir import Run, RunFolder, Secrets, open_run, save_secrets

if TYPE_CHECKING:
    from torch import Tensor

EMBEDDED: Final = Path(__file__).parent / "embedded"
_HUB_FILES: Final = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model")


def init_run(
    path: Path,
    *,
    name: str,
    policy: str,
    environments: tuple[EnvironmentShare, ...],
    config: TrainerConfig,
) -> Run:
    """Make the run at `path`, which must not exist yet (an empty folder may).

    `policy`: "embedded", "hub:ORG/NAME" (also "hub:ORG/NAME@REVISION") or a local folder. Raises UsageError,
    PolicyError (a folder that is no policy, before anything is made) or StorageError.
    """
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        is_run = RunFolder(path).genesis.exists()
        goes_on = f"`rltrainer serve {path}` goes on with it; or " if is_run else ""
        raise UsageError(f"{path} exists already: {goes_on}choose another folder")
    if not name.strip() or not name.isprintable():
        raise UsageError(f"--name {name!r} is not a name that a terminal can show: give letters, digits, spaces")
    check_asked(name, environments)
    source = find_policy(policy)
    check_fit(source, environments)
    with made_whole(path) as making:
        folder = RunFolder(making)
        mine = identity.Identity.generate()
        identity.save_identity(mine, folder.key)
        hidden = Secrets(secrets.token_bytes(32), secrets.token_bytes(32))
        save_secrets(hidden, folder.secret)
        copy_policy(source, folder.policy(0))
        now_ms = time.time_ns() // 1_000_000
        genesis = Genesis(
            name=name,
            trainer=mine.node,
            created_ms=now_ms,
            environments=environments,
            first_policy_root=policy_root(folder.policy(0)),
            audit_anchor=AuditChain(hidden.audit).anchor,
        )
        check_run_description(genesis)
        folder.genesis.write_bytes(codec.encode(seal(mine, genesis)))
        write_config(config, folder.config)
        folder.logs.mkdir()
        ledger = Ledger.create(folder.ledger)
        ledger.add_policy(0, genesis.first_policy_root, now_ms)
        ledger.add_event(now_ms, "run", f"run {name} was made from policy {policy}")
        ledger.close()
    return open_run(path)


def check_asked(name: str, environments: Sequence[EnvironmentShare]) -> None:
    """What of `init`'s arguments no genesis can hold (SPEC 8.1), by the option that asks for it. Raises UsageError."""
    if len(name) > MAX_NAME_CHARACTERS:
        raise UsageError(f"--name has {len(name):,} characters: give {MAX_NAME_CHARACTERS} at most")
    known: set[tuple[str, str]] = set()
    for share in environments:
        asked = f"--environment {share.name}{share.parameters and ':'}{share.parameters[:80]}"
        if len(share.parameters) > MAX_TEXT_CHARACTERS:
            most = f"give {MAX_TEXT_CHARACTERS:,} at most"
            raise UsageError(f"{asked}…: its parameters have {len(share.parameters):,} characters: {most}")
        if (share.name, share.parameters) in known:
            raise UsageError(f"{asked} is given twice: give it once, with a weight for a larger share ({asked}=2)")
        known.add((share.name, share.parameters))


def check_run_description(genesis: Genesis) -> None:
    """What a person asked for must be a valid genesis. Raises UsageError."""
    try:
        codec.decode(Genesis, codec.encode(genesis))
        check_genesis(genesis)
    except DecodeError as error:
        raise UsageError(str(error)) from None


def find_policy(policy: str) -> Path:
    """The local folder a policy is copied from. Raises UsageError."""
    if policy == "embedded":
        return EMBEDDED
    if policy.startswith("hub:"):
        return _from_hub(policy.removeprefix("hub:"))
    return Path(policy)


def _from_hub(name: str) -> Path:
    repository, _, revision = name.partition("@")
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise UsageError('a hub policy needs the hub client: pip install -e ".[hub]", or give a local folder') from None
    try:
        return Path(snapshot_download(repository, revision=revision or None, allow_patterns=list(_HUB_FILES)))
    except Exception as error:  # the client lets errors of several HTTP libraries through
        reason = " ".join(str(error).split())[:200]
        raise UsageError(
            f"the model {repository} could not be fetched from the hub ({type(error).__name__}: {reason}): "
            "check the name and the connection, or give a local folder"
        ) from None


def check_fit(source: Path, environments: tuple[EnvironmentShare, ...]) -> None:
    """Whether this policy can be given these tasks. Raises PolicyError or UsageError."""
    from protocol.environments.tokenizer import PolicyTokenizer

    policy_files(source)
    tokenizer = PolicyTokenizer.load(source)
    if not environments:
        raise UsageError("a run needs at least one environment")
    for share in environments:
        environment = base.load(share.name, share.parameters)
        tokenizer.prompt_ids(environment.prompt(0))
        if environment.max_turns > 1:
            tokenizer.observation_ids("-")


@contextmanager
def made_whole(path: Path) -> Iterator[Path]:
    """A folder to build in, which becomes `path` when the block succeeds and vanishes when it does not."""
    making = path.parent / f".{path.name}.making"
    try:
        shutil.rmtree(making, ignore_errors=True)  # of an init that was killed
        making.mkdir(parents=True)
        yield making
        _flush(making)
        os.rename(making, path)
        _flush_one(path.parent)
    except OSError as error:
        raise unwritable("the run", path, error) from error
    finally:
        shutil.rmtree(making, ignore_errors=True)


def _flush(folder: Path) -> None:
    for entry in (*folder.rglob("*"), folder):
        _flush_one(entry)


def _flush_one(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# --- the first policy, in bfloat16 ---


def copy_policy(source: Path, target: Path) -> None:
    """Copy the files that make up a policy, weights as bfloat16: what nodes fetch is what they run.

    Raises PolicyError.
    """
    target.mkdir(parents=True)
    config = _json(source / "config.json")
    tied = bool(config.get("tie_word_embeddings", config.get("text_config", {}).get("tie_word_embeddings", False)))
    sizes: dict[str, int] = {}
    for file in policy_files(source):
        if file.suffix == ".safetensors":
            sizes |= _copy_weights(file, target / file.name, tied)
        elif not file.name.endswith(".safetensors.index.json"):
            shutil.copyfile(file, target / file.name)
    for key in [key for key in ("torch_dtype", "dtype") if key in config] or ["dtype"]:
        config[key] = "bfloat16"
    (target / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    for index in source.glob("*.safetensors.index.json"):
        _copy_index(index, target / index.name, sizes)


def _copy_weights(source: Path, target: Path, tied: bool) -> dict[str, int]:
    """Write one weights file in bfloat16; the bytes of each tensor written."""
    import torch

    from verify.tensor_file import TensorFile, write_tensors

    file = TensorFile(source)
    tensors = {name: file.tensor(name) for name in file.names}
    kept = {
        name: tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
        for name, tensor in tensors.items()
        if not (tied and _repeats_embedding(name, tensors))
    }
    write_tensors(target, kept)
    return {name: tensor.numel() * tensor.element_size() for name, tensor in kept.items()}


def _repeats_embedding(name: str, tensors: dict[str, Tensor]) -> bool:
    """Whether a tensor is the output head of a model whose head is its embedding: some folders hold both, and a
    policy that names one matrix twice could come to hold two."""
    import torch

    if name != "lm_head.weight":
        return False
    embeddings = [value for other, value in tensors.items() if other.endswith("embed_tokens.weight")]
    return len(embeddings) == 1 and torch.equal(embeddings[0], tensors[name])


def _copy_index(source: Path, target: Path, sizes: dict[str, int]) -> None:
    index = _json(source)
    index["weight_map"] = {name: file for name, file in index.get("weight_map", {}).items() if name in sizes}
    index["metadata"] = {"total_size": sum(sizes.values())}
    target.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _json(path: Path) -> dict[str, Any]:
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PolicyError(f"{path} cannot be read: {cause(error)}") from None
    if not isinstance(table, dict):
        raise PolicyError(f"{path} is not a JSON object")
    return table
