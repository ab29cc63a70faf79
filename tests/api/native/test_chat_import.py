"""`POST /api/v1/chats/import`: exported chats become those of the request's key."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from mlxserve.api.access.policy import AccessPolicy
from mlxserve.api.app import create_app
from tests.api.fake_chat import FakeChat
from tests.history.exported import chatgpt, open_webui

IMPORT = "/api/v1/chats/import"
KEYS = ("key-of-alice-0000", "key-of-bob-000000")


@pytest.fixture
def alice(tmp_path: Path, chat: FakeChat, monkeypatch: pytest.MonkeyPatch) -> Iterator[TestClient]:
    monkeypatch.setenv("MLXSERVE_HOME", str(tmp_path))
    app = create_app(chat, access=AccessPolicy(api_keys=KEYS))  # type: ignore[arg-type]
    headers = {"authorization": f"Bearer {KEYS[0]}"}
    with TestClient(app, base_url="http://127.0.0.1:8000", headers=headers) as client:
        yield client


def test_chats_are_imported_for_the_key_that_sends_them(alice: TestClient) -> None:
    sent = {"chats": [chatgpt(), open_webui(), {"title": "Bad", "mapping": 7}]}
    reply = alice.post(IMPORT, json=sent).json()
    assert (reply["imported"], reply["present"], reply["refused"]) == (2, 0, 1)
    assert reply["problems"] == ["'Bad' has a wrong value in 'mapping': '7'."]
    assert alice.post(IMPORT, json=sent).json()["present"] == 2
    titles = {card["title"] for card in alice.get("/api/v1/chats").json()["data"]}
    assert titles == {"Blue sky", "A picture"}
    bob = {"authorization": f"Bearer {KEYS[1]}"}
    assert alice.get("/api/v1/chats", headers=bob).json()["data"] == []


@pytest.mark.parametrize("chats", [[], [{}], [7], {}, "x"])
def test_a_body_without_chats_is_refused(alice: TestClient, chats: Any) -> None:
    reply = alice.post(IMPORT, json={"chats": chats})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"].startswith("chats")


def test_nobody_imports_without_a_key(alice: TestClient) -> None:
    stranger = {"authorization": "Bearer another"}
    reply = alice.post(IMPORT, json={"chats": [chatgpt()]}, headers=stranger)
    assert reply.status_code == 401
