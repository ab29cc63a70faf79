"""Chats on disk: one SQLite file that several terminals may use at the same time.

A chat is a tree of messages; `leaf_id` is the last message of the branch shown last. Questions
are written before they are sent and answers while they grow, so a crash loses at most the time
between two checkpoints. Full-text search covers everything except answers still being written.
Blocking: the app calls it from a thread of its own.
"""

from __future__ import annotations

import math
import os
import re
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TypeAlias, TypeVar

from mlxserve.history import search_index
from mlxserve.history.calls import rounds_of, rounds_text
from mlxserve.history.chat_file import DiskFull, StoreError, open_file, open_memory
from mlxserve.history.folders import folder_name, same_folder
from mlxserve.history.messages import (
    AnswerStats,
    ChatRecord,
    LeftOut,
    Role,
    State,
    StoredMessage,
    Version,
)
from mlxserve.history.picture import KeptImage, as_text, from_text
from mlxserve.history.reserve import SCARCE, Reserve
from mlxserve.history.saved_prompts import SavedPrompts
from mlxserve.history.transactions import DELETED, Transactions
from mlxserve.system.terminal_text import one_line

T = TypeVar("T")
ChatStamp: TypeAlias = tuple[object, ...]

CHECKPOINT_SECONDS = 1.0
# An answer not saved for this long has lost its terminal.
_ABANDONED_SECONDS = 15.0
_TITLE_SIZE = 60
_UNTITLED = "New chat"
# Signs of Markdown before and in a line: headings, quotes, lists, fences, code, bold.
_MARKS = re.compile(r"^\s*(?:```.*|~~~.*|#{1,6}\s+|>\s?|[-*+]\s+)|`+|\*\*")
REQUESTED = "requested:"  # setting prefix, before a served model's name: the name that requested it
# Columns whose values are those of the fields of the same name.
_OF_CHAT = ("id", "title", "created_at", "updated_at", "leaf_id", "system", "folder")
_OF_MESSAGE = ("id", "chat_id", "parent_id", "text", "thinking", "error", "model", "created_at")
_DRAFT = "draft:"  # setting prefix, before a chat's id: the text that was not sent yet
_STATS = [field.name for field in fields(AnswerStats)]  # columns of a message's statistics
# Shorter words contain no trigram and are searched without the index.
_TRIGRAM_SIZE = 3


@dataclass(frozen=True, slots=True)
class SeenLeaf:
    """The end of the branch that a writer saw when it decided to write; None in an empty chat."""

    leaf_id: int | None


class StaleWrite(StoreError):
    """The chat has gone on since its writer saw it."""

    def __init__(self, leaf_id: int | None) -> None:
        """Name the end of the branch that is shown now."""
        super().__init__(
            "This chat has gone on elsewhere since it was shown here. Read it again; nothing was "
            "written."
        )
        self.leaf_id = leaf_id


@dataclass(frozen=True, slots=True)
class SearchHit:
    """A message that a search found."""

    chat: ChatRecord
    message_id: int
    role: Role
    excerpt: str


