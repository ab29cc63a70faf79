"""`@path` in a message: completed while it is typed, and sent with the file's contents.

Paths are relative to the folder in which the terminal was started. A mention that is not a file
stays text, so that e-mail addresses and user names need no escaping.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote, urlsplit

from mlxserve.history.attachment import AttachmentRefused, as_markdown, is_short_text
from mlxserve.history.messages import NewQuestion
from mlxserve.history.picture import MAX_DOCUMENT, KeptImage, is_picture, read_picture

# A document's name and a data: URL of its text, by its path and as it was typed. Raises ValueError.
ReadDocument = Callable[[Path, str], tuple[str, str]]

MAX_COMPLETIONS = 50
_DOCUMENTS = (".pdf", ".docx", ".html", ".htm")
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


def with_files(typed: str, folder: Path, read_document: ReadDocument | None = None) -> NewQuestion:
    """Append each mentioned file as a code block, and collect images and documents.

    Raises AttachmentRefused.
    """
    blocks: dict[str, str] = {}
    images: dict[str, KeptImage] = {}

    def attach(match: re.Match[str]) -> str:
        name = _path_in(match)
        path = folder / os.path.expanduser(name)
        if read_document is not None and is_document(name, folder):
            images.setdefault(name, _document(path, name, read_document))
            return name
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


def is_document(name: str, folder: Path) -> bool:
    """True for a folder, whose name ends with a slash, and for a file that is no short text."""
    path = folder / os.path.expanduser(name)
    if name.endswith("/"):
        return path.is_dir()
    if not _is_file(path) or is_picture(path):
        return False
    return path.suffix.lower() in _DOCUMENTS or not is_short_text(path)


def has_documents(typed: str, folder: Path) -> bool:
    """True if a message mentions a document, which may take seconds to read."""
    return any(is_document(_path_in(match), folder) for match in _MENTION.finditer(typed))


def _document(path: Path, name: str, read_document: ReadDocument) -> KeptImage:
    try:
        title, url = read_document(path, name)
    except ValueError as error:
        raise AttachmentRefused(str(error)) from error
    if len(url) > MAX_DOCUMENT:
        raise AttachmentRefused(
            f"{name} has too much text for a chat. Ask about it with `mlxserve run -f`."
        )
    return KeptImage(title, url)


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
