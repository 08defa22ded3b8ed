"""Measures what honest evidence of a pair of engines looks like to a verifier, and makes limits and score tables of
it (SPEC 8.11, 10.6, 10.8). A pair that is too noisy to tell weights rounded to int8 from honest ones gets none.

Honest completions come from the reference node, or are traces of nodes that are trusted. The trainer's auditor calls
`calibrate` on its own policy; `rlverify calibrate` does for everyone. Not here: the statistics (scores.py), the
ceilings (thresholds.py), and judging by a calibration (check.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from protocol import codec, identity
from protocol.calibration import Calibration, Limits, Pair, Sample, ScoreTable, check_calibration
from protocol.envelope import seal
from protocol.environments import base
from protocol.errors import EngineError, UsageError
from protocol.lease import Lease
from protocol.limits import NODE_EVIDENCE_NATS, PROOF_CHUNK_TOKENS, PROOF_MIN_JUDGED_TOKENS, PROOF_TOP_K
from protocol.outputs import write_whole
from protocol.policy import policy_root
from protocol.trace import Trace
from protocol.verdict import Outcome
from verify.files import Evidence, device_kind, read_evidence, worker_of
from verify.judge import judge
from verify.model import PolicyModel
from verify.prefill import Passage, Verifier
from verify.reference import ReferenceRun, draw, play
from verify.scores import chunk_table, margin_table, sigma_of, spread, table_scores
from verify.thresholds import floors_for, limits_for
from verify.toploc import ChunkResult, build_many, compare_many

Floats = NDArray[np.float64]

TRACES: Final = 32
TOKENS: Final = 64
MIN_TOKENS: Final = 1_024
MIN_CHUNKS: Final = 32
POWER_CHUNKS: Final = 64  # 32 traces of 64 tokens: within so many int8 must be told
_ROUNDS: Final = 4  # times TRACES, where traces are short
_SLOTS: Final = 2  # completions of one task
_QUANTILES: Final = (0.5, 0.9, 0.99, 0.999, 1.0)
_SIGMAS: Final = 7  # a margin is the difference of two logits: five of its standard deviations
_LEAST_SIGMAS: Final = 5
_SPARE: Final = 2.0  # a limit, in the largest value seen
_FOREIGN: Final = 1.1  # mantissa means of another engine, in those of the one that was measured: vLLM has 1.06


class TooNoisy(UsageError):
    """Honest evidence of this pair cannot be told from small cheats."""


class TooFew(UsageError):
    """The sample is too small to say anything."""


@dataclass(frozen=True, slots=True)
class Specimen:
    """An honest completion as a node would hand it in."""

    passage: Passage
    logprobs: tuple[float, ...]
    proofs: tuple[bytes, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Measured:
    """A specimen against our own numbers: one row a generated token [n], at temperature 1 where that matters.

    margins, differences: times min(1, T). logprobs: ours, at T. chunks: the judged ones. hidden: ours, bfloat16.
    """

    margins: Floats
    differences: Floats
    logprobs: Floats
    temperature: float
    chunks: tuple[ChunkResult, ...]
    hidden: Tensor

    @property
    def mantissa_means(self) -> Floats:
        return np.array([each.mantissa_mean for each in self.chunks])


@dataclass(frozen=True, slots=True)
class Subject:
    """What a calibration is about."""

    run: bytes
    policy_version: int
    policy_root: bytes
    pair: Pair


def calibrate(
    policy: Path,
    verifier: Verifier,
    *,
    worker_dtype: str,
    environments: Sequence[tuple[str, str]],
    created_ms: int,
    run: bytes = bytes(32),
    policy_version: int = 0,
    worker_engine: str = "transformers",
    device: str = "cpu",
    traces: int = TRACES,
    tokens: int = TOKENS,
    trusted: Sequence[tuple[Trace, Lease]] = (),
) -> Calibration:
    """A calibration of `policy` for workers of a dtype and a verifier that holds that policy.

    Specimens are `trusted` traces where there are some, all of one engine; else `traces` episodes of the
    environments (name, parameters), of `tokens` tokens a turn, drawn here on `device` by the reference node, which
    stands for `worker_engine`. Deterministic but for kernels. Raises TooFew, TooNoisy, and what the reference node
    and the verifier raise.
    """
    worker = PolicyModel(policy, worker_dtype, device)
    if trusted:
        specimens = [specimen_of(trace, lease) for trace, lease in trusted]
        engine = _only_engine(trusted, worker_dtype)
    else:
        specimens = draw_specimens(worker, policy, environments, traces, tokens)
        engine = (worker_engine, worker_dtype, device_kind(device))
    measured = measure(verifier, specimens)
    require_enough(measured)
    found = verifier.fingerprint
    pair = Pair(*engine, found.engine[:64], found.dtype, device_kind(found.device))
    subject = Subject(run, policy_version, policy_root(policy), pair)
    round_to_int8(worker)
    return derive(subject, measured, imitation_means(worker, specimens, measured), created_ms)


def _only_engine(trusted: Sequence[tuple[Trace, Lease]], dtype: str) -> tuple[str, str, str]:
    engines = sorted({worker_of(trace) for trace, _ in trusted})
    if len(engines) > 1 or engines[0][1] != dtype:
        names = ", ".join(" ".join(each) for each in engines)
        raise UsageError(f"the traces come from {names}: a calibration holds for one engine, here one of {dtype}")
    return engines[0]


@dataclass(frozen=True, slots=True)
class Order:
    """What `rlverify calibrate` was asked for. trusted: a folder of trace files, instead of drawing here."""

    policy: Path
    worker_dtype: str
    verifier_dtype: str
    trusted: Path | None
    traces: int
    tokens: int
    environment: tuple[str, str]
    worker_engine: str
    device: str
    key: Path
    out: Path

    def __post_init__(self) -> None:
        if self.traces < 1 or self.tokens < 1:
            raise UsageError("--traces-count and --tokens are at least 1")
        if self.out.exists():
            raise UsageError(f"{self.out} exists already: move it away, or write elsewhere")


def carry_out(order: Order, created_ms: int) -> Calibration:
    """Calibrate, and write the Signed Calibration. Nothing is written, and no key made, where it is refused."""
    limits_for(order.worker_dtype, order.verifier_dtype)
    evidence = [] if order.trusted is None else _trusted(order.trusted, order.policy)
    leases = [each.lease for each in evidence]
    calibration = calibrate(
        order.policy,
        Verifier(order.policy, order.verifier_dtype, order.device),
        worker_dtype=order.worker_dtype,
        environments=[order.environment],
        created_ms=created_ms,
        run=evidence[0].run if evidence else bytes(32),
        policy_version=leases[0].policy_version if leases else 0,
        worker_engine=order.worker_engine,
        device=order.device,
        traces=order.traces,
        tokens=order.tokens,
        trusted=[(each.trace, each.lease) for each in evidence],
    )
    write_whole("the calibration", order.out, codec.encode(seal(_key(order.key), calibration)))
    return calibration


def _key(path: Path) -> identity.Identity:
    if not path.exists():
        identity.save_identity(identity.Identity.generate(), path)
    return identity.load_identity(path)


def _trusted(folder: Path, policy: Path) -> list[Evidence]:
    """The trace files of a folder, each of the policy and accepted by the checks that need no model."""
    paths = sorted(folder.glob("*.msgpack")) if folder.is_dir() else []
    if not paths:
        raise UsageError(
            f"there are no trace files (*.msgpack) in {folder}: give a folder of what `rltrainer export-trace` wrote"
        )
    root = policy_root(policy)
    found: list[Evidence] = []
    for path in paths:
        evidence = read_evidence(path)
        if evidence.lease.policy_root != root:
            raise UsageError(
                f"{path} was drawn from version {evidence.lease.policy_version}, not from the policy in {policy}"
            )
        if found and evidence.run != found[0].run:
            raise UsageError(f"{path} is of another run than {paths[0]}: a calibration is of one run")
        judged = judge(evidence, policy, with_model=False)
        if judged.outcome is not Outcome.ACCEPTED:
            raise UsageError(f"{path} is not honest: {judged.outcome} ({judged.reason}): {judged.detail}")
        found.append(evidence)
    return found


# --- specimens ---


def specimen_of(trace: Trace, lease: Lease) -> Specimen:
    """A trace that passed the cheap checks. Raises UsageError where its slot is not leased."""
    seed = lease.seed_of(trace.slot)
    if seed is None:
        raise UsageError(f"slot {trace.slot} is not in the lease {lease.lease_id.hex()}")
    passage = Passage(lease.prompt, trace.tokens, trace.generated(), seed, lease.temperature)
    return Specimen(passage, trace.logprobs, trace.proofs)


def draw_specimens(
    model: PolicyModel, policy: Path, environments: Sequence[tuple[str, str]], traces: int, tokens: int
) -> list[Specimen]:
    """Episodes of every environment in turn, and more of them where they are short. Where episodes are too short to
    be proved, or still too few, completions that go on past their stop tokens are added."""
    found: list[Specimen] = []
    share = math.ceil(traces / len(environments) / _SLOTS)
    leases: list[tuple[Lease, int]] = []
    for turn in range(_ROUNDS):
        for name, parameters in environments:
            run, environment = ReferenceRun.found(policy, name, parameters), base.load(name, parameters)
            tasks = range(turn * share, (turn + 1) * share)
            made = [run.lease(task, environment, slots=_SLOTS, parameters=parameters) for task in tasks]
            leases += [(_sized(each, environment.max_turns, tokens, model), slot) for each in made for slot in (0, 1)]
        new = leases[len(found) :]
        played = play(model, run.tokenizer, new)
        found += [specimen_of(trace, lease) for trace, (lease, _) in zip(played, new, strict=True)]
        if _tokens(found) >= MIN_TOKENS:
            break
    return found + _continued(model, found, leases, tokens)


def _sized(lease: Lease, turns: int, tokens: int, model: PolicyModel) -> Lease:
    room = model.max_positions - len(lease.prompt)
    return replace(lease, max_turn_tokens=tokens, max_tokens=max(1, min((tokens + 32) * turns, room)))


def _continued(
    model: PolicyModel, found: Sequence[Specimen], leases: Sequence[tuple[Lease, int]], tokens: int
) -> list[Specimen]:
    """What is missing of MIN_TOKENS and MIN_CHUNKS, drawn from the same prompts under other seeds."""
    prompts = [lease.prompt for lease, _ in leases]
    length = min(max(tokens, PROOF_CHUNK_TOKENS), model.max_positions - max(map(len, prompts)))
    chunks = sum(_judged(len(each.passage.generated)) for each in found)
    count = max(
        math.ceil((MIN_TOKENS - _tokens(found)) / max(1, length)),
        math.ceil((MIN_CHUNKS - chunks) / max(1, _judged(length))),
    )
    if count <= 0 or length < 1:
        return []
    prompts = [prompts[index % len(prompts)] for index in range(count)]
    seeds = list(range(1, count + 1))
    drawn = draw(model, prompts, seeds, [1.0] * count, length, frozenset())
    proofs = build_many([each.hidden for each in drawn])
    return [
        Specimen(Passage(prompt, each.tokens, tuple(range(len(each.tokens))), seed, 1.0), each.logprobs, proof)
        for prompt, seed, each, proof in zip(prompts, seeds, drawn, proofs, strict=True)
    ]


def _tokens(specimens: Sequence[Specimen]) -> int:
    return sum(len(each.passage.generated) for each in specimens)


def _judged(tokens: int) -> int:
    """Chunks of so many generated tokens that are judged."""
    return (tokens + PROOF_CHUNK_TOKENS - PROOF_MIN_JUDGED_TOKENS) // PROOF_CHUNK_TOKENS


# --- measuring ---


def measure(verifier: Verifier, specimens: Sequence[Specimen]) -> list[Measured]:
    """In the order given. Raises EngineError when this machine could not compute them, ProofError (a UsageError of
    whoever chose them) for a malformed proof."""
    ours = verifier.recompute([each.passage for each in specimens])
    compared = compare_many([(mine.hidden, each.proofs) for mine, each in zip(ours, specimens, strict=True)])
    measured = []
    for mine, each, chunks in zip(ours, specimens, compared, strict=True):
        scale = min(1.0, each.passage.temperature)
        logprobs = mine.logprobs.double().numpy()
        measured.append(
            Measured(
                margins=mine.margins.double().numpy() * scale,
                differences=np.abs(np.asarray(each.logprobs) - logprobs) * scale,
                logprobs=logprobs,
                temperature=each.passage.temperature,
                chunks=tuple(chunk for chunk in chunks if chunk.length >= PROOF_MIN_JUDGED_TOKENS),
                hidden=mine.hidden,
            )
        )
    return measured


def require_enough(measured: Sequence[Measured]) -> None:
    """Raises TooFew, saying how many more are needed."""
    tokens = sum(len(each.margins) for each in measured)
    chunks = sum(len(each.chunks) for each in measured)
    if tokens < MIN_TOKENS or chunks < MIN_CHUNKS:
        more = [
            f"{least - have} more {what}"
            for least, have, what in (
                (MIN_TOKENS, tokens, "tokens"),
                (MIN_CHUNKS, chunks, f"chunks of {PROOF_MIN_JUDGED_TOKENS} tokens or more"),
            )
            if have < least
        ]
        raise TooFew(
            f"{len(measured)} traces with {tokens} tokens and {chunks} chunks are too few to calibrate by: "
            f"{' and '.join(more)} are needed, from more traces or longer ones"
        )


def enough(traces: Iterable[Trace]) -> bool:
    """Whether a calibration can be made of these traces, by their lengths."""
    lengths = [len(trace.generated()) for trace in traces]
    return sum(lengths) >= MIN_TOKENS and sum(map(_judged, lengths)) >= MIN_CHUNKS


def round_to_int8(model: PolicyModel) -> None:
    """Round the weights of the live model's layers to int8 and back, a scale a row; embeddings are left alone."""
    with torch.inference_mode():
        for name, weight in model.parameters().items():
            if weight.dim() == 2 and "embed" not in name and "lm_head" not in name:
                wide = weight.float()
                step = wide.abs().amax(dim=1, keepdim=True).clamp_min(1e-12) / 127
                weight.copy_((wide / step).round() * step)


