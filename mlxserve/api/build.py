"""The server's wiring: the application over a registry, its connections, its shutdown and its watchdog.

Here and not in mlxserve/build.py, which is below the API: models are built without one.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

from mlxserve.api.access.policy import AccessPolicy
from mlxserve.api.app import create_server_app
from mlxserve.api.config import ServerConfig
from mlxserve.api.downloads import Register
from mlxserve.api.server.connection import Limits
from mlxserve.api.server.drain import Drain
from mlxserve.api.server.hard_exit import HardExit
from mlxserve.api.server.in_flight import InFlight
from mlxserve.api.server.server import HttpServer, serve
from mlxserve.api.server.watchdog import Watchdog

if TYPE_CHECKING:
    from mlxserve.chat.registry.registry import ModelRegistry
    from mlxserve.helpers.fair_executor import FairExecutor


class ModelServer:
    """The models of a registry, served over HTTP."""

    def __init__(
        self,
        registry: ModelRegistry,
        executor: FairExecutor,
        config: ServerConfig,
        access: AccessPolicy,
        *,
        limits: Limits,
        on_ready: Callable[[], None],
        register: Register | None = None,
    ) -> None:
        """Wire the server.

        registry: its first model is loaded
        executor: runs all work on prompts and bodies
        register: makes a registry entry for another model; None if none can be added
        on_ready: called once connections are accepted
        """
        drain, open_requests = Drain(), InFlight()
        self._registry = registry
        self._http = HttpServer(
            create_server_app(
                registry,
                executor,
                strict_model_names=config.strict_model_names,
                access=access,
                drain=drain,
                open_requests=open_requests,
                register=register,
            ),
            on_ready=on_ready,
            stop_engine=registry.close,
            limits=limits,
            drain=drain,
            open_requests=open_requests,
            drain_seconds=config.drain_seconds,
            on_signal=HardExit().end_within,
        )
        self._watchdog = Watchdog(
            registry, end_after=config.watchdog_seconds, shut_down=self._http.stop
        )

    def run(self, listener: socket.socket) -> int:
        """Serve until asked to stop, then close the models, and return the exit code.

        The code is not 0 if the engine has failed. Raises AddressInUse.
        """
        self._watchdog.start()
        try:
            serve(self._http, listener)
        finally:
            self._watchdog.stop()
            self._registry.close()
        return self._watchdog.exit_code
