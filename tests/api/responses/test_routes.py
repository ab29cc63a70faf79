from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest
from starlette.testclient import TestClient

from mlxserve.api.bodies.tools import MAX_TOOLS
from mlxserve.errors import EngineStopped, QueueFull
from mlxserve.request import FinishReason
from mlxserve.text.deltas import Delta, Usage
from mlxserve.text.parsing.turn import ToolCallDelta
from tests.api.fake_chat import FakeChat

PATH = "/v1/responses"
HELLO = {"input": "Hi"}


def events(text: str) -> list[dict[str, Any]]:
    """The data of each event; its name must be its type, and the numbers must rise by one."""
    blocks = text.removesuffix("\n\n").split("\n\n")
    found = []
    for number, block in enumerate(blocks):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
        assert found[-1]["sequence_number"] == number
    return found


def test_a_response_has_openais_format(client: TestClient) -> None:
    reply = client.post(PATH, json={**HELLO, "instructions": "Be brief.", "metadata": {"a": "b"}})
    body = reply.json()
    number = reply.headers["x-request-id"]
    assert body["id"] == f"resp_{number}"
    assert body["object"] == "response"
    assert body["status"] == "completed"
    assert body["model"] == "fake"
    assert body["error"] is body["incomplete_details"] is body["previous_response_id"] is None
    assert body["instructions"] == "Be brief."
    assert body["metadata"] == {"a": "b"}
    assert body["store"] is True
    assert body["output"] == [
        {
            "id": f"msg_{number}",
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": [
                {"type": "output_text", "text": "Hello", "annotations": [], "logprobs": []}
            ],
        }
    ]
    assert body["usage"] == {
        "input_tokens": 11,
        "input_tokens_details": {"cached_tokens": 5},
        "output_tokens": 2,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 13,
        "cache": None,
    }


def test_a_stream_has_openais_order(client: TestClient) -> None:
    found = events(client.post(PATH, json={**HELLO, "stream": True}).text)
    assert [event["type"].removeprefix("response.") for event in found] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    deltas = [event for event in found if event["type"].endswith("text.delta")]
    assert [event["delta"] for event in deltas] == ["Hel", "lo"]
    assert {event["item_id"] for event in deltas} == {found[2]["item"]["id"]}
    assert found[6]["text"] == found[7]["part"]["text"] == "Hello"
    assert found[8]["item"] == found[9]["response"]["output"][0]
    assert found[9]["response"]["usage"]["total_tokens"] == 4
    ids = {event["response"]["id"] for event in found if "response" in event}
    assert len(ids) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_truncated_answer_is_incomplete(client: TestClient, chat: FakeChat, stream: bool) -> None:
    chat.script = [Delta("He", (1,), (), FinishReason.LENGTH, Usage(1, 1, 0))]
    reply = client.post(PATH, json={**HELLO, "max_output_tokens": 1, "stream": stream})
    response = events(reply.text)[-1]["response"] if stream else reply.json()
    assert response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["output"][0]["status"] == "incomplete"
    assert chat.submitted[0].params.max_tokens == 1
    if stream:
        assert events(reply.text)[-1]["type"] == "response.incomplete"


def test_an_answer_without_text_is_still_an_item(client: TestClient, chat: FakeChat) -> None:
    chat.script = [Delta("", (1,), (), FinishReason.STOP, Usage(1, 1, 0))]
    found = events(client.post(PATH, json={**HELLO, "stream": True}).text)
    kinds = [event["type"] for event in found]
    assert "response.output_item.added" in kinds
    assert "response.output_text.delta" not in kinds
    assert found[-1]["response"]["output"][0]["content"][0]["text"] == ""


def test_a_stopped_engine_ends_the_stream_as_failed(client: TestClient, chat: FakeChat) -> None:
    chat.script = [Delta("Hel", (72,)), EngineStopped("The engine has stopped.")]
    last = events(client.post(PATH, json={**HELLO, "stream": True}).text)[-1]
    assert last["type"] == "response.failed"
    assert last["response"]["status"] == "failed"
    assert last["response"]["error"]["message"] == "The engine has stopped."
    assert client.post(PATH, json=HELLO).status_code == 503
    assert all(answer.is_closed for answer in chat.answers)


def test_input_items_become_messages(client: TestClient, chat: FakeChat) -> None:
    asked = {
        "instructions": "Be brief.",
        "input": [
            {"role": "user", "content": "a"},
            {
                "type": "message",
                "id": "msg_1",
                "status": "completed",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "b", "annotations": []}],
            },
            {"role": "user", "content": [{"type": "input_text", "text": "c"}]},
        ],
    }
    assert client.post(PATH, json=asked).status_code == 200
    assert chat.rendered[0].messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"input": 5}, "input"),
        ({"input": ["x"]}, "input[0]"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0]"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user"}]}, "input[0]"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content"),
        ({"instructions": 5}, "instructions"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"store": "yes"}, "store"),
        ({"previous_response_id": 1}, "previous_response_id"),
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"truncation": "auto"}, "truncation"),
        ({"background": True}, "background"),
        ({"metadata": {"a": 1}}, "metadata.a"),
    ],
)
def test_a_bad_value_is_refused_with_its_fields_name(
    client: TestClient, fields: dict[str, Any], param: str
) -> None:
    reply = client.post(PATH, json={**HELLO, **fields})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param


