"""Folders of chats: their names, and the groups of a list."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable

from mlxserve.history.messages import ChatRecord
from mlxserve.system.terminal_text import one_line

MAX_NAME = 60  # characters


class BadFolderName(ValueError):
    """A folder cannot have this name; the message says why."""


def folder_name(text: str) -> str:
    """Return the name of a folder with single spaces; empty for no folder. Raises BadFolderName."""
    name = unicodedata.normalize("NFC", " ".join(text.split()))
    if len(name) > MAX_NAME:
        raise BadFolderName(f"a folder's name may have {MAX_NAME} characters, not {len(name):,}")
    if one_line(name) != name:
        raise BadFolderName("a folder's name has no control characters and no invisible ones")
    return name


def same_folder(name: str, known: Iterable[str]) -> str:
    """Return the name as a known folder writes it, which differs in upper and lower case at most."""
    wanted = name.casefold()
    return next((each for each in known if each.casefold() == wanted), name)


def folders_of(chats: Iterable[ChatRecord]) -> list[str]:
    """Return the folders of these chats, sorted by name."""
    return sorted({chat.folder for chat in chats} - {""}, key=str.casefold)
