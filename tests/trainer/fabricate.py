"""A run folder and honest traces for the tests of learner and auditor: drawn for real, under real leases, with
the seeded sampler and with proofs, and written into the ledger as the gateway does.

Not here: a node or a gateway; nothing travels.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from protocol import codec
from protocol import lease as leases
from protocol.envelope import seal
from protocol.environments import base
from protocol.environments.rollout import has_room, next_observation, reply_text
from protocol.environments.tokenizer import PolicyTokenizer
from protocol.identity import Identity
from protocol.lease import Lease, SeedInput, Slot
from protocol.run import EnvironmentShare
from protocol.trace import EngineDescriptor, Span, SpanKind, Trace
from protocol.verdict import Receipt
from trainer.config import TrainerConfig, write_config
from trainer.init import init_run
from trainer.ledger import Ledger
from trainer.ledger_rows import GroupRow, NewSubmission, SubmissionState
from trainer.rundir import Run, load_run_identity, open_run
from verify.model import PolicyModel
from verify.sampling import sample
from verify.toploc import build_many

ENVIRONMENT = "tools8@1"
MAX_TOKENS = 64
ENGINE = EngineDescriptor("reference", "1", "float32", "cpu", "reference")
NOW = 1_700_000_000_000


def make_run(path: Path, template: Path | None = None, **settings: Any) -> tuple[Run, Ledger]:
    """A new run of the embedded policy on tools8@1. Copied from `template`, a run made before, where given: a
    fresh one spends most of a second on its audit chain."""
    config = TrainerConfig(**{"max_turn_tokens": 14, "max_tokens": MAX_TOKENS, **settings})
    if template is None:
        shares = (EnvironmentShare(ENVIRONMENT, "", 1),)
        run = init_run(path, name="test", policy="embedded", environments=shares, config=config)
    else:
        shutil.copytree(template, path)
        write_config(config, path / "config.toml")
        run = open_run(path)
    return run, Ledger(run.folder.ledger)


@dataclass
class Episode:
    """One completion being drawn."""

    index: int  # of the task
    seed: int
    prompt: tuple[int, ...]
    tokens: list[int] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    hidden: list[Tensor] = field(default_factory=list)
    replies: tuple[str, ...] = ()
    reward: float | None = None

    @property
    def ids(self) -> list[int]:
        return [*self.prompt, *self.tokens]


class Actor:
    """Draws completions of a policy folder, all episodes at once, turn by turn."""

    def __init__(self, policy: Path, environment: str = ENVIRONMENT, dtype: str = "float32") -> None:
        self.environment = base.load(environment)
        self.tokenizer = PolicyTokenizer.load(policy)
        self.model = PolicyModel(policy, dtype, "cpu")

    def prompt(self, index: int) -> tuple[int, ...]:
        return self.tokenizer.prompt_ids(self.environment.prompt(index))

    @torch.inference_mode()
    def play(self, episodes: Sequence[Episode]) -> None:
        while live := [episode for episode in episodes if episode.reward is None]:
            self._turn(live)
            for episode in live:
                self._answer(episode)

    def _turn(self, live: Sequence[Episode]) -> None:
        """One reply of each episode; a key-value cache with padding on the left."""
        longest = max(len(episode.ids) for episode in live)
        pads = torch.tensor([longest - len(episode.ids) for episode in live])
        ids = torch.tensor([[0] * int(pad) + episode.ids for pad, episode in zip(pads, live, strict=True)])
        columns = torch.arange(longest + self.environment.max_new_tokens)
        cache, start = self.model.new_cache(), 0
        turns: list[list[int]] = [[] for _ in live]
        for _ in range(self.environment.max_new_tokens):
            here = torch.arange(start, start + ids.shape[1])
            seen = (columns[None, : int(here[-1]) + 1] >= pads[:, None])[:, None] & (
                columns[: int(here[-1]) + 1] <= here[:, None]
            )
            positions = (here - pads[:, None]).clamp(min=0)
            last = torch.arange(len(live)) * ids.shape[1] + ids.shape[1] - 1
            # A row of padding sees nothing, and must see something or its softmax is not a number.
            seen |= ~seen.any(-1, keepdim=True)
            hidden, logits = self.model.run(ids, last, positions, seen[:, None], cache)
            drawn, logprobs = sample(
                logits, [episode.seed for episode in live], positions[:, -1].tolist(), [1.0] * len(live)
            )
            for row, episode in enumerate(live):
                if not turns[row] or turns[row][-1] not in self.tokenizer.stop_ids:
                    turns[row].append(int(drawn[row]))
                    episode.logprobs.append(float(logprobs[row]))
                    episode.hidden.append(hidden[row].clone())
            if all(turn[-1] in self.tokenizer.stop_ids for turn in turns):
                break
            start += ids.shape[1]
            ids = drawn[:, None]
        for episode, turn in zip(live, turns, strict=True):
            episode.tokens += turn
            episode.spans.append(Span(SpanKind.GENERATED, len(turn)))

    def _answer(self, episode: Episode) -> None:
        turn = episode.tokens[len(episode.tokens) - episode.spans[-1].length :]
        reply = reply_text(self.tokenizer, turn)
        episode.replies = (*episode.replies, reply or "")
        shown = None
        if reply is not None:
            shown = next_observation(self.environment, self.tokenizer, episode.index, episode.replies)
        if shown is None or not has_room(shown, MAX_TOKENS, len(episode.tokens)):
            episode.reward = self.environment.reward(episode.index, episode.replies)
            return
        episode.tokens += shown
        episode.spans.append(Span(SpanKind.OBSERVED, len(shown)))


def _digest(*parts: object) -> bytes:
    return hashlib.sha256(repr(parts).encode()).digest()


class Gateway:
    """Writes groups of drawn completions into a run's ledger. `node` signs them all."""

    def __init__(self, run: Run, ledger: Ledger, seed: int = 0, dtype: str = "float32") -> None:
        self.run, self.ledger, self.seed, self.dtype = run, ledger, seed, dtype
        self.node = Identity(_digest("node", seed))
        self.trainer = load_run_identity(run)
        self.next_task = 0
        self.actors: dict[int, Actor] = {}
        ledger.see_node(self.node.node, NOW, "test", "reference")

    def actor(self, version: int) -> Actor:
        if version not in self.actors:
            self.actors[version] = Actor(self.run.folder.policy(version), dtype=self.dtype)
        return self.actors[version]

    def draw(self, groups: int, version: int) -> list[tuple[GroupRow, list[Episode]]]:
        """New groups, drawn by policy `version`; nothing is written yet."""
        actor = self.actor(version)
        policy = self.ledger.policy(version)
        assert policy is not None
        made = []
        for _ in range(groups):
            index, self.next_task = self.next_task, self.next_task + 1
            group = GroupRow(
                group_id=_digest("group", self.seed, index)[:16],
                environment=ENVIRONMENT,
                parameters="",
                task_index=index,
                policy_version=version,
                size=self.run.config.group_size,
                prompt=actor.prompt(index),
                max_turn_tokens=actor.environment.max_new_tokens,
                created_ms=NOW + index,
            )
            seeds = [
                leases.slot_seed(
                    SeedInput(self.run.run, policy[1], ENVIRONMENT, "", index, group.group_id, slot, bytes(32))
                )
                for slot in range(group.size)
            ]
            made.append((group, [Episode(index, seed, group.prompt) for seed in seeds]))
        actor.play([episode for _, episodes in made for episode in episodes])
        return made

    def lease(self, group: GroupRow, episodes: Sequence[Episode]) -> Lease:
        policy = self.ledger.policy(group.policy_version)
        assert policy is not None
        return Lease(
            run=self.run.run,
            lease_id=_digest("lease", group.group_id)[:16],
            node=self.node.node,
            policy_version=group.policy_version,
            policy_root=policy[1],
            environment=group.environment,
            parameters=group.parameters,
            task_index=group.task_index,
            group_id=group.group_id,
            group_size=group.size,
            slots=tuple(Slot(slot, episode.seed) for slot, episode in enumerate(episodes)),
            prompt=group.prompt,
            temperature=1.0,
            max_turn_tokens=group.max_turn_tokens,
            max_tokens=MAX_TOKENS,
            issued_ms=NOW,
            deadline_ms=NOW + 60_000,
        )

    def trace(self, lease: Lease, slot: int, episode: Episode, **changes: Any) -> Trace:
        proofs = build_many([torch.stack(episode.hidden)])[0] if "proofs" not in changes else ()
        fields: dict[str, Any] = dict(
            run=self.run.run,
            lease_id=lease.lease_id,
            node=self.node.node,
            policy_version=lease.policy_version,
            policy_root=lease.policy_root,
            slot=slot,
            tokens=tuple(episode.tokens),
            spans=tuple(episode.spans),
            logprobs=tuple(episode.logprobs),
            proofs=proofs,
            reward=float(episode.reward or 0.0),
            engine=ENGINE,
            started_ms=NOW,
            finished_ms=NOW + 1,
        )
        return Trace(**(fields | changes))

    def submit(
        self,
        drawn: Sequence[tuple[GroupRow, list[Episode]]],
        changes: dict[int, dict[str, Any]] | None = None,
        **everywhere: Any,
    ) -> list[bytes]:
        """Leases, submissions and receipts of drawn groups, waiting for audit; their digests. `changes`: fields
        of the trace of a slot (counted over all of them) that are not what was drawn; `everywhere`: of all."""
        digests = []
        with self.ledger.write():
            for group, episodes in drawn:
                lease = self.lease(group, episodes)
                self.ledger.add_group(group, [episode.seed for episode in episodes])
                signed = codec.encode(seal(self.trainer, lease))
                slots = range(group.size)
                times = (lease.issued_ms, lease.deadline_ms)
                self.ledger.add_lease(lease.lease_id, self.node.node, group.group_id, slots, signed, *times)
                for slot, episode in enumerate(episodes):
                    trace = self.trace(lease, slot, episode, **everywhere, **(changes or {}).get(len(digests), {}))
                    digests.append(self._receive(group, lease, slot, trace, float(episode.reward or 0.0)))
        return digests

    def _receive(self, group: GroupRow, lease: Lease, slot: int, trace: Trace, reward: float) -> bytes:
        sealed = seal(self.node, trace)
        new = NewSubmission(
            digest=sealed.digest,
            lease_id=lease.lease_id,
            group_id=group.group_id,
            slot=slot,
            node=self.node.node,
            policy_version=group.policy_version,
            received_ms=NOW,
            trace=codec.encode(sealed),
            tokens=len(trace.tokens),
        )
        sequence = self.ledger.next_sequence()
        receipt = Receipt(self.run.run, sealed.digest, lease.lease_id, slot, self.node.node, NOW, sequence)
        self.ledger.add_submission(new, sequence, codec.encode(seal(self.trainer, receipt)))
        self.ledger.send_to_audit(sequence, reward, b"checks")
        return sealed.digest

    def accept(self, digests: Sequence[bytes]) -> None:
        """Verdicts on submissions, audited ones and others alike."""
        with self.ledger.write():
            for digest in digests:
                row = self.ledger.submission(digest)
                assert row is not None
                self.ledger.judge(
                    row,
                    state=SubmissionState.ACCEPTED,
                    reason=None,
                    audited=row.audit is not None,
                    reward=row.reward,
                    checks=b"checks",
                    verdict=b"verdict",
                    judged_ms=NOW,
                )

    def admit(self, groups: int, version: int) -> float:
        """Draw, submit and accept groups without an audit; their mean reward."""
        drawn = self.draw(groups, version)
        self.accept(self.submit(drawn, proofs=()))  # the learner never sees a proof
        rewards = [episode.reward or 0.0 for _, episodes in drawn for episode in episodes]
        return sum(rewards) / len(rewards)


@contextmanager
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
