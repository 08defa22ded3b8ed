"""An auditor process that a trace is fatal to, started by test_isolation.py: `deadly_auditor.py WAYS MARKS RUN …`.

The real one, but that judging a trace ends as WAYS say, one after the other ("killed,frozen"); before it does, it
leaves a file in MARKS.
"""

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from trainer import audit

ways, marks = sys.argv[1].split(","), Path(sys.argv[2])
HOARD_MIB = 1024


def fatal(auditor: audit.Auditor, cases: Any, *more: Any) -> Any:
    number = len(list(marks.iterdir()))
    (marks / str(number)).touch()
    if ways[number] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if ways[number] == "frozen":
        os.kill(os.getpid(), signal.SIGSTOP)
    if ways[number] == "hoarding":
        hoard = b"\1" * (HOARD_MIB * 1024 * 1024)
        threading.Event().wait()
        print(len(hoard))


audit.Auditor._attempt = fatal  # type: ignore[method-assign]
del sys.argv[1:3]
sys.exit(audit.main())
