"""What other programs of the same user write is told to followers, as the server's own writes are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from mlxserve.api.chats import file_watch
from mlxserve.cli.chats import set_
from mlxserve.history.messages import Role
from mlxserve.history.store import Store
from tests.api.chats.following import PATIENCE, Follower
from tests.api.serving import Running, StartServer
from tests.waiting import wait_until

CHATS = "/api/v1/chats"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MLXSERVE_HOME", str(tmp_path))
    monkeypatch.setattr(file_watch, "LOOK_SECONDS", 0.02)
    return tmp_path


@pytest.fixture
def disk(home: Path) -> Iterator[Store]:
    """The file as another program has it open."""
    store = Store.open(home / "chat.sqlite")
    yield store
    store.close()


@pytest.fixture
def server(start_server: StartServer) -> Running:
    return start_server()


def test_followers_hear_of_what_other_programs_write(server: Running, disk: Store) -> None:
    chat, other = disk.create_chat("One"), disk.create_chat("Two")
    of_list, of_chat = Follower(server.url, None), Follower(server.url, chat.id)
    for each in (of_list, of_chat):
        each.wait_for("state")
    disk.rename(chat.id, "Another title")
    of_chat.wait_for("chat", lambda card: card["title"] == "Another title")
    of_list.wait_for("list", lambda data: data["id"] == chat.id)
    message = disk.add(chat.id, None, Role.USER, "Hello")
    of_chat.wait_for("chat", lambda card: card["leaf_id"] == message.id)
    disk.set_system(chat.id, "Be brief.")
    of_chat.wait_for("chat", lambda card: card["system"] == "Be brief.")
    set_([chat.id, other.id], folder="Work", pin=True)
    of_chat.wait_for("chat", lambda card: (card["folder"], card["is_pinned"]) == ("Work", True))
    of_chat.wait_for("list", lambda data: data["id"] == other.id)
    made = disk.create_chat("Three")
    for each in (of_list, of_chat):
        each.wait_for("list", lambda data: data["id"] == made.id)
    disk.delete(chat.id)
    of_chat.wait_for("deleted")
    of_list.close()
    of_chat.close()


def test_what_was_written_while_nobody_followed_is_told_to_who_comes_back(
    server: Running, disk: Store
) -> None:
    chat = disk.create_chat("One")
    leaves = Follower(server.url, None)
    leaves.wait_for("state")
    disk.rename(chat.id, "Seen")
    leaves.wait_for("list")
    leaves.close()
    disk.rename(chat.id, "Missed")
    back = Follower(server.url, None, after=leaves)
    # The state, if the server has heard of it before anybody came.
    wait_until(lambda: {"list", "state"} & {name for name, _ in back.events}, PATIENCE)
    back.close()


def test_what_the_server_writes_is_told_once(server: Running, disk: Store) -> None:
    follower = Follower(server.url, None)
    follower.wait_for("state")
    expected: list[Any] = []
    with httpx.Client(base_url=server.url, timeout=60) as client:
        for number in range(3):
            made = client.post(CHATS, json={"title": str(number)}).json()["id"]
            expected.append({"id": made})
            other = disk.create_chat("Of another program").id
            expected.append({"id": other})
            follower.wait_for("list", {"id": other}.__eq__)
    assert follower.of("list") == expected
    follower.close()
