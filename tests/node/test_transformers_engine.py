"""The engine over transformers: company changes nothing, turns keep their cache, refusals say what to do."""

from __future__ import annotations

import json
import shutil
import time
from hashlib import sha256
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from node.engine import SequenceRequest, TurnDone, probe
from node.transformers_engine import TransformersEngine
from protocol.errors import EngineError, PolicyError
from protocol.policy import TensorLeaf, file_leaves, policy_root, root_of, tensor_places
from verify.model import PolicyModel
from verify.prefill import Passage, Recomputed, Verifier
from verify.toploc import compare_proofs

EMBEDDED = Path(__file__).parents[2] / "trainer" / "embedded"
ROOT = bytes(32)
PROMPTS = [tuple((7 * i + 3 * j) % 90 + 10 for j in range(5 + 9 * i)) for i in range(6)]
STEPS = 2_000


def make_engine(policy: Path = EMBEDDED, slots: int = 8) -> TransformersEngine:
    engine = TransformersEngine(slots=slots, threads=1)
    engine.load(policy, ROOT)
    return engine


@pytest.fixture
def engine() -> TransformersEngine:
    return make_engine()


@pytest.fixture(scope="module")
def verifier() -> Verifier:
    return Verifier(EMBEDDED, threads=1)


@pytest.fixture
def talkative(tmp_path: Path) -> Path:
    """The embedded policy with a stop token that it never draws: turns are always full."""
    folder = tmp_path / "talkative"
    shutil.copytree(EMBEDDED, folder)
    for name in ("config.json", "generation_config.json"):
        path = folder / name
        path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": 0}))
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token": "<pad>"}))
    return folder


def request(index: int, *, key: str | None = None, tokens: int = 40, temperature: float = 1.0) -> SequenceRequest:
    prompt = PROMPTS[index % len(PROMPTS)]
    return SequenceRequest(key or str(index), prompt, 1_000 + index, temperature, tokens)


def run(engine: TransformersEngine, count: int) -> dict[str, TurnDone]:
    """Step until `count` turns are over."""
    done: dict[str, TurnDone] = {}
    for _ in range(STEPS):
        done.update((turn.key, turn) for turn in engine.step())
        if len(done) >= count:
            return done
    raise AssertionError(f"{len(done)} of {count} turns after {STEPS} steps")


def run_to_end(engine: TransformersEngine, count: int) -> dict[str, tuple[TurnDone, tuple[bytes, ...]]]:
    """Step until `count` sequences of one turn are over; finish each at once, which lets the next one in."""
    done: dict[str, tuple[TurnDone, tuple[bytes, ...]]] = {}
    for _ in range(STEPS):
        done.update((turn.key, (turn, engine.finish(turn.key))) for turn in engine.step())
        if len(done) >= count:
            return done
    raise AssertionError(f"{len(done)} of {count} sequences after {STEPS} steps")


def draw_alone(policy: Path, wanted: SequenceRequest) -> tuple[TurnDone, tuple[bytes, ...]]:
    engine = make_engine(policy, slots=1)
    engine.open(wanted)
    turn = run(engine, 1)[wanted.key]
    return turn, engine.finish(wanted.key)


def recompute(verifier: Verifier, wanted: SequenceRequest, turn: TurnDone) -> Recomputed:
    offsets = tuple(range(len(turn.tokens)))
    return verifier.recompute([Passage(wanted.prompt, turn.tokens, offsets, wanted.seed, wanted.temperature)])[0]


def assert_honest(ours: Recomputed, logprobs: tuple[float, ...], proofs: tuple[bytes, ...]) -> None:
    assert float(ours.margins.max()) < 1e-3
    assert torch.allclose(ours.logprobs, torch.tensor(logprobs), atol=1e-4)
    for chunk in compare_proofs(ours.hidden, proofs):
        assert chunk.exponent_mismatches == 0
        assert chunk.sign_mismatches == 0
        assert chunk.mantissa_mean < 0.1  # in bfloat16 units: rows equal within about 1e-4


