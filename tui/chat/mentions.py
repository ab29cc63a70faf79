"""`@path` in a message: completed while it is typed, and sent with the file's contents.

Paths are relative to the folder in which the terminal was started. A mention that is not a file
stays text, so that e-mail addresses and user names need no escaping.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

from mlxserve.history.attachment import as_markdown
from mlxserve.history.messages import NewQuestion
from mlxserve.history.picture import KeptImage, is_picture, read_picture

MAX_COMPLETIONS = 50
_MENTION = re.compile(r'(?<!\S)@(?:"([^"\n]+)"|(\S+))')
_FILE_NAME = re.compile(
    r"[\w./~-]*(/[\w.-]+|[\w-]\.[a-z0-9]{1,4})"
)  # not code, such as @app.get("/")
_TYPED = re.compile(r"(?:^|\s)@(\S*)$")


def typed_path(before: str) -> str | None:
    """The start of a path if this text ends in a mention, else None."""
    match = _TYPED.search(before)
    return None if match is None else match[1]


def completions(typed: str, folder: Path) -> list[str]:
    """Paths with this prefix, folders with a trailing slash; none if only the typed path matches."""
    parent, _, start = typed.rpartition("/")
    shown = f"{parent}/" if "/" in typed else ""
    try:
        with os.scandir(folder / os.path.expanduser(shown or ".")) as entries:
            paths = [
                shown + entry.name + ("/" if entry.is_dir() else "")
                for entry in entries
                if _fits(entry.name, start)
            ]
    except OSError:
        # The folder does not exist (yet), or cannot be read.
        return []
    if paths == [typed]:
        return []
    return sorted(paths, key=lambda path: (not path.endswith("/"), path.lower()))[:MAX_COMPLETIONS]


def with_files(typed: str, folder: Path) -> NewQuestion:
    """Append each mentioned file as a code block, and collect images.

    Raises AttachmentRefused.
    """
    blocks: dict[str, str] = {}
    images: dict[str, KeptImage] = {}

    def attach(match: re.Match[str]) -> str:
        name = _path_in(match)
        path = folder / os.path.expanduser(name)
        if not _is_file(path):
            return match[0]
        if is_picture(path):
            images.setdefault(name, read_picture(path, name))
        else:
            blocks.setdefault(name, as_markdown(path, name))
        # Without the @, so that editing and resending does not attach it twice.
        return name

    text = _MENTION.sub(attach, typed)
    text = "\n\n".join([text, *blocks.values()]).rstrip() if blocks else text
    return NewQuestion(text, tuple(images.values()), typed)


def mention(path: str) -> str:
    """Format a path as a mention."""
    return f'@"{path}"' if any(sign.isspace() for sign in path) else f"@{path}"


def pasted_picture(text: str) -> str | None:
    """Return the pasted path of a picture, as terminals write a dropped file; else None."""
    words = text.strip()
    if words.startswith("file://"):
        words = unquote(urlsplit(words).path)
    elif len(words) > 1 and words[0] == words[-1] and words[0] in "'\"":
        words = words[1:-1]
    else:
        words = re.sub(r"\\(.)", r"\1", words)
    path = Path(os.path.expanduser(words))
    has_folder = "/" in words and "\n" not in words and '"' not in words
    return words if has_folder and is_picture(path) and _is_file(path) else None


def missing_files(text: str, folder: Path) -> list[str]:
    """Mentions that look like a file's path but match no file."""
    return [
        _path_in(match)
        for match in _MENTION.finditer(text)
        if _FILE_NAME.fullmatch(_path_in(match))
        and not (folder / os.path.expanduser(_path_in(match))).exists()
    ]


def _path_in(match: re.Match[str]) -> str:
    return match[1] or match[2]


def _fits(name: str, start: str) -> bool:
    is_hidden = name.startswith(".") and not start.startswith(".")
    return name.lower().startswith(start.lower()) and not is_hidden and " " not in name


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):
        # Too long for a path, or contains a null.
        return False
