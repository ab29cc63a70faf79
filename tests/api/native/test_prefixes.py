from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest
from starlette.testclient import TestClient

from mlxserve.api.access.keys import KeyFile, Scope
from mlxserve.api.access.policy import AccessPolicy
from mlxserve.api.app import create_app
from mlxserve.api.prefix_names import MAX_PREFIXES
from mlxserve.core.errors import PagesPromised
from tests.api.fake_chat import FakeChat
from tests.api.serving import Serve
from tests.waiting import wait_until

if TYPE_CHECKING:
    from mlxserve.chat.text_model import TextModel

HELLO = [{"role": "user", "content": "Hi"}]


def test_a_prefix_is_added_listed_used_and_removed(client: TestClient, chat: FakeChat) -> None:
    card = {"id": "rules", "object": "prefix", "num_tokens": 3, "key": None}
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


def test_a_prefix_that_would_cut_an_answer_is_refused_as_busy(
    client: TestClient, chat: FakeChat
) -> None:
    chat.submit_error = PagesPromised("the pages of this prefix are promised")
    reply = client.put("/v1/prefixes/rules", json={"prompt": "abc"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (409, "busy")
    assert reply.json()["error"]["message"] == "the pages of this prefix are promised"


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
        ("x", {"messages": []}, "prompt"),
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
    refused = client.put("/v1/prefixes/more", json={"prompt": "a"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "prefix_quota_exceeded")
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


@pytest.fixture
def keys(tmp_path: Path) -> KeyFile:
    return KeyFile(tmp_path / "keys.json")


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def with_keys(chat: FakeChat, keys: KeyFile) -> TestClient:
    app = create_app(chat, access=AccessPolicy(keys_file=keys.path))  # type: ignore[arg-type]
    return TestClient(app, base_url="http://127.0.0.1")


def test_a_revoked_key_loses_its_prefixes(chat: FakeChat, keys: KeyFile) -> None:
    alice, bob = (bearer(keys.create(name, Scope.USER)) for name in ("alice", "bob"))
    client = with_keys(chat, keys)
    for name in ("a", "b"):
        client.put(f"/v1/prefixes/{name}", json={"prompt": "x"}, headers=alice)
    client.put("/v1/prefixes/c", json={"prompt": "x"}, headers=bob)
    keys.revoke("alice")
    assert client.get("/v1/prefixes", headers=alice).status_code == 401
    assert [name.rpartition("/")[2] for name in chat.named] == ["c"]


def test_a_key_file_that_cannot_be_trusted_for_a_while_drops_no_prefix(
    chat: FakeChat, keys: KeyFile
) -> None:
    alice = bearer(keys.create("alice", Scope.USER))
    client = with_keys(chat, keys)
    client.put("/v1/prefixes/a", json={"prompt": "x"}, headers=alice)
    keys.path.chmod(0o644)
    assert client.get("/v1/prefixes", headers=alice).status_code == 401
    keys.path.chmod(0o600)
    assert len(client.get("/v1/prefixes", headers=alice).json()["data"]) == 1


def test_an_admin_lists_and_deletes_every_prefix(chat: FakeChat, keys: KeyFile) -> None:
    chat.named["keyless"] = (1, 2)  # added before there was a key
    alice, root = (bearer(keys.create(n, Scope(s))) for n, s in (("al", "user"), ("ro", "admin")))
    client = with_keys(chat, keys)
    client.put("/v1/prefixes/a", json={"prompt": "x"}, headers=alice)
    client.put("/v1/prefixes/a", json={"prompt": "xyz"}, headers=root)
    shown = client.get("/v1/prefixes", headers=root).json()["data"]
    owners = {key.name: key.id for key in keys.read()}
    assert {(card["key"], card["id"]) for card in shown} == {
        (None, "keyless"),
        (owners["al"], "a"),
        (owners["ro"], "a"),
    }
    theirs = {"key": owners["al"]}
    card = client.get("/v1/prefixes/a", params=theirs, headers=root).json()
    assert (card["num_tokens"], card["key"]) == (1, owners["al"])
    assert client.get("/v1/prefixes/a", headers=root).json()["num_tokens"] == 3
    assert client.delete("/v1/prefixes/a", params=theirs, headers=root).status_code == 200
    missing = client.delete("/v1/prefixes/a", params=theirs, headers=root)
    assert (missing.status_code, "known: none" in missing.text) == (404, True)
    assert client.delete("/v1/prefixes/keyless", params={"key": ""}, headers=root).is_success
    assert list(chat.named) == [f"{owners['ro']}/a"]
    others = client.get("/v1/prefixes/a", params={"key": owners["ro"]}, headers=alice)
    assert (others.status_code, others.json()["error"]["code"]) == (403, "admin_required")


def test_a_key_may_have_half_of_the_names_while_there_is_another_key(
    chat: FakeChat, keys: KeyFile
) -> None:
    alice = bearer(keys.create("alice", Scope.USER))
    client = with_keys(chat, keys)
    [owner] = (key.id for key in keys.read())
    chat.named.update({f"{owner}/p{number}": (1,) for number in range(MAX_PREFIXES // 2)})
    body = {"prompt": "x"}
    assert client.put("/v1/prefixes/alone", json=body, headers=alice).status_code == 200
    root = bearer(keys.create("root", Scope.ADMIN))
    refused = client.put("/v1/prefixes/more", json=body, headers=alice)
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "prefix_quota_exceeded")
    assert "may have 128 of the 256 prefixes and has 129" in refused.json()["error"]["message"]
    assert client.put("/v1/prefixes/alone", json=body, headers=alice).status_code == 200
    assert client.put("/v1/prefixes/more", json=body, headers=root).status_code == 200
    shares = {name.partition("-")[0]: share for name, share in chat.shares.items()}
    assert shares == {"alice": 0.5, "root": 1.0}  # the same share of the pages


def test_a_running_server_unpins_the_pages_of_a_revoked_key(
    serve_real: Serve, real_chat: TextModel, keys: KeyFile
) -> None:
    alice, bob = (bearer(keys.create(name, Scope.USER)) for name in ("alice", "bob"))
    access = AccessPolicy(keys_file=keys.path, max_prefix_share_per_key=0.25)
    with serve_real(access=access) as server:

        def put(name: str, key: dict[str, str], num_tokens: int) -> httpx.Response:
            body = {"prompt": [7] * num_tokens}
            url = f"{server.url}/v1/prefixes/{name}"
            return httpx.put(url, json=body, headers=key, timeout=60)

        assert put("rules", alice, 640).status_code == 200
        refused = put("more", alice, 2_400)
        assert refused.status_code == 409
        assert "one API key may have 64 of the 256 pages" in refused.text
        assert put("rules", bob, 640).status_code == 200
        pinned = real_chat.engine.stats().pool.num_used
        keys.revoke("alice")
        wait_until(
            lambda: (
                len(real_chat.writer.prefixes.sizes()) == 1
                and real_chat.engine.stats().pool.num_used < pinned
            ),
            complaint="the pages of the revoked key are still pinned",
        )
        keys.revoke("bob")
        wait_until(
            lambda: (
                not real_chat.writer.prefixes.sizes() and not real_chat.engine.stats().pool.num_used
            )
        )


@pytest.mark.parametrize("skips", [True, False])
def test_a_request_may_skip_the_prefix_cache_on_every_route(
    client: TestClient, chat: FakeChat, skips: bool
) -> None:
    field = {"skip_prefix_cache": skips}
    client.post("/v1/completions", json={"prompt": "a", **field})
    client.post("/v1/chat/completions", json={"messages": HELLO, **field})
    client.post("/v1/responses", json={"input": "a", **field})
    client.post("/v1/messages", json={"messages": HELLO, "max_tokens": 4, **field})
    assert [asked.skip_prefix_cache for asked in chat.submitted] == [skips] * 4
    client.put("/v1/prefixes/rules", json={"prompt": "abc"})
    reply = client.post("/v1/completions", json={"prompt": "a", "prefix_name": "rules", **field})
    assert reply.status_code == (400 if skips else 200)
    if skips:
        assert reply.json()["error"]["param"] == "skip_prefix_cache"
