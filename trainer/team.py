"""Several learner processes as one: what they tell each other, over torch.distributed.

Started by `torchrun` (torch.distributed.run), which names each process' rank. Rank 0 leads: it alone has the ledger
and writes files. Each process has its rows of every weight and computes the gradients of its share of the groups
(docs/decisions/0014-learner.md). Not here: what is computed (stepper.py), and the weights during a pass (sharding.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from protocol.errors import LocalError

# Of one exchange. A process that dies ends the others at once; this is for one that hangs, and must leave the leader
# time to write a step. Between steps it calls the others at least every 30 s.
DEADLINE: Final = timedelta(minutes=30)

T = TypeVar("T")


class LostOthers(LocalError):
    """An exchange with the other processes of the learner failed: this one cannot go on either."""


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

    def total(self, value: float) -> float:
        """The sum of all processes' values, to all."""
        box = torch.tensor([value], dtype=torch.float64)
        self.add([box])
        return float(box)

    def rows(self, count: int) -> slice:
        """Which of a tensor's `count` rows this process holds: as many each, the last processes fewer or none."""
        each = -(-count // self.size)
        return slice(min(self.rank * each, count), min((self.rank + 1) * each, count))

    def whole(self, rows: Tensor, count: int) -> Tensor | None:
        """The tensor of `count` rows of which each process holds `rows`, on the CPU: in the leader, None elsewhere."""
        each = -(-count // self.size)
        padded = torch.zeros(each, *rows.shape[1:], dtype=rows.dtype)
        padded[: len(rows)] = rows
        # As bytes: not every dtype is one that is exchanged.
        given = padded.flatten().view(torch.uint8)
        box = given.new_empty(self.size * len(given)) if self.leads else None
        parts = None if box is None else list(torch.split(box, len(given)))
        self._exchange(lambda: dist.gather(given, parts, dst=0))
        return None if box is None else box.view(rows.dtype).view(self.size * each, *rows.shape[1:])[:count]

    @contextmanager
    def together(self) -> Iterator[None]:
        """Computes within what exchanges on its own. Raises LostOthers where that fails, and lets other errors pass."""
        try:
            yield
        except RuntimeError as error:
            if self.size == 1 or not (isinstance(error, dist.DistError) or "gloo" in str(error)):
                raise
            raise self._lost(error) from error

    def _exchange(self, work: Callable[[], object]) -> None:
        if self.size == 1:
            return
        try:
            work()
        except RuntimeError as error:
            raise self._lost(error) from error

    def _lost(self, error: RuntimeError) -> LostOthers:
        return LostOthers(f"learner process {self.rank} lost the others: {str(error).strip().splitlines()[0]}")


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
