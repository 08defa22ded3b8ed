"""Starts the learner's processes where a run has several (config.learners), as torchrun does, and ends with their code.

    python -m trainer.learners RUN

Each is `python -m trainer.learner RUN` and ends when its stdin does, which is this process'. Where one ends, the others
are ended. Not here: what they do (team.py, learner.py).
"""

from __future__ import annotations

import sys
import uuid
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from trainer.child import say
from trainer.rundir import open_run


def main() -> int:
    path = sys.argv[1]
    count = open_run(Path(path)).config.learners
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        run_id=str(uuid.uuid4()),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
    )
    try:
        elastic_launch(config, sys.executable)("-m", "trainer.learner", path)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        say("learners", f"process {rank} of {count} ended with {failure.exitcode}, and the others with it")
        return failure.exitcode if failure.exitcode > 0 else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
