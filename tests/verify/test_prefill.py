"""The auditor's prefill: the same numbers whatever is recomputed together, and our faults are errors."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from node.engine import SequenceRequest, TurnDone
from node.transformers_engine import TransformersEngine
from protocol.errors import EngineError, UsageError
from verify.model import PolicyModel
from verify.prefill import Passage, Recomputed, Verifier
from verify.sampling import judge_margins, margins, sample
from verify.thresholds import limits_for
from verify.toploc import compare_proofs, judge_proofs

ROOT = Path(__file__).parents[2]
EMBEDDED = ROOT / "trainer" / "embedded"
SMOLLM2 = Path(os.environ.get("RLCOMMONS_SMOLLM2", ROOT / ".cache" / "smollm2"))


@pytest.fixture(scope="module")
def verifier() -> Verifier:
    return Verifier(EMBEDDED, threads=1)


def make_passage(seed: int, prompt: int, tokens: int, observed: tuple[int, int] = (0, 0)) -> Passage:
    """Random ids; the tokens from `observed[0]` up to `observed[1]` are the environment's."""
    draw = random.Random(seed)
    ids = [draw.randrange(10, 106) for _ in range(prompt + tokens)]
    generated = tuple(i for i in range(tokens) if not observed[0] <= i < observed[1])
    return Passage(tuple(ids[:prompt]), tuple(ids[prompt:]), generated, 1_000 + seed, 1.0)


