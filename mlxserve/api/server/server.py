"""The server process: a socket, uvicorn on it, signals, and an orderly shutdown.

In a shutdown, new requests are refused and running answers have a few seconds to finish. Then the
engine is stopped, which ends the others with an error that clients can read.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from mlxserve.api.access.security import host_header_name
from mlxserve.api.server.connection import Connection, Limits
from mlxserve.api.server.drain import Drain
from mlxserve.errors import MlxServeError

logger = logging.getLogger(__name__)

_STDIN = 0
_LAST_RESORT_SECONDS = 5  # between stopping the engine and closing connections
_TICK = 0.1  # seconds between looks for a second signal
_KEEP_ALIVE_SECONDS = 60  # longer than clients keep idle connections, so that they close first
_BACKLOG = 512  # asyncio accepts this many connections at once, 10 kB each, before it reads any
_OPEN_FILES = 4_096  # macOS starts processes with 256, fewer than the connections we accept


class AddressInUse(MlxServeError):
    """Another program listens on the address."""


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to the address; port 0 takes a free port. Raises AddressInUse, MlxServeError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            raise AddressInUse(
                f"Port {port} on {host} is in use. Stop the program that uses it, choose another "
                "port with --port, or use --port 0 for a free one."
            ) from error
        raise MlxServeError(f"Cannot listen on {host} port {port}: {error}.") from error
    return listener


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://{host_header_name(host)}:{port}"


class HttpServer(uvicorn.Server):
    """uvicorn's server with our protocol, our signal handlers, and `stop_engine` in its shutdown.

    on_ready: called once it accepts connections
    stop_engine: ends every running answer; may block
    drain: shared with the app; counts running requests
    drain_seconds: how long answers may still run after the server is asked to stop
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        on_ready: Callable[[], None],
        stop_engine: Callable[[], None],
        limits: Limits | None = None,
        drain: Drain,
        drain_seconds: float,
    ) -> None:
        config = uvicorn.Config(
            app,
            http=Connection.limited(limits or Limits()),
            ws="none",
            loop="asyncio",  # uvloop saves 10 % per token (115 instead of 129 µs): not worth it
            lifespan="off",
            log_config=None,
            proxy_headers=False,
            server_header=False,
            backlog=_BACKLOG,
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=_LAST_RESORT_SECONDS,
        )
        super().__init__(config)
        self._on_ready = on_ready
        self._stop_engine = stop_engine
        self._drain = drain
        self._drain_seconds = drain_seconds

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accepts connections while answers finish, so that new requests get an error they can read."""
        logger.info("Shutting down; answers have %g seconds to finish.", self._drain_seconds)
        self._drain.start()
        await self._end_answers()
        await super().shutdown(sockets)

    def stop(self) -> None:
        """Ask for an orderly shutdown; from any thread."""
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Unlike uvicorn's, does not raise the signal again: a requested shutdown is not a failure."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        handlers = {
            number: signal.signal(number, self.handle_exit)
            for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def handle_exit(self, _sig: int, _frame: FrameType | None) -> None:
        """A second signal ends without waiting for running answers."""
        self.force_exit = self.should_exit
        self.should_exit = True

    async def _end_answers(self) -> None:
        """Wait for running answers, then end the rest. A second signal ends the wait."""
        finished = asyncio.ensure_future(self._drain.finished())
        deadline = time.monotonic() + self._drain_seconds
        while not finished.done() and not self.force_exit:
            if time.monotonic() >= deadline:
                logger.warning("Ending the answers that are still running.")
                await asyncio.to_thread(self._stop_engine)
                break
            await asyncio.wait({finished}, timeout=_TICK)
        finished.cancel()
        await asyncio.gather(finished, return_exceptions=True)


def serve(server: HttpServer, listener: socket.socket) -> None:
    """Run until asked to stop. Raises AddressInUse if another program began to listen first."""
    _allow_open_files()
    try:
        listener.listen(server.config.backlog)
    except OSError as error:
        raise AddressInUse(
            f"Another program has begun to listen on {url_of(listener)}: {error}."
        ) from error
    server.run(sockets=[listener])


def stop_at_end_of_input() -> None:
    """Shut this process down when its stdin ends, which happens when its parent dies."""

    def watch() -> None:
        with contextlib.suppress(OSError):  # closed from the start
            while os.read(_STDIN, 4096):
                pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="mlxserve-parent", daemon=True).start()


def _allow_open_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(_OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
