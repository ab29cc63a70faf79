"""Toolbox: the tools of all servers of `mcp.json`, with unique names and permissions.

    ask      every call is shown first, and made once the user says so
    always   this tool of this server, as it was described then, is called without asking
    never    the model is not offered it

The servers live in the event loop of a thread of their own: importing the client takes a second,
and what servers send is read without holding up a screen or other requests.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import math
import re
import threading
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol, TypeVar

from mlxserve.mcp.escapes import without_halves
from mlxserve.mcp.offers import ServerPrompt, ServerResource
from mlxserve.mcp.results import CallResult
from mlxserve.mcp.servers_file import ServerEntry, ToolsError, read_servers
from mlxserve.mcp.session import ServerState, ServerTool, ToolServer

T = TypeVar("T")

MAX_OFFERED = 200  # tools of all servers together
_MAX_NAME = 64  # characters, of OpenAI's API
# What the client logs would be written over a terminal's screen where no handler is set.
_LOG, _NO_OUTPUT = logging.getLogger("mcp"), logging.NullHandler()


class Permission(StrEnum):
    ASK = "ask"
    ALWAYS = "always"
    NEVER = "never"


class ToolChoices(Protocol):
    """Storage of choices: the chats' file."""

    async def setting(self, name: str) -> str | None: ...
    async def set_setting(self, name: str, value: str) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A tool under its name for the model, which is unique and stable."""

    name: str
    server: str
    tool: str  # the server's name of it
    description: str
    schema: Mapping[str, Any]
    permission: Permission = Permission.ASK

    @property
    def definition(self) -> dict[str, Any]:
        """The tool as an entry of a chat request's `tools`."""
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": dict(self.schema),
        }
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ServerCard:
    """The current state of a server."""

    name: str
    address: str
    state: ServerState
    problem: str
    is_on: bool
    tools: tuple[Tool, ...]