def by_hand(policy: Path, passage: Passage) -> Recomputed:
    """The definition, without batching: all logits of one row, then the sampler's margins."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    with torch.inference_mode():
        out = model(torch.tensor([passage.prompt + passage.tokens]), output_hidden_states=True)
    rows = [len(passage.prompt) - 1 + offset for offset in passage.generated]
    count = len(rows)
    measured = margins(
        out.logits[0, rows],
        [passage.seed] * count,
        rows,
        [passage.tokens[offset] for offset in passage.generated],
        [passage.temperature] * count,
    )
    return Recomputed(measured.margins, measured.logprobs, out.hidden_states[-1][0, rows])


def assert_same(ours: Recomputed, theirs: Recomputed) -> None:
    assert torch.allclose(ours.margins, theirs.margins, atol=1e-3)
    assert torch.allclose(ours.logprobs, theirs.logprobs, atol=1e-4)
    assert ours.hidden.dtype == torch.bfloat16
    assert torch.allclose(ours.hidden.float(), theirs.hidden.float(), rtol=1e-2, atol=1e-2)


def test_every_passage_is_recomputed_as_by_hand(verifier: Verifier) -> None:
    passages = [
        make_passage(1, 20, 30),
        make_passage(2, 3, 1),
        make_passage(3, 100, 70, observed=(20, 45)),
        make_passage(4, 1, 40),
        make_passage(5, 50, 33, observed=(30, 33)),  # ends with what nobody drew
    ]
    for passage, ours in zip(passages, verifier.recompute(passages), strict=True):
        assert len(ours.margins) == len(ours.logprobs) == len(ours.hidden) == len(passage.generated)
        assert_same(ours, by_hand(EMBEDDED, passage))


def test_a_shared_prompt_changes_nothing(verifier: Verifier) -> None:
    prompt = make_passage(9, 150, 1).prompt
    group = [
        Passage(prompt, each.tokens, each.generated, each.seed, 1.0)
        for each in (make_passage(seed, 5, 10 + 7 * seed, observed=(3, 6)) for seed in range(8))
    ]
    together = verifier.recompute(group)
    for passage, ours in zip(group, together, strict=True):
        assert_same(ours, verifier.recompute([passage])[0])


def test_company_and_order_change_nothing(verifier: Verifier) -> None:
    passages = [make_passage(seed, 5 + 13 * seed % 60, 10 + 29 * seed % 90) for seed in range(40)]
    forward, backward = verifier.recompute(passages), verifier.recompute(passages[::-1])
    for passage, one, other in zip(passages, forward, backward[::-1], strict=True):
        assert_same(one, other)
        assert len(one.margins) == len(passage.tokens)


def test_tokens_drawn_with_the_seed_have_no_margin_and_others_do(verifier: Verifier) -> None:
    passage = make_passage(7, 12, 1)
    tokens: list[int] = []
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(EMBEDDED, dtype=torch.float32)
    for _ in range(24):
        ids = torch.tensor([[*passage.prompt, *tokens]])
        with torch.inference_mode():
            logits = model(ids).logits[:, -1]
        tokens.append(int(sample(logits, [passage.seed], [ids.shape[1] - 1], [2.0])[0]))
    drawn = Passage(passage.prompt, tuple(tokens), tuple(range(24)), passage.seed, 2.0)
    other_seed = Passage(passage.prompt, tuple(tokens), tuple(range(24)), passage.seed + 1, 2.0)
    honest, lie = verifier.recompute([drawn, other_seed])
    assert float(honest.margins.max()) < 1e-3
    assert float(lie.margins.max()) > 1.0


def test_a_model_with_a_soft_cap_is_recomputed_with_it(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "gemma2", vocab_size=106, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=256, sliding_window=8, final_logit_softcapping=1.5,
        query_pre_attn_scalar=8, initializer_range=0.3,
    )  # fmt: skip
    torch.manual_seed(0)
    make: Any = AutoModelForCausalLM.from_config
    make(config).save_pretrained(tmp_path)
    verifier = Verifier(tmp_path, threads=1)
    group = [make_passage(seed, 20, 30) for seed in range(3)]
    group += [Passage(make_passage(9, 200, 1).prompt, p.tokens, p.generated, p.seed, 1.0) for p in group]
    for passage, ours in zip(group, verifier.recompute(group), strict=True):
        assert_same(ours, by_hand(tmp_path, passage))


def altered(folder: Path, name: str, value: float) -> Path:
    """A copy of the embedded policy with one number of one tensor replaced."""
    shutil.copytree(EMBEDDED, folder)
    weights = load_file(folder / "model.safetensors")
    weights[name][0] = value
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_a_swapped_version_is_recomputed_as_a_fresh_one(tmp_path: Path) -> None:
    other = altered(tmp_path / "other", "model.norm.weight", 3.0)
    passage = make_passage(3, 20, 40)
    swapped = Verifier(EMBEDDED, threads=1)
    before = swapped.recompute([passage])[0]
    swapped.swap(other)
    after = swapped.recompute([passage])[0]
    assert not torch.equal(before.logprobs, after.logprobs)
    assert torch.equal(after.logprobs, Verifier(other, threads=1).recompute([passage])[0].logprobs)
    swapped.swap(EMBEDDED)
    assert torch.equal(before.logprobs, swapped.recompute([passage])[0].logprobs)


def test_a_failed_swap_is_an_error_and_never_a_number(tmp_path: Path) -> None:
    verifier = Verifier(EMBEDDED, threads=1)
    broken = tmp_path / "broken"
    shutil.copytree(EMBEDDED, broken)
    (broken / "model.safetensors").write_bytes(b"")
    with pytest.raises(EngineError, match="broken"):
        verifier.swap(broken)
    with pytest.raises(EngineError, match="start it anew"):
        verifier.recompute([make_passage(1, 5, 5)])


def test_logits_that_are_not_finite_are_our_fault(tmp_path: Path) -> None:
    verifier = Verifier(altered(tmp_path / "nan", "model.norm.weight", float("nan")), threads=1)
    with pytest.raises(EngineError):
        verifier.recompute([make_passage(1, 5, 5)])


@pytest.mark.parametrize(
    ("passage", "match"),
    [
        (Passage((5, 6), (7, 106), (0, 1), 1, 1.0), "outside 0..105"),
        (Passage((-1,), (7,), (0,), 1, 1.0), "outside 0..105"),
        (Passage((), (7,), (0,), 1, 1.0), "no prompt"),
        (Passage((5,), (7,), (), 1, 1.0), "no generated token"),
        (Passage((5,), (7,), (1,), 1, 1.0), "does not have"),
        (Passage((5,) * 9_000, (7,), (0,), 1, 1.0), "positions"),
    ],
)
def test_what_no_model_could_run_is_refused(verifier: Verifier, passage: Passage, match: str) -> None:
    with pytest.raises(UsageError, match=match):
        verifier.recompute([make_passage(1, 5, 5), passage])


@pytest.mark.parametrize(
    "policy", [EMBEDDED, pytest.param(SMOLLM2, marks=pytest.mark.smollm2)], ids=lambda path: path.name
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_the_engine_draws_is_judged_honest_in_the_same_dtype(policy: Path, dtype: str) -> None:
    if not policy.is_dir():
        pytest.skip(f"no policy in {policy}: run scripts/convert-smollm2, or set RLCOMMONS_SMOLLM2")
    engine = TransformersEngine(dtype=dtype, slots=4, threads=1)
    engine.load(policy, bytes(32))
    prompts = [make_passage(index, 5 + 11 * index, 1).prompt for index in range(4)]
    for index, prompt in enumerate(prompts):
        engine.open(SequenceRequest(str(index), prompt, index, 1.0, 20))
    turns: dict[str, TurnDone] = {}
    for _ in range(1_000):
        turns.update((turn.key, turn) for turn in engine.step())
        if len(turns) == len(prompts):
            break
    passages = [
        Passage(prompt, turns[str(i)].tokens, tuple(range(len(turns[str(i)].tokens))), i, 1.0)
        for i, prompt in enumerate(prompts)
    ]
    limits = limits_for(dtype, dtype)
    for index, ours in enumerate(Verifier(policy, dtype, threads=1).recompute(passages)):
        chunks = compare_proofs(ours.hidden, engine.finish(str(index)))
        assert judge_proofs(chunks, limits).ok
        assert all(judgement.ok for judgement in judge_margins(ours.margins, limits))


def test_the_fingerprint_names_engine_and_precision(verifier: Verifier) -> None:
    found = verifier.fingerprint
    assert (found.engine, found.dtype, found.device) == ("transformers", "float32", "cpu")
    assert found.engine_version and found.torch_version


def test_packed_weights_compute_the_same_and_follow_a_swap(tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(EMBEDDED, other)
    tensors = load_file(other / "model.safetensors")
    save_file({name: tensor * 1.25 for name, tensor in tensors.items()}, other / "model.safetensors")
    plain, packed = PolicyModel(EMBEDDED, "float32", "cpu"), PolicyModel(EMBEDDED, "float32", "cpu")
    packed.pack()
    ids = torch.arange(40).reshape(2, 20)
    for model in (plain, packed):
        assert model.swap(other)
    with torch.inference_mode():
        for ours, theirs in zip(packed.run(ids, None), plain.run(ids, None), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
