"""How good the policy is on tasks that are never learned from: completions drawn on this machine, by the trainer.

The tasks are the same at every evaluation of a run, from the run's environments by their weights, so that the figures
of two versions compare; nodes get other tasks (a stream keyed by the gateway's secret over 2^64 of them). Each is
played once, at the run's temperature, with the same noise at every version. Not here: when this is done (learner.py),
and speed: one batch of live rows with a cache is enough for some hundred tasks.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import torch
from torch import Tensor

from protocol.environments import base
from protocol.environments.rollout import has_room, next_observation, reply_text, turn_budget
from protocol.environments.tokenizer import PolicyTokenizer
from protocol.errors import EnvironmentFault
from protocol.run import EnvironmentShare
from trainer.rundir import Run
from trainer.stock import numbered
from verify.model import PolicyModel
from verify.sampling import sample

AT_ONCE: Final = 64  # episodes in one batch


@dataclass(frozen=True, slots=True)
class Evaluation:
    """`reward_error`: the standard error of the mean. `faults`: tasks left out because their environment failed, for
    the first of which `fault` says why."""

    tasks: int
    reward_mean: float
    reward_error: float
    faults: int
    fault: str
    seconds: float


@dataclass(slots=True)
class _Episode:
    """One completion being drawn."""

    environment: base.GuardedEnvironment
    index: int
    seed: int
    prompt: tuple[int, ...]
    tokens: list[int] = field(default_factory=list)
    replies: tuple[str, ...] = ()
    reward: float | None = None
    fault: str = ""

    @property
    def live(self) -> bool:
        return self.reward is None and not self.fault


def evaluate(run: Run, model: PolicyModel, tokenizer: PolicyTokenizer) -> Evaluation:
    """Play config.evaluate_tasks held-out tasks with the live model. An environment's fault is left out and told."""
    began = time.monotonic()
    environments: dict[EnvironmentShare, base.GuardedEnvironment] = {}
    rewards: list[float] = []
    faults: list[str] = []
    for first in range(0, run.config.evaluate_tasks, AT_ONCE):
        episodes = []
        for number in range(first, min(first + AT_ONCE, run.config.evaluate_tasks)):
            try:
                episodes.append(_opened(run, number, environments, tokenizer))
            except EnvironmentFault as error:
                faults.append(str(error))
        _play(run, model, tokenizer, episodes)
        rewards += [each.reward for each in episodes if each.reward is not None]
        faults += [each.fault for each in episodes if each.fault]
    mean = math.fsum(rewards) / max(1, len(rewards))
    spread = math.fsum((reward - mean) ** 2 for reward in rewards)
    return Evaluation(
        tasks=len(rewards),
        reward_mean=mean,
        reward_error=math.sqrt(spread / max(1, len(rewards) - 1) / max(1, len(rewards))),
        faults=len(faults),
        fault=faults[0] if faults else "",
        seconds=time.monotonic() - began,
    )


def _opened(
    run: Run,
    number: int,
    environments: dict[EnvironmentShare, base.GuardedEnvironment],
    tokenizer: PolicyTokenizer,
) -> _Episode:
    key = hashlib.blake2b(run.run, digest_size=32, person=b"rlcommons-eval-1").digest()
    share, index = numbered(key, number, run.genesis.environments)
    if share not in environments:
        environments[share] = base.load(share.name, share.parameters)
    environment = environments[share]
    seed = int.from_bytes(hashlib.blake2b(number.to_bytes(8, "little"), digest_size=8, key=key).digest(), "little")
    return _Episode(environment, index, seed, tokenizer.prompt_ids(environment.prompt(index)))


@torch.no_grad()
def _play(run: Run, model: PolicyModel, tokenizer: PolicyTokenizer, episodes: Sequence[_Episode]) -> None:
    while live := [episode for episode in episodes if episode.live]:
        budgets = [_budget(run, model, episode) for episode in live]
        turns = _turns(model, live, budgets, run.config.temperature, tokenizer.stop_ids)
        for episode, turn in zip(live, turns, strict=True):
            episode.tokens += turn
            try:
                _answer(run, tokenizer, episode, turn)
            except EnvironmentFault as error:
                episode.fault = str(error)


def _budget(run: Run, model: PolicyModel, episode: _Episode) -> int:
    most = min(run.config.max_tokens, model.max_positions - len(episode.prompt))
    return turn_budget(min(run.config.max_turn_tokens, episode.environment.max_new_tokens), most, len(episode.tokens))


def _answer(run: Run, tokenizer: PolicyTokenizer, episode: _Episode, turn: list[int]) -> None:
    """What the environment makes of a turn: an observation after it, or the reward."""
    reply = reply_text(tokenizer, turn)
    episode.replies = (*episode.replies, reply or "")
    shown = None
    if reply is not None:
        shown = next_observation(episode.environment, tokenizer, episode.index, episode.replies)
    if shown is None or not has_room(shown, run.config.max_tokens, len(episode.tokens)):
        episode.reward = episode.environment.reward(episode.index, episode.replies)
        return
    episode.tokens += shown


def _turns(
    model: PolicyModel,
    live: Sequence[_Episode],
    budgets: Sequence[int],
    temperature: float,
    stop_ids: frozenset[int],
) -> list[list[int]]:
    """One turn of each episode. Padding is on the left, so that all rows go on in the same column."""
    rows = [[*episode.prompt, *episode.tokens] for episode in live]
    longest = max(len(row) for row in rows)
    pads = torch.tensor([longest - len(row) for row in rows], device=model.device)
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows], device=model.device)
    seeds, heats = [episode.seed for episode in live], [temperature] * len(live)
    turns: list[list[int]] = [[] for _ in live]
    cache, start = model.new_cache(), 0
    while True:
        positions, mask = _frame(model, pads, start, ids.shape[1])
        last = torch.arange(1, len(live) + 1, device=model.device) * ids.shape[1] - 1
        _, logits = model.within(partial(model.run, ids, last, positions, mask, cache))
        drawn, _ = sample(logits.float(), seeds, positions[:, -1].tolist(), heats)
        for turn, budget, token in zip(turns, budgets, drawn.tolist(), strict=True):
            if len(turn) < budget and (not turn or turn[-1] not in stop_ids):
                turn.append(token)
        if all(len(turn) >= most or turn[-1] in stop_ids for turn, most in zip(turns, budgets, strict=True)):
            return turns
        start += ids.shape[1]
        ids = drawn[:, None]


def _frame(model: PolicyModel, pads: Tensor, start: int, count: int) -> tuple[Tensor, object]:
    """Positions [B, count] of the columns from `start` on, and the mask over all columns up to them."""
    columns = torch.arange(start + count, device=model.device)
    behind = columns[start:, None] - columns
    padded = columns < pads[:, None]
    # A column of padding sees itself, or its softmax would not be a number.
    seen = ((behind >= 0) & ~padded[:, None, :]) | (behind == 0)
    return (columns[start:] - pads[:, None]).clamp(min=0), model.attention_mask(seen, behind.expand_as(seen))