def test_a_sequence_drawn_alone_agrees_with_a_plain_prefill(verifier: Verifier) -> None:
    for index in range(len(PROMPTS)):
        turn, proofs = draw_alone(EMBEDDED, request(index))
        assert_honest(recompute(verifier, request(index), turn), turn.logprobs, proofs)


def test_company_does_not_change_what_is_drawn(engine: TransformersEngine, verifier: Verifier) -> None:
    requests = [request(index) for index in range(12)]  # more than there are slots
    for each in requests:
        engine.open(each)
    done = run_to_end(engine, len(requests))
    for each in requests:
        turn, proofs = done[each.key]
        assert_honest(recompute(verifier, each, turn), turn.logprobs, proofs)
        assert turn.tokens == draw_alone(EMBEDDED, each)[0].tokens


def test_a_sequence_that_joins_in_mid_flight_draws_the_same(talkative: Path) -> None:
    engine = make_engine(talkative)
    done: dict[str, TurnDone] = {}
    for index in range(6):
        engine.open(request(index))
        for _ in range(5 + index):
            done.update((turn.key, turn) for turn in engine.step())
    done.update(run(engine, 6 - len(done)))
    for index in range(6):
        turn, proofs = draw_alone(talkative, request(index))
        assert done[str(index)].tokens == turn.tokens
        assert len(turn.tokens) == 40
        assert len(proofs) == len(engine.finish(str(index))) == 2


def test_sequences_of_one_group_share_their_prompt_and_differ_by_seed(talkative: Path) -> None:
    engine = make_engine(talkative)
    group = [SequenceRequest(f"g{seed}", PROMPTS[3], seed, 3.0, 40) for seed in range(8)]
    for each in group:
        engine.open(each)
    done = run(engine, len(group))
    for each in group:
        assert done[each.key].tokens == draw_alone(talkative, each)[0].tokens
    assert len({turn.tokens for turn in done.values()}) > 4


@pytest.mark.parametrize("slots", [8, 2])
def test_turns_keep_their_cache_and_agree_with_one_prefill_of_everything(
    talkative: Path, verifier: Verifier, slots: int
) -> None:
    """With fewer slots than sequences, those whose turn is over make room for others and are prefilled again."""
    engine = make_engine(talkative, slots=slots)
    observations = {
        str(i): [tuple((5 * i + 2 * t + j) % 90 + 10 for j in range(3 + 4 * t)) for t in range(3)] for i in range(6)
    }
    tokens: dict[str, list[int]] = {key: [] for key in observations}
    offsets: dict[str, list[int]] = {key: [] for key in observations}
    logprobs: dict[str, list[float]] = {key: [] for key in observations}
    for index in range(6):
        engine.open(request(index, tokens=12))
    for turn_number in range(4):
        for key, turn in run(engine, 6).items():
            offsets[key].extend(range(len(tokens[key]), len(tokens[key]) + len(turn.tokens)))
            tokens[key].extend(turn.tokens)
            logprobs[key].extend(turn.logprobs)
            if turn_number < 3:
                observed = observations[key][turn_number]
                tokens[key].extend(observed)
                engine.extend(key, observed, 12)
    passages = [Passage(PROMPTS[i], tuple(tokens[str(i)]), tuple(offsets[str(i)]), 1_000 + i, 1.0) for i in range(6)]
    for index, ours in enumerate(verifier.recompute(passages)):
        assert_honest(ours, tuple(logprobs[str(index)]), engine.finish(str(index)))


