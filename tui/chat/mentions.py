"""`@path` in what is being written: completed while it is typed, and sent with the file's content.

Relative to the folder that the terminal was started in. A mention of what is no file stays text,
so that addresses and names can be written as ever.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from tui.chat.attachment import as_markdown

MAX_COMPLETIONS = 50
_MENTION = re.compile(r"(?<!\S)@(\S+)")
_TYPED = re.compile(r"(?:^|\s)@(\S*)$")


def typed_path(before: str) -> str | None:
    """The beginning of a path, if one is being written at the end of this text."""
    found = _TYPED.search(before)
    return None if found is None else found[1]


def completions(typed: str, folder: Path) -> list[str]:
    """Paths that begin so, folders with a slash at their end; none when it is all there already."""
    parent, _, start = typed.rpartition("/")
    shown = f"{parent}/" if "/" in typed else ""
    try:
        with os.scandir(folder / os.path.expanduser(shown or ".")) as entries:
            found = [
                shown + entry.name + ("/" if entry.is_dir() else "")
                for entry in entries
                if _fits(entry.name, start)
            ]
    except OSError:  # no such folder (yet), or one that may not be read: nothing to complete
        return []
    if found == [typed]:
        return []
    return sorted(found, key=lambda path: (not path.endswith("/"), path.lower()))[:MAX_COMPLETIONS]


def with_files(text: str, folder: Path) -> str:
    """The text, and below it each mentioned file, in sight. Raises AttachmentRefused."""
    blocks: dict[str, str] = {}

    def attach(found: re.Match[str]) -> str:
        path = folder / os.path.expanduser(found[1])
        if not _is_file(path):
            return found[0]
        blocks.setdefault(found[1], as_markdown(path, found[1]))
        return found[1]  # without its sign: edited and sent again, it is not attached twice

    text = _MENTION.sub(attach, text)
    return "\n\n".join([text, *blocks.values()]).rstrip() if blocks else text


def _fits(name: str, start: str) -> bool:
    is_hidden = name.startswith(".") and not start.startswith(".")
    return name.lower().startswith(start.lower()) and not is_hidden and " " not in name


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # longer than a path may be, or with a null in it
        return False
