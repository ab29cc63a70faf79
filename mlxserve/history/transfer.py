"""Moves chats between a store and files: imports what `imports` reads, exports all chats.

The saved prompts go with them (`prompts_file`).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlxserve.history.chat_file import StoreError
from mlxserve.history.export import as_whole
from mlxserve.history.imports import (
    MAX_FILE,
    OWN_FORMAT,
    ImportRefused,
    chats_in,
    read_chat,
    title_in,
)
from mlxserve.history.prompts_file import (
    PROMPTS,
    as_members,
    import_prompt,
    prompts_in,
    read_prompt,
)
from mlxserve.history.saved_prompts import PromptRefused
from mlxserve.history.store import Store
from mlxserve.system.counted import counted
from mlxserve.system.files import open_regular, read_opened, write_new

_ZIP = b"PK\x03\x04"
_MAX_PROBLEMS = 20  # described ones


@dataclass(slots=True)
class ImportReport:
    """Counts what became of the chats of a file."""

    num_imported: int = 0
    num_present: int = 0  # chats that were in the store already
    num_refused: int = 0
    num_prompts: int = 0  # saved prompts that were imported
    problems: list[str] = field(default_factory=list)  # sentences about refused chats
    left_out: Counter[str] = field(default_factory=Counter)  # what cannot be kept, by its kind

    def describe(self) -> str:
        """Describe the imported chats in a line."""
        parts = [f"{counted(self.num_imported, 'chat')} imported"]
        if self.num_prompts:
            parts.append(f"{counted(self.num_prompts, 'saved prompt')} imported")
        if self.num_present:
            parts.append(f"{self.num_present:,} were here already")
        if self.num_refused:
            parts.append(f"{self.num_refused:,} could not be read")
        if self.left_out:
            kinds = ", ".join(f"{kind} ({number:,})" for kind, number in self.left_out.items())
            parts.append(f"left out: {kinds}")
        return "; ".join(parts)

    def refuse(self, sentence: str) -> None:
        self.num_refused += 1
        if len(self.problems) < _MAX_PROBLEMS:
            self.problems.append(sentence)


def import_chats(store: Store, content: Any) -> ImportReport:
    """Import the chats of a parsed file, each whole or not at all, and its saved prompts.

    A chat or a prompt that is in the store already is left as it is. Raises ImportRefused if there are
    none of both.
    """
    report = ImportReport()
    prompts = prompts_in(content)
    if not prompts or content.get("chats") != []:
        _import_each(store, chats_in(content), report)
    _import_prompts(store, prompts, report)
    return report


def _import_each(store: Store, chats: Sequence[Any], report: ImportReport) -> None:
    for each in chats:
        title = title_in(each)[:60]
        try:
            imported = read_chat(each)
            record = store.insert(imported.chat, imported.messages)
        except ImportRefused as error:
            report.refuse(f"{title!r} {error}.")
        except StoreError as error:
            report.refuse(f"{title!r} and the chats after it are not imported. {error}")
            break
        else:
            report.num_imported += record is not None
            report.num_present += record is None
            report.left_out.update(imported.left_out)


def _import_prompts(store: Store, prompts: Sequence[Any], report: ImportReport) -> None:
    for each in prompts:
        try:
            report.num_prompts += import_prompt(store.prompts, read_prompt(each))
        except PromptRefused as error:
            report.refuse(str(error))
        except StoreError as error:
            report.refuse(f"The saved prompts after it are not imported. {error}")
            break


def read_export(file: Path) -> Any:
    """Parse a file of chats. Raises ImportRefused and OSError."""
    with open_regular(file) as opened:
        try:
            content = read_opened(opened, MAX_FILE)
        except ValueError as error:
            raise ImportRefused(f"is larger than {MAX_FILE >> 20} MiB: split it") from error
    if content.startswith(_ZIP):
        raise ImportRefused("is a ZIP archive: unpack it, and give its conversations.json")
    try:
        return json.loads(content)
    except RecursionError as error:
        raise ImportRefused("is nested too deeply for a file of chats") from error
    except ValueError as error:
        raise ImportRefused(f"is not JSON ({error})") from error


def export_chats(store: Store, file: Path) -> int:
    """Write all chats and saved prompts into a new file, readable by its owner only.

    Returns the number of chats. Raises OSError, also if the file exists, and StoreError.
    """
    if file.exists():
        raise FileExistsError(f"{file} exists")
    chats = store.chats(limit=-1)
    write_new(file, *_pieces(store, [chat.id for chat in chats]))
    return len(chats)


def _pieces(store: Store, ids: Sequence[int]) -> Iterator[bytes]:
    yield f'{{"{OWN_FORMAT}": 1, "chats": ['.encode()
    for number, chat_id in enumerate(ids):
        text = as_whole(store.chat(chat_id), store.messages(chat_id))
        yield (",\n" if number else "\n").encode() + text.encode()
    yield f'\n], "{PROMPTS}": [\n{as_members(store.prompts.all())}\n]}}\n'.encode()
