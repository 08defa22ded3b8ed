"""Learner scenarios that one process plays alone and two play together, to be compared.

`play(WORK, Team())` in the test's own process; `python sharded_pair.py WORK` in each of the two, whose environment is
as torchrun makes it. Each scenario has a folder WORK/NAME; what it found is returned, of two processes written to
WORK/found-RANK.json, and the weights at its end to NAME/weights-SIZE.safetensors.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from trainer.batch import Completion
from trainer.config import TrainerConfig
from trainer.learner import Follower, Learner
from trainer.ledger import Ledger
from trainer.ledger_rows import EvaluationRow, StepRow
from trainer.rundir import RunFolder, open_run
from trainer.sharding import rows
from trainer.stepper import Stepper, StepRefused
from trainer.team import LostOthers, Team, join, leave

SETTINGS: dict[str, Any] = dict(loss_tokens=500, micro_batch_tokens=60, learning_rate=1e-3, warmup_steps=1)
Found = dict[str, Any]


def batch(groups: Sequence[int], *, recalled: bool, version: int = 0) -> list[Completion]:
    """Four completions of each group, drawn by policy `version`; without log μ where that is `recalled`."""
    made = []
    for group in groups:
        generator = np.random.default_rng(group)
        prompt = generator.integers(4, 100, 5 + group % 4)
        for _ in range(4):
            tail = int(generator.integers(3, 20))
            made.append(
                Completion(
                    group_id=bytes([group]) * 16,
                    ids=np.concatenate((prompt, generator.integers(4, 100, tail))),
                    prompt=len(prompt),
                    generated=np.arange(len(prompt), len(prompt) + tail),
                    mu=None if recalled else (-3 * generator.random(tail)).astype(np.float32),
                    advantage=float(generator.normal()),
                    policy_version=version,
                    staleness=0,
                )
            )
    return made


def figures(stepper: Stepper, completions: Sequence[Completion]) -> Found:
    stepped = stepper.step(completions)
    sums = stepped.sums
    return dict(loss=sums.loss, kl=sums.kl, ess=sums.ess, tokens=sums.tokens, norm=stepped.gradient_norm)


def three_steps(folder: Path, team: Team, **settings: Any) -> Found:
    """Of one group, which leaves one of two processes idle; of three recalled by a policy that is two versions old."""
    stepper = Stepper(RunFolder(folder), TrainerConfig(**(SETTINGS | settings)), 0, team)
    batches = [
        batch([1], recalled=False),
        batch([2, 3], recalled=False),
        batch([4, 5], recalled=True) + batch([6], recalled=True, version=2),
    ]
    found = {"steps": [figures(stepper, each) for each in batches]}
    _, weights = stepper.kept()
    if team.leads:
        tensors = {name: each.to(torch.bfloat16).contiguous() for name, each in weights.items()}
        save_file(tensors, folder / f"weights-{team.size}.safetensors")
    held = {"masters": 0, "moments": 0, "live": 0}
    for leaf, state in stepper.masters._optimiser.state.items():
        held["masters"] += leaf.numel()
        held["moments"] += state["exp_avg"].numel() + state["exp_avg_sq"].numel()
    for weight in {id(each): each for each in stepper.model.parameters().values()}.values():
        held["live"] += rows(weight).untyped_storage().nbytes() // weight.element_size()
    return found | {"held": held}


def refusals(folder: Path, team: Team) -> Found:
    """A loss that is not finite in one process, a policy that one of them does not find, a gradient that is not finite;
    and steps between."""
    stepper = Stepper(RunFolder(folder), TrainerConfig(**SETTINGS), 0, team)
    spoilt = batch([1], recalled=False)
    spoilt = [replace(each, mu=np.full(len(each.generated), np.nan, np.float32)) for each in spoilt]
    refused = [refused_by(stepper, [*batch([2, 3], recalled=False), *spoilt])]
    found: list[Found] = [figures(stepper, batch([2, 3], recalled=False))]
    if team.rank == team.size - 1:
        stepper._folder = RunFolder(folder / "elsewhere")
    refused.append(refused_by(stepper, batch([4, 5], recalled=True)))
    stepper._folder = RunFolder(folder)
    steep = [replace(each, advantage=1e30 * each.advantage) for each in batch([4, 5], recalled=True)]
    refused.append(refused_by(stepper, steep))
    found.append(figures(stepper, batch([4, 5], recalled=True)))
    return {"refused": refused, "steps": found}


def refused_by(stepper: Stepper, completions: Sequence[Completion]) -> list[Any]:
    try:
        stepper.step(completions)
    except StepRefused as refusal:
        stepper.forget()
        return [refusal.cause, [group[0] for group in refusal.groups]]
    return []


def turn_and_evaluation(folder: Path, team: Team) -> Found:
    """One step of a run, and an evaluation of what it made."""
    run = open_run(folder)
    if not team.leads:
        follower = Follower(run, team)
        follower.turn()
        follower.turn()
        return {}
    learner = Learner(run, Ledger(run.folder.ledger), team=team)
    row = learner.turn()
    assert isinstance(row, StepRow), row
    evaluation = learner.evaluate()
    assert isinstance(evaluation, EvaluationRow)
    return {"version": row.version, "reward": evaluation.reward_mean, "tasks": evaluation.tasks}


def loss_of_one(folder: Path, team: Team) -> str:
    """What the others say when the last process dies in the middle of a step."""
    stepper = Stepper(RunFolder(folder), TrainerConfig(**SETTINGS), 0, team)
    if not team.leads:
        stepper.masters.collect = lambda: os._exit(0)  # type: ignore[method-assign]
    try:
        stepper.step(batch([1, 2, 3], recalled=False))
    except LostOthers as error:
        return str(error)
    return ""


SCENARIOS: dict[str, Callable[[Path, Team], Found]] = {
    "tied": three_steps,
    "odd": lambda folder, team: three_steps(folder, team, gradient_checkpointing=True),
    "bfloat16": lambda folder, team: three_steps(folder, team, dtype="bfloat16"),
    "low-rank": lambda folder, team: three_steps(folder, team, lora_rank=2),
    "refusals": refusals,
    "run": turn_and_evaluation,
}


def play(work: Path, team: Team, names: Sequence[str] = tuple(SCENARIOS)) -> dict[str, Found]:
    return {name: SCENARIOS[name](work / name, team) for name in names}


def main() -> None:
    torch.set_num_threads(1)
    work, team = Path(sys.argv[1]), join("cpu")
    (work / f"found-{team.rank}.json").write_text(json.dumps(play(work, team)))
    (work / f"lost-{team.rank}").write_text(loss_of_one(work / "tied", team))
    leave()


if __name__ == "__main__":
    main()