def test_a_turn_ends_at_the_first_stop_token_or_exactly_full(engine: TransformersEngine, talkative: Path) -> None:
    for index in range(6):
        engine.open(request(index, tokens=200))
    stop = json.loads((EMBEDDED / "generation_config.json").read_text())["eos_token_id"]
    turns = run(engine, 6).values()
    assert any(turn.stopped for turn in turns)
    for turn in turns:
        assert turn.tokens.count(stop) == int(turn.stopped)
        assert turn.stopped == (turn.tokens[-1] == stop)
        assert turn.stopped or len(turn.tokens) == 200
    for full in (1, 31, 32, 33):
        turn, proofs = draw_alone(talkative, request(0, tokens=full))
        assert (len(turn.tokens), turn.stopped, len(proofs)) == (full, False, -(-full // 32))


def test_a_turn_says_how_long_it_waited_for_a_slot_and_was_in_its_prefill() -> None:
    engine = make_engine(slots=1)
    began = time.monotonic()
    for index in range(2):
        engine.open(request(index))
    first = run(engine, 1)["0"]
    engine.extend("0", (1, 2, 3), 4)  # it comes back while the other waits
    done = run(engine, 2)
    whole = time.monotonic() - began
    for turn in (first, *done.values()):
        assert turn.queued >= 0 and turn.prefill > 0 and turn.queued + turn.prefill <= whole
    assert done["1"].queued >= first.queued + first.prefill, "the slot was the other's until then"


def test_temperature_is_each_sequences_own(engine: TransformersEngine) -> None:
    for index, temperature in enumerate((0.3, 1.0, 5.0)):
        engine.open(request(2, key=str(index), temperature=temperature))
    done = run(engine, 3)
    for index, temperature in enumerate((0.3, 1.0, 5.0)):
        alone, _ = draw_alone(EMBEDDED, request(2, temperature=temperature))
        assert done[str(index)].tokens == alone.tokens


def test_an_aborted_sequence_leaves_the_others_as_they_were(talkative: Path) -> None:
    engine = make_engine(talkative, slots=4)
    for index in range(6):
        engine.open(request(index))
    engine.abort("5")  # in the queue
    for _ in range(6):
        engine.step()
    engine.abort("0")  # decoding
    done = run(engine, 3)
    engine.finish("2")
    engine.abort("1")  # its turn is over
    done.update(run(engine, 1))
    for key in ("2", "3", "4"):
        assert done[key].tokens == draw_alone(talkative, request(int(key)))[0].tokens
    engine.abort("3")
    engine.finish("4")
    assert engine.step() == ()


def test_the_probe_passes_this_engine_and_leaves_it_empty(engine: TransformersEngine) -> None:
    probe(engine, 106)
    engine.load(EMBEDDED, ROOT)  # refused if a sequence were open


def test_the_probe_refuses_an_engine_that_draws_other_noise() -> None:
    class OtherNoise(TransformersEngine):
        def open(self, request: SequenceRequest) -> None:
            seed = request.seed & 0xFFFFFFFF  # as an engine with 32-bit seeds would
            super().open(
                SequenceRequest(request.key, request.prompt, seed, request.temperature, request.max_new_tokens)
            )

    engine = OtherNoise(slots=4)
    engine.load(EMBEDDED, ROOT)
    with pytest.raises(EngineError, match="does not draw the seeded tokens"):
        probe(engine, 106)
    engine.load(EMBEDDED, ROOT)


def test_a_swapped_policy_draws_as_a_freshly_loaded_one(engine: TransformersEngine, talkative: Path) -> None:
    before = engine._model
    engine.load(talkative, bytes(31) + b"\1")
    assert engine.loaded_root == bytes(31) + b"\1"
    engine.open(request(1))
    drawn = run(engine, 1)["1"]
    assert drawn.tokens == draw_alone(talkative, request(1))[0].tokens
    engine.finish("1")
    # Same shape, same objects: a swap copies numbers and nothing else.
    engine.load(EMBEDDED, ROOT)
    other = engine._model
    engine.load(EMBEDDED, ROOT)
    assert engine._model is other
    assert before is not None


# --- one policy a sequence, and no trace of the one before ---


def moved(folder: Path, seed: int = 1) -> Path:
    """The embedded policy with every weight moved, kept in bfloat16."""
    shutil.copytree(EMBEDDED, folder)
    torch.manual_seed(seed)
    weights = load_file(folder / "model.safetensors")
    changed = {name: (w.float() + 0.05 * torch.randn(w.shape)).to(w.dtype) for name, w in weights.items()}
    save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def root_in_the_engine(engine: TransformersEngine, folder: Path) -> bytes:
    """The policy root of the live tensors, with the folder's other files."""
    assert engine._model is not None
    live = engine._model.parameters()
    leaves = []
    for _, place in tensor_places(folder):
        held = live[place.name]
        assert place.dtype == "BF16" and torch.equal(held, held.to(torch.bfloat16).to(held.dtype))
        data = held.to(torch.bfloat16).contiguous().view(torch.uint8).numpy().tobytes()
        leaves.append(TensorLeaf(place.name, place.dtype, place.shape, sha256(data).digest()))
    return root_of(leaves, file_leaves(folder))


def test_the_tensors_in_the_engine_have_the_root_that_it_reports(tmp_path: Path) -> None:
    engine, other = TransformersEngine(slots=2, threads=1), moved(tmp_path / "other")
    for folder in (EMBEDDED, other, EMBEDDED):  # loaded, swapped, swapped back
        engine.load(folder, policy_root(folder))
        assert engine.loaded_root == root_in_the_engine(engine, folder) == policy_root(folder)
    assert policy_root(other) != policy_root(EMBEDDED)


def test_a_tensor_in_the_engine_that_is_not_the_files_is_noticed(tmp_path: Path, monkeypatch: Any) -> None:
    engine, other = make_engine(), moved(tmp_path / "other")

    def forgetful(folder: Path) -> bool:
        """Copies all tensors but one."""
        assert engine._model is not None
        kept = {name: held.clone() for name, held in engine._model.parameters().items() if "norm" in name}
        assert PolicyModel.swap(engine._model, folder)
        name = sorted(kept)[0]
        engine._model.parameters()[name].copy_(kept[name])
        return True

    monkeypatch.setattr(engine._model, "swap", forgetful)
    with pytest.raises(EngineError, match=r"norm.* in the engine is not what the policy's files hold"):
        engine.load(other, bytes(31) + b"\1")
    assert engine.loaded_root is None
    with pytest.raises(EngineError, match="load one first"):
        engine.open(request(0))


def test_weights_that_lack_a_tensor_are_refused_and_not_made_up(tmp_path: Path) -> None:
    shutil.copytree(EMBEDDED, tmp_path / "policy")
    path = tmp_path / "policy" / "model.safetensors"
    weights = load_file(path)
    del weights["model.norm.weight"]
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(EngineError, match=r"lack model\.norm\.weight, which transformers would make up"):
        make_engine(tmp_path / "policy")


def test_keys_and_values_of_the_policy_before_are_dropped_at_a_swap(talkative: Path, tmp_path: Path) -> None:
    """The same prompts and seeds again: what they draw is the new policy's alone, from the first token on."""
    engine, other = make_engine(talkative), moved(tmp_path / "other")
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        shutil.copy(talkative / name, other / name)
    for index in range(6):
        engine.open(request(index))
    before = run_to_end(engine, 6)
    assert engine._cache.bytes_held > 0
    engine.load(other, bytes(31) + b"\1")
    assert engine._cache.bytes_held == 0
    for index in range(6):
        engine.open(request(index))
    after = run_to_end(engine, 6)
    for index in range(6):
        turn, proofs = draw_alone(other, request(index))
        assert after[str(index)][0].tokens == turn.tokens != before[str(index)][0].tokens
        assert_honest(recompute(Verifier(other, threads=1), request(index), turn), turn.logprobs, proofs)


def test_a_sequence_between_two_turns_keeps_its_policy(talkative: Path, tmp_path: Path) -> None:
    engine = make_engine(talkative)
    engine.open(request(1, tokens=8))
    first = run(engine, 1)["1"]
    with pytest.raises(EngineError, match="1 sequences are open: close them first"):
        engine.load(moved(tmp_path / "other"), bytes(31) + b"\1")
    assert engine.loaded_root == ROOT
    engine.extend("1", (5, 6), 8)
    second = run(engine, 1)["1"]
    alone = make_engine(talkative)
    alone.open(request(1, tokens=8))
    assert run(alone, 1)["1"].tokens == first.tokens
    alone.extend("1", (5, 6), 8)
    assert run(alone, 1)["1"].tokens == second.tokens


def small_policy(folder: Path, **changes: Any) -> Path:
    """A random model with the embedded tokenizer; `changes` to a tiny Llama, or `model_type` of another kind."""
    from transformers import AutoConfig, AutoModelForCausalLM

    fields: dict[str, Any] = {
        "model_type": "llama", "vocab_size": 106, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "eos_token_id": 3,
        "bos_token_id": 2, "pad_token_id": 0, "head_dim": 8, "initializer_range": 0.3, **changes,
    }  # fmt: skip
    torch.manual_seed(0)
    config = AutoConfig.for_model(**fields)
    make: Any = AutoModelForCausalLM.from_config
    make(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(EMBEDDED / name, folder / name)
    return folder


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "qwen3", "layer_types": ["full_attention", "sliding_attention"], "sliding_window": 5,
         "use_sliding_window": True, "max_window_layers": 1},
        {"model_type": "mistral", "sliding_window": 5},
        {"model_type": "gemma2", "sliding_window": 5, "final_logit_softcapping": 2.0, "query_pre_attn_scalar": 8},
        {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128},
    ],
    ids=lambda changes: str(changes["model_type"]),
)  # fmt: skip
def test_other_architectures_are_drawn_as_their_plain_prefill_says(tmp_path: Path, changes: dict[str, object]) -> None:
    policy = small_policy(tmp_path / "policy", **changes)
    engine, verifier = make_engine(policy), Verifier(policy, threads=1)
    for index in range(4):
        engine.open(request(index))
    done = run(engine, 4)
    for index in range(4):
        turn = done[str(index)]
        assert_honest(recompute(verifier, request(index), turn), turn.logprobs, engine.finish(str(index)))


