"""TOPLOC proofs: the published bytes, the vectors, every malformed form, and what a comparison tells apart."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.errors import Code, EngineError, UsageError
from protocol.noise import hash_prefix, hashes, token_keys
from verify.field import P, evaluate, interpolate
from verify.thresholds import limits_for
from verify.toploc import (
    Bits,
    ChunkResult,
    ProofError,
    bits_of,
    build_many,
    build_proofs,
    check_form,
    compare_many,
    compare_proofs,
    judge_proofs,
    parse_proof,
)

torch.set_num_threads(1)

VECTORS = Path(__file__).parent.parent / "vectors"
ENTRIES = json.loads((VECTORS / "toploc.json").read_text())
PUBLISHED = json.loads((VECTORS / "toploc_public_example.json").read_text())["chunks"]
FP32 = limits_for("float32", "float32")
BF16 = limits_for("bfloat16", "bfloat16")


def states(tokens: int, hidden: int, seed: int = 0) -> torch.Tensor:
    """Hidden states with a few dominant dimensions, as real final norms have."""
    random = torch.Generator().manual_seed(seed)
    scale = torch.rand(hidden, generator=random).pow(4) * 10 + 0.1
    return torch.randn(tokens, hidden, generator=random) * scale


def from_hex(text: str, tokens: int, hidden: int) -> Bits:
    return np.frombuffer(bytes.fromhex(text), dtype=">u2").astype(np.uint16).reshape(tokens, hidden)


def expand(entry: dict[str, Any]) -> Bits:
    tokens, hidden, given_states = entry["tokens"], entry["hidden"], entry["states"]
    if isinstance(given_states, str):
        return from_hex(given_states, tokens, hidden)
    prefix = np.uint32(hash_prefix(given_states["seed"], 0))
    words = hashes(prefix, token_keys(np.arange(tokens * hidden)))
    values = ((words >> np.uint32(16)) & np.uint32(0xBFFF)).astype(np.uint16)
    for index, value in given_states.get("change", []):
        values[index] = value
    return values.reshape(tokens, hidden)


def named(entries: list[dict[str, Any]], *ops: str) -> list[Any]:
    return [pytest.param(entry, id=entry["name"]) for entry in entries if entry["op"] in ops]


# --- against the outside, and against the vectors ---


def test_the_published_example_names_its_source() -> None:
    assert "Prime Intellect" in json.loads((VECTORS / "toploc_public_example.json").read_text())["source"]


@pytest.mark.parametrize("chunk", PUBLISHED)
def test_the_proofs_published_by_the_format_s_authors_come_out_byte_for_byte(chunk: dict[str, Any]) -> None:
    bits = from_hex(chunk["bits"], *chunk["shape"])
    assert build_many([bits], k=chunk["k"]) == [(bytes.fromhex(chunk["proof"]),)]
    (result,) = compare_many([(bits, [bytes.fromhex(chunk["proof"])])], k=chunk["k"])[0]
    assert (result.exponent_mismatches, result.sign_mismatches, result.mantissa_mean) == (0, 0, 0.0)


@pytest.mark.parametrize("entry", named(ENTRIES["valid"], "prove"))
def test_a_proof_is_that_of_the_vector(entry: dict[str, Any]) -> None:
    assert [proof.hex() for proof in build_proofs(expand(entry))] == entry["value"]


@pytest.mark.parametrize("entry", named(ENTRIES["valid"], "compare"))
def test_a_comparison_measures_what_the_vector_says(entry: dict[str, Any]) -> None:
    results = compare_proofs(expand(entry), [bytes.fromhex(proof) for proof in entry["proofs"]])
    assert len(results) == len(entry["value"])
    for result, expected in zip(results, entry["value"], strict=True):
        measured = {key: getattr(result, key) for key in expected}
        assert measured == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("entry", named(ENTRIES["invalid"], "form"))
def test_a_malformed_proof_is_refused_for_its_fault(entry: dict[str, Any]) -> None:
    reasons = {
        "none": "0 proofs for 32 tokens, which need 1",
        "extra": "2 proofs for 32 tokens, which need 1",
        "empty": "0 bytes, not 258",
        "truncated": "256 bytes",
        "odd": "257 bytes",
        "long": "260 bytes",
        "modulus_only": "2 bytes",
        "modulus_zero": "modulus 0 is not in",
        "modulus_low": "modulus 32768 is not in",
        "modulus_high": "modulus 65498 is not in",
        "modulus_not_largest": "modulus 65496 is not the largest",
        "coefficient_high": "coefficient 127 is not below 65497",
        "all_ones": "modulus 65535 is not in",
        "all_zero": "modulus 0 is not in",
        "zero": "the polynomial is zero",
        "constant": "the polynomial is constant",
        "low_degree": "17 of 128 coefficients are zero",
        "modulus_zero_wide": "modulus 0 is not in",
        "modulus_one": "modulus 1 is not in",
        "tail_missing": "1 proofs for 33 tokens, which need 2",
        "tail_whole": "proof 1: 258 bytes, not 18",
        "tail_first": "proof 0: 18 bytes, not 258",
        "tail_modulus": "proof 1: modulus 0 is not in",
        "few_degree": "2 of 8 coefficients are zero",
        "one_value_zero": "the polynomial is zero",
        "tokens_none": "1 proofs for 0 tokens, which need 0",
    }
    with pytest.raises(ProofError) as caught:
        check_form([bytes.fromhex(proof) for proof in entry["proofs"]], entry["tokens"], entry["hidden"])
    assert reasons[entry["name"]] in str(caught.value)
    assert caught.value.code is Code.MALFORMED


@pytest.mark.parametrize("entry", named(ENTRIES["valid"], "form"))
def test_what_is_only_just_a_proof_is_taken(entry: dict[str, Any]) -> None:
    parsed = check_form([bytes.fromhex(proof) for proof in entry["proofs"]], entry["tokens"], entry["hidden"])
    assert len(parsed) == len(entry["proofs"])


@pytest.mark.parametrize("entry", named(ENTRIES["invalid"], "prove"))
def test_where_no_proof_can_be_made_there_is_none_for_any_trace_of_the_batch(entry: dict[str, Any]) -> None:
    good = bits_of(states(64, entry["hidden"]))
    for batch in ([expand(entry)], [good, expand(entry)], [expand(entry), good]):
        with pytest.raises(EngineError, match=r"no proof can be made|too uniform to commit to"):
            build_many(batch)


def test_the_wide_vectors_really_have_the_moduli_they_are_there_for() -> None:
    proofs = {e["name"]: bytes.fromhex(e["value"][0]) for e in ENTRIES["valid"] if e["op"] == "prove"}
    moduli = {name: int.from_bytes(proof[:2], "big") for name, proof in proofs.items() if name.startswith("wide")}
    assert P > moduli["wide"] > moduli["wide_twice"] and moduli["wide_apart"] == P
    assert parse_proof(proofs["wide"], 32 * 4096)[0] == moduli["wide"]


def test_without_a_modulus_there_is_no_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    (entry,) = [e for e in ENTRIES["valid"] if e["name"] == "wide"]
    monkeypatch.setattr("verify.toploc.PROOF_MIN_MODULUS_EXCLUSIVE", P - 1)  # the range the modulus is sought in
    with pytest.raises(EngineError, match="no modulus keeps the indices"):
        build_proofs(expand(entry))


# --- the field ---


@settings(max_examples=40, deadline=None)
@given(st.data(), st.integers(1, 128), st.integers(1, 5))
def test_interpolation_goes_through_its_points(data: st.DataObject, points: int, count: int) -> None:
    random = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    x = np.stack([random.choice(P, points, replace=False) for _ in range(count)])
    y = random.integers(0, P, (count, points))
    coefficients = interpolate(x, y)
    assert coefficients.shape == (count, points)
    assert ((coefficients >= 0) & (coefficients < P)).all()
    assert (evaluate(coefficients, x) == y).all()
    slow = [sum(int(c) * pow(int(x[0, 0]), i, P) for i, c in enumerate(coefficients[0])) % P]
    assert slow == [y[0, 0]]


def test_the_field_is_exact_at_its_largest_values() -> None:
    x = np.arange(P - 128, P)[None]
    y = np.full((1, 128), P - 1)
    y[0, 0] = 0
    assert (evaluate(interpolate(x, y), x) == y).all()


# --- building ---


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 100), st.sampled_from([1, 3, 64, 100, 576]), st.integers(0, 2**30))
def test_every_state_matches_its_own_proofs(tokens: int, hidden: int, seed: int) -> None:
    hidden_states = states(tokens, hidden, seed)
    if tokens * hidden < 3:
        return
    proofs = build_proofs(hidden_states)
    assert len(proofs) == -(-tokens // 32)
    for index, proof in enumerate(proofs):
        values = min(32, tokens - 32 * index) * hidden
        assert len(proof) == 2 + 2 * min(128, values)
    for result in compare_proofs(hidden_states, proofs):
        assert (result.exponent_mismatches, result.sign_mismatches) == (0, 0)
        assert (result.mantissa_mean, result.mantissa_median) == (0.0, 0.0)


def test_wider_floats_are_rounded_to_nearest_even() -> None:
    exact = states(40, 64)
    halves = torch.tensor([[1 + 2**-8, 1 + 3 * 2**-8, -(1 + 2**-8)]])
    assert (bits_of(halves) == [[0x3F80, 0x3F82, 0xBF80]]).all()
    assert build_proofs(exact) == build_proofs(exact.to(torch.bfloat16))
    assert build_proofs(exact) == build_proofs(bits_of(exact))


def test_ties_at_the_last_rank_go_to_the_lower_index() -> None:
    values = np.zeros(1024, dtype=np.uint16)
    values[[700, 3, 900]] = 0x4000  # three above the tie, of which there are 200 for 125 places
    values[100:300] = 0xBF80
    values += (np.arange(1024) % 2 == 0).astype(np.uint16) * 0x8000  # signs do not rank
    proof = build_proofs(values.reshape(32, 32))[0]
    modulus, coefficients = parse_proof(proof, 1024)
    taken = np.array([3, 700, 900, *range(100, 225)])
    assert (evaluate(coefficients[None], taken[None] % modulus)[0] == values[taken]).all()
    left = evaluate(coefficients[None], np.arange(225, 300)[None])[0]
    assert np.count_nonzero(left == values[225:300]) < 3


def test_many_traces_at_once_give_the_proofs_and_results_of_each_alone() -> None:
    traces = [states(tokens, 64, tokens) for tokens in (1, 31, 32, 33, 70, 2500)]
    together = build_many(traces)
    assert together == [build_proofs(trace) for trace in traces]
    compared = compare_many(list(zip(traces, together, strict=True)))
    assert compared == [compare_proofs(t, p) for t, p in zip(traces, together, strict=True)]
    assert [(r.start, r.length) for r in compared[4]] == [(0, 32), (32, 32), (64, 6)]


def test_no_tokens_need_no_proofs() -> None:
    assert build_proofs(torch.zeros(0, 64)) == ()
    assert compare_proofs(torch.zeros(0, 64), []) == []


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_states_that_are_not_finite_give_no_proof_and_no_comparison(value: float) -> None:
    good = states(64, 64)
    bad = good.clone()
    bad[40, 7] = value
    with pytest.raises(EngineError, match="NaN or infinite"):
        build_proofs(bad)
    with pytest.raises(EngineError, match="NaN or infinite"):
        compare_proofs(bad, build_proofs(good))


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_states_too_uniform_to_commit_to_give_no_proof(value: float) -> None:
    with pytest.raises(EngineError, match="too uniform"):
        build_proofs(torch.full((32, 64), value))


@pytest.mark.parametrize(
    "wrong", [torch.zeros(64), torch.zeros(2, 2, dtype=torch.int64), np.zeros((2, 2)), np.zeros(4, dtype=np.uint16)]
)
def test_what_is_not_hidden_states_is_named(wrong: Any) -> None:
    with pytest.raises(UsageError, match="hidden states"):
        build_proofs(wrong)


# --- telling apart ---


def judged(ours: torch.Tensor | Bits, proofs: tuple[bytes, ...]) -> bool:
    """By the wider limits: what they refuse, the tighter ones refuse as well."""
    results = compare_proofs(ours, proofs)
    wide, tight = judge_proofs(results, BF16), judge_proofs(results, FP32)
    assert tight.ok <= wide.ok
    return wide.ok


@pytest.mark.parametrize("hidden", [64, 576])
def test_an_honest_kernel_s_rounding_is_never_refused(hidden: int) -> None:
    ours = states(32 * 64, hidden)
    random = torch.Generator().manual_seed(1)
    for relative in (1e-6, 1e-5, 1e-4):
        theirs = ours * (1 + relative * torch.randn(ours.shape, generator=random))
        verdict = judge_proofs(compare_proofs(ours, build_proofs(theirs)), FP32)
        assert verdict.ok, verdict.detail


def test_states_off_by_a_thousandth_are_refused_between_float32_engines() -> None:
    ours = states(320, 576)
    theirs = ours * (1 + 2e-3 * torch.randn(ours.shape, generator=torch.Generator().manual_seed(2)))
    verdict = judge_proofs(compare_proofs(ours, build_proofs(theirs)), FP32)
    assert not verdict.ok and "mantissa mean" in verdict.detail and verdict.value > 1.0 == verdict.limit


def test_other_states_of_the_right_shape_and_scale_are_refused() -> None:
    ours = states(64, 576)
    assert not judged(ours, build_proofs(states(64, 576, seed=9)))


def test_a_proof_replayed_from_elsewhere_in_the_trace_is_refused() -> None:
    ours = states(64, 576)
    first, second = build_proofs(ours)
    assert not judged(ours, (second, first))
    assert not judged(ours, (first, first))


def test_noise_instead_of_a_proof_is_refused() -> None:
    random = np.random.default_rng(3)
    noise = b"\xff\xd9" + random.integers(0, P, 128).astype(">u2").tobytes()
    assert not judged(states(32, 576), (noise,))


def test_a_template_of_likely_dimensions_is_refused() -> None:
    past = states(3200, 576)
    template = past.mean(0).repeat(32, 1) + past.abs().mean(0)
    assert not judged(past[:32], build_proofs(template))


def test_flipped_signs_alone_are_refused() -> None:
    ours = bits_of(states(32, 576))
    results = compare_proofs(ours, build_proofs(ours ^ np.uint16(0x8000)))
    assert results[0].exponent_mismatches == 0 and results[0].sign_mismatches == 128
    verdict = judge_proofs(results, BF16)
    assert not verdict.ok and "sign" in verdict.detail


def test_a_polynomial_that_is_plausible_everywhere_is_refused() -> None:
    honest = ChunkResult(0, 32, 0, 0, 0.0, 0.0, compared=128, elsewhere=3)
    forged = ChunkResult(32, 32, 0, 0, 0.0, 0.0, compared=128, elsewhere=30)
    verdict = judge_proofs([honest, forged], BF16)
    assert not verdict.ok and "elsewhere" in verdict.detail and verdict.span == (32, 64)
    assert judge_proofs([honest], BF16).ok


def test_a_chunk_under_eight_tokens_is_reported_and_never_judged() -> None:
    ours, theirs = states(39, 64), states(39, 64)
    theirs[32:] = states(7, 64, seed=5)
    results = compare_proofs(ours, build_proofs(theirs))
    assert results[1].length == 7 and results[1].exponent_mismatches > 20
    assert judge_proofs(results, FP32).ok
    assert judge_proofs(results[1:], FP32).ok
    theirs = states(40, 64)
    theirs[32:] = states(8, 64, seed=5)
    verdict = judge_proofs(compare_proofs(states(40, 64), build_proofs(theirs)), FP32)
    assert not verdict.ok and verdict.span == (32, 40)


def test_limits_shrink_with_the_points_of_a_small_chunk() -> None:
    small = ChunkResult(0, 8, 5, 0, 0.0, 0.0, compared=32, elsewhere=0)
    whole = ChunkResult(0, 32, 5, 0, 0.0, 0.0, compared=128, elsewhere=0)
    assert judge_proofs([whole], FP32).ok
    assert not judge_proofs([small], FP32).ok


def test_where_no_exponent_agrees_the_mantissa_error_is_the_largest() -> None:
    result = compare_proofs(np.full((8, 3), 0x3F80, np.uint16), [build_proofs(bits_of(states(8, 3) * 1e-9))[0]])[0]
    assert result.exponent_mismatches == 24 and result.mantissa_mean == 128.0 == result.mantissa_median
    assert not judge_proofs([result], BF16).ok
