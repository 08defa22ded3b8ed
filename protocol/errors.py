"""Every error both sides share, and whose fault each one is.

RLCommonsError
├── UsageError            a person gave us something we cannot use; the message says what to do instead
├── LocalError            this machine failed: it never costs a node its standing
│   ├── StorageError      disk full, unreadable, locked by another process
│   ├── KeyFileError      key missing, unreadable, readable by others, or not a key
│   ├── PolicyError       a policy folder is incomplete or does not match its root
│   ├── EnvironmentFault  an environment raised or ran out of time on our side
│   └── EngineError       the inference engine failed
├── NetError              the connection, not the peer's word, failed: retry elsewhere or later
│   ├── Unreachable       no dial succeeded
│   ├── ConnectionLost    the peer went away
│   └── DeadlineExceeded  a named wait ran out
└── RemoteError           the peer broke the protocol; carries a wire code (SPEC 11)
    ├── DecodeError       bytes that are not one canonical value
    ├── SignatureError    a signature that does not verify
    └── Refused           the peer answered with an error reply

Not here: a lie told in a trace. That is a Verdict (protocol/verdict.py), not an exception.
"""

from __future__ import annotations

from enum import StrEnum


class Code(StrEnum):
    """Wire codes of error replies. Append-only (SPEC 11)."""

    NOT_CANONICAL = "NOT_CANONICAL"  # re-encoding the decoded value gives other bytes
    MALFORMED = "MALFORMED"  # not the type, field or range the table asks for
    TOO_LARGE = "TOO_LARGE"  # over a limit of protocol/limits.py
    BAD_SIGNATURE = "BAD_SIGNATURE"
    VERSION_MISMATCH = "VERSION_MISMATCH"
    WRONG_RUN = "WRONG_RUN"
    CLOCK_SKEW = "CLOCK_SKEW"
    ENGINE_NOT_ADMITTED = "ENGINE_NOT_ADMITTED"
    UNEXPECTED_MESSAGE = "UNEXPECTED_MESSAGE"  # not allowed in this state of the session
    NOT_FOUND = "NOT_FOUND"
    BUSY = "BUSY"  # over a fair share now; ask again later
    BANNED = "BANNED"
    INTERNAL = "INTERNAL"  # a fault of the side that answers


class RLCommonsError(Exception):
    """Root of the tree. `str(error)` is one line a person can act on."""


class UsageError(RLCommonsError):
    pass


class LocalError(RLCommonsError):
    pass


class StorageError(LocalError):
    pass


class KeyFileError(LocalError):
    pass


class PolicyError(LocalError):
    pass


class EnvironmentFault(LocalError):
    pass


class EngineError(LocalError):
    pass


class NetError(RLCommonsError):
    pass


class Unreachable(NetError):
    pass


class ConnectionLost(NetError):
    pass


class DeadlineExceeded(NetError):
    """A wait ran out. `what` names the wait, `seconds` its deadline."""

    def __init__(self, what: str, seconds: float) -> None:
        super().__init__(f"no answer within {seconds:g} s while {what}")
        self.what = what
        self.seconds = seconds


class RemoteError(RLCommonsError):
    """The peer broke the protocol. `code` is what an error reply carries."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(message)
        self.code = code


class DecodeError(RemoteError):
    pass


class SignatureError(RemoteError):
    def __init__(self, message: str) -> None:
        super().__init__(Code.BAD_SIGNATURE, message)


class Refused(RemoteError):
    pass
