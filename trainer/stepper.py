"""One optimiser step from completions: recall log μ, gradients over micro-batches, the update.

    recall  log μ of every token       from the audit, or by the policy that drew it
    learn   gradients of a share       packing.py, loss.py; of all shares together by each pass (sharding.py)
    step    masters and live model     masters.py

Every process of a learner has one, and all do equally many passes. Nothing between two of them may be left by an
exception in one process alone: the others would wait for it. Not here: which completions, and what becomes of the
result (learner.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from trainer.batch import Completion
from trainer.config import TrainerConfig
from trainer.loss import LossSettings, LossSums, Tokens, token_logprobs, token_losses
from trainer.masters import Masters
from trainer.packing import Pack, idle, plan, seen
from trainer.publish import tensor_names
from trainer.rundir import RunFolder
from trainer.sharding import ShardedPolicy
from trainer.team import Team
from verify.model import PolicyModel

NOT_FINITE: Final = "is not finite"  # ends the cause of a refusal that no batch should meet

LOGIT_BYTES: Final = 64 << 20  # of logits in memory at once, in float32


class StepRefused(Exception):
    """This batch must not be learned from; the policy stays as it is. `groups` are to be dropped."""

    def __init__(self, cause: str, groups: tuple[bytes, ...]) -> None:
        super().__init__(cause)
        self.cause = cause
        self.groups = groups


@dataclass(frozen=True, slots=True)
class Stepped:
    """A step that was taken: its sums over all completions, and the gradient's norm before clipping."""

    sums: LossSums
    gradient_norm: float
    learning_rate: float


