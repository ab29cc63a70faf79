"""Pages of a scanned document stand before the question that they were sent with."""

from __future__ import annotations

from mlxserve.text.conversation import SentImage, read_messages
from mlxserve.text.documents.scan import Scan, with_scans

SCAN = Scan.from_files("a.pdf", 3, [b"one", b"two"])


def test_pages_stand_before_the_text_of_their_message_with_their_numbers() -> None:
    file = {"type": "file", "file": {"filename": "a.pdf", "file_data": "data:;base64,AAAA"}}
    content = [file, {"type": "text", "text": "When?"}]
    conversation = read_messages([{"role": "user", "content": content}], sees=True)
    [sent] = conversation.sent_documents
    [message] = with_scans(conversation, {sent: SCAN}).messages
    assert message.documents == ()
    parts = message.content()
    assert isinstance(parts, list)
    assert [part.get("text") or part["image"] for part in parts] == [
        "[page 1 of a.pdf]",
        SentImage(SCAN.urls[0], "image", sent.where),
        "[page 2 of a.pdf]",
        SentImage(SCAN.urls[1], "image", sent.where),
        "\n\nWhen?",
    ]


def test_a_scan_is_kept_as_a_text() -> None:
    assert Scan.from_text("a.pdf", SCAN.as_text()) == SCAN


def test_pages_that_were_left_out_are_counted() -> None:
    assert SCAN.note == "2 of 3 pages of a.pdf were read: the rest does not fit the context"
    assert Scan.from_files("a.pdf", 1, [b"one"]).note is None
