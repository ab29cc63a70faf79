import asyncio
import zlib
from typing import Any

import pytest

from mlxserve.api.errors import ApiError
from mlxserve.api.server.compression import GzipStream
from mlxserve.api.server.in_flight import InFlight
from mlxserve.api.server.sse import (
    KEEPALIVE,
    EventStream,
    Write,
    event,
    named_event,
    skipped_by,
)


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
    """Writes events, waiting and failing in between; counts how often it ended and was closed."""

    def __init__(self, *steps: bytes | asyncio.Event | BaseException) -> None:
        self.steps = steps
        self.ended = 0
        self.closed = 0

    async def produce(self, write: Write) -> None:
        try:
            for step in self.steps:
                if isinstance(step, asyncio.Event):
                    await step.wait()
                elif isinstance(step, BaseException):
                    raise step
                else:
                    await write(step)
        finally:
            self.ended += 1

    async def close(self) -> None:
        self.closed += 1


def stream(source: Source, interval: float = 10.0) -> EventStream:
    return EventStream(
        source.produce,
        close=source.close,
        failure=lambda error: event(error.message),
        interval=interval,
    )


def test_an_event_is_one_data_line() -> None:
    assert event({"a": "x\ny"}) == b'data: {"a":"x\\ny"}\n\n'


def test_a_named_event_has_its_data() -> None:
    assert named_event("ping", {"a": 1}) == b'event: ping\ndata: {"a":1}\n\n'


def test_events_are_sent_one_by_one_and_then_the_body_ends() -> None:
    async def run() -> None:
        client, source = Client(), Source(b"one", b"two")
        await stream(source)({}, client.receive, client.send)
        assert client.sent[0]["status"] == 200
        assert client.bodies == [b"one", b"two", b""]
        assert client.sent[-1]["more_body"] is False
        assert (source.ended, source.closed) == (1, 1)

    asyncio.run(run())


def test_an_empty_write_sends_nothing() -> None:
    """An empty chunk would end the body."""

    async def run() -> None:
        client, source = Client(), Source(b"", b"one", b"")
        await stream(source)({}, client.receive, client.send)
        assert client.bodies == [b"one", b""]

    asyncio.run(run())


def test_headers_are_sent_before_the_first_event_exists() -> None:
    async def run() -> None:
        client, source = Client(), Source(asyncio.Event())
        reply = asyncio.ensure_future(stream(source)({}, client.receive, client.send))
        await client.got.wait()
        assert [message["type"] for message in client.sent] == ["http.response.start"]
        client.left.set()
        await reply

    asyncio.run(run())


def test_keepalives_fill_silence_and_no_event_is_lost() -> None:
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


def test_a_request_that_has_to_end_is_closed_and_then_told_the_error() -> None:
    async def run() -> None:
        open_requests = InFlight()
        client, source = Client(), Source(b"one", asyncio.Event(), b"never")
        closed_before: list[int] = []

        async def send(message: dict[str, Any]) -> None:
            await client.send(message)
            closed_before.append(source.closed)

        with open_requests.entered("alice") as end, open_requests.entered("bob") as other:
            scope = {"mlxserve.end": end}
            reply = asyncio.ensure_future(stream(source)(scope, client.receive, send))
            while client.bodies != [b"one"]:
                client.got.clear()
                await client.got.wait()
            open_requests.end(ApiError(401, "Revoked."), "alice")
            await reply
            assert not other.done()
        assert client.bodies == [b"one", event("Revoked."), b""]
        assert closed_before == [0, 0, 1, 1]
        assert (source.ended, source.closed) == (1, 1)

    asyncio.run(run())


def test_a_client_that_disconnects_ends_the_source_at_once() -> None:
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


def test_a_client_that_is_gone_before_the_first_event_still_closes_the_answers() -> None:
    async def run() -> None:
        client, source = Client(), Source(b"one")

        async def send(message: dict[str, Any]) -> None:
            raise OSError("gone")

        with pytest.raises(OSError, match="gone"):
            await stream(source)({}, client.receive, send)
        assert source.closed == 1

    asyncio.run(run())


def test_a_bug_in_the_source_ends_the_reply_and_closes_the_answers() -> None:
    async def run() -> None:
        client, source = Client(), Source(b"one", ZeroDivisionError())
        with pytest.raises(ZeroDivisionError):
            await stream(source)({}, client.receive, client.send)
        assert client.sent[-1]["more_body"] is True
        assert source.closed == 1

    asyncio.run(run())


def test_a_cancelled_reply_closes_the_answers() -> None:
    async def run() -> None:
        client, source = Client(), Source(asyncio.Event())
        reply = asyncio.ensure_future(stream(source)({}, client.receive, client.send))
        await client.got.wait()
        reply.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reply
        assert (source.ended, source.closed) == (1, 1)

    asyncio.run(run())


def test_a_compressed_event_can_be_read_when_it_is_sent_whatever_comes_between() -> None:
    async def run() -> None:
        client, silence = Client(), asyncio.Event()
        source, scope = Source(b"one", silence, b"two"), dict[str, Any]()
        compressed = EventStream(
            source.produce,
            close=source.close,
            failure=lambda error: event(error.message),
            interval=0.01,
            gzip=GzipStream(),
        )
        running = asyncio.ensure_future(compressed(scope, client.receive, client.send))
        reader, texts = zlib.decompressobj(16 + zlib.MAX_WBITS), [b""]
        num_read = 0
        while not running.done():
            client.got.clear()
            for body in client.bodies[num_read:]:
                num_read += 1
                texts.append(reader.decompress(body))
                # What the connection writes to see whether its client is there.
                assert reader.eof or reader.decompress(skipped_by(scope)) == b""
            if KEEPALIVE in texts:
                silence.set()
            await asyncio.wait(
                {running, got := asyncio.ensure_future(client.got.wait())}, timeout=5
            )
            got.cancel()
        await running
        texts += [reader.decompress(body) for body in client.bodies[num_read:]]
        sent = [text for text in texts if text not in (b"", KEEPALIVE)]
        assert (sent, KEEPALIVE in texts, reader.eof) == ([b"one", b"two"], True, True)
        headers = dict(client.sent[0]["headers"])
        assert headers[b"content-encoding"] == b"gzip"

    asyncio.run(run())


def test_nothing_is_written_between_events_before_the_header_of_gzip() -> None:
    async def run() -> None:
        scope = dict[str, Any]()
        at_each_send: list[bytes] = []

        async def send(_message: Any) -> None:
            at_each_send.append(skipped_by(scope))

        source = Source(b"one")
        compressed = EventStream(
            source.produce, close=source.close, failure=lambda _: b"", gzip=GzipStream()
        )
        await compressed(scope, Client().receive, send)
        assert at_each_send[:2] == [b"", b""]
        assert set(at_each_send[2:]) == {GzipStream.skipped}

    asyncio.run(run())
