"""What a node may choose for itself, in one place: each field with its unit and the reason for its default.

Flags of `rlnode join` mirror these fields. Not here: numbers both sides must agree on (protocol/limits.py).
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from node.cards import parse_cards
from protocol.errors import UsageError
from protocol.net.base import Address
from protocol.run import RunAddress

GIB: Final = 1024**3
DISK_RESERVE_BYTES: Final = GIB // 4
ENGINES: Final = ("transformers", "vllm")
ON_NEW_POLICY: Final = ("finish", "drop")


def default_home() -> Path:
    """$RLNODE_HOME, else ~/.rlnode: one folder per node, because it holds the node's identity."""
    return Path(os.environ.get("RLNODE_HOME") or Path.home() / ".rlnode")


def default_threads() -> int:
    """$OMP_NUM_THREADS where it is set, else the processors this process may run on."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    if asked.isdigit() and int(asked) > 0:
        return int(asked)
    return max(1, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


def default_engine(device: str) -> str:
    """vLLM on a GPU where it is installed; transformers elsewhere, which runs on every machine."""
    return "vllm" if device != "cpu" and importlib.util.find_spec("vllm") is not None else "transformers"


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """Everything `rlnode join` can be told. Raises UsageError on construction when a value cannot be."""

    address: RunAddress
    home: Path = field(default_factory=default_home)

    # --- engine ---
    engine: str = "transformers"  # the one that runs on every machine; `rlnode join` asks default_engine
    device: str = "cpu"  # "cpu", "cuda:N" or "cuda:N,M"; a GPU is asked for by name, never taken unasked
    dtype: str | None = None  # None: float32 on a CPU, where bfloat16 is slower, and bfloat16 on a GPU
    slots: int | None = None  # completions decoded together; None: as many as the engine has room for
    threads: int = field(default_factory=default_threads)  # of the engine, on a CPU
    gpu_memory: float = 0.85  # share of the card that vLLM takes at its start; the rest is for what else runs there
    max_vram_bytes: int | None = None  # most that vLLM takes of each card, where that is less
    turns: Path | None = None  # where turns on the device are taken with a learner; None: it is this node's alone
    nice: int = 0  # added to this process's niceness, its children's too: for a machine that someone works at
    on_new_policy: str = "finish"  # what is leased under the older one; "drop" gives it back and is sooner up to date
    prefetch: float = 0.5  # leases held beyond the busy slots, as a share of them: hides a round trip,
    # and no more, because a lease that waits here is a draw that grows stale

    # --- disk ---
    disk_bytes: int | None = None  # most the home may hold; None: as much as the disk has
    disk_reserve_bytes: int = DISK_RESERVE_BYTES  # left free for the rest of the machine
    keep_versions: int = 3  # policies kept: the one in the engine, the one before it, the next one
    keep_refused: int = 100  # refused traces kept for an appeal; each is at most 3 MiB
    log_bytes: int = 16 * 1024 * 1024  # receipts.log and verdicts.log each turn over at this size

    # --- network ---
    dial_seconds: float = 20.0  # a slow home link needs about 3; more is a dead address
    blobs_in_flight: int = 8  # of all sources; 4 fill a link of 100 Mbit/s at 200 ms; 8 blobs are 32 MiB of memory
    blob_seconds: float = 120.0  # 4 MiB in this time is 280 kbit/s: slower is as good as stalled
    submits_in_flight: int = 8  # hides the round trip; a trace is at most 3 MiB

    # --- other nodes ---
    serve: bool = True  # pieces of policies to other nodes: what makes the trainer's link carry any crowd
    listen: str = "/ip4/0.0.0.0/tcp/0"  # for them, when serving; any free port
    upload_cap: float = 10.0  # MiB a second to all of them together: a home line of 100 Mbit/s is left alone
    relays: tuple[str, ...] = ()  # addresses of `rlnode relay`, beside the trainer: to be reached and to meet others
    mirrors: tuple[str, ...] = ()  # URLs of static copies (rltrainer publish --mirror)

    # --- environments ---
    environment_threads: int = 64  # answers waited for at once, beside the engine; a thread that waits costs little
    environment_seconds: float = 30.0  # one step, reward or prompt; slower is a fault of the task

    # --- stopping ---
    stop_seconds: float = 2.0  # on Ctrl-C: to send what is finished and give leases back

    @property
    def cards(self) -> tuple[int, ...]:
        """CUDA devices by number; none on a CPU."""
        return () if self.device == "cpu" else parse_cards(self.device.removeprefix("cuda:"))

    def __post_init__(self) -> None:
        if self.engine not in ENGINES:
            raise UsageError(f"there is no engine '{self.engine}'; this build has: {', '.join(ENGINES)}")
        if self.device != "cpu" and not self.device.startswith("cuda:"):
            raise UsageError(f"'{self.device}' is not a device: use --cpu or --gpu N")
        if len(self.cards) > 1 and self.engine != "vllm":
            raise UsageError("several cards for one policy are vLLM's work: use --engine vllm, or one card (--gpu N)")
        if self.slots is not None and not 1 <= self.slots <= 4096:
            raise UsageError(f"--slots must be 1 to 4096, not {self.slots}")
        if self.max_vram_bytes is not None and self.max_vram_bytes < 1:
            raise UsageError("--max-vram must be more than 0 GiB")
        if self.turns is not None and not self.turns.is_dir():
            raise UsageError(
                f"--share-device {self.turns} is not a folder: `rltrainer serve --placement colocated` makes it"
            )
        if not 0 <= self.nice <= 19:
            raise UsageError(f"--nice is from 0 to 19, the most modest, not {self.nice}")
        if self.on_new_policy not in ON_NEW_POLICY:
            raise UsageError(f"--on-new-policy is finish or drop, not '{self.on_new_policy}'")
        if not 0 < self.gpu_memory <= 1:
            raise UsageError(f"--gpu-memory is a share of the card, above 0 and at most 1, not {self.gpu_memory}")
        if self.threads < 1:
            raise UsageError(f"--threads must be at least 1, not {self.threads}")
        if not self.upload_cap > 0:
            raise UsageError("--upload-cap must be more than 0 MiB a second; to give nothing there is --no-serve")
        for relay in self.relays:
            Address.parse(relay)
        if self.disk_bytes is not None and self.disk_bytes < 1:
            raise UsageError("--disk must be more than 0 GiB")
