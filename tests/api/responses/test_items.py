from __future__ import annotations

from typing import Any

import pytest
from starlette.testclient import TestClient

from mlxserve.api.bodies.tools import MAX_TOOLS
from mlxserve.request import FinishReason
from mlxserve.text.deltas import Delta, Usage
from mlxserve.text.parsing.turn import ToolCallDelta
from tests.api.fake_chat import FakeChat
from tests.api.responses.requests import HELLO, PATH, ask, events, said

# Reasoning and calls.

TOOLS = [
    {"type": "function", "name": "look", "description": "d", "parameters": {"type": "object"}},
    {"type": "custom", "name": "patch", "description": "p"},
    {"type": "web_search"},
]


def thinking_and_calling(chat: FakeChat) -> list[Any]:
    return [
        Delta(reasoning="Hm"),
        Delta("I look.", reasoning="."),
        Delta(tool_calls=(ToolCallDelta(0, "call_a", "look"),)),
        Delta(tool_calls=(ToolCallDelta(0, arguments='{"at":'),)),
        Delta(
            tool_calls=(
                ToolCallDelta(0, arguments="1}"),
                ToolCallDelta(1, "call_b", "patch", '{"input": "a\\n'),
            )
        ),
        Delta(
            tool_calls=(ToolCallDelta(1, arguments='b"}'),),
            finish_reason=FinishReason.TOOL_CALLS,
            usage=Usage(3, 9, 0, reasoning_tokens=2),
        ),
    ]


def test_items_of_each_kind_are_built_one_after_another(client: TestClient, chat: FakeChat) -> None:
    chat.script = thinking_and_calling(chat)
    found = events(client.post(PATH, json={**HELLO, "tools": TOOLS, "stream": True}).text)
    assert [event["type"].removeprefix("response.") for event in found] == [
        "created",
        "in_progress",
        "output_item.added",
        "reasoning_text.delta",
        "reasoning_text.delta",
        "reasoning_text.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "output_item.added",
        "custom_tool_call_input.delta",
        "custom_tool_call_input.done",
        "output_item.done",
        "completed",
    ]
    done = [event["item"] for event in found if event["type"].endswith("item.done")]
    assert found[-1]["response"]["output"] == done
    assert [item["type"] for item in done] == [
        "reasoning",
        "message",
        "function_call",
        "custom_tool_call",
    ]
    assert done[0]["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert (done[2]["call_id"], done[2]["name"], done[2]["arguments"]) == (
        "call_a",
        "look",
        '{"at":1}',
    )
    assert done[3]["input"] == "a\nb"
    assert len({item["id"] for item in done}) == len(done)
    added = [event["output_index"] for event in found if event["type"].endswith("item.added")]
    assert added == [0, 1, 2, 3]
    usage = found[-1]["response"]["usage"]
    assert usage["output_tokens_details"] == {"reasoning_tokens": 2}


CRM = {
    "type": "namespace",
    "name": "crm",
    "description": "Customers.",
    "tools": [
        {"type": "function", "name": "find", "description": "d", "parameters": {"type": "object"}},
        {"type": "custom", "name": "note"},
    ],
}


def test_tools_of_a_namespace_are_called_by_both_names_and_stored(
    client: TestClient, chat: FakeChat
) -> None:
    chat.script = [
        Delta(
            tool_calls=(
                ToolCallDelta(0, "call_a", "crm.find", "{}"),
                ToolCallDelta(1, "call_b", "crm.note", '{"input": "x"}'),
                ToolCallDelta(2, "call_c", "look", "{}"),
            ),
            finish_reason=FinishReason.TOOL_CALLS,
            usage=Usage(3, 9, 0),
        )
    ]
    reply = client.post(PATH, json={**HELLO, "tools": [CRM, TOOLS[0]]}).json()
    calls = [(item["type"], item["name"], item.get("namespace")) for item in reply["output"]]
    assert calls == [
        ("function_call", "find", "crm"),
        ("custom_tool_call", "note", "crm"),
        ("function_call", "look", None),
    ]
    shown = [tool["function"] for tool in chat.rendered[-1].tools]
    assert [tool["name"] for tool in shown] == ["crm.find", "crm.note", "look"]
    assert shown[0]["description"] == "Customers.\nd"
    assert reply["tools"] == [CRM, TOOLS[0]]
    outputs = [
        {"type": "function_call_output", "call_id": call, "output": "ok"}
        for call in ("call_a", "call_b", "call_c")
    ]
    asked = {"input": outputs, "previous_response_id": reply["id"], "tools": [CRM]}
    assert client.post(PATH, json=asked).status_code == 200
    said = chat.rendered[-1].messages[1]["tool_calls"]
    assert [call["function"]["name"] for call in said] == ["crm.find", "crm.note", "look"]


@pytest.mark.parametrize(
    ("tool", "word"),
    [
        ({"type": "namespace", "name": "crm"}, "tools"),
        ({"type": "namespace", "tools": CRM["tools"]}, "name"),
        ({**CRM, "tools": [CRM]}, "function and custom"),
        ({**CRM, "tools": [{"type": "function"}]}, "name"),
    ],
)
def test_an_invalid_namespace_is_refused(
    client: TestClient, tool: dict[str, Any], word: str
) -> None:
    reply = client.post(PATH, json={**HELLO, "tools": [tool]})
    assert reply.status_code == 400
    assert word in reply.json()["error"]["message"]


def test_namespaces_do_not_hide_too_many_tools(client: TestClient, chat: FakeChat) -> None:
    many = [{"type": "function", "name": f"t{number}"} for number in range(MAX_TOOLS)]
    groups = [{**CRM, "name": name, "tools": many} for name in ("a", "b")]
    reply = client.post(PATH, json={**HELLO, "tools": groups})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "tools")
    assert chat.submitted == []