def test_a_policy_of_another_shape_is_loaded_anew(engine: TransformersEngine, tmp_path: Path) -> None:
    policy = small_policy(tmp_path / "policy")
    engine.load(policy, ROOT)
    engine.open(request(0))
    assert run(engine, 1)["0"].tokens == draw_alone(policy, request(0))[0].tokens


def test_a_model_without_keys_and_values_is_refused(tmp_path: Path) -> None:
    policy = small_policy(tmp_path / "policy", model_type="mamba", state_size=4, head_dim=None)
    with pytest.raises(EngineError, match="use vLLM"):
        make_engine(policy)


def test_out_of_memory_lowers_the_number_of_slots_and_nothing_is_lost(talkative: Path) -> None:
    engine = make_engine(talkative)
    model = engine._model
    assert model is not None

    def small_device(module: torch.nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
        if arguments[0].shape[0] > 3:
            raise torch.OutOfMemoryError("no room for more than three rows")

    model._model.model.layers[0].register_forward_pre_hook(small_device)
    for index in range(6):
        engine.open(request(index))
    done = run_to_end(engine, 6)
    assert engine.slots == 3
    for index in range(6):
        turn, proofs = draw_alone(talkative, request(index))
        assert done[str(index)][0].tokens == turn.tokens
        assert len(done[str(index)][1]) == len(proofs)


def test_one_sequence_that_does_not_fit_is_a_clear_error(talkative: Path) -> None:
    engine = make_engine(talkative)
    assert engine._model is not None

    def no_memory(module: torch.nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
        raise torch.OutOfMemoryError("none at all")

    engine._model._model.model.layers[0].register_forward_pre_hook(no_memory)
    engine.open(request(0))
    with pytest.raises(EngineError, match="one sequence of 5 tokens"):
        engine.step()


def test_memory_is_flat_over_many_sequences(talkative: Path) -> None:
    engine = make_engine(talkative)
    process = psutil.Process()

    def draw(count: int) -> None:
        for start in range(0, count, 8):
            for index in range(start, start + 8):
                engine.open(request(index, tokens=33))
            for key in run(engine, 8):
                engine.finish(key)

    draw(80)
    before, held = process.memory_info().rss, engine._cache.bytes_held
    draw(240)
    assert engine._cache.bytes_held <= held
    assert process.memory_info().rss - before < 4 * 2**20


def test_a_long_sequence_gives_its_memory_back_when_it_is_gone(talkative: Path) -> None:
    engine = make_engine(talkative)
    engine.open(SequenceRequest("long", tuple(10 + i % 80 for i in range(900)), 1, 1.0, 4))
    run(engine, 1)
    large = engine._cache.bytes_held
    engine.finish("long")
    engine.open(request(0))
    run(engine, 1)
    assert engine._cache.bytes_held < large // 4


def test_refusals_name_what_is_wrong(engine: TransformersEngine, tmp_path: Path) -> None:
    engine.open(request(0))
    for action, match in (
        (lambda: engine.open(request(0)), "open already"),
        (lambda: engine.load(EMBEDDED, ROOT), "1 sequences are open"),
        (lambda: engine.finish("0"), "middle of a turn"),
        (lambda: engine.extend("0", (5,), 4), "middle of a turn"),
        (lambda: engine.abort("9"), "no sequence '9'"),
        (lambda: engine.open(SequenceRequest("a", (), 1, 1.0, 4)), "prompt is empty"),
        (lambda: engine.open(SequenceRequest("a", (5, 106), 1, 1.0, 4)), "outside 0..105"),
        (lambda: engine.open(SequenceRequest("a", (5, -1), 1, 1.0, 4)), "outside 0..105"),
        (lambda: engine.open(SequenceRequest("a", (5,), 1, 1.0, 10_000)), "positions of this policy"),
        (lambda: engine.open(SequenceRequest("a", (5,) * 5_000, 1, 1.0, 4)), "positions of this policy"),
        (lambda: engine.open(SequenceRequest("a", (5,), 1, 0.0, 4)), "temperature"),
        (lambda: engine.open(SequenceRequest("a", (5,), 2**64, 1.0, 4)), "64-bit"),
        (lambda: engine.open(SequenceRequest("a", (5,), 1, 1.0, 0)), "at least one token"),
    ):
        with pytest.raises(EngineError, match=match):
            action()
    run(engine, 1)
    engine.finish("0")
    with pytest.raises(EngineError, match="load one first"):
        TransformersEngine().open(request(0))
    with pytest.raises(EngineError, match="not a dtype"):
        TransformersEngine(dtype="int3").load(EMBEDDED, ROOT)


def test_a_folder_that_is_no_policy_is_refused_with_its_reason(engine: TransformersEngine, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(PolicyError):
        engine.load(empty, ROOT)
    assert engine.loaded_root == ROOT  # nothing happened yet
    pickled = tmp_path / "pickled"
    shutil.copytree(EMBEDDED, pickled)
    (pickled / "model.safetensors").unlink()
    torch.save({}, pickled / "pytorch_model.bin")
    with pytest.raises(EngineError, match="safetensors"):
        engine.load(pickled, ROOT)
    assert engine.loaded_root is None
    damaged = tmp_path / "damaged"
    shutil.copytree(EMBEDDED, damaged)
    (damaged / "model.safetensors").write_bytes(b"no weights at all")
    with pytest.raises(EngineError, match="damaged"):
        engine.load(damaged, ROOT)
    engine.load(EMBEDDED, ROOT)
    engine.open(request(0))
    assert run(engine, 1)["0"].tokens == draw_alone(EMBEDDED, request(0))[0].tokens


def test_weights_that_are_not_numbers_give_an_error_and_no_trace(tmp_path: Path) -> None:
    folder = tmp_path / "nan"
    shutil.copytree(EMBEDDED, folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][0] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(EngineError):
        engine = make_engine(folder)
        engine.open(request(0))
        engine.step()


def test_the_descriptor_says_what_draws() -> None:
    descriptor = TransformersEngine().descriptor()
    assert (descriptor.name, descriptor.dtype, descriptor.device) == ("transformers", "float32", "cpu")
    assert descriptor.runner == "reference"
