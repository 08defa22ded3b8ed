"""A child for test_serve.py: does what its first argument says, and ends with its parent as the real ones do."""

import sys
import time
from pathlib import Path

from trainer.child import CANNOT_START, DIVERGED, end_with_parent

mode, mark = sys.argv[1], Path(sys.argv[2])
end_with_parent()
if mode == "crash":
    print("something broke: the reason", file=sys.stderr)
    sys.exit(7)
if mode == "learner":
    print("the policy gives no finite loss", file=sys.stderr)
    sys.exit(DIVERGED)
if mode == "taken":
    print("the port is taken", file=sys.stderr)
    sys.exit(CANNOT_START)
if mode == "deaf":
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)
print("all is well", file=sys.stderr, flush=True)
mark.write_text("running")
while True:
    time.sleep(0.05)
