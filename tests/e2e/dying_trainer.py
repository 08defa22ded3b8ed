"""A trainer that is killed (-9) at a point of a learner's step, run as `python tests/e2e/dying_trainer.py POINT RUN`:
everything is the real `rltrainer serve`, but its learner kills it, and then itself.

POINT is one of those that trainer/checkpoint.py and trainer/learner.py name.
"""

from __future__ import annotations

import os
import signal
import sys
from functools import partial
from pathlib import Path

import trainer.serve
from trainer.rundir import Run
from trainer.serve import Child

children_of = trainer.serve.children_of


def with_deadly_learner(point: str, run: Run, *options: str) -> list[Child]:
    children = children_of(run, *options)
    for child in children:
        if child.name == "learner":
            child.arguments = (__file__, point, str(run.folder.path), "learner")
    return children


def learn_until(point: str, path: str) -> int:
    from trainer import learner

    def reached(now: str) -> None:
        if now == point:
            os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)

    learner.Learner = partial(learner.Learner, reached=reached)  # type: ignore[assignment,misc]
    sys.argv = [__file__, path]
    return learner.main()


if __name__ == "__main__":
    point, path = sys.argv[1:3]
    if sys.argv[3:] == ["learner"]:
        sys.exit(learn_until(point, path))
    trainer.serve.children_of = partial(with_deadly_learner, point)
    sys.exit(trainer.serve.serve(Path(path), as_json=True))
