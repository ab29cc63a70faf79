"""The server process: a socket, uvicorn on it, signals, and an orderly shutdown.

In a shutdown, new requests are refused and running answers have a few seconds to finish. Then the
others end with an error that clients can read, and the engine is stopped. A second signal ends the
answers at once. SIGINT, SIGTERM and SIGHUP (the terminal was closed) mean the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
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
from mlxserve.api.server.in_flight import InFlight
from mlxserve.core.errors import MlxServeError
from mlxserve.system import addresses

logger = logging.getLogger(__name__)

_STDIN = 0
_GOODBYE_SECONDS = 1.0  # for the errors of answers that end early to be sent
_ENGINE_SECONDS = 2.0  # for the engine to end its step
_CLOSING_SECONDS = 3  # for what is still connected
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_TICK = 0.1  # seconds between looks for a second signal
_KEEP_ALIVE_SECONDS = 60  # longer than clients keep idle connections, so that they close first


class AddressInUse(MlxServeError):
    """Another program listens on the address."""


def bind(host: str, port: int) -> socket.socket:
    """Bind a socket to the address; port 0 takes a free one. Raises AddressInUse, MlxServeError."""
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


def reachable_url(listener: socket.socket) -> str:
    """Return the address for clients: if it listens on all, the one that other machines use."""
    host, port = listener.getsockname()[:2]
    address = addresses.parse(host)
    if address is None or not addresses.is_unspecified(address):
        return url_of(listener)
    return f"http://{addresses.own_address() or '127.0.0.1'}:{port}"


class HttpServer(uvicorn.Server):
    """uvicorn's server with our protocol and signal handlers, which stops the engine on shutdown.

    on_ready: called once it accepts connections
    stop_engine: stops the engine; may block
    drain, open_requests: shared with the app; count running requests and end them
    drain_seconds: time for running answers after the server is asked to stop
    on_signal: called with the maximum seconds until the process should have ended
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        on_ready: Callable[[], None],
        stop_engine: Callable[[], None],
        limits: Limits | None = None,
        drain: Drain,
        open_requests: InFlight,
        drain_seconds: float,
        on_signal: Callable[[float], None] = lambda _: None,
    ) -> None:
        limits = limits or Limits()
        config = uvicorn.Config(
            app,
            http=Connection.limited(limits),
            ws="none",
            # uvloop saves 10 % per token (115 instead of 129 µs): not worth a dependency.
            loop="asyncio",
            lifespan="auto",
            log_config=None,
            proxy_headers=False,
            server_header=False,
            backlog=limits.backlog,
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=_CLOSING_SECONDS,
        )
        super().__init__(config)
        self._on_ready = on_ready
        self._stop_engine = stop_engine
        self._drain = drain
        self._open_requests = open_requests
        self._on_signal = on_signal
        self._drain_seconds = drain_seconds

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections while answers finish, so that new requests get a readable error."""
        logger.info("Shutting down; answers have %g seconds to finish.", self._drain_seconds)
        self._drain.start()
        await self._end_answers()
        await super().shutdown(sockets)
        if self.force_exit:
            # uvicorn leaves this out after a second signal.
            await self.lifespan.shutdown()

    def stop(self) -> None:
        """Request an orderly shutdown. Thread-safe."""
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install our handlers. Unlike uvicorn, do not raise the signal again afterwards.

        A requested shutdown is not a failure.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        handlers = {
            number: signal.signal(number, self.handle_exit)
            for number in _SIGNALS
            # Ignored signals stay ignored, such as SIGHUP after `nohup`.
            if signal.getsignal(number) != signal.SIG_IGN
        }
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def handle_exit(self, _sig: int, _frame: FrameType | None) -> None:
        """Request a shutdown. A second signal ends it without waiting for running answers."""
        self.force_exit = self.should_exit
        self.should_exit = True
        closing = _GOODBYE_SECONDS + _ENGINE_SECONDS + _CLOSING_SECONDS + 1
        self._on_signal(closing + (0 if self.force_exit else self._drain_seconds))

    async def _end_answers(self) -> None:
        """Wait for running answers, then end the rest. A second signal ends the wait."""
        finished = asyncio.ensure_future(self._drain.finished())
        deadline = time.monotonic() + self._drain_seconds
        while not finished.done() and not self.force_exit and time.monotonic() < deadline:
            await asyncio.wait({finished}, timeout=_TICK)
        if not finished.done():
            logger.warning("Ending the answers that are still running.")
            self._open_requests.end(self._drain.refusal())
            await asyncio.wait({finished}, timeout=_GOODBYE_SECONDS)
        if not finished.done():
            # Some requests wait for the engine itself, such as a resize.
            await self._stop_engine_for(_ENGINE_SECONDS)
        finished.cancel()
        await asyncio.gather(finished, return_exceptions=True)

    async def _stop_engine_for(self, seconds: float) -> None:
        """Stop the engine, waiting at most `seconds`."""
        stopped = asyncio.Event()
        loop = asyncio.get_running_loop()

        def stop() -> None:
            self._stop_engine()
            # The loop may have ended before.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(stopped.set)

        # Not in the loop's executor, whose threads are waited for.
        threading.Thread(target=stop, name="mlxserve-stop", daemon=True).start()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stopped.wait(), seconds)


def serve(server: HttpServer, listener: socket.socket) -> None:
    """Run until asked to stop. Raises AddressInUse if another program began to listen first."""
    try:
        listener.listen(server.config.backlog)
    except OSError as error:
        raise AddressInUse(
            f"Another program has begun to listen on {url_of(listener)}: {error}."
        ) from error
    server.run(sockets=[listener])


def stop_at_end_of_input(stop: bytes) -> None:
    """Shut the process down when stdin ends, because its parent died, or holds `stop`."""

    def watch() -> None:
        # stdin may have been closed from the start.
        with contextlib.suppress(OSError):
            while (data := os.read(_STDIN, 4096)) and stop.strip() not in data:
                pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="mlxserve-parent", daemon=True).start()
