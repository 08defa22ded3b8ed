"""The weights that learn: float32 masters and their AdamW, beside the bfloat16 copy that scores.

Nodes run the policy in bfloat16 values, so everything that scores a completion uses the masters rounded to
bfloat16; gradients are taken at the rounded weights and applied to the masters, which keep what rounding would
lose (at a learning rate of 1e-6 nearly every update is smaller than one bfloat16 step). With config.lora_rank the
masters of a weight are two narrow matrices beside it instead (arXiv 2106.09685), merged before each rounding: what
scores, is learned from and is published stays one set of whole weights. Of several learner processes each has the
masters of its own rows of each weight. Not here: the loss, and where this is kept on disk (checkpoint.py).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from protocol.errors import LocalError, PolicyError
from trainer.config import TrainerConfig
from trainer.schedule import learning_rate
from trainer.sharding import rows
from trainer.team import Team
from verify.model import PolicyModel

_SHARED: Final = "lora_a"  # the kind of leaf that is whole in every process


class _Master(Protocol):
    """What stands behind one weight of the live model, or this process' rows of it, in float32."""

    leaves: dict[str, Tensor]  # that the optimiser updates
    kept: dict[str, Tensor]  # that never change, and without which the leaves mean nothing

    def value(self) -> Tensor:
        """The weight, or this process' rows."""

    def collect(self, weight: Tensor) -> None:
        """Add the gradient that a backward pass left on the weight to those of the leaves, in float32."""


class _Whole:
    def __init__(self, weight: Tensor) -> None:
        self.leaves = {"master": rows(weight).detach().float().clone()}
        self.kept: dict[str, Tensor] = {}

    def value(self) -> Tensor:
        return self.leaves["master"]

    def collect(self, weight: Tensor) -> None:
        assert weight.grad is not None
        master = self.leaves["master"]
        if weight.dtype is torch.float32:
            # The next backward pass adds to it in place: one gradient in memory, not two.
            master.grad = rows(weight.grad)
            return
        gradient, weight.grad = weight.grad.float(), None
        _add(master, gradient)


class _LowRank:
    """weight = base + scale · B·A; base as the policy's files had it, A [rank, in] random, B [out, rank] zero.

    Of several processes each has its rows of base and B, and all of A, for which each finds a part of the gradient.
    """

    def __init__(self, name: str, weight: Tensor, rank: int, alpha: float) -> None:
        mine = rows(weight).detach()
        out, into = mine.shape
        # The same in every process and after every start.
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        bound = 1 / math.sqrt(into)
        start = (torch.rand(rank, into, generator=generator) * 2 - 1) * bound
        self.leaves = {
            _SHARED: start.to(mine.device),
            "lora_b": torch.zeros(out, rank, device=mine.device),
        }
        self.kept = {"base": mine.to(torch.bfloat16, copy=True)}
        self._scale = alpha / rank

    def value(self) -> Tensor:
        update = self.leaves["lora_b"] @ self.leaves[_SHARED]
        return self.kept["base"].float().add_(update, alpha=self._scale)

    def collect(self, weight: Tensor) -> None:
        assert weight.grad is not None
        gradient, weight.grad = rows(weight.grad).float(), None
        _add(self.leaves[_SHARED], self._scale * (self.leaves["lora_b"].T @ gradient))
        _add(self.leaves["lora_b"], self._scale * (gradient @ self.leaves[_SHARED].T))


def _add(leaf: Tensor, gradient: Tensor) -> None:
    leaf.grad = gradient if leaf.grad is None else leaf.grad.add_(gradient)


# What AdamW keeps of each leaf, and its name in a checkpoint.
_MOMENTS: Final = {"mean": "exp_avg", "square": "exp_avg_sq"}


