"""One learner step here against the step of TRL's GRPOTrainer: the same model, completions and thread, both in float32.

    python tests/bench/against_trl.py --trl PYTHON [--policy FOLDER] [--rounds 3] [--groups 16] [--size 8]

PYTHON is the interpreter of an environment with trl. Without --policy: the embedded policy and completions of tools8@1
that were really drawn. With it: that folder and completions of random ids, prompts of 60 tokens and 16 to 64 after
them, as letters@1 has. A step on both sides: logprobs of the policy that drew the batch (here by its weights, read from
disk; there by the live ones), gradients over micro-batches, clipping, AdamW. TRL runs with micro-batches of each of
--trl-batches completions; the fastest counts. Sides take turns in processes of their own. Time is CPU seconds; memory
is the highest resident set less that before the model was loaded. Bars: 1.5 times TRL's tokens a second, at most TRL's
memory.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

BAR_SPEED = 1.5
BAR_MEMORY = 1.0


def resident() -> int:
    """Bytes now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def warm() -> None:
    """Import what either side would load in the middle: code is no part of a step's memory."""
    import accelerate  # noqa: F401
    import torch._dynamo  # noqa: F401
    import transformers.models.llama.modeling_llama  # noqa: F401


def timed(rounds: int, step: Any, before: int) -> None:
    """Print the figures of a side. The first step is not counted: it makes the optimiser's state."""
    step()
    started = time.process_time()
    for _ in range(rounds):
        step()
    seconds = (time.process_time() - started) / rounds
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"seconds": seconds, "bytes": peak - before}))


# --- the batch ---


def drawn(folder: Path, groups: int) -> tuple[Path, list[dict[str, Any]]]:
    """A run's first policy and completions that were drawn from it."""
    from tests.trainer.fabricate import Gateway, make_run
    from trainer.batch import build
    from trainer.learner import Learner
    from trainer.presets import EMBEDDED

    run, ledger = make_run(folder / "run", **{**EMBEDDED, "groups_per_step": groups})
    gateway, learner = Gateway(run, ledger), Learner(run, ledger)
    while ledger.count_informative() < groups:
        gateway.admit(groups, 0)
    completions = build(ledger.training_groups(learner._choose().informative), 0)
    return run.folder.policy(0), [
        {
            "group": each.group_id,
            "ids": each.ids.tolist(),
            "prompt": each.prompt,
            "generated": each.generated.tolist(),
            "advantage": each.advantage,
        }
        for each in completions
    ]


def random_batch(groups: int, size: int) -> list[dict[str, Any]]:
    import numpy as np

    generator = np.random.default_rng(0)
    batch = []
    for group in range(groups):
        prompt = generator.integers(100, 40_000, 60).tolist()
        for _ in range(size):
            tail = generator.integers(100, 40_000, generator.integers(16, 65)).tolist()
            batch.append(
                {
                    "group": bytes([group]) * 16,
                    "ids": prompt + tail,
                    "prompt": 60,
                    "generated": list(range(60, 60 + len(tail))),
                    "advantage": float(generator.choice([-0.5, 0.5])),
                }
            )
    return batch


# --- the sides ---


def ours(policy: Path, batch: list[dict[str, Any]], rounds: int, micro: int) -> None:
    import numpy as np
    import torch

    from trainer.batch import Completion
    from trainer.config import TrainerConfig
    from trainer.rundir import RunFolder
    from trainer.stepper import Stepper
    from trainer.team import Team

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        folder = RunFolder(Path(place))
        folder.policies.mkdir()
        folder.policy(0).symlink_to(policy.resolve())
        warm()
        before = resident()
        config = TrainerConfig(loss_tokens=1000, micro_batch_tokens=micro)
        stepper = Stepper(folder, config, 0, Team())
        completions = [
            Completion(
                each["group"], np.array(each["ids"]), each["prompt"], np.array(each["generated"]), None,
                each["advantage"], 0, 0,
            )
            for each in batch
        ]  # fmt: skip
        timed(rounds, lambda: stepper.step(completions), before)


