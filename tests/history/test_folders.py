"""Chats are put into folders and pinned, and the list shows pinned ones first."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from mlxserve.history import chat_file
from mlxserve.history.chat_file import MIGRATIONS
from mlxserve.history.folders import MAX_NAME, BadFolderName, folder_name, folders_of
from mlxserve.history.messages import Role
from mlxserve.history.store import Store


def test_a_chat_is_pinned_moved_and_taken_out(store: Store) -> None:
    first, second = store.create_chat("first"), store.create_chat("second")
    store.place(first.id, is_pinned=True)
    store.place(first.id, folder="Work")
    assert [chat.title for chat in store.chats()] == ["first", "second"]
    placed = store.chat(first.id)
    assert (placed.folder, placed.is_pinned, placed.updated_at) == ("Work", True, first.updated_at)
    assert folders_of(store.chats()) == ["Work"]
    store.place(first.id, folder="", is_pinned=False)
    assert (store.chat(first.id).folder, store.chat(first.id).is_pinned) == ("", False)
    assert [chat.title for chat in store.chats()] == ["second", "first"]
    assert (store.chat(second.id).folder, store.chat(second.id).is_pinned) == ("", False)


def test_a_pinned_chat_is_listed_however_old_it_is(store: Store) -> None:
    old = store.create_chat("old")
    store.place(old.id, is_pinned=True)
    for number in range(3):
        store.create_chat(f"newer {number}")
    assert [chat.title for chat in store.chats(limit=2)] == ["old", "newer 2"]


def test_a_folder_is_the_same_in_upper_and_lower_case(store: Store) -> None:
    one, two = store.create_chat("one"), store.create_chat("two")
    store.place(one.id, folder="Straße")
    store.place(two.id, folder="  STRASSE ")
    assert folders_of(store.chats()) == ["Straße"]
    store.place(two.id, folder="")
    store.place(one.id, folder="STRASSE")  # the only one in it: the folder is renamed
    assert folders_of(store.chats()) == ["STRASSE"]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Work", "Work"),
        ("  two\t words\n", "two words"),
        ("", ""),
        ("   ", ""),
        ("Caf\u0065\u0301", "Café"),
        ("日本/旅行 🏝", "日本/旅行 🏝"),
        ("x" * MAX_NAME, "x" * MAX_NAME),
    ],
)
def test_a_name_is_kept_on_one_line(text: str, name: str) -> None:
    assert folder_name(text) == name


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x" * (MAX_NAME + 1), "60 characters, not 61"),
        ("a\x00b", "control characters"),
        ("\x1b[31mred", "control characters"),
        ("right\u202eleft", "invisible"),
        ("tag\U000e0041", "invisible"),
        ("half\ud83d", "invisible"),
    ],
)
def test_a_bad_name_is_refused_and_changes_nothing(store: Store, text: str, words: str) -> None:
    chat = store.create_chat("one")
    store.place(chat.id, folder="Work")
    with pytest.raises(BadFolderName, match=words):
        store.place(chat.id, folder=text, is_pinned=True)
    assert (store.chat(chat.id).folder, store.chat(chat.id).is_pinned) == ("Work", False)


def test_chats_of_the_version_before_folders_are_migrated(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = next(at for at, step in enumerate(MIGRATIONS) if "is_pinned" in step)
    monkeypatch.setattr(chat_file, "MIGRATIONS", MIGRATIONS[:before])
    Store.open(path).close()
    with closing(sqlite3.connect(path)) as db, db:
        db.execute(
            "INSERT INTO chats(title, created_at, updated_at, system) VALUES ('old', 1, 2, 's')"
        )
        db.execute(
            "INSERT INTO messages(chat_id, role, text, state, created_at, touched_at)"
            " VALUES (1, 'user', 'Why?', 'done', 1, 1)"
        )
    monkeypatch.undo()
    with closing(Store.open(path)) as newest:
        [chat] = newest.chats()
        assert (chat.title, chat.system, chat.folder, chat.is_pinned) == ("old", "s", "", False)
        assert [message.text for message in newest.messages(chat.id)] == ["Why?"]
        newest.place(chat.id, folder="Work", is_pinned=True)
        newest.add(chat.id, 1, Role.ASSISTANT, "Because.")
    with closing(Store.open(path)) as again:
        assert (again.chats()[0].folder, again.chats()[0].is_pinned) == ("Work", True)
    copy = path.with_suffix(f".v{before}.sqlite")
    with closing(sqlite3.connect(copy)) as db:
        assert db.execute("SELECT title FROM chats").fetchall() == [("old",)]
