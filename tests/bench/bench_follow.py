"""Following SmolLM2-135M by delta, with the trainer's and the node's own code: seconds, bytes, memory.

    python tests/bench/bench_follow.py

The trainer makes a delta between two policies on disk and checks it; a node of its own process, with the first policy
and the delta's pieces in its store, makes the second. One value in 300 moves by one step, as at a learning rate of
1e-6 (docs/decisions/0008): sizes of real steps are bench_delta.py's. Takes about a minute of one core.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT)]

from node.config import NodeConfig  # noqa: E402
from node.store import RunStore, size_text  # noqa: E402
from protocol import codec, limits  # noqa: E402
from protocol.delta import cut  # noqa: E402
from protocol.envelope import Signed, seal  # noqa: E402
from protocol.identity import Identity  # noqa: E402
from protocol.policy import Manifest, describe, policy_root, read_safetensors  # noqa: E402
from protocol.run import RunAddress  # noqa: E402
from trainer.deltas import delta_files, describe_deltas, make_deltas  # noqa: E402
from trainer.rundir import RunFolder  # noqa: E402

SMOLLM2 = Path(os.environ.get("RLCOMMONS_SMOLLM2", ROOT / ".cache" / "smollm2"))
TRAINER = Identity(b"\1" * 32)
RUN = b"\2" * 32
MOVED = 1 / 300
BAR_MEMORY = 64 << 20


def move_some(folder: Path) -> None:
    random = np.random.default_rng(1)
    for path in folder.glob("*.safetensors"):
        data = np.memmap(path, np.uint8, "r+")
        for place in read_safetensors(path):
            bits = data[place.begin : place.end].copy().view("<u2")
            bits[random.random(bits.size, dtype=np.float32) < MOVED] ^= 1
            data[place.begin : place.end] = bits.view(np.uint8)
        data.flush()


def sealed(run: RunFolder, version: int, root: bytes) -> tuple[Manifest, Signed]:
    deltas = describe_deltas(run, version)
    manifest = Manifest(RUN, version, root, describe(run.policy(version)), 0, 1, deltas)
    return manifest, seal(TRAINER, manifest)


def open_store(home: Path) -> RunStore:
    return RunStore(home, NodeConfig(address=RunAddress("/ip4/127.0.0.1/tcp/1", TRAINER.node, RUN)))


def stock(home: Path, run: RunFolder, roots: dict[int, bytes]) -> None:
    """A node that has the first policy and the pieces of the delta to the second."""
    store = open_store(home)
    manifest, signed = sealed(run, 0, roots[0])
    for file in manifest.files:
        with (run.policy(0) / file.name).open("rb") as opened:
            for blob in file.blobs:
                store.put_blob(blob.digest, opened.read(limits.MAX_BLOB_BYTES))
    store.assemble(manifest, signed)
    store.drop_blobs()
    manifest, signed = sealed(run, 1, roots[1])
    (path,) = delta_files(run, 1)
    for blob, data in zip(manifest.deltas[0].blobs, cut([path.read_bytes()]), strict=True):
        store.put_blob(blob.digest, data)
    (home / "signed").write_bytes(codec.encode(signed))


def memory(field: str) -> int:
    """Of this process, in bytes: what it holds now (VmRSS) or held at most (VmHWM)."""
    return 1024 * int(re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])  # type: ignore[index]


def apply(home: Path) -> str:
    """CPU seconds, seconds and growth of this process."""
    signed = codec.decode(Signed, (home / "signed").read_bytes())
    manifest = codec.decode(Manifest, signed.payload)
    store = open_store(home)
    before, cpu, began = memory("VmRSS"), time.process_time(), time.monotonic()
    store.apply(manifest, signed, manifest.deltas[0])
    return f"{time.process_time() - cpu} {time.monotonic() - began} {memory('VmHWM') - before}"


def main() -> int:
    if sys.argv[1:2] == ["--apply"]:
        print(apply(Path(sys.argv[2])))
        return 0
    with tempfile.TemporaryDirectory() as where:
        run, home = RunFolder(Path(where) / "run"), Path(where) / "home"
        for version in (0, 1):
            shutil.copytree(SMOLLM2, run.policy(version))
        move_some(run.policy(1))
        roots = {version: policy_root(run.policy(version)) for version in (0, 1)}
        cpu, began = time.process_time(), time.monotonic()
        if said := make_deltas(run, 1, roots.get):
            raise AssertionError(said)
        made = time.process_time() - cpu, time.monotonic() - began
        stock(home, run, roots)
        done = subprocess.run([sys.executable, __file__, "--apply", home], capture_output=True, text=True, check=True)
        applied = [float(word) for word in done.stdout.split()]
        size = sum(path.stat().st_size for path in run.policy(1).iterdir())
        (delta,) = delta_files(run, 1)
        small = delta.stat().st_size
    weights = SMOLLM2.joinpath("model.safetensors").stat().st_size
    print(f"policy {size_text(size)}, delta {size_text(small)}: {size / small:.0f} times smaller")
    print(f"  trainer: made and checked in {made[0]:.1f} CPU s ({made[1]:.1f} s): {weights / made[0] / 1e6:.0f} MB/s")
    rate = weights / applied[0] / 1e6
    print(f"  node: applied and checked in {applied[0]:.1f} CPU s ({applied[1]:.1f} s): {rate:.0f} MB/s")
    more = applied[2] - weights
    met = more <= BAR_MEMORY
    print(f"  node: memory grew by the weights {more / 2**20:+.1f} MiB (bar +64): {'met' if met else 'MISSED'}")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
