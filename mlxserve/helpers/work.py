"""Work: the one description of whatever is not constant time, as `FairExecutor` takes it.

    Work(0.4, partial(encode, text))                               on a thread: linear in its bytes
    Work(0.02, partial(helper.call, …), place=RunsIn.PROCESS)       in a helper that can be killed
    Work(2.0, partial(fetch, url), place=RunsIn.LOOP)               waits for others in the event loop

The executor adds the client, whose turn it waits for. Whoever awaits its result cancels it: waiting
work is removed, a helper that it waits for is killed, a coroutine is cancelled.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

T = TypeVar("T")
ResultT = TypeVar("ResultT", covariant=True)
MadeT = TypeVar("MadeT")


class RunsIn(StrEnum):
    """Names the place where work runs.

    A thread holds the interpreter's lock, and nothing can end it: it is for work whose time is
    linear in its bytes by construction. A parser, a lexer or a regular expression of somebody
    else's is none, and runs in a helper process.
    """

    LOOP = "loop"  # a coroutine that waits for others: a fetch, a load, a tool
    THREAD = "thread"
    PROCESS = "process"  # a thread waits for a helper


@dataclass(frozen=True, slots=True)
class Work(Generic[ResultT]):
    """Work that may take long.

    seconds: expected duration
    run: does it; a coroutine function in the loop. It may return more `Work`, whose result is its
        own
    place: where it runs
    nbytes: expected size of its result, which counts as the client's memory until its reply is sent
    transforms: functions to apply to its result, in this order
    """

    seconds: float
    run: Callable[[], Any]
    place: RunsIn = RunsIn.THREAD
    nbytes: int = 0
    transforms: tuple[Callable[[Any], Any], ...] = ()

    def then(self, make: Callable[[ResultT], MadeT]) -> Work[MadeT]:
        """Append `make`, which is applied to the result."""
        made: Work[Any] = replace(self, transforms=(*self.transforms, make))
        return made


MaybeWork: TypeAlias = T | Work[T]  # a result, or what is left to do for it


class RunFairly(Protocol):
    """Runs work in its client's turn, as `FairExecutor.run` does."""

    def __call__(self, work: Work[T]) -> Awaitable[T]: ...
