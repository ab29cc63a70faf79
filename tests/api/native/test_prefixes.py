from __future__ import annotations

import pytest
from starlette.testclient import TestClient

from mlxserve.api.access.policy import AccessPolicy
from mlxserve.api.app import create_app
from mlxserve.api.native.prefixes import MAX_PREFIXES
from tests.api.fake_chat import FakeChat

HELLO = [{"role": "user", "content": "Hi"}]


def test_a_prefix_is_added_listed_used_and_removed(client: TestClient, chat: FakeChat) -> None:
    card = {"id": "rules", "object": "prefix", "num_tokens": 3}
    assert client.put("/v1/prefixes/rules", json={"prompt": "abc"}).json() == card
    assert chat.submitted[0].prompt == [97, 98, 99]  # computed at once
    assert client.get("/v1/prefixes").json() == {"object": "list", "data": [card]}
    assert client.get("/v1/prefixes/rules").json() == card
    client.post("/v1/completions", json={"prompt": [[100], [7]], "prefix_name": "rules"})
    client.post("/v1/chat/completions", json={"messages": HELLO, "prefix_name": "rules"})
    client.post("/v1/responses", json={"input": "e", "prefix_name": "rules"})
    assert [asked.prompt for asked in chat.submitted[1:]] == [
        [97, 98, 99, 100],
        [97, 98, 99, 7],
        [97, 98, 99, 72, 105],
        [97, 98, 99, 101],
    ]
    assert client.delete("/v1/prefixes/rules").json()["deleted"] is True
    assert client.get("/v1/prefixes").json()["data"] == []
    client.put("/v1/prefixes/tone", json={"prompt": "abc"})
    for call in (client.get, client.delete):
        reply = call("/v1/prefixes/rules")
        assert reply.status_code == 404
        assert reply.json()["error"]["message"].endswith("named 'rules'; known: tone.")


def test_a_prefix_may_be_token_ids_or_the_start_of_a_conversation(
    client: TestClient, chat: FakeChat
) -> None:
    client.put("/v1/prefixes/ids", json={"prompt": [5, 6]})
    client.put("/v1/prefixes/talk", json={"messages": HELLO})
    assert chat.named == {"ids": (5, 6), "talk": (72, 105)}
    assert chat.rendered[0].kwargs == {"add_generation_prompt": False}


@pytest.mark.parametrize("path", ["chat/completions", "completions", "responses"])
def test_an_unknown_prefix_is_an_error(client: TestClient, chat: FakeChat, path: str) -> None:
    body = {"messages": HELLO, "prompt": "x", "input": "x", "prefix_name": "none"}
    names = {"chat/completions": "messages", "completions": "prompt", "responses": "input"}
    asked = {name: body[name] for name in (names[path], "prefix_name")}
    client.put("/v1/prefixes/rules", json={"prompt": "abc"})
    chat.submitted.clear()
    reply = client.post(f"/v1/{path}", json=asked)
    assert reply.status_code == 404
    assert reply.json()["error"]["code"] == "unknown_prefix"
    assert "known: rules" in reply.json()["error"]["message"]
    assert reply.json()["error"]["param"] == "prefix_name"
    assert chat.submitted == []


@pytest.mark.parametrize(
    ("name", "body", "param"),
    [
        ("-x", {"prompt": "a"}, "name"),
        ("x" * 65, {"prompt": "a"}, "name"),
        ("a b", {"prompt": "a"}, "name"),
        ("x", {}, "prompt"),
        ("x", {"prompt": "a", "messages": HELLO}, "prompt"),
        ("x", {"prompt": ["a", "b"]}, "prompt"),
        ("x", {"prompt": ""}, "prompt"),
        ("x", {"prompt": "x" * 2_000}, "prompt"),
        ("x", {"messages": []}, "messages"),
    ],
)
def test_a_bad_prefix_is_refused(
    client: TestClient, chat: FakeChat, name: str, body: bytes, param: str
) -> None:
    reply = client.put(f"/v1/prefixes/{name}", json=body)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param
    assert chat.named == {}


def test_the_number_of_prefixes_is_bounded_but_old_ones_can_be_replaced(
    client: TestClient, chat: FakeChat
) -> None:
    chat.named.update({f"p{number}": (1,) for number in range(MAX_PREFIXES)})
    assert client.put("/v1/prefixes/more", json={"prompt": "a"}).status_code == 400
    assert client.put("/v1/prefixes/p0", json={"prompt": "a"}).status_code == 200


def test_a_prefix_belongs_to_its_key(chat: FakeChat) -> None:
    keys = ["first-key", "second-key"]
    app = create_app(chat, access=AccessPolicy(api_keys=keys))
    client = TestClient(app, base_url="http://127.0.0.1")
    first, second = ({"authorization": f"Bearer {key}"} for key in keys)
    client.put("/v1/prefixes/mine", json={"prompt": "abc"}, headers=first)
    assert [p["id"] for p in client.get("/v1/prefixes", headers=first).json()["data"]] == ["mine"]
    assert client.get("/v1/prefixes", headers=second).json()["data"] == []
    for call in (client.get, client.delete):
        assert call("/v1/prefixes/mine", headers=second).status_code == 404
    asked = {"prompt": "d", "prefix_name": "mine"}
    unknown = client.post("/v1/completions", json=asked, headers=second)
    assert unknown.status_code == 404
    assert "known: none" in unknown.json()["error"]["message"]  # without the names of other keys
    assert client.post("/v1/completions", json=asked, headers=first).status_code == 200
    computed, used = chat.submitted
    assert computed.cache_salt == used.cache_salt is not None  # or it would never be found
    assert used.client
    stolen = next(iter(chat.named))
    asked["prefix_name"] = stolen
    assert client.post("/v1/completions", json=asked, headers=second).status_code == 404
