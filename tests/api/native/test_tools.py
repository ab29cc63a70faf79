"""`/api/v1/tools`: whose they are, and what the page does with them."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from starlette.testclient import TestClient

from mlxserve.api.access import same_user
from mlxserve.api.access.policy import AccessPolicy
from mlxserve.api.app import create_app
from tests.api.fake_chat import FakeChat
from tests.api.serving import Running, StartServer
from tests.mcp.kept_settings import scripted, write_servers
from tests.waiting import wait_until

TOOLS = "/api/v1/tools"
KEY, ADMIN = "key-of-alice-0000", "key-of-the-owner-0"


@pytest.fixture
def facts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the server of tools writes when it starts; with the file that names it."""
    monkeypatch.setenv("MLXSERVE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    facts = tmp_path / "facts"
    file = tmp_path / "config" / "mlxserve" / "mcp.json"
    write_servers(file, {"s": scripted(str(facts)), "bad": {"command": "nonesuch-command"}})
    return facts


@pytest.fixture
def server(facts: Path, start_server: StartServer) -> Running:
    return start_server()


@pytest.fixture
def page(server: Running) -> Iterator[httpx.Client]:
    """A client of the server's own user, without a key."""
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


def asked(client: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    reply = client.post(f"{TOOLS}/{path}", json=body)
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def test_servers_start_when_asked_answer_and_end_with_this_one(
    server: Running, page: httpx.Client, facts: Path
) -> None:
    first = page.get(TOOLS).json()
    assert [(one["name"], one["state"]) for one in first["data"]] == [("s", "off"), ("bad", "off")]
    assert not facts.exists(), "looking starts nothing"
    good, bad = asked(page, "start")["data"]
    assert (good["state"], bad["state"]) == ("ready", "failed")
    assert "nonesuch-command" in bad["problem"]
    [add] = [tool for tool in good["tools"] if tool["tool"] == "add"]
    assert (add["name"], add["permission"]) == ("s__add", "ask")
    assert add["parameters"]["properties"]["a"] == {"type": "integer"}
    result = asked(page, "call", name="s__add", arguments='{"a": 20, "b": 22}')
    assert (result["text"], result["is_error"]) == ("42", False)
    assert asked(page, "call", name="s__image")["images"] == ["data:image/png;base64,aGk="]
    failed = asked(page, "call", name="s__fails")
    assert (failed["text"], failed["is_error"]) == ("no luck", True)
    pid = json.loads(facts.read_text())["pid"]
    server.stop()
    assert not psutil.pid_exists(pid)


def test_choices_are_kept_and_a_tool_never_allowed_is_not_called(page: httpx.Client) -> None:
    asked(page, "start")
    good = asked(page, "permission", name="s__add", permission="never")["data"][0]
    assert {tool["tool"]: tool["permission"] for tool in good["tools"]}["add"] == "never"
    refused = asked(page, "call", name="s__add", arguments='{"a": 1, "b": 1}')
    assert refused["is_error"]
    assert "There is no tool 's__add'" in refused["text"]
    off = asked(page, "switch", server="s", is_on=False)["data"][0]
    assert (off["state"], off["is_on"], off["tools"]) == ("off", False, [])
    assert asked(page, "call", name="s__huge")["is_error"]


def test_an_unknown_field_is_named(page: httpx.Client) -> None:
    bodies: dict[str, dict[str, Any]] = {
        "start": {},
        "switch": {"server": "s", "is_on": True},
        "permission": {"name": "s__add", "permission": "ask"},
        "call": {"name": "s__add", "arguments": '{"a": 1, "b": 2}'},
    }
    for path, body in bodies.items():
        plain = page.post(f"{TOOLS}/{path}", json=body)
        assert (plain.status_code, "x-mlxserve-warning" in plain.headers) == (200, False)
        warned = page.post(f"{TOOLS}/{path}", json={**body, "frobnicate": 1})
        assert warned.headers["x-mlxserve-warning"] == "ignored unknown fields: frobnicate"


def test_unknown_names_and_values_are_refused(page: httpx.Client) -> None:
    asked(page, "start")
    for path, body, status in (
        ("switch", {"server": "nonesuch", "is_on": True}, 404),
        ("permission", {"name": "nonesuch", "permission": "ask"}, 404),
        ("permission", {"name": "s__add", "permission": "perhaps"}, 400),
        ("call", {"name": "s__add", "arguments": {"a": 1}}, 400),
        ("call", {}, 400),
    ):
        assert page.post(f"{TOOLS}/{path}", json=body).status_code == status, path


def test_a_call_is_stopped_when_its_client_leaves(
    page: httpx.Client, server: Running, facts: Path
) -> None:
    asked(page, "start")
    leaver = http.client.HTTPConnection("127.0.0.1", server.port)
    body = json.dumps({"name": "s__never"})
    leaver.request("POST", f"{TOOLS}/call", body, {"content-type": "application/json"})
    wait_until(facts.with_suffix(".never").exists)
    leaver.close()
    wait_until(lambda: asked(page, "call", name="s__told")["text"] == "cancelled: 1")


def test_other_sites_start_and_call_nothing(page: httpx.Client, facts: Path) -> None:
    for headers in ({"origin": "https://evil.example"}, {"host": "evil.example"}):
        for path in ("start", "switch", "permission", "call"):
            reply = page.post(f"{TOOLS}/{path}", json={"name": "s__add"}, headers=headers)
            assert reply.status_code in (403, 421), reply.text
    plain = page.post(
        f"{TOOLS}/start", content="{}", headers={"content-type": "text/plain", "origin": "null"}
    )
    assert plain.status_code in (400, 403, 415)
    assert not facts.exists()


def test_other_users_of_the_machine_get_nothing(
    page: httpx.Client, facts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    me = same_user.os.getuid()
    monkeypatch.setattr(same_user.os, "getuid", lambda: me + 12_345)
    monkeypatch.setattr(same_user, "ROOT", me + 12_345)
    assert page.get(TOOLS).status_code == 403
    for path in ("start", "switch", "permission", "call"):
        assert page.post(f"{TOOLS}/{path}", json={}).json()["error"]["code"] == "tools_not_allowed"
    assert not facts.exists()


def test_with_keys_tools_need_the_scope_admin(facts: Path, chat: FakeChat) -> None:
    access = AccessPolicy(api_keys=[KEY], admin_keys=[ADMIN])
    app = create_app(chat, access=access)  # type: ignore[arg-type]
    with TestClient(app, base_url="http://127.0.0.1:8000") as client:
        for key, status in ((KEY, 403), (ADMIN, 200)):
            headers = {"authorization": f"Bearer {key}"}
            assert client.get(TOOLS, headers=headers).status_code == status
        user = {"authorization": f"Bearer {KEY}"}
        assert client.post(f"{TOOLS}/start", json={}, headers=user).status_code == 403
    assert not facts.exists()


def test_rounds_of_an_answer_are_kept_for_the_terminal(page: httpx.Client) -> None:
    chat = page.post("/api/v1/chats", json={"title": "One"}).json()["id"]
    messages = f"/api/v1/chats/{chat}/messages"
    answer = page.post(messages, json={"role": "assistant", "state": "writing"}).json()["id"]
    call = {"id": "1", "name": "s__add", "arguments": "{}", "state": "done", "result": "42"}
    call["seconds"] = 0.5
    image = {**call, "images": ["data:image/png;base64,aGk="]}
    rounds = [{"text": "Look:", "thinking": "", "calls": [call, image]}]
    change = {"text": "It is 42.", "state": "done", "rounds": rounds}
    assert page.patch(f"{messages}/{answer}", json=change).status_code == 200
    [read] = page.get(f"/api/v1/chats/{chat}").json()["messages"]
    assert read["rounds"] == rounds
    odd = {**call, "images": ["https://example.org/a.png"]}
    wrong = {**change, "rounds": [{"text": "", "calls": [odd]}]}
    assert page.patch(f"{messages}/{answer}", json=wrong).status_code == 400
    del change["rounds"]
    page.patch(f"{messages}/{answer}", json=change)
    [read] = page.get(f"/api/v1/chats/{chat}").json()["messages"]
    assert read["rounds"] == rounds, "what is not sent stays"
