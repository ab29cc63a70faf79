"""`@path` in a message: completed while it is typed, and sent with the file's contents.

Paths are relative to the folder in which the terminal was started. A mention that is not a file
stays text, so that e-mail addresses and user names need no escaping.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from tui.chat.attachment import as_markdown

MAX_COMPLETIONS = 50
_MENTION = re.compile(r"(?<!\S)@(\S+)")
_FILE_NAME = re.compile(
    r"[\w./~-]*(/[\w.-]+|[\w-]\.[a-z0-9]{1,4})"
)  # and no code, such as @app.get("/")
_TYPED = re.compile(r"(?:^|\s)@(\S*)$")


def typed_path(before: str) -> str | None:
    """The start of a path if this text ends in a mention, else None."""
    found = _TYPED.search(before)
    return None if found is None else found[1]


def completions(typed: str, folder: Path) -> list[str]:
    """Paths with this prefix, folders with a trailing slash; none if only the typed path matches."""
    parent, _, start = typed.rpartition("/")
    shown = f"{parent}/" if "/" in typed else ""
    try:
        with os.scandir(folder / os.path.expanduser(shown or ".")) as entries:
            found = [
                shown + entry.name + ("/" if entry.is_dir() else "")
                for entry in entries
                if _fits(entry.name, start)
            ]
    except OSError:  # the folder does not exist (yet), or cannot be read
        return []
    if found == [typed]:
        return []
    return sorted(found, key=lambda path: (not path.endswith("/"), path.lower()))[:MAX_COMPLETIONS]


def with_files(text: str, folder: Path) -> str:
    """The text, followed by each mentioned file as a code block. Raises AttachmentRefused."""
    blocks: dict[str, str] = {}

    def attach(found: re.Match[str]) -> str:
        path = folder / os.path.expanduser(found[1])
        if not _is_file(path):
            return found[0]
        blocks.setdefault(found[1], as_markdown(path, found[1]))
        return found[1]  # without the @, so that editing and resending does not attach it twice

    text = _MENTION.sub(attach, text)
    return "\n\n".join([text, *blocks.values()]).rstrip() if blocks else text


def missing_files(text: str, folder: Path) -> list[str]:
    """Mentions that look like the path of a file, but of none that exists."""
    return [
        found[1]
        for found in _MENTION.finditer(text)
        if _FILE_NAME.fullmatch(found[1]) and not (folder / os.path.expanduser(found[1])).exists()
    ]


def _fits(name: str, start: str) -> bool:
    is_hidden = name.startswith(".") and not start.startswith(".")
    return name.lower().startswith(start.lower()) and not is_hidden and " " not in name


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # too long for a path, or contains a null
        return False