def trl(policy: Path, batch: list[dict[str, Any]], rounds: int, at_once: int) -> None:
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(1)
    warm()
    before = resident()
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(policy)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    parts = [_padded(torch, batch[i : i + at_once]) for i in range(0, len(batch), at_once)]
    with tempfile.TemporaryDirectory() as place:
        config = GRPOConfig(
            output_dir=place, per_device_train_batch_size=at_once, gradient_accumulation_steps=len(parts),
            num_generations=2, beta=0.0, loss_type="dr_grpo", learning_rate=1e-6, bf16=False, use_cpu=True,
            gradient_checkpointing=False, report_to=[], disable_tqdm=True,
        )  # fmt: skip
        trainer = GRPOTrainer(
            model=model, reward_funcs=lambda completions, **rest: [0.0] * len(completions), args=config,
            train_dataset=Dataset.from_list([{"prompt": "a"}] * 2 * len(batch)), processing_class=tokenizer,
        )  # fmt: skip
        trainer.create_optimizer_and_scheduler(num_training_steps=100)
        trainer.current_gradient_accumulation_steps = len(parts)

        def step() -> None:
            for part in parts:
                ids = torch.cat((part["prompt_ids"], part["completion_ids"]), 1)
                seen = torch.cat((part["prompt_mask"], part["completion_mask"]), 1)
                with torch.no_grad():
                    part["old_per_token_logps"] = trainer._get_per_token_logps_and_entropies(
                        trainer.model, ids, seen, part["completion_ids"].shape[1], batch_size=at_once
                    )[0]
            trainer.model.train()
            for part in parts:
                trainer.accelerator.backward(trainer.compute_loss(trainer.model, part))
            torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)
            trainer.optimizer.step()
            trainer.optimizer.zero_grad()

        timed(rounds, step, before)


def _padded(torch: Any, batch: list[dict[str, Any]]) -> dict[str, Any]:
    """As GRPOTrainer makes them: prompts padded on the left, completions on the right. Tokens that the environment
    wrote are masked out of the loss."""
    left = max(each["prompt"] for each in batch)
    right = max(len(each["ids"]) - each["prompt"] for each in batch)
    table = {name: [] for name in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "tool_mask")}
    for each in batch:
        start, count = each["prompt"], len(each["ids"])
        table["prompt_ids"].append([0] * (left - start) + each["ids"][:start])
        table["prompt_mask"].append([0] * (left - start) + [1] * start)
        table["completion_ids"].append(each["ids"][start:] + [0] * (right - count + start))
        table["completion_mask"].append([1] * (count - start) + [0] * (right - count + start))
        learned = set(each["generated"])
        table["tool_mask"].append([int(place in learned) for place in range(start, start + right)])
    made = {name: torch.tensor(rows) for name, rows in table.items()}
    made["advantages"] = torch.tensor([each["advantage"] for each in batch])
    made["num_items_in_batch"] = made["tool_mask"].sum()
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trl", required=True, metavar="PYTHON")
    parser.add_argument("--policy", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--size", type=int, default=8)
    parser.add_argument("--micro", type=int, default=1024, help="micro_batch_tokens here")
    parser.add_argument("--trl-batches", type=int, nargs="+", default=[8, 32, 128])
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--data", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        policy, batch = pickle.loads(options.data.read_bytes())
        if options.side == "ours":
            ours(policy, batch, options.rounds, options.micro)
        else:
            trl(policy, batch, options.rounds, int(options.side))
        return 0
    return compare(options)


def compare(options: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory() as place:
        if options.policy:
            policy, batch = options.policy, random_batch(options.groups, options.size)
        else:
            policy, batch = drawn(Path(place), options.groups)
        data = Path(place) / "batch"
        data.write_bytes(pickle.dumps((policy, batch)))
        found = {"ours": _side(sys.executable, "ours", data, options)}
        for count in options.trl_batches:
            if count <= len(batch):
                found[f"TRL, {count} at once"] = _side(options.trl, str(count), data, options)
    tokens = sum(len(each["ids"]) for each in batch)
    print(f"{len(batch)} completions, {tokens:,} tokens a step, 1 thread, {options.rounds} rounds:")
    for name, side in found.items():
        rate, memory = tokens / side["seconds"], side["bytes"] / 1e6
        print(f"  {name}: {side['seconds']:.2f} CPU s, {rate:,.0f} tokens a CPU second, {memory:,.0f} MB")
    others = [side for name, side in found.items() if name != "ours"]
    best = min(others, key=lambda side: side["seconds"])
    speed, memory = best["seconds"] / found["ours"]["seconds"], found["ours"]["bytes"] / best["bytes"]
    print(f"  speed {speed:.2f} × TRL's fastest (bar {BAR_SPEED}), memory {memory:.2f} × its (bar {BAR_MEMORY})")
    return 0 if speed >= BAR_SPEED and memory <= BAR_MEMORY else 1


def _side(python: str, side: str, data: Path, options: argparse.Namespace) -> dict[str, float]:
    command = [python, __file__, "--trl", options.trl, "--side", side, "--data", data]
    command += ["--rounds", str(options.rounds), "--micro", str(options.micro)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    sys.exit(main())
