"""Helper: a child process for work on untrusted input, with a deadline and a memory limit per job.

    helper = Helper("mlxserve.text.renderer:Renderer", path, name="templates", memory=1 << 30)
    text = helper.call("render", messages, seconds=2)      # from any thread; waits
    helper.close()

`Renderer(path)` is made in the child, once; a job calls one of its methods with plain data, and
returns plain data: None, numbers, text, bytes, and lists and dicts of these (tuples arrive as
lists). The child starts with the first job, and again with the first one after it was killed. It is
`python -m mlxserve.helpers.child`, so a target's module should import little, and not mlx.

    HelperKilled    the job took too long or too much memory, or the process ended: says why
    JobFailed       the job, or making the target, raised: the exception's type name and message

The engine's thread does not wait:

    job = helper.begin("step", rows, seconds=1)            # sends what the socket takes
    values = job.receive()                                 # what the job has yielded since
    job.is_done, job.result, job.cancel()

A job that is a generator yields values one by one, and may return a result; the deadline counts from the last one. Seconds in
which a busy machine gave it no processor are not its fault: it gets them later, until `MAX_TIMES` as
many have passed. The one who began a job calls `receive` until it is done: deadlines and memory are
looked at there. A child whose parent does not look, or was killed, ends itself a second after the last
deadline.
"""

from __future__ import annotations

import pickle
import threading
from typing import Any

from mlxserve.helpers.errors import HelperKilled, KillReason
from mlxserve.helpers.job import Job
from mlxserve.helpers.process import ChildProcess

START_SECONDS = 60.0  # time to import and make the target
# For work that only its own request waits for: a third of the engine's share of a processor.
BEHIND_THE_ENGINE = 5


class Helper:
    """A child process, started when first needed. `call` may be used by several threads."""

    def __init__(
        self,
        target: str,
        *arguments: Any,
        name: str,
        memory: int,
        niceness: int = 0,
        start_seconds: float = START_SECONDS,
    ) -> None:
        """target: "module:name" of a callable that returns the object whose methods are the jobs.

        arguments: for it, plain data
        name: for messages
        memory: bytes that jobs may need beyond what the child has when it is set up
        niceness: how far the child gives way to this process where processors are scarce
        """
        self.name = name
        # Children; a new one has lost what the last one held.
        self.num_started = 0
        self._setup = pickle.dumps((target, arguments, start_seconds, memory, niceness))
        self._memory = memory
        self._start_seconds = start_seconds
        # Held while there is a job.
        self._turn = threading.Lock()
        self._starting = threading.Lock()
        self._num_jobs = 0
        self._is_closed = False
        self._child: ChildProcess | None = None

    def call(self, method: str, *arguments: Any, seconds: float) -> Any:
        """Run a job and wait for its result. Jobs of several threads run one after the other.

        seconds: for this job, from its start. Raises HelperKilled and JobFailed.
        """
        job = self.begin_in_turn(method, *arguments, seconds=seconds)
        while not job.is_done:
            job.receive(seconds)
        return job.result

    def call_twice(self, method: str, *arguments: Any, seconds: float) -> Any:
        """Like `call`, but retried once if the process ended: other programs may end it.

        Raises HelperKilled ENDED if the second one ended as well.
        """
        try:
            return self.call(method, *arguments, seconds=seconds)
        except HelperKilled as error:
            if error.reason is not KillReason.ENDED:
                raise
            return self.call(method, *arguments, seconds=seconds)

    def begin(self, method: str, *arguments: Any, seconds: float) -> Job:
        """Start a job without waiting.

        Raises RuntimeError while another one is under way, and HelperKilled.
        """
        job = self.begin_if_idle(method, *arguments, seconds=seconds)
        if job is None:
            raise RuntimeError(f"the helper for {self.name} has a job already")
        return job

    def begin_if_idle(self, method: str, *arguments: Any, seconds: float) -> Job | None:
        """Like `begin`; None while another job is under way."""
        is_idle = self._turn.acquire(blocking=False)
        return self._begin(method, arguments, seconds) if is_idle else None

    def begin_in_turn(self, method: str, *arguments: Any, seconds: float) -> Job:
        """Like `begin`, but wait for the jobs of other threads."""
        self._turn.acquire()
        return self._begin(method, arguments, seconds)

    def start(self) -> None:
        """Start the child now, unless it runs.

        Raises RuntimeError while there is a job, and HelperKilled.
        """
        if not self._turn.acquire(blocking=False):
            raise RuntimeError(f"the helper for {self.name} has a job already")
        try:
            self._running_child()
        finally:
            self._release()

    @property
    def is_running(self) -> bool:
        """True if there is a child, so that a job begins at once."""
        child = self._child
        return child is not None and not child.was_killed

    @property
    def num_grown(self) -> int:
        """Bytes that the child's memory has grown since it was set up."""
        child = self._child
        return child.num_grown() if child is not None else 0

    @property
    def resident_size(self) -> int:
        """Bytes of the child's memory; 0 if there is none."""
        child = self._child
        return child.resident_size() if child is not None else 0

    def stop(self) -> None:
        """End the child, and kill its job. The next job starts another."""
        child = self._child
        if child is not None:
            child.kill()
            if self._turn.acquire(blocking=False):
                self._release()

    def stop_idle(self) -> None:
        """End the child, unless there is a job. The next job starts another."""
        if self._turn.acquire(blocking=False):
            if self._child is not None:
                self._child.kill()
            self._release()

    def close(self) -> None:
        """End the child for good. Pending jobs must be done or cancelled."""
        with self._starting:
            self._is_closed = True
        child = self._child
        if child is not None:
            child.kill()
            # Its caller notices at once.
            if self._turn.acquire(timeout=1):
                self._release()

    def _begin(self, method: str, arguments: tuple[Any, ...], seconds: float) -> Job:
        self._num_jobs += 1
        number = self._num_jobs
        try:
            frame = pickle.dumps((number, method, arguments, seconds))
            child = self._running_child()
            _send_whole(child, frame)
        except BaseException:
            self._release()
            raise
        return Job(child, number, seconds, self._release, self._why_closed)

    def _running_child(self) -> ChildProcess:
        if self._child is not None and self._child.has_ended():
            self._child.close()
            self._child = None
        with self._starting:
            if self._is_closed:
                raise HelperKilled(KillReason.CLOSED, f"was not begun: {self.name} were closed")
            if self._child is None:
                self._child = ChildProcess(self._memory, self._start_seconds)
                self._child.end_with(self)
                self._child.send(self._setup)
                self.num_started += 1
        return self._child

    def _release(self) -> None:
        """Release the child after the end of the job or the child."""
        child = self._child
        if child is not None and child.was_killed:
            self._child = None
            child.close()
        self._turn.release()

    def _why_closed(self) -> str | None:
        return f"was ended: {self.name} were closed" if self._is_closed else None


def _send_whole(child: ChildProcess, frame: bytes) -> None:
    """Send a whole frame, or kill the child, which may have got a part of it.

    Raises HelperKilled.
    """
    try:
        child.send(frame)
    except BaseException as error:
        child.kill()
        if not isinstance(error, Exception):
            raise
        raise HelperKilled(KillReason.ENDED, f"cannot be sent: {error!r}") from error
