"""Refusing: answers every request on a listener with one error, while there is no server behind it."""

from __future__ import annotations

import socket
import threading

import uvicorn

from mlxserve.api.errors import ApiError, error_response
from mlxserve.api.server.connection import Connection, Limits

_CLOSING_SECONDS = 1  # for replies that are being sent


class Refusing:
    """A server of one error, on a thread of its own between `start` and `stop`."""

    def __init__(self, listener: socket.socket, error: ApiError) -> None:
        """`listener`: stays open; another server may accept on it afterwards."""
        self._listener = listener
        limits = Limits()
        config = uvicorn.Config(
            error_response(error),
            interface="asgi3",
            http=Connection.limited(limits),
            ws="none",
            loop="asyncio",
            lifespan="off",
            log_config=None,
            proxy_headers=False,
            server_header=False,
            backlog=limits.backlog,
            timeout_graceful_shutdown=_CLOSING_SECONDS,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, name="mlxserve-refusing", daemon=True)

    def start(self) -> None:
        self._listener.listen(self._server.config.backlog)
        self._thread.start()

    def stop(self) -> None:
        """End. What is accepted later is not answered here."""
        self._server.should_exit = True
        self._thread.join()

    def _run(self) -> None:
        # It closes its socket.
        self._server.run(sockets=[self._listener.dup()])
