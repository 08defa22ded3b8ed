"""What proofs and seeded draws cost on vLLM (CPU build, V1 runner): against its own greedy decoding, one run.

Bars, SmolLM2-135M in float32, one thread, batch 16 and 64, tokens a CPU second:
  proofs and seeded draws   at least 0.85 × plain greedy
  proofs alone              at least 0.97 × plain greedy
  batch 16                  at least 1 × our transformers engine
Also printed: a swap (bar 2 s), and the memory after many requests. All sides take turns in one process and are
measured in its CPU seconds, so that a busy machine blurs the ratios as little as possible.
Without vLLM (`make vllm-env`) nothing is measured, which is said and is no failure.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from node.engine import SequenceRequest  # noqa: E402
from tests.bench.bench_decode import SMOLLM2, cpu_seconds, prompts  # noqa: E402

DRAW_BAR, PROOF_BAR, TRANSFORMERS_BAR, SWAP_BAR = 0.85, 0.97, 1.0, 2.0


def plain(engine: Any, asked: list[tuple[int, ...]], tokens: int) -> None:
    """vLLM's own greedy decoding, on the same engine: nothing of ours has a row to look at."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    inside = engine._vllm
    kind = RequestOutputKind.FINAL_ONLY
    for index, prompt in enumerate(asked):
        parameters = SamplingParams(
            temperature=0, max_tokens=tokens, detokenize=False, ignore_eos=True, output_kind=kind
        )
        inside.add_request(f"plain-{index}", {"prompt_token_ids": list(prompt)}, parameters)
    while inside.has_unfinished_requests():
        inside.step()


def ours(engine: Any, asked: list[tuple[int, ...]], tokens: int) -> None:
    for index, prompt in enumerate(asked):
        engine.open(SequenceRequest(str(index), prompt, index, 1.0, tokens))
    done = 0
    while done < len(asked):
        for turn in engine.step():
            engine.finish(turn.key)
            done += 1


def proofs_alone(engine: Any, asked: list[tuple[int, ...]], tokens: int) -> None:
    """Greedy decoding whose rows are kept and proved: the draw is taken out."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    from node.vllm_worker import TAG

    worker = worker_of(engine)
    draw, worker._rlc_draw = worker._rlc_draw, None
    draw.rows = ()
    inside = engine._vllm
    kind = RequestOutputKind.FINAL_ONLY
    for index, prompt in enumerate(asked):
        extra = {TAG: [str(index), 0, len(prompt) - 1, index, 1.0]}
        parameters = SamplingParams(
            temperature=0, max_tokens=tokens, detokenize=False, ignore_eos=True, output_kind=kind, extra_args=extra
        )
        inside.add_request(f"proved-{index}", {"prompt_token_ids": list(prompt)}, parameters)
    while inside.has_unfinished_requests():
        for output in inside.step():
            key = output.request_id.removeprefix("proved-")
            engine._rpc("rlc_turns_over", [(key, 0, tokens)])
            engine._rpc("rlc_proofs", key)
    worker._rlc_draw = draw


def worker_of(engine: Any) -> Any:
    wrapper = engine._vllm.engine_core.engine_core.model_executor.driver_worker
    return getattr(wrapper, "worker", wrapper)


Side = Callable[[Any, list[tuple[int, ...]], int], None]


def rates(sides: list[tuple[Side, Any]], asked: list[tuple[int, ...]], tokens: int, rounds: int) -> list[float]:
    """Tokens a CPU second of each side, in turns; the best round of each, since load only ever adds."""
    best = [float("inf")] * len(sides)
    for _ in range(rounds):
        for number, (side, engine) in enumerate(sides):
            best[number] = min(best[number], cpu_seconds(functools.partial(side, engine, asked, tokens)))
    return [len(asked) * tokens / seconds for seconds in best]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--batches", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--requests", type=int, default=0, help="and watch the memory over so many short ones")
    options = parser.parse_args()
    if importlib.util.find_spec("vllm") is None or not SMOLLM2.is_dir():
        print("not measured: needs vLLM (make vllm-env) and SmolLM2 (scripts/convert-smollm2)")
        return 0
    return measure(options)


def measure(options: argparse.Namespace) -> int:
    from node.transformers_engine import TransformersEngine
    from node.vllm_engine import VllmEngine

    engine = VllmEngine(slots=max(options.batches), threads=1, settings={"max_model_len": 1024})
    began = time.perf_counter()
    engine.load(SMOLLM2, bytes(32))
    said = engine.descriptor()
    print(f"vLLM {said.version}, {said.runner}: {time.perf_counter() - began:.1f} s to load")
    engine._stop_ids = frozenset()  # every side draws equally many tokens
    missed = []

    def bar(what: str, ratio: float, least: float) -> None:
        print(f"  {what}: {ratio:.3f} (bar {least})")
        if ratio < least:
            missed.append(what)

    for batch in options.batches:
        asked = prompts(SMOLLM2, batch)
        ours(engine, asked, 2)
        sides: list[tuple[Side, Any]] = [(plain, engine), (proofs_alone, engine), (ours, engine)]
        found = rates(sides, asked, options.tokens, options.rounds)
        print(f"batch {batch}, {options.tokens} tokens, tokens a CPU second: greedy {found[0]:.1f}, with proofs "
              f"{found[1]:.1f}, with proofs and seeded draws {found[2]:.1f}")  # fmt: skip
        bar(f"batch {batch}, proofs alone against greedy", found[1] / found[0], PROOF_BAR)
        bar(f"batch {batch}, proofs and draws against greedy", found[2] / found[0], DRAW_BAR)
        if batch == 16:
            other: Any = TransformersEngine(slots=16, threads=1)
            other.load(SMOLLM2, bytes(32))
            other._stop_ids = frozenset()
            (theirs,) = rates([(ours, other)], asked, options.tokens, options.rounds)
            other.close()
            print(f"  our transformers engine: {theirs:.1f}")
            bar("batch 16, vLLM against transformers, both with proofs and draws", found[2] / theirs, TRANSFORMERS_BAR)
    spent = min(cpu_seconds(lambda: engine.load(SMOLLM2, bytes(32))) for _ in range(3))
    print(f"swap with all checks: {spent:.2f} CPU seconds (bar {SWAP_BAR})")
    if spent > SWAP_BAR:
        missed.append("swap")
    if options.requests:
        watch_memory(engine, options.requests)
    engine.close()
    for what in missed:
        print(f"missed: {what}")
    return 1 if missed else 0


def watch_memory(engine: Any, requests: int) -> None:
    import psutil

    process, asked = psutil.Process(), prompts(SMOLLM2, 64)
    for part in range(4):
        for _ in range(max(1, requests // 4 // 64)):
            ours(engine, asked, 2)
        print(f"memory after {(part + 1) * requests // 4} requests: {process.memory_info().rss / 2**20:.1f} MiB")


if __name__ == "__main__":
    sys.exit(main())
