from __future__ import annotations

import json
import re
from typing import Any

import pytest
from starlette.testclient import TestClient

from mlxserve.core.sampling_params import StructureKind
from mlxserve.request import FinishReason
from mlxserve.text.deltas import Delta, Usage
from mlxserve.text.parsing.turn import ToolChoice
from mlxserve.text.tokenizer import Tokenizer
from tests.api.anthropic.requests import COUNT, MESSAGES, USER, error_of, events_of, post
from tests.api.fake_chat import FakeChat


def said(chat: FakeChat) -> list[dict[str, Any]]:
    return chat.rendered[-1].messages


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
    system = said(chat)[0]
    assert system["role"] == "system"
    assert re.match(r"<document (\w+)>\nOnce\.\n</document \1>", system["content"])
    assert "is Tale." in system["content"]


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA"}}
PDF = {"type": "document", "source": {"type": "base64", "data": "AA"}}


@pytest.mark.parametrize(
    "block",
    [IMAGE, PDF, {"type": "file", "file_id": "f"}],
)
@pytest.mark.parametrize("path", [MESSAGES, COUNT])
def test_unreadable_blocks_are_refused_by_their_path(
    client: TestClient, path: str, block: dict[str, Any]
) -> None:
    content = [{"type": "text", "text": "What is this?"}, block]
    reply = post(client, path, messages=[{"role": "user", "content": content}])
    message = error_of(reply, 400, "invalid_request_error")["message"]
    assert message.startswith("messages[0].content[1]")


def test_unknown_kinds_of_blocks_are_left_out_and_named(client: TestClient, chat: FakeChat) -> None:
    unknown = {"type": "mystery", "payload": {"a": 1}}
    content = [{"type": "text", "text": "Hi"}, unknown]
    result = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "tool_reference"}]}
    reply = post(client, messages=[{"role": "user", "content": [*content, result]}])
    assert reply.status_code == 200
    warning = reply.headers["x-mlxserve-warning"]
    assert warning == "left out: mystery, tool_reference"
    assert said(chat)[0]["content"] == "Hi\n\n[mystery left out]"
    assert said(chat)[1]["content"] == "[tool_reference left out]"


def test_an_image_of_a_tool_and_of_an_earlier_turn_is_left_out(
    client: TestClient, chat: FakeChat
) -> None:
    """A refusal would end the session: the client sends it again with each request."""
    taken = {"type": "tool_result", "tool_use_id": "t1", "content": [IMAGE]}
    reply = post(
        client,
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "Look"}, IMAGE]},
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "t1", "name": "look", "input": {}}],
            },
            {"role": "user", "content": [taken]},
        ],
    )
    assert reply.status_code == 200
    assert reply.headers["x-mlxserve-warning"] == "left out: image"
    left_out = "[image left out: this model reads text only]"
    assert said(chat)[0]["content"] == f"Look\n\n{left_out}"
    assert said(chat)[2]["content"] == left_out


@pytest.mark.parametrize("display", ["summarized", "omitted"])
@pytest.mark.parametrize("stream", [False, True])
def test_thinking_comes_back_whether_it_was_shown_or_not(
    client: TestClient, chat: FakeChat, display: str, stream: bool
) -> None:
    chat.script = [
        Delta(reasoning="First é, "),
        Delta(reasoning="then 2."),
        Delta("Done", (1,), (), FinishReason.STOP, Usage(1, 1, 0)),
    ]
    reply = post(client, thinking={"type": "adaptive", "display": display}, stream=stream)
    if stream:
        events = events_of(reply)
        [signature] = [e["delta"]["signature"] for e in events if "signature" in e.get("delta", {})]
        block = {"type": "thinking", "thinking": "", "signature": signature}
    else:
        block = reply.json()["content"][0]
        assert block["thinking"] == ("" if display == "omitted" else "First é, then 2.")
    post(client, messages=[USER, {"role": "assistant", "content": [block]}, USER])
    assert said(chat)[1]["reasoning_content"] == "First é, then 2."


@pytest.mark.parametrize("signature", ["", "mlxserve", "EqQBCgIYAhIM1gbcDa9GJwZA", "mlxserve1.x"])
def test_the_signatures_of_others_are_ignored(
    client: TestClient, chat: FakeChat, signature: str
) -> None:
    block = {"type": "thinking", "thinking": "", "signature": signature}
    answer = {"role": "assistant", "content": [block, {"type": "text", "text": "Yes"}]}
    assert post(client, messages=[USER, answer, USER]).status_code == 200
    assert said(chat)[1] == {"role": "assistant", "content": "Yes"}


def test_a_late_system_message_stays_in_its_place(client: TestClient, chat: FakeChat) -> None:
    reminder = {"role": "system", "content": "# Environment"}
    assert post(client, system="Be brief.", messages=[USER, reminder]).status_code == 200
    assert [message["role"] for message in said(chat)] == ["system", "user", "system"]


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
    post(client, thinking={"type": "enabled", "budget_tokens": 5})  # Anthropic's begin at 1,024
    assert chat.submitted[-1].turn.thinking_budget == 5
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
            "messages[0].content[0].type",
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
        ({"top_k": -2}, "top_k"),
        ({"stop_sequences": [1]}, "stop_sequences"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stop_sequences": ["x"] * 100}, "stop_sequences"),
        ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
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
