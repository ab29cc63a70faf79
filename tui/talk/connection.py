"""Connector: starts a server if necessary, waits until it is ready, and chooses a model.

Reports its progress as texts for the status line.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING

from mlxserve.system.terminal_text import one_line
from tui.home import Home
from tui.talk.errors import ChatError
from tui.talk.server_process import ServerProcess

if TYPE_CHECKING:
    from tui.talk.client import ChatClient
    from tui.talk.served_model import ServedModel

_POLL_SECONDS = 0.2
# "2026-01-02 03:04:05,678 INFO mlxserve.engine: " is of no use in the status line.
_LOG_PREFIX = re.compile(r"^[\d-]+ [\d:,.]+ [A-Z]+ \S+: ")

# Gets what `connect` is waiting for, and how far that is (0 to 1) if known.
Report = Callable[[str, float | None], None]
# Starts a model with flags.
CreateServer = Callable[[str | None, Sequence[str], Home], ServerProcess]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectOptions:
    """The server and the model to connect to."""

    url: str | None = None  # None: start a server
    is_found: bool = False  # the address is that of a server of this user, not one that was given
    model: str | None = None
    server_args: Sequence[str] = ()
    read_key: Callable[[str], str | None] = lambda _url: None  # key for the server at this address

    def with_model(self, model: str) -> ConnectOptions:
        """Return options for our own server with another model."""
        args = list(self.server_args)
        if "--model" in args:
            at = args.index("--model")
            del args[at : at + 2]
        return replace(self, url=None, is_found=False, model=model, server_args=args)


class ServerConnection:
    """A server that is ready, its models, and the current model."""

    def __init__(self, client: ChatClient, served: Sequence[ServedModel], model: str) -> None:
        self.client = client
        self.served = list(served)
        self.ask(model)

    def ask(self, model: str) -> None:
        """Use this model from now on."""
        self.model = model
        if len(self.served) > 1:
            self.client.engine.model = model

    @property
    def models(self) -> list[str]:
        return [model.name for model in self.served]

    @property
    def is_ours(self) -> bool:
        """True if the server is mlxserve."""
        return any(model.is_ours for model in self.served)

    @property
    def sees(self) -> bool | None:
        """True if the model sees images; None if the server does not say."""
        return next((model.sees for model in self.served if model.name == self.model), None)

    @property
    def context(self) -> int | None:
        """Maximum tokens of a prompt and its answer; None if the server does not say."""
        return next((model.context for model in self.served if model.name == self.model), None)


class Connector:
    """Connects and reconnects. Owns the server process if it started one."""

    def __init__(
        self,
        options: ConnectOptions,
        home: Home,
        create_server: CreateServer = ServerProcess.for_model,
        *,
        instead: ConnectOptions | None = None,
    ) -> None:
        """`instead`: what to connect to if the first options fail."""
        # Of the next `connect`. A server that was started here is stopped before they are changed.
        self.options = options
        self.instead = instead
        self._home = home
        self._create_server = create_server
        self.server: ServerProcess | None = None

    def begin(self) -> None:
        """Start a server, if needed, before there is a screen."""
        if self.options.url is None:
            # `connect` tries again and reports the failure.
            with suppress(ChatError):
                self._start_server()

    async def connect(self, report: Report) -> ServerConnection:
        """Wait until the server is ready. Raises ChatError."""
        url = await self.address(report)
        # httpx takes longer to import than the first picture may take, so it is imported here.
        await asyncio.to_thread(import_module, "tui.talk.client")
        from tui.talk.client import ChatClient

        client = ChatClient(url, read_key=partial(self.options.read_key, url))
        try:
            await self._wait_until_ready(client, report)
            models = await client.models()
            names = [model.name for model in models]
            if not self._has_to_leave(names):
                return ServerConnection(client, models, self._choose(names, client.url))
        except BaseException:
            await client.close()
            raise
        await client.close()
        assert self.options.model is not None, "a server is left for a model"
        self.options = self.options.with_model(self.options.model)
        return await self.connect(report)

    @property
    def can_change_model(self) -> bool:
        """True if another model can be served.

        Either the server that was started here restarts, or our own starts beside the server that
        was found.
        """
        return self.options.url is None or self.options.is_found

    def stop_server(self) -> None:
        """Stop the server if it was started here. Blocks until it has exited."""
        if self.server is not None:
            self.server.stop()

    async def address(self, report: Report) -> str:
        """Return the server's address; starts a server if none was given. Raises ChatError."""
        if self.options.url is not None:
            return self.options.url
        server = self.server
        if server is None or not server.is_running:
            server = self._start_server()
        reporting = asyncio.create_task(self._report_start(server, report))
        try:
            return await server.address()
        finally:
            reporting.cancel()

    def _start_server(self) -> ServerProcess:
        try:
            server = self._create_server(self.options.model, self.options.server_args, self._home)
        except OSError as error:
            raise ChatError(
                f"Cannot write the server's log: {error}. Set MLXSERVE_HOME to a writable folder."
            ) from error
        # The one before, whose pipe stays open although it has ended.
        self.stop_server()
        server.start()
        self.server = server
        return server

    async def _report_start(self, server: ServerProcess, report: Report) -> None:
        started = time.monotonic()
        while True:
            said = one_line(_LOG_PREFIX.sub("", server.last_lines(1)), 60)
            seconds = time.monotonic() - started
            words = f"Starting the server, {seconds:.0f} s"
            report(f"{words} · {said}" if said else words, None)
            await asyncio.sleep(_POLL_SECONDS)

    async def _wait_until_ready(self, client: ChatClient, report: Report) -> None:
        started = time.monotonic()
        while True:
            health = await client.health()
            if health.is_ready:
                return
            if self.server is not None and not self.server.is_running:
                raise self.server.why_it_stopped()
            seconds = time.monotonic() - started
            report(f"Loading the model, {seconds:.0f} s", health.progress)
            await asyncio.sleep(_POLL_SECONDS)

    def _has_to_leave(self, models: Sequence[str]) -> bool:
        """True if the server was found and does not have the requested model."""
        return self.options.is_found and self.options.model not in (None, *models)

    def _choose(self, models: Sequence[str], url: str) -> str:
        """Return the requested model, or the server's first."""
        requested = self.options.model
        if requested is not None and (requested in models or not models):
            return requested
        if requested is not None and self.options.url is not None:
            raise ChatError(
                f"The server at {url} has no model {one_line(requested)!r}. "
                f"It has: {', '.join(one_line(m) for m in models[:8])}. Choose one with --model."
            )
        if not models:
            raise ChatError(
                f"The server at {url} has no model. Load one there, or choose one with --model."
            )
        # A server started here may list its model under a shorter name.
        return models[0]