class Store(Transactions):
    """The chats in one file. Use from one thread at a time, and close at the end."""

    def __init__(self, connection: sqlite3.Connection, reserve: Reserve | None = None) -> None:
        """reserve: room on the disk for deleting; None without a file."""
        self._db = connection
        self._reserve = reserve
        self.prompts = SavedPrompts(connection, self._write)
        self.file: Path | None = None

    @classmethod
    def open(cls, path: Path, max_bytes: int | None = None) -> Store:
        """Open or create the file, on a full disk as well. Raises StoreError.

        max_bytes: the file's maximum size, beyond which writes raise StoreError
        """
        reserve = Reserve(path.parent)
        try:
            connection = open_file(path)
        except DiskFull:
            reserve.release()
            connection = open_file(path)
        store = cls(connection, reserve)
        store.file = path
        if max_bytes is not None:
            [page_size] = connection.execute("PRAGMA page_size").fetchone()
            connection.execute(f"PRAGMA max_page_count = {max_bytes // page_size}")
        if not search_index.is_complete(connection):
            with suppress(OSError, sqlite3.Error):  # next time, or another terminal
                search_index.build(connection, min(reserve.free() - SCARCE, max_bytes or math.inf))
        return store

    @classmethod
    def in_memory(cls) -> Store:
        return cls(open_memory())

    def close(self) -> None:
        self._db.close()

    # Chats

    def create_chat(self, first_words: str, system: str = "") -> ChatRecord:
        now = time.time()
        title = title_of(first_words)
        with self._write() as db:
            chat_id = db.execute(
                "INSERT INTO chats(title, created_at, updated_at, system) VALUES (?, ?, ?, ?)",
                (title, now, now, system),
            ).lastrowid
        assert chat_id is not None, "an insert has a rowid"
        return ChatRecord(id=chat_id, title=title, created_at=now, updated_at=now, system=system)

    def insert(self, chat: ChatRecord, messages: Sequence[StoredMessage]) -> ChatRecord | None:
        """Write a whole chat in one transaction; None for one that is there already.

        chat: its own id is replaced; one with its title and time of creation is the same chat
        messages: parents before their children; ids and parents refer to each other only

        Raises StoreError, with nothing written.
        """
        title = one_line(chat.title, _TITLE_SIZE) or _UNTITLED

        def insert_all(db: sqlite3.Connection) -> int | None:
            same = (title, chat.created_at)
            if db.execute(
                "SELECT 1 FROM chats WHERE title = ? AND created_at = ?", same
            ).fetchone():
                return None
            placed = (_known_folder(db, chat.folder, None), chat.is_pinned)
            chat_id = db.execute(
                "INSERT INTO chats(title, created_at, updated_at, system, folder, is_pinned)"
                " VALUES (?, ?, ?, ?, ?, ?)",
                (*same, chat.updated_at, chat.system, *placed),
            ).lastrowid
            assert chat_id is not None, "an insert has a rowid"
            ids: dict[int | None, int | None] = {None: None}
            for message in messages:
                ids[message.id] = _insert_message(db, chat_id, ids[message.parent_id], message)
            db.execute("UPDATE chats SET leaf_id = ? WHERE id = ?", (ids[chat.leaf_id], chat_id))
            return chat_id

        chat_id = self._change(insert_all)
        return None if chat_id is None else self.chat(chat_id)

    def chats(self, limit: int = 500, max_characters: int | None = None) -> list[ChatRecord]:
        """List chats until their system prompts exceed `max_characters`.

        Pinned ones come first; both kinds begin with the most recent one.
        """
        rows = self._db.execute(
            "SELECT * FROM chats ORDER BY is_pinned DESC, updated_at DESC LIMIT ?", (limit,)
        )
        return list(_up_to(map(_chat, rows), lambda chat: chat.num_characters, max_characters))

    def stamps(self) -> dict[int, ChatStamp]:
        """Return what differs in each chat once it was changed, by its id."""
        rows = self._db.execute(
            "SELECT id, title, created_at, updated_at, leaf_id, folder, is_pinned, length(system)"
            " FROM chats"
        )
        return {each[0]: tuple(each)[1:] for each in rows}

    def chat(self, chat_id: int) -> ChatRecord:
        """Return a chat. Raises StoreError if another terminal has deleted it."""
        row = self._db.execute("SELECT * FROM chats WHERE id = ?", (chat_id,)).fetchone()
        if row is None:
            raise StoreError(DELETED)
        return _chat(row)

    def rename(self, chat_id: int, title: str) -> None:
        with self._write() as db:
            db.execute(
                "UPDATE chats SET title = ? WHERE id = ?",
                (one_line(title, _TITLE_SIZE) or _UNTITLED, chat_id),
            )

    def place(
        self, chat_id: int, *, folder: str | None = None, is_pinned: bool | None = None
    ) -> None:
        """Put a chat into a folder, or with "" into none, and pin or unpin it; None changes nothing.

        A folder that differs in upper and lower case only is the same. Raises BadFolderName and
        StoreError.
        """
        name = None if folder is None else folder_name(folder)
        with self._write() as db:
            if name is not None:
                known = _known_folder(db, name, chat_id)
                db.execute("UPDATE chats SET folder = ? WHERE id = ?", (known, chat_id))
            if is_pinned is not None:
                db.execute("UPDATE chats SET is_pinned = ? WHERE id = ?", (is_pinned, chat_id))

    def set_system(self, chat_id: int, system: str) -> None:
        with self._write() as db:
            db.execute("UPDATE chats SET system = ? WHERE id = ?", (system, chat_id))

    def leave_out(self, chat_id: int, left_out: LeftOut) -> None:
        with self._write() as db:
            db.execute(
                "UPDATE chats SET left_out_last = ?, left_out_newest = ?, summary = ? WHERE id = ?",
                (left_out.last_id, left_out.newest_id, left_out.summary, chat_id),
            )

    def delete(self, chat_id: int) -> None:
        """Delete a chat and its messages, on a full disk as well. Raises StoreError."""
        ids = _ids(self._db, chat_id)

        def delete(db: sqlite3.Connection) -> None:
            # Children first: SQLite deletes at most 1,000 generations below a message.
            db.executemany("DELETE FROM messages WHERE id = ?", [(each,) for each in reversed(ids)])
            db.execute("DELETE FROM chats WHERE id = ?", (chat_id,))
            # Ids are used again.
            db.execute("DELETE FROM settings WHERE name = ?", (draft_name(chat_id),))

        self._change(delete, frees_space=True)

    # Messages

    def add(
        self,
        chat_id: int,
        parent_id: int | None,
        role: Role,
        text: str,
        *,
        state: State = State.DONE,
        model: str = "",
        images: Sequence[KeptImage] = (),
        seen: SeenLeaf | None = None,
    ) -> StoredMessage:
        """Append a message and make it the end of the shown branch.

        seen: what the writer saw; None to append whatever has been written since

        Raises StoreError, and StaleWrite without writing if the chat has gone on.
        """
        if self._reserve is not None:
            self._reserve.keep(self._db)
        now = time.time()

        def insert(db: sqlite3.Connection) -> int | None:
            _require_seen(db, chat_id, seen)
            message_id = db.execute(
                "INSERT INTO messages(chat_id, parent_id, role, text, state, model, images, created_at,"
                " touched_at, writer) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    chat_id,
                    parent_id,
                    role,
                    text,
                    state,
                    model,
                    as_text(images),
                    now,
                    now,
                    os.getpid(),
                ),
            ).lastrowid
            db.execute(
                "UPDATE chats SET leaf_id = ?, updated_at = ? WHERE id = ?",
                (message_id, now, chat_id),
            )
            return message_id

        message_id = self._change(insert)
        assert message_id is not None, "an insert has a rowid"
        return self.message(message_id)

    def messages(
        self, chat_id: int, after: int = 0, max_characters: int | None = None
    ) -> list[StoredMessage]:
        """Messages of a chat whose ids exceed `after`, parents before their children.

        The last one is that at which they exceed `max_characters`.
        """
        messages = map(self.message, _ids(self._db, chat_id, after))
        return list(_up_to(messages, lambda each: each.num_characters, max_characters))

    def beginnings(self, *, but: int) -> list[tuple[ChatRecord, StoredMessage]]:
        """First questions of all chats but this one, each with its chat."""
        chats = {chat.id: chat for chat in self.chats(limit=-1)}
        rows = self._db.execute(
            "SELECT * FROM messages WHERE parent_id IS NULL AND chat_id != ? ORDER BY id", (but,)
        )
        return [(chats[row["chat_id"]], _message(row)) for row in rows]

    def message(self, message_id: int) -> StoredMessage:
        row = self._db.execute("SELECT * FROM messages WHERE id = ?", (message_id,)).fetchone()
        if row is None:
            raise StoreError("This message was deleted. Reopen the chat.")
        return _message(row)

    def save(self, message: StoredMessage) -> None:
        """Write the fields of an answer that can change. Raises StoreError."""
        columns = {
            "text": message.text,
            "thinking": message.thinking,
            "state": message.state,
            "error": message.error,
            "model": message.model,
            "rounds": rounds_text(message.rounds),
            "touched_at": time.time(),
            "writer": os.getpid(),
            **asdict(message.stats),
        }
        assigned = ", ".join(f"{name} = :{name}" for name in columns)

        def update(db: sqlite3.Connection) -> int:
            return db.execute(
                f"UPDATE messages SET {assigned} WHERE id = :id", {**columns, "id": message.id}
            ).rowcount

        if not self._change(update):
            raise StoreError(DELETED)

    def remove(self, message: StoredMessage) -> None:
        """Delete an answer that has nothing below it; its question then ends the branch."""

        def delete(db: sqlite3.Connection) -> None:
            leaf = (message.parent_id, message.chat_id)
            db.execute("UPDATE chats SET leaf_id = ? WHERE id = ?", leaf)
            db.execute("DELETE FROM messages WHERE id = ?", (message.id,))

        self._change(delete, frees_space=True)

    def path(self, leaf_id: int | None) -> list[StoredMessage]:
        """Return the branch that ends with this message, from its root."""
        rows = self._db.execute(
            "WITH RECURSIVE branch(id, depth) AS ("
            " SELECT ?, 0 UNION ALL"
            " SELECT m.parent_id, depth + 1 FROM messages m JOIN branch b ON m.id = b.id"
            " WHERE m.parent_id IS NOT NULL)"
            " SELECT m.* FROM messages m JOIN branch b ON m.id = b.id ORDER BY b.depth DESC",
            (leaf_id,),
        )
        return [_message(row) for row in rows]

    def version(self, message: StoredMessage) -> Version:
        """Return the message's position among its siblings."""
        rows = self._db.execute(
            "SELECT id FROM messages WHERE chat_id = ? AND parent_id IS ? ORDER BY id",
            (message.chat_id, message.parent_id),
        )
        ids = tuple(row["id"] for row in rows)
        return Version(ids.index(message.id), ids)

    def show_branch(self, chat_id: int, message_id: int) -> int:
        """Make the branch through this message the shown one; returns its newest descendant."""
        row = self._db.execute(
            "WITH RECURSIVE newest(id) AS ("
            " SELECT ? UNION ALL"
            " SELECT (SELECT max(m.id) FROM messages m WHERE m.parent_id = n.id)"
            " FROM newest n WHERE n.id IS NOT NULL)"
            " SELECT max(id) AS id FROM newest",
            (message_id,),
        ).fetchone()
        leaf_id = int(row["id"])
        self.show_leaf(chat_id, leaf_id)
        return leaf_id

    def show_leaf(self, chat_id: int, leaf_id: int | None, seen: SeenLeaf | None = None) -> None:
        """Make this message the end of the shown branch. Raises StaleWrite as `add` does."""
        with self._write() as db:
            _require_seen(db, chat_id, seen)
            db.execute("UPDATE chats SET leaf_id = ? WHERE id = ?", (leaf_id, chat_id))

    def recover(self) -> int:
        """Mark the unfinished answers of dead processes as stopped; returns their number.

        A live writer updates `touched_at` at every checkpoint, so its answers are left alone. On a
        full disk all are, so that chats can be read.
        """
        rows = self._db.execute(
            "SELECT id, touched_at, writer FROM messages WHERE state = ?", (State.WRITING,)
        ).fetchall()
        last = time.time() - _ABANDONED_SECONDS
        dead = [
            row["id"]
            for row in rows
            if row["touched_at"] < last or _has_ended(row["writer"], row["touched_at"])
        ]
        with suppress(DiskFull):
            for message_id in dead:
                with self._write() as db:
                    db.execute(
                        "UPDATE messages SET state = ? WHERE id = ? AND state = ?",
                        (State.STOPPED, message_id, State.WRITING),
                    )
            return len(dead)
        return 0

    def search(
        self, words: str, limit: int = 100, max_characters: int | None = None
    ) -> list[SearchHit]:
        """Find messages that contain all of the words, ignoring case; newest first.

        They end with the one at which their chats' system prompts exceed `max_characters`.
        """
        terms = words.split()
        if not terms:
            return []
        is_indexed = search_index.is_complete(self._db)
        long = [term for term in terms if is_indexed and len(term) >= _TRIGRAM_SIZE]
        where, values = [], list[str | int]()
        if long:
            where.append("m.id IN (SELECT rowid FROM messages_text WHERE messages_text MATCH ?)")
            values.append(" AND ".join('"' + term.replace('"', '""') + '"' for term in long))
        for term in terms:
            if term not in long:
                where.append("m.text LIKE ? ESCAPE '\\' AND m.state != 'writing'")
                values.append("%" + _like_escaped(term) + "%")
        rows = self._db.execute(
            "SELECT c.*, m.id AS message_id, m.role, m.text FROM messages m"
            f" JOIN chats c ON c.id = m.chat_id WHERE {' AND '.join(where)}"
            " ORDER BY m.id DESC LIMIT ?",
            (*values, limit),
        )
        hits = (
            SearchHit(
                _chat(row), row["message_id"], Role(row["role"]), _excerpt(row["text"], terms[0])
            )
            for row in rows
        )
        return list(_up_to(hits, lambda hit: hit.chat.num_characters, max_characters))

    def questions(self, limit: int = 200) -> list[str]:
        """Earlier questions, oldest first: the composer's history."""
        rows = self._db.execute(
            "SELECT text FROM messages WHERE role = ? ORDER BY id DESC LIMIT ?", (Role.USER, limit)
        )
        newest_first = dict.fromkeys(row["text"] for row in rows)
        return list(newest_first)[::-1]

    def last_model(self) -> str | None:
        """Return the `--model` name of the last chat's model; None without an answer."""
        row = self._db.execute(
            "SELECT model FROM messages WHERE model != '' AND chat_id ="
            " (SELECT id FROM chats ORDER BY updated_at DESC LIMIT 1) ORDER BY id DESC LIMIT 1"
        ).fetchone()
        return None if row is None else self.setting(f"{REQUESTED}{row['model']}") or row["model"]

    # Settings

    def setting(self, name: str) -> str | None:
        row = self._db.execute("SELECT value FROM settings WHERE name = ?", (name,)).fetchone()
        return None if row is None else str(row["value"])

    def set_setting(self, name: str, value: str) -> None:
        with self._write() as db:
            db.execute("INSERT OR REPLACE INTO settings VALUES (?, ?)", (name, value))


