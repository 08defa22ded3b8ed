"""A node that cheats, run as `python tests/e2e/cheating_node.py ADDRESS HOME`: everything is the real rlnode, but
its engine draws with seeds of its own choosing, as one would to keep the best of several completions."""

from __future__ import annotations

import sys
from dataclasses import replace

from node.cli import main
from node.engine import SequenceRequest
from node.transformers_engine import TransformersEngine

honest_open = TransformersEngine.open


def open_with_own_seed(engine: TransformersEngine, request: SequenceRequest) -> None:
    # The start-up probe is answered honestly: a cheater would.
    chosen = request.seed if request.key.startswith("probe-") else request.seed ^ 0x5EED
    honest_open(engine, replace(request, seed=chosen))


if __name__ == "__main__":
    TransformersEngine.open = open_with_own_seed  # type: ignore[method-assign]
    sys.exit(main(["join", sys.argv[1], "--cpu", "--home", sys.argv[2]]))
