"""What rlverify asks of its arguments before it imports what takes seconds to import.

Not here: reading trace files and logs (files.py, log_source.py), and what only the work itself can find.
"""

from __future__ import annotations

import os
from pathlib import Path

from protocol.environments import base
from protocol.errors import KeyFileError, UsageError
from protocol.identity import load_identity
from protocol.outputs import cause, check_apart, check_target
from protocol.policy import policy_files
from verify.thresholds import limits_for


def require_policy_folder(folder: Path) -> None:
    """Raises PolicyError for what holds no policy."""
    try:
        policy_files(folder)
    except OSError as error:
        raise UsageError(f"{folder} cannot be read: {cause(error)}: give the policy's folder") from None


def require_folder(folder: Path | None, what: str) -> None:
    """Raises UsageError for what is given and is no folder."""
    if folder is not None and not os.path.isdir(folder):
        raise UsageError(f"there is no folder {folder}: give {what}")


def require_new_file(path: Path, what: str) -> None:
    """Raises UsageError where a file lies already, or none can be written."""
    check_target(what, path)
    if path.exists():
        raise UsageError(f"{path} exists already: move it away, or write elsewhere")


def require_calibrating(
    policy: Path, traces: Path | None, environment: tuple[str, str], dtypes: tuple[str, str], key: Path, out: Path
) -> None:
    """What `rlverify calibrate` needs. Raises UsageError, PolicyError."""
    require_policy_folder(policy)
    require_folder(traces, "the folder of the trace files of trusted nodes")
    check_apart([("the calibration", out), ("the key that signs", key)])
    require_new_file(out, "the calibration")
    limits_for(*dtypes)
    base.load(*environment)
    if key.exists():
        try:
            load_identity(key)
        except KeyFileError as error:
            raise UsageError(f"{error}; or give --key a free name, where a new key is made") from None
    else:
        check_target("the key that signs", key)


def require_controls(
    policy: Path, environment: str | None, worker_dtype: str, verifier_dtypes: tuple[str, ...], html: Path | None
) -> None:
    """What `rlverify controls` needs. Raises UsageError, PolicyError."""
    require_policy_folder(policy)
    for dtype in verifier_dtypes:
        limits_for(worker_dtype, dtype)
    if environment is not None:
        base.load(environment, "")
    if html is not None:
        check_target("the page", html)