def imitation_means(imitation: PolicyModel, specimens: Sequence[Specimen], measured: Sequence[Measured]) -> Floats:
    """Mantissa means of the first MIN_CHUNKS chunks, had another model proved the same tokens."""
    pairs: list[tuple[Tensor, Tensor]] = []
    chunks = 0
    for each, ours in zip(specimens, measured, strict=True):
        if chunks < MIN_CHUNKS and ours.chunks:
            pairs.append((ours.hidden, _states(imitation, each.passage)))
            chunks += len(ours.chunks)
    proofs = build_many([theirs for _, theirs in pairs])
    compared = compare_many([(ours, proof) for (ours, _), proof in zip(pairs, proofs, strict=True)])
    judged = [chunk for found in compared for chunk in found if chunk.length >= PROOF_MIN_JUDGED_TOKENS]
    return np.array([chunk.mantissa_mean for chunk in judged])


def _states(model: PolicyModel, passage: Passage) -> Tensor:
    """Hidden states, bfloat16 [n, hidden], that predict the generated tokens."""
    fed = (*passage.prompt, *passage.tokens[: passage.generated[-1]])
    rows = [len(passage.prompt) - 1 + offset for offset in passage.generated]
    ids, wanted = torch.tensor([fed], device=model.device), torch.tensor(rows, device=model.device)
    with torch.inference_mode():
        hidden, _ = model.run(ids, wanted, head=False)
    if not bool(torch.isfinite(hidden).all()):
        raise EngineError("the states of the policy rounded to int8 are not finite: it cannot be calibrated")
    return hidden.to(torch.bfloat16).cpu()


