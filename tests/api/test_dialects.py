"""Four dialects, one behaviour: a table of scenarios, each asked in every dialect.

What only one dialect has is tested in its own folder.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import httpx2
import pytest
from starlette.testclient import TestClient

from mlxserve.core.errors import (
    EngineStopped,
    InvalidRequest,
    MlxServeError,
    OutOfMemory,
    QueueFull,
)
from mlxserve.request import BACKGROUND, FinishReason
from mlxserve.text.deltas import Delta, Usage
from mlxserve.text.parsing.turn import ToolCallDelta
from tests.api.fake_chat import FakeChat
from tests.api.ollama.requests import PIXEL

Json = dict[str, Any]
USAGE = Usage(2, 2, 0)
NO_LIMIT = 2**31 - 1
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}}
FUNCTION = {"name": "read", "description": "Reads.", "parameters": SCHEMA}
IMAGE_URL = f"data:image/png;base64,{PIXEL}"
LEFT_OUT = "[image left out: this model reads text only]"


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """How a request is written in a dialect, and where its reply has what was answered.

    error: the message of a refusal, whose shape is checked
    asks: fields of a request that mean the same in every dialect, by name
    """

    path: str
    body: Json
    messages: str
    whole: Json
    stream: Json
    text: Callable[[Json], str]
    reason: Callable[[Json], object]
    events: Callable[[str], list[Any]]
    piece: Callable[[Any], str]
    error: Callable[[httpx2.Response], str]
    last_error: Callable[[Any], str]
    calls: Callable[[Json], list[tuple[str, Json]]]
    image: Callable[[str], Json]
    asks: Mapping[str, Json]
    reasons: Mapping[str, object]
    unavailable: int = 503

    def ask(self, client: TestClient, *messages: Json, **fields: Any) -> httpx2.Response:
        sent = {self.messages: list(messages) or [user("Hi")]}
        return client.post(self.path, json={**self.body, **self.whole, **sent, **fields})

    def answer(self, client: TestClient, *messages: Json, **fields: Any) -> Json:
        reply = self.ask(client, *messages, **fields)
        assert reply.status_code == 200, reply.text
        body: Json = reply.json()
        return body


def user(content: Any) -> Json:
    return {"role": "user", "content": content}


# ---- where each dialect has it


def frames(text: str) -> list[Any]:
    """The data of server-sent events."""
    lines = [line for line in text.splitlines() if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def openais_error(reply: httpx2.Response) -> str:
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return str(error["message"])


def anthropics_error(reply: httpx2.Response) -> str:
    body = reply.json()
    assert (set(body), body["type"]) == ({"type", "error", "request_id"}, "error")
    return str(body["error"]["message"])


def ollamas_error(reply: httpx2.Response) -> str:
    body = reply.json()
    assert list(body) == ["error"]
    return str(body["error"])


def chat_calls(body: Json) -> list[tuple[str, Json]]:
    calls = [call["function"] for call in body["choices"][0]["message"]["tool_calls"]]
    return [(call["name"], json.loads(call["arguments"])) for call in calls]


def response_calls(body: Json) -> list[tuple[str, Json]]:
    calls = [item for item in body["output"] if item["type"] == "function_call"]
    return [(call["name"], json.loads(call["arguments"])) for call in calls]


def message_calls(body: Json) -> list[tuple[str, Json]]:
    calls = [block for block in body["content"] if block["type"] == "tool_use"]
    return [(call["name"], call["input"]) for call in calls]


def ollama_calls(body: Json) -> list[tuple[str, Json]]:
    calls = [call["function"] for call in body["message"]["tool_calls"]]
    return [(call["name"], call["arguments"]) for call in calls]


def in_part(kind: str, image: Json) -> Callable[[str], Json]:
    """A message with a text and an image as parts of its content."""
    return lambda text: user([{"type": kind, "text": text}, image])


DIALECTS = {
    "chat": Dialect(
        path="/v1/chat/completions",
        body={},
        messages="messages",
        whole={},
        stream={"stream": True},
        text=lambda body: body["choices"][0]["message"]["content"],
        reason=lambda body: body["choices"][0]["finish_reason"],
        events=frames,
        piece=lambda event: event["choices"][0]["delta"].get("content") or "",
        error=openais_error,
        last_error=lambda event: event["error"]["message"],
        calls=chat_calls,
        image=in_part("text", {"type": "image_url", "image_url": {"url": IMAGE_URL}}),
        asks={
            "no limit": {"max_tokens": -1, "top_k": -1},
            "stop": {"stop": ["a", "b"]},
            "tools": {"tools": [{"type": "function", "function": FUNCTION}]},
            "continue": {"continue_final_message": True},
        },
        reasons={"stop": "stop", "stop string": "stop", "length": "length", "tools": "tool_calls"},
    ),
    "responses": Dialect(
        path="/v1/responses",
        body={},
        messages="input",
        whole={},
        stream={"stream": True},
        text=lambda body: body["output"][0]["content"][0]["text"],
        reason=lambda body: (body["status"], (body["incomplete_details"] or {}).get("reason")),
        events=frames,
        piece=lambda event: event["delta"] if event["type"].endswith("text.delta") else "",
        error=openais_error,
        last_error=lambda event: event["response"]["error"]["message"],
        calls=response_calls,
        image=in_part("input_text", {"type": "input_image", "image_url": IMAGE_URL}),
        asks={
            "no limit": {"max_output_tokens": -1, "top_k": -1},
            "stop": {"stop": ["a", "b"]},
            "tools": {"tools": [{"type": "function", **FUNCTION}]},
        },
        reasons={
            "stop": ("completed", None),
            "stop string": ("completed", None),
            "length": ("incomplete", "max_output_tokens"),
            "tools": ("completed", None),
        },
    ),
    "messages": Dialect(
        path="/v1/messages",
        body={"model": "fake", "max_tokens": 10},
        messages="messages",
        whole={},
        stream={"stream": True},
        text=lambda body: body["content"][0]["text"],
        reason=lambda body: body["stop_reason"],
        events=frames,
        piece=lambda event: event.get("delta", {}).get("text", ""),
        error=anthropics_error,
        last_error=lambda event: event["error"]["message"],
        calls=message_calls,
        image=in_part(
            "text",
            {
                "type": "image",
                "source": {"type": "base64", "media_type": "image/png", "data": PIXEL},
            },
        ),
        asks={
            "no limit": {"max_tokens": -1, "top_k": -1},
            "stop": {"stop_sequences": ["a", "b"]},
            "tools": {"tools": [{"name": "read", "description": "Reads.", "input_schema": SCHEMA}]},
            "continue": {},
        },
        reasons={
            "stop": "end_turn",
            "stop string": "stop_sequence",
            "length": "max_tokens",
            "tools": "tool_use",
        },
        unavailable=529,
    ),
    "ollama": Dialect(
        path="/api/chat",
        body={"model": "fake"},
        messages="messages",
        whole={"stream": False},
        stream={"stream": True},
        text=lambda body: body["message"]["content"],
        reason=lambda body: body["done_reason"],
        events=lambda text: [json.loads(line) for line in text.splitlines()],
        piece=lambda event: event["message"]["content"],
        error=ollamas_error,
        last_error=lambda event: event["error"] if list(event) == ["error"] else "",
        calls=ollama_calls,
        image=lambda text: {**user(text), "images": [PIXEL]},
        asks={
            "no limit": {"options": {"num_predict": -1, "top_k": -1}},
            "stop": {"options": {"stop": ["a", "b"]}},
            "tools": {"tools": [{"type": "function", "function": FUNCTION}]},
            "continue": {},
        },
        reasons={"stop": "stop", "stop string": "stop", "length": "length", "tools": "stop"},
    ),
}
each = pytest.mark.parametrize("dialect", DIALECTS.values(), ids=DIALECTS)


def asked(name: str) -> pytest.MarkDecorator:
    """Every dialect that has it."""
    having = {key: dialect for key, dialect in DIALECTS.items() if name in dialect.asks}
    return pytest.mark.parametrize("dialect", having.values(), ids=having)


# ---- answers


@each
def test_a_stream_adds_up_to_the_whole_answer(
    client: TestClient, chat: FakeChat, dialect: Dialect
) -> None:
    assert dialect.text(dialect.answer(client)) == "Hello"
    streamed = dialect.events(dialect.ask(client, **dialect.stream).text)
    assert "".join(map(dialect.piece, streamed)) == "Hello"
    assert [answer.is_closed for answer in chat.answers] == [True, True]


@each
@pytest.mark.parametrize(
    ("reason", "end"),
    [
        ("stop", {"finish_reason": FinishReason.STOP}),
        ("stop string", {"finish_reason": FinishReason.STOP, "stop": "b"}),
        ("length", {"finish_reason": FinishReason.LENGTH}),
    ],
)
def test_an_answer_says_why_it_ended(
    client: TestClient, chat: FakeChat, dialect: Dialect, reason: str, end: Json
) -> None:
    chat.script = [Delta("a", (1,), usage=Usage(2, 10, 0), **end)]
    assert dialect.reason(dialect.answer(client, **dialect.asks["stop"])) == dialect.reasons[reason]


@each
def test_stop_strings_reach_the_engine(
    client: TestClient, chat: FakeChat, dialect: Dialect
) -> None:
    dialect.answer(client, **dialect.asks["stop"])
    assert chat.submitted[0].params.stop == ("a", "b")


@each
def test_minus_one_is_no_limit(client: TestClient, chat: FakeChat, dialect: Dialect) -> None:
    dialect.answer(client, **dialect.asks["no limit"])
    params = chat.submitted[0].params
    assert (params.max_tokens, params.top_k) == (NO_LIMIT, 0)


@each
def test_tools_reach_the_template_and_calls_the_client(
    client: TestClient, chat: FakeChat, dialect: Dialect
) -> None:
    chat.script = [
        Delta(token_ids=(1,), tool_calls=(ToolCallDelta(0, "call_a", "read", '{"path": '),)),
        Delta(token_ids=(2,), tool_calls=(ToolCallDelta(0, arguments='"ä"}'),)),
        Delta("", (3,), (), FinishReason.TOOL_CALLS, USAGE),
    ]
    body = dialect.answer(client, **dialect.asks["tools"])
    assert dialect.calls(body) == [("read", {"path": "ä"})]
    assert dialect.reason(body) == dialect.reasons["tools"]
    [tool] = chat.rendered[0].tools
    assert tool["function"] == FUNCTION


@asked("continue")
def test_a_final_answer_is_continued(client: TestClient, chat: FakeChat, dialect: Dialect) -> None:
    begun = {"role": "assistant", "content": "The answer is ("}
    dialect.answer(client, user("Hi"), begun, **dialect.asks["continue"])
    wanted = {"add_generation_prompt": False, "continue_final_message": True}
    assert wanted.items() <= chat.rendered[0].kwargs.items()


@each
def test_an_image_is_refused_in_the_newest_message_and_left_out_of_an_earlier_one(
    client: TestClient, chat: FakeChat, dialect: Dialect
) -> None:
    """A refusal of an earlier one would end the session: it is sent again with each request."""
    image = dialect.image("What?")
    newest = dialect.ask(client, user("Hi"), image)
    assert newest.status_code == 400
    assert "parts are not supported: this model reads text only" in dialect.error(newest)
    assert f"{dialect.messages}[1]" in dialect.error(newest)
    later = dialect.ask(client, image, {"role": "assistant", "content": "A dot."}, user("And?"))
    assert later.status_code == 200
    assert later.headers["x-mlxserve-warning"].startswith("left out: ")
    first = chat.rendered[-1].messages[0]["content"]
    assert LEFT_OUT in first
    assert "What?" in first


@each
def test_background_is_a_priority(client: TestClient, chat: FakeChat, dialect: Dialect) -> None:
    def prioritised(name: str) -> Json:
        fields = {"priority": name}
        return {"options": fields} if dialect.path.startswith("/api/") else fields

    dialect.answer(client, **prioritised("background"))
    assert chat.submitted[0].priority == BACKGROUND
    refused = dialect.ask(client, **prioritised("urgent"))
    assert refused.status_code == 400
    assert "priority" in dialect.error(refused)


def chat_tokens(body: Json) -> list[Json]:
    found: list[Json] = body["choices"][0]["logprobs"]["content"]
    return found


@pytest.mark.parametrize(
    ("name", "tokens"),
    [("chat", chat_tokens), ("ollama", lambda body: body["logprobs"])],
)
def test_log_probabilities_are_of_tokens_with_their_alternatives(
    client: TestClient, chat: FakeChat, name: str, tokens: Callable[[Json], list[Json]]
) -> None:
    body = DIALECTS[name].answer(client, logprobs=True, top_logprobs=2)
    found = [(token["token"], token["logprob"]) for token in tokens(body)]
    assert found == [("H", -0.5), ("l", -0.25)]
    alternatives = [(one["token"], one["logprob"]) for one in tokens(body)[0]["top_logprobs"]]
    assert alternatives == [("H", -0.5), ("J", -1.5)]
    assert chat.submitted[0].params.logprobs == 2


@pytest.mark.parametrize(
    ("name", "fields", "warning"),
    [
        ("responses", {"n": 2}, None),
        ("responses", {"top_logprobs": 2}, None),
        ("messages", {"n": 2}, "n"),
        ("messages", {"top_logprobs": 2}, "top_logprobs"),
        ("ollama", {"options": {"n": 2}}, "options.n"),
    ],
)
def test_what_a_dialect_lacks_is_refused_or_named(
    client: TestClient, name: str, fields: Json, warning: str | None
) -> None:
    """Refused where its specification has the field, and else ignored with a warning."""
    reply = DIALECTS[name].ask(client, **fields)
    if warning is None:
        assert reply.status_code == 400
        assert "not supported" in DIALECTS[name].error(reply)
    else:
        assert reply.status_code == 200
        assert reply.headers["x-mlxserve-warning"] == f"ignored unknown fields: {warning}"


# ---- fields and names


@each
def test_unknown_fields_are_named(client: TestClient, dialect: Dialect) -> None:
    assert "x-mlxserve-warning" not in dialect.ask(client).headers
    for fields in (dialect.whole, dialect.stream):
        reply = dialect.ask(client, **fields, mood=1)
        assert reply.status_code == 200
        assert reply.headers["x-mlxserve-warning"] == "ignored unknown fields: mood"


@each
def test_another_model_is_not_found_where_names_are_strict(
    strict_client: TestClient, dialect: Dialect
) -> None:
    reply = dialect.ask(strict_client, model="gpt-4")
    assert reply.status_code == 404
    assert "gpt-4" in dialect.error(reply)


# ---- errors


@each
@pytest.mark.parametrize("way", ["whole", "stream"])
@pytest.mark.parametrize(
    ("error", "status"),
    [
        (InvalidRequest("It is wrong."), 400),
        (QueueFull("The queue is full."), None),
        (EngineStopped("The engine has stopped."), None),
        (OutOfMemory("It does not fit."), None),
        (MlxServeError("It has failed."), 500),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_an_error_of_the_engine_has_a_status_before_anything_is_sent(
    client: TestClient,
    chat: FakeChat,
    dialect: Dialect,
    error: MlxServeError,
    status: int | None,
    way: str,
) -> None:
    chat.submit_error = error
    reply = dialect.ask(client, **getattr(dialect, way))
    assert reply.status_code == (status or dialect.unavailable)
    assert str(error) in dialect.error(reply)
    assert reply.headers.get("retry-after") == ("1" if isinstance(error, QueueFull) else None)


@each
def test_a_prompt_beyond_the_context_leaves_nothing_running(
    client: TestClient, chat: FakeChat, dialect: Dialect
) -> None:
    reply = dialect.ask(client, user("x" * 2_000))
    assert reply.status_code == 400
    assert "2000 tokens" in dialect.error(reply)
    assert all(answer.is_closed for answer in chat.answers)


@each
@pytest.mark.parametrize(
    "failure",
    [
        EngineStopped("The engine has stopped."),
        Delta("", (), (), FinishReason.ABORT, USAGE),
    ],
    ids=["stopped", "aborted"],
)
def test_an_answer_that_is_lost_ends_with_an_error(
    client: TestClient, chat: FakeChat, dialect: Dialect, failure: Any
) -> None:
    chat.script = [Delta("Hel", (72,)), failure]
    *_, last = dialect.events(dialect.ask(client, **dialect.stream).text)
    said = dialect.last_error(last)
    assert said
    whole = dialect.ask(client)
    assert whole.status_code == dialect.unavailable
    assert dialect.error(whole) == said
    assert [answer.is_closed for answer in chat.answers] == [True, True]
