"""SearchIndex: the full-text index of the messages, which the chats can do without.

It takes up to five times the room of the texts, and what a write adds to it has no bound: SQLite merges
its parts now and then. So on a full disk it goes first, and comes back once there is room. Until then
a search reads the texts.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager

from mlxserve.history.chat_file import MIGRATIONS, statements

_GROWTH = 12  # bytes that building takes, in the log and in the file, for each byte of a text
# Bytes of messages beyond which it is not built again: 16 MB of text take about five seconds, for
# which another terminal waits that wants to write.
_MAX_BUILT = 16 << 20
_TRIGGERS = [
    each for each in statements(MIGRATIONS[0]) if each.lstrip().startswith("CREATE TRIGGER")
]


def is_complete(db: sqlite3.Connection) -> bool:
    """True if the index has every message that is not being written."""
    return bool(db.execute("SELECT 1 FROM sqlite_master WHERE name = 'index_new'").fetchone())


def drop(db: sqlite3.Connection) -> None:
    """Empty the index and stop writing to it, in the transaction that has begun."""
    for name in ("index_new", "index_gone", "index_out", "index_in"):
        db.execute(f"DROP TRIGGER IF EXISTS {name}")
    db.execute("INSERT INTO messages_text(messages_text) VALUES ('delete-all')")


def build(db: sqlite3.Connection, room: float) -> bool:
    """Build the index if that takes at most `room` bytes. False if it does not. Raises sqlite3.Error."""
    size = _used(db)
    if size > _MAX_BUILT or _GROWTH * size > room:
        return False
    db.execute("BEGIN IMMEDIATE")
    try:
        if not is_complete(db):  # another terminal may have built it meanwhile
            for trigger in _TRIGGERS:
                db.execute(trigger)
            db.execute(
                "INSERT INTO messages_text(rowid, text)"
                " SELECT id, text FROM messages WHERE state != 'writing'"
            )
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise
    return True


@contextmanager
def small_deletes(db: sqlite3.Connection) -> Iterator[None]:
    """Free pages without overwriting them, which SQLite does by default on some systems.

    The log then holds a page for about a thousand that are freed.
    """
    [before] = db.execute("PRAGMA secure_delete").fetchone()
    db.execute("PRAGMA secure_delete = FAST").fetchall()
    try:
        yield
    finally:
        db.execute(f"PRAGMA secure_delete = {('OFF', 'ON', 'FAST')[before]}").fetchall()


def _used(db: sqlite3.Connection) -> int:
    """Bytes of the file that hold something."""
    size, total, free = (
        db.execute(f"PRAGMA {name}").fetchone()[0]
        for name in ("page_size", "page_count", "freelist_count")
    )
    return int(size * (total - free))
