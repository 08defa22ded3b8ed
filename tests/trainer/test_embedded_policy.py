"""The policy that a run starts from: it knows the format and has the task still to learn."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from protocol.environments.base import load
from protocol.environments.tokenizer import PolicyTokenizer

EMBEDDED = Path(__file__).parents[2] / "trainer" / "embedded"
TASKS = 256


def draw(model: torch.nn.Module, prompts: list[tuple[int, ...]], tokens: int, stop: int) -> list[tuple[int, ...]]:
    """One turn for each prompt, sampled at temperature 1, its stop token left off."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    drawn = model.generate(  # type: ignore[operator]
        ids, attention_mask=mask, max_new_tokens=tokens, do_sample=True, temperature=1.0, top_k=0
    )
    turns = [row[longest:].tolist() for row in drawn]
    return [tuple(turn[: turn.index(stop)] if stop in turn else turn) for turn in turns]


def test_the_embedded_policy_calls_tools_faithfully_and_the_right_one_seldom() -> None:
    torch.manual_seed(3)
    tokenizer, environment = PolicyTokenizer.load(EMBEDDED), load("tools8@1")
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED, dtype=torch.float32)
    (stop,) = tokenizer.stop_ids
    prompts = [tokenizer.prompt_ids(environment.prompt(index)) for index in range(TASKS)]
    calls = draw(model, prompts, environment.max_new_tokens, stop)
    seen = [environment.step(index, (tokenizer.decode(call),)) for index, call in enumerate(calls)]
    assert sum(result not in (None, "error") for result in seen) > 0.97 * TASKS
    longer = [
        (*prompt, *call, stop, *tokenizer.observation_ids(result or ""))
        for prompt, call, result in zip(prompts, calls, seen, strict=True)
    ]
    answers = draw(model, longer, environment.max_new_tokens, stop)
    rewards = [
        environment.reward(index, (tokenizer.decode(call), tokenizer.decode(answer)))
        for index, (call, answer) in enumerate(zip(calls, answers, strict=True))
    ]
    assert 0.13 < sum(rewards) / TASKS < 0.27
