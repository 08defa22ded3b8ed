"""Ways to cheat, each as honest as it can be in everything else: the negative controls (SPEC 13).

An attack takes the honest traces of a stage and makes what a cheater would hand in for the same leases. One that
draws tokens is consistent with itself: its observations, reward, logprobs and proofs are those of the tokens it
drew, so only the evidence can refuse it. Not here: judging (controls.py), and what needs a ledger or a network.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from protocol import codec
from protocol.environments.base import Environment
from protocol.errors import EngineError, UsageError
from protocol.identity import Identity
from protocol.lease import Lease
from protocol.limits import MAX_TRACE_BYTES, PROOF_CHUNK_TOKENS, PROOF_FIELD
from protocol.trace import Span, SpanKind, Trace, TraceFile
from verify.model import PolicyModel
from verify.prefill import Passage, Verifier
from verify.reference import Choose, ReferenceRun, play
from verify.sampling import sample
from verify.tensor_file import write_tensors
from verify.toploc import build_many

_SOMEONE: Final = Identity(b"\x11" * 32)
_OTHER_SEED: Final = 0x9E3779B97F4A7C15  # xored into a slot's seed: one that no lease gives
_FORCED_AFTER: Final = 8  # tokens, at least, before an edited or forged stop token
_SPLICED_IN: Final = 10
_LATE_MS: Final = 10 * 60_000

Work = tuple[Lease, int]  # a lease and one of its slots


class Caught(StrEnum):
    """What must show an attack."""

    TRACE = "trace"  # its own traces: one of any eight is refused, or the node's sums tell within eight
    NODE = "node"  # the sums of scores over a node's traces, within thirty-two
    LEDGER = "ledger"  # nothing in the file: the trainer's ledger refuses it
    NOTHING = "nothing"  # it computes what the policy computes, or nearly: it need not be caught


@dataclass(frozen=True, slots=True)
class Attempt:
    """What a cheater hands in: a file, or bytes that are to be one. `changed` is False where the attempt came out
    as the one honest completion, which nobody can or need refuse."""

    file: TraceFile | bytes
    changed: bool = True


@dataclass(slots=True, eq=False)
class Stage:
    """Where attacks are made: a run, honest traces of it, and the models at a cheater's hand.

    works and honest belong together. worker: the leased policy in the worker's dtype; prover: the same, to prefill
    tokens that were not drawn by it. group: how many traces an attack that shows in single traces draws.
    """

    run: ReferenceRun
    environment: Environment
    works: Sequence[Work]
    honest: Sequence[Trace]
    worker: PolicyModel
    prover: Verifier
    dtype: str
    group: int
    scratch: Path
    _foreign: dict[str, list[Trace]] = field(default_factory=dict)

    def drawn(self, works: Sequence[Work], model: PolicyModel | None = None, **changes: Any) -> list[Trace]:
        """The works played as `changes` say."""
        played = play(model or self.worker, self.run.tokenizer, works, environment=self.environment, **changes)
        return played

    def by_model(self, name: str, count: int, change: Callable[[Tensor], Tensor]) -> list[Trace]:
        """The first `count` works drawn by the policy with `change` applied to its matrices. Kept by name."""
        if len(self._foreign.get(name, ())) < count:
            with altered(self.run.policy, self.dtype, change) as model:
                self._foreign[name] = self.drawn(self.works[:count], model)
        return self._foreign[name][:count]

    def files(self, traces: Sequence[Trace]) -> list[Attempt]:
        """Attempts at the first works."""
        pairs = zip(traces, self.works, self.honest, strict=False)
        return [
            Attempt(self.run.file(lease, each), (each.tokens, each.proofs) != (honest.tokens, honest.proofs))
            for each, (lease, _), honest in pairs
        ]

    def draws(self, traces: Sequence[Trace]) -> list[Attempt]:
        """The same of traces that the policy itself drew: honest where they hold the honest tokens."""
        return [
            replace(attempt, changed=trace.tokens != honest.tokens)
            for attempt, trace, honest in zip(self.files(traces), traces, self.honest, strict=False)
        ]

    def edited(self, change: Callable[[Trace], Trace | None]) -> list[Attempt]:
        """Honest traces, changed; those that `change` cannot use are left out."""
        found = []
        for (lease, _), trace in zip(self.works, self.honest, strict=True):
            forged = change(trace)
            if forged is not None:
                found.append(Attempt(self.run.file(lease, forged)))
        return found

    def proved(self, works: Sequence[Work], traces: Sequence[Trace]) -> list[Trace]:
        """Traces with the proofs and logprobs that the leased policy has for their tokens."""
        found = self.prover.recompute([_passage(trace, *work) for work, trace in zip(works, traces, strict=True)])
        proofs = build_many([each.hidden for each in found])
        return [
            replace(trace, proofs=proof, logprobs=tuple(each.logprobs.tolist()))
            for trace, proof, each in zip(traces, proofs, found, strict=True)
        ]


def _passage(trace: Trace, lease: Lease, slot: int) -> Passage:
    return Passage(lease.prompt, trace.tokens, trace.generated(), lease.seed_of(slot) or 0, lease.temperature)


@dataclass(frozen=True, slots=True)
class Attack:
    """`make` may return fewer attempts than there are honest traces, and none where the policy gives no occasion."""

    name: str
    caught: Caught
    make: Callable[[Stage], list[Attempt]]
    note: str = ""


# --- proofs that are not, or not of this trace ---


def _proofs(change: Callable[[tuple[bytes, ...]], tuple[bytes, ...]]) -> Callable[[Stage], list[Attempt]]:
    return lambda stage: stage.edited(lambda trace: replace(trace, proofs=change(trace.proofs)))


def _body(change: Callable[[bytes], bytes]) -> Callable[[Stage], list[Attempt]]:
    """Every proof with its modulus kept and its coefficients' bytes changed."""
    return _proofs(lambda proofs: tuple(proof[:2] + change(proof[2:]) for proof in proofs))


