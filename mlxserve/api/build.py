"""The server's wiring: the application over a chat, its connections, its shutdown and its watchdog.

Here and not in mlxserve/build.py, which is below the API: a chat is built without one.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

from mlxserve.api.access.policy import AccessPolicy
from mlxserve.api.app import create_app
from mlxserve.api.config import ServerConfig
from mlxserve.api.server.connection import Limits
from mlxserve.api.server.drain import Drain
from mlxserve.api.server.last_resort import LastResort
from mlxserve.api.server.open_requests import OpenRequests
from mlxserve.api.server.server import HttpServer, serve
from mlxserve.api.server.watchdog import Watchdog

if TYPE_CHECKING:
    from mlxserve.chat.chat import Chat


class ModelServer:
    """One model, served over HTTP."""

    def __init__(
        self,
        chat: Chat,
        config: ServerConfig,
        access: AccessPolicy,
        *,
        unlisted_names: tuple[str, ...],
        limits: Limits,
        on_ready: Callable[[], None],
    ) -> None:
        """
        unlisted_names: names of the model that requests may use beside the listed ones
        on_ready: called once connections are accepted
        """
        drain, open_requests = Drain(), OpenRequests()
        self._chat = chat
        self._http = HttpServer(
            create_app(
                chat,
                aliases=config.alias,
                unlisted_names=unlisted_names,
                strict_model_names=config.strict_model_names,
                access=access,
                drain=drain,
                open_requests=open_requests,
            ),
            on_ready=on_ready,
            stop_engine=chat.close,
            limits=limits,
            drain=drain,
            open_requests=open_requests,
            drain_seconds=config.drain_seconds,
            on_signal=LastResort().end_within,
        )
        self._watchdog = Watchdog(
            chat.engine, end_after=config.watchdog_seconds, shut_down=self._http.stop
        )

    def run(self, listener: socket.socket) -> int:
        """Serve until told to stop, then close the chat. Returns the exit code: not 0 if the engine has
        failed. Raises AddressInUse."""
        self._watchdog.start()
        try:
            serve(self._http, listener)
        finally:
            self._watchdog.stop()
            self._chat.close()
        return self._watchdog.exit_code
