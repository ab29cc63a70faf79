from __future__ import annotations

import json
import socket
from typing import Any

import httpx2
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from mlxserve.api.anthropic.reply import SIGNATURE, MessageReply
from mlxserve.api.bodies.json_body import MAX_BODY_SIZE
from mlxserve.errors import EngineStopped, MlxServeError, OutOfMemory, PromptTooLong, QueueFull
from mlxserve.hub.embedded import model_path
from mlxserve.request import FinishReason
from mlxserve.sampling_params import StructureKind
from mlxserve.text.deltas import Delta, Usage
from mlxserve.text.parsing.turn import ToolCallDelta, ToolChoice
from mlxserve.text.tokenizer import Tokenizer
from tests.api.fake_chat import HOLD, FakeChat
from tests.api.serving import StartServer

MESSAGES = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
USER: dict[str, Any] = {"role": "user", "content": "Hi"}
HELLO: dict[str, Any] = {"model": "fake", "max_tokens": 10, "messages": [USER]}


def post(
    client: TestClient, path: str = MESSAGES, headers: dict[str, str] | None = None, **fields: Any
) -> httpx2.Response:
    body = {**HELLO, **fields}
    if path == COUNT:
        body.pop("max_tokens")
    return client.post(path, json=body, headers=headers or {})


def events_of(reply: httpx2.Response) -> list[dict[str, Any]]:
    assert reply.status_code == 200, reply.text
    events = []
    for frame in reply.text.split("\n\n")[:-1]:
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


def error_of(reply: httpx2.Response, status: int, kind: str) -> dict[str, Any]:
    assert reply.status_code == status, reply.text
    body = reply.json()
    assert set(body) == {"type", "error", "request_id"}
    assert body["type"] == "error"
    assert set(body["error"]) == {"type", "message"}
    assert body["error"]["type"] == kind
    assert body["request_id"] == reply.headers["request-id"] == reply.headers["x-request-id"]
    return body["error"]


def said(chat: FakeChat) -> list[dict[str, Any]]:
    return chat.rendered[-1].messages


# The reply.


def test_a_message_has_anthropics_format(client: TestClient) -> None:
    message = post(client).json()
    assert message["id"].startswith("msg_")
    assert (message["type"], message["role"], message["model"]) == ("message", "assistant", "fake")
    assert message["content"] == [{"type": "text", "text": "Hello"}]
    assert (message["stop_reason"], message["stop_sequence"]) == ("end_turn", None)
    assert message["usage"] == {
        "input_tokens": 1,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 1,
        "output_tokens": 2,
        "cache": None,
    }


def test_a_stream_has_anthropics_events_in_order(client: TestClient) -> None:
    events = events_of(post(client, stream=True))
    start = events[0]["message"]
    assert start["content"] == []
    assert (start["stop_reason"], start["usage"]["output_tokens"]) == (None, 0)
    assert events[1:] == [
        {
            "type": "content_block_start",
            "index": 0,
            "content_block": {"type": "text", "text": ""},
        },
        {"type": "ping"},
        {
            "type": "content_block_delta",
            "index": 0,
            "delta": {"type": "text_delta", "text": "Hel"},
        },
        {
            "type": "content_block_delta",
            "index": 0,
            "delta": {"type": "text_delta", "text": "lo"},
        },
        {"type": "content_block_stop", "index": 0},
        {
            "type": "message_delta",
            "delta": {"stop_reason": "end_turn", "stop_sequence": None},
            "usage": post(client).json()["usage"],
        },
        {"type": "message_stop"},
    ]


def test_the_start_of_a_stream_says_what_was_cached(client: TestClient, chat: FakeChat) -> None:
    usage = Usage(10, 1, 8)
    chat.script = [
        Delta("a", usage=usage),
        Delta("b", finish_reason=FinishReason.STOP, usage=Usage(10, 2, 8)),
    ]
    start, *_, end, _stop = events_of(post(client, stream=True))
    first = start["message"]["usage"]
    assert (first["input_tokens"], first["cache_read_input_tokens"]) == (2, 8)
    assert (first["output_tokens"], end["usage"]["output_tokens"]) == (1, 2)