def test_a_whole_response_has_the_same_items_as_its_stream(
    client: TestClient, chat: FakeChat
) -> None:
    chat.script = thinking_and_calling(chat)
    asked = {**HELLO, "tools": TOOLS, "parallel_tool_calls": False, "reasoning": {"effort": "low"}}
    reply = client.post(PATH, json=asked)
    streamed = events(client.post(PATH, json={**asked, "stream": True}).text)[-1]["response"]
    body = reply.json()
    strip = [{k: v for k, v in item.items() if k != "id"} for item in body["output"]]
    assert strip == [{k: v for k, v in i.items() if k != "id"} for i in streamed["output"]]
    assert body["tools"] == TOOLS
    assert body["parallel_tool_calls"] is False
    assert body["reasoning"]["effort"] == "low"
    assert "tools[] of type web_search" in str(reply.headers)
    [first, _] = chat.rendered
    assert [tool["function"]["name"] for tool in first.tools] == ["look", "patch"]
    assert first.kwargs["enable_thinking"] is True
    assert not chat.submitted[0].turn.parallel_tool_calls


def test_the_items_of_a_turn_become_one_message(client: TestClient, chat: FakeChat) -> None:
    asked = {
        "input": [
            {"role": "user", "content": "a"},
            {
                "type": "reasoning",
                "id": "rs_1",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": "Hm."}],
            },
            {"role": "assistant", "content": "b"},
            {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
            {"type": "custom_tool_call", "call_id": "c2", "name": "patch", "input": "x"},
            {"type": "function_call_output", "call_id": "c1", "output": "1"},
            {
                "type": "custom_tool_call_output",
                "call_id": "c2",
                "output": [{"type": "input_text", "text": "2"}],
            },
        ]
    }
    assert client.post(PATH, json=asked).status_code == 200
    user, answer, first, second = chat.rendered[0].messages
    assert user == {"role": "user", "content": "a"}
    assert (answer["content"], answer["reasoning_content"]) == ("b", "Hm.")
    assert [(c["id"], c["function"]["arguments"]) for c in answer["tool_calls"]] == [
        ("c1", "{}"),
        ("c2", '{"input": "x"}'),
    ]
    assert (first["tool_call_id"], first["content"]) == ("c1", "1")
    assert (second["tool_call_id"], second["content"]) == ("c2", "2")


def test_a_call_may_have_an_object_as_arguments(client: TestClient, chat: FakeChat) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": {"at": "x"}}
    output = {"type": "function_call_output", "call_id": "c", "output": "1"}
    reply = client.post(PATH, json={"input": [{"role": "user", "content": "a"}, call, output]})
    assert reply.status_code == 200
    [called] = chat.rendered[0].messages[1]["tool_calls"]
    assert called["function"]["arguments"] == '{"at": "x"}'


def test_a_stored_response_with_calls_can_be_continued(client: TestClient, chat: FakeChat) -> None:
    chat.script = thinking_and_calling(chat)
    first = client.post(PATH, json={**HELLO, "tools": TOOLS}).json()
    after = {
        "previous_response_id": first["id"],
        "input": [{"type": "function_call_output", "call_id": "call_a", "output": "1"}],
    }
    assert client.post(PATH, json=after).status_code == 200
    roles = [message["role"] for message in chat.rendered[1].messages]
    assert roles == ["user", "assistant", "tool"]


def test_the_text_format_is_a_structure_and_is_echoed(client: TestClient, chat: FakeChat) -> None:
    schema = {"type": "json_schema", "name": "n", "strict": True, "schema": {"type": "object"}}
    reply = client.post(PATH, json={**HELLO, "text": {"format": schema}}).json()
    assert reply["text"]["format"] == schema
    assert chat.submitted[0].params.structure.field == "text.format.schema"


def answers_of_every_kind(chat: Any) -> dict[str, list[Any]]:
    def end(reason: FinishReason, **fields: Any) -> Any:
        return Delta(finish_reason=reason, usage=Usage(3, 5, 1), **fields)

    opened = ToolCallDelta(0, "call_1", "look", '{"at": "')
    return {
        "nothing": [end(FinishReason.STOP)],
        "thinking alone": [Delta(reasoning="Hm."), end(FinishReason.LENGTH)],
        "all of it": [
            Delta(reasoning="Hm."),
            Delta("Well."),
            Delta(tool_calls=(opened, ToolCallDelta(0, arguments='here"}'))),
            end(FinishReason.TOOL_CALLS),
        ],
        "a call that was cut": [Delta(tool_calls=(opened,)), end(FinishReason.LENGTH)],
    }


@pytest.mark.parametrize("kind", ["nothing", "thinking alone", "all of it", "a call that was cut"])
@pytest.mark.parametrize("stream", [False, True])
def test_every_kind_of_answer_can_be_stored_and_continued(
    client: TestClient, chat: FakeChat, kind: str, stream: bool
) -> None:
    chat.script = answers_of_every_kind(chat)[kind]
    tool = {"type": "function", "name": "look", "parameters": {"type": "object"}}
    reply = client.post(PATH, json={**HELLO, "tools": [tool], "stream": stream})
    assert reply.status_code == 200, reply.text
    body = events(reply.text)[-1]["response"] if stream else reply.json()
    assert client.get(f"{PATH}/{body['id']}").json() == body
    chat.script = None
    ask(client, input="Go on", previous_response_id=body["id"])
    assert said(chat)[0] == ("user", "Hi")
    assert said(chat)[-1] == ("user", "Go on")
