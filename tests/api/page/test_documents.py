"""`/api/v1/documents`: the text of a file, for a question of the page."""

from __future__ import annotations

from base64 import b64encode

import pytest
from pydantic import ValidationError
from starlette.testclient import TestClient

from mlxserve.api.native.chats import MAX_IMAGE, ImageFields
from mlxserve.api.page import documents
from mlxserve.images.data_urls import file_of_data_url
from tests.text.documents.files import pdf

DOCUMENTS = "/api/v1/documents"


def test_a_document_is_read_into_pages(client: TestClient) -> None:
    data = b64encode(pdf(["One.", "Two."])).decode()
    reply = client.post(DOCUMENTS, json={"name": "a.pdf", "data": data})
    assert reply.status_code == 200
    content = reply.json()
    assert (content["name"], content["size"]) == ("a.pdf", "2 pages")
    assert file_of_data_url(content["url"]) == b"One.\fTwo."
    assert ImageFields(name="a.pdf", url=content["url"]).picture().is_document


@pytest.mark.parametrize(
    "url", ["data:text/html;base64,YQ==", f"data:image/png;base64,{'A' * MAX_IMAGE}"]
)
def test_a_question_holds_no_other_texts_and_no_larger_images(url: str) -> None:
    with pytest.raises(ValidationError):
        ImageFields(name="a", url=url)


@pytest.mark.parametrize(
    ("data", "words"),
    [("AAE=", "is not text"), ("", "has no text"), ("!", "is not valid base64")],
)
def test_what_cannot_be_read_is_a_400(client: TestClient, data: str, words: str) -> None:
    reply = client.post(DOCUMENTS, json={"name": "a", "data": data})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "data")
    assert words in reply.json()["error"]["message"]


def test_a_document_with_too_much_text_for_a_chat_is_refused(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "MAX_DOCUMENT", 100)
    data = b64encode(b"word " * 20).decode()
    reply = client.post(DOCUMENTS, json={"name": "a", "data": data})
    assert "has too much text for a chat" in reply.json()["error"]["message"]
