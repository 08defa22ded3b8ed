"""Real learner steps of SmolLM2-135M in small: text it drew, the loss, float32 masters and AdamW of the trainer.

What makes the changes of one step is that they are AdamW's over gradients of the real model; batches are short so
that ten steps take a minute. Not here: what is measured on them (bench_delta.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

GROUP = 4
PROMPTS = 2  # a batch
NEW_TOKENS = 24
BEGINNINGS = [
    *("The capital of France is", "Once upon a time there was", "To make bread you need", "The river runs"),
    *("In winter the birds", "My grandmother told me", "A triangle has three", "The train to the coast"),
    *("When the rain stopped", "Every good recipe begins", "The first computers were", "Near the old harbour"),
    *("She opened the letter", "Water boils when", "The teacher asked the class", "Long before the city"),
    *("If you plant a seed", "The doctor said that", "On the last page", "Music is made of"),
]

Weights = dict[str, NDArray[np.uint16]]


@dataclass(frozen=True)
class Drawn:
    """One completion: prompt and drawn token ids, their log-probabilities, and its advantage."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    mu: tuple[float, ...]
    advantage: float


def draw(policy: Path, batches: int) -> list[list[Drawn]]:
    """Batches of PROMPTS groups of GROUP completions each, by the policy as it is on disk."""
    from protocol.environments.tokenizer import PolicyTokenizer

    tokenizer = PolicyTokenizer.load(policy)
    asked = [tokenizer.encode(text) for text in BEGINNINGS]
    count = batches * PROMPTS
    turns = _turns(policy, [asked[index % len(asked)] for index in range(count) for _ in range(GROUP)])
    groups = [turns[start : start + GROUP] for start in range(0, len(turns), GROUP)]
    drawn = [_group(asked[i % len(asked)], group, tokenizer) for i, group in enumerate(groups)]
    return [[each for group in drawn[start : start + PROMPTS] for each in group] for start in range(0, count, PROMPTS)]


def _turns(policy: Path, prompts: list[tuple[int, ...]]) -> list[Any]:
    from node.engine import SequenceRequest
    from node.transformers_engine import TransformersEngine

    engine = TransformersEngine(slots=16, threads=1)
    engine.load(policy, bytes(32))
    done: dict[str, Any] = {}
    for index, prompt in enumerate(prompts):
        engine.open(SequenceRequest(str(index), prompt, index, 1.0, NEW_TOKENS))
    while len(done) < len(prompts):
        for turn in engine.step():
            done[turn.key] = turn
            engine.finish(turn.key)
    engine.close()
    return [done[str(index)] for index in range(len(prompts))]


def _group(prompt: tuple[int, ...], turns: list[Any], tokenizer: Any) -> list[Drawn]:
    """Rewarded for the share of the letter e: any reward will do that tells completions apart."""
    from trainer.advantage import mean

    texts = [tokenizer.decode(turn.tokens) for turn in turns]
    gains = mean([text.count("e") / max(1, len(text)) for text in texts])
    return [Drawn(prompt, turn.tokens, turn.logprobs, gain) for turn, gain in zip(turns, gains, strict=True)]


def steps(
    policy: Path, batches: list[list[Drawn]], learning_rate: float
) -> Iterator[tuple[Weights, dict[str, tuple[int, ...]]]]:
    """The policy's bfloat16 bits after each step, one batch a step, and the shapes, by tensor name. The arrays are
    new each time."""
    import torch

    from trainer.config import TrainerConfig
    from trainer.masters import Masters
    from trainer.publish import tensor_names
    from verify.model import PolicyModel

    torch.set_num_threads(1)
    config = TrainerConfig(learning_rate=learning_rate, warmup_steps=0)
    model = PolicyModel(policy, "float32", "cpu")
    masters = Masters(model, config, tensor_names(policy))
    for batch in batches:
        _collect(model, config, batch)
        masters.collect()
        masters.step()
        published = masters.published()
        yield (
            {
                name: weight.detach().to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16).reshape(-1)
                for name, weight in published.items()
            },
            {name: tuple(weight.shape) for name, weight in published.items()},
        )


def _collect(model: Any, config: Any, batch: list[Drawn]) -> None:
    """Gradients of one batch."""
    import torch

    from trainer.loss import LossSettings, Tokens, token_logprobs, token_losses
    from trainer.packing import padded

    ids = padded([np.array([*each.prompt, *each.tokens[:-1]]) for each in batch])
    rows = [
        i * ids.shape[1] + len(each.prompt) - 1 + k for i, each in enumerate(batch) for k in range(len(each.tokens))
    ]
    _, logits = model.run(torch.from_numpy(ids), torch.tensor(rows))
    logprobs = token_logprobs(logits, torch.tensor([token for each in batch for token in each.tokens]), 1.0)
    mu = torch.tensor([value for each in batch for value in each.mu])
    gains = torch.tensor([each.advantage for each in batch for _ in each.tokens])
    settings = LossSettings(config.mask_difference, config.ratio_cap, config.log_ratio_penalty, float(len(rows)))
    losses, _ = token_losses(Tokens(logprobs, mu, gains, [len(each.tokens) for each in batch]), settings)
    losses.sum().backward()