# --- deriving ---


def derive(subject: Subject, measured: Sequence[Measured], imitation: Floats, created_ms: int) -> Calibration:
    """The calibration that follows from honest specimens and from mantissa means of int8 weights. Pure.

    Raises TooFew, and TooNoisy where a limit would be above its ceiling or int8 would not be told.
    """
    require_enough(measured)
    margins = np.concatenate([each.margins for each in measured])
    logprobs = np.concatenate([each.logprobs for each in measured])
    temperatures = np.concatenate([np.full(len(each.margins), each.temperature) for each in measured])
    diversity = float(np.mean(1 - np.exp(np.minimum(logprobs, 0.0))))
    differences = np.concatenate([each.differences for each in measured])
    sigma = max(sigma_of(int(np.count_nonzero(margins > 0)), len(margins), diversity), spread(differences, logprobs))
    limits = _limits(subject.pair, measured, sigma)
    try:
        margin_scores = margin_table(margins, logprobs, temperatures)
        proof_scores = chunk_table([each.mantissa_means for each in measured])
    except UsageError as error:
        raise TooNoisy(_too_noisy(str(error))) from None
    nats = _int8_nats(proof_scores, imitation)
    needed = NODE_EVIDENCE_NATS + math.log(len(margin_scores.alternatives) + len(proof_scores.alternatives))
    # SPEC 10.6: a pair of which int8 is not told within 32 traces of 64 tokens gets no calibration.
    if not nats * POWER_CHUNKS >= needed:
        raise TooNoisy(_too_noisy(f"int8 gives {nats:.3f} nats a chunk, {needed / POWER_CHUNKS:.3f} are needed"))
    calibration = Calibration(
        run=subject.run,
        policy_version=subject.policy_version,
        policy_root=subject.policy_root,
        pair=subject.pair,
        limits=limits,
        margins=margin_scores,
        proofs=proof_scores,
        sample=_sample(measured, margins, sigma, nats),
        created_ms=created_ms,
    )
    check_calibration(calibration)
    return calibration


