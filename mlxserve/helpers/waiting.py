"""Tells helpers whether the result of a thread's jobs is still wanted.

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
    """Kill jobs that this thread begins in this block once they are not wanted."""
    token = _is_wanted.set(is_wanted)
    try:
        yield
    finally:
        _is_wanted.reset(token)


def current() -> Callable[[], bool]:
    """Return this thread's check."""
    return _is_wanted.get()
