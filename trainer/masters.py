"""The weights that learn: float32 masters and their AdamW, beside the bfloat16 copy that scores.

Nodes run the policy in bfloat16 values, so everything that scores a completion uses the masters rounded to
bfloat16; gradients are taken at the rounded weights and applied to the masters, which keep what rounding would
lose (at a learning rate of 1e-6 nearly every update is smaller than one bfloat16 step). Not here: the loss, and
where this is kept on disk (checkpoint.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from protocol.errors import LocalError, PolicyError
from trainer.config import TrainerConfig
from trainer.schedule import learning_rate
from verify.model import PolicyModel


class Masters:
    """Masters of one live model. After construction and after each step the model holds their rounded copy."""

    def __init__(self, model: PolicyModel, config: TrainerConfig, published: frozenset[str]) -> None:
        """Masters begin as the model's weights. `published`: tensor names of the policy's files; every weight
        must be among them under one of its names, or a step would not reach the nodes. Raises PolicyError."""
        self._config = config
        names = model.parameters()
        # One entry a weight: its first name; tied weights have several.
        first: dict[int, str] = {}
        for name, weight in names.items():
            first.setdefault(id(weight), name)
        self._policy = {name: names[name].requires_grad_(True) for name in first.values()}
        self._alias = {name: first[id(weight)] for name, weight in names.items() if name in published}
        missing = sorted(set(self._policy) - set(self._alias.values()))
        if missing:
            raise PolicyError(
                f"the policy's files do not name the weight {missing[0]} ({len(missing)} in all): save the model "
                "anew with transformers' save_pretrained"
            )
        self._masters = {name: weight.detach().float().clone() for name, weight in self._policy.items()}
        self._optimiser = torch.optim.AdamW(
            list(self._masters.values()),
            lr=config.learning_rate,
            betas=(config.adam_beta1, config.adam_beta2),
            weight_decay=config.weight_decay,
            foreach=True,
        )
        self.steps = 0
        self.round()

    @torch.no_grad()
    def round(self) -> None:
        """The live model becomes the masters in bfloat16 values."""
        for name, weight in self._policy.items():
            weight.copy_(self._masters[name].to(torch.bfloat16))

    def collect(self) -> None:
        """Add the gradients of a backward pass to the masters', in float32."""
        for name, weight in self._policy.items():
            if weight.grad is None:
                continue
            master = self._masters[name]
            gradient = weight.grad.float()
            master.grad = gradient if master.grad is None else master.grad.add_(gradient)
            weight.grad = None

    def gradients(self) -> Iterator[Tensor]:
        """What was collected, in one order everywhere; zeros of a weight that got none."""
        for master in self._masters.values():
            if master.grad is None:
                master.grad = torch.zeros_like(master)
            yield master.grad

    def forget(self) -> None:
        """Drop what was collected."""
        self._optimiser.zero_grad(set_to_none=True)
        for weight in self._policy.values():
            weight.grad = None

    def rate(self) -> float:
        """The learning rate of the next step."""
        return learning_rate(self._config, self.steps)

    def step(self) -> float:
        """One AdamW update from the collected gradients; their global norm before clipping. A norm that is not
        finite changes nothing."""
        with_gradient = [master for master in self._masters.values() if master.grad is not None]
        norm = float(torch.nn.utils.clip_grad_norm_(with_gradient, self._config.gradient_clip, foreach=True))
        if math.isfinite(norm):
            for group in self._optimiser.param_groups:
                group["lr"] = self.rate()
            self._optimiser.step()
            self.steps += 1
            self.round()
        self.forget()
        return norm

    def published(self) -> dict[str, Tensor]:
        """The masters under the names the policy's files use."""
        return {name: self._masters[first] for name, first in self._alias.items()}

    def tensors(self) -> dict[str, Tensor]:
        """Everything that must be kept beside `steps` to go on exactly as before."""
        kept = {f"master/{name}": master for name, master in self._masters.items()}
        for name, master in self._masters.items():
            moments = self._optimiser.state.get(master)
            if moments:
                kept |= {f"mean/{name}": moments["exp_avg"], f"square/{name}": moments["exp_avg_sq"]}
        return kept

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Tensor], steps: int) -> None:
        """Go on from what `tensors` gave. Raises LocalError when it belongs to another model."""
        if {name for name in tensors if name.startswith("master/")} != {f"master/{name}" for name in self._masters}:
            raise LocalError("the learner's kept state belongs to another model than the policy")
        for name, master in self._masters.items():
            master.copy_(tensors[f"master/{name}"])
            if f"mean/{name}" in tensors:
                self._optimiser.state[master] = {
                    "step": torch.tensor(float(steps)),
                    "exp_avg": tensors[f"mean/{name}"].to(master.device).clone(),
                    "exp_avg_sq": tensors[f"square/{name}"].to(master.device).clone(),
                }
        self.steps = steps
        self.round()
