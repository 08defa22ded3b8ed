"""The learner process: complete groups → one step → the next policy, over and over.

    choose  the oldest informative groups            batch.py
    step    log μ, gradients, the update             stepper.py
    commit  masters, policy and "used" together      checkpoint.py

Started as `python -m trainer.learner RUN`, by torchrun where a run has several; ends when its stdin does. May be killed
at any point. Not here: whether a trace is honest (its verdict says so), and signing the policy it makes (the gateway
holds the key).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, Literal, NoReturn

import torch

from protocol.environments.tokenizer import PolicyTokenizer
from protocol.errors import LocalError, RLCommonsError
from protocol.heap import few_heaps, give_back, settle
from trainer import checkpoint
from trainer.batch import Choice, Completion, Shaping, build, choose, crowding
from trainer.child import DIVERGED, Changes, alone, end_with_parent, now_ms, say, say_ready
from trainer.config import TrainerConfig
from trainer.evaluate import Evaluation, evaluate
from trainer.home import learners_turn
from trainer.ledger import Ledger
from trainer.ledger_rows import EvaluationRow, StepRow
from trainer.loss import LossSums
from trainer.publish import prune_policies, retire_policy
from trainer.rundir import Run, open_run
from trainer.stepper import NOT_FINITE, Stepped, Stepper, StepRefused
from trainer.team import LostOthers, Team, join, leave

# Beyond these the batch says little about the policy that learns from it: look at staleness and learning rate.
ALARMS: Final[tuple[tuple[str, Callable[[LossSums], bool]], ...]] = (
    ("the effective sample size is under half of the tokens", lambda sums: sums.ess < 0.5),
    ("the policy is more than 0.01 nats a token from the one that drew the batch", lambda sums: sums.kl > 1e-2),
    ("more than 2 % of the tokens are masked", lambda sums: sums.masked_share > 0.02),
    # gspo clips 15 % of the tokens by design (its paper, section 5.2); what clips by token far less.
    ("more than 20 % of the tokens are clipped", lambda sums: sums.clipped_share > 0.2),
)  # fmt: skip
PATIENCE_SECONDS: Final = 30.0  # a wait longer than this becomes an event
REFUSED_IN_A_ROW: Final = 3  # batches whose loss or gradient is not finite: then it is not the batch
# Of candidates for a batch, in batches: from these a node that drew too much of the first is put off.
_CANDIDATES: Final = 3

# What the leader calls the other processes to: a step from completions, or to wait on where there are none.
Call = tuple[Completion, ...] | Literal["evaluate"]


class Diverged(LocalError):
    """The policy gives no finite loss or gradient, whatever the batch: a person must look at the run."""


class Learner:
    """In memory what is on disk: after every step the masters are those of the latest policy.

    Raises LocalError (and its kinds) when the run's files do not fit together. After any exception the object is of no
    more use: make a new one, which goes on from the last committed step.
    """

    def __init__(
        self,
        run: Run,
        ledger: Ledger,
        *,
        team: Team | None = None,
        reached: Callable[[str], None] = lambda point: None,
    ) -> None:
        self._run = run
        self._config = run.config
        self._folder = run.folder
        self._ledger = ledger
        self._team = team or Team()
        self._reached = reached
        self._alarms: frozenset[str] = frozenset()
        self._pruned = False  # whether older policies were looked through since this process began
        self._refused = 0  # in a row, for want of a finite number
        torch.set_num_threads(self._config.threads)
        version = self._team.tell(checkpoint.recover(self._folder, ledger))
        self._shaping = _shaping(run, version)
        self.stepper = _stepper(run, version, self._team)
        if version and not self._folder.step(version).exists():
            ledger.add_event(now_ms(), "learner", f"no learner state of policy {version}: the optimiser is new")

    @property
    def version(self) -> int:
        return self.stepper.version

    def turn(self) -> StepRow | str:
        """One step if there is enough to learn from, else what is waited for.

        Raises Diverged when the last batches all gave a loss or gradient that is not finite.
        """
        if self._config.last_version <= self.version:
            return f"all {self._config.last_version} policy versions are made"
        choice = self._choose()
        found, wanted = len(choice.informative), self._config.groups_per_step
        if found < wanted:
            return f"{found} of {wanted} groups whose rewards differ are complete"
        with learners_turn(self._run) as waited:
            if waited:
                choice = self._choose()  # meanwhile some may have been taken back
                if len(choice.informative) < wanted:
                    return f"{len(choice.informative)} of {wanted} groups are left after waiting for the device"
            return self._try(choice)

    def _try(self, choice: Choice) -> StepRow | str:
        try:
            row = self._step(choice)
        except StepRefused as refusal:
            self._drop(refusal)
            return f"a step from policy {self.version} was refused: {refusal.cause}"
        finally:
            self.stepper.rest()
        self._refused = 0
        return row

    def _choose(self) -> Choice:
        outcomes = self._ledger.complete_groups()
        version, limit = self.version, self._config.staleness_limit
        wanted = self._config.groups_per_step
        oldest = choose(outcomes, version=version, staleness_limit=limit, wanted=_CANDIDATES * wanted)
        # From here on who drew it is read: it puts groups off, and never out.
        put_off = crowding(self._ledger.drawers(oldest.informative), wanted=wanted, share=self._config.node_batch_share)
        choice = choose(outcomes, version=version, staleness_limit=limit, wanted=wanted, put_off=put_off)
        if choice.unusable:
            with self._ledger.write():
                for group_id, cause in choice.unusable.items():
                    self._ledger.drop_group(group_id, cause)
        return choice

    def _drop(self, refusal: StepRefused) -> None:
        self.stepper.forget()
        with self._ledger.write():
            for group_id in refusal.groups:
                self._ledger.drop_group(group_id, refusal.cause)
            text = f"step from policy {self.version} refused, {len(refusal.groups)} groups dropped: {refusal.cause}"
            self._ledger.add_event(now_ms(), "alarm", text)
        self._refused = self._refused + 1 if refusal.cause.endswith(NOT_FINITE) else 0
        if self._refused == REFUSED_IN_A_ROW:
            text = (
                f"{self._refused} batches in a row were refused, the last because {refusal.cause}: policy "
                f"{self.version} is kept; look at learning_rate and at the rewards before going on"
            )
            self._ledger.add_event(now_ms(), "alarm", text)
            raise Diverged(text)

    def _step(self, choice: Choice) -> StepRow:
        began = time.monotonic()
        completions = build(self._ledger.training_groups(choice.informative), self.version, self._shaping)
        if not completions:
            raise StepRefused("every completion of it was cut off", choice.informative)
        self._team.tell(completions)
        stepped = self.stepper.step(completions)
        self._reached("learned")
        row = _row(self.version, choice, completions, stepped, time.monotonic() - began)
        self._commit(row, (*choice.informative, *choice.flat))
        self._sound(stepped.sums)
        return row

    def _commit(self, row: StepRow, taken: tuple[bytes, ...]) -> None:
        state, weights = self.stepper.kept()
        checkpoint.commit(
            self._folder,
            self._ledger,
            row,
            taken=taken,
            optimiser_steps=self.stepper.masters.steps,
            state=state,
            weights=weights,
            reached=self._reached,
        )
        self._give_up_policies()

    def _give_up_policies(self) -> None:
        """Those that are kept no longer. After the first step all are looked at: what a learner that was killed left,
        and what a smaller keep_policies no longer asks for."""
        keep = self._config.keep_policies
        if not self._pruned:
            prune_policies(self._folder, self.version, keep)
            self._pruned = True
        elif self.version >= keep:
            retire_policy(self._folder, self.version - keep)

    def _sound(self, sums: LossSums) -> None:
        """An event when an alarm begins and when it is over."""
        now = frozenset(text for text, rings in ALARMS if rings(sums))
        figures = (
            f"ESS/N {sums.ess:.2f}, KL {sums.kl:.2g}, masked {sums.masked_share:.1%}, "
            f"clipped {sums.clipped_share:.1%}, entropy {sums.entropy:.2f}"
        )
        for text in now - self._alarms:
            self._ledger.add_event(now_ms(), "alarm", f"policy {self.version}: {text} ({figures})")
        for text in self._alarms - now:
            self._ledger.add_event(now_ms(), "learner", f"policy {self.version}: over: {text} ({figures})")
        self._alarms = now

    def evaluate(self) -> EvaluationRow | None:
        """Evaluate the policy if its turn has come and it was not. A failure is an event and stops nothing."""
        every = self._config.evaluate_every
        if not every or self.version % every or self._ledger.is_evaluated(self.version):
            return None
        try:
            tokenizer = PolicyTokenizer.load(self._folder.policy(self.version))
            with learners_turn(self._run):
                self._team.tell("evaluate")
                with self.stepper.playing() as model:
                    found = evaluate(self._run, model, tokenizer)
                self.stepper.rest()
        except LostOthers:
            raise
        except LocalError as error:
            found = Evaluation(0, 0.0, 0.0, self._config.evaluate_tasks, str(error), 0.0)
        if found.faults:
            text = (
                f"evaluation of policy {self.version}: {found.faults} tasks left out, the first because {found.fault}"
            )
            self._ledger.add_event(now_ms(), "environment", text)
        row = EvaluationRow(
            self.version, now_ms(), found.tasks, found.reward_mean, found.reward_error, found.faults, found.seconds
        )
        self._ledger.record_evaluation(row)
        return row

    def idle(self) -> None:
        """Tell the team that there is nothing to do yet."""
        self._team.tell(())


def _row(
    version: int, choice: Choice, completions: tuple[Completion, ...], stepped: Stepped, seconds: float
) -> StepRow:
    """The figures of the step that made policy `version`."""
    sums, staleness = stepped.sums, [completion.staleness for completion in completions]
    return StepRow(
        version=version,
        created_ms=now_ms(),
        groups=len(choice.informative),
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
        clipped=sums.clipped_share,
        entropy=sums.entropy,
        ratio_mean=sums.ratio_mean,
        ratio_max=sums.ratio_max,
        gradient_norm=stepped.gradient_norm,
        learning_rate=stepped.learning_rate,
        seconds=seconds,
    )


def _shaping(run: Run, version: int) -> Shaping:
    config: TrainerConfig = run.config
    return Shaping(
        advantage=config.advantage,
        length_penalty=config.length_penalty,
        length_ramp=config.length_ramp or max(1, config.max_tokens // 5),
        most_tokens=config.max_tokens,
        mask_overlong=config.mask_overlong,
        stop_ids=PolicyTokenizer.load(run.folder.policy(version)).stop_ids if config.mask_overlong else frozenset(),
    )


def _stepper(run: Run, version: int, team: Team) -> Stepper:
    """As it was after the step that made policy `version`."""
    stepper = Stepper(run.folder, run.config, version, team)
    if run.folder.step(version).exists():
        record = checkpoint.load_record(run.folder, version)
        with checkpoint.open_state(run.folder, version) as file:
            stepper.masters.restore(file, record.optimiser_steps)
    return stepper


class Follower:
    """A process beside the leader's: it does what it is called to, with its rows of the weights."""

    def __init__(self, run: Run, team: Team) -> None:
        torch.set_num_threads(run.config.threads)
        version: int = team.tell()
        self._team = team
        self.stepper = _stepper(run, version, team)

    def turn(self) -> None:
        """One call of the leader's. Raises LostOthers when it is gone."""
        call: Call = self._team.tell()
        if call == "evaluate":
            self.stepper.follow()
        elif call:
            try:
                self.stepper.step(call)
                self.stepper.kept()
            except StepRefused:
                self.stepper.forget()
            self.stepper.rest()