class Toolbox:
    """All servers and their tools. Used from one event loop, which is not the servers'."""

    def __init__(self, file: Path, settings: ToolChoices) -> None:
        self.file = file
        self.problem = ""  # problem of the file
        self._settings = settings
        self._servers: list[ToolServer] = []
        self._off: set[str] = set()
        self._permissions: dict[str, Permission] = {}  # permissions by tool name
        self._thread: _LoopThread | None = None
        self._starting: asyncio.Task[None] | None = None
        self._version: tuple[int, ...] = ()  # version of the file as read

    # Servers

    def read(self) -> None:
        """Read the file, to show it before a start; `problem` describes an error in it."""
        if self._starting is None:
            self._read()

    def _read(self) -> list[ToolServer]:
        """Read the file again; return removed servers, to be closed.

        Unchanged servers keep running; a damaged file changes nothing.
        """
        self._version = _version(self.file)
        try:
            entries = read_servers(self.file)
        except ToolsError as error:
            self.problem = str(error)
            return []
        self.problem = ""
        known = {server.entry.name: server for server in self._servers}
        before, self._servers = self._servers, []
        for entry in entries:
            same = known.get(entry.name)
            is_same = same is not None and same.entry == entry
            self._servers.append(same if same is not None and is_same else ToolServer(entry))
        return [server for server in before if server not in self._servers]

    async def start(self) -> None:
        """Start all enabled servers, and wait until each is ready or has failed.

        Repeats if the file has changed since.
        """
        starting = self._starting
        if starting is None or (starting.done() and self._version != _version(self.file)):
            self._starting = starting = asyncio.create_task(self._start(), name="tools")
        await asyncio.shield(starting)

    async def refresh(self) -> None:
        """Start the servers, and take over choices that another program has stored meanwhile."""
        await self.start()
        for server in self._servers:
            is_on = await self._is_on(server)
            if is_on != (server.entry.name not in self._off):
                await self._turn(server, is_on=is_on)
            await self._read_permissions(server)

    async def _start(self) -> None:
        gone = self._read()
        if self._thread is not None:
            await asyncio.gather(*(self._thread.run(server.close()) for server in gone))
        self._off.clear()
        for server in self._servers:
            if not await self._is_on(server):
                self._off.add(server.entry.name)
        on = [server for server in self._servers if server.entry.name not in self._off]
        await asyncio.gather(*(self._start_one(server) for server in on))

    async def _start_one(self, server: ToolServer) -> None:
        if self._thread is None:
            _LOG.addHandler(_NO_OUTPUT)
            self._thread = _LoopThread()
        await self._thread.run(server.start())
        await self._read_permissions(server)

    async def _is_on(self, server: ToolServer) -> bool:
        kept = await self._settings.setting(_server_key(server.entry))
        return (kept or ("off" if server.entry.is_disabled else "on")) != "off"

    async def _read_permissions(self, server: ToolServer) -> None:
        for tool in self._tools_of(server):
            kept = await self._settings.setting(_tool_key(tool))
            digest = _digest(server.entry, tool)
            self._permissions[tool.name] = _permission(kept, digest)

    async def switch(self, name: str, *, is_on: bool) -> None:
        """Enable and start a server, also one that failed, or disable it. Raises ToolsError."""
        server = self._server(name)
        await self._settings.set_setting(_server_key(server.entry), "on" if is_on else "off")
        await self._turn(server, is_on=is_on)

    async def _turn(self, server: ToolServer, *, is_on: bool) -> None:
        name = server.entry.name
        if is_on:
            self._off.discard(name)
            await self._start_one(server)
        else:
            self._off.add(name)
            if self._thread is not None:
                await self._thread.run(server.close())

    async def close(self) -> None:
        """End every server and its process."""
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.wait({self._starting})
        thread, self._thread = self._thread, None
        if thread is not None:
            await asyncio.gather(*(thread.run(server.close()) for server in self._servers))
            await asyncio.to_thread(thread.stop)
            _LOG.removeHandler(_NO_OUTPUT)

    @property
    def cards(self) -> list[ServerCard]:
        """All servers, in the order of the file."""
        return [
            ServerCard(
                name=server.entry.name,
                address=server.entry.address,
                state=server.state,
                problem=server.problem,
                is_on=server.entry.name not in self._off,
                tools=self._tools_of(server),
            )
            for server in self._servers
        ]

    # Tools

    def offered(self) -> list[Tool]:
        """Tools for the model, in a stable order: a changed list would change the prompt."""
        tools = [tool for server in self._servers for tool in self._tools_of(server)]
        allowed = [tool for tool in tools if tool.permission is not Permission.NEVER]
        return sorted(allowed, key=lambda tool: tool.name)[:MAX_OFFERED]

    def tool(self, name: str) -> Tool | None:
        """Return an offered tool by name."""
        return next((tool for tool in self.offered() if tool.name == name), None)

    async def permit(self, name: str, permission: Permission) -> None:
        """Store the user's choice for a tool. Raises ToolsError."""
        for server in self._servers:
            for tool in self._tools_of(server):
                if tool.name == name:
                    self._permissions[name] = permission
                    kept = f"{permission} {_digest(server.entry, tool)}"
                    await self._settings.set_setting(_tool_key(tool), kept)
                    return
        raise ToolsError(f"There is no tool {name!r} now.")

    async def call(self, name: str, arguments: str) -> CallResult:
        """Call a tool with the model's JSON. Failures are results; cancelling stops the call."""
        tool = self.tool(name)
        if tool is None or self._thread is None:
            known = ", ".join(offered.name for offered in self.offered()) or "none"
            return CallResult(f"There is no tool {name!r}. There are: {known}.", is_error=True)
        try:
            values = _parsed(arguments)
        except (ValueError, RecursionError) as error:
            return CallResult(f"The arguments are not JSON: {error}.", is_error=True)
        if not isinstance(values, dict):
            return CallResult("The arguments are not a JSON object.", is_error=True)
        return await self._run(self._server(tool.server).call(tool.tool, values))

    # Prompts and resources

    @property
    def prompts(self) -> list[ServerPrompt]:
        return [prompt for server in self._servers for prompt in server.prompts]

    @property
    def resources(self) -> list[ServerResource]:
        return [resource for server in self._servers for resource in server.resources]

    async def prompt(self, prompt: ServerPrompt, typed: str) -> str:
        """Return the text of a prompt with the typed arguments. Raises ToolsError."""
        values = prompt.values(without_halves(typed))
        return await self._run(self._server(prompt.server).prompt(prompt, values))

    async def resource(self, resource: ServerResource) -> str:
        """Return the text of a resource. Raises ToolsError."""
        return await self._run(self._server(resource.server).resource(resource))

    async def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the servers' thread, which runs once a server has started."""
        assert self._thread is not None, "no server has started, so none offers anything"
        return await self._thread.run(work)

    def _server(self, name: str) -> ToolServer:
        for server in self._servers:
            if server.entry.name == name:
                return server
        raise ToolsError(f"There is no server {name!r} in {self.file}.")

    def _tools_of(self, server: ToolServer) -> tuple[Tool, ...]:
        tools = (self._named(server.entry.name, tool) for tool in server.tools)
        return tuple({tool.name: tool for tool in tools}.values())

    def _named(self, server: str, tool: ServerTool) -> Tool:
        name = unique_name(server, tool.name)
        return Tool(
            name=name,
            server=server,
            tool=tool.name,
            description=tool.description,
            schema=tool.schema,
            permission=self._permissions.get(name, Permission.ASK),
        )


