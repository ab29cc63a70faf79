"""ToolServer: one MCP server, from its start to its end.

A task of its own opens the connection and closes it, as the client's scopes must be left by the task that
entered them; calls are made from other tasks of the same event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from mlxserve.mcp.connection import StderrTail, connected
from mlxserve.mcp.offers import (
    ServerPrompt,
    ServerResource,
    prompt_text,
    prompts_of,
    resource_text,
    resources_of,
)
from mlxserve.mcp.patience import Patience
from mlxserve.mcp.results import CallResult, result_of, shortened
from mlxserve.mcp.servers_file import ServerEntry, ToolsError
from mlxserve.system.terminal_text import one_line
from mlxserve.system.well_formed import well_formed

if TYPE_CHECKING:
    from mcp import Client

START_SECONDS = 30.0  # start, which may download the server's package
MAX_TOOLS = 200  # tools of one server
MAX_DESCRIPTION = 4_000  # characters
_MAX_PAGES = 50  # pages of a list of tools
_CONNECTION_CLOSED = -32_000  # the client's code for a server that went away


class ServerState(StrEnum):
    OFF = "off"
    STARTING = "starting"
    READY = "ready"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class ServerTool:
    """A tool as its server describes it: untrusted text."""

    name: str
    description: str
    schema: Mapping[str, Any]


class ToolServer:
    """One server. Methods belong to one event loop; attributes may be read from any thread."""

    def __init__(self, entry: ServerEntry, start_seconds: float = START_SECONDS) -> None:
        self.entry = entry
        self.state = ServerState.OFF
        self.problem = ""  # why it failed
        self.tools: tuple[ServerTool, ...] = ()
        self.prompts: tuple[ServerPrompt, ...] = ()
        self.resources: tuple[ServerResource, ...] = ()
        self._start_seconds = start_seconds
        self._client: Client | None = None
        self._serving: asyncio.Task[None] | None = None
        self._started = asyncio.Event()
        self._end = asyncio.Event()
        self._stderr = StderrTail()

    async def start(self) -> None:
        """Return once it is ready or has failed, which `problem` explains."""
        if self.state is ServerState.FAILED:
            await self.close()
        if self._serving is None:
            self.state, self.problem = ServerState.STARTING, ""
            self._started, self._end = asyncio.Event(), asyncio.Event()
            self._stderr = StderrTail()
            self._serving = asyncio.create_task(self._serve(), name=f"tools {self.entry.name}")
            self._serving.add_done_callback(self._note_end)
        await self._started.wait()

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> CallResult:
        """Run a tool. A failure, also of the server, is a result for the model.

        The time limit starts again with each report of progress.
        """
        if self._client is None:
            return CallResult(f"The server {self._shown} is not running.", is_error=True)
        patience = Patience(self.entry.call_seconds, asyncio.get_running_loop().time)
        calling = asyncio.ensure_future(
            self._client.call_tool(tool, dict(arguments), progress_callback=patience.extend)
        )
        try:
            is_late = not await patience.wait(calling)
        finally:
            # This notifies the server; it does nothing if the call is done.
            calling.cancel()
            await asyncio.wait({calling})
        if is_late:
            words = f"{self.entry.call_seconds:g} seconds"
            return CallResult(f"The tool did not answer within {words}; stopped.", is_error=True)
        if (error := calling.exception()) is not None:
            return CallResult(self._explained(error), is_error=True)
        result = calling.result()
        is_error = bool(result.is_error)
        return result_of(result.content, result.structured_content, is_error=is_error)

    async def prompt(self, prompt: ServerPrompt, values: dict[str, str]) -> str:
        """Return the text of a prompt. Raises ToolsError."""
        return await self._asked(lambda client: prompt_text(client, prompt, values))

    async def resource(self, resource: ServerResource) -> str:
        """Return the text of a resource. Raises ToolsError."""
        return await self._asked(lambda client: resource_text(client, resource))

    async def _asked(self, ask: Callable[[Client], Awaitable[str]]) -> str:
        if self._client is None:
            raise ToolsError(f"The server {self._shown} is not running.")
        try:
            async with asyncio.timeout(self.entry.call_seconds):
                return await ask(self._client)
        except ToolsError:
            raise
        except TimeoutError as error:
            raise ToolsError(f"The server {self._shown} did not answer.") from error
        except Exception as error:
            # Whatever the client raises for what a server answers.
            raise ToolsError(self._explained(error)) from error

    async def close(self) -> None:
        """End the connection, and the process with its children."""
        serving, self._serving = self._serving, None
        if serving is not None:
            self._end.set()
            if not self._started.is_set():
                serving.cancel()
            await asyncio.wait({serving})
        self._forget(ServerState.OFF)

    async def _serve(self) -> None:
        async with AsyncExitStack() as stack:
            async with asyncio.timeout(self._start_seconds):
                client = await stack.enter_async_context(connected(self.entry, self._stderr))
                self.tools = await _all_tools(client)
                self.prompts = await prompts_of(client, self.entry.name)
                self.resources = await resources_of(client, self.entry.name)
            self._client, self.state = client, ServerState.READY
            self._started.set()
            try:
                await self._end.wait()
            finally:
                self._client = None

    def _note_end(self, serving: asyncio.Task[None]) -> None:
        if not serving.cancelled() and (error := serving.exception()) is not None:
            self._failed(self._why_not_started(_first(error)))
        self._started.set()

    def _failed(self, problem: str) -> None:
        self.problem = problem
        self._forget(ServerState.FAILED)

    def _forget(self, state: ServerState) -> None:
        self.state, self.tools, self.prompts, self.resources = state, (), (), ()

    def _why_not_started(self, error: BaseException) -> str:
        if isinstance(error, ToolsError):
            return str(error)
        if isinstance(error, TimeoutError):
            return (
                f"{self._shown} was not ready within {self._start_seconds:g} seconds.{self._said}"
            )
        if isinstance(error, FileNotFoundError) and self.entry.command:
            command = one_line(self.entry.command, 100)
            return (
                f"{self._shown} did not start: there is no command {command!r} here. Install it, or "
                "write its whole path into mcp.json."
            )
        return f"{self._shown} did not start: {_words(error)}.{self._said}"

    def _explained(self, error: BaseException) -> str:
        cause = _first(error)
        if self.entry.command and getattr(cause, "code", None) == _CONNECTION_CLOSED:
            self._failed(f"{self._shown} has ended.{self._said} It can be started again.")
            return self.problem
        return shortened(f"The call failed: {_words(cause)}.")

    @property
    def _shown(self) -> str:
        return one_line(self.entry.name, 60)

    @property
    def _said(self) -> str:
        line = self._stderr.last_line
        return f" Its last words: {line}" if line else ""


async def _all_tools(client: Client) -> tuple[ServerTool, ...]:
    tools: list[ServerTool] = []
    cursor = None
    for _ in range(_MAX_PAGES):
        page = await client.list_tools(cursor=cursor)
        for tool in page.tools:
            described = well_formed(tool.description or "")[:MAX_DESCRIPTION]
            tools.append(ServerTool(well_formed(tool.name), described, tool.input_schema))
        cursor = page.next_cursor
        if cursor is None or len(tools) >= MAX_TOOLS:
            break
    return tuple(tools[:MAX_TOOLS])


def _first(error: BaseException) -> BaseException:
    """Return the first error of an exception group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _words(error: BaseException) -> str:
    return one_line(well_formed(str(error) or type(error).__name__), 300).rstrip(".")
