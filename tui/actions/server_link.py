"""ServerLink: connects to the server in the background, and reconnects. Owns the connection.

Shows on the screen what it waits for.
"""

from __future__ import annotations

import asyncio
import time

from textual.message import Message as Event

from mlxserve.system.terminal_text import one_line
from tui.talk.connection import ConnectOptions, Connector, ServerConnection
from tui.talk.errors import ChatError
from tui.widgets.window import ChatWindow
from tui.workers import start_worker

_WATCH_SECONDS = 0.5  # between checks of the server's process
# A server that exits again this soon is not restarted.
_RESTART_SECONDS = 60.0


class ServerLink:
    """Manages at most one connection at a time."""

    class Connected(Event):
        """Connecting ended, with a connection or a failure. Posted by the window."""

    def __init__(self, connector: Connector, window: ChatWindow) -> None:
        self._connector = connector
        self._window = window
        self._is_connecting = False
        self._has_failed = False
        # They stay while another model is being started.
        self._before = connector.instead
        self.connection: ServerConnection | None = None

    @property
    def model(self) -> str:
        """The current model; empty while not connected."""
        return "" if self.connection is None else self.connection.model

    @property
    def address(self) -> str:
        """The server's address without the scheme; empty while not connected."""
        return "" if self.connection is None else self.connection.client.url.partition("://")[2]

    @property
    def is_lost(self) -> bool:
        """True if not connected, or if the server started here has exited."""
        return self.connection is None or self._has_exited

    @property
    def _has_exited(self) -> bool:
        server = self._connector.server
        return server is not None and not server.is_running

    def has_lost(self, connection: ServerConnection) -> bool:
        """True if the server of this connection is gone."""
        return connection is not self.connection or self._has_exited

    def connect(self) -> None:
        """Connect in the background. Does nothing while already connecting."""
        if not self._is_connecting:
            self._is_connecting = True
            start_worker(self._window, self._connect, group="connect")

    @property
    def can_change_model(self) -> bool:
        return self._connector.can_change_model

    @property
    def requested(self) -> str:
        """The name by which the model was requested; empty for the server's default."""
        return self._connector.options.model or ""

    def say(self, words: str, progress: float | None = None) -> None:
        """Show what the terminal waits for."""
        self._window.status.say(words, progress=progress)

    async def restart(self, model: str) -> None:
        """Restart our server with another model; go back to the old one on failure.

        Beside a server that was found, start our own.
        """
        old = self._connector.options
        await self._use(old.with_model(model))
        self._before = old
        self.connect()

    async def _use(self, options: ConnectOptions) -> None:
        self.say("Stopping the server")
        await self.close()
        await asyncio.to_thread(self._connector.stop_server)
        # The next options may be those of a server that was found.
        self._connector.server = None
        self._connector.options = options

    async def close(self) -> None:
        connection, self.connection = self.connection, None
        if connection is not None:
            await connection.client.close()

    async def watch(self) -> None:
        """Watch the server that was started here, and restart it when it fails.

        It is not restarted if that happened a moment ago, or if somebody has stopped it.
        """
        restarted = -_RESTART_SECONDS
        while True:
            await asyncio.sleep(_WATCH_SECONDS)
            if self._is_connecting or self.connection is None or not self._has_exited:
                continue
            server = self._connector.server
            assert server is not None, "it has exited"
            reason = self.why_server_stopped()
            await self.close()
            if server.was_stopped or time.monotonic() - restarted < _RESTART_SECONDS:
                await self._fail(reason)
                continue
            restarted = time.monotonic()
            self._window.notify(
                f"The server {server.ending}, and is restarted. Its log is {server.log}",
                severity="warning",
            )
            self.connect()

    def why_server_stopped(self) -> str:
        """Why the server started here has exited; empty if it has not."""
        server = self._connector.server
        return str(server.why_it_stopped()) if server is not None and self._has_exited else ""

    async def _connect(self) -> None:
        window = self._window
        await self.close()
        # The notice of that failure is outdated.
        if self._has_failed:
            await window.transcript.clear_notices()
        self._has_failed = False
        try:
            await self._connect_or_go_back()
        except ChatError as error:
            await self._fail(str(error))
        else:
            window.status.say("Ready")
        finally:
            self._is_connecting = False
        self._window.post_message(self.Connected())

    async def _fail(self, reason: str) -> None:
        self._has_failed = True
        self._window.status.say("Not connected · Ctrl+R reconnects", style="$error")
        await self._window.transcript.say(reason, is_error=True)

    async def _connect_or_go_back(self) -> None:
        """Connect. Raises ChatError if neither the new model nor the previous one can be served."""
        before, self._before = self._before, None
        failed = self.requested
        try:
            self.connection = await self._connector.connect(self.say)
        except ChatError as error:
            if before is None:
                raise
            await self._use(before)
            self.connection = await self._connector.connect(self.say)
            words = one_line(failed, 60) if failed else "The model"
            await self._window.transcript.say(
                f"{words} did not start, so {one_line(self.model, 60)} answers. {error}",
                is_error=True,
            )
        else:
            if before is not None and before.url is not None and self._connector.server is not None:
                self._window.notify(
                    f"The server at {before.url} keeps its model; this chat has one of its own now. "
                    "`mlxserve stop` ends the other."
                )
