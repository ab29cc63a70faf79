"""A client that is closed leaves no connection open, whatever its requests are doing."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import httpx
import pytest

from tui.talk.http_client import ClosingClient

REPLY = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"  # the connection stays open


@contextlib.asynccontextmanager
async def serving(reply: bytes, patience: float) -> AsyncIterator[str]:
    """The address of a server. At the end its connections have to be closed by the other side."""
    connections: list[asyncio.Task[None]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while line := await reader.readline():
                if line == b"\r\n":
                    writer.write(reply)
        writer.close()

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(asyncio.create_task(serve(reader, writer)))

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        await asyncio.wait_for(asyncio.gather(*connections), patience)


@pytest.mark.parametrize("turns", range(24))
async def test_a_request_of_any_age_ends_with_its_client(turns: int, patience: float) -> None:
    """httpx alone leaves the connection open while it is being opened: up to ten turns of the event
    loop."""

    async with serving(REPLY, patience) as url:
        client = ClosingClient(base_url=url)
        asking = asyncio.create_task(client.get("/"))
        for _ in range(turns):
            await asyncio.sleep(0)
        await client.aclose()
        with contextlib.suppress(httpx.ReadError):
            assert (await asking).text == "ok"


async def test_a_request_without_a_reply_ends_with_its_client(patience: float) -> None:
    async with serving(b"", patience) as url:
        client = ClosingClient(base_url=url)
        asking = asyncio.create_task(client.get("/"))
        for _ in range(100):
            await asyncio.sleep(0)
        await client.aclose()
        with pytest.raises(httpx.ReadError, match="was closed"):
            await asking


async def test_a_reader_that_is_cancelled_stays_cancelled(patience: float) -> None:
    async with serving(b"", patience) as url, ClosingClient(base_url=url) as client:
        asking = asyncio.create_task(client.get("/"))
        for _ in range(100):
            await asyncio.sleep(0)
        asking.cancel()
        await client.aclose()
        with pytest.raises(asyncio.CancelledError):
            await asking


async def test_replies_are_read_as_ever(patience: float) -> None:
    async with serving(REPLY, patience) as url, ClosingClient(base_url=url) as client:
        for _ in range(2):
            async with client.stream("GET", "/") as reply:
                assert await reply.aread() == b"ok"


async def test_a_closed_client_refuses_as_one_that_closes() -> None:
    """The page map was asked for just after the terminal's end, and httpx's RuntimeError was shown."""
    client = ClosingClient(base_url="http://127.0.0.1:9")
    await client.aclose()
    with pytest.raises(httpx.ReadError, match="is closed"):
        await client.get("/")
