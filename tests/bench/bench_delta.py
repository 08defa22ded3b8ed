"""ULPD1 on real learner steps of SmolLM2-135M: size, speed on one core, memory of applying.

    python tests/bench/bench_delta.py [--first 5] [--last 10]

AdamW at 1e-6 and 1e-5, the deltas between the weights after steps 5 to 10, against the bfloat16 bytes and, in the
same run, against two other codings of the same change: zstd of the new values that changed with their gaps, and
zstd of the byte planes of old XOR new. Speed is CPU seconds of all deltas, reading and writing no files; memory
that of a process which maps the base and writes the new weights to a file. Takes about four minutes of one core.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import zstandard
from numpy.typing import NDArray

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from smollm2_steps import Weights, draw, steps  # noqa: E402

from protocol import delta  # noqa: E402
from protocol.policy import TensorLeaf  # noqa: E402

SMOLLM2 = Path(os.environ.get("RLCOMMONS_SMOLLM2", ROOT / ".cache" / "smollm2"))
BAR_RATIO = {1e-6: 150.0, 1e-5: 40.0}
BAR_AGAINST_OTHERS = 1.5
BAR_MB_PER_SECOND = 100.0
AIM_MB_PER_SECOND = 300.0
BAR_MEMORY = 64 << 20


@dataclass
class Figures:
    """Sums over the deltas of one learning rate, in bytes and CPU seconds."""

    raw: int = 0
    changed: int = 0  # values
    ours: int = 0
    sparse: int = 0
    planes: int = 0
    encoding: float = 0.0
    decoding: float = 0.0

    def ratio(self, size: int) -> float:
        return self.raw / size


def base_of(weights: Weights, shapes: dict[str, tuple[int, ...]], name: str) -> delta.BaseTensor:
    return delta.BaseTensor("BF16", shapes[name], weights[name].view(np.uint8))


def table_of(weights: Weights, shapes: dict[str, tuple[int, ...]]) -> delta.DeltaTable:
    return delta.DeltaTable(
        tuple(
            delta.DeltaTensor(
                TensorLeaf(name, "BF16", shapes[name], hashlib.sha256(weights[name].data).digest()),
                weights[name].nbytes,
            )
            for name in sorted(weights, key=str.encode)
        )
    )


def packed(raw: bytes) -> int:
    return len(zstandard.ZstdCompressor(level=3).compress(raw))


def sparse_size(old: NDArray[np.uint16], new: NDArray[np.uint16]) -> int:
    """Gaps as bytes with escape, new values as two byte planes, each compressed."""
    places = np.flatnonzero(old != new)
    gaps = np.diff(places, prepend=-1) - 1
    small = np.minimum(gaps, 255).astype(np.uint8).tobytes() + gaps[gaps >= 255].astype("<u4").tobytes()
    values = new[places].view(np.uint8)
    return packed(small) + packed(values[0::2].tobytes()) + packed(values[1::2].tobytes())


def planes_size(old: NDArray[np.uint16], new: NDArray[np.uint16]) -> int:
    different = (old ^ new).view(np.uint8)
    return packed(different[0::2].tobytes()) + packed(different[1::2].tobytes())


def measure(old: Weights, new: Weights, shapes: dict[str, tuple[int, ...]], figures: Figures) -> bytes:
    """One delta, added to the figures; it is decoded and compared."""
    table = table_of(new, shapes)
    started = time.process_time()
    coded = b"".join(
        delta.encode_policy(table, lambda name: base_of(old, shapes, name), lambda name: new[name].view(np.uint8))
    )
    figures.encoding += time.process_time() - started
    started = time.process_time()
    sections = delta.DeltaReader([coded], most_bytes=table.size).sections(lambda name: base_of(old, shapes, name))
    while section := next(sections, None):
        figures.decoding += time.process_time() - started
        wanted = new[section.tensor.leaf.name].view(np.uint8)[section.begin : section.begin + section.raw.size]
        if not np.array_equal(section.raw, wanted):
            raise AssertionError(f"{section.tensor.leaf.name} did not come back")
        started = time.process_time()
    figures.raw += table.size
    figures.ours += len(coded)
    figures.changed += sum(int((old[name] != new[name]).sum()) for name in new)
    figures.sparse += sum(sparse_size(old[name], new[name]) for name in new)
    figures.planes += sum(planes_size(old[name], new[name]) for name in new)
    return coded


# --- memory ---


def growth_of_applying(old: Weights, shapes: dict[str, tuple[int, ...]], coded: bytes) -> int:
    """Bytes by which a process grows that applies the delta, mapped base included."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        names = sorted(old)
        with (place / "base").open("wb") as file:
            for name in names:
                file.write(old[name].data)
        (place / "table").write_text(json.dumps([[name, old[name].size, shapes[name]] for name in names]))
        (place / "delta").write_bytes(coded)
        done = subprocess.run(
            [sys.executable, __file__, "--apply", folder], capture_output=True, text=True, check=True, timeout=300
        )
        return int(done.stdout)


def pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            yield piece


def memory(field: str) -> int:
    """Of this process, in bytes: what it holds now (VmRSS) or held at most (VmHWM)."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(rf"{field}:\s+(\d+) kB", status)[1])  # type: ignore[index]


def apply(place: Path) -> int:
    """Growth of this process in bytes."""
    mapped = np.memmap(place / "base", dtype=np.uint16, mode="r")
    base, start = {}, 0
    for name, count, shape in json.loads((place / "table").read_text()):
        base[name] = delta.BaseTensor("BF16", tuple(shape), mapped[start : start + count].view(np.uint8))
        start += count
    before = memory("VmRSS")
    with (place / "new").open("wb") as file:
        reader = delta.DeltaReader(pieces(place / "delta"), most_bytes=2 * start)
        for section in reader.sections(base.get):
            file.write(section.raw.data)
    return memory("VmHWM") - before


# --- the bars ---


def judge(rate: float, figures: Figures, growth: int, count: int) -> bool:
    ratio, best_other = figures.ratio(figures.ours), min(figures.sparse, figures.planes)
    encoding, decoding = figures.raw / 1e6 / figures.encoding, figures.raw / 1e6 / figures.decoding
    print(
        f"learning rate {rate:g}: {count} deltas of {figures.raw / count / 1e6:.0f} MB, "
        f"{200 * figures.changed / figures.raw:.2f} % of the values changed, "
        f"{figures.ours / count / 1e3:.0f} kB a delta"
    )
    speed = f"{BAR_MB_PER_SECOND:g}, aim {AIM_MB_PER_SECOND:g}"
    bars = (
        (f"ratio {ratio:.0f}", f"{BAR_RATIO[rate]:g}", ratio >= BAR_RATIO[rate]),
        (
            f"smaller by {best_other / figures.ours:.2f} than the better of sparse values "
            f"({figures.ratio(figures.sparse):.0f}) and XOR planes ({figures.ratio(figures.planes):.0f})",
            f"{BAR_AGAINST_OTHERS}",
            best_other >= BAR_AGAINST_OTHERS * figures.ours,
        ),
        (f"encode {encoding:.0f} MB/s", speed, encoding >= BAR_MB_PER_SECOND),
        (f"decode {decoding:.0f} MB/s", speed, decoding >= BAR_MB_PER_SECOND),
        (
            f"applying takes the weights {(growth - figures.raw / count) / 2**20:+.1f} MiB",
            f"+{BAR_MEMORY >> 20}",
            growth <= figures.raw / count + BAR_MEMORY,
        ),
    )
    for told, bar, met in bars:
        print(f"  {told} (bar {bar}): {'met' if met else 'MISSED'}")
    return all(met for _, _, met in bars)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--first", type=int, default=5, metavar="STEP")
    parser.add_argument("--last", type=int, default=10, metavar="STEP")
    parser.add_argument("--apply", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.apply:
        print(apply(options.apply))
        return 0
    if not SMOLLM2.is_dir():
        print(f"not measured: no SmolLM2 in {SMOLLM2} (scripts/convert-smollm2, or set RLCOMMONS_SMOLLM2)")
        return 0
    batches = draw(SMOLLM2, options.last)
    met = True
    for rate in BAR_RATIO:
        figures, old, coded = Figures(), None, b""
        before: Weights = {}
        for step, (weights, shapes) in enumerate(steps(SMOLLM2, batches, rate), 1):
            if old is not None:
                before, coded = old, measure(old, weights, shapes, figures)
            old = weights if step >= options.first else None
        growth = growth_of_applying(before, shapes, coded)
        met &= judge(rate, figures, growth, options.last - options.first)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
