import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from mlxserve.api.server.sse import KEEPALIVE, EventStream, event, named_event

Receive = Callable[[], Any]


class Client:
    """One end of an ASGI connection: records what is sent, leaves when told."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.left = asyncio.Event()
        self.got = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)
        self.got.set()

    @property
    def bodies(self) -> list[bytes]:
        return [message["body"] for message in self.sent if message["type"].endswith("body")]


class Source:
    """Frames that can be closed once, and a `close` that is counted."""

    def __init__(self, *frames: Any) -> None:
        self.frames = frames
        self.ended = 0
        self.closed = 0

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            for frame in self.frames:
                if isinstance(frame, asyncio.Event):
                    await frame.wait()
                elif isinstance(frame, BaseException):
                    raise frame
                else:
                    yield frame
        finally:
            self.ended += 1

    async def close(self) -> None:
        self.closed += 1


def stream(source: Source, interval: float = 10.0) -> EventStream:
    return EventStream(source.__aiter__(), close=source.close, interval=interval)


def test_an_event_is_one_data_line():
    assert event({"a": "x\ny"}) == b'data: {"a":"x\\ny"}\n\n'


def test_a_named_event_has_its_data():
    assert named_event("ping", {"a": 1}) == b'event: ping\ndata: {"a":1}\n\n'


def test_frames_are_sent_one_by_one_and_then_the_body_ends():
    async def run() -> None:
        client, source = Client(), Source(b"one", b"two")
        await stream(source)({}, client.receive, client.send)
        assert client.sent[0]["status"] == 200
        assert client.bodies == [b"one", b"two", b""]
        assert client.sent[-1]["more_body"] is False
        assert (source.ended, source.closed) == (1, 1)

    asyncio.run(run())


def test_headers_are_sent_before_the_first_frame_exists():
    async def run() -> None:
        client, source = Client(), Source(asyncio.Event())
        reply = asyncio.ensure_future(stream(source)({}, client.receive, client.send))
        await client.got.wait()
        assert [message["type"] for message in client.sent] == ["http.response.start"]
        client.left.set()
        await reply

    asyncio.run(run())


def test_keepalives_fill_silence_and_no_frame_is_lost():
    async def run() -> None:
        come = asyncio.Event()
        client, source = Client(), Source(come, b"late")

        async def send(message: dict[str, Any]) -> None:
            await client.send(message)
            if client.bodies.count(KEEPALIVE) == 3:
                come.set()

        await stream(source, interval=0.01)({}, client.receive, send)
        assert client.bodies[:3] == [KEEPALIVE] * 3
        assert [body for body in client.bodies if body != KEEPALIVE] == [b"late", b""]

    asyncio.run(run())


def test_a_client_that_leaves_closes_the_source_at_once():
    async def run() -> None:
        client, source = Client(), Source(b"one", asyncio.Event())
        reply = asyncio.ensure_future(stream(source)({}, client.receive, client.send))
        while client.bodies != [b"one"]:
            client.got.clear()
            await client.got.wait()
        client.left.set()
        await reply
        assert client.bodies == [b"one"]
        assert (source.ended, source.closed) == (1, 1)

    asyncio.run(run())


def test_a_client_that_left_before_the_first_frame_still_closes_the_answers():
    async def run() -> None:
        client, source = Client(), Source(b"one")

        async def send(message: dict[str, Any]) -> None:
            raise OSError("gone")

        with pytest.raises(OSError, match="gone"):
            await stream(source)({}, client.receive, send)
        assert source.closed == 1

    asyncio.run(run())


def test_a_bug_in_the_source_ends_the_reply_and_closes_the_answers():
    async def run() -> None:
        client, source = Client(), Source(b"one", ZeroDivisionError())
        with pytest.raises(ZeroDivisionError):
            await stream(source)({}, client.receive, client.send)
        assert client.sent[-1]["more_body"] is True
        assert source.closed == 1

    asyncio.run(run())


def test_a_cancelled_reply_closes_the_answers():
    async def run() -> None:
        client, source = Client(), Source(asyncio.Event())
        reply = asyncio.ensure_future(stream(source)({}, client.receive, client.send))
        await client.got.wait()
        reply.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reply
        assert (source.ended, source.closed) == (1, 1)

    asyncio.run(run())
