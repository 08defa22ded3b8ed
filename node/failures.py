"""Of several failures that ended a nursery together, the one to tell.

Not here: the errors themselves (protocol/errors.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from protocol.errors import LocalError, NetError, RemoteError, RLCommonsError

# A fault of this machine explains what follows from it, and what a peer said explains why it hung up.
_ORDER = (LocalError, RemoteError, RLCommonsError, NetError)


@contextmanager
def foremost() -> Iterator[None]:
    """Raise one plain error instead of the group in which a nursery wraps it. A bug of ours comes first."""
    try:
        yield
    except BaseExceptionGroup as group:
        errors = [each for each in _leaves(group) if isinstance(each, Exception)]
        if not errors:  # Ctrl-C, or how rich ends a program whose reader has gone
            raise next(_leaves(group)) from None
        raise min(errors, key=_rank) from None


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for each in group.exceptions:
        if isinstance(each, BaseExceptionGroup):
            yield from _leaves(each)
        else:
            yield each


def _rank(error: Exception) -> int:
    if not isinstance(error, RLCommonsError):
        return 0
    if isinstance(error, NetError):
        return len(_ORDER)
    return next(place for place, cls in enumerate(_ORDER, 1) if isinstance(error, cls))
