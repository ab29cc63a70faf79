"""Job: a call that a helper's process runs, from the caller's side."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

from mlxserve.helpers.errors import HelperKilled, JobFailed, KillReason, describe_exit
from mlxserve.helpers.frames import MAX_TIMES, NO_MEMORY, Kind
from mlxserve.helpers.process import ChildProcess
from mlxserve.helpers.waiting import current
from mlxserve.system.suspend_clock import RUNNING

# Of a job that is not wanted any more: a shorter one ends sooner than another process starts.
KILLED_AFTER_SECONDS = 0.25
_TICK_SECONDS = 0.02  # precision of the systems' processor times
_EXIT_SECONDS = 5.0  # time to wait for a process that has closed its socket already


class Job:
    """A call that a child runs. Not thread-safe."""

    def __init__(
        self,
        child: ChildProcess,
        number: int,
        seconds: float,
        release: Callable[[], None],
        why_closed: Callable[[], str | None],
    ) -> None:
        self.result: Any = None
        self.is_done = False
        self._child = child
        self._number = number
        self._seconds = seconds
        self._release = release
        self._why_closed = why_closed
        child.was_stopped = False
        self._is_wanted = current()
        # It may have been started long ago; nothing has looked at it since then.
        self._count_from_now()

    def receive(self, timeout: float = 0.0) -> list[Any]:
        """Return the values that the job has yielded since the last call.

        Waits up to `timeout` seconds for a value or the end. Raises HelperKilled, JobFailed; the
        job is done then.
        """
        assert not self.is_done, "the job has ended"
        until = RUNNING.now() + timeout
        try:
            while True:
                self._child.exchange(min(until, self._deadline) - RUNNING.now())
                values = list(self._taken())
                if values or self.is_done:
                    return values
                self._look()
                if RUNNING.now() >= until:
                    return []
        except (HelperKilled, JobFailed):
            self._end()
            raise
        except BaseException as error:  # a system without memory, for example
            self.cancel()  # or the next job would get this one's answer
            if not isinstance(error, Exception):
                raise
            message = f"has an answer that cannot be received: {error!r}"
            raise HelperKilled(KillReason.ENDED, message) from error

    def cancel(self) -> None:
        """Kill the child, unless the job is done."""
        if not self.is_done:
            self._child.kill()
            self._end()

    def _taken(self) -> Iterator[Any]:
        for number, kind, value in self._child.messages():
            expected = self._number if self._child.is_set_up else 0
            if number not in (expected, None):
                self._kill(KillReason.ENDED, "got the answer of another one")
            match kind:
                case Kind.READY if not self._child.is_set_up:
                    self._child.set_up()
                case Kind.VALUE:
                    yield value
                case Kind.RESULT:
                    self.result = value
                    self._end()
                    return
                case Kind.ERROR:
                    self._raise(value)
                case _:
                    self._kill(KillReason.ENDED, "answered what is not understood")
            self._count_from_now()

    def _count_from_now(self) -> None:
        self._began = time.monotonic()
        self._deadline = RUNNING.now() + self._limit()
        self._last_deadline = self._deadline + (MAX_TIMES - 1) * self._limit()
        self._cpu_began: float | None = None

    def _raise(self, value: Any) -> None:
        if not (isinstance(value, list) and [type(part) for part in value] == [str, str]):
            self._kill(KillReason.ENDED, "answered what is not understood")
        if not self._child.is_set_up:
            self._child.kill()  # it could not be set up
        raise JobFailed(*value)

    def _look(self) -> None:
        """Check the child: kill it if it exceeds its limits, and detect its end."""
        child = self._child
        if child.is_at_end:
            code = child.kill(_EXIT_SECONDS)
            if (closed := self._why_closed()) is not None:
                raise HelperKilled(KillReason.CLOSED, closed)
            if code == -signal.SIGALRM:
                self._kill_late()
            if code in (NO_MEMORY, -signal.SIGABRT):  # Rust's allocator aborts
                self._kill(KillReason.MEMORY, child.needed_too_much)
            self._kill(KillReason.ENDED, f"ended its process ({describe_exit(code)})")
        # Not earlier: it takes 20 us, and most jobs end before a look.
        if self._cpu_began is None:
            self._cpu_began = child.cpu_seconds()
        is_late = RUNNING.now() >= self._deadline
        child.look(again=is_late)
        if is_late and (child.was_stopped or not self._gets_more(self._cpu_began)):
            self._kill_late()
        if child.is_too_large:
            self._kill(KillReason.MEMORY, child.needed_too_much)
        if not self._is_wanted() and time.monotonic() - self._began > KILLED_AFTER_SECONDS:
            self._kill(KillReason.LEFT, "is not wanted any more")

    def _gets_more(self, cpu_began: float) -> bool:
        """Extend the deadline if the child did not get a processor for all of its time."""
        missing = self._limit() - (self._child.cpu_seconds() - cpu_began)
        now = RUNNING.now()
        if missing < _TICK_SECONDS or now >= self._last_deadline:
            return False
        self._deadline = min(now + missing, self._last_deadline)
        return True

    def _kill_late(self) -> None:
        """Kill a late child: unlike the deadline, its own timer keeps running during a pause."""
        if self._child.was_stopped or RUNNING.was_paused(time.monotonic() - self._began):
            self._kill(KillReason.PAUSED, "was paused")
        self._kill(KillReason.TIME, f"took longer than {self._limit():g} s")

    def _limit(self) -> float:
        return self._seconds if self._child.is_set_up else self._child.start_seconds

    def _kill(self, reason: KillReason, message: str) -> None:
        self._child.kill()
        raise HelperKilled(reason, message)

    def _end(self) -> None:
        if not self.is_done:
            self.is_done = True
            self._release()
