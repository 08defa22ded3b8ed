"""Runs the engine on vLLM's V2 model runner, whose Triton kernels are interpreted on the CPU: slow, and the same
code that a GPU runs but for the compiler. A process of its own, since what chooses the runner is read once.

usage: interpreted_v2.py POLICY; prints one JSON object. Not here: what the test asserts.
"""

from __future__ import annotations

import json
import os
import sys
import types
from pathlib import Path
from typing import Any

os.environ.update(TRITON_INTERPRET="1", VLLM_USE_V2_MODEL_RUNNER="1", OMP_NUM_THREADS="1", VLLM_CPU_KVCACHE_SPACE="1")
sys.path.insert(0, str(Path(__file__).parents[2]))

import triton.backends


class NoDriver:
    """Stands where a CPU driver would, so that vLLM takes Triton for usable."""

    @staticmethod
    def is_active() -> bool:
        return False


backends: Any = triton.backends.backends
backends["cpu"] = types.SimpleNamespace(driver=NoDriver, compiler=None)


def main(policy: Path) -> None:
    from node.engine import SequenceRequest
    from node.vllm_engine import VllmEngine

    engine = VllmEngine(slots=3, threads=1, settings={"max_num_batched_tokens": 16, "max_model_len": 128})
    engine.load(policy, b"a" * 32)
    requests = [
        SequenceRequest(str(index), tuple(range(10, 15 + 9 * index)), 2**63 + index, (1.0, 0.7)[index % 2], 35)
        for index in range(4)
    ]
    for each in requests:
        engine.open(each)
    drawn = []
    while len(drawn) < len(requests):
        for turn in engine.step():
            wanted = requests[int(turn.key)]
            drawn.append(
                {
                    "prompt": wanted.prompt,
                    "seed": wanted.seed,
                    "temperature": wanted.temperature,
                    "tokens": turn.tokens,
                    "logprobs": turn.logprobs,
                    "proofs": [proof.hex() for proof in engine.finish(turn.key)],
                }
            )
    engine.load(policy, b"b" * 32)  # a swap
    print("DRAWN" + json.dumps({"runner": engine.descriptor().runner, "drawn": drawn}), flush=True)
    engine.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