def _insert_message(
    db: sqlite3.Connection, chat_id: int, parent_id: int | None, message: StoredMessage
) -> int | None:
    columns = {
        "chat_id": chat_id,
        "parent_id": parent_id,
        "role": message.role,
        "text": message.text,
        "thinking": message.thinking,
        "state": message.state,
        "error": message.error,
        "model": message.model,
        "rounds": rounds_text(message.rounds),
        "images": as_text(message.images),
        "created_at": message.created_at,
        "touched_at": message.created_at,
        **asdict(message.stats),
    }
    names = ", ".join(columns)
    values = ", ".join(f":{name}" for name in columns)
    return db.execute(f"INSERT INTO messages({names}) VALUES ({values})", columns).lastrowid


def _known_folder(db: sqlite3.Connection, name: str, chat_id: int | None) -> str:
    """Return the name of a folder as the other chats in it have it."""
    if not name:
        return name
    rows = db.execute(
        "SELECT DISTINCT folder FROM chats WHERE folder != '' AND id IS NOT ?", (chat_id,)
    )
    return same_folder(name, (row["folder"] for row in rows))


def draft_name(chat_id: int) -> str:
    """Return the name of the setting that keeps what is typed into a chat and not sent yet."""
    return f"{_DRAFT}{chat_id}"


