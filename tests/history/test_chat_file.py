import sqlite3
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mlxserve.history import chat_file
from mlxserve.history.chat_file import MIGRATIONS, StoreError
from mlxserve.history.store import Store


def test_only_the_owner_can_read_the_files(store: Store, path: Path) -> None:
    store.create_chat("hello")
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    for file in path.parent.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file


def test_several_terminals_create_the_file_and_its_folder_at_the_same_time(tmp_path: Path) -> None:
    barrier = threading.Barrier(4, timeout=30)
    problems: list[StoreError] = []

    def open_them(_: int) -> None:
        for number in range(50):  # one in ten met the other terminals when it did not wait for them
            barrier.wait()
            try:
                Store.open(tmp_path / str(number) / "chats.sqlite").close()
            except StoreError as problem:
                problems.append(problem)

    with ThreadPoolExecutor(4) as terminals:
        for done in [terminals.submit(open_them, terminal) for terminal in range(4)]:
            done.result()
    assert not problems


def test_chats_of_the_first_version_are_migrated(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_file, "MIGRATIONS", MIGRATIONS[:1])
    first = Store.open(path)
    with sqlite3.connect(path) as db:
        db.execute("INSERT INTO chats(title, created_at, updated_at) VALUES ('old', 1, 2)")
    db.close()
    first.close()
    monkeypatch.undo()
    newest = Store.open(path)
    assert [(chat.title, chat.system) for chat in newest.chats()] == [("old", "")]
    newest.close()


def test_a_file_of_a_newer_version_is_left_alone(path: Path, store: Store) -> None:
    store.close()
    with sqlite3.connect(path) as db:
        db.execute(f"PRAGMA user_version = {len(MIGRATIONS) + 1}")
    db.close()
    with pytest.raises(StoreError, match="newer version"):
        Store.open(path)


def test_a_file_other_than_a_database_is_refused_with_what_to_do(path: Path) -> None:
    path.parent.mkdir()
    path.write_text("not a database, but long enough to be looked at " * 100)
    with pytest.raises(StoreError, match="MLXSERVE_HOME"):
        Store.open(path)


def test_a_folder_that_cannot_be_created_is_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="MLXSERVE_HOME"):
        Store.open(tmp_path / "file" / "chat.sqlite")


def test_a_migration_keeps_the_chats_and_a_backup(
    store: Store, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = store.create_chat("old words")
    store.close()
    step = "ALTER TABLE chats ADD COLUMN colour TEXT NOT NULL DEFAULT 'blue';"
    monkeypatch.setattr(chat_file, "MIGRATIONS", (*MIGRATIONS, step))
    newer = Store.open(path)
    assert newer.chat(chat.id).title == "old words"
    newer.close()
    copy = path.with_suffix(f".v{len(MIGRATIONS)}.sqlite")
    assert stat.S_IMODE(copy.stat().st_mode) == 0o600
    monkeypatch.undo()
    older = Store.open(copy)
    assert older.chat(chat.id).title == "old words"
    older.close()


def test_a_failed_migration_changes_nothing(
    store: Store, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = store.create_chat("words")
    store.close()
    step = "CREATE TABLE extra (a);\nSELECT nonsense FROM nowhere;"
    monkeypatch.setattr(chat_file, "MIGRATIONS", (*MIGRATIONS, step))
    with pytest.raises(StoreError):
        Store.open(path)
    monkeypatch.undo()
    again = Store.open(path)
    assert again.chat(chat.id).title == "words"
    again.close()
