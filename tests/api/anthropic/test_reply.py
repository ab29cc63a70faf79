from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from mlxserve.api.anthropic.reply import MessageReply
from mlxserve.core.errors import EngineStopped
from mlxserve.request import FinishReason
from mlxserve.text.deltas import Delta, Usage
from mlxserve.text.parsing.turn import ToolCallDelta
from mlxserve.text.signature import sign
from tests.api.anthropic.requests import error_of, events_of, post
from tests.api.fake_chat import FakeChat

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
        {"type": "thinking", "thinking": "I think.", "signature": sign("I think.")},
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
        *("content_block_stop", "content_block_start", "input_json_delta"),
        *("content_block_stop", "content_block_start", "content_block_stop"),
        *("message_delta", "message_stop"),
    ]
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


def test_omitted_thinking_is_an_empty_block(client: TestClient, chat: FakeChat) -> None:
    chat.script = mixed_answer(chat)
    thinking = {"type": "adaptive", "display": "omitted"}
    block = post(client, thinking=thinking).json()["content"][0]
    assert block == {"type": "thinking", "thinking": "", "signature": sign("I think.")}
    events = events_of(post(client, thinking=thinking, stream=True))
    assert not [e for e in events if e.get("delta", {}).get("type") == "thinking_delta"]


def folded(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message as a client assembles it from a stream."""
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
    streamed = folded(events_of(post(client, stream=True)))
    assert streamed["content"] == message["content"]


@pytest.mark.parametrize(
    ("reason", "stop", "num_tokens", "expected"),
    [
        (FinishReason.STOP, None, 3, "end_turn"),
        (FinishReason.STOP, "END", 3, "stop_sequence"),
        (FinishReason.LENGTH, None, 10, "max_tokens"),
        (FinishReason.LENGTH, None, 9, "model_context_window_exceeded"),
        (FinishReason.TOOL_CALLS, None, 3, "tool_use"),
        (FinishReason.REPETITION, None, 3, "end_turn"),
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