def _require_seen(db: sqlite3.Connection, chat_id: int, seen: SeenLeaf | None) -> None:
    """Raises StaleWrite if the shown branch does not end with what the writer saw."""
    if seen is None:
        return
    row = db.execute("SELECT leaf_id FROM chats WHERE id = ?", (chat_id,)).fetchone()
    if row is not None and row["leaf_id"] != seen.leaf_id:
        raise StaleWrite(row["leaf_id"])


def _has_ended(writer: int | None, touched_at: float) -> bool:
    """True if the process that wrote a message last, at this time, has ended; False if that is unknown."""
    import psutil  # imported late, for a fast start

    if writer is None:
        return False
    try:
        # In a container the server after a kill has the process id of the one before.
        return psutil.Process(writer).create_time() > touched_at
    except psutil.NoSuchProcess:
        return True
    except psutil.Error:  # another user's process
        return False


def title_of(words: str) -> str:
    """Return a chat's title: the start of its first question, without Markdown."""
    lines = (_MARKS.sub("", line).strip() for line in words.strip().splitlines())
    title = one_line(" ".join(line for line in lines if line), 2 * _TITLE_SIZE)
    if len(title) > _TITLE_SIZE and " " in title[:_TITLE_SIZE]:
        title = f"{title[:_TITLE_SIZE].rpartition(' ')[0]}…"
    return one_line(title, _TITLE_SIZE) or _UNTITLED