class Masters:
    """Masters of one live model. After construction and after each step the model holds their rounded copy.

    Of several processes all `step` at once, and ask for `published` and `tensors` at once.
    """

    def __init__(
        self, model: PolicyModel, config: TrainerConfig, published: frozenset[str], team: Team | None = None
    ) -> None:
        """Masters begin as the model's weights. `published`: tensor names of the policy's files; every weight that
        learns must be among them under one of its names, or a step would not reach the nodes. Raises PolicyError."""
        self._config = config
        self._team = team or Team()
        names = model.parameters()
        # One entry a weight: its first name; tied weights have several.
        first: dict[int, str] = {}
        for name, weight in names.items():
            first.setdefault(id(weight), name)
        chosen = model.linear_weights() if config.lora_rank else frozenset(first.values())
        self._policy = {name: names[name].requires_grad_(True) for name in first.values() if name in chosen}
        self._alias = {
            name: first[id(weight)]
            for name, weight in names.items()
            if name in published and first[id(weight)] in self._policy
        }
        missing = sorted(set(self._policy) - set(self._alias.values()))
        if missing:
            raise PolicyError(
                f"the policy's files do not name the weight {missing[0]} ({len(missing)} in all): save the model "
                "anew with transformers' save_pretrained"
            )
        self._masters = {name: self._master(name, weight) for name, weight in self._policy.items()}
        self._leaves = {
            f"{kind}/{name}": leaf for name, master in self._masters.items() for kind, leaf in master.leaves.items()
        }
        self._optimiser = torch.optim.AdamW(
            list(self._leaves.values()),
            lr=config.learning_rate,
            betas=(config.adam_beta1, config.adam_beta2),
            weight_decay=config.weight_decay,
            fused=True,  # several tensors at a time would hold copies of the moments
        )
        self.steps = 0
        self.round()

    def _master(self, name: str, weight: Tensor) -> _Master:
        if self._config.lora_rank:
            return _LowRank(name, weight, self._config.lora_rank, self._config.lora_alpha)
        return _Whole(weight)

    @torch.no_grad()
    def round(self) -> None:
        """The live model becomes the masters in bfloat16 values."""
        for name, weight in self._policy.items():
            rows(weight).copy_(self._masters[name].value().to(torch.bfloat16))

    @torch.no_grad()
    def collect(self) -> None:
        """Add the gradients of a backward pass to the masters', in float32."""
        for name, weight in self._policy.items():
            if weight.grad is not None:
                self._masters[name].collect(weight)

    def gradients(self) -> Iterator[Tensor]:
        """What was collected, in one order everywhere; zeros of a leaf that got none."""
        for leaf in self._leaves.values():
            if leaf.grad is None:
                leaf.grad = torch.zeros_like(leaf)
            yield leaf.grad

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
        norm = self._clip()
        if math.isfinite(norm):
            for group in self._optimiser.param_groups:
                group["lr"] = self.rate()
            self._optimiser.step()
            self.steps += 1
            self.round()
        self.forget()
        return norm

    def _clip(self) -> float:
        """Clip the gradients; the norm of all processes' together before."""
        most = self._config.gradient_clip
        if self._team.size == 1:
            with_gradient = [leaf for leaf in self._leaves.values() if leaf.grad is not None]
            return float(torch.nn.utils.clip_grad_norm_(with_gradient, most, foreach=True))
        gradients = dict(zip(self._leaves, self.gradients(), strict=True))
        shared = {name for name in gradients if _is_shared(name)}
        self._team.add([gradients[name] for name in sorted(shared)])
        counted = [each for name, each in gradients.items() if self._team.leads or name not in shared]
        part = float(torch.nn.utils.get_total_norm(counted, foreach=True))
        norm = math.sqrt(self._team.total(part**2))
        torch.nn.utils.clip_grads_with_norm_(self._leaves.values(), most, torch.tensor(norm), foreach=True)
        return norm

    @torch.no_grad()
    def published(self) -> dict[str, Tensor]:
        """The weights that learn, under the names the policy's files use; in the leader. float32, of several processes
        bfloat16 already."""
        if self._team.size == 1:
            return {name: self._masters[first].value() for name, first in self._alias.items()}
        found = self._whole({first: rows(each).to(torch.bfloat16) for first, each in self._policy.items()})
        return {name: found[first] for name, first in self._alias.items() if first in found}

    def tensors(self) -> dict[str, Tensor]:
        """Everything that must be kept beside `steps` to go on exactly as before, with as many processes or others; in
        the leader."""
        kept = {**self._leaves, **self._kept()}
        for name, leaf in self._leaves.items():
            moments = self._optimiser.state.get(leaf)
            if moments:
                kept |= {_moment(kind, name): moments[field] for kind, field in _MOMENTS.items()}
        return kept if self._team.size == 1 else self._whole(kept)

    def _whole(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """All rows of tensors of which each process has its own; nothing but in the leader."""
        found = {}
        for name, part in parts.items():
            whole = part if _is_shared(name) else self._team.whole(part, self._rows_of(name))
            if whole is not None and self._team.leads:
                found[name] = whole
        return found

    def _rows_of(self, name: str) -> int:
        """How many rows the whole of a tensor has, which is kept under this name."""
        return len(self._policy[name.rpartition("/")[2]])

    def _kept(self) -> dict[str, Tensor]:
        return {f"{kind}/{name}": kept for name, master in self._masters.items() for kind, kept in master.kept.items()}

    @torch.no_grad()
    def restore(self, file: Any, steps: int) -> None:
        """Go on from what `tensors` gave, in an open safetensors file. Raises LocalError when it belongs to another
        model or another lora_rank."""
        moments = tuple(f"{kind}/" for kind in _MOMENTS)
        ours = {name: self._shape(name, each) for name, each in (self._leaves | self._kept()).items()}
        names = set(file.keys())
        if {name: file.get_slice(name).get_shape() for name in names if not name.startswith(moments)} != ours:
            raise LocalError(
                "the learner's kept state belongs to another model than the policy, or to another lora_rank"
            )
        for name, tensor in (self._leaves | self._kept()).items():
            tensor.copy_(self._read(file, name, tensor))
        for name, leaf in self._leaves.items():
            if _moment("mean", name) in names:
                found = {field: self._read(file, _moment(kind, name), leaf) for kind, field in _MOMENTS.items()}
                self._optimiser.state[leaf] = {
                    "step": torch.tensor(float(steps), dtype=torch.float32, device=leaf.device),
                    **{field: tensor.to(leaf.device).clone() for field, tensor in found.items()},
                }
        self.steps = steps
        self.round()

    def _shape(self, name: str, part: Tensor) -> list[int]:
        """Of the whole tensor."""
        whole = self._team.size == 1 or _is_shared(name)
        return list(part.shape) if whole else [self._rows_of(name), *part.shape[1:]]

    def _read(self, file: Any, name: str, like: Tensor) -> Tensor:
        """This process' rows of a tensor in the file, which are as many as those of `like`."""
        if self._team.size == 1 or _is_shared(name):
            found: Tensor = file.get_tensor(name)
            return found
        return file.get_slice(name)[self._team.rows(self._rows_of(name))] if len(like) else torch.empty(like.shape)


def _is_shared(name: str) -> bool:
    return _SHARED in name.split("/")


def _moment(kind: str, leaf: str) -> str:
    return f"{kind}/{leaf.removeprefix('master/')}"
