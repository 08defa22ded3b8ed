"""The folder of a run: which file lies where, and what is read from it at start.

    RUN/config.toml  genesis.msgpack  address  port  page  network.json  ledger.sqlite  lock  *.lock
    RUN/keys/run.key  keys/secret          the trainer's identity; the seeds' secret and audit chain
    RUN/keys/home.key  home/  turns/       the home engine's identity and folder; its turns with the learner (home.py)
    RUN/policies/000012/                   published policies, Hugging Face folders in bfloat16
    RUN/deltas/000012/*.ulpd1              how to make one from an earlier one
    RUN/learner/step-000012/               float32 masters, optimiser state, the batch that was used
    RUN/quarantine/DIGEST.msgpack          traces that auditors died on, for a person to look at
    RUN/logs/*.log
    RUN/metrics.jsonl  RUN/tensorboard/    one record a step and an evaluation, for people (records.py)
    RUN/backup.json                        there: it is a back-up, not a run to serve (backup.py)

Not here: making a run (trainer/init.py) and the record of it (trainer/ledger.py).
"""

from __future__ import annotations

import os
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from protocol import codec, identity
from protocol.envelope import Signed
from protocol.errors import KeyFileError, RemoteError, UsageError
from protocol.outputs import cause
from protocol.policy import version_name
from protocol.run import Genesis, open_genesis, run_id
from trainer.config import TrainerConfig, load_config

DISK_RESERVE_BYTES: Final = 256 * 1024 * 1024  # below it nothing new is accepted: the learner needs room to go on


@dataclass(frozen=True, slots=True)
class RunFolder:
    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.toml"

    @property
    def genesis(self) -> Path:
        return self.path / "genesis.msgpack"

    @property
    def address(self) -> Path:
        """The address nodes join with, written by the gateway once it listens."""
        return self.path / "address"

    @property
    def near_address(self) -> Path:
        """The same for a node on this machine, which needs no way around."""
        return self.path / "address.near"

    @property
    def port(self) -> Path:
        """The port the gateway got when config.listen left it open; asked for again at the next start."""
        return self.path / "port"

    @property
    def page(self) -> Path:
        """The page's URL, written once it is served."""
        return self.path / "page"

    @property
    def network(self) -> Path:
        """What the gateway's network carries, written by it every few seconds."""
        return self.path / "network.json"

    @property
    def ledger(self) -> Path:
        return self.path / "ledger.sqlite"

    @property
    def lock(self) -> Path:
        return self.path / "lock"

    @property
    def served(self) -> Path:
        """Where the run was served last (place.py)."""
        return self.path / "served"

    @property
    def backup(self) -> Path:
        return self.path / "backup.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def key(self) -> Path:
        return self.path / "keys" / "run.key"

    @property
    def secret(self) -> Path:
        return self.path / "keys" / "secret"

    @property
    def home_key(self) -> Path:
        return self.path / "keys" / "home.key"

    @property
    def home(self) -> Path:
        """The home engine's folder, as a node's."""
        return self.path / "home"

    @property
    def turns(self) -> Path:
        """There while the home engine shares the learner's device."""
        return self.path / "turns"

    @property
    def policies(self) -> Path:
        return self.path / "policies"

    @property
    def learner(self) -> Path:
        return self.path / "learner"

    @property
    def quarantine(self) -> Path:
        return self.path / "quarantine"

    @property
    def calibrations(self) -> Path:
        """Where a person puts calibrations of engines that this trainer cannot run (calibrating.py)."""
        return self.path / "calibrations"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def all_deltas(self) -> Path:
        return self.path / "deltas"

    def policy(self, version: int) -> Path:
        return self.policies / version_name(version)

    def deltas(self, version: int) -> Path:
        """The deltas that lead to policy `version`."""
        return self.all_deltas / version_name(version)

    def versions(self) -> list[int]:
        """The policy versions on disk, oldest first."""
        return versions_in(self.policies)

    def step(self, version: int) -> Path:
        """The learner's state after it made policy `version`."""
        return self.learner / f"step-{version_name(version)}"


def require_spare(folder: RunFolder, path: Path) -> None:
    """Raises UsageError where a file that a command is to write is one that the run has."""
    real = Path(os.path.realpath(path))
    if real.exists() and real.is_relative_to(os.path.realpath(folder.path)):
        raise UsageError(f"{path} is a file of the run itself: choose another place")


