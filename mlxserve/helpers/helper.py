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

A job that is a generator yields values one by one; the deadline counts from the last one. The one
who began a job calls `receive` until it is done: deadlines and memory are looked at there. A child
whose parent does not look, or was killed, ends itself a second after the deadline.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from enum import StrEnum
from typing import Any

import msgpack
import psutil

from mlxserve.helpers.frames import LENGTH, MAX_FRAME, NO_MEMORY, Kind

START_SECONDS = 60.0  # to import and make the target
_LOOK_SECONDS = 0.05  # between two looks at the child's memory
_END_SECONDS = 0.05  # to wait for the end of a killed process
_EXIT_SECONDS = 5.0  # the same for one that has closed its socket already
_PIECE, _MOST_PIECES = 64 << 10, 1024  # bytes read at once, and how often before a look


class KillReason(StrEnum):
    """Why a child ended before its job did."""

    TIME = "time"
    MEMORY = "memory"
    ENDED = "ended"  # by itself, or by a signal of others
    CLOSED = "closed"  # the helper was closed
    NOT_STARTED = "not_started"  # the system refused a process or a socket


class HelperKilled(Exception):
    """The child has ended before its job did. The message completes "The job ..."."""

    def __init__(self, reason: KillReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class JobFailed(Exception):
    """The job raised an exception in the child."""

    def __init__(self, type_name: str, message: str) -> None:
        super().__init__(f"{type_name}: {message}")
        self.type_name = type_name
        self.message = message


class Helper:
    """A child process, started when first needed. `call` may be used by several threads."""

    def __init__(
        self,
        target: str,
        *arguments: Any,
        name: str,
        memory: int,
        start_seconds: float = START_SECONDS,
    ) -> None:
        """target: "module:name" of what makes the object whose methods are the jobs
        arguments: for it, plain data
        name: for messages
        memory: bytes that jobs may need beyond what the child has when it is set up
        """
        self.name = name
        self.num_started = 0  # children; a new one has lost what the last one held
        self._setup = pickle.dumps((target, arguments, start_seconds, memory))
        self._memory = memory
        self._start_seconds = start_seconds
        self._turn = threading.Lock()  # held while there is a job
        self._starting = threading.Lock()
        self._num_jobs = 0
        self._is_closed = False
        self._child: _Child | None = None

    def call(self, method: str, *arguments: Any, seconds: float) -> Any:
        """Run a job and wait for its result. Jobs of several threads run one after the other.

        seconds: for this job, from its start. Raises HelperKilled and JobFailed.
        """
        self._turn.acquire()
        job = self._begin(method, arguments, seconds)
        while not job.is_done:
            job.receive(seconds)
        return job.result

    def begin(self, method: str, *arguments: Any, seconds: float) -> Job:
        """Start a job without waiting. Raises RuntimeError while another one is under way, and
        HelperKilled."""
        if not self._turn.acquire(blocking=False):
            raise RuntimeError(f"the helper for {self.name} has a job already")
        return self._begin(method, arguments, seconds)

    def start(self) -> None:
        """Start the child now, unless there is one. Raises RuntimeError while there is a job, and
        HelperKilled."""
        if not self._turn.acquire(blocking=False):
            raise RuntimeError(f"the helper for {self.name} has a job already")
        try:
            self._running_child()
        finally:
            self._release()

    @property
    def num_grown(self) -> int:
        """Bytes that the child has in memory beyond those it had when it was set up."""
        child = self._child
        return child.num_grown() if child is not None else 0

    @property
    def resident_size(self) -> int:
        """Bytes that the child has in memory; 0 where there is none."""
        child = self._child
        return child.resident_size() if child is not None else 0

    def stop(self) -> None:
        """End the child, and kill its job. The next job starts another."""
        child = self._child
        if child is not None:
            child.kill()
            if self._turn.acquire(blocking=False):
                self._release()

    def close(self) -> None:
        """End the child for good. A job that was begun must be done, or cancelled."""
        with self._starting:
            self._is_closed = True
        child = self._child
        if child is not None:
            child.kill()
            if self._turn.acquire(timeout=1):  # its caller notices at once
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

    def _running_child(self) -> _Child:
        if self._child is not None and self._child.has_ended():
            self._child.close()
            self._child = None
        with self._starting:
            if self._is_closed:
                raise HelperKilled(KillReason.CLOSED, f"was not begun: {self.name} were closed")
            if self._child is None:
                self._child = _Child(self._memory, self._start_seconds)
                self._child.end_with(self)
                self._child.send(self._setup)
                self.num_started += 1
        return self._child

    def _release(self) -> None:
        """The job has ended, or the child has."""
        child = self._child
        if child is not None and child.was_killed:
            self._child = None
            child.close()
        self._turn.release()

    def _why_closed(self) -> str | None:
        return f"was ended: {self.name} were closed" if self._is_closed else None


class Job:
    """A call that a child runs. For one thread at a time."""

    def __init__(
        self,
        child: _Child,
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
        # It may have been started long ago; nothing has looked at it since then.
        self._deadline = time.monotonic() + (seconds if child.is_set_up else child.start_seconds)

    def receive(self, timeout: float = 0.0) -> list[Any]:
        """The values that the job has yielded since the last call.

        Waits up to `timeout` seconds for a value or the end. Raises HelperKilled, JobFailed; the
        job is done then.
        """
        assert not self.is_done, "the job has ended"
        until = time.monotonic() + timeout
        try:
            while True:
                self._child.exchange(min(until, self._deadline) - time.monotonic())
                values = list(self._taken())
                if values or self.is_done:
                    return values
                self._look()
                if time.monotonic() >= until:
                    return []
        except (HelperKilled, JobFailed):
            self._end()
            raise
        except BaseException as error:  # as of a system without memory
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
            self._deadline = time.monotonic() + self._seconds

    def _raise(self, value: Any) -> None:
        if not (isinstance(value, list) and [type(one) for one in value] == [str, str]):
            self._kill(KillReason.ENDED, "answered what is not understood")
        if not self._child.is_set_up:
            self._child.kill()  # it could not be set up
        raise JobFailed(*value)

    def _look(self) -> None:
        """Kill the child if it took too long or too much, and see whether it has ended."""
        child = self._child
        if child.is_at_end:
            code = child.kill(_EXIT_SECONDS)
            if (closed := self._why_closed()) is not None:
                raise HelperKilled(KillReason.CLOSED, closed)
            if code == -signal.SIGALRM:
                self._kill(KillReason.TIME, f"took longer than {self._limit():g} s")
            if code in (NO_MEMORY, -signal.SIGABRT):  # Rust's allocator aborts
                self._kill(KillReason.MEMORY, child.needed_too_much)
            self._kill(KillReason.ENDED, f"ended its process ({_words(code)})")
        if time.monotonic() >= self._deadline:
            self._kill(KillReason.TIME, f"took longer than {self._limit():g} s")
        if child.is_too_large():
            self._kill(KillReason.MEMORY, child.needed_too_much)

    def _limit(self) -> float:
        return self._seconds if self._child.is_set_up else self._child.start_seconds

    def _kill(self, reason: KillReason, message: str) -> None:
        self._child.kill()
        raise HelperKilled(reason, message)

    def _end(self) -> None:
        if not self.is_done:
            self.is_done = True
            self._release()


class _Child:
    """The process and its socket. The socket is used by one thread at a time."""

    def __init__(self, memory: int, start_seconds: float) -> None:
        """Raises HelperKilled where the system refuses a process or a socket."""
        self.start_seconds = start_seconds
        self.is_set_up = False
        self.is_at_end = False  # the child's side of the socket is closed
        self.was_killed = False
        self.needed_too_much = f"needed more than {memory >> 20} MB of memory"
        self._memory = memory
        self._allowed: int | None = None  # bytes, once it is set up
        self._looked_at = 0.0
        self._out: deque[memoryview] = deque()
        self._in = bytearray()
        self._piece = memoryview(bytearray(_PIECE))
        self._socket, self._process = _started()
        self._reaper: threading.Thread | None = None
        self._finalizer: weakref.finalize[[], Helper] | None = None
        self._poll = select.poll()
        self._state = psutil.Process(self._process.pid)

    def end_with(self, owner: Helper) -> None:
        """End the process when its owner is forgotten without having been closed."""
        self._finalizer = weakref.finalize(owner, self.close)

    def send(self, content: bytes) -> None:
        """Send what the socket takes now; `exchange` sends the rest."""
        assert len(content) < MAX_FRAME
        self._out.append(memoryview(LENGTH.pack(len(content)) + content))
        self._write()

    def exchange(self, seconds: float) -> None:
        """Send and receive; wait for the first for at most the seconds, or until the next look."""
        has_new = self._read()
        self._write()
        if has_new or self.is_at_end or seconds <= 0:
            return
        self._poll.register(self._socket, select.POLLIN | (select.POLLOUT if self._out else 0))
        self._poll.poll(1000 * min(seconds, _LOOK_SECONDS))
        self._write()
        self._read()

    def messages(self) -> Iterator[tuple[Any, Any, Any]]:
        """(job, kind, value) of what has arrived; the first is None for what is not a message."""
        while len(self._in) >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._in)
            end = LENGTH.size + length
            if length > MAX_FRAME:
                yield None, None, None
            if len(self._in) < end:
                return
            with memoryview(self._in) as received:
                message = _unpacked(received[LENGTH.size : end])
            del self._in[:end]
            yield message

    def set_up(self) -> None:
        self.is_set_up = True
        self._allowed = self.resident_size() + self._memory

    def resident_size(self) -> int:
        try:
            return int(self._state.memory_info().rss)
        except psutil.Error:  # it has ended
            return 0

    def num_grown(self) -> int:
        if self._allowed is None:
            return 0
        return self.resident_size() - self._allowed + self._memory

    def is_too_large(self) -> bool:
        now = time.monotonic()
        if self._allowed is None or now - self._looked_at < _LOOK_SECONDS:
            return False
        self._looked_at = now
        return self.resident_size() > self._allowed

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def kill(self, seconds: float = _END_SECONDS) -> int | None:
        """End the process; its exit code, or None if it still ends. From any thread."""
        self.was_killed = True
        self._process.kill()
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:  # the kernel frees much memory
            self._reap_later()
            return None

    def _reap_later(self) -> None:
        if self._reaper is None:
            self._reaper = threading.Thread(
                target=self._process.wait, name="mlxserve-reaper", daemon=True
            )
            self._reaper.start()

    def close(self) -> None:
        self.kill()
        self._socket.close()
        if self._finalizer is not None:
            self._finalizer.detach()

    def _write(self) -> None:
        try:
            while self._out:
                count = self._socket.send(self._out[0])
                if count == len(self._out[0]):
                    self._out.popleft()
                else:
                    self._out[0] = self._out[0][count:]
        except BlockingIOError:
            return
        except OSError:  # the child has ended, which reading shows as well
            self._out.clear()

    def _read(self) -> bool:
        """Whether anything came."""
        size = len(self._in)
        try:
            for _ in range(_MOST_PIECES):
                count = self._socket.recv_into(self._piece)
                self._in += self._piece[:count]
                self.is_at_end = count == 0
                if count < len(self._piece):
                    break
        except BlockingIOError:
            pass
        except OSError:
            self.is_at_end = True
        return len(self._in) > size


def _started() -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Our side of the socket, and the process, in a session of its own: a Ctrl-C in the terminal
    reaches the parent alone. Raises HelperKilled where the system refuses either."""
    environment = {
        "MALLOC_ARENA_MAX": "2",  # an arena per thread would count as address space
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
    }
    command = [sys.executable, "-P", "-m", "mlxserve.helpers.child"]
    try:
        ours, other = socket.socketpair()
    except OSError as error:
        raise HelperKilled(KillReason.NOT_STARTED, f"was not begun: {error}") from error
    ours.setblocking(False)
    try:
        process = subprocess.Popen(
            command,
            stdin=other.fileno(),
            stdout=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )
    except OSError as error:
        ours.close()
        raise HelperKilled(KillReason.NOT_STARTED, f"was not begun: {error}") from error
    finally:
        other.close()
    return ours, process


def _send_whole(child: _Child, frame: bytes) -> None:
    """Raises HelperKilled, and kills the child, which may have got a part of it."""
    try:
        child.send(frame)
    except BaseException as error:
        child.kill()
        if not isinstance(error, Exception):
            raise
        raise HelperKilled(KillReason.ENDED, f"cannot be sent: {error!r}") from error


def _unpacked(content: memoryview) -> tuple[Any, Any, Any]:
    try:
        number, kind, value = msgpack.unpackb(
            content, strict_map_key=False, unicode_errors="surrogatepass"
        )
    except (ValueError, TypeError, msgpack.UnpackException):
        return None, None, None
    return number, kind, value


def _words(code: int | None) -> str:
    if code is None:
        return "why is not known yet"
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name
