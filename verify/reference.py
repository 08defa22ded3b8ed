"""The reference node: honest traces, drawn here with the verifier's own model code, and nothing of node/.

Calibration and the negative controls need traces of a policy whose history is known: drawn by the seeds, one token
at a time from a cache, with the proofs of those very passes. What a cheat changes is a keyword; the default of
each is what an honest node does. Not here: the attacks (attacks.py), a node's speed, sessions and disks (node/).

A batch is padded on the left, so that every row's newest token stands in the last column. Each turn of an episode
is prefilled anew, as in an engine whose cache was needed for others in between.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from protocol import identity
from protocol.envelope import Signed, seal
from protocol.environments import base
from protocol.environments.base import Environment
from protocol.environments.rollout import has_room, next_observation, reply_text, turn_budget
from protocol.environments.tokenizer import PolicyTokenizer
from protocol.errors import UsageError
from protocol.lease import Lease, SeedInput, Slot, slot_seed
from protocol.policy import policy_root
from protocol.run import EnvironmentShare, Genesis, run_id
from protocol.trace import EngineDescriptor, Span, SpanKind, Trace, TraceFile
from protocol.verdict import Receipt
from verify.model import PolicyModel
from verify.sampling import sample
from verify.toploc import build_many

# logits [B, V] float32, seeds, positions, temperatures -> tokens int64 [B], logprobs float32 [B].
Choose = Callable[[Tensor, Sequence[int], Sequence[int], Sequence[float]], tuple[Tensor, Tensor]]

_BATCH: Final = 64  # rows decoded together
_PREFILL_TOKENS: Final = 4_096  # padded prompt tokens of a batch: bounds memory
_ISSUED_MS: Final = 1_700_000_000_000
_LEASE_MS: Final = 120_000
_GROUP: Final = 8


@dataclass(frozen=True, slots=True, eq=False)
class Drawn:
    """One completion: token ids with their stop token, the policy's logprobs of them, and hidden bfloat16
    [n, hidden], row i being the state that predicted token i."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    hidden: Tensor


def draw(
    model: PolicyModel,
    prompts: Sequence[tuple[int, ...]],
    seeds: Sequence[int],
    temperatures: Sequence[float],
    most: Sequence[int] | int,
    stops: frozenset[int],
    *,
    choose: Choose = sample,
) -> list[Drawn]:
    """Continue each prompt until a stop token or `most` tokens, by cached decoding in batches of similar length.

    Raises UsageError for a prompt that is empty or does not fit the policy's positions with `most` tokens after it.
    """
    budgets = [most] * len(prompts) if isinstance(most, int) else list(most)
    rows = [_Row(*each) for each in zip(prompts, seeds, temperatures, budgets, strict=True)]
    for number, row in enumerate(rows):
        if not row.prompt or row.most < 1 or len(row.prompt) + row.most > model.max_positions:
            raise UsageError(
                f"prompt {number} has {len(row.prompt)} tokens and {row.most} to draw: both must be at least 1 and "
                f"together at most the policy's {model.max_positions} positions"
            )
    with torch.inference_mode():
        for batch in _batches(rows):
            _decode(model, batch, stops, choose)
    return [Drawn(tuple(row.tokens), tuple(row.logprobs), torch.stack(row.hidden)) for row in rows]


@dataclass(slots=True, eq=False)
class _Row:
    """One completion in the making."""

    prompt: tuple[int, ...]
    seed: int
    temperature: float
    most: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    hidden: list[Tensor] = field(default_factory=list)

    @property
    def position(self) -> int:
        """Absolute position of the input token whose state predicts the next one."""
        return len(self.prompt) + len(self.tokens) - 1


def _batches(rows: Sequence[_Row]) -> list[list[_Row]]:
    """Rows of similar length together."""
    batches: list[list[_Row]] = []
    for row in sorted(rows, key=lambda each: len(each.prompt)):
        last = batches[-1] if batches else []
        if last and len(last) < _BATCH and (len(last) + 1) * len(row.prompt) <= _PREFILL_TOKENS:
            last.append(row)
        else:
            batches.append([row])
    return batches