def _ids(db: sqlite3.Connection, chat_id: int, after: int = 0) -> list[int]:
    """Ids of a chat's messages, parents first. Without their texts: SQLite sorts whole rows."""
    rows = db.execute(
        "SELECT id FROM messages WHERE chat_id = ? AND id > ? ORDER BY id", (chat_id, after)
    )
    return [row["id"] for row in rows]


def _up_to(items: Iterable[T], size: Callable[[T], int], max_size: int | None) -> Iterator[T]:
    """Yield items up to the one that exceeds `max_size`."""
    left = max_size
    for item in items:
        yield item
        if left is not None:
            left -= size(item)
            if left < 0:
                return


def _chat(row: sqlite3.Row) -> ChatRecord:
    last = row["left_out_last"]
    left_out = None if last is None else LeftOut(last, row["left_out_newest"], row["summary"])
    return ChatRecord(
        **{name: row[name] for name in _OF_CHAT},
        is_pinned=bool(row["is_pinned"]),
        left_out=left_out,
    )


def _message(row: sqlite3.Row) -> StoredMessage:
    return StoredMessage(
        **{name: row[name] for name in _OF_MESSAGE},
        role=Role(row["role"]),
        state=State(row["state"]),
        stats=AnswerStats(**{name: row[name] for name in _STATS}),
        rounds=rounds_of(row["rounds"]),
        images=from_text(row["images"]),
    )


def _like_escaped(term: str) -> str:
    for special in "\\%_":
        term = term.replace(special, "\\" + special)
    return term


def _excerpt(text: str, term: str, around: int = 60) -> str:
    """Return the text around the first occurrence of the term."""
    at = max(0, text.lower().find(term.lower()))
    start = max(0, at - around // 2)
    excerpt = one_line(text[start : at + around * 2], around * 2)
    return f"…{excerpt}" if start else excerpt
