import asyncio
import socket

import httpx
import pytest

from tests.tui import scripts
from tests.tui.fake_server import FakeServer
from tui.talk.client import ChatClient, Health, base_url
from tui.talk.errors import ChatError
from tui.talk.pieces import Began, Finish, Piece, TextPiece, ThinkingPiece, ToolPiece, UsagePiece
from tui.talk.served_model import ServedModel

QUESTION = [{"role": "user", "content": "why?"}]


def ask(url: str, *, api_key: str | None = None, model: str = "small") -> list[Piece]:
    async def run() -> list[Piece]:
        async with ChatClient(url, read_key=lambda: api_key) as client:
            return [piece async for piece in client.stream(QUESTION, model=model)]

    return asyncio.run(run())


def text_of(pieces: list[Piece]) -> str:
    return "".join(piece.text for piece in pieces if isinstance(piece, TextPiece))


def test_an_answer_arrives_in_pieces(server: FakeServer) -> None:
    server.script(scripts.think("hm"), scripts.say("Hel", "lo"))
    assert ask(server.url) == [
        Began("request-1"),
        *(ThinkingPiece("hm"), TextPiece("Hel"), TextPiece("lo"), Finish("stop")),
    ]


def test_the_request_has_the_format_of_the_api(server: FakeServer) -> None:
    ask(server.url, api_key="secret", model="large")
    assert server.requests == [
        {
            "model": "large",
            "messages": QUESTION,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ]
    assert server.headers[0]["authorization"] == "Bearer secret"


def test_usage_counts_cached_tokens(server: FakeServer) -> None:
    server.script(scripts.say("a"), scripts.usage(12, 2, cached=8))
    assert UsagePiece(12, 2, 8) in ask(server.url)


def test_usage_reports_where_and_why_the_prompt_was_not_cached(server: FakeServer) -> None:
    server.script(scripts.say("a"), scripts.usage(12, 2, 8, differs_at=9, reason="new_text"))
    assert UsagePiece(12, 2, 8, 9, "new_text") in ask(server.url)


def test_usage_of_another_server_may_lack_fields(server: FakeServer) -> None:
    server.script(scripts.event({"usage": {"prompt_tokens": 3, "completion_tokens": None}}))
    assert UsagePiece(3, None, None) in ask(server.url)


def test_a_tool_call_arrives_in_pieces(server: FakeServer) -> None:
    call = {"index": 1, "function": {"name": "look", "arguments": '{"a'}}
    server.script(scripts.chunk({"tool_calls": [call]}))
    assert ToolPiece(1, "look", '{"a') in ask(server.url)


@pytest.mark.parametrize(
    "content",
    [
        {"choices": None},
        {"choices": [None, 3, {"delta": None}]},
        {"choices": [{"delta": {"content": None, "tool_calls": "x", "reasoning_content": 3}}]},
        {"choices": [{"index": 1, "delta": {"content": "another choice"}}]},
        {"usage": "none"},
        [1, 2],
        "text",
    ],
)
def test_malformed_chunks_are_ignored(server: FakeServer, content: object) -> None:
    server.script(scripts.event(content), scripts.say("ok"))
    assert text_of(ask(server.url)) == "ok"


def test_events_that_are_not_json_are_ignored(server: FakeServer) -> None:
    junk = scripts.Send(b": ping\n\nevent: x\ndata: {nope\n\ndata: " + b"[" * 5_000 + b"\n\n")
    server.script(junk, scripts.say("ok"))
    assert text_of(ask(server.url)) == "ok"


def test_a_lone_surrogate_is_replaced(server: FakeServer) -> None:
    server.script(scripts.say("a\ud800b"))
    assert text_of(ask(server.url)) == "a\ufffdb"


@pytest.mark.parametrize(
    ("status", "advice"),
    [
        (400, "/edit"),
        (401, "MLXSERVE_API_KEY"),
        (404, "/model"),
        (413, "Shorten"),
        (429, "Ctrl+R"),
        (500, "Ctrl+R"),
        (503, "Ctrl+R"),
    ],
)
def test_an_error_status_gives_the_server_s_message_and_what_to_do(
    server: FakeServer, status: int, advice: str
) -> None:
    server.script(scripts.refuse(status, "this is\x1b[31m its message."))
    with pytest.raises(ChatError) as caught:
        ask(server.url)
    assert "this is␛[31m its message." in str(caught.value)
    assert advice in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("script", "reason", "words"),
    [
        ([scripts.Refuse(500, b"<html>oops")], None, r"failed \(HTTP 500\)\. Press"),
        (scripts.refuse(503, "loading"), None, "not ready yet: loading"),
        (
            [*scripts.say("half"), scripts.event({"error": {"message": "out of pages"}})],
            "stop",
            "out of pages",
        ),
        ([*scripts.say("half"), scripts.hang_up], None, r"before the answer was complete.*kept"),
    ],
)
def test_an_answer_that_fails_says_why(
    server: FakeServer, script: list[scripts.Step], reason: str | None, words: str
) -> None:
    server.script(script, reason=reason)
    with pytest.raises(ChatError, match=words):
        ask(server.url)