def test_a_keepalive_is_a_ping_after_the_start_of_the_message() -> None:
    reply = MessageReply(id="msg_1", model="fake", num_prompt=7, max_tokens=5)
    first, again = reply.keepalive(), reply.keepalive()
    assert first.startswith(b"event: message_start\n")
    assert first.endswith(again)
    assert b'"input_tokens":7' in first
    assert again == b'event: ping\ndata: {"type":"ping"}\n\n'


def mixed_answer(chat: FakeChat) -> list[Any]:
    return [
        Delta(reasoning="I "),
        Delta(reasoning="think."),
        Delta("Let me"),
        Delta(" look.", tool_calls=(ToolCallDelta(0, "call_1", "look"),)),
        Delta(tool_calls=(ToolCallDelta(0, arguments='{"at":'),)),
        Delta(tool_calls=(ToolCallDelta(0, arguments=' "é"}'),)),
        Delta(
            tool_calls=(ToolCallDelta(1, "call_2", "wait"),),
            finish_reason=FinishReason.TOOL_CALLS,
            usage=Usage(4, 9, 0),
        ),
    ]


def test_thinking_text_and_calls_are_blocks_in_order(client: TestClient, chat: FakeChat) -> None:
    chat.script = mixed_answer(chat)
    message = post(client).json()
    assert message["stop_reason"] == "tool_use"
    assert message["content"] == [
        {"type": "thinking", "thinking": "I think.", "signature": SIGNATURE},
        {"type": "text", "text": "Let me look."},
        {"type": "tool_use", "id": "call_1", "name": "look", "input": {"at": "é"}},
        {"type": "tool_use", "id": "call_2", "name": "wait", "input": {}},
    ]


def test_each_block_of_a_stream_starts_and_stops_before_the_next(
    client: TestClient, chat: FakeChat
) -> None:
    chat.script = mixed_answer(chat)
    events = events_of(post(client, stream=True))
    kinds = [
        event.get("delta", {}).get("type", event["type"])
        for event in events
        if event["type"] != "ping"
    ]
    assert kinds == [
        "message_start",
        *("content_block_start", "thinking_delta", "thinking_delta", "signature_delta"),
        *("content_block_stop", "content_block_start", "text_delta", "text_delta"),
        *("content_block_stop", "content_block_start", "input_json_delta", "input_json_delta"),
        *("content_block_stop", "content_block_start", "content_block_stop"),
        *("message_delta", "message_stop"),
    ]
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


def test_omitted_thinking_is_an_empty_block(client: TestClient, chat: FakeChat) -> None:
    chat.script = mixed_answer(chat)
    thinking = {"type": "adaptive", "display": "omitted"}
    block = post(client, thinking=thinking).json()["content"][0]
    assert block == {"type": "thinking", "thinking": "", "signature": SIGNATURE}
    events = events_of(post(client, thinking=thinking, stream=True))
    assert not [e for e in events if e.get("delta", {}).get("type") == "thinking_delta"]


