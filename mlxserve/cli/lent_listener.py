"""A server's address that outlives the processes that serve on it.

ListenerLender    of the process that starts them: owns the listener, and answers with an error while nobody serves
LentListener      of a process that serves, the borrower: says when it is ready and when it has ended

borrower ── connects by a Unix socket ──▶ lender      the listener
         ── ready ──▶  ◀── go ──                       the lender answers nothing any more
         ── ended ──▶  ◀── go ──                       in order, and not by a failure
"""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from mlxserve.api.errors import ApiError
from mlxserve.api.server.refusing import Refusing
from mlxserve.core.errors import MlxServeError
from mlxserve.ranks.environment import LENDER

_READY, _GO, _ENDED = b"ready\n", b"go\n", b"ended\n"
_MAX_LINE = 64


class ListenerLender:
    """Owns a listener, and a Unix socket by which it is lent. A context manager."""

    def __init__(
        self, listener: socket.socket, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._listener = listener
        self._clock = clock
        self._folder = tempfile.TemporaryDirectory(prefix="mlxserve-")  # of this user alone
        self.path = Path(self._folder.name, "lender")
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._server.bind(str(self.path))
        self._server.listen()
        self._lock = threading.Lock()
        self._refusing: Refusing | None = None
        self._ready_at: float | None = None
        # A borrower has been ready, has ended in order.
        self.was_ready = self.has_ended = False

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, name="mlxserve-lender", daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._admit()
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._server.close()
        self._folder.cleanup()

    def pop_ready_seconds(self) -> float:
        """Return for how long the last borrower has been ready, once it has gone; 0 if it never was."""
        began, self._ready_at = self._ready_at, None
        return 0.0 if began is None else self._clock() - began

    def refuse(self, error: ApiError) -> None:
        """Answer every request with an error, until the next borrower is ready."""
        self._admit()
        with self._lock:
            self._refusing = Refusing(self._listener, error)
            self._refusing.start()

    def _admit(self) -> None:
        with self._lock:
            refusing, self._refusing = self._refusing, None
            if refusing is not None:
                refusing.stop()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:  # closed
                return
            with connection, contextlib.suppress(OSError):
                socket.send_fds(connection, [_GO], [self._listener.fileno()])
                self._listen(connection)

    def _listen(self, connection: socket.socket) -> None:
        """Take what a borrower says until it ends."""
        with connection.makefile("rb") as lines:
            while line := lines.readline(_MAX_LINE):
                if line == _READY:
                    self._admit()
                    self._ready_at, self.was_ready = self._clock(), True
                    connection.sendall(_GO)
                elif line == _ENDED:
                    self.has_ended = True
                    connection.sendall(_GO)


class LentListener:
    """The listener that this process was lent, to serve on it."""

    def __init__(self, connection: socket.socket) -> None:
        """Raises OSError."""
        self._connection = connection
        _, numbers, _, _ = socket.recv_fds(connection, len(_GO), 1)
        if not numbers:
            raise OSError("the process that owns the server's address has ended")
        self.listener = socket.socket(fileno=numbers[0])

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> LentListener | None:
        """Return the listener of the lender that the environment names; None without one on this machine.

        Raises MlxServeError.
        """
        path = environment.get(LENDER)
        if not path or not Path(path).exists():
            return None
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(path)
            return cls(connection)
        except OSError as error:
            connection.close()
            raise MlxServeError(f"Whoever started the ranks has ended: {error}.") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Leave. A borrower that has not ended has failed, as the lender sees it."""
        self._connection.close()

    def be_ready(self) -> None:
        """Say that connections are accepted from now on; returns once nobody else does."""
        self._connection.sendall(_READY)
        self._connection.recv(len(_GO))

    def end(self) -> None:
        """Say that the server has ended in order; returns once that is known."""
        with contextlib.suppress(OSError):  # whoever started it has ended first
            self._connection.sendall(_ENDED)
            self._connection.recv(len(_GO))
