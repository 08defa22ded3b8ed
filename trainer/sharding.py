"""The live policy where a learner is several processes: each holds its rows of every weight (torch's FSDP2).

A layer's weights are put together in every process for its forward pass and again for its backward pass, from rows in
float32 that travel in the policy's dtype; its gradient is summed over the processes in float32, and each keeps the sum
of its rows. So all processes must do the same passes: who has none left does an idle one (packing.py). Not here: what
the rows become (masters.py), and what is computed from a pass (stepper.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from protocol.errors import LocalError, PolicyError
from trainer.team import Team
from verify.model import PolicyModel

T = TypeVar("T")


def rows(tensor: Tensor) -> Tensor:
    """What this process holds of a weight or of its gradient: all of it, where it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class ShardedPolicy(PolicyModel):
    """A policy of which this process of the team holds its rows, in float32. All processes make it at once, and call
    `within` equally often; which weights learn is settled before the first time. Raises PolicyError for a policy that
    cannot be sharded."""

    def __init__(self, folder: Path, dtype: str, device: str, team: Team) -> None:
        # Whole in this machine's memory, until each layer has become rows on the device.
        super().__init__(folder, dtype, "cpu")
        self._team = team
        self._leading = False
        self._require_shardable(folder)
        self.device = torch.device(device)
        self._root = _Pass(self._model)
        with team.together():
            self._parts = self._shard()

    def within(self, work: Callable[[], T]) -> T:
        if self._leading:
            self._team.tell(True)
        with self._team.together():
            found: T = self._root(work)
        if not torch.is_grad_enabled():
            # With a gradient its backward pass does this. The next pass must see what the rows are by then.
            for part in self._parts:
                part.reshard()
        return found

    @contextmanager
    def leading(self) -> Iterator[None]:
        """Each pass within is this process' alone: the others `follow` meanwhile."""
        self._leading = True
        try:
            yield
        finally:
            self._leading = False
            self._team.tell(False)

    @torch.no_grad()
    def follow(self) -> None:
        """Take part in the passes of a process that is `leading`, until it is done."""
        token = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        while self._team.tell():
            self.within(partial(self.run, token, None))

    def _fill(self, target: Tensor, stored: Tensor) -> None:
        if isinstance(target, DTensor):
            target, stored = target.to_local(), stored[self._team.rows(len(stored))]
        super()._fill(target, stored)

    def _require_shardable(self, folder: Path) -> None:
        alone = "run one learner process (learners = 1)"
        if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
            raise LocalError(f"several learner processes need FSDP as of torch 2.13, not {torch.__version__}: {alone}")
        if not self.layers():
            raise PolicyError(f"transformers names no layers of the model in {folder} to shard it by: {alone}")
        for name, weight in self.parameters().items():
            if not weight.ndim:
                raise PolicyError(f"{name} in {folder} is a single number, which has no rows to shard: {alone}")
            if weight.dtype is not self.dtype:
                raise PolicyError(f"{name} in {folder} stays {weight.dtype} beside {self.dtype}: {alone}")

    def _shard(self) -> list[FSDPModule]:
        mesh = init_device_mesh(self.device.type, (self._team.size,))
        policy = MixedPrecisionPolicy(param_dtype=self.dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
        parts = []
        for module in (*reversed(self.layers()), self._root):
            for weight in module.parameters():
                if not isinstance(weight, DTensor):
                    weight.data = weight.data.float()
            # The root's weights are needed at the end of a forward pass and at the start of the backward pass.
            kept = module is self._root
            part = fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=not kept)
            # The loss is divided by a constant, so the sum over processes is the gradient.
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
            # What one process' tokens do not reach (an expert), another's may.
            part.set_reduce_scatter_unused_params(True, recurse=False)
            parts.append(part)
        return parts


class _Pass(nn.Module):
    """The module whose forward pass is one pass, whatever of the model is called in it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, work: Callable[[], object]) -> object:
        return work()
