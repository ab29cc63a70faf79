"""Faults on purpose: makes one call of a public method raise, or any number of them in a row."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any
from unittest.mock import patch


@dataclass(frozen=True)
class Point:
    """A method of a class, at which a fault can happen."""

    owner: type
    method: str

    def __str__(self) -> str:
        return f"{self.owner.__name__}.{self.method}"


def points_of(owner: type, *, but: frozenset[str] = frozenset()) -> list[Point]:
    """Every public method of the class, in the order of its text, apart from `but`."""
    return [
        Point(owner, name)
        for name, member in vars(owner).items()
        if not name.startswith("_") and name not in but and inspect.isfunction(member)
    ]


@dataclass
class Fault:
    """Raises `error` in place of call number `at`, counted from 0, of the method.

    Calls of objects that `is_meant` denies are not counted: an idle engine of another test's
    fixture lives in the same process and looks after itself once a second.
    """

    point: Point
    error: Callable[[], Exception]
    at: int = 0
    is_meant: Callable[[Any], bool] = lambda _: True
    num_calls: int = 0
    has_happened: bool = False

    def __str__(self) -> str:
        return f"{type(self.error()).__name__} in call {self.at} of {self.point}"

    @contextmanager
    def planted(self) -> Iterator[None]:
        original = getattr(self.point.owner, self.point.method)
        lock = threading.Lock()

        @wraps(original)
        def failing(*args: Any, **options: Any) -> Any:
            if not self.is_meant(args[0]):
                return original(*args, **options)
            with lock:
                self.num_calls += 1
                is_it = self.num_calls == self.at + 1
                self.has_happened |= is_it
            if is_it:
                raise self.error()
            return original(*args, **options)

        with patch.object(self.point.owner, self.point.method, failing):
            yield


@contextmanager
def all_planted(faults: list[Fault]) -> Iterator[None]:
    with ExitStack() as stack:
        for fault in faults:
            stack.enter_context(fault.planted())
        yield
