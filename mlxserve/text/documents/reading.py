"""Reads the documents of a conversation: their texts, or the pages of those without text as images."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from mlxserve.core.errors import InvalidParameter, InvalidRequest
from mlxserve.helpers.work import RunFairly
from mlxserve.text.documents.document import Document
from mlxserve.text.documents.reader import ScannedDocument, document_reader
from mlxserve.text.documents.scan import NOT_SEEN, Scan
from mlxserve.text.documents.sent import SentDocument


@dataclass(frozen=True, slots=True)
class ReadDocuments:
    """The documents of a conversation, each either as text or as images of its pages."""

    documents: dict[SentDocument, Document] = field(default_factory=dict)
    scans: dict[SentDocument, Scan] = field(default_factory=dict)

    @property
    def notes(self) -> list[str]:
        """Sentences about scans of which pages were left out."""
        return [note for scan in self.scans.values() if (note := scan.note) is not None]


async def read_documents(
    sent: Iterable[SentDocument], run_fairly: RunFairly, owner: str = "", *, sees: bool
) -> ReadDocuments:
    """Read documents, one after the other.

    owner: id of the API key that sent them
    sees: the model sees images

    Raises InvalidParameter, and the errors of `DocumentReader.read` that are no InvalidRequest.
    """
    reader, read = document_reader(), ReadDocuments()
    for each in sent:
        try:
            try:
                read.documents[each] = await reader.read_sent(each, run_fairly, owner)
            except ScannedDocument as error:
                if not sees:
                    raise InvalidRequest(NOT_SEEN) from error
                read.scans[each] = await reader.read_scan(each, run_fairly, owner)
        except InvalidRequest as error:
            raise InvalidParameter(each.where, f"{each.name} {error}") from error
    return read
