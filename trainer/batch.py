"""Which groups make the next batch, and what the loss needs of them. Pure.

What can be learned from is decided by policy version, age and rewards alone, before anything that tells who drew
it is read, so that a node cannot be favoured or starved by the learner. Who drew what then only puts groups off
until a later batch, where one node would make too much of this one. Not here: reading the ledger (learner.py), the
advantage itself (advantage.py), how completions share a forward pass (packing.py).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from protocol import codec
from protocol.envelope import Signed
from protocol.errors import LocalError
from protocol.trace import Trace
from trainer.advantage import ADVANTAGES, is_flat, length_penalty
from trainer.ledger_rows import TOO_STALE, CompleteGroup, GroupOutcome, TrainingTrace


@dataclass(frozen=True, slots=True)
class Choice:
    """Group ids, oldest first. `flat` are those older than the last informative one: they count in the batch's
    mean reward and are used up with it. `unusable` maps a group that can never be used to its cause."""

    informative: tuple[bytes, ...]
    flat: tuple[bytes, ...]
    unusable: dict[bytes, str]
    reward_mean: float  # over informative and flat groups


@dataclass(frozen=True, slots=True)
class Shaping:
    """What the reward and the group make of a completion. A penalty of `length_penalty` is taken from the reward of
    one as long as `most_tokens`, less below that, nothing `length_ramp` tokens below it. Completions whose last turn
    does not end with one of `stop_ids` were cut off; with `mask_overlong` they count in their group alone."""

    advantage: str = "mean"
    length_penalty: float = 0.0
    length_ramp: int = 1
    most_tokens: int = 1
    mask_overlong: bool = False
    stop_ids: frozenset[int] = field(default_factory=frozenset)

    def reward(self, reward: float, drawn: int) -> float:
        if not self.length_penalty:
            return reward
        return reward + self.length_penalty * length_penalty(drawn, most=self.most_tokens, ramp=self.length_ramp)


@dataclass(frozen=True, slots=True)
class Completion:
    """One completion as the loss sees it. n generated tokens among L.

    mu is log μ, the logprobs under the policy that drew it as our audit found them; None when it was not audited.
    """

    group_id: bytes
    ids: NDArray[np.int64]  # [L] prompt, then the trace's tokens
    prompt: int  # tokens of ids that are the prompt, the same in every completion of the group
    generated: NDArray[np.int64]  # [n] positions in ids of the tokens the policy drew, ascending, never 0
    mu: NDArray[np.float32] | None  # [n]
    advantage: float
    policy_version: int
    staleness: int  # policy versions between the one that drew it and the one that learns

    @property
    def mask(self) -> NDArray[np.bool_]:
        """[L], true where the policy drew the token."""
        mask = np.zeros(len(self.ids), dtype=np.bool_)
        mask[self.generated] = True
        return mask


def choose(
    outcomes: Sequence[GroupOutcome],
    *,
    version: int,
    staleness_limit: int,
    wanted: int,
    put_off: frozenset[bytes] = frozenset(),
) -> Choice:
    """The oldest `wanted` informative groups for a step from policy `version`; fewer when there are not so many.

    outcomes come oldest first. Groups of `put_off` stay for a later batch.
    """
    informative: list[GroupOutcome] = []
    flat: list[GroupOutcome] = []
    passed: list[GroupOutcome] = []  # flat ones since the last informative one
    unusable: dict[bytes, str] = {}
    for outcome in outcomes:
        if len(informative) == wanted:
            break
        cause = _unusable(outcome, version, staleness_limit)
        if cause:
            unusable[outcome.group_id] = cause
        elif is_flat(_numbers(outcome)):
            passed.append(outcome)
        elif outcome.group_id not in put_off:
            informative.append(outcome)
            flat += passed
            passed = []
    rewards = [reward for outcome in informative + flat for reward in _numbers(outcome)]
    return Choice(
        tuple(outcome.group_id for outcome in informative),
        tuple(outcome.group_id for outcome in flat),
        unusable,
        math.fsum(rewards) / len(rewards) if rewards else 0.0,
    )


def crowding(drawers: Mapping[bytes, Sequence[bytes]], *, wanted: int, share: float) -> frozenset[bytes]:
    """Groups to put off so that no node draws more than `share` of a batch of `wanted` groups.

    drawers: who drew each completion of each informative group, oldest group first. When the others are too few to
    fill the batch, the oldest of the crowding groups are let in: a bound must not stop a run of one node.
    """
    total = sum(len(nodes) for nodes in list(drawers.values())[:wanted])
    held: Counter[bytes] = Counter()
    crowded: list[bytes] = []
    taken = 0
    for group_id, nodes in drawers.items():
        if taken == wanted:
            break
        added = Counter(nodes)
        if any(held[node] + count > share * total for node, count in added.items()):
            crowded.append(group_id)
        else:
            held += added
            taken += 1
    return frozenset(crowded[wanted - taken :])


def _unusable(outcome: GroupOutcome, version: int, staleness_limit: int) -> str:
    staleness = version - outcome.policy_version
    if staleness > staleness_limit:
        return f"{TOO_STALE}: {staleness} versions behind, {staleness_limit} may be"
    if not outcome.rewards or not all(reward is not None and math.isfinite(reward) for reward in outcome.rewards):
        return "a reward is not a number"
    return ""


def _numbers(outcome: GroupOutcome) -> list[float]:
    return [reward for reward in outcome.rewards if reward is not None]


def build(groups: Sequence[CompleteGroup], version: int, shaping: Shaping | None = None) -> tuple[Completion, ...]:
    """The completions of the chosen groups that the loss is to see, in order.

    Raises LocalError when the ledger's own rows do not fit together.
    """
    return tuple(sequence for group in groups for sequence in _sequences(group, version, shaping or Shaping()))


def _sequences(group: CompleteGroup, version: int, shaping: Shaping) -> list[Completion]:
    row = group.group
    if len(group.traces) != row.size:
        raise LocalError(f"group {row.group_id.hex()} has {len(group.traces)} accepted traces, not {row.size}")
    traces = [codec.reopen(Trace, codec.reopen(Signed, each.trace).payload) for each in group.traces]
    drawn = [np.asarray(trace.generated(), dtype=np.int64) for trace in traces]
    rewards = [shaping.reward(each.reward, len(at)) for each, at in zip(group.traces, drawn, strict=True)]
    gains = ADVANTAGES[shaping.advantage](rewards)
    prompt = np.asarray(row.prompt, dtype=np.int64)
    result = []
    for training, trace, at, gain in zip(group.traces, traces, drawn, gains, strict=True):
        if shaping.mask_overlong and trace.tokens[-1] not in shaping.stop_ids:
            continue
        result.append(
            Completion(
                group_id=row.group_id,
                ids=np.concatenate((prompt, np.asarray(trace.tokens, dtype=np.int64))),
                prompt=len(prompt),
                generated=at + len(prompt),
                mu=_mu(training, len(at)),
                advantage=gain,
                policy_version=row.policy_version,
                staleness=version - row.policy_version,
            )
        )
    return result


def _mu(training: TrainingTrace, generated: int) -> NDArray[np.float32] | None:
    if training.mu is not None and len(training.mu) != generated:
        raise LocalError(f"trace {training.digest.hex()}: {len(training.mu)} logprobs for {generated} drawn tokens")
    return training.mu
