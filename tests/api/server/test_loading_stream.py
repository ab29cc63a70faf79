"""A stream that begins while its model is being loaded."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from starlette.types import Message

from mlxserve.api.errors import ApiError, error_response
from mlxserve.api.server.loading_stream import LoadingStream
from mlxserve.api.server.sse import KEEPALIVE
from tests.waiting import until

START = {"type": "http.response.start", "status": 200, "headers": []}


class Client:
    def __init__(self, path: str = "/v1/chat/completions", interval: float = 0.0) -> None:
        self.scope: dict[str, Any] = {"type": "http", "path": path, "headers": []}
        self.messages: list[Message] = []
        self.stream = LoadingStream(self.scope, self._receive, interval)

    async def _receive(self, message: Message) -> None:
        self.messages.append(message)

    @property
    def body(self) -> bytes:
        return b"".join(one.get("body", b"") for one in self.messages)

    async def wait_for(self, num_comments: int) -> str:
        """Work that takes so many intervals."""
        await until(lambda: self.body.count(KEEPALIVE) >= num_comments)
        return "done"


def test_what_is_quick_is_passed_on_as_it_is() -> None:
    client = Client(interval=60.0)

    async def go() -> None:
        assert await client.stream.during(client.wait_for(0)) == "done"
        await client.stream.send(START)

    asyncio.run(go())
    assert client.messages == [START]
    assert not client.stream.has_begun


def test_a_comment_is_sent_for_each_interval_and_the_reply_has_one_beginning() -> None:
    client = Client()

    async def go() -> None:
        assert await client.stream.during(client.wait_for(3)) == "done"
        await client.stream.send(START)
        await client.stream.send({"type": "http.response.body", "body": b"data: 1\n\n"})

    asyncio.run(go())
    kinds = [one["type"] for one in client.messages]
    assert kinds.count("http.response.start") == 1
    assert (b"content-type", b"text/event-stream; charset=utf-8") in client.messages[0]["headers"]
    assert client.body.endswith(KEEPALIVE + b"data: 1\n\n")


def refused(path: str) -> bytes:
    client = Client(path)

    async def go() -> None:
        await client.stream.during(client.wait_for(1))
        refusal = error_response(ApiError(503, "no room", code="queue_full"))
        await refusal(client.scope, None, client.stream.send)  # type: ignore[arg-type]

    asyncio.run(go())
    assert client.messages[0]["status"] == 200
    assert not client.messages[-1].get("more_body", False)
    return client.body.rpartition(KEEPALIVE)[2]


def test_a_refusal_is_the_last_event_in_the_dialect_of_the_route() -> None:
    of_openai = refused("/v1/chat/completions")
    assert json.loads(of_openai.removeprefix(b"data: "))["error"]["message"] == "no room"
    name, data, *_ = refused("/v1/messages").split(b"\n")
    assert name == b"event: error"
    assert json.loads(data.removeprefix(b"data: "))["error"]["type"] == "overloaded_error"