class Stepper:
    """The live policy, its masters and this process' place in the team."""

    def __init__(self, folder: RunFolder, config: TrainerConfig, version: int, team: Team) -> None:
        self._folder = folder
        self._config = config
        self._team = team
        self.version = version
        policy = folder.policy(version)
        device = team.device(config.device)
        self._sharded = ShardedPolicy(policy, config.dtype, device, team) if team.size > 1 else None
        self.model = self._sharded or PolicyModel(policy, config.dtype, device)
        if config.gradient_checkpointing:
            self.model.checkpoint_layers()
        self.masters = Masters(self.model, config, tensor_names(policy), team)
        with torch.no_grad():
            # Tried once, which is a pass: of all processes here, and not where one of them comes to it first.
            self.model.within(self.model.head_is_plain)
        self._settings = LossSettings(
            mask_difference=config.mask_difference,
            ratio_cap=config.ratio_cap,
            log_ratio_penalty=config.log_ratio_penalty,
            tokens=config.loss_tokens or config.group_size * config.groups_per_step * config.max_turn_tokens,
            temperature=config.temperature,
            name=config.loss,
            clip_low=config.clip_low,
            clip_high=config.clip_high,
        )

    def step(self, completions: Sequence[Completion]) -> Stepped:
        """Learn from a batch, the same in every process of the team: the live policy becomes version + 1.

        Raises StepRefused, in every process alike; then nothing has changed.
        """
        mine = self._share(completions)
        sums = sum(self._team.gather(self.learn(mine, self.recall(mine, completions))), LossSums())
        rate = self.masters.rate()
        norm = self.masters.step()
        if not math.isfinite(norm):
            raise StepRefused(f"the gradient {NOT_FINITE}", _groups(completions))
        self.version += 1
        return Stepped(sums, norm, rate)

    def forget(self) -> None:
        """Be as before a step that was refused."""
        self.masters.forget()
        self.masters.round()

    def rest(self) -> None:
        """Leave the memory that a step alone needs to whoever shares the device (home.py)."""
        if self.model.device.type == "cuda" and self._folder.turns.is_dir():
            torch.cuda.empty_cache()

    def kept(self) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
        """What must be kept to go on, and the weights that nodes get; in the leader. All processes ask at once."""
        return self.masters.tensors(), self.masters.published()

    @contextmanager
    def playing(self) -> Iterator[PolicyModel]:
        """The live model, to be run within by the leader alone: the other processes `follow`."""
        if self._sharded is None:
            yield self.model
            return
        with self._sharded.leading():
            yield self._sharded

    def follow(self) -> None:
        """Take part in the passes of the leader, who is `playing`."""
        assert self._sharded is not None
        self._sharded.follow()

    def _share(self, completions: Sequence[Completion]) -> list[Completion]:
        """Whole groups, whose prompts are then computed once."""
        groups: dict[bytes, list[Completion]] = {}
        for completion in completions:
            groups.setdefault(completion.group_id, []).append(completion)
        parts = list(groups.values())
        mine = self._team.share([sum(len(each.ids) for each in part) for part in parts])
        return [completion for index in mine for completion in parts[index]]

    def _agree(self, refusal: StepRefused | None) -> None:
        """Raises StepRefused in all processes where one refuses."""
        found = self._team.gather(None if refusal is None else (refusal.cause, refusal.groups))
        refused = [each for each in found if each is not None]
        if refused:
            raise StepRefused(refused[0][0], tuple(sorted({group for _, groups in refused for group in groups})))

    # --- log μ ---

    def recall(self, completions: Sequence[Completion], batch: Sequence[Completion] = ()) -> list[Tensor]:
        """log μ [n] of each completion: the audit's, else by a forward pass of the policy that drew it.

        That policy is still on disk (keep_policies is above staleness_limit) and lends its weights to the live
        model for the pass. Asking the current weights instead would make every ratio 1 and so hide that the
        completion is stale. `batch`: completions of all processes, each of which recalls its own at once.
        """
        everyones = batch or completions
        mus = {
            index: torch.from_numpy(completion.mu.copy())
            for index, completion in enumerate(completions)
            if completion.mu is not None
        }
        for version in sorted({each.policy_version for each in everyones if each.mu is None}):
            self._become(version, everyones)
            indices = [i for i in range(len(completions)) if i not in mus and completions[i].policy_version == version]
            for pack in self._passes([completions[i] for i in indices]):
                members = [indices[place] for place in pack.members]
                with torch.no_grad():
                    logprobs = self._logprobs(pack).cpu()
                mus |= zip(members, _cut(logprobs, [completions[i] for i in members]), strict=True)
        self.masters.round()
        return [mus[index] for index in range(len(completions))]

    def _become(self, version: int, completions: Sequence[Completion]) -> None:
        if version == self.version:
            self.masters.round()
            return
        folder = self._folder.policy(version)
        refusal = None
        if not folder.exists() or not self.model.swap(folder):
            lost = [each for each in completions if each.policy_version == version]
            refusal = StepRefused(f"policy {version} is no longer on disk", _groups(lost))
        self._agree(refusal)

    # --- gradients ---

    def learn(self, completions: Sequence[Completion], mus: Sequence[Tensor]) -> LossSums:
        """Collect the gradients of some completions in the masters."""
        total = LossSums()
        refusal = None
        for pack in self._passes(completions):
            losses, sums = self._losses(pack, completions, mus)
            if not math.isfinite(sums.loss):
                refusal = refusal or StepRefused(
                    f"its loss {NOT_FINITE}", _not_finite([completions[i] for i in pack.members], losses)
                )
                if self._team.size == 1:
                    break
            with self._team.together():
                losses.sum().backward()  # type: ignore[no-untyped-call]
            self.masters.collect()
            total += sums
        self._agree(refusal)
        return total

    def _losses(self, pack: Pack, completions: Sequence[Completion], mus: Sequence[Tensor]) -> tuple[Tensor, LossSums]:
        """Each token's term of the loss, and the sums; of an idle pass nothing, with a gradient of zero."""
        logprobs = self._logprobs(pack)
        if not pack.members:
            return logprobs * 0.0, LossSums()
        members = [completions[i] for i in pack.members]
        counts = [len(each.generated) for each in members]
        gains = torch.tensor([each.advantage for each in members], dtype=torch.float32)
        tokens = Tokens(
            logprobs=logprobs,
            mu=torch.cat([mus[i] for i in pack.members]).to(self.model.device),
            advantages=gains.repeat_interleave(torch.tensor(counts)).to(self.model.device),
            counts=counts,
        )
        return token_losses(tokens, self._settings)

    def _passes(self, completions: Sequence[Completion]) -> tuple[Pack, ...]:
        """This process' share of passes, with idle ones after them: as many as of the process that has most."""
        packs = self._packs(completions)
        most = max(self._team.gather(len(packs)))
        return (*packs, *[idle()] * (most - len(packs)))

    def _packs(self, completions: Sequence[Completion]) -> tuple[Pack, ...]:
        return plan(completions, self._config.micro_batch_tokens, share=self.model.takes_masks)

    def _logprobs(self, pack: Pack) -> Tensor:
        """log π of the drawn tokens of a pack's completions, one after the other, float32."""
        return self.model.within(partial(self._pass, pack))

    def _pass(self, pack: Pack) -> Tensor:
        model = self.model
        device, plain = model.device, model.head_is_plain()
        tokens = _to(pack.tokens, device)
        # A row a completion needs no mask, nor positions: plain causal attention is faster.
        where = None if pack.plain else _to(pack.positions, device)
        mask = None if pack.plain else model.attention_mask(*seen(pack, device))
        hidden, logits = model.run(_to(pack.ids, device), _to(pack.rows, device), where, mask, head=not plain)
        if not plain:
            return token_logprobs(logits, tokens, self._settings.temperature)
        return self._by_parts(hidden, tokens)

    def _by_parts(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """As `_pass` of hidden states [n, hidden]. Logits are wide: they are made some rows at a time, and in the
        backward pass again, where all of them would take more memory than the rest of the pass."""
        step = max(16, LOGIT_BYTES // (4 * self.model.vocabulary))
        if len(tokens) <= step:
            return self._score(hidden, tokens)
        parts = []
        for rows, ids in zip(torch.split(hidden, step), torch.split(tokens, step), strict=True):
            part: Tensor = checkpoint(self._score, rows, ids, use_reentrant=False)
            parts.append(part)
        return torch.cat(parts)

    def _score(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        return token_logprobs(self.model.head(hidden), tokens, self._settings.temperature)


def _to(array: NDArray[np.int64], device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device)


def _groups(completions: Sequence[Completion]) -> tuple[bytes, ...]:
    return tuple(sorted({each.group_id for each in completions}))


def _cut(values: Tensor, members: Sequence[Completion]) -> list[Tensor]:
    """The values of drawn tokens of some completions, one after the other, as one tensor each."""
    ends = np.cumsum([len(each.generated) for each in members]).tolist()
    return [values[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def _not_finite(members: Sequence[Completion], losses: Tensor) -> tuple[bytes, ...]:
    """Groups of the completions that have a token whose loss is not finite."""
    parts = zip(members, _cut(losses.detach(), members), strict=True)
    return _groups([each for each, part in parts if not bool(torch.isfinite(part).all())])
