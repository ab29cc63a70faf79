"""A text file as part of a message: its name and its content in a fence, for all to see."""

from __future__ import annotations

import re
from pathlib import Path

MAX_SIZE = 256 * 1024


class AttachmentRefused(Exception):
    """The file cannot be part of a message; says why."""


def as_markdown(path: Path, typed: str | None = None) -> str:
    """The file as a block of code under its name. Raises AttachmentRefused, about what was typed."""
    typed = typed or str(path)
    try:
        if not path.is_file():
            raise AttachmentRefused(f"{typed} is not a file.")
        if path.stat().st_size > MAX_SIZE:
            raise AttachmentRefused(f"{typed} is larger than {MAX_SIZE // 1024} KiB.")
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise AttachmentRefused(f"{typed} is not a text file in UTF-8.") from error
    except OSError as error:
        raise AttachmentRefused(f"{typed} cannot be read: {error.strerror}.") from error
    fence = _fence_around(text)
    return f"{path.name}:\n{fence}{path.suffix.removeprefix('.')}\n{text.rstrip()}\n{fence}\n"


def _fence_around(text: str) -> str:
    """A fence that nothing in the text can close."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    return "`" * max(3, longest + 1)
