"""The numeric vectors: noise.json (SPEC 10.2 to 10.4), toploc.json (SPEC 10.5) and scores.json (SPEC 10.8), as
`build()` for generate.py.

The SPEC's arithmetic written a second time, slowly and in plain Python integers, so that a fault of the product's
numpy cannot hide in them. Not here: reading them (tests/protocol/test_noise.py, tests/verify/test_toploc.py).

noise.json
    noise   seed, position, tokens → hashes, and noise as exact f32
    draw    seed, position, temperature, logits → token, and its logprob to 1e-5
    margin  the same and token → margin to 1e-5
toploc.json
    prove    tokens, hidden, states → proofs
    compare  tokens, hidden, states, proofs → one result a chunk; means to 1e-9
    form     tokens, hidden, proofs → nothing, or the reason's code
scores.json
    bins      table, values → the bin of each
    scores    margins_table, proofs_table, margins, temperature, chunks as [tokens, mantissa mean] → S_j to 1e-9
    evidence  scores → E to 1e-9
    node      traces' scores in order → value to 1e-9, and failed, of the check `node` at each
`states` are bfloat16 bits in hex, u16 big-endian, row by row; or {"seed", "change"}: the i-th value is
(h(seed, 0, i) >> 16) & 0xBFFF, h of SPEC 10.2, then each index of `change` replaced by its value.
"""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

SPEC = "1.0"
P = 65497
TOP = 128
CHUNK = 32
MASK = 0xFFFFFFFF
ANSWER_SEED = 0x0123456789ABCDEF

Entry = dict[str, Any]
States = str | dict[str, Any]


def f32(number: float) -> float:
    rounded: float = struct.unpack("<f", struct.pack("<f", number))[0]
    return rounded


# --- SPEC 10.2 to 10.4 ---


def rotate(word: int, bits: int) -> int:
    return (word << bits | word >> (32 - bits)) & MASK


def murmur3(data: bytes) -> int:
    """MurmurHash3_x86_32 of whole words, hash seed 0."""
    state = 0
    for (word,) in struct.iter_unpack("<I", data):
        word = rotate(word * 0xCC9E2D51 & MASK, 15) * 0x1B873593 & MASK
        state = (rotate(state ^ word, 13) * 5 + 0xE6546B64) & MASK
    state ^= len(data)
    state = (state ^ state >> 16) * 0x85EBCA6B & MASK
    state = (state ^ state >> 13) * 0xC2B2AE35 & MASK
    return state ^ state >> 16


def hash_of(seed: int, position: int, token: int) -> int:
    return murmur3(struct.pack("<QII", seed, position, token))


def gumbel(word: int) -> float:
    u = min(f32((word >> 16) * 2.0**-16 + ((word & 0xFFFF) + 0.5) * 2.0**-32), 1 - 2.0**-24)
    return f32(-math.log(-math.log1p(-u)))


def scores(seed: int, position: int, temperature: float, logits: list[float]) -> list[float]:
    noise = [gumbel(hash_of(seed, position, token)) for token in range(len(logits))]
    return [f32(f32(logit / temperature) + g) for logit, g in zip(logits, noise, strict=True)]


def logits_of(seed: int, size: int, scale: float) -> list[float]:
    """Logits that are exact in f32: multiples of 1/64."""
    return [round(scale * gumbel(hash_of(seed, 1, token)) * 64) / 64 for token in range(size)]


