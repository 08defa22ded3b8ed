"""How soon scores tell a cheat, simulated: tokens or chunks until the evidence is that of one in a million nodes.

`python tests/bench/bench_power.py`. A policy of 256 tokens whose contexts run from certain to open (G, the chance that
another seed gives another token, is printed) draws by the seeded rule; a worker's logits are off by normal errors. The
score table is made from honest tokens as calibration makes it, and cheats are held against it; beside each, what the
design's sequential test of two known distributions needed. Chunks are normal, with the means and spreads measured on
SmolLM2-135M in bfloat16. E averages over all alternatives of both tables, as a node's does. Not here: real models
(`rlverify controls`).

Exit code 1 where a bar is missed: each cheat within 32 traces of 64 tokens, but for those marked as left to chunks.
"""

from __future__ import annotations

import sys

import numpy as np
from numpy.typing import NDArray

from protocol.calibration import ScoreTable
from verify.scores import chunk_table, margin_table, power

Floats = NDArray[np.float64]
Ids = NDArray[np.int64]

TOKENS, VOCABULARY, CALIBRATION = 16_384, 256, 2_048
HONEST_SIGMA = 0.0175  # bfloat16 decoding against float32 prefill, as the design measured it
ALTERNATIVES = 9
BAR_TOKENS, BAR_CHUNKS = 32 * 64, 64
# Mantissa means of a chunk of 32 tokens: mean, what traces differ by, what chunks of a trace differ by.
HONEST_CHUNKS = (1.37, 0.2, 0.2)


class Contexts:
    """Logits [n, V] of contexts of all degrees of openness, with the noise of their seeds."""

    def __init__(self, count: int, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        sharpness = self.random.uniform(0.5, 6.0, (count, 1))
        self.logits = sharpness * self.random.normal(0, 1, (count, VOCABULARY))
        self.noise = self.random.gumbel(size=self.logits.shape)

    def draw(self, logits: Floats) -> Ids:
        """Tokens by the seed's noise."""
        return (logits + self.noise).argmax(axis=1)

    def noisy(self, sigma: float) -> Floats:
        return self.logits + self.random.normal(0, sigma, self.logits.shape)

    def unseeded(self) -> Ids:
        return (self.logits + self.random.gumbel(size=self.logits.shape)).argmax(axis=1)

    def margins(self, tokens: Ids) -> Floats:
        scores = self.logits + self.noise
        margins: Floats = scores.max(axis=1) - scores[np.arange(len(tokens)), tokens]
        return margins

    def logprobs(self, tokens: Ids) -> Floats:
        top = self.logits.max(axis=1, keepdims=True)
        total = top[:, 0] + np.log(np.exp(self.logits - top).sum(axis=1))
        found: Floats = self.logits[np.arange(len(tokens)), tokens] - total
        return found


def chunks(mean: float, apart: float, within: float, traces: int, seed: int) -> list[Floats]:
    """Two chunks a trace."""
    drawn = np.random.default_rng(seed)
    return [np.maximum(0.0, drawn.normal(mean, apart) + drawn.normal(0, within, 2)) for _ in range(traces)]


def calibrated(sigma: float) -> tuple[ScoreTable, float]:
    """A table of margins from honest tokens, and G."""
    sample = Contexts(CALIBRATION, 1)
    tokens = sample.draw(sample.noisy(sigma))
    logprobs = sample.logprobs(tokens)
    return margin_table(sample.margins(tokens), logprobs, np.ones(CALIBRATION)), float(np.mean(1 - np.exp(logprobs)))


def margin_rows(sigma: float) -> list[tuple[str, Floats, str, bool]]:
    """Name, margins, what the design's test needed, whether the bar holds."""
    test = Contexts(TOKENS, 2)
    honest = test.draw(test.noisy(sigma))
    spliced = np.where(test.random.random(TOKENS) < 0.1, test.unseeded(), honest)
    cheats = (
        ("tokens without the seed", test.unseeded(), "7", True),
        ("temperature 0.8", test.draw(test.logits / 0.8), "33", True),
        ("10 % spliced", spliced, "90", True),
        ("int4-like, error 0.4", test.draw(test.noisy(0.4)), "45 to 55", True),
        ("fp8-like, error 0.1", test.draw(test.noisy(0.1)), "thousands", False),
        ("honest", honest, "never", False),
    )
    return [(name, test.margins(tokens), design, bar) for name, tokens, design, bar in cheats]


def chunk_rows() -> list[tuple[str, list[Floats], bool]]:
    _, apart, within = HONEST_CHUNKS
    return [
        ("int8 weights", chunks(2.5, apart, within, 2_000, 11), True),
        ("fp8 weights", chunks(4.8, apart, within, 2_000, 12), True),
        ("1 % noise on weights", chunks(3.0, apart, within, 2_000, 13), True),
        ("int8 in every second trace", chunks(2.5, apart, within, 1_000, 14) + chunks(*HONEST_CHUNKS, 1_000, 15), True),
        ("one prompt token changed", chunks(1.6, apart, within, 2_000, 16), False),
        ("honest", chunks(*HONEST_CHUNKS, 2_000, 17), False),
    ]


def main() -> int:
    random, missed = np.random.default_rng(3), 0
    for sigma in (0.0, HONEST_SIGMA):
        table, diversity = calibrated(sigma)
        print(f"tokens needed; logits' error {sigma:g}, {CALIBRATION} honest tokens, G = {diversity:.2f}")
        print(f"{'':28} {'mean':>8} {'99 % within':>12}   known distributions")
        for name, margins, design, bar in margin_rows(sigma):
            found = power(table, margins, random=random, alternatives=ALTERNATIVES, runs=200)
            missed += bar and found.mean > BAR_TOKENS
            print(f"{name:28} {found.mean:8.0f} {found.most_of:12.0f}   {design}")
    table = chunk_table(chunks(*HONEST_CHUNKS, 32, 10))
    print("chunks needed; bfloat16, 64 honest chunks")
    print(f"{'':28} {'mean':>8} {'99 % within':>12}")
    for name, traces, bar in chunk_rows():
        found = power(table, np.concatenate(traces), random=random, alternatives=ALTERNATIVES, runs=200)
        missed += bar and found.mean > BAR_CHUNKS
        print(f"{name:28} {found.mean:8.0f} {found.most_of:12.0f}")
    print(f"{missed} bars missed" if missed else "every bar is met")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
