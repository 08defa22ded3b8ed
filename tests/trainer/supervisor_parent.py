"""A supervisor with one child, in a process of its own that test_serve.py kills; prints the child's process id."""

import sys
import time
from pathlib import Path

from trainer.ledger import Ledger
from trainer.rundir import open_run
from trainer.serve import Child, Supervisor

run = open_run(Path(sys.argv[1]))
child = Child("child", (sys.argv[2], "run", sys.argv[3]), run.folder.logs / "child.log")
supervisor = Supervisor(run, Ledger(run.folder.ledger), [child])
supervisor.look()
assert child.process is not None
print(child.process.pid, flush=True)
while True:
    time.sleep(1)
