"""What staleness costs: the reward after the same number of traces as a synchronous loop of the same settings.

    python tests/bench/bench_staleness.py [--seeds 0 1 … 8] [--traces 4500] [--staleness 0 2 4]

The embedded policy and its preset on tools8, in one process and without a network. Asynchronous side: the trainer's
own learner on a run folder of its own (choice, advantage, recalled log μ, loss, masters, bfloat16 policies on disk);
every completion was drawn by the policy exactly S versions before the one that learns from it, which is more than
dispatch does, where S is the most. Synchronous side: a plain loop written here, with none of the trainer's code: draw
by the newest weights, pad, REINFORCE with the group's mean as baseline, AdamW, all in float32. Both draw as many
groups as informative ones are missing until a step has enough, so that no trace is left over on either side.

Compared is the policy itself, on 128 held-out tasks that are the same everywhere, whenever so many traces have been
learned from or passed over; the bar is on the mean of the evaluations in the last third, where the curves have
climbed (on the way up S versions are S steps, whatever the loss does with them; that is printed and has no bar).
Points are hundredths of mean reward; the spread is the standard error over seeds of the difference, which is four
points with three seeds: nine are taken.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
import torch
import torch.nn.functional as F

from tests.trainer.fabricate import ENVIRONMENT, Actor, Episode, Gateway, make_run
from trainer.evaluate import evaluate
from trainer.learner import Learner
from trainer.ledger_rows import StepRow
from trainer.presets import EMBEDDED
from trainer.rundir import Run

BARS = {0: 3.0, 2: 3.0, 4: 6.0}  # points
HELD_OUT = 128
EVERY = 250  # traces between evaluations
TASKS_OF_SEED = 1_000_000  # each seed has tasks of its own
Point = tuple[int, float]  # traces so far, reward on the held-out tasks


class Drawer(Gateway):
    """Draws every version with one model in memory."""

    held: tuple[int, Actor] | None = None

    def actor(self, version: int) -> Actor:
        if self.held is None:
            self.held = (version, Actor(self.run.folder.policy(version)))
        elif self.held[0] != version:
            assert self.held[1].model.swap(self.run.folder.policy(version))
            self.held = (version, self.held[1])
        return self.held[1]


class Evaluations:
    """Takes a point of the curve whenever EVERY more traces were drawn."""

    def __init__(self, run: Run) -> None:
        self._run = replace(run, config=replace(run.config, evaluate_tasks=HELD_OUT))
        self._actor = Actor(run.folder.policy(0))
        self.points: list[Point] = []

    def look(self, traces: int, load: Callable[[Actor], None]) -> None:
        if traces // EVERY > (self.points[-1][0] // EVERY if self.points else -1):
            load(self._actor)
            found = evaluate(self._run, self._actor.model, self._actor.tokenizer)
            self.points.append((traces, found.reward_mean))


# --- the trainer's own parts ---


def asynchronous(folder: Path, template: Path, seed: int, staleness: int, traces: int) -> list[Point]:
    run, ledger = make_run(folder, template, **EMBEDDED)
    drawer, learner, evaluations = Drawer(run, ledger, seed), Learner(run, ledger), Evaluations(run)
    drawer.next_task = seed * TASKS_OF_SEED
    drawn = 0

    def load(actor: Actor) -> None:
        actor.model.swap(run.folder.policy(learner.version))

    while drawn < traces:
        evaluations.look(drawn, load)
        drawing = max(0, learner.version - staleness)
        while missing := run.config.groups_per_step - ledger.count_informative():
            drawer.admit(missing, drawing)
            drawn += missing * run.config.group_size
        row = learner.turn()
        assert isinstance(row, StepRow), row
        assert row.staleness_mean == row.staleness_max == learner.version - 1 - drawing
    evaluations.look(drawn, load)
    ledger.close()
    return evaluations.points


# --- the loop it is held against ---


def synchronous(run: Run, seed: int, traces: int) -> list[Point]:
    from transformers import AutoModelForCausalLM

    config, evaluations = run.config, Evaluations(run)
    model = AutoModelForCausalLM.from_pretrained(run.folder.policy(0), dtype=torch.float32)
    betas = (config.adam_beta1, config.adam_beta2)
    adam = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, betas=betas, weight_decay=config.weight_decay)
    warm_up = torch.optim.lr_scheduler.LambdaLR(adam, lambda step: min(1.0, (step + 1) / config.warmup_steps))
    actor = Actor(run.folder.policy(0))

    def load(into: Actor) -> None:
        with torch.no_grad():
            theirs = into.model.parameters()
            for name, weight in model.named_parameters():
                theirs[name].copy_(weight)

    drawn, task = 0, seed * TASKS_OF_SEED
    while drawn < traces:
        evaluations.look(drawn, load)
        load(actor)
        batch: list[list[Episode]] = []
        while missing := config.groups_per_step - len(batch):
            groups = [played(task + number, seed, config.group_size, actor) for number in range(missing)]
            actor.play([episode for group in groups for episode in group])
            batch += [group for group in groups if len({episode.reward for episode in group}) > 1]
            task += missing
            drawn += missing * config.group_size
        loss = reinforce(model, batch) / config.loss_tokens
        adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.gradient_clip)
        adam.step()
        warm_up.step()
    evaluations.look(drawn, load)
    return evaluations.points


def played(index: int, seed: int, size: int, actor: Actor) -> list[Episode]:
    """A group that is yet to be drawn."""
    prompt = actor.prompt(index)
    digests = (hashlib.sha256(f"{seed} {index} {slot}".encode()).digest() for slot in range(size))
    return [Episode(index, int.from_bytes(digest[:8], "little"), prompt) for digest in digests]


def reinforce(model: Any, batch: list[list[Episode]]) -> torch.Tensor:
    """−Σ A · log π over the drawn tokens; A is the reward less the group's mean."""
    rows, masks, gains = [], [], []
    for group in batch:
        middle = statistics.fmean(episode.reward or 0.0 for episode in group)
        for episode in group:
            rows.append(torch.tensor(episode.ids))
            drawn = [bool(span.kind == 0) for span in episode.spans for _ in range(span.length)]
            masks.append(torch.tensor([False] * len(episode.prompt) + drawn))
            gains.append((episode.reward or 0.0) - middle)
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence(masks, batch_first=True)[:, 1:]
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1].transpose(1, 2)
    logprobs = -F.cross_entropy(logits, ids[:, 1:], reduction="none")
    return -(torch.tensor(gains)[:, None] * logprobs * mask).sum()


