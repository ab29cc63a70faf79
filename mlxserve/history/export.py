"""Exports a chat: Markdown for reading, JSON for requests."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

from mlxserve.history.calls import round_fields, rounds_markdown
from mlxserve.history.messages import ChatRecord, Role, StoredMessage, wire_messages
from mlxserve.system.files import make_marked_folder


class Format(StrEnum):
    MARKDOWN = "markdown"
    JSON = "json"

    @property
    def suffix(self) -> str:
        return ".md" if self is Format.MARKDOWN else ".json"


def as_markdown(chat: ChatRecord, path: Sequence[StoredMessage]) -> str:
    """Write the shown branch under its title. Answers are Markdown already."""
    sections = [f"# {chat.title}"]
    if chat.system:
        sections.append(f"## System\n\n{chat.system}")
    for message in path:
        who = "You" if message.role is Role.USER else message.model or "Assistant"
        images = [
            f"[{'document' if image.is_document else 'image'}: {image.name}]"
            for image in message.images
        ]
        parts = [*images, rounds_markdown(message.rounds), message.text]
        sections.append("\n\n".join(part for part in (f"## {who}", *parts) if part))
    return "\n\n".join(sections) + "\n"


def as_json(chat: ChatRecord, path: Sequence[StoredMessage]) -> str:
    """Write the shown branch as the messages of a chat request."""
    content = {
        "title": chat.title,
        "created_at": datetime.fromtimestamp(chat.created_at).astimezone().isoformat(),
        **_placed(chat),
        "messages": wire_messages(path, chat.system),
    }
    return json.dumps(content, ensure_ascii=False, indent=2) + "\n"


def as_whole(chat: ChatRecord, messages: Sequence[StoredMessage]) -> str:
    """Write a chat with all its versions, as `imports.read_chat` reads it."""
    content = {
        "title": chat.title,
        "created_at": chat.created_at,
        "updated_at": chat.updated_at,
        "leaf_id": chat.leaf_id,
        "system": chat.system,
        **_placed(chat),
        "messages": [_whole_message(message) for message in messages],
    }
    return json.dumps(content, ensure_ascii=False)


def _placed(chat: ChatRecord) -> dict[str, Any]:
    """Return where the chat stands in the list, for one that was put there."""
    placed = {"folder": chat.folder, "is_pinned": chat.is_pinned}
    return {name: value for name, value in placed.items() if value}


def _whole_message(message: StoredMessage) -> dict[str, Any]:
    written = asdict(message)
    del written["chat_id"]
    return {**written, "rounds": list(map(round_fields, message.rounds))}


def export(chat: ChatRecord, path: Sequence[StoredMessage], kind: Format, to: Path) -> None:
    """Write a new file, readable by its owner only. Raises OSError, also if the file exists."""
    text = as_markdown(chat, path) if kind is Format.MARKDOWN else as_json(chat, path)
    make_marked_folder(to.parent)
    descriptor = os.open(to, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)


def file_name(chat: ChatRecord, kind: Format) -> str:
    """Return a file name such as `why-is-the-sky-blue-20260102-030405.md`."""
    words = re.sub(r"[^a-z0-9]+", "-", chat.title.lower()).strip("-")[:40] or "chat"
    return f"{words}-{datetime.now().astimezone():%Y%m%d-%H%M%S}{kind.suffix}"


def target(argument: str) -> tuple[Format, Path | None]:
    """Parse `json`, `markdown notes.md`, `chat.json` or ""; the path is None if not named."""
    word, _, rest = argument.strip().partition(" ")
    if word in tuple(Format):
        return Format(word), _path(rest) if rest.strip() else None
    if not argument.strip():
        return Format.MARKDOWN, None
    to = _path(argument)
    return (Format.JSON if to.suffix == ".json" else Format.MARKDOWN), to


def _path(words: str) -> Path:
    # Path.expanduser raises for an unknown user; os.path.expanduser leaves the name unchanged.
    return Path(os.path.expanduser(words.strip()))