def noise_file() -> Entry:
    valid: list[Entry] = []
    for name, comment, seed, position, tokens in (
        ("known_answers", "the answers SPEC 10.2 prints", ANSWER_SEED, 7, [0, 1, 2, 3]),
        ("smallest", "all inputs zero", 0, 0, [0]),
        ("largest", "all bits set", 2**64 - 1, MASK, [MASK]),
        ("high_half", "only the seed's high word differs from smallest", 2**32, 0, [0]),
        ("a_vocabulary", "the first and last ids of 49,152", ANSWER_SEED, 131_071, [0, 1, 24_576, 49_150, 49_151]),
    ):
        words = [hash_of(seed, position, token) for token in tokens]
        inputs = {"op": "noise", "seed": seed, "position": position, "tokens": tokens}
        value = {"hashes": words, "noise": [gumbel(word) for word in words]}
        valid.append({"name": name, "comment": comment, **inputs, "value": value})
    for name, comment, seed, temperature, logits in (
        ("draw_flat", "equal logits: the noise decides", 11, 1.0, [0.0] * 40),
        ("draw_one", "a vocabulary of one", 11, 1.0, [3.0]),
        ("draw_peaked", "one logit ahead of every noise", 12, 1.0, [0.0] * 9 + [60.0] + [0.0] * 9),
        ("draw_text", "logits of mixed size", 13, 1.0, logits_of(5, 200, 2.0)),
        ("draw_cold", "the same at temperature 0.5", 13, 0.5, logits_of(5, 200, 2.0)),
        ("draw_warm", "the same at temperature 1.25", 13, 1.25, logits_of(5, 200, 2.0)),
    ):
        reached = scores(seed, 4, temperature, logits)
        token = reached.index(max(reached))
        z = [f32(logit / temperature) for logit in logits]
        logprob = z[token] - max(z) - math.log(math.fsum(math.exp(x - max(z)) for x in z))
        inputs = {"seed": seed, "position": 4, "temperature": temperature, "logits": logits}
        drawn = {"token": token, "logprob": round(logprob, 7)}
        valid.append({"name": name, "comment": comment, "op": "draw", **inputs, "value": drawn})
        for label, claimed in (("drawn", token), ("other", (token + 1) % len(logits))):
            margin = round(max(reached) - reached[claimed], 7)
            entry = {"name": f"{name}_margin_{label}", "comment": f"the margin of the {label} token", "op": "margin"}
            valid.append({**entry, **inputs, "token": claimed, "value": margin})
    plain: Entry = {"seed": 1, "position": 1, "temperature": 1.0, "logits": [0.0, 1.0]}
    faults: tuple[tuple[str, str, Entry], ...] = (
        ("wide_seed", "a seed of 65 bits", {"op": "draw", **plain, "seed": 2**64}),
        ("negative_seed", "a seed below zero", {"op": "draw", **plain, "seed": -1}),
        ("wide_position", "a position of 33 bits", {"op": "draw", **plain, "position": 2**32}),
        ("cold", "temperature zero", {"op": "draw", **plain, "temperature": 0.0}),
        ("token_outside", "a claimed token past the vocabulary", {"op": "margin", **plain, "token": 2}),
    )
    invalid = [{"name": name, "comment": text, **inputs, "error": "USAGE"} for name, text, inputs in faults]
    return {"spec": SPEC, "section": "10.2", "valid": valid, "invalid": invalid}


# --- SPEC 10.5 ---


def expand(states: States, size: int) -> list[int]:
    if isinstance(states, str):
        return [value for (value,) in struct.iter_unpack(">H", bytes.fromhex(states))]
    values = [hash_of(states["seed"], 0, index) >> 16 & 0xBFFF for index in range(size)]
    for index, value in states.get("change", []):
        values[index] = value
    return values


def top(values: list[int]) -> list[int]:
    order = sorted(range(len(values)), key=lambda index: (-(values[index] & 0x7FFF), index))
    return sorted(order[:TOP])


def interpolate(points: list[tuple[int, int]]) -> list[int]:
    """Newton's divided differences modulo P, expanded into powers."""
    xs = [x for x, _ in points]
    differences = [y % P for _, y in points]
    for order in range(1, len(xs)):
        for row in range(len(xs) - 1, order - 1, -1):
            gap = pow(xs[row] - xs[row - order], -1, P)
            differences[row] = (differences[row] - differences[row - 1]) * gap % P
    result = [0]
    for x, difference in zip(reversed(xs), reversed(differences), strict=True):
        result = [(a - x * b) % P for a, b in zip([0, *result], [*result, 0], strict=True)]
        result[0] = (result[0] + difference) % P
    return result[: len(xs)]


