"""Followers hear of what others do to the list of chats, each owner of its own list."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from starlette.testclient import TestClient

from mlxserve.api.access.policy import AccessPolicy
from mlxserve.api.app import create_app
from tests.api.chats.following import PATIENCE, Follower
from tests.api.fake_chat import FakeChat
from tests.api.serving import Running, StartServer
from tests.history.exported import chatgpt
from tests.waiting import wait_until

CHATS = "/api/v1/chats"
KEYS = ("key-of-alice-0000", "key-of-bob-000000")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MLXSERVE_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path


@pytest.fixture
def server(start_server: StartServer) -> Running:
    return start_server(access=AccessPolicy(api_keys=KEYS))


@pytest.fixture
def alice(server: Running) -> Iterator[httpx.Client]:
    headers = {"authorization": f"Bearer {KEYS[0]}"}
    with httpx.Client(base_url=server.url, timeout=60, headers=headers) as client:
        yield client


def made(client: httpx.Client) -> int:
    return int(client.post(CHATS, json={"title": "One"}).json()["id"])


def test_followers_of_another_chat_and_of_the_list_hear_of_each_change(
    server: Running, alice: httpx.Client
) -> None:
    own, other = made(alice), made(alice)
    followers = [Follower(server.url, each, key=KEYS[0]) for each in (own, None)]
    strangers = [Follower(server.url, None, key=KEYS[1])]
    changed = Follower(server.url, other, key=KEYS[0])
    for each in (*followers, *strangers, changed):
        each.wait_for("state")
    changes: list[int | None] = []

    def is_heard(by: Follower) -> bool:
        return [data["id"] for data in by.of("list")] == changes

    def told(chat: int | None) -> None:
        """Wait until a change is heard, before the next one is made: nothing is told twice."""
        changes.append(chat)
        wait_until(lambda: all(map(is_heard, followers)), PATIENCE)

    alice.patch(f"{CHATS}/{other}", json={"title": "Two"})
    told(other)
    alice.post(f"{CHATS}/{other}/messages", json={"role": "user", "text": "Hm"})
    told(other)
    leaf = alice.get(f"{CHATS}/{other}").json()["leaf_id"]
    asked = {"text": "Why?", "leaf_id": leaf, "parent_id": leaf}
    alice.post(f"{CHATS}/{other}/answers", json=asked).raise_for_status()
    told(other)
    changed.wait_for("end")
    told_of_itself = changed.of("list")
    third = made(alice)
    told(third)
    alice.post(f"{CHATS}/import", json={"chats": [chatgpt()]}).raise_for_status()
    told(None)
    alice.patch(f"{CHATS}/{other}", json={"draft": "not sent"})
    alice.delete(f"{CHATS}/{other}")
    told(other)
    assert told_of_itself == []
    changed.wait_for("deleted")
    assert {name for each in strangers for name, _ in each.events} == {"state"}
    for each in (*followers, *strangers, changed):
        each.close()


def test_the_list_is_followed_on_after_the_last_event(server: Running, alice: httpx.Client) -> None:
    stays, leaves = (Follower(server.url, None, key=KEYS[0]) for _ in range(2))
    for each in (stays, leaves):
        each.wait_for("state")
    leaves.close()
    missed = made(alice)
    stays.wait_for("list")
    back = Follower(server.url, None, after=leaves, key=KEYS[0])
    assert back.wait_for("list") == {"id": missed}
    assert back.of("state") == []
    for each in (stays, back):
        each.close()


@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer another"}])
def test_nobody_follows_the_list_without_a_key(chat: FakeChat, headers: dict[str, str]) -> None:
    app = create_app(chat, access=AccessPolicy(api_keys=KEYS))  # type: ignore[arg-type]
    with TestClient(app, base_url="http://127.0.0.1:8000") as client:
        assert client.get(f"{CHATS}/events", headers=headers).status_code == 401
        own = {"authorization": f"Bearer {KEYS[0]}"}
        assert client.head(f"{CHATS}/events", headers=own).status_code == 200
