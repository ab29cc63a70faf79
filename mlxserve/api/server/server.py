"""The server process: a socket, uvicorn over it, signals, and an orderly end.

An orderly end: new work is refused, answers under way may finish for a few seconds, then the engine
is stopped, which ends the rest with an error the client can read.
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
_LAST_RESORT_SECONDS = 5  # after the engine was stopped, before connections are cut
_TICK = 0.1  # seconds after which a second signal is noticed
_KEEP_ALIVE_SECONDS = 60  # longer than clients keep idle connections, so they close first
_BACKLOG = 512  # asyncio takes so many connections at once, 10 kB each, before it looks at any
_OPEN_FILES = 4_096  # macOS starts processes with 256, fewer than the connections we accept


class AddressInUse(MlxServeError):
    """Another program listens at the address."""


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to the address; port 0 takes a free one. Raises AddressInUse, MlxServeError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            raise AddressInUse(
                f"Port {port} on {host} is in use. Stop the program that has it, choose another "
                "with --port, or let --port 0 find a free one."
            ) from error
        raise MlxServeError(f"Cannot listen on {host} port {port}: {error}.") from error
    return listener


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://{host_header_name(host)}:{port}"


class HttpServer(uvicorn.Server):
    """uvicorn's server with our protocol, our signals, and `stop_engine` in its shutdown.

    on_ready: called once it accepts connections
    stop_engine: ends every answer under way; may block
    drain: the app's, which knows what is under way
    drain_seconds: how long answers may still run when the server is stopped
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
            loop="asyncio",  # uvloop takes 10 % off a token (115 for 129 µs): too little to need it
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
        """Connections are still taken while answers finish, so that new work is refused in words."""
        logger.info("Shutting down; answers have %g seconds to finish.", self._drain_seconds)
        self._drain.start()
        await self._end_answers()
        await super().shutdown(sockets)

    def stop(self) -> None:
        """Asks for an orderly end; from any thread."""
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Unlike uvicorn's, does not raise the signal again: being asked to end is no failure."""
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
        """The second signal does not wait for answers under way."""
        self.force_exit = self.should_exit
        self.should_exit = True

    async def _end_answers(self) -> None:
        """Wait for them, then end what is left. A second signal ends the waiting."""
        finished = asyncio.ensure_future(self._drain.finished())
        deadline = time.monotonic() + self._drain_seconds
        while not finished.done() and not self.force_exit:
            if time.monotonic() >= deadline:
                logger.warning("Ending the answers still under way.")
                await asyncio.to_thread(self._stop_engine)
                break
            await asyncio.wait({finished}, timeout=_TICK)
        finished.cancel()
        await asyncio.gather(finished, return_exceptions=True)


def serve(server: HttpServer, listener: socket.socket) -> None:
    """Runs until it is asked to stop. Raises AddressInUse when another began to listen first."""
    _allow_open_files()
    try:
        listener.listen(server.config.backlog)
    except OSError as error:
        raise AddressInUse(f"{url_of(listener)} was taken meanwhile: {error}.") from error
    server.run(sockets=[listener])


def stop_at_end_of_input() -> None:
    """Ends this process in order when its stdin ends, as it does when its parent dies."""

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