class _LoopThread:
    """An event loop in a thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="mlxserve-tools", daemon=True
        )
        self._thread.start()

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the thread; cancelled together with the caller."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()


def _parsed(arguments: str) -> Any:
    """Parse strict JSON whose numbers and texts a client can send. Raises ValueError."""
    text = without_halves(arguments or "{}")
    return json.loads(text, parse_constant=_number, parse_float=_number)


def _number(written: str) -> float:
    """Parse a finite number. Raises ValueError."""
    number = float(written)
    if not math.isfinite(number):
        raise ValueError(f"{written[:40]} is not a number of JSON")
    return number


def _version(file: Path) -> tuple[int, ...]:
    """Version of the file, which changes with it; empty without a file."""
    try:
        state = file.stat()
    except OSError:
        return ()
    return state.st_ino, state.st_size, state.st_mtime_ns


def unique_name(server: str, tool: str) -> str:
    """Return `server__tool` in the API's characters, with a digest if ambiguous."""
    plain = f"{server}__{tool}"
    name = re.sub(r"[^a-zA-Z0-9_-]", "_", plain)
    if name == plain and len(name) <= _MAX_NAME and "__" not in server and "__" not in tool:
        return name
    digest = hashlib.sha256(f"{server}\0{tool}".encode()).hexdigest()[:8]
    return f"{name[: _MAX_NAME - 9]}_{digest}"


def _server_key(entry: ServerEntry) -> str:
    return f"tools:{entry.name}"


def _tool_key(tool: Tool) -> str:
    return f"tools:{tool.server}:{tool.tool}"


def _digest(entry: ServerEntry, tool: Tool) -> str:
    """Digest of what the user agreed to: a changed description asks again."""
    what = json.dumps([entry.digest, tool.description, tool.schema], sort_keys=True)
    return hashlib.sha256(what.encode()).hexdigest()


def _permission(kept: str | None, digest: str) -> Permission:
    word, _, agreed = (kept or "").partition(" ")
    if word == Permission.NEVER:
        return Permission.NEVER
    return Permission.ALWAYS if word == Permission.ALWAYS and agreed == digest else Permission.ASK