def _noise(stage: Stage) -> list[Attempt]:
    random = np.random.default_rng(1)

    def coefficients(body: bytes) -> bytes:
        return random.integers(1, PROOF_FIELD, len(body) // 2).astype(">u2").tobytes()

    return _body(coefficients)(stage)


def _of_other_tokens(stage: Stage) -> list[Attempt]:
    """Honest proofs of the same policy for the same tokens in another order."""

    def backwards(trace: Trace) -> Trace:
        return replace(trace, tokens=trace.tokens[::-1])

    others = stage.proved(stage.works, [backwards(trace) for trace in stage.honest])
    return stage.files([replace(trace, proofs=other.proofs) for trace, other in zip(stage.honest, others, strict=True)])


def _replayed(stage: Stage) -> list[Attempt]:
    """The proofs of the next trace, as far as they have the length that is needed."""

    def mixed(own: bytes, other: bytes) -> bytes:
        return other if len(own) == len(other) else own

    following = (*stage.honest[1:], stage.honest[0])
    found = []
    for trace, other in zip(stage.honest, following, strict=True):
        borrowed = (*other.proofs, *trace.proofs[len(other.proofs) :])[: len(trace.proofs)]
        found.append(replace(trace, proofs=tuple(map(mixed, trace.proofs, borrowed))))
    return stage.files(found)


# --- claims and accounting ---


def _logprobs(stage: Stage) -> list[Attempt]:
    """Twice as sure of every token as the policy is."""
    return stage.edited(lambda trace: replace(trace, logprobs=tuple(0.5 * value for value in trace.logprobs)))


def _observation(stage: Stage) -> list[Attempt]:
    def forged(trace: Trace) -> Trace | None:
        place = trace.spans[0].length
        if place >= len(trace.tokens):
            return None
        tokens = (*trace.tokens[:place], trace.tokens[place] ^ 1, *trace.tokens[place + 1 :])
        return replace(trace, tokens=tokens)

    return stage.edited(forged)


def _other_version(stage: Stage) -> list[Attempt]:
    return stage.edited(lambda trace: replace(trace, policy_version=1, policy_root=b"\x03" * 32))


def _longer(trace: Trace, more: int) -> Trace:
    """The trace with `more` copies of its last token at its end, and proofs to match their number."""
    spans = (*trace.spans[:-1], Span(SpanKind.GENERATED, trace.spans[-1].length + more))
    count = len(trace.logprobs) + more
    proofs = (*trace.proofs, *(trace.proofs[0],) * (-(-count // PROOF_CHUNK_TOKENS)))[: -(-count // PROOF_CHUNK_TOKENS)]
    return replace(
        trace,
        tokens=(*trace.tokens, *(trace.tokens[-1],) * more),
        spans=spans,
        logprobs=(*trace.logprobs, *(-0.5,) * more),
        proofs=proofs,
    )


def _resigned(stage: Stage) -> list[Attempt]:
    """Another identity hands in a node's trace as its own."""
    return [
        Attempt(stage.run.file(lease, replace(trace, node=_SOMEONE.node), node=_SOMEONE))
        for (lease, _), trace in zip(stage.works, stage.honest, strict=True)
    ]


def _others_lease(stage: Stage) -> list[Attempt]:
    """A trace for a lease that another node holds."""
    return [
        Attempt(stage.run.file(replace(lease, node=_SOMEONE.node), trace))
        for (lease, _), trace in zip(stage.works, stage.honest, strict=True)
    ]


def _altered_after_signing(stage: Stage) -> list[Attempt]:
    attempts = []
    for (lease, _), trace in zip(stage.works, stage.honest, strict=True):
        file = stage.run.file(lease, trace)
        payload = codec.encode(replace(trace, reward=trace.reward + 1))
        attempts.append(Attempt(replace(file, trace=replace(file.trace, payload=payload))))
    return attempts


def _late(stage: Stage) -> list[Attempt]:
    return [
        Attempt(stage.run.file(lease, trace, after_ms=_LATE_MS))
        for (lease, _), trace in zip(stage.works, stage.honest, strict=True)
    ]


def _oversized(stage: Stage) -> list[Attempt]:
    """Bytes beyond what a trace may have, and a trace of more tokens than the lease allows."""
    lease, trace = stage.works[0][0], stage.honest[0]
    file = codec.encode(stage.run.file(lease, trace))
    return [
        Attempt(file + bytes(2 * MAX_TRACE_BYTES)),
        Attempt(stage.run.file(lease, _longer(trace, lease.max_tokens))),
    ]


def _bombs(stage: Stage) -> list[Attempt]:
    """A few bytes that ask a parser for gigabytes: nested lists, and lists, texts, byte strings and maps that
    announce four billion items; alone and as the payload of a signed trace."""
    announced = b"\xff\xff\xff\xff"
    bombs = [
        b"\xdd" + announced,  # a list
        (b"\xdd\x00\x01\x00\x00") * 1_000,  # lists in lists
        b"\xdf" + announced,  # a map
        b"\xdb" + announced,  # a text
        b"\xc6" + announced,  # a byte string
        b"\x91" * 100_000,  # depth alone
    ]
    file = stage.run.file(stage.works[0][0], stage.honest[0])
    inside = [codec.encode(replace(file, trace=replace(file.trace, payload=bomb))) for bomb in bombs]
    return [Attempt(data) for data in (*bombs, *inside)]


def _duplicate(stage: Stage) -> list[Attempt]:
    """The same trace once more."""
    return [Attempt(stage.run.file(lease, trace)) for (lease, _), trace in zip(stage.works, stage.honest, strict=True)]


# --- tokens that the seed does not draw ---


def _other_seed(lease: Lease, slot: int, number: int = 1) -> int:
    return (lease.seed_of(slot) or 0) ^ (_OTHER_SEED * number % 2**64)


def _unseeded(stage: Stage) -> list[Attempt]:
    return stage.draws(stage.drawn(stage.works[: stage.group], seed=_other_seed))


def _best_of_four(stage: Stage) -> list[Attempt]:
    """Of the honest completion and three others, the one with the highest reward."""
    works = stage.works[: stage.group]
    draws = [stage.honest[: stage.group]]
    for number in (1, 2, 3):

        def seed(lease: Lease, slot: int, number: int = number) -> int:
            return _other_seed(lease, slot, number)

        draws.append(stage.drawn(works, seed=seed))
    return stage.draws([max(four, key=lambda trace: trace.reward) for four in zip(*draws, strict=True)])


def _temperature(stage: Stage) -> list[Attempt]:
    """Colder tokens, with the logprobs that the lease's temperature gives them."""
    works = stage.works[: stage.group]
    return stage.draws(stage.proved(works, stage.drawn(works, temperature=0.8)))


def _drawn_with(choose: Callable[[Stage], Choose]) -> Callable[[Stage], list[Attempt]]:
    return lambda stage: stage.draws(stage.drawn(stage.works[: stage.group], choose=choose(stage)))


def _splice(stage: Stage) -> Choose:
    """One token in ten from another draw of the same policy."""

    def choose(
        logits: Tensor, seeds: Sequence[int], positions: Sequence[int], temperatures: Sequence[float]
    ) -> tuple[Tensor, Tensor]:
        spliced = [
            seed ^ _OTHER_SEED if (seed + position) % _SPLICED_IN == 0 else seed
            for seed, position in zip(seeds, positions, strict=True)
        ]
        return sample(logits, spliced, positions, temperatures)

    return choose


def _edit(stage: Stage) -> Choose:
    """One token, and only one, is another than the seed draws: one the policy could have drawn."""
    places = _forced_places(stage)

    def choose(
        logits: Tensor, seeds: Sequence[int], positions: Sequence[int], temperatures: Sequence[float]
    ) -> tuple[Tensor, Tensor]:
        forced = [place for place, at in enumerate(positions) if places[seeds[place]] == at]
        tokens, logprobs = sample(logits, seeds, positions, temperatures)
        if not forced:
            return tokens, logprobs
        others = logits.clone()
        others[forced, tokens[forced]] = -torch.inf
        shifted = [seed ^ _OTHER_SEED if place in forced else seed for place, seed in enumerate(seeds)]
        chosen, _ = sample(others, shifted, positions, temperatures)
        return chosen, _logprobs_of(logits, chosen, temperatures)

    return choose


def _early_stop(stage: Stage) -> Choose:
    """A stop token where the seed draws another."""
    places, stop = _forced_places(stage), min(stage.run.tokenizer.stop_ids)

    def choose(
        logits: Tensor, seeds: Sequence[int], positions: Sequence[int], temperatures: Sequence[float]
    ) -> tuple[Tensor, Tensor]:
        tokens, _ = sample(logits, seeds, positions, temperatures)
        for place, (seed, at) in enumerate(zip(seeds, positions, strict=True)):
            if places[seed] == at:
                tokens[place] = stop
        return tokens, _logprobs_of(logits, tokens, temperatures)

    return choose


def _no_stop(stage: Stage) -> Choose:
    """The best token that is no stop token, where the seed draws one."""
    stops = sorted(stage.run.tokenizer.stop_ids)

    def choose(
        logits: Tensor, seeds: Sequence[int], positions: Sequence[int], temperatures: Sequence[float]
    ) -> tuple[Tensor, Tensor]:
        others = logits.clone()
        others[:, stops] = -torch.inf
        tokens, _ = sample(others, seeds, positions, temperatures)
        return tokens, _logprobs_of(logits, tokens, temperatures)

    return choose


def _forced_places(stage: Stage) -> dict[int, int]:
    """For each slot's seed the position whose token is forced: a different one in every trace, in the first turn
    that is long enough or at the trace's end."""
    places = {}
    for number, ((lease, slot), trace) in enumerate(zip(stage.works, stage.honest, strict=True)):
        generated = trace.generated()
        offset = generated[min(_FORCED_AFTER + number % _FORCED_AFTER, len(generated) - 1)]
        places[lease.seed_of(slot) or 0] = len(lease.prompt) + offset - 1
    return places


def _logprobs_of(logits: Tensor, tokens: Tensor, temperatures: Sequence[float]) -> Tensor:
    scale = torch.tensor(temperatures, dtype=torch.float32, device=logits.device)[:, None]
    return torch.log_softmax(logits / scale, dim=1).gather(1, tokens.to(logits.device)[:, None])[:, 0]


def _after_stop(stage: Stage) -> list[Attempt]:
    stops = stage.run.tokenizer.stop_ids
    return stage.edited(lambda trace: _longer(trace, 1) if trace.tokens[-1] in stops else None)


# --- another context ---


def _other_prompt(stage: Stage) -> list[Attempt]:
    following = {
        work[0].lease_id: other[0].prompt
        for work, other in zip(stage.works, (*stage.works[1:], stage.works[0]), strict=True)
    }
    return stage.files(stage.drawn(stage.works[: stage.group], prompt=lambda lease: following[lease.lease_id]))


def _prompt_token(stage: Stage) -> list[Attempt]:
    """One token in the prompt's middle is the one that stands before it."""

    def changed(lease: Lease) -> tuple[int, ...]:
        prompt = lease.prompt
        place = next(p for p in range(len(prompt) // 2, len(prompt)) if prompt[p] != prompt[p - 1])
        return (*prompt[:place], prompt[place - 1], *prompt[place + 1 :])

    return stage.files(stage.drawn(stage.works, prompt=changed))


# --- other weights ---


@contextmanager
def altered(policy: Path, dtype: str, change: Callable[[Tensor], Tensor]) -> Iterator[PolicyModel]:
    """The policy with every matrix changed, rounded to the dtype it computes in."""
    model = PolicyModel(policy, dtype, "cpu")
    seen = set()
    with torch.inference_mode():
        for parameter in model.parameters().values():
            if parameter.dim() == 2 and parameter.data_ptr() not in seen:
                seen.add(parameter.data_ptr())
                parameter.copy_(change(parameter.float()))
    yield quick(model)


def quick(model: PolicyModel) -> PolicyModel:
    """The model, made fast where it would take minutes: bfloat16 on a CPU. Float32 workers keep other kernels than
    the verifier's, as engines do."""
    if model.dtype is torch.bfloat16:
        model.pack()
    return model


def perturbed(share: float) -> Callable[[Tensor], Tensor]:
    """Normal noise of so much of each matrix's standard deviation."""
    generator = torch.Generator().manual_seed(3)
    return lambda w: w + torch.randn(w.shape, generator=generator) * w.std() * share


def off_by(share: float) -> Callable[[Tensor], Tensor]:
    """Each weight off by so much of itself, up or down."""
    generator = torch.Generator().manual_seed(4)
    return lambda w: w * (1 + share * (torch.randint(0, 2, w.shape, generator=generator) * 2 - 1))


def one_step(rate: float) -> Callable[[Tensor], Tensor]:
    """The version before: each weight off by one step of Adam, in bfloat16 as policies are published."""
    generator = torch.Generator().manual_seed(5)

    def change(w: Tensor) -> Tensor:
        signs = torch.randint(0, 2, w.shape, generator=generator) * 2 - 1
        return (w + rate * signs).to(torch.bfloat16).float()

    return change


def int_rows(bits: int) -> Callable[[Tensor], Tensor]:
    """Symmetric integers, one scale a row."""
    return lambda w: _symmetric(w, bits)


def int_groups(bits: int, size: int) -> Callable[[Tensor], Tensor]:
    """Symmetric integers, one scale for `size` weights of a row."""
    return lambda w: _in_groups(w, size, lambda groups: _symmetric(groups, bits))


def int_grid(bits: int, size: int) -> Callable[[Tensor], Tensor]:
    """Unsigned integers between the least and the greatest of `size` weights: the grid of GGUF's Q4_1."""

    def change(groups: Tensor) -> Tensor:
        low = groups.amin(1, keepdim=True)
        scale: Tensor = ((groups.amax(1, keepdim=True) - low) / (2**bits - 1)).clamp_min(1e-12)
        return ((groups - low) / scale).round() * scale + low

    return lambda w: _in_groups(w, size, change)


def fp8(w: Tensor) -> Tensor:
    """float8 e4m3 with one scale a row, as inference engines quantise."""
    scale = w.abs().amax(1, keepdim=True).clamp_min(1e-12) / 448
    rounded: Tensor = (w / scale).to(torch.float8_e4m3fn).float()
    return rounded * scale


def _symmetric(w: Tensor, bits: int) -> Tensor:
    scale: Tensor = w.abs().amax(1, keepdim=True).clamp_min(1e-12) / (2 ** (bits - 1) - 1)
    return (w / scale).round() * scale


def _in_groups(w: Tensor, size: int, change: Callable[[Tensor], Tensor]) -> Tensor:
    if w.shape[1] % size:
        return change(w)
    return change(w.reshape(-1, size)).reshape(w.shape)


def _weights(change: Callable[[], Callable[[Tensor], Tensor]], name: str, *, many: bool) -> Callable[..., Any]:
    def make(stage: Stage) -> list[Attempt]:
        return stage.files(stage.by_model(name, len(stage.works) if many else stage.group, change()))

    return make


def _proved_by_policy(stage: Stage) -> list[Attempt]:
    """A cheap model draws, the real one proves: tokens of int4 weights with honest proofs and logprobs."""
    traces = stage.by_model("int4", stage.group, int_groups(4, 64))
    return stage.files(stage.proved(stage.works[: stage.group], traces))


def _smaller(stage: Stage) -> list[Attempt]:
    """The policy without its last layer."""
    folder = without_last_layer(stage.run.policy, stage.scratch / "smaller")
    if folder is None:
        return []
    return stage.files(stage.drawn(stage.works[: stage.group], quick(PolicyModel(folder, stage.dtype, "cpu"))))


def without_last_layer(policy: Path, folder: Path) -> Path | None:
    """The policy's folder copied with one layer less; None where its configuration does not number its layers."""
    from safetensors.torch import load_file

    config = json.loads((policy / "config.json").read_text(encoding="utf-8"))
    layers = config.get("num_hidden_layers", 0)
    if layers < 2:
        return None
    shutil.copytree(policy, folder, dirs_exist_ok=True)
    config["num_hidden_layers"] = layers - 1
    if config.get("layer_types"):
        config["layer_types"] = config["layer_types"][:-1]
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for path in folder.glob("*.safetensors"):
        kept = {name: value for name, value in load_file(path).items() if f".{layers - 1}." not in name}
        write_tensors(path, kept)
    try:
        PolicyModel(folder, "float32", "cpu")
    except EngineError:
        return None
    return folder


_MODULUS_ZERO: Final = bytes(2)
_OVER_THE_FIELD: Final = b"\xff\xff"

ATTACKS: Final = (
    Attack("zero proof", Caught.TRACE, _body(lambda body: bytes(len(body)))),
    Attack("constant polynomial", Caught.TRACE, _body(lambda body: b"\x3f\x80" + bytes(len(body) - 2))),
    Attack("noise as proof", Caught.TRACE, _noise),
    Attack("proof of other tokens", Caught.TRACE, _of_other_tokens),
    Attack("proof of another trace", Caught.TRACE, _replayed),
    Attack("truncated proof", Caught.TRACE, _proofs(lambda proofs: (*proofs[:-1], proofs[-1][:-2]))),
    Attack("odd-length proof", Caught.TRACE, _proofs(lambda proofs: (*proofs[:-1], proofs[-1][:-1]))),
    Attack("missing proof", Caught.TRACE, _proofs(lambda proofs: proofs[:-1])),
    Attack("extra proof", Caught.TRACE, _proofs(lambda proofs: (*proofs, proofs[0]))),
    Attack("modulus 0", Caught.TRACE, _proofs(lambda proofs: tuple(_MODULUS_ZERO + proof[2:] for proof in proofs))),
    Attack("coefficient over the field", Caught.TRACE, _body(lambda body: body[:-2] + _OVER_THE_FIELD)),
    Attack("other policy version", Caught.TRACE, _other_version),
    Attack("forged logprobs", Caught.TRACE, _logprobs),
    Attack("forged observation", Caught.TRACE, _observation),
    Attack(
        "forged reward",
        Caught.TRACE,
        lambda stage: stage.edited(lambda trace: replace(trace, reward=trace.reward + 0.5)),
    ),
    Attack("changed after signing", Caught.TRACE, _altered_after_signing),
    Attack("re-signed copy", Caught.TRACE, _resigned),
    Attack("other node's lease", Caught.TRACE, _others_lease),
    Attack("expired lease", Caught.TRACE, _late),
    Attack(
        "duplicate",
        Caught.LEDGER,
        _duplicate,
        "the file is honest: only the ledger knows that the slot was answered (LEASE_REDEEMED, or the same receipt)",
    ),
    Attack("oversized", Caught.TRACE, _oversized),
    Attack("decompression bomb", Caught.TRACE, _bombs),
    Attack("tokens after the stop", Caught.TRACE, _after_stop),
    Attack("drawn without the seed", Caught.TRACE, _unseeded),
    Attack("best of 4", Caught.TRACE, _best_of_four),
    Attack("temperature 0.8", Caught.TRACE, _temperature),
    Attack("10 % spliced", Caught.TRACE, _drawn_with(_splice)),
    Attack("one token edited", Caught.TRACE, _drawn_with(_edit)),
    Attack("stop token early", Caught.TRACE, _drawn_with(_early_stop)),
    Attack("stop token suppressed", Caught.TRACE, _drawn_with(_no_stop)),
    Attack("other prompt", Caught.TRACE, _other_prompt),
    Attack("one prompt token changed", Caught.NODE, _prompt_token),
    Attack("smaller model", Caught.TRACE, _smaller),
    Attack("int4", Caught.TRACE, _weights(lambda: int_groups(4, 64), "int4", many=False)),
    Attack("int4 draws, the policy proves", Caught.TRACE, _proved_by_policy),
    Attack("int8", Caught.NODE, _weights(lambda: int_rows(8), "int8", many=True)),
    Attack("fp8", Caught.NODE, _weights(lambda: fp8, "fp8", many=True)),
    Attack("weights off by 1 %", Caught.NODE, _weights(lambda: perturbed(0.01), "noise", many=True)),
    Attack("one step behind at 1e-3", Caught.TRACE, _weights(lambda: one_step(1e-3), "before", many=False)),
    Attack(
        "weights off by 0.1 %",
        Caught.NOTHING,
        _weights(lambda: off_by(1e-3), "off", many=False),
        "less than half a step of bfloat16: such an engine has the policy's very weights; float32 engines show it",
    ),
    Attack(
        "one step behind at 1e-6",
        Caught.NOTHING,
        _weights(lambda: one_step(1e-6), "stale", many=False),
        "most weights round to the same bfloat16: the tokens are those of the policy, and the learner's staleness "
        "limit allows versions far older",
    ),
    Attack(
        "int4 on the policy's own grid",
        Caught.NOTHING,
        _weights(lambda: int_grid(4, 32), "grid", many=False),
        "a policy that came from this grid has the same weights after it, and nothing is gained; any training step "
        "leaves the grid",
    ),
)


def named(names: Sequence[str]) -> tuple[Attack, ...]:
    """The attacks of these names, all of them for none. Raises UsageError for a name that is none."""
    known = {attack.name: attack for attack in ATTACKS}
    for name in names:
        if name not in known:
            raise UsageError(f"'{name}' is not a control; there are: {', '.join(known)}")
    return tuple(known[name] for name in names) or ATTACKS