def provisional(measured: Calibration) -> Calibration:
    """What other engines of the same dtype are judged by until somebody measures their pair: the tables of one that
    was measured, with room for what another engine rounds otherwise, and the ceilings for limits (SPEC 10.6)."""
    room = 2 * measured.sample.sigma
    return replace(
        measured,
        pair=replace(measured.pair, worker_engine="", worker_device=""),
        limits=limits_for(measured.pair.worker_dtype, measured.pair.verifier_dtype),
        margins=replace(measured.margins, edges=tuple(2 * edge + room for edge in measured.margins.edges)),
        proofs=replace(measured.proofs, edges=tuple(_FOREIGN * edge for edge in measured.proofs.edges)),
    )


def _too_noisy(why: str) -> str:
    return f"this pair is too noisy to tell int8 from honest: use matching dtypes ({why})"


def _int8_nats(table: ScoreTable, imitation: Floats) -> float:
    """What a chunk says for the likeliest alternative, mean."""
    return max(table_scores(table, imitation)) / max(1, len(imitation))


def _limits(pair: Pair, measured: Sequence[Measured], sigma: float) -> Limits:
    ceilings = limits_for(pair.worker_dtype, pair.verifier_dtype)
    floors = floors_for(pair.worker_dtype, pair.verifier_dtype)
    chunks = [chunk for each in measured for chunk in each.chunks]
    seen = {
        "exponent_mismatches": max(chunk.exponent_mismatches * _share(chunk) for chunk in chunks),
        "sign_mismatches": max(chunk.sign_mismatches * _share(chunk) for chunk in chunks),
        "mantissa_mean": max(chunk.mantissa_mean for chunk in chunks),
        "mantissa_median": max(chunk.mantissa_median for chunk in chunks),
        "logprob_tolerance": max(float(each.differences.max()) for each in measured),
    }
    largest = max(float(each.margins.max()) for each in measured)
    for name, value in {"margin_hard": max(2 * largest, _LEAST_SIGMAS * sigma), **seen}.items():
        # SPEC 10.6: what honesty needs is within the ceiling, or there are no limits.
        if not value <= getattr(ceilings, name):
            raise TooNoisy(_too_noisy(f"{name} needs {value:.3g}, at most {getattr(ceilings, name):g}"))
    spare = {name: _SPARE * value for name, value in seen.items()} | {"margin_hard": max(2 * largest, _SIGMAS * sigma)}
    held = {name: min(max(each, getattr(floors, name)), getattr(ceilings, name)) for name, each in spare.items()}
    return Limits(margin_budget=ceilings.margin_budget, **held)


def _share(chunk: ChunkResult) -> float:
    """What one mismatch of a chunk counts where 128 points are compared."""
    return PROOF_TOP_K / chunk.compared


def _sample(measured: Sequence[Measured], margins: Floats, sigma: float, nats: float) -> Sample:
    chunks = [chunk for each in measured for chunk in each.chunks]
    return Sample(
        traces=len(measured),
        tokens=len(margins),
        chunks=len(chunks),
        mismatches=int(np.count_nonzero(margins > 0)),
        sigma=sigma,
        margins=_quantiles(margins),
        logprobs=_quantiles(np.concatenate([each.differences for each in measured])),
        exponents=_quantiles(np.array([float(chunk.exponent_mismatches) for chunk in chunks])),
        mantissa_means=_quantiles(np.array([chunk.mantissa_mean for chunk in chunks])),
        mantissa_medians=_quantiles(np.array([chunk.mantissa_median for chunk in chunks])),
        int8_nats=nats,
    )


def _quantiles(values: Floats) -> tuple[float, ...]:
    return tuple(float(each) for each in np.quantile(values, _QUANTILES))
