"""Several learner processes as one: what they tell each other, over torch.distributed.

Started by `torchrun` (torch.distributed.run), which names each process' rank. Rank 0 leads: it alone has the ledger
and writes files. Each process computes the gradients of its share of the groups; the sums of all are the same
everywhere, and so is the step (docs/decisions/0014-learner.md). Not here: what is computed (stepper.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from protocol.errors import LocalError

# Of one exchange. The leader calls the others at least every 30 s, and a step of theirs takes no longer than its own.
DEADLINE: Final = timedelta(minutes=10)

T = TypeVar("T")


class Team:
    """This process among those of one learner. A team of one exchanges nothing."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank = rank
        self.size = size

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def device(self, configured: str) -> str:
        """The configured device; of several processes each takes the CUDA device of its own number."""
        return f"cuda:{os.environ['LOCAL_RANK']}" if self.size > 1 and configured == "cuda" else configured

    def share(self, weights: Sequence[int]) -> list[int]:
        """Which of so many indivisible parts this process does, ascending: heaviest first to whoever has least."""
        loads = [0] * self.size
        mine = []
        for index in sorted(range(len(weights)), key=lambda each: weights[each], reverse=True):
            rank = loads.index(min(loads))
            loads[rank] += weights[index]
            if rank == self.rank:
                mine.append(index)
        return sorted(mine)

    def tell(self, value: T | None = None) -> T:
        """From the leader, who gives `value`, to all."""
        box: list[Any] = [value]
        self._exchange(lambda: dist.broadcast_object_list(box, src=0))
        found: T = box[0]
        return found

    def gather(self, value: T) -> list[T]:
        """What each process gave, by rank, to all."""
        boxes: list[Any] = [value] * self.size
        self._exchange(lambda: dist.all_gather_object(boxes, value))
        return boxes

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Each becomes the sum of all processes', in place."""

        def reduce() -> None:
            for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
                work.wait()

        self._exchange(reduce)

    def _exchange(self, work: Callable[[], object]) -> None:
        if self.size == 1:
            return
        try:
            work()
        except RuntimeError as error:
            first = str(error).strip().splitlines()[0]
            raise LocalError(f"learner process {self.rank} lost the others: {first}") from error


def join(device: str) -> Team:
    """The team that torchrun's environment names; a team of one without it. Raises LocalError when it does not meet."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return Team()
    try:
        if device.startswith("cuda"):
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
            dist.init_process_group("cpu:gloo,cuda:nccl", timeout=DEADLINE)
        else:
            dist.init_process_group("gloo", timeout=DEADLINE)
    except (RuntimeError, ValueError) as error:
        raise LocalError(f"the {size} learner processes did not meet: {error}") from error
    return Team(dist.get_rank(), size)


def leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
