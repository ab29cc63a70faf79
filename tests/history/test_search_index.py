"""The search index is dropped on a full disk, and comes back where there is room."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from mlxserve.history import search_index
from mlxserve.history.chat_file import StoreError, open_file
from mlxserve.history.messages import Role, State
from mlxserve.history.store import Store


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "chat.sqlite"


def filled(path: Path, num: int = 3) -> list[int]:
    store = Store.open(path)
    chats = [store.create_chat(f"chat {number}").id for number in range(num)]
    for chat_id in chats:
        store.add(chat_id, None, Role.USER, f"the words of {chat_id} \U0001f40d")
        store.add(chat_id, None, Role.ASSISTANT, "unfinished", state=State.WRITING)
    store.close()
    return chats


def dropped(path: Path) -> None:
    db = open_file(path)
    with search_index.small_deletes(db):
        db.execute("BEGIN IMMEDIATE")
        search_index.drop(db)
        db.execute("COMMIT")
    assert not search_index.is_complete(db)
    db.close()


def found(store: Store, words: str) -> list[int]:
    return [hit.chat.id for hit in store.search(words)]


def test_a_search_finds_the_same_without_the_index(path: Path) -> None:
    chats = filled(path)
    dropped(path)
    store = Store(open_file(path))
    assert found(store, "WORDS of") == chats[::-1]
    assert found(store, f"words {chats[1]}") == [chats[1]]
    assert found(store, "unfinished") == []
    store.delete(chats[0])
    store.add(chats[1], None, Role.USER, "words, added")
    assert found(store, "words") == [chats[1], chats[2], chats[1]]
    store.close()


def test_the_index_is_built_again_where_there_is_room(path: Path) -> None:
    chats = filled(path)
    dropped(path)
    Store.open(path).close()
    db = open_file(path)
    assert search_index.is_complete(db)
    store = Store(db)
    assert found(store, "words") == chats[::-1]
    [answer] = [each for each in store.messages(chats[0]) if each.role is Role.ASSISTANT]
    assert not found(store, "unfinished")
    store.save(answer)
    store.delete(chats[1])
    assert found(store, "words") == [chats[2], chats[0]]
    store.close()


def test_without_room_it_is_not_built(path: Path) -> None:
    filled(path)
    dropped(path)
    db = open_file(path)
    assert not search_index.build(db, 1 << 10)
    assert not search_index.is_complete(db)
    assert search_index.build(db, 1 << 30)
    assert search_index.build(db, 1 << 30)
    db.execute("INSERT INTO messages_text(messages_text, rank) VALUES ('integrity-check', 0)")
    db.close()


@pytest.mark.parametrize("before", [0, 1, 2])
def test_how_sqlite_deletes_is_left_as_it_was(path: Path, before: int) -> None:
    db = open_file(path)
    db.execute(f"PRAGMA secure_delete = {('OFF', 'ON', 'FAST')[before]}")
    with search_index.small_deletes(db):
        assert db.execute("PRAGMA secure_delete").fetchone()[0] == 2
    assert db.execute("PRAGMA secure_delete").fetchone()[0] == before
    db.close()


def grown(store: Store, chat_id: int, text: Callable[[int], str]) -> int:
    for number in range(1_000):
        try:
            store.add(chat_id, None, Role.USER, text(number))
        except StoreError:
            return number
    raise AssertionError("the file has no limit")


def test_a_file_at_its_limit_loses_the_index_before_a_message(path: Path) -> None:
    store = Store.open(path, max_bytes=1 << 20)
    chat_id = store.create_chat("all of it").id
    count = grown(store, chat_id, lambda number: f"{number} " + sqlite3.sqlite_version * 2_000)
    size = sum(len(each.text) for each in store.messages(chat_id))
    assert size > (1 << 20) // 2, f"{count} messages of {size} characters"
    store.delete(chat_id)
    assert not store.chats()
    again = store.create_chat("there is room again").id
    store.add(again, None, Role.USER, "x" * 100_000)
    store.close()