def prove(values: list[int]) -> bytes:
    chosen = top(values)
    modulus = next(m for m in range(P, 2**15, -1) if len({index % m for index in chosen}) == len(chosen))
    coefficients = interpolate([(index % modulus, values[index]) for index in chosen])
    return struct.pack(f">{1 + len(chosen)}H", modulus, *coefficients)


def chunks(values: list[int], hidden: int) -> list[list[int]]:
    return [values[start : start + CHUNK * hidden] for start in range(0, len(values), CHUNK * hidden)]


def compare(values: list[int], proof: bytes) -> Entry:
    modulus, *coefficients = (word for (word,) in struct.iter_unpack(">H", proof))
    chosen = top(values)

    def claimed(index: int) -> int:
        total = 0
        for coefficient in reversed(coefficients):
            total = (total * (index % modulus) + coefficient) % P
        return total

    def exponent(value: int) -> int:
        return value >> 7 & 0xFF

    pairs = [(values[index], claimed(index)) for index in chosen]
    errors = sorted(abs((a & 0x7F) - (b & 0x7F)) for a, b in pairs if exponent(a) == exponent(b))
    own = {index % modulus for index in chosen}
    beside = [(index + 1) % modulus for index in chosen[:32]]
    plausible = {exponent(values[index]) for index in chosen}
    middle = (errors[(len(errors) - 1) // 2] + errors[len(errors) // 2]) / 2 if errors else 128.0
    return {
        "exponent_mismatches": len(pairs) - len(errors),
        "sign_mismatches": sum(a >> 15 != b >> 15 for a, b in pairs),
        "mantissa_mean": sum(errors) / len(errors) if errors else 128.0,
        "mantissa_median": middle,
        "compared": len(pairs),
        "elsewhere": sum(x not in own and exponent(claimed(x)) in plausible for x in beside),
    }


def toploc_file() -> Entry:
    valid: list[Entry] = []
    ties: States = {"seed": 21, "change": [[i, 0x3F00 | i % 2 << 15] for i in range(3, 512, 3)]}
    zeros: States = {"seed": 25, "change": [[i, i % 4 << 14 & 0x8000] for i in range(160) if i % 5 < 2]}
    twice: States = {"seed": 1, "change": [[i, 0x7F00 + i % 99] for i in (7, 7 + P, 60_000, 60_000 + P - 1)]}
    for name, comment, tokens, hidden, states in (
        ("one_chunk", "32 positions of 8 values", 32, 8, {"seed": 20}),
        ("ties", "170 values share the magnitude of the last rank: the lower indices", 32, 16, ties),
        ("tail", "one whole chunk and one of a single position", 33, 8, {"seed": 22}),
        ("few_values", "8 positions of 5 values: 40 points", 8, 5, {"seed": 23}),
        ("three_values", "one position of 3 values: 3 points", 1, 3, "3f80bf004040"),
        ("one_value", "one position of one value: the value itself", 1, 1, "c0a0"),
        ("a_zero_of_three", "one coefficient of three is zero, which a short proof may have", 1, 3, "000040403f80"),
        ("unjudged", "7 positions, whose proof is as long as any and is not judged", 7, 64, {"seed": 26}),
        ("zeros", "64 of 160 values are zeros of both signs: the lower indices fill the last 32 ranks", 8, 20, zeros),
        ("wide", "two indices are equal modulo 65497, so the modulus is smaller", 32, 4096, {"seed": WIDE_SEED}),
        ("wide_apart", "131,072 values whose largest 65497 keeps apart", 32, 4096, {"seed": 3}),
        ("wide_twice", "neither 65497 nor 65496 keeps the indices apart", 32, 4096, twice),
        ("wide_tail", "a shorter chunk of more than 65497 values", 13, 5120, {"seed": 4}),
    ):
        values = expand(states, tokens * hidden)
        proofs = [prove(chunk) for chunk in chunks(values, hidden)]
        shape: Entry = {"tokens": tokens, "hidden": hidden, "states": states}
        text = [proof.hex() for proof in proofs]
        results = [compare(chunk, proof) for chunk, proof in zip(chunks(values, hidden), proofs, strict=True)]
        valid.append({"name": name, "comment": comment, "op": "prove", **shape, "value": text})
        again = {"name": f"{name}_compared", "comment": "held against its own states", "op": "compare"}
        valid.append({**again, **shape, "proofs": text, "value": results})
    values = expand({"seed": 20}, 256)
    proof = prove(values)
    chosen = top(values)
    for name, comment, change in (
        ("sign_flips", "the signs of 10 of the largest states differ", [[i, values[i] ^ 0x8000] for i in chosen[:10]]),
        ("last_places", "40 mantissas differ by one", [[i, values[i] ^ 1] for i in chosen[:40]]),
        ("one_exponent", "an exponent differs by one", [[chosen[5], values[chosen[5]] ^ 0x80]]),
        ("another_trace", "other states altogether", None),
    ):
        states = {"seed": 20, "change": change} if change else {"seed": 24}
        result = compare(expand(states, 256), proof)
        shape = {"tokens": 32, "hidden": 8, "states": states, "proofs": [proof.hex()]}
        valid.append({"name": name, "comment": comment, "op": "compare", **shape, "value": [result]})
    return {
        "spec": SPEC,
        "section": "10.5",
        "valid": valid + well_formed(proof),
        "invalid": malformed(proof) + without_proof(),
    }


def well_formed(proof: bytes) -> list[Entry]:
    """What is at the edge and still has the form of a proof."""
    head, body = proof[:2], proof[2:]
    kept: tuple[tuple[str, str, int, int, list[bytes]], ...] = (
        ("none_needed", "no tokens, no proofs", 0, 8, []),
        ("sixteen_zeros", "16 of 128 coefficients are zero", 32, 8, [head + body[:224] + bytes(32)]),
        ("coefficient_highest", "a coefficient of 65496", 32, 8, [head + body[:-2] + bytes.fromhex("ffd8")]),
        ("modulus_lowest", "2^15 + 1 over 131,072 values", 32, 4096, [bytes.fromhex("8001") + body]),
        ("modulus_smaller", "65496 where indices may be above", 32, 4096, [bytes.fromhex("ffd8") + body]),
        ("short_tail", "one position of 3 values after a whole chunk of 96", 33, 3, [head + body[:192], proof[:8]]),
    )
    return [
        {"name": f"form_{name}", "comment": comment, "op": "form", "tokens": tokens, "hidden": hidden}
        | {"proofs": [data.hex() for data in proofs], "value": None}
        for name, comment, tokens, hidden, proofs in kept
    ]


def without_proof() -> list[Entry]:
    """States that nothing can be committed to: an error, and never a proof."""
    faults: tuple[tuple[str, str, int, int, States], ...] = (
        ("nan", "a state is not a number", 32, 8, {"seed": 20, "change": [[200, 0x7FC0]]}),
        ("infinity", "a state is infinite", 32, 8, {"seed": 20, "change": [[200, 0x7F80]]}),
        (
            "negative_infinity",
            "a state of the last, short chunk is infinite",
            33,
            8,
            {"seed": 20, "change": [[263, 0xFF80]]},
        ),
        ("small_nan", "a state of a chunk that is all points is not a number", 1, 3, "3f80ff814040"),
        (
            "all_zero_states",
            "the polynomial would be zero",
            32,
            8,
            {"seed": 20, "change": [[i, 0] for i in range(256)]},
        ),
        ("all_one_states", "it would be constant", 32, 8, {"seed": 20, "change": [[i, 0x3F80] for i in range(256)]}),
        ("straight", "it would have degree 1", 1, 4, "0100010101020103"),
    )
    return [
        {"name": name, "comment": comment, "op": "prove", "tokens": tokens, "hidden": hidden}
        | {"states": states, "error": "ENGINE"}
        for name, comment, tokens, hidden, states in faults
    ]


def malformed(proof: bytes) -> list[Entry]:
    """Proofs of 32 positions of 8 values, and of a few shorter spans, each broken in one way by hand."""
    head, body = proof[:2], proof[2:]
    value, zero = bytes.fromhex("3f80"), bytes(2)
    one, tail = proof, proof[:18]  # 33 positions of 8 values: 128 points and 8
    # name, comment, hidden size, proofs
    faults: tuple[tuple[str, str, int, list[bytes]], ...] = (
        ("none", "no proof at all", 8, []),
        ("extra", "a proof more than chunks", 8, [proof, proof]),
        ("empty", "no bytes", 8, [b""]),
        ("truncated", "the last coefficient is missing", 8, [proof[:-2]]),
        ("odd", "the last byte is missing", 8, [proof[:-1]]),
        ("long", "a coefficient too many", 8, [proof + zero]),
        ("modulus_only", "two bytes", 8, [head]),
        ("modulus_zero", "modulus 0", 8, [zero + body]),
        ("modulus_low", "modulus 2^15", 4096, [bytes.fromhex("8000") + body]),
        ("modulus_high", "modulus 65498", 4096, [bytes.fromhex("ffda") + body]),
        ("modulus_not_largest", "65496 where 65497 serves", 8, [bytes.fromhex("ffd8") + body]),
        ("coefficient_high", "a coefficient of 65497", 8, [head + body[:-2] + bytes.fromhex("ffd9")]),
        ("all_ones", "every bit set", 8, [b"\xff" * 258]),
        ("all_zero", "every bit clear", 8, [bytes(258)]),
        ("zero", "the zero polynomial", 8, [head + bytes(256)]),
        ("constant", "a constant polynomial", 8, [head + value + bytes(254)]),
        ("low_degree", "17 of 128 coefficients are zero", 8, [head + body[:222] + bytes(34)]),
        ("modulus_zero_wide", "modulus 0 where indices may be above 65497", 4096, [zero + body]),
        ("modulus_one", "modulus 1, under which all indices are one", 4096, [bytes.fromhex("0001") + body]),
    )
    shorter: tuple[tuple[str, str, int, int, list[bytes]], ...] = (
        ("tail_missing", "the last position has no proof", 33, 8, [one]),
        ("tail_whole", "the last position's proof has 128 points of 8", 33, 8, [one, one]),
        ("tail_first", "the two proofs are swapped", 33, 8, [tail, one]),
        ("tail_modulus", "modulus 0 in the shorter proof alone", 33, 8, [one, zero + tail[2:]]),
        ("few_degree", "2 of 8 coefficients are zero", 1, 8, [head + zero + body[:12] + zero]),
        ("one_value_zero", "the only coefficient is zero", 1, 1, [head + zero]),
        ("tokens_none", "a proof of no tokens", 0, 8, [one]),
    )
    every = [(name, comment, 32, hidden, proofs) for name, comment, hidden, proofs in faults] + list(shorter)
    return [
        {"name": name, "comment": comment, "op": "form", "tokens": tokens, "hidden": hidden}
        | {"proofs": [data.hex() for data in proofs], "error": "PROOF_FORM"}
        for name, comment, tokens, hidden, proofs in every
    ]


# --- SPEC 10.8 ---

ENOUGH = math.log(10**6)
MARGIN_TABLE: Entry = {
    "edges": [0.0, 0.02, 0.5],
    "alternatives": [
        {"name": "noise", "scores": [-0.125, 0.5, 1.0, 1.5]},
        {"name": "unseeded", "scores": [-0.75, 2.5, 4.5, 5.0]},
    ],
}
PROOF_TABLE: Entry = {"edges": [1.25, 2.0], "alternatives": [{"name": "up", "scores": [-0.5, 0.25, 1.75]}]}


def bin_of(value: float, edges: list[float]) -> int:
    return sum(1 for edge in edges if edge < value)


def sums_of(table: Entry, values: list[float]) -> list[float]:
    edges = table["edges"]
    return [math.fsum(each["scores"][bin_of(x, edges)] for x in values) for each in table["alternatives"]]


def evidence_of(sums: list[float]) -> float:
    top = max(sums)
    return round(top + math.log(sum(math.exp(each - top) for each in sums) / len(sums)), 9)


def trace_of(margins: list[float], temperature: float, chunks: list[list[float]]) -> list[float]:
    """chunks: (tokens, mantissa mean) of each."""
    scaled = [margin * min(1.0, temperature) for margin in margins]
    means = [mean for length, mean in chunks if length >= 8]
    return sums_of(MARGIN_TABLE, scaled) + sums_of(PROOF_TABLE, means)


def node_of(traces: list[list[float]]) -> list[Entry]:
    """What the check `node` finds at each trace."""
    found, sums = [], [0.0] * len(traces[0])
    for scores in traces:
        sums = [a + b for a, b in zip(sums, scores, strict=True)]
        value = evidence_of(sums)
        found.append({"value": value, "failed": value > ENOUGH})
    return found


def scores_file() -> Entry:
    valid: list[Entry] = []
    values = [0.0, 1e-30, 0.02, 0.020000000000000004, 0.5, 1e9]
    places = [bin_of(x, MARGIN_TABLE["edges"]) for x in values]
    comment = "a value on an edge is below it"
    valid.append(
        {"name": "bins", "comment": comment, "op": "bins", "table": MARGIN_TABLE, "values": values, "value": places}
    )
    tables: Entry = {"margins_table": MARGIN_TABLE, "proofs_table": PROOF_TABLE}
    for name, comment, margins, temperature, chunks in (
        ("honest", "every token the drawn one", [0.0] * 40, 1.0, [[32, 1.0], [8, 1.25]]),
        ("cold", "at temperature 0.5 margins count half", [0.0, 0.04, 1.0, 1.0625], 0.5, [[32, 2.0]]),
        ("warm", "above 1 they count whole", [0.0, 0.0625, 0.5], 1.25, [[32, 2.0625]]),
        ("short_tail", "a chunk of 7 tokens is not judged", [0.0] * 39, 1.0, [[32, 1.5], [7, 128.0]]),
        ("only_short", "no chunk is judged: its alternatives stay at 0", [0.0, 0.75], 1.0, [[2, 3.0]]),
        ("not_one_agrees", "a mantissa mean of 128", [0.0] * 32, 1.0, [[32, 128.0]]),
    ):
        inputs = {"margins": margins, "temperature": temperature, "chunks": chunks}
        answer = trace_of(margins, temperature, chunks)
        valid.append({"name": name, "comment": comment, "op": "scores", **tables, **inputs, "value": answer})
    for name, comment, sums in (
        ("evidence_none", "nothing said", [0.0, 0.0, 0.0]),
        ("evidence_one", "one alternative speaks", [12.0, -3.0, -40.0]),
        ("evidence_enough", "just above ln 10^6", [14.9142, -100.0, 2.0]),
        ("evidence_large", "sums whose exponential no double holds", [2000.0, 1999.5, -2000.0]),
        ("evidence_small", "sums far below zero", [-2000.0, -1999.5]),
    ):
        answer_ = evidence_of(sums)
        valid.append({"name": name, "comment": comment, "op": "evidence", "scores": sums, "value": answer_})
    for name, comment, traces in (
        ("node_honest", "evidence that only falls", [[-0.5, -1.0, -0.25]] * 5),
        ("node_slow", "too little a trace, enough at the sixth", [[2.5, -1.0, 0.5]] * 6),
        ("node_forgiven", "what was said against it is outweighed", [[9.0, 0.0, 0.0], [-9.0, 0.0, 0.0]]),
    ):
        valid.append({"name": name, "comment": comment, "op": "node", "traces": traces, "value": node_of(traces)})
    other: Entry = {"op": "node", "traces": [[1.0, 2.0], [1.0, 2.0, 3.0]], "error": "USAGE"}
    invalid = [{"name": "node_of_two_calibrations", "comment": "scores of different tables do not add up", **other}]
    return {"spec": SPEC, "section": "10.8", "valid": valid, "invalid": invalid}


WIDE_SEED = 2  # the first whose states need a modulus below 65497


def build() -> dict[str, Entry]:
    """File name → content."""
    return {"noise.json": noise_file(), "toploc.json": toploc_file(), "scores.json": scores_file()}


def main() -> None:
    for name, content in build().items():
        path = Path(__file__).resolve().parent / name
        path.write_text(json.dumps(content, indent=1, ensure_ascii=True, allow_nan=False) + "\n")


if __name__ == "__main__":
    main()
