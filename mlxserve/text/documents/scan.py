"""Scan: the pages of a document without text, as images for a model that sees."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

from mlxserve.text.conversation import PARAGRAPH, Conversation, Message, Part, SentImage
from mlxserve.text.documents.document import NOT_ALL_READ
from mlxserve.text.documents.sent import SentDocument

NOT_SEEN = (
    "has no text: its pages are images, which this model does not see; recognise their text first "
    "(OCR), or name a model that sees"
)


@dataclass(frozen=True, slots=True)
class Scan:
    """The first pages of a scanned document.

    num_pages: of the whole document
    urls: data: URLs of the pages' images
    """

    name: str
    num_pages: int
    urls: tuple[str, ...]

    @classmethod
    def from_files(cls, name: str, num_pages: int, files: Sequence[bytes]) -> Self:
        """Build a scan from JPEG files."""
        urls = (f"data:image/jpeg;base64,{b64encode(file).decode()}" for file in files)
        return cls(name, num_pages, tuple(urls))

    @classmethod
    def from_text(cls, name: str, text: str) -> Self:
        """Parse the result of `as_text`."""
        num_pages, *urls = text.split()
        return cls(name, int(num_pages), tuple(urls))

    def as_text(self) -> str:
        """Write it, without its name, as one text."""
        return " ".join((str(self.num_pages), *self.urls))

    @property
    def note(self) -> str | None:
        """Tell the user that pages were left out; None if all are there."""
        if len(self.urls) >= self.num_pages:
            return None
        return f"{len(self.urls):,} of {self.num_pages:,} pages of {self.name} {NOT_ALL_READ}"

    def parts(self, where: str) -> Iterator[Part]:
        """Yield the pages for a message, each after its number."""
        for number, url in enumerate(self.urls, 1):
            yield f"[page {number} of {self.name}]"
            yield SentImage(url, "image", where)


def with_scans(conversation: Conversation, scans: Mapping[SentDocument, Scan]) -> Conversation:
    """Replace scanned documents by the images of their pages, before the text of their messages."""
    if not scans:
        return conversation
    messages = tuple(_with_own_scans(message, scans) for message in conversation.messages)
    return replace(conversation, messages=messages)


def _with_own_scans(message: Message, scans: Mapping[SentDocument, Scan]) -> Message:
    own = [sent for sent in message.documents if sent in scans]
    if not own:
        return message
    parts = [part for sent in own for part in scans[sent].parts(sent.where)]
    others = tuple(sent for sent in message.documents if sent not in scans)
    before = Message.from_parts(message.role, parts, PARAGRAPH)
    return replace(message, documents=others).after(before)