def test_each_error_of_the_engine_has_its_status(client: TestClient, chat: FakeChat) -> None:
    reply = client.post(PATH, json={"input": "x" * 2_000, "stream": True})
    assert reply.status_code == 400
    assert reply.json()["error"]["code"] == "context_length_exceeded"
    assert reply.json()["error"]["param"] == "input"
    chat.submit_error = QueueFull("no")
    assert client.post(PATH, json=HELLO).status_code == 503


def test_unknown_fields_are_named(client: TestClient) -> None:
    reply = client.post(PATH, json={**HELLO, "mood": 1, "stream": True})
    assert "mood" in reply.headers["x-mlxserve-warning"]


# What is kept.


def ask(client: TestClient, **fields: Any) -> dict[str, Any]:
    reply = client.post(PATH, json=fields)
    assert reply.status_code == 200, reply.text
    return reply.json()


def said(chat: FakeChat) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in chat.rendered[-1].messages]


def not_found(reply: httpx2.Response, param: str) -> bool:
    error = reply.json()["error"]
    return (reply.status_code, error["code"], error["param"]) == (404, "response_not_found", param)


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_can_be_read_again_and_deleted(client: TestClient, stream: bool) -> None:
    reply = client.post(PATH, json={**HELLO, "stream": stream})
    body = events(reply.text)[-1]["response"] if stream else reply.json()
    url = f"{PATH}/{body['id']}"
    assert client.get(url).json() == body
    assert client.delete(url).json() == {"id": body["id"], "object": "response", "deleted": True}
    assert not_found(client.get(url), "id")
    assert not_found(client.delete(url), "id")


def test_the_input_items_of_a_response_are_listed(client: TestClient) -> None:
    call = {"type": "function_call", "id": "fc_x", "call_id": "c", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": "5"}
    first = ask(client, input="One")
    second = ask(client, input=[call, output], previous_response_id=first["id"])
    url = f"{PATH}/{second['id']}/input_items"
    listed = client.get(url, params={"order": "asc"}).json()
    assert [(item["type"], item["id"]) for item in listed["data"]] == [
        ("message", "msg_0"),
        ("message", first["output"][0]["id"]),
        ("function_call", "fc_x"),
        ("function_call_output", "fco_3"),
    ]
    asked, answered, *_, result = listed["data"]
    assert asked["content"] == [{"type": "input_text", "text": "One"}]
    assert answered["content"] == [{"type": "output_text", "text": "Hello", "annotations": []}]
    assert (result["output"], result["status"]) == ("5", "completed")
    assert (listed["first_id"], listed["last_id"], listed["has_more"]) == ("msg_0", "fco_3", False)
    page = client.get(url, params={"limit": 2, "after": "fco_3"}).json()
    assert [item["id"] for item in page["data"]] == ["fc_x", first["output"][0]["id"]]
    assert page["has_more"]
    client.delete(f"{PATH}/{first['id']}")
    assert len(client.get(url).json()["data"]) == 2
    assert not_found(client.get(f"{PATH}/resp_0/input_items"), "id")


@pytest.mark.parametrize(
    ("query", "name"),
    [("limit=0", "limit"), ("limit=101", "limit"), ("limit=x", "limit"), ("limit=٣", "limit"),
     ("order=up", "order"), ("after=msg_9", "after")],
)  # fmt: skip
def test_an_invalid_page_is_refused(client: TestClient, query: str, name: str) -> None:
    reply = client.get(f"{PATH}/{ask(client, input='One')['id']}/input_items?{query}")
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, name)


def test_a_stored_response_can_neither_be_cancelled_nor_streamed(
    client: TestClient,
) -> None:
    url = f"{PATH}/{ask(client, input='One')['id']}"
    assert client.post(f"{url}/cancel").status_code == 400
    assert not_found(client.post(f"{PATH}/resp_0/cancel"), "id")
    reply = client.get(url, params={"stream": "true"})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "stream")


def test_a_continued_response_has_all_earlier_items_but_not_the_instructions(
    client: TestClient, chat: FakeChat
) -> None:
    first = ask(client, input="One", instructions="Count.")
    second = ask(client, input="Two", previous_response_id=first["id"], instructions="Sum.")
    ask(client, input="Three", previous_response_id=second["id"])
    assert said(chat) == [
        ("user", "One"),
        ("assistant", "Hello"),
        ("user", "Two"),
        ("assistant", "Hello"),
        ("user", "Three"),
    ]
    assert second["previous_response_id"] == first["id"]
    ask(client, input="Other", previous_response_id=first["id"])  # another branch
    assert said(chat) == [("user", "One"), ("assistant", "Hello"), ("user", "Other")]


def test_a_response_with_store_false_is_not_stored(client: TestClient) -> None:
    body = ask(client, **HELLO, store=False)
    assert body["store"] is False
    assert not_found(client.get(f"{PATH}/{body['id']}"), "id")
    reply = client.post(PATH, json={**HELLO, "previous_response_id": body["id"]})
    assert not_found(reply, "previous_response_id")


def test_a_conversation_without_its_start_cannot_be_continued(client: TestClient) -> None:
    first = ask(client, input="One")
    second = ask(client, input="Two", previous_response_id=first["id"])
    client.delete(f"{PATH}/{first['id']}")
    reply = client.post(PATH, json={**HELLO, "previous_response_id": second["id"]})
    assert not_found(reply, "previous_response_id")


def test_a_failed_response_is_not_stored(client: TestClient, chat: FakeChat) -> None:
    chat.script = [Delta("a"), EngineStopped("The engine has stopped.")]
    body = events(client.post(PATH, json={**HELLO, "stream": True}).text)[-1]["response"]
    assert not_found(client.get(f"{PATH}/{body['id']}"), "id")


# ---- reasoning and calls

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
