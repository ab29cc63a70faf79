"""SentDocument: a document's part of a message, as each API has it, before it is read."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_MAX_NAME = 200
_DATA = "data:"
TEXT_URL = "data:text/plain;base64,"  # of a text that was read already, whatever its file was


@dataclass(frozen=True, slots=True)
class SentDocument:
    """A document as it was sent.

    name    of the file; a text of one line
    url     data: URL with the file itself, unless it is a text
    text    of a document that was sent as text
    where   its path in the request
    """

    name: str
    url: str = ""
    text: str = ""
    kind: str = "file"
    where: str = ""

    @property
    def num_characters(self) -> int:
        return len(self.url) + len(self.text)

    def as_url(self) -> str:
        """A data: URL of the document."""
        if self.url:
            return self.url
        return text_url(self.text)


def text_url(text: str) -> str:
    """A data: URL of a text."""
    return TEXT_URL + b64encode(text.encode(errors="replace")).decode()


def sent_document(part: Mapping[str, Any], where: str = "") -> SentDocument | None:
    """Read a `file`, `input_file` or `document` part; None for one without its content.

    {"type": "file", "file": {"filename": "a.pdf", "file_data": "data:application/pdf;base64,..."}}
    {"type": "input_file", "filename": "a.pdf", "file_data": "data:application/pdf;base64,..."}
    {"type": "document", "title": "a.pdf", "source": {"type": "base64", "data": "..."}}
    """
    kind = part["type"]
    if kind == "document":
        return _document_block(part, where)
    file = part.get("file") if kind == "file" else part
    if not isinstance(file, Mapping) or not isinstance(data := file.get("file_data"), str):
        return None
    url = data if data.startswith(_DATA) else f"data:;base64,{data}"
    return SentDocument(_name(file.get("filename")), url, "", kind, where) if data else None


def _document_block(block: Mapping[str, Any], where: str) -> SentDocument | None:
    """Read Anthropic's block. Its source is a text, base64, or blocks of text."""
    source, name = block.get("source"), _name(block.get("title"))
    if not isinstance(source, Mapping):
        return None
    data, content = source.get("data"), source.get("content")
    match source.get("type"):
        case "text" if isinstance(data, str):
            return SentDocument(name, "", data, "document", where)
        case "base64" if isinstance(data, str) and data:
            return SentDocument(name, f"data:;base64,{data}", "", "document", where)
        case "content" if isinstance(content, (str, list)):
            return SentDocument(name, "", _text_in(content), "document", where)
    return None


def _text_in(content: str | list[Any]) -> str:
    if isinstance(content, str):
        return content
    texts = [block.get("text") for block in content if isinstance(block, Mapping)]
    return "\n\n".join(text for text in texts if isinstance(text, str))


def _name(value: object) -> str:
    words = " ".join(value.split()) if isinstance(value, str) else ""
    return words[:_MAX_NAME] or "document"
