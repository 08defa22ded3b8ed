"""The engine over vLLM's CPU build: every token seeded, every row proved, whatever the scheduler does with it."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import trio

from node import vllm_engine
from node.engine import EngineBroken, OutOfMemory, SequenceRequest, TurnDone, probe
from node.engine_thread import EngineThread
from protocol.errors import EngineError, PolicyError
from protocol.limits import PROOF_CHUNK_TOKENS
from tests.vllm.conftest import EMBEDDED, ROOT_FOLDER, SMOLLM2, make_policy

if importlib.util.find_spec("vllm") is not None:
    import torch
    from safetensors.torch import load_file, save_file

    from node.transformers_engine import TransformersEngine
    from node.vllm_engine import VllmEngine
    from node.vllm_worker import Row, RowStore, Tag
    from verify.prefill import Passage, Verifier
    from verify.toploc import compare_proofs

A, B = b"a" * 32, b"b" * 32
STEPS = 5_000
Drawn = dict[str, tuple[TurnDone, tuple[bytes, ...]]]


def prompt(index: int) -> tuple[int, ...]:
    return tuple((7 * index + 3 * at) % 90 + 10 for at in range(5 + 17 * (index % 6)))


def request(index: int, *, tokens: int = 40, temperature: float = 1.0, key: str | None = None) -> SequenceRequest:
    return SequenceRequest(key or str(index), prompt(index), 2**63 + 1_000 + index, temperature, tokens)


def run(engine: Any, count: int) -> dict[str, TurnDone]:
    done: dict[str, TurnDone] = {}
    for _ in range(STEPS):
        done.update((turn.key, turn) for turn in engine.step())
        if len(done) >= count:
            return done
    raise AssertionError(f"{len(done)} of {count} turns after {STEPS} steps")


def draw(engine: Any, requests: list[SequenceRequest]) -> Drawn:
    for each in requests:
        engine.open(each)
    turns = run(engine, len(requests))
    return {key: (turn, engine.finish(key)) for key, turn in turns.items()}


def audit(
    policy: Path,
    passages: list[Passage],
    logprobs: list[tuple[float, ...]],
    proofs: list[tuple[bytes, ...]],
    dtype: str = "float32",
) -> int:
    """Hold everything against a plain prefill by transformers. Returns the number of tokens."""
    verifier = Verifier(policy, dtype=dtype, threads=1)
    tokens = 0
    for passage, ours, said, proved in zip(passages, verifier.recompute(passages), logprobs, proofs, strict=True):
        assert float(ours.margins.max()) == 0
        assert torch.allclose(ours.logprobs, torch.tensor(said), atol=1e-4)
        assert len(proved) == -(-len(passage.generated) // PROOF_CHUNK_TOKENS)
        for chunk in compare_proofs(ours.hidden, proved):
            assert (chunk.exponent_mismatches, chunk.sign_mismatches) == (0, 0)
            assert chunk.mantissa_mean < 0.1
        tokens += len(passage.generated)
    return tokens


def audit_drawn(policy: Path, requests: list[SequenceRequest], drawn: Drawn) -> int:
    passages = [
        Passage(each.prompt, drawn[each.key][0].tokens, tuple(range(len(drawn[each.key][0].tokens))), each.seed,
                each.temperature)
        for each in requests
    ]  # fmt: skip
    return audit(
        policy, passages, [drawn[each.key][0].logprobs for each in requests], [drawn[e.key][1] for e in requests]
    )


# --- what is drawn ---


def test_more_requests_than_slots_prefilled_in_pieces_are_drawn_as_a_plain_prefill_says(
    engine: Any, policies: dict[str, Path]
) -> None:
    requests = [request(index, temperature=(0.7, 1.0, 1.5)[index % 3]) for index in range(13)]

    drawn = draw(engine, requests)

    assert audit_drawn(policies["a"], requests, drawn) > 200
    turns = [turn for turn, _ in drawn.values()]
    assert all(turn.queued >= 0 and turn.prefill > 0 for turn in turns)
    assert max(turn.queued for turn in turns) > min(turn.prefill for turn in turns), "some waited for a slot"


def test_it_draws_what_the_transformers_engine_draws(engine: Any, policies: dict[str, Path]) -> None:
    other = TransformersEngine(slots=5, threads=1)  # a turn that is over keeps its slot there
    other.load(policies["a"], A)
    requests = [request(index) for index in range(5)]

    ours, theirs = draw(engine, requests), draw(other, requests)

    assert {key: turn.tokens for key, (turn, _) in ours.items()} == {k: turn.tokens for k, (turn, _) in theirs.items()}


def test_turns_go_on_from_the_cache_and_agree_with_one_prefill_of_everything(
    engine: Any, policies: dict[str, Path]
) -> None:
    keys = [str(index) for index in range(6)]
    tokens: dict[str, list[int]] = {key: [] for key in keys}
    offsets: dict[str, list[int]] = {key: [] for key in keys}
    logprobs: dict[str, list[float]] = {key: [] for key in keys}
    for index in range(6):
        engine.open(request(index, tokens=13))
    for number in range(4):
        for key, turn in run(engine, 6).items():
            offsets[key].extend(range(len(tokens[key]), len(tokens[key]) + len(turn.tokens)))
            tokens[key].extend(turn.tokens)
            logprobs[key].extend(turn.logprobs)
            if number < 3:
                observed = tuple((5 * int(key) + 2 * number + at) % 90 + 10 for at in range(1 + 9 * number))
                tokens[key].extend(observed)
                engine.extend(key, observed, 13)
    passages = [
        Passage(prompt(i), tuple(tokens[str(i)]), tuple(offsets[str(i)]), 2**63 + 1_000 + i, 1.0) for i in range(6)
    ]
    audit(policies["a"], passages, [tuple(logprobs[key]) for key in keys], [engine.finish(key) for key in keys])


def test_a_group_finds_its_prompt_in_the_cache(engine: Any, policies: dict[str, Path]) -> None:
    long = tuple((11 * at) % 90 + 10 for at in range(200))
    group = [SequenceRequest(f"g{seed}", long, seed, 1.0, 20) for seed in range(6)]
    draw(engine, [SequenceRequest("first", long, 99, 1.0, 4)])

    drawn = draw(engine, group)

    audit_drawn(policies["a"], group, drawn)
    assert len({turn.tokens for turn, _ in drawn.values()}) > 3


def test_a_turn_ends_at_the_first_stop_token_or_exactly_full(engine: Any) -> None:
    for full in (1, 31, 32, 33, 120):
        for turn, proofs in draw(engine, [request(index, tokens=full) for index in range(6)]).values():
            assert turn.stopped == (turn.tokens[-1] == 3)
            assert turn.tokens.count(3) == int(turn.stopped)
            assert turn.stopped or len(turn.tokens) == full
            assert len(proofs) == -(-len(turn.tokens) // PROOF_CHUNK_TOKENS)


def test_an_aborted_sequence_leaves_the_others_as_they_were(engine: Any, policies: dict[str, Path]) -> None:
    requests = [request(index, tokens=30) for index in range(8)]
    for each in requests:
        engine.open(each)
    engine.abort("7")  # waits
    for _ in range(9):
        assert not {turn.key for turn in engine.step()} & {"0", "7"}
    engine.abort("0")  # is drawn
    left = [each for each in requests if each.key not in "07"]
    turns = run(engine, len(left))
    engine.abort("1")  # its turn is over
    drawn = {each.key: (turns[each.key], engine.finish(each.key)) for each in left if each.key != "1"}
    audit_drawn(policies["a"], [each for each in left if each.key != "1"], drawn)
    assert engine.step() == ()
    assert engine._rpc("rlc_forget", []) == 0  # and the worker keeps nothing of them


def test_preempted_sequences_are_proved_all_the_same(alone: None, policies: dict[str, Path]) -> None:
    """The cache has room for two of them: vLLM takes it away from some and computes them again."""
    engine = VllmEngine(slots=6, threads=1, settings={"num_gpu_blocks_override": 14, "max_model_len": 256})
    try:
        engine.load(policies["a"], A)
        preempted = 0
        scheduler = engine._vllm.engine_core.engine_core.scheduler
        whole = scheduler._preempt_request

        def counting(*arguments: Any, **named: Any) -> Any:
            nonlocal preempted
            preempted += 1
            return whole(*arguments, **named)

        scheduler._preempt_request = counting
        requests = [request(6 * index + 2, tokens=150) for index in range(6)]
        audit_drawn(policies["a"], requests, draw(engine, requests))
        assert preempted
    finally:
        engine.close()


def test_the_probe_passes_and_leaves_it_empty(engine: Any, policies: dict[str, Path]) -> None:
    probe(engine, 106)
    engine.load(policies["a"], A)


def test_the_descriptor_says_what_draws_and_how(engine: Any) -> None:
    descriptor = engine.descriptor()
    assert (descriptor.name, descriptor.dtype, descriptor.device) == ("vllm", "float32", "cpu")
    assert descriptor.version.startswith("0.32")
    assert descriptor.runner == "vllm-v1 seeded-draw"


def test_vllms_own_sampler_on_its_v2_runner_draws_the_seeded_tokens(policies: dict[str, Path]) -> None:
    """What a GPU runs, with its kernels interpreted: found by the start-up check, drawn natively, rows proved."""
    script = Path(__file__).with_name("interpreted_v2.py")
    done = subprocess.run(
        [sys.executable, str(script), str(policies["a"])], capture_output=True, text=True, timeout=800, check=False
    )
    assert done.returncode == 0, done.stderr[-3_000:]
    found = json.loads(done.stdout[done.stdout.index("DRAWN") + 5 :].splitlines()[0])
    assert found["runner"] == "vllm-v2 native"
    passages = [
        Passage(
            tuple(each["prompt"]),
            tuple(each["tokens"]),
            tuple(range(len(each["tokens"]))),
            each["seed"],
            each["temperature"],
        )
        for each in found["drawn"]
    ]
    proofs = [tuple(bytes.fromhex(proof) for proof in each["proofs"]) for each in found["drawn"]]
    assert audit(policies["a"], passages, [tuple(each["logprobs"]) for each in found["drawn"]], proofs) > 60


def test_it_runs_behind_the_nodes_engine_thread(alone: None, policies: dict[str, Path]) -> None:
    requests = [request(index, tokens=20) for index in range(6)]
    drawn: Drawn = {}

    async def one(engine: EngineThread, wanted: SequenceRequest) -> None:
        turn = await engine.first_turn(wanted)
        drawn[wanted.key] = (turn, await engine.finish(wanted.key))

    async def work() -> None:
        engine = EngineThread(lambda: VllmEngine(slots=4, threads=1))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(engine.run)
            await engine.call(lambda each: each.load(policies["a"], A))
            await engine.call(lambda each: probe(each, 106))
            async with trio.open_nursery() as inner:
                for each in requests:
                    inner.start_soon(one, engine, each)
            nursery.cancel_scope.cancel()

    trio.run(work)
    audit_drawn(policies["a"], requests, drawn)


# --- swaps ---


def test_a_swapped_policy_draws_as_a_freshly_loaded_one_and_keeps_no_cache(
    engine: Any, policies: dict[str, Path]
) -> None:
    """The prompts are in the cache of the old policy, the embeddings are tied, and the process stays."""
    requests = [request(index) for index in range(4)]
    draw(engine, requests)
    inside = engine._vllm

    engine.load(policies["b"], B)

    assert engine._vllm is inside
    assert engine.loaded_root == B
    audit_drawn(policies["b"], requests, draw(engine, requests))
    engine.load(policies["a"], A)
    audit_drawn(policies["a"], requests, draw(engine, requests))


def test_a_policy_is_not_swapped_in_mid_flight(engine: Any, policies: dict[str, Path]) -> None:
    """One policy a sequence: what is open is finished under its own."""
    requests = [request(index, tokens=24) for index in (1, 2, 3, 4, 5)]
    for each in requests:
        engine.open(each)
    for _ in range(4):
        assert engine.step() == ()
    with pytest.raises(EngineError, match="5 sequences are open"):
        engine.load(policies["b"], B)
    assert engine.loaded_root == A
    drawn = run(engine, 5)
    audit_drawn(policies["a"], requests, {key: (turn, engine.finish(key)) for key, turn in drawn.items()})
    engine.load(policies["b"], B)
    audit_drawn(policies["b"], requests, draw(engine, requests))


def test_a_head_that_a_reload_leaves_stale_is_found_and_not_used(
    engine: Any, policies: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's CPU build leaves the packed head of tied embeddings as it was: hidden states of the new policy, logits
    of the old one. Without our repacking the check must see it, and make vLLM anew."""
    monkeypatch.setattr("node.vllm_worker._repack_tied_head", lambda model, device: None)
    inside = engine._vllm
    requests = [request(index) for index in range(3)]

    engine.load(policies["b"], B)

    assert engine._vllm is not inside
    audit_drawn(policies["b"], requests, draw(engine, requests))


