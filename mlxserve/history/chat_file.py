"""The SQLite file of the chats: its schema, and the migration of older versions."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from mlxserve.system.files import NO_ROOM, make_marked_folder

_BUSY_MILLISECONDS = 5_000

# Entry n migrates the file from version n to n + 1. Never edit a released entry; append.
MIGRATIONS: tuple[str, ...] = (
    """
    CREATE TABLE chats (
        id INTEGER PRIMARY KEY,
        title TEXT NOT NULL,
        created_at REAL NOT NULL,
        updated_at REAL NOT NULL,
        leaf_id INTEGER REFERENCES messages(id) ON DELETE SET NULL
    );
    CREATE TABLE messages (
        id INTEGER PRIMARY KEY,
        chat_id INTEGER NOT NULL REFERENCES chats(id) ON DELETE CASCADE,
        parent_id INTEGER REFERENCES messages(id) ON DELETE CASCADE,
        role TEXT NOT NULL,
        text TEXT NOT NULL,
        thinking TEXT NOT NULL DEFAULT '',
        state TEXT NOT NULL,
        error TEXT NOT NULL DEFAULT '',
        model TEXT NOT NULL DEFAULT '',
        prompt_tokens INTEGER,
        cached_tokens INTEGER,
        completion_tokens INTEGER,
        first_token_seconds REAL,
        decode_seconds REAL,
        created_at REAL NOT NULL,
        touched_at REAL NOT NULL
    );
    CREATE TABLE settings (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
    CREATE INDEX messages_by_parent ON messages(chat_id, parent_id);
    CREATE INDEX messages_writing ON messages(touched_at) WHERE state = 'writing';
    CREATE INDEX chats_by_update ON chats(updated_at);

    CREATE VIRTUAL TABLE messages_text USING fts5(
        text, content='messages', content_rowid='id', tokenize='trigram'
    );
    CREATE TRIGGER index_new AFTER INSERT ON messages WHEN new.state != 'writing' BEGIN
        INSERT INTO messages_text(rowid, text) VALUES (new.id, new.text);
    END;
    CREATE TRIGGER index_gone AFTER DELETE ON messages WHEN old.state != 'writing' BEGIN
        INSERT INTO messages_text(messages_text, rowid, text) VALUES ('delete', old.id, old.text);
    END;
    CREATE TRIGGER index_out AFTER UPDATE OF text, state ON messages WHEN old.state != 'writing'
    BEGIN
        INSERT INTO messages_text(messages_text, rowid, text) VALUES ('delete', old.id, old.text);
    END;
    CREATE TRIGGER index_in AFTER UPDATE OF text, state ON messages WHEN new.state != 'writing'
    BEGIN
        INSERT INTO messages_text(rowid, text) VALUES (new.id, new.text);
    END;
    """,
    "ALTER TABLE chats ADD COLUMN system TEXT NOT NULL DEFAULT '';",
    """
    ALTER TABLE messages ADD COLUMN differs_at INTEGER;
    ALTER TABLE messages ADD COLUMN miss TEXT NOT NULL DEFAULT '';
    """,
    """
    ALTER TABLE chats ADD COLUMN left_out_last INTEGER;
    ALTER TABLE chats ADD COLUMN left_out_newest INTEGER;
    ALTER TABLE chats ADD COLUMN summary TEXT NOT NULL DEFAULT '';
    """,
    "ALTER TABLE messages ADD COLUMN rounds TEXT NOT NULL DEFAULT '';",
    "ALTER TABLE messages ADD COLUMN images TEXT NOT NULL DEFAULT '';",
    "ALTER TABLE messages ADD COLUMN accepted_tokens INTEGER;",
    # The process that wrote a message last: an answer of one that has ended is not being written.
    "ALTER TABLE messages ADD COLUMN writer INTEGER;",
    """
    ALTER TABLE chats ADD COLUMN folder TEXT NOT NULL DEFAULT '';
    ALTER TABLE chats ADD COLUMN is_pinned INTEGER NOT NULL DEFAULT 0;
    CREATE INDEX chats_by_pin ON chats(is_pinned, updated_at);
    CREATE INDEX chats_by_folder ON chats(folder) WHERE folder != '';
    """,
    # Without reuse of ids: a deleted prompt's id is none of a later one.
    """
    CREATE TABLE prompts (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        name TEXT NOT NULL UNIQUE,
        system TEXT NOT NULL,
        sampling TEXT NOT NULL,
        updated_at REAL NOT NULL
    );
    """,
    "ALTER TABLE messages ADD COLUMN page_size INTEGER;",
)


class StoreError(Exception):
    """The chats cannot be read or written; the message says what to do."""


class DiskFull(StoreError):
    """There is no room on the disk, or the chats may take no more of it."""


def is_full(error: sqlite3.Error | OSError) -> bool:
    """True for an error of writing that room on the disk may mend."""
    if isinstance(error, OSError):
        return error.errno in NO_ROOM
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    return code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)


def not_saved(reason: object) -> str:
    """Return the sentence for what cannot be written."""
    return (
        f"Cannot save the chat: {reason}. Free some disk space, or set MLXSERVE_HOME to another "
        "folder."
    )


def open_file(path: Path) -> sqlite3.Connection:
    """Open or create the file, readable by its owner only. Raises StoreError, also on a full disk."""
    try:
        make_marked_folder(path.parent)
        # Created here with the right mode, which the -wal and -shm files inherit.
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
        return _connect(str(path), path)
    except (OSError, sqlite3.Error) as error:
        raise (DiskFull if is_full(error) else StoreError)(
            f"Cannot open the chats in {path}: {error}. "
            "Repair or move the file, or set MLXSERVE_HOME to another folder."
        ) from error


def open_memory() -> sqlite3.Connection:
    """A database without a file, for when the file cannot be opened."""
    return _connect(":memory:", None)


def _connect(name: str, path: Path | None) -> sqlite3.Connection:
    # Opened in one thread and used from another, but never from two at once.
    db = sqlite3.connect(name, isolation_level=None, check_same_thread=False)
    try:
        db.row_factory = sqlite3.Row
        db.execute(f"PRAGMA busy_timeout = {_BUSY_MILLISECONDS}")
        _write_ahead(db)
        # A power failure may lose the last second; a crash of this process loses nothing.
        db.execute("PRAGMA synchronous = NORMAL")
        db.execute("PRAGMA foreign_keys = ON")
        # Pages of 4 KiB; small beside the reserve.
        db.execute("PRAGMA wal_autocheckpoint = 256")
        _migrate(db, path)
    except BaseException:
        db.close()
        raise
    return db


def _write_ahead(db: sqlite3.Connection) -> None:
    """Enable write-ahead logging, with retries.

    SQLite ignores busy_timeout for this statement, so of several terminals that create a file at
    the same time all but one would fail.
    """
    give_up = time.monotonic() + _BUSY_MILLISECONDS / 1000
    while True:
        try:
            db.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > give_up:
                raise
            time.sleep(0.01)
        else:
            return


def _migrate(db: sqlite3.Connection, path: Path | None) -> None:
    version = _schema_version(db)
    if version > len(MIGRATIONS):
        raise StoreError(
            f"{path} was written by a newer version of mlxserve. "
            "Update mlxserve, or set MLXSERVE_HOME to another folder."
        )
    if version == len(MIGRATIONS):
        return
    if version > 0 and path is not None:
        _back_up(db, path.with_suffix(f".v{version}.sqlite"))
    # Of two terminals that start at the same time, the second waits here and finds the work done.
    db.execute("BEGIN EXCLUSIVE")
    try:
        for step in MIGRATIONS[_schema_version(db) :]:
            for statement in statements(step):
                db.execute(statement)
        db.execute(f"PRAGMA user_version = {len(MIGRATIONS)}")
    except BaseException:
        db.execute("ROLLBACK")
        raise
    db.execute("COMMIT")


def _schema_version(db: sqlite3.Connection) -> int:
    return int(db.execute("PRAGMA user_version").fetchone()[0])


def statements(script: str) -> Iterator[str]:
    """The statements of a script. `executescript` would commit the surrounding transaction."""
    statement = ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""


def _back_up(db: sqlite3.Connection, path: Path) -> None:
    os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
    with closing(sqlite3.connect(path)) as copy:
        db.backup(copy)
