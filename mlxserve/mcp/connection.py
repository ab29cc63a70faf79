"""Opens the connection to an MCP server: a child process, or HTTP. Only this file imports `mcp`.

A command runs in a process group of its own with a few variables of the environment (HOME, PATH
..., no keys) and its own `env`, behind a relay that bounds what it sends; of what it writes to
stderr the end is kept, as nothing else may reach the screen.
"""

from __future__ import annotations

import asyncio
import math
import os
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from mlxserve.mcp import relay
from mlxserve.mcp.escapes import HalvesFilter, without_halves
from mlxserve.mcp.servers_file import ServerEntry, ToolsError
from mlxserve.system.extras import extra_command
from mlxserve.system.loopback import is_here
from mlxserve.system.terminal_text import one_line

if TYPE_CHECKING:
    import httpx2
    from mcp import Client
    from mcp.client import Transport

MAX_REPLY = 32 << 20  # bytes of one JSON reply over HTTP
MISSING = "Tools need the package `mcp`, which is not installed here."
_STDERR_SIZE = 4_000  # bytes
_HTTP_SECONDS, _STREAM_SECONDS = 30.0, 3_600.0


class StderrTail(asyncio.Protocol):
    """The end of a process's stderr."""

    def __init__(self) -> None:
        self._kept = b""

    @property
    def last_line(self) -> str:
        lines = self._kept.decode("utf-8", "replace").strip().splitlines()
        return one_line(lines[-1], 200) if lines else ""

    def data_received(self, data: bytes) -> None:
        self._kept = (self._kept + data)[-_STDERR_SIZE:]


@asynccontextmanager
async def connected(entry: ServerEntry, stderr: StderrTail) -> AsyncIterator[Client]:
    """Connect to a server. Raises ToolsError without the package, and whatever a start raises."""
    try:
        from mcp import Client
    except ImportError as error:
        raise ToolsError(f"{MISSING} Install it: {extra_command('mcp')}") from error
    async with AsyncExitStack() as stack:
        if entry.url:
            from mcp.client.streamable_http import streamable_http_client

            http = await stack.enter_async_context(_http_client(entry))
            client = Client(streamable_http_client(entry.url, http_client=http), cache=None)
            yield await stack.enter_async_context(client)
            return
        from mcp import StdioServerParameters
        from mcp.client.stdio import stdio_client

        parameters = StdioServerParameters(
            command=sys.executable,
            args=["-I", "-S", relay.__file__, _found(entry), *entry.args],
            env=dict(entry.env),
            cwd=entry.folder,
            encoding_error_handler="replace",
        )
        reading, writing = os.pipe()
        errors = stack.enter_context(os.fdopen(writing, "w"))
        pipe, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: stderr, os.fdopen(reading, "rb")
        )
        stack.callback(pipe.close)
        client = Client(_repaired(stdio_client(parameters, errlog=errors)), cache=None)
        entered = await stack.enter_async_context(client)
        errors.close()  # the process has its own
        yield entered


def _found(entry: ServerEntry) -> str:
    """Return the entry's command. Raises FileNotFoundError."""
    if os.sep in entry.command:
        is_here_now = Path(entry.folder or ".", entry.command).exists()
    else:
        path = entry.env.get("PATH", os.environ.get("PATH"))
        is_here_now = shutil.which(entry.command, path=path) is not None
    if not is_here_now:
        raise FileNotFoundError(entry.command)
    return entry.command


@asynccontextmanager
async def _repaired(transport: Transport) -> AsyncIterator[tuple[Any, Any]]:
    """Repair messages that the transport could not parse because of a lone surrogate."""
    async with transport as (incoming, outgoing):
        yield _Repaired(incoming), outgoing


class _Repaired:
    """Incoming messages, repaired. An unparsable one is an error with its line."""

    def __init__(self, incoming: Any) -> None:
        self._incoming = incoming

    async def __aenter__(self) -> Self:
        await self._incoming.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._incoming.__aexit__(*error)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        return _reparsed(await self._incoming.__anext__())


def _reparsed(item: Any) -> Any:
    from mcp.shared.message import SessionMessage
    from mcp.types import jsonrpc_message_adapter
    from pydantic import ValidationError

    if not isinstance(item, ValidationError):
        return item
    line = item.errors()[0]["input"]
    if not isinstance(line, str) or (repaired := without_halves(line)) == line:
        return item
    try:
        return SessionMessage(jsonrpc_message_adapter.validate_json(repaired, by_name=False))
    except ValidationError as error:
        return error


def _http_client(entry: ServerEntry) -> httpx2.AsyncClient:
    import httpx2

    class Reply(httpx2.AsyncByteStream):
        """A reply without lone surrogates, which ends with an error if it gets too long."""

        def __init__(self, stream: httpx2.AsyncByteStream, max_size: float) -> None:
            self._stream = stream
            self._num_left = max_size
            self._filter = HalvesFilter()

        async def __aiter__(self) -> AsyncIterator[bytes]:
            async for part in self._stream:
                self._num_left -= len(part)
                if self._num_left < 0:
                    raise httpx2.ReadError(f"the reply has more than {MAX_REPLY >> 20} MB")
                yield self._filter.push(part)
            yield self._filter.finish()

        async def aclose(self) -> None:
            await self._stream.aclose()

    async def filtered(reply: httpx2.Response) -> None:
        # Events are bounded one by one by the client.
        is_stream = "event-stream" in reply.headers.get("content-type", "")
        assert isinstance(reply.stream, httpx2.AsyncByteStream)
        reply.stream = Reply(reply.stream, math.inf if is_stream else MAX_REPLY)

    return httpx2.AsyncClient(
        headers=dict(entry.headers),
        timeout=httpx2.Timeout(_HTTP_SECONDS, read=_STREAM_SECONDS),
        event_hooks={"response": [filtered]},
        trust_env=not is_here(entry.url),  # no proxy on the way to this machine
    )
