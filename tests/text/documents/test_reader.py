"""Documents are read in processes that can be ended, and kept for the key that sent them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import TypeVar

import pytest

from mlxserve.core.errors import InvalidRequest
from mlxserve.helpers.fair_executor import Lane, lane_of
from mlxserve.helpers.work import Work
from mlxserve.text.documents import reader
from mlxserve.text.documents.document import Document
from mlxserve.text.documents.reader import DocumentReader
from mlxserve.text.documents.sent import SentDocument, text_url
from tests.text.documents.files import pdf

T = TypeVar("T")
WORKERS = "tests.text.documents.workers:"


@pytest.fixture
def documents() -> Iterator[DocumentReader]:
    documents = DocumentReader()
    yield documents
    documents.close()


class Turns:
    """Runs work at once, and keeps the lanes that it would have had."""

    def __init__(self) -> None:
        self.lanes: list[Lane] = []

    async def __call__(self, work: Work[T]) -> T:
        self.lanes.append(lane_of(work.seconds))
        result: T = work.run()
        return result


def read(documents: DocumentReader, data: bytes, turns: Turns, owner: str = "") -> Document:
    return asyncio.run(documents.read("a.pdf", data, turns, owner))


def test_a_document_of_another_key_is_read_as_if_it_were_new(documents: DocumentReader) -> None:
    """Else one request tells whether another key has sent a file."""
    data, counts = pdf(["one", "two"]), []
    for owner in ("good", "evil", "good", "evil"):
        turns = Turns()
        assert read(documents, data, turns, owner).parts == ("one", "two")
        counts.append(len(turns.lanes))
    assert counts == [2, 2, 1, 1]


def test_a_document_that_takes_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    documents, turns = DocumentReader(WORKERS + "EndlessReading"), Turns()
    monkeypatch.setattr(reader, "TRIES", {Lane.SHORT: 0.02, Lane.LONG: 0.02})
    with pytest.raises(InvalidRequest, match=r"^cannot be read: that took longer than 0\.02 s"):
        read(documents, b"", turns)
    assert turns.lanes == [Lane.SHORT, Lane.SHORT, Lane.LONG]
    documents.close()


def test_a_document_that_takes_too_much_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "MEMORY", 64 << 20)
    documents = DocumentReader(WORKERS + "HungryReading")
    with pytest.raises(InvalidRequest, match=r"^cannot be read: that needed more than"):
        read(documents, b"", Turns())
    documents.close()


def test_a_text_that_was_read_before_is_taken_as_it_is(documents: DocumentReader) -> None:
    turns = Turns()
    sent = SentDocument("page.html", text_url("<p>one\ftwo %PDF-"))
    document = asyncio.run(documents.read_sent(sent, turns))
    assert document.parts == ("<p>one", "two %PDF-")
    assert turns.lanes == [Lane.SHORT] * 2
