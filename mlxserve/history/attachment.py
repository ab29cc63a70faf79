"""A text file as part of a message: its name, and its contents in a code fence."""

from __future__ import annotations

import re
from pathlib import Path

MAX_SIZE = 256 * 1024


class AttachmentRefused(Exception):
    """The file cannot be attached; the message says why."""


def is_short_text(path: Path) -> bool:
    """True for a file that `as_markdown` takes."""
    try:
        if path.stat().st_size > MAX_SIZE:
            return False
        path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False
    return True


def as_markdown(path: Path, typed: str | None = None) -> str:
    """Return the file as a code block under its name.

    Raises AttachmentRefused, which names `typed`.
    """
    typed = typed or str(path)
    try:
        if not path.is_file():
            raise AttachmentRefused(f"{typed} is not a file.")
        if path.stat().st_size > MAX_SIZE:
            raise AttachmentRefused(f"{typed} is larger than {MAX_SIZE // 1024} KiB.")
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise AttachmentRefused(f"{typed} is not a UTF-8 text file.") from error
    except OSError as error:
        raise AttachmentRefused(f"{typed} cannot be read: {error.strerror}.") from error
    fence = fence_around(text)
    return f"{path.name}:\n{fence}{path.suffix.removeprefix('.')}\n{text.rstrip()}\n{fence}\n"


def fence_around(text: str) -> str:
    """Return a fence longer than any run of backticks in the text, which then cannot close it."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    return "`" * max(3, longest + 1)
