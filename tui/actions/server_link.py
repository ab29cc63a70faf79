"""Connects to the server in the background, and reconnects. Owns the connection.

Shows on the screen what it waits for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine

from tui.talk.connection import Connector, ConnectProgress, ServerConnection
from tui.talk.errors import ChatError
from tui.widgets.window import ChatWindow


class ServerLink:
    """At most one connection at a time."""

    def __init__(
        self,
        connector: Connector,
        window: ChatWindow,
        run: Callable[[Coroutine[None, None, None]], object],
        after: Callable[[], None],
    ) -> None:
        self._connector = connector
        self._window = window
        self._run = run  # starts a coroutine in the background
        self._after = after  # called after connecting, successful or not
        self._is_connecting = False
        self._has_failed = False
        self.connection: ServerConnection | None = None

    @property
    def model(self) -> str:
        """The model that is asked; empty while not connected."""
        return "" if self.connection is None else self.connection.model

    @property
    def is_lost(self) -> bool:
        """Whether there is no server: not connected, or the server started here has exited."""
        return self.connection is None or self._has_exited

    @property
    def _has_exited(self) -> bool:
        server = self._connector.server
        return server is not None and not server.is_running

    def connect(self) -> None:
        """Connect in the background. Does nothing while already connecting."""
        if not self._is_connecting:
            self._is_connecting = True
            self._run(self._connect())

    @property
    def can_change_model(self) -> bool:
        return self._connector.can_change_model

    async def restart(self, model: str) -> None:
        """Restart the server that was started here with another model."""
        self._window.status.say("Stopping the server")
        await self.close()
        await asyncio.to_thread(self._connector.stop_server)
        self._connector.use_model(model)
        self.connect()

    async def close(self) -> None:
        connection, self.connection = self.connection, None
        if connection is not None:
            await connection.client.close()

    def why_server_stopped(self) -> str:
        """Why the server started here has exited; empty if it has not."""
        server = self._connector.server
        return str(server.why_it_stopped()) if server is not None and self._has_exited else ""

    async def _connect(self) -> None:
        window = self._window
        await self.close()
        if self._has_failed:  # the notice of that failure is outdated
            await window.transcript.clear_notices()
        self._has_failed = False
        try:
            self.connection = await self._connector.connect(self._report)
        except ChatError as error:
            self._has_failed = True
            window.status.say("Not connected · Ctrl+R reconnects", style="$error")
            await window.transcript.say(str(error), is_error=True)
        else:
            window.status.say("Ready")
        finally:
            self._is_connecting = False
        self._after()

    def _report(self, waiting: ConnectProgress) -> None:
        self._window.status.say(waiting.words, progress=waiting.progress)
