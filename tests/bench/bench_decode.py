"""Decoding with seeded sampling and proofs against transformers' generate: same prompts, same threads, one run.

Bar: at least 0.9 × generate(do_sample=True), SmolLM2-135M, CPU, batch 16. Also printed: the embedded policy at 64
slots, and what a swap of either policy takes. Both sides take turns and are measured in CPU seconds of this
process, so that a busy machine blurs the ratio as little as possible.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from protocol.environments.base import Message  # noqa: E402
from protocol.environments.tokenizer import PolicyTokenizer  # noqa: E402

BAR = 0.9
BATCH = 16
THREADS = int(os.environ.get("OMP_NUM_THREADS", "1"))
EMBEDDED = ROOT / "trainer" / "embedded"
SMOLLM2 = Path(os.environ.get("RLCOMMONS_SMOLLM2", ROOT / ".cache" / "smollm2"))
PLACES = [
    *("France", "Germany", "Italy", "Spain", "Portugal", "Poland", "Norway", "Sweden"),
    *("Finland", "Denmark", "Greece", "Turkey", "Egypt", "Kenya", "Nigeria", "Ghana"),
]


def prompts(policy: Path, count: int) -> list[tuple[int, ...]]:
    tokenizer = PolicyTokenizer.load(policy)
    asked = [f"What is the capital of {place}? Explain its history briefly." for place in PLACES]
    return [tokenizer.prompt_ids([Message("user", asked[index % len(asked)])]) for index in range(count)]


def cpu_seconds(work: Callable[[], object]) -> float:
    started = time.process_time()
    work()
    return time.process_time() - started


def make_engine(policy: Path, slots: int) -> Any:
    from node.transformers_engine import TransformersEngine

    engine = TransformersEngine(slots=slots, threads=THREADS)
    engine.load(policy, bytes(32))
    engine._stop_ids = frozenset()  # as min_new_tokens does for generate: both sides draw equally many tokens
    return engine


def draw(engine: Any, asked: list[tuple[int, ...]], tokens: int) -> dict[str, tuple[Any, tuple[bytes, ...]]]:
    """Turn and proofs of each prompt; keys are the prompts' numbers, seeds too."""
    from node.engine import SequenceRequest

    for index, prompt in enumerate(asked):
        engine.open(SequenceRequest(str(index), prompt, index, 1.0, tokens))
    drawn: dict[str, tuple[Any, tuple[bytes, ...]]] = {}
    while len(drawn) < len(asked):
        for turn in engine.step():
            drawn[turn.key] = (turn, engine.finish(turn.key))
    return drawn


def against_generate(rounds: int, tokens: int) -> float:
    """Ratio of tokens a CPU second."""
    import torch
    from transformers import AutoModelForCausalLM

    asked = prompts(SMOLLM2, BATCH)
    engine = make_engine(SMOLLM2, BATCH)
    model: Any = AutoModelForCausalLM.from_pretrained(SMOLLM2, dtype=torch.float32)
    longest = max(map(len, asked))
    ids = torch.tensor([[2] * (longest - len(prompt)) + list(prompt) for prompt in asked])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in asked])

    def generate() -> None:
        model.generate(
            ids, attention_mask=mask, do_sample=True, top_k=0, max_new_tokens=tokens, min_new_tokens=tokens,
            pad_token_id=2,
        )  # fmt: skip

    draw(engine, asked, 2)
    spent = [0.0, 0.0]
    for _ in range(rounds):
        spent[0] += cpu_seconds(lambda: draw(engine, asked, tokens))
        spent[1] += cpu_seconds(generate)
    drawn = rounds * BATCH * tokens
    ours, theirs = (drawn / seconds for seconds in spent)
    print(
        f"SmolLM2 fp32, batch {BATCH}, {tokens} new tokens, {THREADS} thread(s), {rounds} rounds, tokens a CPU second:"
    )
    print(f"  seeded sampling and proofs {ours:.1f}; generate {theirs:.1f}; ratio {ours / theirs:.2f} (bar {BAR})")
    return ours / theirs


def embedded_rate(rounds: int) -> None:
    engine = make_engine(EMBEDDED, 64)
    asked = prompts(EMBEDDED, 64)
    draw(engine, asked, 8)
    spent = min(cpu_seconds(lambda: draw(engine, asked, 96)) for _ in range(rounds + 2))
    print(f"embedded policy, 64 slots: {64 * 96 / spent:.0f} tokens a CPU second")


def swap_time(policy: Path) -> None:
    engine = make_engine(policy, 1)
    seconds = min(cpu_seconds(lambda: engine.load(policy, bytes(32))) for _ in range(5))
    print(f"swap of {policy.name}: {seconds * 1e3:.0f} ms")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args()
    embedded_rate(options.rounds)
    swap_time(EMBEDDED)
    if not SMOLLM2.is_dir():
        print(f"not measured: no SmolLM2 in {SMOLLM2} (scripts/convert-smollm2, or set RLCOMMONS_SMOLLM2)")
        return 0
    swap_time(SMOLLM2)
    return 0 if against_generate(options.rounds, options.tokens) >= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