def versions_in(folder: Path) -> list[int]:
    """Which versions have a folder there, oldest first."""
    found = (path.name for path in folder.glob("*") if path.is_dir())
    return sorted(int(name) for name in found if name.isascii() and name.isdecimal())


def short_of_room(folder: Path, reserve: int = DISK_RESERVE_BYTES) -> str:
    """Why nothing is accepted where the disk of a run is too full for it, and how much to free; "": it is not."""
    free = shutil.disk_usage(folder).free
    if free >= reserve:
        return ""
    more = -((free - reserve) // 2**20)
    return (
        f"the trainer's disk is nearly full ({free // 2**20} MiB free): nothing is accepted until there is room: "
        f"free {more:,} MiB more"
    )


def flush(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@dataclass(frozen=True, slots=True)
class Run:
    """What every process of a run reads at start."""

    folder: RunFolder
    config: TrainerConfig
    genesis: Genesis
    signed_genesis: Signed
    run: bytes


def open_run(path: Path) -> Run:
    """Read config and genesis. Raises UsageError when the folder is not a run."""
    folder = RunFolder(path)
    _require_run(folder)
    config = load_config(folder.config)
    try:
        signed = codec.decode(Signed, folder.genesis.read_bytes())
        genesis = open_genesis(signed, run=run_id(signed))
    except (OSError, RemoteError) as error:
        raise UsageError(f"{folder.genesis} cannot be read ({cause(error)}): restore it from a backup") from None
    return Run(folder, config, genesis, signed, run_id(signed))


def _require_run(folder: RunFolder) -> None:
    path, is_made = folder.path, "a run is the folder that `rltrainer init` makes"
    if path.exists() and not path.is_dir():
        raise UsageError(f"{path} is a file, and {is_made}: give that folder")
    if not path.exists():
        raise UsageError(
            f"there is no folder {path}: give the folder of a run, or make one with `rltrainer init {path}`"
        )
    missing = [file.name for file in (folder.config, folder.genesis, folder.ledger) if not file.exists()]
    if len(missing) == 3:
        raise UsageError(
            f"{path} is not a run, it has no {missing[0]}: {is_made}; give that folder, or make one with "
            "`rltrainer init FOLDER`"
        )
    if missing:
        raise UsageError(f"the run {path} has no {' and no '.join(missing)}: restore it from a backup")


def load_run_identity(run: Run) -> identity.Identity:
    """The trainer's key. Raises KeyFileError, also when it is not the key of this run's genesis."""
    mine = identity.load_identity(run.folder.key)
    if mine.node != run.genesis.trainer:
        raise KeyFileError(
            f"{run.folder.key} is the key of {mine.peer_id}, but this run belongs to "
            f"{identity.peer_id(run.genesis.trainer)}: restore the right key"
        )
    return mine


@dataclass(frozen=True, slots=True)
class Secrets:
    """What only the gateway knows: who knew it could foresee seeds, tasks and audits."""

    seeds: bytes  # 32 bytes bound into every slot's seed and into the stream of tasks
    audit: bytes  # 32 bytes, the far end of the audit's hash chain (audit_draw.py)

    def __repr__(self) -> str:
        return "Secrets(…)"


def save_secrets(secrets: Secrets, path: Path) -> None:
    """Write the secrets' file (two lines of hex, mode 0600). Never overwrites."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "w") as file:
        file.write(f"{secrets.seeds.hex()}\n{secrets.audit.hex()}\n")


def load_secrets(run: Run) -> Secrets:
    """Raises KeyFileError when the file is missing, readable by others, or not what init wrote."""
    path = run.folder.secret
    try:
        if stat.S_IMODE(path.stat().st_mode) & 0o077:
            raise KeyFileError(f"the secrets {path} can be read by other users: run chmod 600 {path}")
        seeds, audit = (bytes.fromhex(line) for line in path.read_text(encoding="ascii").split())
    except (OSError, ValueError) as error:
        raise KeyFileError(f"{path} cannot be read ({cause(error)}): restore it from a backup") from None
    if len(seeds) != 32 or len(audit) != 32:
        raise KeyFileError(f"{path} should hold two lines of 64 hex digits: restore it from a backup")
    return Secrets(seeds, audit)
