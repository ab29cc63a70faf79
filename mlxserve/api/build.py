"""The server's wiring: the application over a shelf, its connections, its shutdown and its watchdog.

Here and not in mlxserve/build.py, which is below the API: models are built without one.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

from mlxserve.api.access.policy import AccessPolicy
from mlxserve.api.app import create_app_of_shelf
from mlxserve.api.config import ServerConfig
from mlxserve.api.downloads import Shelve
from mlxserve.api.server.connection import Limits
from mlxserve.api.server.drain import Drain
from mlxserve.api.server.last_resort import LastResort
from mlxserve.api.server.open_requests import OpenRequests
from mlxserve.api.server.server import HttpServer, serve
from mlxserve.api.server.watchdog import Watchdog

if TYPE_CHECKING:
    from mlxserve.chat.registry.shelf import ModelShelf
    from mlxserve.helpers.fair_executor import Door


class ModelServer:
    """The models of a shelf, served over HTTP."""

    def __init__(
        self,
        shelf: ModelShelf,
        door: Door,
        config: ServerConfig,
        access: AccessPolicy,
        *,
        limits: Limits,
        on_ready: Callable[[], None],
        shelve: Shelve | None = None,
    ) -> None:
        """
        shelf: whose first model is loaded
        door: of all work on prompts and bodies
        shelve: makes what the shelf needs of another model; None where none can be added
        on_ready: called once connections are accepted
        """
        drain, open_requests = Drain(), OpenRequests()
        self._shelf = shelf
        self._http = HttpServer(
            create_app_of_shelf(
                shelf,
                door,
                strict_model_names=config.strict_model_names,
                access=access,
                drain=drain,
                open_requests=open_requests,
                shelve=shelve,
            ),
            on_ready=on_ready,
            stop_engine=shelf.close,
            limits=limits,
            drain=drain,
            open_requests=open_requests,
            drain_seconds=config.drain_seconds,
            on_signal=LastResort().end_within,
        )
        self._watchdog = Watchdog(
            shelf, end_after=config.watchdog_seconds, shut_down=self._http.stop
        )

    def run(self, listener: socket.socket) -> int:
        """Serve until told to stop, then close the models. Returns the exit code: not 0 if the engine has
        failed. Raises AddressInUse."""
        self._watchdog.start()
        try:
            serve(self._http, listener)
        finally:
            self._watchdog.stop()
            self._shelf.close()
        return self._watchdog.exit_code
