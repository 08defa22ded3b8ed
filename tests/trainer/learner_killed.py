"""Lets learners be killed (-9) at a named point of a step: `python learner_killed.py POINT=RUN …`.

A process of its own that forks one child a point, so that the imports are paid for once. POINT `full` is no kill
but a disk that takes no file over 100 KB. Prints how each child ended.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from pathlib import Path

import torch

from protocol.errors import StorageError
from trainer.learner import Learner
from trainer.ledger import Ledger
from trainer.rundir import open_run
from verify.model import PolicyModel


def one_turn(point: str, folder: Path) -> None:
    run = open_run(folder)

    def reached(now: str) -> None:
        if now == point:
            os.kill(os.getpid(), signal.SIGKILL)

    learner = Learner(run, Ledger(run.folder.ledger), reached=reached)
    if point == "full":
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    try:
        learner.turn()
    except StorageError as error:
        print(f"StorageError: {error}", flush=True)


def main() -> None:
    torch.set_num_threads(1)
    work = [argument.split("=", 1) for argument in sys.argv[1:]]
    # transformers imports a model's code when the first one is loaded: once here, not once a child.
    PolicyModel(open_run(Path(work[0][1])).folder.policy(0), "float32", "cpu")
    for point, folder in work:
        child = os.fork()
        if not child:
            one_turn(point, Path(folder))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        print(f"{point}: {'killed' if os.WIFSIGNALED(status) else 'ended'}", flush=True)


main()
