"""A fault inside a server is an error that clients can read; the same server then answers right."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest

from mlxserve.build import build_text_model
from mlxserve.core.config import EngineConfig
from mlxserve.engine.engine import Engine
from mlxserve.model.runner import ModelRunner
from mlxserve.scheduler.scheduler import Scheduler
from mlxserve.text.stream_decoder import StreamDecoder
from mlxserve.text.tokenizer import Tokenizer
from tests.api.serving import Running, serving
from tests.reliability.faults import Fault, Point

_MESSAGES = [{"role": "user", "content": "Tell me a story of a boat."}]
_GREEDY: dict[str, Any] = {"model": "mlxserve-mini", "temperature": 0, "max_tokens": 16}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {**_GREEDY, "messages": _MESSAGES},
    "/v1/completions": {**_GREEDY, "prompt": "Once upon a time"},
    "/v1/messages": {**_GREEDY, "messages": _MESSAGES},
    "/v1/responses": {
        "model": "mlxserve-mini",
        "temperature": 0,
        "max_output_tokens": 16,
        "input": "Tell me a story of a boat.",
    },
}
# What a stream ends with: well, or with an error event of its dialect.
ENDS = {
    "/v1/chat/completions": (b"data: [DONE]", b'data: {"error":{'),
    "/v1/completions": (b"data: [DONE]", b'data: {"error":{'),
    "/v1/messages": (b"event: message_stop", b"event: error"),
    "/v1/responses": (b"event: response.incomplete", b"event: response.failed"),
}
POINTS = [
    Point(Engine, "step"),
    Point(ModelRunner, "launch"),
    Point(ModelRunner, "collect"),
    Point(Scheduler, "add"),
    Point(Scheduler, "schedule"),
    Point(Scheduler, "update"),
    Point(Tokenizer, "render"),
    Point(Tokenizer, "encode"),
    Point(StreamDecoder, "push"),
]


@dataclass
class Reply:
    path: str
    is_stream: bool
    status: int  # 0 where the connection broke
    body: bytes

    def has_readable_end(self) -> bool:
        """It is whole, or says in its dialect that it failed."""
        if self.status == 500:
            return bool(json.loads(self.body)["error"]["message"])
        if self.status != 200:
            return False
        return not self.is_stream or any(end in self.body for end in ENDS[self.path])


@dataclass
class Client:
    port: int

    def ask(self, path: str, *, is_stream: bool) -> Reply:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        body = json.dumps({**BODIES[path], "stream": is_stream})
        try:
            connection.request("POST", path, body, {"content-type": "application/json"})
            reply = connection.getresponse()
            return Reply(path, is_stream, reply.status, reply.read())
        except (http.client.HTTPException, ConnectionError) as error:
            return Reply(path, is_stream, 0, repr(error).encode())
        finally:
            connection.close()

    def ask_all(self) -> list[Reply]:
        """Every route, streaming and whole, at once."""
        with ThreadPoolExecutor(len(BODIES) * 2) as pool:
            asked = [
                pool.submit(self.ask, path, is_stream=is_stream)
                for path in BODIES
                for is_stream in (False, True)
            ]
            return [one.result() for one in asked]

    def texts(self) -> list[str]:
        """The answers of the routes, one after the other."""
        texts = []
        for path in BODIES:
            reply = self.ask(path, is_stream=False)
            assert reply.status == 200, reply
            texts.append(_text(path, json.loads(reply.body)))
        return texts


def _text(path: str, reply: dict[str, Any]) -> str:
    match path:
        case "/v1/chat/completions":
            return str(reply["choices"][0]["message"]["content"])
        case "/v1/completions":
            return str(reply["choices"][0]["text"])
        case "/v1/messages":
            return str(reply["content"][0]["text"])
    return str(reply["output"][-1]["content"][0]["text"])


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    config = EngineConfig().with_options(
        num_pages=64, page_size=16, max_engine_failures=1_000_000, disable_log_stats=True
    )
    with serving(build_text_model(config)) as running:
        yield running


@pytest.fixture(scope="module")
def wanted(server: Running) -> list[str]:
    return Client(server.port).texts()


@pytest.mark.slow
@pytest.mark.parametrize("at", [0, pytest.param(4, marks=pytest.mark.long)])
@pytest.mark.parametrize("point", POINTS, ids=str)
def test_a_fault_is_an_error_of_the_dialect_and_the_next_answers_are_right(
    server: Running, wanted: list[str], point: Point, at: int
) -> None:
    client = Client(server.port)
    with Fault(point, lambda: RuntimeError("planted"), at).planted():
        replies = client.ask_all()
    unreadable = [reply for reply in replies if not reply.has_readable_end()]
    assert unreadable == []
    assert not any(b"planted" in reply.body for reply in replies), "details stay in the log"
    assert client.texts() == wanted


@pytest.mark.slow
@pytest.mark.parametrize("point", [Point(StreamDecoder, "push"), Point(ModelRunner, "collect")])
@pytest.mark.parametrize("path", BODIES)
def test_a_stream_under_way_ends_with_an_error_event(
    server: Running, wanted: list[str], path: str, point: Point
) -> None:
    client = Client(server.port)
    fault = Fault(point, lambda: RuntimeError("planted"), at=4)
    with fault.planted():
        reply = client.ask(path, is_stream=True)
    assert fault.has_happened
    assert reply.status == 200
    assert ENDS[path][1] in reply.body
    assert client.texts() == wanted


@contextmanager
def a_broken_write(at: int, error: type[Exception]) -> Iterator[None]:
    """Raise in place of the `at`-th write of a server's socket; clients use `sendall`."""
    real, num_writes = socket.socket.send, 0

    def failing(self: socket.socket, data: Any, *flags: int) -> int:
        nonlocal num_writes
        if len(data) > 1:  # an event loop wakes itself with single bytes
            num_writes += 1
            if num_writes == at + 1:
                raise error("planted")
        return real(self, data, *flags)

    with patch.object(socket.socket, "send", failing):
        yield


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "at"), [(BrokenPipeError, 0), (OSError, 3), (MemoryError, 20), (BrokenPipeError, 3)]
)
def test_a_write_that_fails_breaks_one_connection_only(
    server: Running, wanted: list[str], error: type[Exception], at: int
) -> None:
    client = Client(server.port)
    with a_broken_write(at, error):
        replies = client.ask_all()
    assert sum(not reply.has_readable_end() for reply in replies) <= 1
    assert client.texts() == wanted
    assert client.ask("/v1/completions", is_stream=True).has_readable_end()
