"""Which groups make the next batch, and what the loss needs of them. Pure.

Chosen by policy version, age and rewards alone, before anything that tells who drew them is read, so that a
node cannot be favoured or starved by the learner. Not here: reading the ledger (learner.py), the advantage
itself (advantage.py), the forward pass (learner.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protocol import codec
from protocol.envelope import Signed
from protocol.errors import LocalError
from protocol.trace import Trace
from trainer.advantage import advantages, is_flat
from trainer.ledger_rows import CompleteGroup, GroupOutcome, TrainingTrace


@dataclass(frozen=True, slots=True)
class Choice:
    """Group ids, oldest first. `flat` are those older than the last informative one: they count in the batch's
    mean reward and are used up with it. `unusable` maps a group that can never be used to its cause."""

    informative: tuple[bytes, ...]
    flat: tuple[bytes, ...]
    unusable: dict[bytes, str]
    reward_mean: float  # over informative and flat groups


@dataclass(frozen=True, slots=True)
class Completion:
    """One completion as the loss sees it. n generated tokens among L.

    mu is log μ, the logprobs under the policy that drew it as our audit found them; None when it was not audited.
    """

    group_id: bytes
    ids: NDArray[np.int64]  # [L] prompt, then the trace's tokens
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


def choose(outcomes: Sequence[GroupOutcome], *, version: int, staleness_limit: int, wanted: int) -> Choice:
    """The oldest `wanted` informative groups for a step from policy `version`; fewer when there are not so many.

    outcomes come oldest first.
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
        else:
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


def _unusable(outcome: GroupOutcome, version: int, staleness_limit: int) -> str:
    staleness = version - outcome.policy_version
    if staleness > staleness_limit:
        return f"too stale: {staleness} versions behind, {staleness_limit} may be"
    if not outcome.rewards or not all(reward is not None and math.isfinite(reward) for reward in outcome.rewards):
        return "a reward is not a number"
    return ""


def _numbers(outcome: GroupOutcome) -> list[float]:
    return [reward for reward in outcome.rewards if reward is not None]


def build(groups: Sequence[CompleteGroup], version: int) -> tuple[Completion, ...]:
    """The completions of the chosen groups, in order.

    Raises LocalError when the ledger's own rows do not fit together.
    """
    return tuple(sequence for group in groups for sequence in _sequences(group, version))


def _sequences(group: CompleteGroup, version: int) -> list[Completion]:
    row = group.group
    if len(group.traces) != row.size:
        raise LocalError(f"group {row.group_id.hex()} has {len(group.traces)} accepted traces, not {row.size}")
    gains = advantages([trace.reward for trace in group.traces])
    prompt = np.asarray(row.prompt, dtype=np.int64)
    result = []
    for training, gain in zip(group.traces, gains, strict=True):
        trace = codec.decode(Trace, codec.decode(Signed, training.trace).payload)
        generated = np.asarray(trace.generated(), dtype=np.int64) + len(prompt)
        result.append(
            Completion(
                group_id=row.group_id,
                ids=np.concatenate((prompt, np.asarray(trace.tokens, dtype=np.int64))),
                generated=generated,
                mu=_mu(training, len(generated)),
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


def micro_batches(lengths: Sequence[int], most_tokens: int) -> tuple[tuple[int, ...], ...]:
    """Indices packed so that each pack's padded size (longest × count) is at most `most_tokens`; a sequence
    longer than that gets a pack of its own. Sorted by length, so that little is padding."""
    packs: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda each: lengths[each], reverse=True):
        # The first of a pack is its longest.
        if packs and lengths[packs[-1][0]] * (len(packs[-1]) + 1) <= most_tokens:
            packs[-1].append(index)
        else:
            packs.append([index])
    return tuple(tuple(pack) for pack in packs)


def padded(rows: Sequence[NDArray[Any]]) -> NDArray[np.int64]:
    """[B, longest], zeros on the right: attention is causal, so nothing before them sees them."""
    table = np.zeros((len(rows), max(len(row) for row in rows)), dtype=np.int64)
    for place, row in zip(table, rows, strict=True):
        place[: len(row)] = row
    return table
