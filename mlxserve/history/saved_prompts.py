"""SavedPrompts: system prompts and sampling under names, for chats of the page and the terminal."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TypeAlias

MAX_PROMPTS = 100
MAX_NAME = 60  # characters
MAX_SYSTEM = 256 << 10  # characters of one system prompt
MAX_CHARACTERS = 4 << 20  # of all system prompts together

SamplingValues: TypeAlias = Mapping[str, float | int | str]


class PromptRefused(Exception):
    """A prompt that cannot be saved; the message says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedPrompt:
    """A system prompt and sampling under a name.

    system: empty for none
    sampling: the values that are set, such as temperature; all others are the model's defaults
    """

    id: int
    name: str
    system: str
    sampling: SamplingValues = field(default_factory=dict)
    updated_at: float = 0.0


class SavedPrompts:
    """The prompts in one file of chats. A part of its `Store`."""

    def __init__(
        self,
        connection: sqlite3.Connection,
        write: Callable[[], AbstractContextManager[sqlite3.Connection]],
    ) -> None:
        """Share the connection of a `Store`; `write` begins a transaction."""
        self._db = connection
        self._write = write

    def all(self) -> list[SavedPrompt]:
        """List the prompts by their names."""
        rows = self._db.execute("SELECT * FROM prompts ORDER BY name COLLATE NOCASE, name")
        return [_prompt(row) for row in rows]

    def save(self, name: str, system: str, sampling: SamplingValues) -> SavedPrompt:
        """Save a prompt, in the place of one with this name. Raises PromptRefused and StoreError."""
        if len(system) > MAX_SYSTEM:
            raise PromptRefused(
                f"A saved system prompt may have {MAX_SYSTEM:,} characters, and this one has "
                f"{len(system):,}. Attach a long text as a document instead."
            )
        with self._write() as db:
            _refuse_too_many(db, name, len(system))
            db.execute(
                "INSERT INTO prompts(name, system, sampling, updated_at) VALUES (?, ?, ?, ?)"
                " ON CONFLICT(name) DO UPDATE SET system = excluded.system,"
                " sampling = excluded.sampling, updated_at = excluded.updated_at",
                (name, system, json.dumps(dict(sampling)), time.time()),
            )
            row = db.execute("SELECT * FROM prompts WHERE name = ?", (name,)).fetchone()
        return _prompt(row)

    def delete(self, prompt_id: int) -> bool:
        """Delete a prompt; False if there is none with this id. Chats that began with it keep it."""
        with self._write() as db:
            deleted = db.execute("DELETE FROM prompts WHERE id = ?", (prompt_id,))
        return deleted.rowcount > 0


def _refuse_too_many(db: sqlite3.Connection, name: str, num_characters: int) -> None:
    """Raises PromptRefused if the prompts beside the one of this name leave no room for it."""
    num_prompts, others = db.execute(
        "SELECT count(*), coalesce(sum(length(system)), 0) FROM prompts WHERE name != ?", (name,)
    ).fetchone()
    if num_prompts >= MAX_PROMPTS:
        raise PromptRefused(f"{MAX_PROMPTS} prompts are saved already. Delete one of them first.")
    if others + num_characters > MAX_CHARACTERS:
        raise PromptRefused(
            f"All saved prompts together may have {MAX_CHARACTERS:,} characters. Delete one of them "
            "first."
        )


def _prompt(row: sqlite3.Row) -> SavedPrompt:
    return SavedPrompt(
        id=row["id"],
        name=row["name"],
        system=row["system"],
        sampling=json.loads(row["sampling"]),
        updated_at=row["updated_at"],
    )