def test_an_unreachable_server_is_an_error_with_what_to_do() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(ChatError, match="mlxserve serve"):
            ask(url)


async def test_closing_the_stream_closes_the_connection(
    server: FakeServer, patience: float
) -> None:
    gate = scripts.Gate()
    server.script(scripts.say("one"), gate, scripts.say("two"))

    async with ChatClient(server.url) as client:
        stream = client.stream(QUESTION, model="small")
        assert await anext(stream) == Began("request-1")
        assert await anext(stream) == TextPiece("one")
        await stream.aclose()
    assert server.disconnects.acquire(timeout=patience)


async def test_models_are_listed(client: ChatClient) -> None:
    names = [ServedModel("small"), ServedModel("large")]
    assert await client.models() == names


async def test_our_server_says_how_long_its_context_is(
    server: FakeServer, client: ChatClient
) -> None:
    server.model_fields = {"owned_by": "mlxserve", "max_model_len": 4096}
    [model, _] = await client.models()
    assert model == ServedModel("small", 4096, is_ours=True)


@pytest.mark.parametrize(
    ("small", "listed"),
    [
        (["embedding", "rerank"], ["large"]),
        (["completion", "embedding"], ["small", "large"]),
        ([], ["small", "large"]),
    ],
)
async def test_models_that_only_embed_are_not_listed(
    server: FakeServer, client: ChatClient, small: list[str], listed: list[str]
) -> None:
    server.fields_of["small"] = {"capabilities": small}
    assert [one.name for one in await client.models()] == listed


async def test_an_answer_that_repeats_itself_is_stopped_where_the_server_can(
    server: FakeServer, client: ChatClient
) -> None:
    end = {"index": 0, "delta": {}, "finish_reason": "stop", "stop_reason": "repetition"}
    server.script(scripts.say("a a a"), scripts.event({"choices": [end]}), reason=None)

    stream = client.stream(QUESTION, model="small", stops_loops=True)
    assert [piece async for piece in stream][-1] == Finish("repetition")
    assert server.requests[0]["stop_on_repetition"] is True


async def test_health_distinguishes_loading_from_ready(
    server: FakeServer, client: ChatClient
) -> None:
    assert await client.health() == Health(is_ready=True)
    server.health = (503, {"status": "loading", "progress": 0.25})
    assert await client.health() == Health(is_ready=False, progress=0.25)
    server.health = (404, {})
    assert await client.health() == Health(is_ready=True)


async def test_a_server_whose_engine_died_is_an_error(
    server: FakeServer, client: ChatClient
) -> None:
    error = {"message": "The engine has stopped. Restart the server.", "code": "engine_stopped"}
    server.health = (503, {"error": error})
    with pytest.raises(ChatError, match="engine has stopped"):
        await client.health()


@pytest.mark.parametrize(
    ("status", "body", "is_ready"),
    [
        (200, {"error": "Unexpected endpoint or method. (GET /health)"}, True),  # LM Studio
        (404, {"error": {"message": "Invalid URL (GET /health)", "code": None}}, True),  # OpenAI
        (401, {"error": {"message": "No API key", "code": "no_key"}}, True),  # a gateway
        (405, {"detail": "Method Not Allowed"}, True),
        (200, {"status": "ok"}, True),  # llama-server
        (
            503,  # llama-server
            {"error": {"message": "Loading model", "type": "unavailable_error", "code": 503}},
            False,
        ),
    ],
)
async def test_another_server_s_reply_to_health_is_no_failure(
    server: FakeServer, client: ChatClient, status: int, body: dict[str, object], is_ready: bool
) -> None:
    server.health = (status, body)
    assert await client.health() == Health(is_ready)


def test_an_address_may_be_written_in_several_ways() -> None:
    for written in [
        *("localhost:8000", "http://localhost:8000", "http://localhost:8000/"),
        *("http://localhost:8000/v1", " http://localhost:8000/v1/ "),
    ]:
        assert base_url(written) == "http://localhost:8000", written


def test_an_address_keeps_its_path() -> None:
    assert base_url("https://h.example/api/v1") == "https://h.example/api"


@pytest.mark.parametrize("written", ["", "ftp://h", "http://", "file:///etc/passwd"])
def test_an_invalid_address_is_refused(written: str) -> None:
    with pytest.raises(ChatError, match="--url"):
        base_url(written)


def test_a_proxy_is_not_used_for_this_machine(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    assert text_of(ask(server.url)) == "Yes."


def test_errors_of_httpx_become_sentences(server: FakeServer) -> None:
    async def run() -> None:
        async with ChatClient(server.url, transport=httpx.MockTransport(broken)) as client:
            await anext(client.stream(QUESTION, model="small"))

    def broken(request: httpx.Request) -> httpx.Response:
        raise httpx.ReadError("boom", request=request)

    with pytest.raises(ChatError, match=r"connection to .* was lost"):
        asyncio.run(run())
