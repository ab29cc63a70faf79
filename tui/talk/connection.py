"""From nothing to a server that answers: start one if need be, wait, choose a model.

Reports what it waits for, in words for the status line. Knows nothing of widgets.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING

from tui.home import Home
from tui.sanitise import one_line
from tui.talk.errors import ChatError
from tui.talk.server_process import ServerProcess

if TYPE_CHECKING:
    from tui.talk.client import ChatClient

_POLL_SECONDS = 0.2
# "2026-01-02 03:04:05,678 INFO mlxserve.engine.engine: " says nothing to who waits.
_LOG_PREFIX = re.compile(r"^[\d-]+ [\d:,.]+ [A-Z]+ \S+: ")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectOptions:
    """What the terminal was asked to talk to."""

    url: str | None = None  # None: a server of our own
    model: str | None = None
    server_args: Sequence[str] = ()
    api_key: str | None = None


@dataclass(frozen=True, slots=True)
class ConnectProgress:
    """What is being waited for, and how far it is (0 to 1) where that is known."""

    words: str
    progress: float | None = None


class ServerConnection:
    """A server that answers. `close` ends it if it is ours."""

    def __init__(self, client: ChatClient, models: Sequence[str], model: str) -> None:
        self.client = client
        self.models = list(models)
        self.model = model


class Connector:
    """Connects, and connects again; owns the child process."""

    def __init__(self, wanted: ConnectOptions, home: Home) -> None:
        self._wanted = wanted
        self._home = home
        self.server: ServerProcess | None = None

    def begin(self) -> None:
        """Start a server of our own before there is a screen; `connect` says how that went."""
        if self._wanted.url is None:
            with suppress(ChatError):  # `connect` tries again, and tells the reader
                self._start_server()

    async def connect(self, report: Callable[[ConnectProgress], None]) -> ServerConnection:
        """Wait until the server can answer. Raises ChatError."""
        url = self._wanted.url or await self._own_server(report)
        # httpx takes longer to import than the first picture may take, so it comes after it.
        await asyncio.to_thread(import_module, "tui.talk.client")
        from tui.talk.client import ChatClient

        client = ChatClient(url, api_key=self._wanted.api_key)
        try:
            await self._wait_until_ready(client, report)
            models = await client.models()
            return ServerConnection(client, models, self._choose(models, client.url))
        except BaseException:
            await client.close()
            raise

    @property
    def can_change_model(self) -> bool:
        """Whether the server is ours, to be started again with another model."""
        return self._wanted.url is None

    def use_model(self, model: str) -> None:
        """Ask for this one from the next `connect` on; a server of ours is to be stopped first."""
        args = list(self._wanted.server_args)
        if "--model" in args:
            at = args.index("--model")
            del args[at : at + 2]
        self._wanted = replace(self._wanted, model=model, server_args=args)

    def stop_server(self) -> None:
        """End the server if it is ours. Blocks until it has ended."""
        if self.server is not None:
            self.server.stop()

    async def _own_server(self, report: Callable[[ConnectProgress], None]) -> str:
        server = self.server
        if server is None or not server.is_running:
            server = self._start_server()
        waiting = asyncio.create_task(self._report_start(server, report))
        try:
            return await server.address()
        finally:
            waiting.cancel()

    def _start_server(self) -> ServerProcess:
        try:
            server = ServerProcess.for_model(
                self._wanted.model, self._wanted.server_args, self._home
            )
        except OSError as error:
            raise ChatError(
                f"There is no place for the server's log: {error}. "
                "Set MLXSERVE_HOME to a folder that can be written."
            ) from error
        server.start()
        self.server = server
        return server

    async def _report_start(
        self, server: ServerProcess, report: Callable[[ConnectProgress], None]
    ) -> None:
        started = time.monotonic()
        while True:
            said = one_line(_LOG_PREFIX.sub("", server.last_lines(1)), 60)
            seconds = time.monotonic() - started
            report(
                ConnectProgress(
                    f"Starting the server, {seconds:.0f} s" + (f" · {said}" if said else "")
                )
            )
            await asyncio.sleep(_POLL_SECONDS)

    async def _wait_until_ready(
        self, client: ChatClient, report: Callable[[ConnectProgress], None]
    ) -> None:
        started = time.monotonic()
        while True:
            health = await client.health()
            if health.is_ready:
                return
            if self.server is not None and not self.server.is_running:
                raise self.server.why_it_stopped()
            seconds = time.monotonic() - started
            report(ConnectProgress(f"Loading the model, {seconds:.0f} s", health.progress))
            await asyncio.sleep(_POLL_SECONDS)

    def _choose(self, models: Sequence[str], url: str) -> str:
        """The model asked for, or the server's first."""
        wanted = self._wanted.model
        if wanted is not None and (wanted in models or self._wanted.url is None or not models):
            # Our own server was started with it; it may list it under a shorter name.
            return wanted if wanted in models or not models else models[0]
        if wanted is not None:
            raise ChatError(
                f"The server at {url} has no model {one_line(wanted)!r}. "
                f"It has: {', '.join(one_line(m) for m in models[:8])}. Choose one with --model."
            )
        if not models:
            raise ChatError(
                f"The server at {url} has no model. Load one there, or name one with --model."
            )
        return models[0]
