"""What evidence costs: seeded sampling, margins, building and checking proofs, as ratios of one run.

`python tests/bench/bench_proofs.py`. One thread, sizes of SmolLM2-135M (hidden 576, vocabulary 49,152), random
weights: the arithmetic is the same and no model is needed. Not here: whole decode steps and audits of the real
model (the other benches).
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from verify.sampling import margins, sample
from verify.toploc import build_many, compare_many

HIDDEN, INNER, VOCABULARY, LAYERS, BATCH, CHUNKS = 576, 1536, 49_152, 30, 16, 64


def milliseconds(work: Callable[[], object], repeat: int = 12) -> float:
    """The median of `repeat` runs after one to warm up."""
    work()
    taken = []
    for _ in range(repeat):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return sorted(taken)[repeat // 2] * 1e3


def decode_step(random: torch.Generator) -> Callable[[], torch.Tensor]:
    """The matrix products of one decode step; four layers' weights in turn, more than the caches hold."""
    shapes = [(HIDDEN, HIDDEN), (384, HIDDEN), (HIDDEN, HIDDEN), (2 * INNER, HIDDEN), (HIDDEN, INNER)]
    layers = [[torch.randn(shape, generator=random) for shape in shapes] for _ in range(4)]
    head = torch.randn(VOCABULARY, HIDDEN, generator=random)
    x, inner = torch.randn(BATCH, HIDDEN, generator=random), torch.randn(BATCH, INNER, generator=random)

    def step() -> torch.Tensor:
        for index in range(LAYERS):
            for weight in layers[index % 4]:
                torch.nn.functional.linear(x if weight.shape[1] == HIDDEN else inner, weight)
        return torch.nn.functional.linear(x, head)

    return step


def main() -> None:
    torch.set_num_threads(1)
    random = torch.Generator().manual_seed(0)
    step = decode_step(random)
    # A row of a language model: mostly far behind, a few close. Spread 3 is close to the real one.
    logits = torch.randn(BATCH, VOCABULARY, generator=random) * 3 + torch.randn(VOCABULARY, generator=random)
    seeds, positions, temperatures = list(range(BATCH)), list(range(BATCH)), [1.0] * BATCH
    tokens, _ = sample(logits, seeds, positions, temperatures)
    states = torch.randn(32 * CHUNKS, HIDDEN, generator=random).to(torch.bfloat16)
    proofs = build_many([states])
    flat = states.abs().reshape(CHUNKS, -1)

    plain = milliseconds(step)
    drawn = milliseconds(lambda: sample(logits, seeds, positions, temperatures))
    softmax = milliseconds(lambda: torch.multinomial(torch.softmax(logits, dim=1), 1))
    checked = milliseconds(lambda: margins(logits, seeds, positions, tokens, temperatures))
    scored = milliseconds(lambda: torch.log_softmax(logits, dim=1))
    built = milliseconds(lambda: build_many([states])) / CHUNKS
    verified = milliseconds(lambda: compare_many([(states, proofs[0])])) / CHUNKS
    topped = milliseconds(lambda: flat.topk(128, dim=1)) / CHUNKS

    evidence = drawn + BATCH * built / 32
    print(f"sampling      {drawn:7.2f} ms a step of {BATCH}   {drawn / plain:.3f} × the step's matrix products")
    print(f"              {softmax:7.2f} ms softmax and multinomial   {drawn / softmax:.2f} × of it")
    print(f"margins       {checked / BATCH:7.3f} ms a token   {checked / scored:.2f} × a log-softmax of the same rows")
    print(f"build proofs  {built:7.3f} ms a chunk   {built / topped:.2f} × torch.topk of the same values")
    print(f"verify proofs {verified:7.3f} ms a chunk   {verified / built:.2f} × building them")
    print(f"decode        {evidence:7.2f} ms a step for all evidence: {plain / (plain + evidence):.3f} of the speed")


if __name__ == "__main__":
    main()
