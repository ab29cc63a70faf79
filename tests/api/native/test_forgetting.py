"""`/api/v1/cache/forget`, and the cached pages of chats that are deleted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from mlxserve.api.access.policy import AccessPolicy
from mlxserve.api.app import create_app
from mlxserve.core.errors import EngineStopped
from tests.api.fake_chat import FakeChat
from tests.api.serving import StartServer

FORGET = "/api/v1/cache/forget"
HI = [{"role": "user", "content": "Hi"}]
ANSWERED = [*HI, {"role": "assistant", "content": "Yes."}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def test_conversations_are_rendered_as_their_prompts_were(
    client: TestClient, chat: FakeChat
) -> None:
    reply = client.post(FORGET, json={"conversations": [HI, ANSWERED], "kept": [HI]})
    assert reply.status_code == 200, reply.text
    assert reply.json() == {
        "object": "cache.forgotten",
        "models": ["fake"],
        "pages": 2,
        "pages_on_disk": 1,
    }
    [forgotten] = chat.forgotten
    assert forgotten.prompts == [list(b"Hi"), list(b"HiYes.")]
    assert forgotten.kept == [list(b"Hi")]
    asked = [one.kwargs for one in chat.rendered]
    assert [one["add_generation_prompt"] for one in asked] == [True, False, True]
    assert [one.get("continue_final_message") for one in asked] == [None, True, None]


def test_prompts_with_and_without_tools_and_variables_are_found(
    client: TestClient, chat: FakeChat
) -> None:
    body = {"conversations": [HI], "tools": [TOOL], "reasoning_effort": "low", "cache_salt": "s"}
    assert client.post(FORGET, json=body).status_code == 200
    seen = [(len(one.tools), one.kwargs.get("reasoning_effort")) for one in chat.rendered]
    assert seen == [(1, None), (1, "low"), (0, None), (0, "low")]
    assert chat.forgotten[0].cache_salt == "s"


def test_what_the_model_cannot_have_computed_is_passed_over(
    client: TestClient, chat: FakeChat
) -> None:
    long = [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "x"}}]}]
    assert client.post(FORGET, json={"conversations": [long, HI]}).status_code == 200
    assert chat.forgotten[0].prompts == [list(b"Hi")]


@pytest.mark.parametrize(
    "body", [{}, {"conversations": "x"}, {"conversations": [[]]}, {"conversations": [HI] * 1_001}]
)
def test_other_bodies_are_refused(client: TestClient, body: dict[str, Any]) -> None:
    reply = client.post(FORGET, json=body)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"].startswith("conversations")


def test_a_key_forgets_its_own_pages_only(chat: FakeChat) -> None:
    app = create_app(chat, access=AccessPolicy(api_keys=["a-key-of-alice"]))  # type: ignore[arg-type]
    with TestClient(app, base_url="http://127.0.0.1:8000") as client:
        assert client.post(FORGET, json={"conversations": [HI]}).status_code == 401
        headers = {"authorization": "Bearer a-key-of-alice"}
        client.post("/v1/chat/completions", json={"messages": HI}, headers=headers)
        client.post(FORGET, json={"conversations": [HI]}, headers=headers)
    assert chat.forgotten[0].cache_salt == chat.submitted[0].cache_salt != ""


# ---- chats that are deleted


@pytest.fixture
def page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start_server: StartServer
) -> httpx.Client:
    monkeypatch.setenv("MLXSERVE_HOME", str(tmp_path))
    return httpx.Client(base_url=start_server().url, timeout=60)


def chat_of(page: httpx.Client, question: str, answer: str, model: str) -> int:
    chat_id = page.post("/api/v1/chats", json={"title": question}).json()["id"]
    messages = f"/api/v1/chats/{chat_id}/messages"
    asked = page.post(messages, json={"role": "user", "text": question}).json()["id"]
    body = {"role": "assistant", "text": answer, "parent_id": asked, "model": model}
    assert page.post(messages, json=body).status_code == 200
    return int(chat_id)


def test_a_deleted_chat_takes_its_pages_with_it(page: httpx.Client, chat: FakeChat) -> None:
    with page:
        chat_of(page, "Hi you", "No.", "fake")
        gone = chat_of(page, "Hi", "Yes.", "other")
        reply = page.delete(f"/api/v1/chats/{gone}").json()
        assert reply["deleted"]
        assert reply["cache"]["pages_on_disk"] == 1
        assert reply["cache"]["models_not_loaded"] == ["other"]
        [forgotten] = chat.forgotten
        assert forgotten.prompts == [list(b"HiYes.")]
        assert forgotten.kept == [list(b"Hi you")]


def test_a_chat_that_no_request_could_have_been_is_deleted(
    page: httpx.Client, chat: FakeChat
) -> None:
    with page:
        gone = chat_of(page, "Hi", "Yes.", "fake")
        [_, answer] = page.get(f"/api/v1/chats/{gone}").json()["messages"]
        call = {"id": "", "name": "", "arguments": "", "state": "failed"}
        change = {"text": "Yes.", "state": "done", "rounds": [{"text": "", "calls": [call]}]}
        url = f"/api/v1/chats/{gone}/messages/{answer['id']}"
        assert page.patch(url, json=change).status_code == 200
        assert page.delete(f"/api/v1/chats/{gone}").json()["deleted"]
        assert chat.forgotten[0].prompts == []


def test_a_chat_is_deleted_though_the_engine_has_stopped(
    page: httpx.Client, chat: FakeChat
) -> None:
    with page:
        gone = chat_of(page, "Hi", "Yes.", "fake")
        chat.submit_error = EngineStopped("The engine has stopped.")
        reply = page.delete(f"/api/v1/chats/{gone}")
        assert reply.status_code == 200
        assert "stopped" in reply.json()["cache"]["problem"]
        assert page.get("/api/v1/chats").json()["data"] == []
