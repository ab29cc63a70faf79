from __future__ import annotations

from typing import Any

import httpx2
import pytest
from starlette.testclient import TestClient

from mlxserve.core.errors import EngineStopped
from mlxserve.request import FinishReason
from mlxserve.text.deltas import Delta, Usage
from tests.api.fake_chat import FakeChat
from tests.api.responses.requests import HELLO, PATH, ask, events, said


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


@pytest.mark.parametrize(
    ("asked", "echoed"),
    [({}, None), ({"max_output_tokens": -1}, None), ({"max_output_tokens": 9}, 9)],
)
def test_the_limit_that_was_asked_for_is_repeated(
    client: TestClient, asked: dict[str, int], echoed: int | None
) -> None:
    assert client.post(PATH, json={**HELLO, **asked}).json()["max_output_tokens"] == echoed


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


def test_a_bad_value_is_refused_with_its_fields_name(client: TestClient) -> None:
    for fields, param in [
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"input": 5}, "input"),
        ({"input": ["x"]}, "input[0]"),
        ({"input": [{"type": 5}]}, "input[0].type"),
        ({"input": [{"role": "wizard", "content": "x"}]}, "input[0].role"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0]",
        ),
        ({"instructions": 5}, "instructions"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"store": "yes"}, "store"),
        ({"previous_response_id": 1}, "previous_response_id"),
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format"),
        ({"text": {"verbosity": 5}}, "text.verbosity"),
        ({"include": "all"}, "include"),
        ({"background": True}, "background"),
        ({"metadata": {"a": 1}}, "metadata.a"),
    ]:
        reply = client.post(PATH, json={**HELLO, **fields})
        assert reply.status_code == 400, fields
        assert reply.json()["error"]["param"] == param, fields


@pytest.mark.parametrize(
    ("fields", "warning"),
    [
        ({"include": ["file_search_call.results"]}, "include of file_search_call.results"),
        ({"truncation": "auto"}, "truncation"),
        ({"service_tier": "priority"}, "service_tier"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
    ],
)
def test_a_manner_of_serving_is_ignored_with_a_warning(
    client: TestClient, fields: dict[str, Any], warning: str
) -> None:
    reply = client.post(PATH, json={**HELLO, **fields})
    assert reply.status_code == 200
    assert reply.headers["x-mlxserve-warning"] == f"ignored unknown fields: {warning}"


@pytest.mark.parametrize(
    "kind",
    [
        "web_search_call",
        "local_shell_call",
        "compaction",
        "tool_search_output",
        "mcp_list_tools",
        "image_generation_call",
        "item_reference",
    ],
)
def test_items_of_unknown_types_become_a_text_in_their_place(
    client: TestClient, chat: FakeChat, kind: str
) -> None:
    item = {"type": kind, "id": "x_1", "status": "completed", "content": 5, "output": {"a": 1}}
    asked = [{"role": "user", "content": "a"}, item, {"role": "user", "content": "b"}]
    reply = client.post(PATH, json={"input": asked})
    assert reply.status_code == 200
    assert reply.headers["x-mlxserve-warning"] == f"left out: {kind}"
    assert [text for _, text in said(chat)] == ["a", f"[{kind} left out]", "b"]


def test_a_reference_to_a_stored_item_is_looked_up(client: TestClient, chat: FakeChat) -> None:
    first = ask(client, input="One")
    reference = {"type": "item_reference", "id": first["output"][0]["id"]}
    reply = client.post(PATH, json={"input": [{"role": "user", "content": "One"}, reference]})
    assert "x-mlxserve-warning" not in reply.headers
    assert said(chat) == [("user", "One"), ("assistant", "Hello")]


def test_reasoning_comes_back_from_a_client_that_keeps_it_unread(
    client: TestClient, chat: FakeChat
) -> None:
    chat.script = [
        Delta(reasoning="Hm, 4."),
        Delta("4", (1,), (), FinishReason.STOP, Usage(1, 1, 0)),
    ]
    signed = ["reasoning.encrypted_content"]
    [thought, answer] = ask(client, **HELLO, store=False, include=signed)["output"]
    assert ask(client, **HELLO)["output"][0]["encrypted_content"] is None
    kept = {"type": "reasoning", "summary": [], "encrypted_content": thought["encrypted_content"]}
    ask(client, input=[{"role": "user", "content": "2+2"}, kept, answer])
    assert chat.rendered[-1].messages[1]["reasoning_content"] == "Hm, 4."


def test_a_prompt_beyond_the_context_names_its_field(client: TestClient) -> None:
    reply = client.post(PATH, json={"input": "x" * 2_000, "stream": True})
    assert reply.status_code == 400
    assert reply.json()["error"]["code"] == "context_length_exceeded"
    assert reply.json()["error"]["param"] == "input"


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


def test_the_404_for_a_broken_conversation_names_the_deleted_response(client: TestClient) -> None:
    first = ask(client, input="One")["id"]
    second = ask(client, input="Two", previous_response_id=first)["id"]
    client.delete(f"{PATH}/{first}")
    assert client.get(f"{PATH}/{second}").status_code == 200
    reply = client.post(PATH, json={"input": "Three", "previous_response_id": second})
    assert not_found(reply, "previous_response_id")
    message = reply.json()["error"]["message"]
    assert f"because {first!r} in its conversation was deleted" in message


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


def test_an_invalid_page_is_refused(client: TestClient) -> None:
    for query, name in [
        ("limit=0", "limit"),
        ("limit=101", "limit"),
        ("limit=x", "limit"),
        ("limit=٣", "limit"),
        ("order=up", "order"),
        ("after=msg_9", "after"),
    ]:
        reply = client.get(f"{PATH}/{ask(client, input='One')['id']}/input_items?{query}")
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, name), query


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
