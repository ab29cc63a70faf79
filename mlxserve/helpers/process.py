"""ChildProcess: the parent's side of a helper's process, and the socket to it."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

import msgpack
import psutil

from mlxserve.helpers.environment import helper_environment
from mlxserve.helpers.errors import HelperKilled, KillReason
from mlxserve.helpers.frames import LENGTH, MAX_FRAME

_LOOK_SECONDS = 0.05  # between two checks of the child
_STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
_END_SECONDS = 0.05  # time to wait for a killed process
_PIECE, _MAX_PIECES = 64 << 10, 1024  # bytes read at once, and how often before a look


class ChildProcess:
    """The process and its socket. Not thread-safe, except `kill` and the sizes."""

    def __init__(self, memory: int, start_seconds: float) -> None:
        """Start the process. Raises HelperKilled if the system refuses it or a socket."""
        self.start_seconds = start_seconds
        self.is_set_up = False
        # The child's side of the socket is closed.
        self.is_at_end = False
        self.was_killed = False
        self.is_too_large = False
        self.was_stopped = False  # stopped by a signal or a debugger, since the job began
        self.needed_too_much = f"needed more than {memory >> 20} MB of memory"
        self._memory = memory
        self._looked_at = 0.0
        self._allowed: int | None = None  # bytes, once it is set up
        self._out: deque[memoryview] = deque()
        self._in = bytearray()
        self._piece = memoryview(bytearray(_PIECE))
        self._socket, self._process = _started()
        self._reaper: threading.Thread | None = None
        self._finalizer: weakref.finalize[[], object] | None = None
        self._poll = select.poll()
        self._state = psutil.Process(self._process.pid)

    def end_with(self, owner: object) -> None:
        """Kill the process when its owner is collected without having been closed."""
        self._finalizer = weakref.finalize(owner, self.close)

    def send(self, content: bytes) -> None:
        """Send as much as the socket takes; `exchange` sends the rest."""
        assert len(content) < MAX_FRAME
        self._out.append(memoryview(LENGTH.pack(len(content)) + content))
        self._write()

    def exchange(self, seconds: float) -> None:
        """Send and receive, waiting for input up to `seconds` or the next check."""
        has_new = self._read()
        self._write()
        if has_new or self.is_at_end or seconds <= 0:
            return
        self._poll.register(self._socket, select.POLLIN | (select.POLLOUT if self._out else 0))
        self._poll.poll(1000 * min(seconds, _LOOK_SECONDS))
        self._write()
        self._read()

    def messages(self) -> Iterator[tuple[Any, Any, Any]]:
        """Yield (job, kind, value) of received messages; the first is None for anything else."""
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

    def cpu_seconds(self) -> float:
        """Processor time of all its threads, in ticks of 10 ms on Linux."""
        try:
            times = self._state.cpu_times()
        except psutil.Error:  # it has ended
            return 0.0
        return float(times.user + times.system)

    def num_grown(self) -> int:
        if self._allowed is None:
            return 0
        return self.resident_size() - self._allowed + self._memory

    def look(self, *, again: bool = False) -> None:
        """Check for a stopped or too large process.

        again: even if the last check was a moment ago; each takes 30 us
        """
        now = time.monotonic()
        if now - self._looked_at < _LOOK_SECONDS and not again:
            return
        self._looked_at = now
        self.is_too_large = self._allowed is not None and self.resident_size() > self._allowed
        with contextlib.suppress(psutil.Error):  # it has ended
            self.was_stopped |= self._state.status() in _STOPPED

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def kill(self, seconds: float = _END_SECONDS) -> int | None:
        """Kill the process; return its exit code, or None if it still ends. Thread-safe."""
        self.was_killed = True
        if self._process.poll() is None:
            try:
                os.killpg(self._process.pid, signal.SIGKILL)  # including its forks
            except OSError:
                # macOS refuses it for a group with a process that has just ended.
                self._process.kill()
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            # The kernel frees much memory.
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
        except OSError:
            # The child has ended, which reading shows as well, or ends because the rest is missing.
            self._out.clear()
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_WR)

    def _read(self) -> bool:
        """Read from the socket; True if anything came."""
        size = len(self._in)
        try:
            for _ in range(_MAX_PIECES):
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
    """Start the process, and return our side of the socket with it.

    It has a session of its own: a Ctrl-C in the terminal reaches the parent alone. Raises
    HelperKilled if the system refuses either.
    """
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
            env=helper_environment(),
            start_new_session=True,
        )
    except OSError as error:
        ours.close()
        raise HelperKilled(KillReason.NOT_STARTED, f"was not begun: {error}") from error
    finally:
        other.close()
    return ours, process


def _unpacked(content: memoryview) -> tuple[Any, Any, Any]:
    try:
        number, kind, value = msgpack.unpackb(
            content, strict_map_key=False, unicode_errors="surrogatepass"
        )
    except (ValueError, TypeError, msgpack.UnpackException):
        return None, None, None
    return number, kind, value