def follow(run: Run, team: Team) -> NoReturn:
    """Do as the leader calls until interrupted."""
    follower = Follower(run, team)
    settle()
    while True:
        follower.turn()
        give_back()


def serve(run: Run, ledger: Ledger, team: Team) -> NoReturn:
    """Learn until interrupted. Raises Diverged."""
    learner = Learner(run, ledger, team=team)
    settle()
    say_ready(run.folder.path, "learner")
    say("learner", f"goes on from policy {learner.version}")
    changes = Changes(ledger)
    since, told = time.monotonic(), False
    while True:
        if evaluation := learner.evaluate():
            say("learner", _evaluation_line(evaluation))
        outcome = learner.turn()
        if isinstance(outcome, StepRow):
            say("learner", _line(outcome))
            since, told = time.monotonic(), False
            give_back()
            continue
        if not told and time.monotonic() - since > PATIENCE_SECONDS:
            say("learner", f"waits: {outcome}")
            ledger.add_event(now_ms(), "learner", f"waits for more than {PATIENCE_SECONDS:g} s: {outcome}")
            told = True
        learner.idle()
        changes.wait(PATIENCE_SECONDS)


def _line(row: StepRow) -> str:
    return (
        f"policy {row.version}: reward {row.reward_mean:.3f}, {row.traces} traces, staleness {row.staleness_mean:.1f}, "
        f"KL {row.kl:.2g}, gradient {row.gradient_norm:.2g}, {row.seconds:.2f} s"
    )


def _evaluation_line(row: EvaluationRow) -> str:
    return (
        f"policy {row.version} on {row.tasks} held-out tasks: reward {row.reward_mean:.3f} ± {row.reward_error:.3f}, "
        f"{row.seconds:.1f} s"
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m trainer.learner", description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, metavar="RUN", help="the run's folder")
    arguments = parser.parse_args()
    few_heaps()
    end_with_parent()
    try:
        run = open_run(arguments.run)
        team = join(run.config.device)
        if not team.leads:
            follow(run, team)
        with alone(run.folder.path, "learner"):
            serve(run, Ledger(run.folder.ledger), team)
    except KeyboardInterrupt:
        return 0
    except Diverged as error:
        say("learner", str(error))
        return DIVERGED
    except RLCommonsError as error:
        say("learner", str(error))
        return 1
    finally:
        leave()


if __name__ == "__main__":
    sys.exit(main())
