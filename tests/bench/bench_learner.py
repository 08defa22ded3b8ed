"""The learner's step against a bare transformers forward and backward over the same completions, in one run.

    python tests/bench/bench_learner.py [--rounds 5]

Embedded policy, 128 completions that were really drawn. Three sides take turns, in CPU seconds on one thread:
bare (one padded batch, logits of every position, cross-entropy, backward), gradients (log μ recalled for all of
them, loss, masters), and a whole turn (ledger read, traces decoded, gradients, AdamW, state and policy written and
flushed, ledger written). Bars: gradients at least 0.75 × bare though they hold a forward pass more, a whole turn
under 0.5 s.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

GROUPS = 16
BAR_GRADIENTS = 0.75
BAR_TURN_SECONDS = 0.5


def cpu_seconds(work: Callable[[], object]) -> float:
    started = time.process_time()
    work()
    return time.process_time() - started


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    import torch
    import torch.nn.functional as F
    from transformers import AutoModelForCausalLM

    from tests.trainer.fabricate import Gateway, make_run
    from trainer.batch import build
    from trainer.learner import Learner
    from trainer.packing import padded
    from trainer.presets import EMBEDDED

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        run, ledger = make_run(Path(folder) / "run", **{**EMBEDDED, "groups_per_step": GROUPS})
        gateway, learner = Gateway(run, ledger), Learner(run, ledger)
        while ledger.count_informative() < GROUPS * (options.rounds + 1):
            gateway.admit(GROUPS, 0)
        completions = build(ledger.training_groups(learner._choose().informative), 0)
        ids = torch.from_numpy(padded([each.ids for each in completions]))
        real = sum(len(each.ids) for each in completions)
        model = AutoModelForCausalLM.from_pretrained(run.folder.policy(0), dtype=torch.float32)

        def bare() -> None:
            logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
            F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
            model.zero_grad()

        def gradients() -> None:
            learner.stepper.learn(completions, learner.stepper.recall(completions))
            learner.stepper.masters.forget()

        def turn() -> None:
            assert not isinstance(learner.turn(), str)

        sides = (bare, gradients, turn)
        for side in sides:
            side()
        rounds = [[cpu_seconds(side) for side in sides] for _ in range(options.rounds)]
        spent = [sum(times) for times in zip(*rounds, strict=True)]
    rates = [options.rounds * real / seconds for seconds in spent]
    share, seconds = rates[1] / rates[0], spent[2] / options.rounds
    print(
        f"embedded policy, {len(completions)} completions, {real} tokens, 1 thread, {options.rounds} rounds, "
        "tokens a CPU second:"
    )
    print(f"  bare forward and backward {rates[0]:,.0f}; gradients {rates[1]:,.0f}; whole turn {rates[2]:,.0f}")
    print(
        f"  gradients / bare {share:.2f} (bar {BAR_GRADIENTS}); a turn takes {seconds:.2f} s (bar {BAR_TURN_SECONDS})"
    )
    return 0 if share >= BAR_GRADIENTS and seconds <= BAR_TURN_SECONDS else 1


if __name__ == "__main__":
    sys.exit(main())
