"""What stands between this machine and a run, checked from the ground up, each with what to do about it.

Not here: repairing anything.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from node.cards import parse_cards
from node.config import DISK_RESERVE_BYTES, GIB, default_threads
from node.store import free_text, key_path, lock_holder, size_text
from protocol import limits, messages
from protocol.diagnosis import Finding, Level
from protocol.envelope import unseal
from protocol.errors import EngineError, KeyFileError, NetError, RemoteError, UsageError
from protocol.identity import Identity, load_identity, peer_id
from protocol.policy import Manifest
from protocol.run import RunAddress, open_genesis

_PINNED: Final = ("rlcommons", "torch", "transformers", "tokenizers", "libp2p", "trio", "msgpack")
_LEAST_DISK: Final = GIB  # for a policy of unknown size
_LEAST_MEMORY: Final = GIB
_COPIES_IN_MEMORY: Final = 4  # bf16 weights become fp32 on a CPU, and the next version is read beside them
_COPIES_ON_DISK: Final = 5  # three versions kept, and the next as pieces and whole


def examine(home: Path, address: RunAddress | None, device: str) -> Iterator[Finding]:
    """All checks, in the order in which a node meets them."""
    yield _identity(home)
    yield from _packages()
    yield _vllm(device)
    yield _device(device)
    yield from _load(home, device)
    yield _home_folder(home)
    manifest: Manifest | None = None
    for each in _trainer(home, address, device):
        if isinstance(each, Manifest):
            manifest = each
        else:
            yield each
    yield _disk(home, manifest)
    yield _memory(manifest, device)


def _identity(home: Path) -> Finding:
    path = key_path(home)
    if not path.exists():
        return Finding("identity", Level.OK, f"none yet: `rlnode join` makes one in {path}")
    try:
        return Finding("identity", Level.OK, load_identity(path).peer_id)
    except KeyFileError as error:
        return Finding("identity", Level.ACT, str(error))


def _packages() -> Iterator[Finding]:
    found, missing = [], []
    for name in _PINNED:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    spoken = ".".join(map(str, limits.PROTOCOL_VERSION))
    text = f"Python {platform.python_version()}, protocol {spoken}, {', '.join(found)}"
    yield Finding("packages", Level.OK, text)
    if missing:
        yield Finding("packages", Level.ACT, f"missing: {', '.join(missing)}; run pip install -e .")


def _vllm(device: str) -> Finding:
    from node.vllm_engine import check_version, installed_version

    version = installed_version()
    try:
        check_version(version)
    except EngineError as error:
        wanted = device != "cpu" or version is not None
        text = "not installed; the engine is transformers" if version is None else str(error)
        if version is None and wanted:
            text += ', which is slower on a GPU: pip install -e ".[vllm]"'
        return Finding("vllm", Level.WARNING if wanted else Level.OK, text)
    return Finding("vllm", Level.OK, f"{version}: rlnode join --engine vllm")


def _device(device: str) -> Finding:
    try:
        import torch
    except ImportError as error:
        return Finding("device", Level.ACT, f"torch cannot be imported ({error}): pip install -e .")
    gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    listed = "; ".join(f"--gpu {number}: {name}" for number, name in enumerate(gpus))
    if device == "cpu":
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        return Finding("device", Level.OK, f"cpu, {cores} processors" + (f"; also {listed}" if gpus else ""))
    for number in parse_cards(device.removeprefix("cuda:")):
        if number >= len(gpus):
            text = f"there is no CUDA device {number} ({listed or 'torch finds none'}): use --cpu"
            return Finding("device", Level.ACT, text)
    return Finding("device", Level.OK, f"--gpu {device.removeprefix('cuda:')}; here are {listed}")


def _load(home: Path, device: str) -> Iterator[Finding]:
    if device != "cpu" or not hasattr(os, "getloadavg"):
        return
    threads, load = default_threads(), os.getloadavg()[0]
    if lock_holder(home) is not None:
        load -= threads  # what this node makes of it itself
    yield busy(load, os.cpu_count() or 1, threads)


def busy(load: float, processors: int, threads: int) -> Finding:
    """Whether a node of so many threads fits beside the load that others make. With a thread for each processor of a
    busy machine all threads wait for the one whose turn comes last, at each layer of each token."""
    text = f"the load of others is {max(0.0, load):.1f}, on {processors} processors"
    if load <= processors or threads < processors:
        return Finding("load", Level.OK, text)
    advice = f"rlnode join --threads {max(1, processors // 2)} may be several times faster here"
    return Finding("load", Level.WARNING, f"{text}, and a node takes all of them unless told otherwise: {advice}")


def _home_folder(home: Path) -> Finding:
    holder = lock_holder(home)
    if holder is not None:
        return Finding("home", Level.OK, f"{home}, a node is running in it (process {holder}): see rlnode status")
    folder = home if home.exists() else home.parent
    if not os.access(folder, os.W_OK):
        return Finding("home", Level.ACT, f"{folder} cannot be written: choose another with --home FOLDER")
    return Finding("home", Level.OK, str(home))


def _disk(home: Path, manifest: Manifest | None) -> Finding:
    import shutil

    folder = next(each for each in (home, *home.parents) if each.exists())
    free, kept = shutil.disk_usage(folder).free, DISK_RESERVE_BYTES
    # As store.py counts: the pieces of a policy and what is made of them.
    least = 2 * manifest.size if manifest else 0
    wanted = manifest.size * _COPIES_ON_DISK if manifest else _LEAST_DISK
    text = f"the disk of {folder} has {free_text(free, kept)}"
    if free >= kept + wanted:
        return Finding("disk", Level.OK, text)
    more = f"free {size_text(kept + wanted - free)} more, or use --home FOLDER on another disk"
    if free < kept + least:
        told = f"no new policy is fetched before {size_text(kept + least - free)} more are free"
        return Finding("disk", Level.ACT, f"{text}: {told}; better {more}")
    return Finding("disk", Level.WARNING, f"{text}, about {size_text(wanted)} more than these may be needed: {more}")


def _memory(manifest: Manifest | None, device: str) -> Finding:
    needed = max(_LEAST_MEMORY, 0 if manifest is None else manifest.size * _COPIES_IN_MEMORY)
    if device != "cpu":
        import torch

        if torch.cuda.is_available() and int(device[5:]) < torch.cuda.device_count():
            free, _ = torch.cuda.mem_get_info(int(device[5:]))
            return _enough("memory", free, needed, f"free on --gpu {device[5:]}", "use another device")
    try:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return Finding("memory", Level.WARNING, "this system does not say how much is free")
    free = max(free, _available_memory())
    return _enough("memory", free, needed, "free", "end other programs, or use fewer --slots")


def _available_memory() -> int:
    """Linux: free and reclaimable, in bytes; 0 elsewhere."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")), 0)