def _decode(model: PolicyModel, rows: list[_Row], stops: frozenset[int], choose: Choose) -> None:
    width = max(len(row.prompt) for row in rows)
    padding = torch.tensor([width - len(row.prompt) for row in rows], device=model.device)
    ids = torch.tensor([(0,) * (width - len(row.prompt)) + row.prompt for row in rows], device=model.device)
    columns = torch.arange(width, device=model.device)[None]
    positions = (columns - padding[:, None]).clamp_min(0)
    cache = model.new_cache()
    while True:
        length = ids.shape[1]
        last = torch.arange(1, len(rows) + 1, device=model.device) * length - 1
        # No mask where nothing is padded: attention is causal then anyway.
        mask = _seen(padding, width) if bool(padding.any()) else None
        hidden, logits = model.run(ids, last, positions, mask, cache)
        _take(rows, hidden, logits, choose)
        open_ = [place for place, row in enumerate(rows) if row.tokens[-1] not in stops and len(row.tokens) < row.most]
        if not open_:
            return
        if len(open_) < len(rows):
            keep = torch.tensor(open_, device=model.device)
            cache.batch_select_indices(keep)
            padding, rows = padding[keep], [rows[place] for place in open_]
        ids = torch.tensor([[row.tokens[-1]] for row in rows], device=model.device)
        positions = torch.tensor([[row.position] for row in rows], device=model.device)
        width += 1


def _seen(padding: Tensor, columns: int) -> Tensor:
    """Attention mask [B, columns] of transformers' two-dimensional form: 0 for padding."""
    return (torch.arange(columns, device=padding.device)[None] >= padding[:, None]).long()


def _take(rows: Sequence[_Row], hidden: Tensor, logits: Tensor, choose: Choose) -> None:
    kept = hidden.to(torch.bfloat16).cpu()
    tokens, logprobs = choose(
        logits.float(), [row.seed for row in rows], [row.position for row in rows], [row.temperature for row in rows]
    )
    for row, state, token, logprob in zip(rows, kept, tokens.tolist(), logprobs.tolist(), strict=True):
        row.hidden.append(state)
        row.tokens.append(token)
        row.logprobs.append(logprob)


@dataclass(slots=True, eq=False)
class _Episode:
    """One slot of a lease on its way: what was drawn and answered so far."""

    lease: Lease
    slot: int
    environment: Environment
    prompt: tuple[int, ...]
    seed: int
    temperature: float
    tokens: list[int] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    hidden: list[Tensor] = field(default_factory=list)
    replies: tuple[str, ...] = ()
    over: bool = False

    @property
    def budget(self) -> int:
        return turn_budget(self.lease.max_turn_tokens, self.lease.max_tokens, len(self.tokens))

    def add(self, drawn: Drawn, tokenizer: PolicyTokenizer) -> None:
        """A turn, and what the environment answers to it."""
        self.tokens += drawn.tokens
        self.logprobs += drawn.logprobs
        self.hidden.append(drawn.hidden)
        self.spans.append(Span(SpanKind.GENERATED, len(drawn.tokens)))
        reply = reply_text(tokenizer, drawn.tokens)
        self.replies = (*self.replies, reply or "")
        observed = None
        if reply is not None:
            observed = next_observation(self.environment, tokenizer, self.lease.task_index, self.replies)
        if observed is None or not has_room(observed, self.lease.max_tokens, len(self.tokens)):
            self.over = True
            return
        self.tokens += observed
        self.spans.append(Span(SpanKind.OBSERVED, len(observed)))


def play(
    model: PolicyModel,
    tokenizer: PolicyTokenizer,
    leases: Sequence[tuple[Lease, int]],
    *,
    environment: Environment | None = None,
    seed: Callable[[Lease, int], int] | None = None,
    temperature: float | None = None,
    prompt: Callable[[Lease], tuple[int, ...]] | None = None,
    choose: Choose = sample,
) -> list[Trace]:
    """Each (lease, slot) played to its end, in the order given, all of them together.

    environment: instead of the lease's. seed, temperature, prompt, choose, and a model that is not the leased
    policy: what a cheat would change. Raises EngineError, EnvironmentFault, PolicyError, UsageError.
    """
    episodes = [
        _Episode(
            lease,
            slot,
            environment or base.load(lease.environment, lease.parameters),
            lease.prompt if prompt is None else prompt(lease),
            _leased_seed(lease, slot) if seed is None else seed(lease, slot),
            lease.temperature if temperature is None else temperature,
        )
        for lease, slot in leases
    ]
    while running := [each for each in episodes if not each.over]:
        turns = draw(
            model,
            [(*each.prompt, *each.tokens) for each in running],
            [each.seed for each in running],
            [each.temperature for each in running],
            [each.budget for each in running],
            tokenizer.stop_ids,
            choose=choose,
        )
        for episode, turn in zip(running, turns, strict=True):
            episode.add(turn, tokenizer)
    proofs = build_many([torch.cat(each.hidden) for each in episodes])
    return [_trace(each, proof, describe(model)) for each, proof in zip(episodes, proofs, strict=True)]


def _leased_seed(lease: Lease, slot: int) -> int:
    found = lease.seed_of(slot)
    if found is None:
        raise UsageError(f"slot {slot} is not in the lease {lease.lease_id.hex()}: it has no seed")
    return found


