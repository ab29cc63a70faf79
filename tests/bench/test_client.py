"""The measuring client records times, text, usage and errors of each answer."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from mlxserve.bench.client import LoadClient, TimedRequest, find_model

PIECES = ("w1", " w2", "", " w3")


class Server(BaseHTTPRequestHandler):
    """Answers every prompt with PIECES, and the prompt "fail" with an error."""

    asked: list[dict]

    def log_message(self, *_: object) -> None:
        """Silent."""

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self.reply(json.dumps({"data": [{"id": "scripted"}]}))
        else:
            self.reply('# HELP a a\na_total{k="1"} 2.0\na_total{k="2"} 3.0\na_total_x 9.0\n')

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body)
        if body["prompt"] == "fail":
            self.reply('{"error": {"message": "no"}}', 429)
            return
        events = [{"choices": [{"text": piece}]} for piece in PIECES]
        usage = {"prompt_tokens": 7, "completion_tokens": 3}
        usage["prompt_tokens_details"] = {"cached_tokens": 5}
        if body["prompt"] == "break":
            events = [*events[:1], {"error": {"message": "the engine stopped"}}]
        if body["prompt"] == "mumble":
            self.reply("data: no json\n\n")
            return
        lines = [json.dumps(event) for event in (*events, {"choices": [], "usage": usage})]
        self.reply(": comment\n\n" + "".join(f"data: {line}\n\n" for line in (*lines, "[DONE]")))

    def reply(self, text: str, status: int = 200) -> None:
        content = text.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@pytest.fixture
def url() -> Iterator[str]:
    Server.asked = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def asked(url: str) -> Callable[..., TimedRequest]:
    def ask(prompt: str) -> TimedRequest:
        async def run() -> TimedRequest:
            async with LoadClient(url + "/v1", "scripted") as client:
                request = await client.ask(prompt, 4, label="turn")
                assert client.requests == [request]
                return request

        return asyncio.run(run())

    return ask


def test_pieces_of_text_are_timed_and_usage_is_kept(asked: Callable[..., TimedRequest]) -> None:
    request = asked("w9 w9")
    assert (request.text, request.error, request.label) == ("w1 w2 w3", None, "turn")
    assert (request.num_prompt, request.num_cached, request.num_completion) == (7, 5, 3)
    assert len(request.times) == 3  # the empty piece does not count
    assert len(request.gaps) == 2
    assert 0 < request.ttft <= request.ended - request.started


def test_requests_are_greedy_streams_with_usage(
    asked: Callable[..., TimedRequest],
) -> None:
    asked("w9")
    assert Server.asked == [
        {
            "model": "scripted",
            "prompt": "w9",
            "max_tokens": 4,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ]


@pytest.mark.parametrize(
    ("prompt", "error"),
    [
        ("fail", '429: {"error": {"message": "no"}}'),
        ("break", "engine stopped"),
        ("mumble", "JSONDecodeError"),
    ],
)
def test_errors_are_measured_and_not_raised(
    asked: Callable[..., TimedRequest], prompt: str, error: str
) -> None:
    assert error in (asked(prompt).error or "")


def test_a_server_that_is_gone_is_an_error_of_its_requests() -> None:
    async def run() -> TimedRequest:
        async with LoadClient("http://127.0.0.1:9", "m") as client:
            return await client.ask("w1", 1)

    assert "ConnectError" in (asyncio.run(run()).error or "")


def test_a_server_that_is_gone_has_no_metrics() -> None:
    async def run() -> float:
        async with LoadClient("http://127.0.0.1:9", "m") as client:
            return await client.metric("a_total")

    assert math.isnan(asyncio.run(run()))


def test_a_metric_is_the_sum_over_its_labels(url: str) -> None:
    async def run() -> tuple[float, float, str]:
        async with LoadClient(url, "m") as client:
            known, unknown = await client.metric("a_total"), await client.metric("b")
        return known, unknown, await find_model(url)

    known, unknown, model = asyncio.run(run())
    assert known == 5
    assert unknown != unknown
    assert model == "scripted"