def _enough(what: str, free: int, needed: int, where: str, advice: str) -> Finding:
    text = f"{size_text(free)} {where}"
    if free >= needed:
        return Finding(what, Level.OK, text)
    return Finding(what, Level.WARNING, f"{text}, about {size_text(needed)} may be needed: {advice}")


# --- the trainer ---


def _trainer(home: Path, address: RunAddress | None, device: str) -> Iterator[Finding | Manifest]:
    if address is None:
        yield Finding("trainer", Level.ACT, "no address: rlnode doctor ADDRESS, or join a run first")
        return
    try:
        welcome, ahead = greet(address, _who(home), device)
    except NetError as error:
        yield Finding("trainer", Level.ACT, str(error))
        return
    except (RemoteError, UsageError) as error:
        yield Finding("trainer", Level.ACT, str(error))
        return
    try:
        genesis = open_genesis(welcome.genesis, run=address.run, trainer=address.trainer)
        manifest = unseal(Manifest, welcome.manifest, signer=address.trainer)
    except RemoteError as error:
        yield Finding("trainer", Level.ACT, f"{error}: the address is of another run, ask for the right one")
        return
    text = f"run '{genesis.name}' at {peer_id(address.trainer)}, {welcome.software}, protocol {welcome.version}"
    yield Finding("trainer", Level.OK, text)
    yield _clock(ahead)
    text = f"version {manifest.version}, {size_text(manifest.size)}"
    yield Finding("policy", Level.OK, text)
    yield manifest


def _who(home: Path) -> Identity:
    """This node, so that a ban shows; a stranger while the node is running, so that it is not disturbed."""
    if lock_holder(home) is None and key_path(home).exists():
        try:
            return load_identity(key_path(home))
        except KeyFileError:
            pass  # told above
    return Identity.generate()


def greet(address: RunAddress, who: Identity, device: str) -> tuple[messages.Welcome, float]:
    """Say hello and goodbye. Returns the answer and by how many seconds our clock is ahead.

    Raises NetError, RemoteError (the trainer refuses: the message says why), UsageError.
    """
    import trio

    from node.failures import foremost
    from node.visiting import visiting

    async def look() -> tuple[messages.Welcome, float]:
        async with visiting(address, who, device) as found:
            return found.welcome, found.ahead

    with foremost():
        return trio.run(look)


def _clock(ahead: float) -> Finding:
    from node.session import clock_advice

    if abs(ahead) > limits.MAX_CLOCK_SKEW_SECONDS:
        return Finding("clock", Level.ACT, clock_advice(ahead))
    if abs(ahead) > limits.MAX_CLOCK_SKEW_SECONDS / 5:
        return Finding("clock", Level.WARNING, clock_advice(ahead))
    return Finding("clock", Level.OK, f"{abs(ahead):.1f} s {'ahead of' if ahead > 0 else 'behind'} the trainer's")