def folded(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message a client makes of a stream."""
    message = events[0]["message"]
    inputs: dict[int, str] = {}
    for event in events:
        index = event.get("index")
        match event["type"]:
            case "content_block_start":
                assert index == len(message["content"])
                message["content"].append(event["content_block"])
            case "content_block_delta":
                block, delta = message["content"][index], dict(event["delta"])
                kind = delta.pop("type")
                if kind == "input_json_delta":
                    inputs[index] = inputs.get(index, "") + delta["partial_json"]
                for name in delta.keys() - {"partial_json"}:
                    block[name] += delta[name]
            case "message_delta":
                message = {**message, **event["delta"], "usage": event["usage"]}
    for index, text in inputs.items():
        message["content"][index]["input"] = json.loads(text)
    return {**message, "id": None}


pieces = st.text(st.sampled_from("ab{}\n\u2028é🙂<"), max_size=5)


@settings(
    max_examples=30,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.lists(st.tuples(st.sampled_from(["text", "reasoning", "call"]), pieces), max_size=8))
def test_a_whole_message_equals_its_folded_stream(
    client: TestClient, chat: FakeChat, parts: Any
) -> None:
    script, calls = [], 0
    for kind, piece in parts:
        if kind == "call":
            arguments = json.dumps({"x": piece})
            script.append(Delta(tool_calls=(ToolCallDelta(calls, f"call_{calls}", "f"),)))
            cut = len(piece)
            script += [
                Delta(tool_calls=(ToolCallDelta(calls, arguments=part),))
                for part in (arguments[:cut], arguments[cut:])
            ]
            calls += 1
        else:
            script.append(Delta(**{kind: piece}))
    last = Delta(finish_reason=FinishReason.STOP, usage=Usage(3, 5, 1))
    chat.script = [*script, last]
    whole = post(client).json()
    assert folded(events_of(post(client, stream=True))) == {**whole, "id": None}
    assert "".join(b["text"] for b in whole["content"] if b["type"] == "text") == "".join(
        piece for kind, piece in parts if kind == "text"
    )


def test_a_truncated_call_returns_its_incomplete_input_as_text(
    client: TestClient, chat: FakeChat
) -> None:
    chat.script = [
        Delta(tool_calls=(ToolCallDelta(0, "call_1", "f", '{"a": "b'),)),
        Delta(finish_reason=FinishReason.LENGTH, usage=Usage(4, 10, 0)),
    ]
    message = post(client).json()
    assert message["content"][0]["input"] == {"INVALID_JSON": '{"a": "b'}
    assert message["stop_reason"] == "max_tokens"


@pytest.mark.parametrize(
    ("reason", "stop", "num_tokens", "expected"),
    [
        (FinishReason.STOP, None, 3, "end_turn"),
        (FinishReason.STOP, "END", 3, "stop_sequence"),
        (FinishReason.LENGTH, None, 10, "max_tokens"),
        (FinishReason.LENGTH, None, 9, "model_context_window_exceeded"),
        (FinishReason.TOOL_CALLS, None, 3, "tool_use"),
    ],
)
def test_each_finish_reason_has_its_stop_reason(
    client: TestClient,
    chat: FakeChat,
    reason: str,
    stop: str | None,
    num_tokens: int,
    expected: Any,
) -> None:
    usage = Usage(4, num_tokens, 0)
    chat.script = [Delta("x", finish_reason=reason, usage=usage, stop=stop)]
    message = post(client, stop_sequences=["END"]).json()
    assert (message["stop_reason"], message["stop_sequence"]) == (expected, stop)


def test_a_stopped_engine_ends_the_stream_with_an_error_event(
    client: TestClient, chat: FakeChat
) -> None:
    chat.script = [Delta("a"), EngineStopped("The engine has stopped.")]
    *_, last = events_of(post(client, stream=True))
    assert last["type"] == "error"
    assert last["error"]["type"] == "overloaded_error"
    error_of(post(client), 529, "overloaded_error")


# What is asked.


def test_sampling_parameters_reach_the_engine(client: TestClient, chat: FakeChat) -> None:
    post(client, temperature=0.5, top_p=0.9, top_k=7, stop_sequences=["a", "b"], seed=3)
    params = chat.submitted[-1].params
    assert (params.max_tokens, params.temperature, params.top_p) == (10, 0.5, 0.9)
    assert (params.top_k, params.stop, params.seed) == (7, ("a", "b"), 3)


def test_a_conversation_becomes_template_messages(client: TestClient, chat: FakeChat) -> None:
    post(
        client,
        system=[{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Be kind."}],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "Look"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                    {"type": "text", "text": "I will."},
                    {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": "é"}},
                    {"type": "tool_use", "id": "t2", "name": "wait", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": "A cat"},
                    {
                        "type": "tool_result",
                        "tool_use_id": "t2",
                        "is_error": True,
                        "content": [{"type": "text", "text": "no time"}],
                    },
                    {"type": "text", "text": "So?"},
                ],
            },
            {"role": "user", "content": "Go on"},
        ],
    )
    calls = [
        {"id": "t1", "type": "function", "function": {"name": "look", "arguments": '{"at": "é"}'}},
        {"id": "t2", "type": "function", "function": {"name": "wait", "arguments": "{}"}},
    ]
    assert said(chat) == [
        {"role": "system", "content": "Be brief.\n\nBe kind."},
        {"role": "user", "content": "Look"},
        {
            "role": "assistant",
            "content": "I will.",
            "reasoning_content": "Hm.",
            "tool_calls": calls,
        },
        {"role": "tool", "tool_call_id": "t1", "content": "A cat", "name": "look"},
        {"role": "tool", "tool_call_id": "t2", "content": "Error: no time", "name": "wait"},
        {"role": "user", "content": "So?\n\nGo on"},
    ]


BILLING = "x-anthropic-billing-header: cc_version=2.1; cc_entrypoint=cli; cch={};"


@pytest.mark.parametrize(
    "system",
    [
        [{"type": "text", "text": BILLING}, {"type": "text", "text": "Be brief."}],
        [{"type": "text", "text": BILLING + "\nBe brief."}],
        BILLING + "\n\nBe brief.",
    ],
)
def test_the_billing_line_of_claude_code_never_reaches_the_prompt(
    client: TestClient, chat: FakeChat, system: str
) -> None:
    prompts = []
    for request in ("a1b2", "c3d4"):
        post(client, system=json.loads(json.dumps(system).replace("{}", request)))
        prompts.append(chat.submitted[-1].prompt)
    assert said(chat)[0] == {"role": "system", "content": "Be brief."}
    assert prompts[0] == prompts[1]


def test_a_system_prompt_with_only_the_billing_line_is_dropped(
    client: TestClient, chat: FakeChat
) -> None:
    post(client, system=BILLING)
    assert said(chat) == [USER]


def test_a_text_document_is_read(client: TestClient, chat: FakeChat) -> None:
    source = {"type": "text", "media_type": "text/plain", "data": "Once."}
    block = {"type": "document", "source": source, "title": "Tale"}
    post(client, messages=[{"role": "user", "content": [block]}])
    assert said(chat)[0]["content"] == "Tale\n\nOnce."


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA"}}
PDF = {"type": "document", "source": {"type": "base64", "data": "AA"}}


@pytest.mark.parametrize(
    "block",
    [IMAGE, PDF, {"type": "tool_result", "tool_use_id": "t", "content": [IMAGE]}],
)
@pytest.mark.parametrize("path", [MESSAGES, COUNT])
def test_unreadable_blocks_are_refused_by_their_path(
    client: TestClient, path: str, block: dict[str, Any]
) -> None:
    content = [{"type": "text", "text": "What is this?"}, block]
    reply = post(client, path, messages=[{"role": "user", "content": content}])
    message = error_of(reply, 400, "invalid_request_error")["message"]
    assert message.startswith("messages[0].content[1]")


def test_the_refusal_of_an_image_says_why(client: TestClient) -> None:
    reply = post(client, messages=[{"role": "user", "content": [IMAGE]}])
    assert (
        "image blocks are not supported" in error_of(reply, 400, "invalid_request_error")["message"]
    )


def test_unknown_kinds_of_blocks_are_left_out_and_named(client: TestClient, chat: FakeChat) -> None:
    unknown = {"type": "mystery", "payload": {"a": 1}}
    content = [{"type": "text", "text": "Hi"}, unknown]
    result = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "tool_reference"}]}
    reply = post(client, messages=[{"role": "user", "content": [*content, result]}])
    assert reply.status_code == 200
    warning = reply.headers["x-mlxserve-warning"]
    assert "blocks of type mystery" in warning
    assert "blocks of type tool_reference" in warning
    assert said(chat)[0] == USER


def test_unknown_fields_are_named_but_not_cache_control(client: TestClient) -> None:
    mark = {"type": "ephemeral", "ttl": "1h"}
    block = {"type": "text", "text": "Hi", "cache_control": mark}
    reply = post(
        client,
        messages=[{"role": "user", "content": [block]}],
        system=[block],
        cache_control=mark,
        metadata={"user_id": "u"},
        context_management={"edits": []},
    )
    assert reply.headers["x-mlxserve-warning"] == "ignored unknown fields: context_management"


def test_unknown_betas_are_tolerated(client: TestClient, caplog: pytest.LogCaptureFixture) -> None:
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "a-2026,b-2027"}
    for _ in range(2):
        assert post(client, headers=headers).status_code == 200
    assert [r.getMessage() for r in caplog.records if "beta" in r.getMessage()] == [
        "Request fields without effect: the beta a-2026, the beta b-2027"
    ]


@pytest.mark.parametrize("version", ["2023-01-01", "latest", "2026-10-21\u00e9"])
def test_an_invalid_api_version_is_refused(client: TestClient, version: str) -> None:
    reply = post(client, headers={"anthropic-version": version.encode("latin-1")})
    assert "anthropic-version" in error_of(reply, 400, "invalid_request_error")["message"]


@pytest.mark.parametrize("version", ["2023-06-01", "2026-10-21", "2031-01-01"])
def test_every_api_version_since_the_first_is_accepted(client: TestClient, version: str) -> None:
    assert post(client, headers={"anthropic-version": version}).status_code == 200


@pytest.mark.parametrize("name", ["fake", "default", "claude-opus-4-5", "claude-3-haiku-20240307"])
def test_a_claude_name_means_the_served_model(client: TestClient, name: str) -> None:
    assert post(client, model=name).json()["model"] == "fake"
    assert post(client, COUNT, model=name).status_code == 200


def test_claude_names_are_only_known_to_anthropics_routes(client: TestClient) -> None:
    reply = client.post(
        "/v1/chat/completions", json={"model": "claude-opus-4-5", "messages": [USER]}
    )
    assert reply.status_code == 404


@pytest.mark.parametrize(
    ("thinking", "expected"),
    [
        (None, False),
        ({"type": "disabled"}, False),
        ({"type": "enabled", "budget_tokens": 1024}, True),
        ({"type": "adaptive"}, True),
    ],
)
def test_thinking_is_off_unless_requested(
    client: TestClient, chat: FakeChat, thinking: dict[str, Any] | None, expected: Any
) -> None:
    fields = {} if thinking is None else {"thinking": thinking}
    assert post(client, max_tokens=2_000, **fields).status_code == 200
    assert chat.rendered[-1].kwargs["enable_thinking"] is expected


TOOL: dict[str, Any] = {
    "name": "look",
    "description": "Looks.",
    "input_schema": {"type": "object", "properties": {"at": {"type": "string"}}},
    "cache_control": {"type": "ephemeral"},
}
DEFINITION = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks.",
        "parameters": TOOL["input_schema"],
    },
}


def test_tools_reach_the_template_and_the_answer_in_openais_format(
    client: TestClient, chat: FakeChat
) -> None:
    fields = {"tools": [TOOL], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
    assert post(client, **fields).status_code == 200
    assert chat.rendered[-1].tools == [DEFINITION]
    turn = chat.submitted[-1].turn
    assert (list(turn.tools), turn.tool_choice) == ([DEFINITION], ToolChoice.REQUIRED)
    assert turn.parallel_tool_calls is False
    post(client, COUNT, **fields)
    assert chat.rendered[-1].tools == [DEFINITION]


@pytest.mark.parametrize(
    ("choice", "mode", "name"),
    [
        (None, ToolChoice.AUTO, None),
        ({"type": "auto"}, ToolChoice.AUTO, None),
        ({"type": "none"}, ToolChoice.NONE, None),
        ({"type": "tool", "name": "look"}, ToolChoice.REQUIRED, "look"),
    ],
)
def test_tool_choice_reaches_the_answer(
    client: TestClient, chat: FakeChat, choice: dict[str, Any], mode: str, name: str
) -> None:
    post(client, tools=[TOOL], **({} if choice is None else {"tool_choice": choice}))
    turn = chat.submitted[-1].turn
    assert (turn.tool_choice, turn.tool_name) == (mode, name)


def test_an_unknown_tool_cannot_be_chosen(client: TestClient) -> None:
    reply = post(client, tools=[TOOL], tool_choice={"type": "tool", "name": "fly"})
    assert "'fly' is not among" in error_of(reply, 400, "invalid_request_error")["message"]


def test_server_tools_are_left_out_and_named(client: TestClient, chat: FakeChat) -> None:
    reply = post(client, tools=[TOOL, {"type": "web_search_20250305", "name": "web_search"}])
    assert "the tool web_search_20250305" in reply.headers["x-mlxserve-warning"]
    assert chat.rendered[-1].tools == [DEFINITION]


def test_a_thinking_budget_reaches_the_answer(client: TestClient, chat: FakeChat) -> None:
    post(client, max_tokens=2_000, thinking={"type": "enabled", "budget_tokens": 1_500})
    assert chat.submitted[-1].turn.thinking_budget == 1_500
    post(client)
    assert chat.submitted[-1].turn.thinking_budget == 0


def test_an_output_schema_reaches_the_engine(client: TestClient, chat: FakeChat) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "schema": schema}
    post(client, output_config={"format": form, "effort": "low"})
    structure = chat.submitted[-1].params.structure
    assert (structure.kind, json.loads(structure.source)) == (StructureKind.JSON_SCHEMA, schema)
    assert chat.rendered[-1].kwargs["reasoning_effort"] == "low"
    post(client)
    assert chat.submitted[-1].params.structure is None


def test_a_final_assistant_message_is_continued(client: TestClient, chat: FakeChat) -> None:
    begun = {"role": "assistant", "content": "The answer is ("}
    post(client, messages=[USER, begun])
    assert chat.rendered[-1].kwargs["add_generation_prompt"] is False
    assert chat.rendered[-1].kwargs["continue_final_message"] is True


@pytest.mark.parametrize("question", ["Hi", "<|im_start|>system", "{{ x }}"])
def test_the_prompt_ends_with_the_message_to_continue(
    client: TestClient, chat: FakeChat, tokenizer: Tokenizer, question: str
) -> None:
    chat.render = tokenizer.render
    begun = {"role": "assistant", "content": "The answer is ("}
    reply = post(client, messages=[{"role": "user", "content": question}, begun])
    assert reply.status_code == 200, reply.text
    text = tokenizer.decode(chat.submitted[-1].prompt)
    assert text.endswith("The answer is (")
    assert question in text


# Counting.

words = ["a", " word", "é", "\n", "<|im_start|>", "x" * 30]
text = st.lists(st.sampled_from(words), max_size=6).map("".join)
turns = st.lists(st.tuples(text, text), max_size=3)


@settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(system=text, turns=turns, last=text)
def test_count_tokens_equals_the_messages_input_tokens(
    client: TestClient,
    chat: FakeChat,
    tokenizer: Tokenizer,
    system: str,
    turns: list[tuple[str, str]],
    last: str,
) -> None:
    chat.render = tokenizer.render
    messages = [
        message
        for question, answer in turns
        for message in (
            {"role": "user", "content": question},
            {"role": "assistant", "content": [{"type": "text", "text": answer}]},
        )
    ]
    fields = {"system": system, "messages": [*messages, {"role": "user", "content": last}]}
    counted = post(client, COUNT, **fields).json()["input_tokens"]
    usage = post(client, **fields).json()["usage"]
    names = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    assert counted == sum(usage[name] for name in names)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(model_path())


# Refusals.


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        (
            {"messages": [{"role": "user", "content": [{"text": "x"}]}]},
            "messages[0].content[0].block.type",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages[0].content[0].text.text",
        ),
        (
            {
                "messages": [
                    USER,
                    {"role": "assistant", "content": [{"type": "thinking", "thinking": "x"}]},
                ]
            },
            "messages",
        ),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}],
                    }
                ]
            },
            "messages[0]",
        ),
        ({"system": [IMAGE]}, "system[0].type"),
        ({"temperature": -1}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"stop_sequences": [1]}, "stop_sequences[0]"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stop_sequences": ["x"] * 100}, "stop_sequences"),
        ({"thinking": {"type": "enabled"}}, "thinking"),
        ({"thinking": {"type": "enabled", "budget_tokens": 5}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
        ({"output_config": {"effort": "huge"}}, "output_config.effort"),
        ({"mcp_servers": [{"url": "http://x"}]}, "mcp_servers"),
        ({"container": "c"}, "container"),
    ],
)
def test_a_bad_value_is_refused_with_its_fields_name(
    client: TestClient, fields: dict[str, Any], place: str
) -> None:
    error = error_of(post(client, **fields), 400, "invalid_request_error")
    assert error["message"].startswith(f"{place}: "), error


def test_max_tokens_is_required_for_a_message_and_not_for_a_count(client: TestClient) -> None:
    body = {"model": "fake", "messages": [USER]}
    error = error_of(client.post(MESSAGES, json=body), 400, "invalid_request_error")
    assert error["message"] == "max_tokens: is required."
    assert client.post(COUNT, json=body).json() == {"input_tokens": 2}


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (QueueFull("The queue is full."), 529, "overloaded_error"),
        (EngineStopped("The engine has stopped."), 529, "overloaded_error"),
        (OutOfMemory("It does not fit."), 529, "overloaded_error"),
        (
            PromptTooLong("It is too long.", num_tokens=9, max_model_len=5),
            400,
            "invalid_request_error",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_an_error_of_the_engine_has_a_status_before_anything_is_sent(
    client: TestClient, chat: FakeChat, error: MlxServeError, status: int, kind: str, stream: bool
) -> None:
    chat.submit_error = error
    reply = post(client, stream=stream)
    assert error_of(reply, status, kind)["message"] == str(error)
    if isinstance(error, QueueFull):
        assert reply.headers["retry-after"] == "1"


def test_errors_of_every_kind_have_anthropics_format(client: TestClient) -> None:
    error_of(post(client, model="gpt-4"), 404, "not_found_error")
    error_of(client.get(MESSAGES), 405, "invalid_request_error")
    error_of(client.post(f"{MESSAGES}/batches"), 404, "not_found_error")
    error_of(client.post(MESSAGES, content=b"{}"), 415, "invalid_request_error")
    headers = {"content-type": "application/json"}
    error_of(client.post(MESSAGES, content=b"{", headers=headers), 400, "invalid_request_error")
    headers["content-length"] = str(MAX_BODY_SIZE + 1)
    error_of(client.post(MESSAGES, content=b"{}", headers=headers), 413, "request_too_large")
    error_of(post(client, headers={"host": "evil.example"}), 403, "permission_error")
    error_of(post(client, headers={"origin": "https://evil"}), 403, "permission_error")


def test_anthropics_clients_get_their_errors_on_other_routes_too(client: TestClient) -> None:
    headers = {"anthropic-version": "2023-06-01"}
    error_of(client.get("/v1/models/gpt-4", headers=headers), 404, "not_found_error")


def test_a_bug_is_a_500_in_anthropics_format(client: TestClient, chat: FakeChat) -> None:
    def fail(*_args: object, **_kwargs: object) -> None:
        raise ZeroDivisionError("secret detail")

    chat.render = fail
    assert "secret" not in error_of(post(client), 500, "api_error")["message"]


# Leaving.


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_hangs_up_aborts_its_message(
    start_server: StartServer, chat: FakeChat, stream: bool
) -> None:
    chat.script = [Delta("a"), HOLD]
    data = json.dumps({**HELLO, "stream": stream}).encode()
    head = f"POST {MESSAGES} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", start_server().port), timeout=20) as peer:
        peer.sendall(head.encode() + b"Content-Length: %d\r\n\r\n" % len(data) + data)
        assert chat.on_hold.wait(timeout=20)
    chat.wait_until_closed()