def test_weights_that_are_not_the_folders_are_found(engine: Any, policies: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(policies["a"], tmp_path / "other")
    weights = load_file(tmp_path / "other" / "model.safetensors")
    for name in ("model.layers.0.mlp.up_proj.weight", "model.layers.2.self_attn.k_proj.weight", "model.norm.weight"):
        changed = {**weights, name: weights[name] * 1.05}
        save_file(changed, tmp_path / "other" / "model.safetensors", metadata={"format": "pt"})
        compared, wrong = engine._rpc("rlc_check_weights", str(tmp_path / "other"), [0, 2])
        assert compared > 10
        assert len(wrong) == 1
    compared, wrong = engine._rpc("rlc_check_weights", str(policies["a"]), [0, 1, 2])
    assert (wrong, compared > 15) == ([], True)


def test_a_policy_of_another_shape_is_loaded_anew(engine: Any, policies: dict[str, Path]) -> None:
    inside = engine._vllm
    engine.load(policies["untied"], B)
    assert engine._vllm is not inside
    requests = [request(index) for index in range(3)]
    audit_drawn(policies["untied"], requests, draw(engine, requests))
    changed = engine._vllm
    engine.load(policies["untied"], B)
    assert engine._vllm is changed


# --- what it refuses ---


def test_refusals_name_what_is_wrong(engine: Any, policies: dict[str, Path]) -> None:
    engine.open(request(0))
    for action, match in (
        (lambda: engine.open(request(0)), "open already"),
        (lambda: engine.load(policies["a"], A), "1 sequences are open"),
        (lambda: engine.finish("0"), "middle of a turn"),
        (lambda: engine.extend("0", (5,), 4), "middle of a turn"),
        (lambda: engine.abort("9"), "no sequence '9'"),
        (lambda: engine.open(SequenceRequest("a", (), 1, 1.0, 4)), "prompt is empty"),
        (lambda: engine.open(SequenceRequest("a", (5, 106), 1, 1.0, 4)), "outside 0..105"),
        (lambda: engine.open(SequenceRequest("a", (5,), 1, 1.0, 10_000)), "more than the 512 that vLLM can hold"),
        (lambda: engine.open(SequenceRequest("a", (5,), 1, 0.0, 4)), "temperature"),
        (lambda: engine.open(SequenceRequest("a", (5,), 2**64, 1.0, 4)), "64-bit"),
        (lambda: engine.open(SequenceRequest("a", (5,), 1, 1.0, 0)), "at least one token"),
    ):
        with pytest.raises(EngineError, match=match):
            action()
    run(engine, 1)
    engine.finish("0")


def test_a_policy_that_vllm_cannot_run_is_refused_with_its_reason(
    engine: Any, policies: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(EngineError, match=r"vLLM cannot run the policy in .* as float32"):
        engine.load(EMBEDDED, B)  # heads of 16, which vLLM's CPU kernels do not have
    assert engine.loaded_root is None
    (tmp_path / "empty").mkdir()
    with pytest.raises(PolicyError):
        engine.load(tmp_path / "empty", B)
    shutil.copytree(policies["a"], tmp_path / "damaged")
    (tmp_path / "damaged" / "model.safetensors").write_bytes(b"no weights at all")
    with pytest.raises(EngineError, match="vLLM cannot run the policy"):
        engine.load(tmp_path / "damaged", B)
    engine.load(policies["a"], A)
    draw(engine, [request(0)])
    shutil.copytree(policies["a"], tmp_path / "unknown")
    config = json.loads((tmp_path / "unknown" / "config.json").read_text())
    config |= {"model_type": "nonsense", "architectures": ["NonsenseForCausalLM"]}
    (tmp_path / "unknown" / "config.json").write_text(json.dumps(config))
    with pytest.raises(EngineError, match=r"vLLM cannot run the policy in .*nonsense"):
        engine.load(tmp_path / "unknown", B)
    engine.load(policies["a"], A)
    with pytest.raises(EngineError, match=r"'float16' is not a dtype that a trace can be audited in"):
        VllmEngine(dtype="float16")


def test_weights_that_are_not_numbers_give_an_error_and_no_trace(
    alone: None, policies: dict[str, Path], tmp_path: Path
) -> None:
    shutil.copytree(policies["a"], tmp_path / "nan")
    weights = load_file(tmp_path / "nan" / "model.safetensors")
    weights["model.norm.weight"][0] = float("nan")
    save_file(weights, tmp_path / "nan" / "model.safetensors", metadata={"format": "pt"})
    engine = VllmEngine(slots=2, threads=1)
    try:
        with pytest.raises(EngineError):
            engine.load(tmp_path / "nan", A)
            engine.open(request(0))
            run(engine, 1)
    finally:
        engine.close()


# --- how busy it is, and what becomes of it when it fails ---


def test_it_says_how_many_are_drawn_how_many_wait_and_how_full_the_cache_is(engine: Any) -> None:
    assert engine.usage().drawing == 0
    for index in range(7):
        engine.open(request(index, tokens=60))
    for _ in range(12):
        engine.step()
    usage = engine.usage()
    assert (usage.drawing, usage.waiting) == (4, 3)
    assert usage.cache is not None and 0 < usage.cache < 0.2
    run(engine, 7)
    assert engine.usage().drawing == engine.usage().waiting == 0


def test_an_engine_with_less_room_than_the_policy_knows_positions_says_so(
    alone: None, policies: dict[str, Path]
) -> None:
    engine = VllmEngine(slots=2, threads=1, settings={"max_model_len": 64})
    try:
        engine.load(policies["a"], A)
        assert engine.longest == 64
        with pytest.raises(EngineError, match="more than the 64 that vLLM can hold"):
            engine.open(SequenceRequest("0", (5, 6), 1, 1.0, 63))
    finally:
        engine.close()


def test_a_start_that_runs_out_of_memory_is_made_again_with_fewer_slots(
    alone: None, policies: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def on_a_small_card(arguments: dict[str, Any], own_process: bool) -> tuple[Any, bool]:
        asked.append(arguments["max_num_seqs"])
        if asked[-1] > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return make(arguments, own_process)

    make = vllm_engine._make_vllm
    monkeypatch.setattr(vllm_engine, "_make_vllm", on_a_small_card)
    engine = VllmEngine(slots=8, threads=1)
    try:
        engine.load(policies["a"], A)
        assert asked[:3] == [8, 4, 2] and engine.slots == 2
        requests = [request(index, tokens=12) for index in range(5)]
        audit_drawn(policies["a"], requests, draw(engine, requests))
        monkeypatch.setattr(vllm_engine, "_make_vllm", _always_full)
        with pytest.raises(EngineError, match=r"vLLM cannot run the policy in .*no memory for 1 sequences"):
            engine.load(policies["untied"], B)
    finally:
        engine.close()


def _always_full(arguments: dict[str, Any], own_process: bool) -> tuple[Any, bool]:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def test_what_vllm_raises_is_told_apart() -> None:
    from vllm.v1.engine.exceptions import EngineDeadError

    assert type(vllm_engine._fault_of(torch.OutOfMemoryError("CUDA out of memory"))) is OutOfMemory
    assert type(vllm_engine._fault_of(EngineDeadError())) is EngineBroken
    plain = vllm_engine._fault_of(ValueError("what was asked"))
    assert not isinstance(plain, EngineBroken) and "ValueError: what was asked" in str(plain)


def test_the_process_that_holds_the_model_tells_why_it_ended_by_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "errors.log"
    log.write_text(
        "EngineCore encountered a fatal error.\nTraceback (most recent call last):\n  File 'x', line 1\n"
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\n"
        "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.\n"
    )
    monkeypatch.setattr(vllm_engine, "_log", log)
    from vllm.v1.engine.exceptions import EngineDeadError

    found = vllm_engine._fault_of(EngineDeadError())
    assert type(found) is OutOfMemory and "Tried to allocate 2.00 GiB" in str(found)
    failed = RuntimeError("Engine core initialization failed. See root cause above.")
    assert vllm_engine._is_out_of_memory(failed)
    log.write_text("ValueError: no such layer\n")
    assert not vllm_engine._is_out_of_memory(failed)


# --- rows, without a model ---


def rows_of(tag: Tag, *positions: int) -> list[Row]:
    return [Row(0, tag, position) for position in positions]


def test_rows_drawn_again_or_never_kept_leave_the_same_proofs() -> None:
    generator = torch.Generator().manual_seed(0)
    bits = (torch.randn(70, 8, generator=generator).to(torch.bfloat16).view(torch.int16).numpy()).view("uint16")

    def proofs(script: list[int], tokens: int) -> list[bytes]:
        store = RowStore()
        for position in script:
            store.put(rows_of(Tag("k", 0, 10, 1, 1.0), position), bits[position - 10 : position - 9], [0.5])
        assert store.turn_over("k", 0, tokens) == [0.5] * tokens
        return store.proofs("k")

    plain = proofs(list(range(10, 74)), 64)
    again = [position for position in range(10, 74) for _ in range(2 if position % 16 == 9 else 1)]
    assert proofs(again, 64) == plain
    assert proofs(list(range(10, 75)), 64) == plain  # one step beyond the stop token
    assert len(plain) == 2


def test_rows_that_are_not_all_there_give_an_error_and_no_proof() -> None:
    tag = Tag("k", 0, 10, 1, 1.0)
    one = torch.ones(1, 8, dtype=torch.bfloat16).view(torch.int16).numpy().view("uint16")
    for script, tokens in (([10, 12], 2), ([10, 11], 3), ([10, 11, 12], 1), ([10, 11, 12, 10], 3)):
        store = RowStore()
        for position in script:
            store.put(rows_of(tag, position), one, [0.0])
        with pytest.raises(EngineError, match="not all there"):
            store.turn_over("k", 0, tokens)
    with pytest.raises(EngineError, match="no hidden states"):
        RowStore().proofs("k")


# --- a real model, and what lasts ---


def test_memory_is_flat_over_many_sequences(engine: Any) -> None:
    process = psutil.Process()

    def work(count: int) -> None:
        for start in range(0, count, 8):
            draw(engine, [request(index, tokens=9) for index in range(start, start + 8)])

    work(160)
    before = process.memory_info().rss
    work(400)
    assert process.memory_info().rss - before < 8 * 2**20
    assert engine._rpc("rlc_forget", []) == 0


@pytest.mark.skipif(not SMOLLM2.is_dir(), reason="no SmolLM2: scripts/convert-smollm2")
def test_smollm2_is_drawn_and_proved_exactly_in_a_process_of_its_own(alone: None) -> None:
    """As on a GPU: only proofs and logprobs come back from vLLM's core."""
    engine = VllmEngine(slots=8, threads=1, own_process=True)
    try:
        engine.load(SMOLLM2, A)
        requests = [
            SequenceRequest(str(index), tuple(range(1_000 + 40 * index, 1_030 + 40 * index)), index, 1.0, 40)
            for index in range(8)
        ]
        drawn = draw(engine, requests)
        assert audit_drawn(SMOLLM2, requests, drawn) > 100
        engine.load(SMOLLM2, B)
        assert draw(engine, requests[:1])["0"][0].tokens == drawn["0"][0].tokens
    finally:
        engine.close()


def test_other_architectures_are_drawn_as_their_plain_prefill_says(alone: None, tmp_path: Path) -> None:
    policy = make_policy(tmp_path / "qwen3", 5, model_type="qwen3", use_sliding_window=False)
    engine = VllmEngine(slots=4, threads=1)
    try:
        engine.load(policy, A)
        requests = [request(index) for index in range(4)]
        audit_drawn(policy, requests, draw(engine, requests))
    finally:
        engine.close()


# --- a core that hangs ---


@pytest.fixture
def apart(alone: None, policies: dict[str, Path]) -> Iterator[tuple[Any, psutil.Process]]:
    """An engine whose core is a process of its own, and that process."""
    engine = VllmEngine(slots=2, threads=1, own_process=True)
    engine.load(policies["a"], A)
    yield engine, the_core()
    engine.close()
    assert psutil.wait_procs(cores(), timeout=30)[1] == []


def cores() -> list[psutil.Process]:
    alive = [each for each in psutil.Process().children(recursive=True) if each.status() != psutil.STATUS_ZOMBIE]
    return [each for each in alive if "resource_tracker" not in " ".join(each.cmdline())]


def the_core() -> psutil.Process:
    (found,) = cores()
    return found


def test_a_core_that_hangs_while_it_draws_is_ended_and_the_engine_broken(
    apart: tuple[Any, psutil.Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, core = apart
    for index in range(2):
        engine.open(request(index, tokens=400))
    for _ in range(20):
        engine.step()
    monkeypatch.setattr(vllm_engine, "STALL_SECONDS", 3.0)
    core.suspend()
    with pytest.raises(EngineBroken, match="hung, and was ended: it gave no token for 3 s while it drew 2 sequences"):
        run(engine, 2)
    assert psutil.wait_procs([core], timeout=30)[1] == []


def test_a_core_that_hangs_as_a_policy_is_swapped_in_is_ended_with_that_cause(
    apart: tuple[Any, psutil.Process], policies: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, core = apart
    monkeypatch.setattr(vllm_engine, "LOAD_SECONDS", 2.0)
    with pytest.MonkeyPatch.context() as patch:
        # It hangs between two of the questions that a swap asks.
        patch.setattr(engine._vllm, "reset_prefix_cache", lambda: core.suspend() is None)
        with pytest.raises(EngineBroken, match=r"hung, and was ended: it gave no answer in 2 s \(rlc_swap\)"):
            engine.load(policies["b"], B)
    assert psutil.wait_procs([core], timeout=30)[1] == []


_STARTS = """
import pathlib, sys
import psutil
from node import vllm_engine
vllm_engine.LOAD_SECONDS = 1.0
try:
    vllm_engine.VllmEngine(slots=1, threads=1, own_process=True).load(pathlib.Path(sys.argv[1]), bytes(32))
except vllm_engine.EngineBroken as error:
    print(error, flush=True)
left = psutil.Process().children(recursive=True)
print(*("left" for each in left if "resource_tracker" not in " ".join(each.cmdline())))
"""


def test_a_core_that_does_not_start_is_ended_with_that_cause(policies: dict[str, Path]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _STARTS, str(policies["a"])],
        cwd=ROOT_FOLDER,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.splitlines() == ["vLLM's process hung, and was ended: it did not start within 1 s", ""], done
