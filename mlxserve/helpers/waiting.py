"""Whether what a thread asks helpers for is still wanted.

with while_wanted(lambda: not client.has_left):
    helper.call(...)      # kills its process if that becomes false, and raises HelperKilled
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar


def _always() -> bool:
    return True


_is_wanted: ContextVar[Callable[[], bool]] = ContextVar("is_wanted", default=_always)


@contextmanager
def while_wanted(is_wanted: Callable[[], bool]) -> Iterator[None]:
    """Jobs that this thread begins inside are killed once they are not wanted."""
    token = _is_wanted.set(is_wanted)
    try:
        yield
    finally:
        _is_wanted.reset(token)


def current() -> Callable[[], bool]:
    """Of this thread."""
    return _is_wanted.get()
