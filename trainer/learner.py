"""The learner process: complete groups → one step → the next policy, over and over.

    choose  the oldest informative groups            batch.py
    recall  log μ of every token                     from the audit, or by the policy that drew it
    learn   gradients over micro-batches, one step   loss.py, masters.py
    commit  masters, policy and "used" together      checkpoint.py

Started as `python -m trainer.learner RUN`; ends when its stdin does. May be killed at any point. Not here: whether
a trace is honest (its verdict says so), and signing the policy it makes (the gateway holds the key).
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NoReturn

import numpy as np
import torch
from torch import Tensor

from protocol.errors import RLCommonsError
from trainer import checkpoint
from trainer.batch import Choice, Completion, build, choose, micro_batches, padded
from trainer.child import Changes, alone, end_with_parent, now_ms, say
from trainer.ledger import Ledger
from trainer.ledger_rows import StepRow
from trainer.loss import LossSettings, LossSums, token_logprobs, token_losses
from trainer.masters import Masters
from trainer.publish import prune_policies, tensor_names
from trainer.rundir import Run, open_run
from verify.model import PolicyModel

# Beyond these the batch says little about the policy that learns from it: look at staleness and learning rate.
ALARMS: Final[tuple[tuple[str, Callable[[LossSums], bool]], ...]] = (
    ("the effective sample size is under half of the tokens", lambda sums: sums.ess < 0.5),
    ("the policy is more than 0.01 nats a token from the one that drew the batch", lambda sums: sums.kl > 1e-2),
    ("more than 2 % of the tokens are masked", lambda sums: sums.masked_share > 0.02),
)  # fmt: skip
PATIENCE_SECONDS: Final = 30.0  # a wait longer than this becomes an event


class StepRefused(Exception):
    """This batch must not be learned from; the policy stays as it is. `groups` are to be dropped."""

    def __init__(self, cause: str, groups: tuple[bytes, ...]) -> None:
        super().__init__(cause)
        self.cause = cause
        self.groups = groups


class Learner:
    """In memory what is on disk: after every step the masters are those of the latest policy.

    Raises LocalError (and its kinds) when the run's files do not fit together. After any exception but
    StepRefused the object is of no more use: make a new one, which goes on from the last committed step.
    """

    def __init__(self, run: Run, ledger: Ledger, *, reached: Callable[[str], None] = lambda point: None) -> None:
        self._config = run.config
        self._folder = run.folder
        self._ledger = ledger
        self._reached = reached
        self._alarms: frozenset[str] = frozenset()
        torch.set_num_threads(self._config.threads)
        self.version = checkpoint.recover(self._folder, ledger)
        policy = self._folder.policy(self.version)
        self._model = PolicyModel(policy, self._config.dtype, self._config.device)
        self.masters = Masters(self._model, self._config, tensor_names(policy))
        if self._folder.step(self.version).exists():
            record = checkpoint.load_record(self._folder, self.version)
            self.masters.restore(checkpoint.load_state(self._folder, self.version), record.optimiser_steps)
        elif self.version:
            ledger.add_event(now_ms(), "learner", f"no learner state of policy {self.version}: the optimiser is new")
        self._settings = LossSettings(
            mask_difference=self._config.mask_difference,
            ratio_cap=self._config.ratio_cap,
            log_ratio_penalty=self._config.log_ratio_penalty,
            tokens=self._config.loss_tokens or self._longest_batch(),
            temperature=self._config.temperature,
        )

    def _longest_batch(self) -> int:
        return self._config.group_size * self._config.groups_per_step * self._config.max_turn_tokens

    def turn(self) -> StepRow | str:
        """One step if there is enough to learn from, else what is waited for."""
        if 0 < self._config.steps <= self.version:
            return f"all {self._config.steps} policy versions are made"
        choice = self._choose()
        found, wanted = len(choice.informative), self._config.groups_per_step
        if found < wanted:
            return f"{found} of {wanted} groups whose rewards differ are complete"
        try:
            return self._step(choice)
        except StepRefused as refusal:
            self._drop(refusal)
            return f"a step from policy {self.version} was refused: {refusal.cause}"

    def _choose(self) -> Choice:
        choice = choose(
            self._ledger.complete_groups(),
            version=self.version,
            staleness_limit=self._config.staleness_limit,
            wanted=self._config.groups_per_step,
        )
        if choice.unusable:
            with self._ledger.write():
                for group_id, cause in choice.unusable.items():
                    self._ledger.drop_group(group_id, cause)
        return choice

    def _drop(self, refusal: StepRefused) -> None:
        self.masters.forget()
        self.masters.round()
        with self._ledger.write():
            for group_id in refusal.groups:
                self._ledger.drop_group(group_id, refusal.cause)
            text = f"step from policy {self.version} refused, {len(refusal.groups)} groups dropped: {refusal.cause}"
            self._ledger.add_event(now_ms(), "alarm", text)

    def _step(self, choice: Choice) -> StepRow:
        began = time.monotonic()
        groups = self._ledger.training_groups(choice.informative)
        completions = build(groups, self.version)
        mus = self._recall(completions)
        sums = self._learn(completions, mus)
        norm = self.masters.step()
        if not math.isfinite(norm):
            raise StepRefused("the gradient is not finite", choice.informative)
        self._reached("learned")
        staleness = [completion.staleness for completion in completions]
        row = StepRow(
            version=self.version + 1,
            created_ms=now_ms(),
            groups=len(groups),
            traces=len(completions),
            tokens=sums.tokens,
            reward_mean=choice.reward_mean,
            flat_groups=len(choice.flat),
            staleness_mean=sum(staleness) / len(staleness),
            staleness_max=max(staleness),
            loss=sums.loss,
            ess=sums.ess,
            kl=sums.kl,
            masked=sums.masked_share,
            gradient_norm=norm,
            seconds=time.monotonic() - began,
        )
        self._commit(row, (*choice.informative, *choice.flat))
        self._sound(sums)
        return row

    def _commit(self, row: StepRow, taken: tuple[bytes, ...]) -> None:
        checkpoint.commit(
            self._folder,
            self._ledger,
            row,
            taken=taken,
            optimiser_steps=self.masters.steps,
            state=self.masters.tensors(),
            weights=self.masters.published(),
            reached=self._reached,
        )
        self.version = row.version
        prune_policies(self._folder, self.version, self._config.keep_policies)

    def _sound(self, sums: LossSums) -> None:
        """An event when an alarm begins and when it is over."""
        now = frozenset(text for text, rings in ALARMS if rings(sums))
        figures = f"ESS/N {sums.ess:.2f}, KL {sums.kl:.2g}, masked {sums.masked_share:.1%}"
        for text in now - self._alarms:
            self._ledger.add_event(now_ms(), "alarm", f"policy {self.version}: {text} ({figures})")
        for text in self._alarms - now:
            self._ledger.add_event(now_ms(), "learner", f"policy {self.version}: over: {text} ({figures})")
        self._alarms = now

    # --- log μ ---

    def _recall(self, completions: Sequence[Completion]) -> list[Tensor]:
        """log μ [n] of each completion: the audit's, else by a forward pass of the policy that drew it.

        That policy is still on disk (keep_policies is above staleness_limit) and lends its weights to the live
        model for the pass. Asking the current weights instead would make every ratio 1 and so hide that the
        completion is stale.
        """
        mus = {
            index: torch.from_numpy(completion.mu.copy())
            for index, completion in enumerate(completions)
            if completion.mu is not None
        }
        for version in sorted({completions[i].policy_version for i in range(len(completions)) if i not in mus}):
            self._become(version, completions)
            indices = [i for i in range(len(completions)) if i not in mus and completions[i].policy_version == version]
            for pack in self._packs([completions[i] for i in indices]):
                members = [indices[place] for place in pack]
                with torch.inference_mode():
                    logprobs = self._logprobs([completions[i] for i in members])
                # A copy made outside of inference mode may take part in a backward pass.
                mus |= zip(members, _cut(logprobs.cpu().clone(), [completions[i] for i in members]), strict=True)
        self.masters.round()
        return [mus[index] for index in range(len(completions))]

    def _become(self, version: int, completions: Sequence[Completion]) -> None:
        if version == self.version:
            self.masters.round()
            return
        folder = self._folder.policy(version)
        if not folder.exists() or not self._model.swap(folder):
            lost = {each.group_id for each in completions if each.policy_version == version}
            raise StepRefused(f"policy {version} is no longer on disk", tuple(sorted(lost)))

    # --- gradients ---

    def _learn(self, completions: Sequence[Completion], mus: Sequence[Tensor]) -> LossSums:
        """Collect the gradients of the whole batch in the masters."""
        total = LossSums()
        for pack in self._packs(completions):
            members = [completions[i] for i in pack]
            counts = torch.tensor([len(each.generated) for each in members])
            gains = torch.tensor([each.advantage for each in members], dtype=torch.float32).repeat_interleave(counts)
            mu = torch.cat([mus[i] for i in pack])
            losses, sums = token_losses(
                self._logprobs(members), mu.to(self._model.device), gains.to(self._model.device), self._settings
            )
            if not math.isfinite(sums.loss):
                raise StepRefused("its loss is not finite", _not_finite(members, losses))
            losses.sum().backward()  # type: ignore[no-untyped-call]
            self.masters.collect()
            total += sums
        return total

    def _packs(self, completions: Sequence[Completion]) -> tuple[tuple[int, ...], ...]:
        return micro_batches([len(each.ids) for each in completions], self._config.micro_batch_tokens)

    def _logprobs(self, members: Sequence[Completion]) -> Tensor:
        """log π of the drawn tokens of some completions, one after the other, float32."""
        # The last drawn token predicts nothing that is asked for.
        ids = padded([each.ids[: each.generated[-1]] for each in members])
        rows = np.concatenate([i * ids.shape[1] + each.generated - 1 for i, each in enumerate(members)])
        tokens = np.concatenate([each.ids[each.generated] for each in members])
        device = self._model.device
        _, logits = self._model.run(torch.from_numpy(ids).to(device), torch.from_numpy(rows).to(device))
        return token_logprobs(logits, torch.from_numpy(tokens).to(device), self._settings.temperature)


def _cut(values: Tensor, members: Sequence[Completion]) -> list[Tensor]:
    """The values of drawn tokens of some completions, one after the other, as one tensor each."""
    ends = np.cumsum([len(each.generated) for each in members]).tolist()
    return [values[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def _not_finite(members: Sequence[Completion], losses: Tensor) -> tuple[bytes, ...]:
    """Groups of the completions that have a token whose loss is not finite."""
    parts = zip(members, _cut(losses.detach(), members), strict=True)
    return tuple(sorted({each.group_id for each, part in parts if not bool(torch.isfinite(part).all())}))


def serve(run: Run, ledger: Ledger) -> NoReturn:
    """Learn until interrupted."""
    learner = Learner(run, ledger)
    say("learner", f"goes on from policy {learner.version}")
    changes = Changes(ledger)
    since, told = time.monotonic(), False
    while True:
        outcome = learner.turn()
        if isinstance(outcome, StepRow):
            say("learner", _line(outcome))
            since, told = time.monotonic(), False
            continue
        if not told and time.monotonic() - since > PATIENCE_SECONDS:
            say("learner", f"waits: {outcome}")
            ledger.add_event(now_ms(), "learner", f"waits for more than {PATIENCE_SECONDS:g} s: {outcome}")
            told = True
        changes.wait(PATIENCE_SECONDS)


def _line(row: StepRow) -> str:
    return (
        f"policy {row.version}: reward {row.reward_mean:.3f}, {row.traces} traces, staleness {row.staleness_mean:.1f}, "
        f"KL {row.kl:.2g}, gradient {row.gradient_norm:.2g}, {row.seconds:.2f} s"
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m trainer.learner", description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, metavar="RUN", help="the run's folder")
    arguments = parser.parse_args()
    end_with_parent()
    try:
        run = open_run(arguments.run)
        with alone(run.folder.path, "learner"):
            serve(run, Ledger(run.folder.ledger))
    except KeyboardInterrupt:
        return 0
    except RLCommonsError as error:
        say("learner", str(error))
        return 1


if __name__ == "__main__":
    sys.exit(main())