def _trace(episode: _Episode, proofs: tuple[bytes, ...], engine: EngineDescriptor) -> Trace:
    lease = episode.lease
    return Trace(
        run=lease.run,
        lease_id=lease.lease_id,
        node=lease.node,
        policy_version=lease.policy_version,
        policy_root=lease.policy_root,
        slot=episode.slot,
        tokens=tuple(episode.tokens),
        spans=tuple(episode.spans),
        logprobs=tuple(episode.logprobs),
        proofs=proofs,
        reward=episode.environment.reward(lease.task_index, episode.replies),
        engine=engine,
        started_ms=lease.issued_ms + 10,
        finished_ms=lease.issued_ms + 900,
    )


def describe(model: PolicyModel) -> EngineDescriptor:
    """The reference node as its traces name it."""
    device = "cpu" if model.device.type == "cpu" else f"cuda:{torch.cuda.get_device_name(model.device)}"
    return EngineDescriptor(
        name="reference",
        version=importlib.metadata.version("transformers")[:64],
        dtype=str(model.dtype).removeprefix("torch."),
        device=(device if device != "cpu" else f"cpu:{platform.machine()}")[:64],
        runner="reference",
    )


@dataclass(frozen=True, slots=True, eq=False)
class ReferenceRun:
    """A run of one policy under throw-away keys: it signs leases, and makes files of traces that can be judged.

    The keys follow from `seed`, and so do the seeds of every slot: the same arguments give the same traces.
    """

    policy: Path
    root: bytes
    tokenizer: PolicyTokenizer
    trainer: identity.Identity
    node: identity.Identity
    genesis: Signed
    run: bytes

    @classmethod
    def found(cls, policy: Path, environment: str, parameters: str = "", seed: int = 0) -> ReferenceRun:
        """Raises PolicyError when the folder is no policy."""
        root = policy_root(policy)
        trainer, node = _throw_away("trainer", seed), _throw_away("node", seed)
        share = EnvironmentShare(environment, parameters, 1)
        genesis = seal(trainer, Genesis("reference", trainer.node, _ISSUED_MS - 1_000, (share,), root, bytes(32)))
        return cls(policy, root, PolicyTokenizer.load(policy), trainer, node, genesis, run_id(genesis))

    def lease(
        self, task: int, environment: Environment, *, slots: int = _GROUP, parameters: str = "", **changes: Any
    ) -> Lease:
        """A lease of the first `slots` of a group of the task, for this run's node. `changes` replace its fields."""
        group = hashlib.sha256(f"{environment.name} {parameters} {task}".encode()).digest()[:16]
        lease = Lease(
            run=self.run,
            lease_id=group[::-1],
            node=self.node.node,
            policy_version=0,
            policy_root=self.root,
            environment=environment.name,
            parameters=parameters,
            task_index=task,
            group_id=group,
            group_size=max(slots, _GROUP),
            slots=tuple(
                Slot(index, self._seed(environment.name, parameters, task, group, index)) for index in range(slots)
            ),
            prompt=self.tokenizer.prompt_ids(environment.prompt(task)),
            temperature=1.0,
            max_turn_tokens=environment.max_new_tokens,
            max_tokens=(environment.max_new_tokens + 32) * environment.max_turns,
            issued_ms=_ISSUED_MS,
            deadline_ms=_ISSUED_MS + _LEASE_MS,
        )
        return replace(lease, **changes)

    def _seed(self, environment: str, parameters: str, task: int, group: bytes, slot: int) -> int:
        secret = hashlib.sha256(self.trainer.private_bytes).digest()
        return slot_seed(SeedInput(self.run, self.root, environment, parameters, task, group, slot, secret))

    def file(
        self,
        lease: Lease,
        trace: Trace,
        *,
        node: identity.Identity | None = None,
        after_ms: int = 1_000,
        calibration: Signed | None = None,
    ) -> TraceFile:
        """The trace signed by its node (or by another), with a receipt `after_ms` after the lease was issued."""
        signer = node or self.node
        signed = seal(signer, trace)
        receipt = Receipt(
            run=lease.run,
            trace_digest=signed.digest,
            lease_id=lease.lease_id,
            slot=trace.slot,
            node=signer.node,
            received_ms=lease.issued_ms + after_ms,
            sequence=1,
        )
        return TraceFile(
            genesis=self.genesis,
            lease=seal(self.trainer, lease),
            trace=signed,
            receipt=seal(self.trainer, receipt),
            verdict=None,
            calibration=calibration,
        )


def _throw_away(role: str, seed: int) -> identity.Identity:
    return identity.Identity(hashlib.sha256(f"reference {role} {seed}".encode()).digest())
