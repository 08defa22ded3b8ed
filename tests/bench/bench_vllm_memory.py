"""Resident memory of the node's process and of vLLM's core over 2,000 completions of two turns (bar: flat).

vLLM's core is a process of its own, as on a GPU, so that each side shows by itself: the one that asks and takes
proofs, and the one that holds the model, the rows and the cache. Every eight completions share a prompt that no others
have, and the cache has room for some two hundred, so that it is full and turns over before anything is measured: a
larger one is touched page by page for many thousand completions, which looks like a leak. Printed: the least-squares
slope over the last two thirds of the completions, in KiB a completion and as a share of the mean a thousand
completions. Flat is below 1 % of it.

The policy is a random one of a shape that vLLM's CPU kernels take (the embedded one's heads of 16 they do not).
Without vLLM (`make vllm-env`) nothing is measured, which is said and is no failure.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import psutil  # noqa: E402

from node.engine import SequenceRequest  # noqa: E402

BLOCKS = 512  # of the cache, 32 tokens each
BAR = 1.0  # % of the mean that a thousand completions may add
GROUP, SLOTS, TOKENS = 8, 16, 12  # completions of a prompt; decoded at once; tokens a turn
LOT = 2 * SLOTS  # completions between two samples
OBSERVED = (11, 12, 13)


def processes() -> dict[str, psutil.Process]:
    """By name: ours, and what vLLM started."""
    here = psutil.Process()
    found = {"node": here}
    for child in here.children(recursive=True):
        words = " ".join(child.cmdline())
        if "resource_tracker" not in words:
            found[f"{child.pid} {words.strip()[:40]}"] = child
    return found


def draw(engine: Any, begin: int) -> int:
    """A lot of completions, two turns each. Returns the tokens drawn."""
    for index in range(begin, begin + LOT):
        prompt = tuple((31 * (index // GROUP) + 7 * at) % 90 + 10 for at in range(40 + index // GROUP % 30))
        engine.open(SequenceRequest(str(index), prompt, index, 1.0, TOKENS))
    tokens, answered, left = 0, set(), LOT
    while left:
        for turn in engine.step():
            tokens += len(turn.tokens)
            if turn.key not in answered:
                answered.add(turn.key)
                engine.extend(turn.key, OBSERVED, TOKENS)
                continue
            assert engine.finish(turn.key)
            left -= 1
    return tokens


def measure(engine: Any, count: int) -> dict[str, list[tuple[int, int]]]:
    """Resident bytes of each process, by completions drawn."""
    samples: dict[str, list[tuple[int, int]]] = {}
    watched = processes()
    began, tokens = time.perf_counter(), 0
    for done in range(0, count, LOT):
        tokens += draw(engine, done)
        for name, process in watched.items():
            samples.setdefault(name, []).append((done + LOT, process.memory_info().rss))
    print(f"{done + LOT} completions, {tokens} tokens, {time.perf_counter() - began:.0f} s", flush=True)
    return samples


def report(samples: dict[str, list[tuple[int, int]]]) -> bool:
    """Whether all are flat."""
    flat = True
    print(f"{'process':48} {'MiB':>8} {'first':>8} {'last':>8} {'KiB each':>9} {'% per 1,000':>11}")
    for name, series in samples.items():
        kept = np.array(series[len(series) // 3 :], dtype=float)
        size = kept[:, 1] / 2**20
        slope = float(np.polyfit(kept[:, 0], size, 1)[0])  # MiB a completion
        share = slope * 1_000 / size.mean() * 100
        flat = flat and share < BAR
        print(f"{name:48} {size.mean():8.1f} {size[0]:8.1f} {size[-1]:8.1f} {slope * 1024:9.3f} {share:11.3f}")
    return flat


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--completions", type=int, default=2_000)
    options = parser.parse_args()
    if importlib.util.find_spec("vllm") is None:
        print("not measured: needs vLLM (make vllm-env)")
        return 0
    from node.vllm_engine import VllmEngine
    from tests.vllm.conftest import make_policy

    with tempfile.TemporaryDirectory() as name:
        settings = {"num_gpu_blocks_override": BLOCKS}
        engine = VllmEngine(slots=SLOTS, threads=1, own_process=True, settings=settings)
        try:
            engine.load(make_policy(Path(name) / "policy", 1), bytes(32))
            said = engine.descriptor()
            print(f"vLLM {said.version} {said.dtype} {said.runner} on {said.device}")
            flat = report(measure(engine, options.completions))
            left = engine._rpc("rlc_forget", [])
        finally:
            engine.close()
    print(f"sequences whose rows the worker still keeps: {left}")
    return 0 if flat and not left else 1


if __name__ == "__main__":
    sys.exit(main())
