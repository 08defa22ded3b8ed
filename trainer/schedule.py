"""The learning rate of each step. Pure."""

from __future__ import annotations

import math

from trainer.config import TrainerConfig


def learning_rate(config: TrainerConfig, steps: int) -> float:
    """Of the step after `steps` steps: up to config.learning_rate over warmup_steps, then by the schedule down to
    final_learning_rate at schedule_steps, where it stays."""
    top = config.learning_rate
    if steps < config.warmup_steps:
        return top * (steps + 1) / config.warmup_steps
    if config.schedule == "constant":
        return top
    end = config.schedule_steps or config.steps
    done = min(1.0, (steps - config.warmup_steps) / max(1, end - 1 - config.warmup_steps))
    left = 1.0 - done if config.schedule == "linear" else (1.0 + math.cos(math.pi * done)) / 2
    return config.final_learning_rate + (top - config.final_learning_rate) * left