# --- the table ---


def at(points: list[Point], traces: int) -> float:
    """The reward at so many traces, between the two points around them."""
    return float(np.interp(traces, [each[0] for each in points], [each[1] for each in points]))


def late(points: list[Point], traces: int) -> float:
    """The mean over the last third of the traces."""
    return statistics.fmean(at(points, place) for place in range(traces * 2 // 3, traces + 1, EVERY))


def error(values: list[float]) -> float:
    return statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")


def report(plain: list[list[Point]], stale: dict[int, list[list[Point]]], traces: int) -> bool:
    marks = [traces * part // 5 for part in range(1, 6)]
    print(f"\nmean reward on {HELD_OUT} held-out tasks of tools8, {len(plain)} seeds, embedded policy and preset")
    print(f"{'':14}" + "".join(f"{mark:>8,}" for mark in marks) + f"{'last third':>12}{'points':>9}{'±':>6}{'bar':>6}")
    ends = [late(points, traces) for points in plain]
    print(f"{'synchronous':14}" + _curve(plain, marks) + f"{statistics.fmean(ends):12.3f}   each: {_each(ends)}")
    met = True
    for staleness, curves in stale.items():
        found = [late(points, traces) for points in curves]
        behind = [100 * (end - mine) for end, mine in zip(ends, found, strict=True)]
        bar = BARS.get(staleness)
        met &= bar is None or statistics.fmean(behind) <= bar
        print(
            f"{f'staleness {staleness}':14}{_curve(curves, marks)}{statistics.fmean(found):12.3f}"
            f"{-statistics.fmean(behind):9.1f}{error(behind):6.1f}{'' if bar is None else f'{-bar:6.0f}'}"
            f"   each: {_each(found)}"
        )
    return met


def _curve(curves: list[list[Point]], marks: list[int]) -> str:
    return "".join(f"{statistics.fmean(at(points, mark) for points in curves):8.3f}" for mark in marks)


def _each(values: list[float]) -> str:
    return " ".join(f"{value:.3f}" for value in values)


def runs(options: argparse.Namespace) -> Iterator[tuple[int | None, int, list[Point]]]:
    """(staleness, seed, curve); staleness None: synchronous."""
    with tempfile.TemporaryDirectory() as name:
        template = Path(name) / "template"
        run, ledger = make_run(template, **EMBEDDED)
        ledger.close()
        for seed in options.seeds:
            yield None, seed, synchronous(run, seed, options.traces)
            for staleness in options.staleness:
                folder = Path(name) / "run"
                yield staleness, seed, asynchronous(folder, template, seed, staleness, options.traces)
                shutil.rmtree(folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(9)))
    parser.add_argument("--traces", type=int, default=4_500)
    parser.add_argument("--staleness", type=int, nargs="+", default=list(BARS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    plain: list[list[Point]] = []
    stale: dict[int, list[list[Point]]] = {staleness: [] for staleness in options.staleness}
    print(f"{ENVIRONMENT}: " + ", ".join(f"{name} {value}" for name, value in EMBEDDED.items()), flush=True)
    for staleness, seed, points in runs(options):
        (plain if staleness is None else stale[staleness]).append(points)
        which = "synchronous" if staleness is None else f"staleness {staleness}"
        curve = " ".join(f"{place}:{reward:.4f}" for place, reward in points)
        print(f"seed {seed}, {which}, {time.process_time():.0f} CPU s so far: {curve}", flush=True)
    return 0 if report(plain, stale, options.traces) else 1


if __name__ == "__main__":
    sys.exit(main())
