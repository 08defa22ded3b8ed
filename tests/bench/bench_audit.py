"""Auditing against generating and against a bare forward pass: same tokens, same threads, one run.

Bars, SmolLM2-135M fp32 on a CPU: prefill + margins + proofs at least 4 × the tokens a second of drawing them, and at
least 0.85 × a bare transformers forward pass with logits over the same tokens. Held to it are two groups of 8 with 64
drawn tokens each, as leases are given, and one group of 8 with 256, drawn as a batch of 8; 16 different prompts,
where nothing is shared, are printed beside. An audit's tokens are all that a trace holds, prompt included; the
stricter ratio, over drawn tokens alone, is printed too. The sides take turns and are measured in CPU seconds.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from bench_decode import BATCH, SMOLLM2, THREADS, cpu_seconds, draw, make_engine, prompts

BAR_DRAWING = 4.0
BAR_FORWARD = 0.85


@dataclass(frozen=True)
class Sides:
    """Who draws, who audits, and the plain model beside them."""

    engine: Any
    verifier: Any
    model: Any


def make_sides() -> Sides:
    import torch
    from transformers import AutoModelForCausalLM

    from verify.prefill import Verifier

    return Sides(
        make_engine(SMOLLM2, BATCH),
        Verifier(SMOLLM2, "float32", threads=THREADS),
        AutoModelForCausalLM.from_pretrained(SMOLLM2, dtype=torch.float32),
    )


@dataclass(frozen=True)
class Rates:
    """Tokens a CPU second."""

    audit: float
    forward: float
    drawing: float


def measure(sides: Sides, asked: list[tuple[int, ...]], tokens: int, rounds: int) -> Rates:
    """Draw a completion of each prompt, then recompute it: prints and returns the rates."""
    import torch

    from verify.prefill import Passage
    from verify.toploc import compare_many

    drawn = draw(sides.engine, asked, tokens)
    passages, proofs = [], []
    for index, prompt in enumerate(asked):
        turn, evidence = drawn[str(index)]
        passages.append(Passage(prompt, turn.tokens, tuple(range(tokens)), index, 1.0))
        proofs.append(evidence)
    whole = [passage.prompt + passage.tokens for passage in passages]
    longest = max(map(len, whole))
    padded = torch.tensor([[*ids, *(0,) * (longest - len(ids))] for ids in whole])

    def audit() -> None:
        ours = sides.verifier.recompute(passages)
        chunks = compare_many([(each.hidden, evidence) for each, evidence in zip(ours, proofs, strict=True)])
        assert max(float(each.margins.max()) for each in ours) < 1e-2
        # Two kernels may disagree about which value is the 128th largest of a chunk.
        assert max(chunk.exponent_mismatches for trace in chunks for chunk in trace) <= 2

    def forward() -> None:
        with torch.inference_mode():
            sides.model(padded)

    audit()
    forward()
    spent = [0.0, 0.0, 0.0]
    for _ in range(rounds):
        spent[0] += cpu_seconds(audit)
        spent[1] += cpu_seconds(forward)
        spent[2] += cpu_seconds(lambda: draw(sides.engine, asked, tokens))
    read, new = rounds * sum(map(len, whole)), rounds * len(asked) * tokens
    rates = Rates(read / spent[0], read / spent[1], new / spent[2])
    print(f"  audit {rates.audit:.0f}; bare forward with logits {rates.forward:.0f}; drawing {rates.drawing:.0f}")
    print(f"  audit / drawing {rates.audit / rates.drawing:.2f}; over drawn tokens alone {spent[2] / spent[0]:.2f}")
    print(f"  audit / forward {rates.audit / rates.forward:.2f}")
    return rates


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    if not SMOLLM2.is_dir():
        print(f"not measured: no SmolLM2 in {SMOLLM2} (scripts/convert-smollm2, or set RLCOMMONS_SMOLLM2)")
        return 0
    sides = make_sides()
    asked = prompts(SMOLLM2, BATCH)
    print(f"SmolLM2 fp32, {THREADS} thread(s), tokens a CPU second")
    kept = True
    for name, batch, tokens in (
        ("two groups of 8, 64 drawn tokens each", asked[:1] * 8 + asked[1:2] * 8, 64),
        ("one group of 8, 256 drawn tokens each", asked[:1] * 8, 256),
    ):
        print(f"{name} (bars: audit / drawing {BAR_DRAWING}, audit / forward {BAR_FORWARD}):")
        rates = measure(sides, batch, tokens, options.rounds)
        kept &= rates.audit >= BAR_DRAWING * rates.drawing and rates.audit >= BAR_FORWARD * rates.forward
    print("16 different prompts, 64 drawn tokens each:")
    measure(sides, asked, 64, options.rounds)
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
