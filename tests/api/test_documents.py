"""Documents as each API sends them, up to what the chat template gets of them."""

from __future__ import annotations

import base64
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from tests.api.clients import anthropic, openai
from tests.api.fake_chat import FakeChat
from tests.api.serving import StartServer
from tests.text.documents.files import jpeg, pdf, scan

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
QUESTION = "When does it end?"
CONTRACT = base64.b64encode(pdf(["It begins in June.", "It ends in May."])).decode()
URL = f"data:application/pdf;base64,{CONTRACT}"
PAGES = "[page 1]\nIt begins in June.\n[page 2]\nIt ends in May.\n</document "
FILE: dict[str, Any] = {"type": "file", "file": {"filename": "contract.pdf", "file_data": URL}}


@pytest.fixture
def chat() -> FakeChat:
    return FakeChat()


def shown(chat: FakeChat) -> tuple[str, str]:
    """The text before the question, and the question."""
    first, question = chat.rendered[-1].messages
    assert [first["role"], question["role"]] == ["system", "user"]
    return str(first["content"]), str(question["content"])


def ask(client: TestClient, *parts: dict[str, Any], **fields: Any) -> httpx.Response:
    content = [*parts, {"type": "text", "text": QUESTION}]
    body = {"model": "fake", "messages": [{"role": "user", "content": content}], **fields}
    reply: httpx.Response = client.post(CHAT, json=body)
    return reply


@pytest.mark.parametrize("dialect", ["chat", "responses", "messages"])
def test_the_official_clients_send_a_pdf_that_stands_before_the_question(
    start_server: StartServer, chat: FakeChat, dialect: str
) -> None:
    url = start_server().url
    if dialect == "messages":
        source = {"type": "base64", "media_type": "application/pdf", "data": CONTRACT}
        block: Any = {"type": "document", "title": "contract.pdf", "source": source}
        text: Any = {"type": "text", "text": QUESTION}
        with anthropic.Anthropic(base_url=url, api_key="none") as claude:
            message: Any = {"role": "user", "content": [block, text]}
            claude.messages.create(model="fake", max_tokens=9, messages=[message])
    else:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
            if dialect == "chat":
                question: Any = [FILE, {"type": "text", "text": QUESTION}]
                message = {"role": "user", "content": question}
                client.chat.completions.create(model="fake", messages=[message])
            else:
                file = {"type": "input_file", "filename": "contract.pdf", "file_data": URL}
                question = [file, {"type": "input_text", "text": QUESTION}]
                message = {"role": "user", "content": question}
                response = client.responses.create(model="fake", input=[message])
                [item] = client.responses.input_items.list(response.id).data
                assert item.model_dump(exclude_none=True)["content"] == question
    first, question = shown(chat)
    assert PAGES in first
    assert "is contract.pdf." in first
    assert question == QUESTION


def test_a_document_of_anthropics_may_be_a_text_with_a_context(
    client: TestClient, chat: FakeChat
) -> None:
    block = {
        "type": "document",
        "title": "Rules",
        "context": "They are old.",
        "source": {"type": "text", "media_type": "text/plain", "data": "Be kind."},
    }
    content = [block, {"type": "text", "text": QUESTION}]
    body = {"model": "fake", "max_tokens": 9, "messages": [{"role": "user", "content": content}]}
    assert client.post(MESSAGES, json=body).status_code == 200
    first, question = shown(chat)
    assert "Be kind." in first
    assert "is Rules." in first
    assert question == f"They are old.\n\n{QUESTION}"


def test_a_document_larger_than_the_context_is_read_in_part_and_the_reply_says_so(
    client: TestClient, chat: FakeChat
) -> None:
    pages = [f"Page {number} is about nothing. " + "x " * 100 for number in range(1, 10)]
    pages[6] = "The contract ends in May. " + "y " * 100
    data = base64.b64encode("\f".join(pages).encode()).decode()
    file = {"filename": "long.pdf", "file_data": f"data:text/plain;base64,{data}"}
    reply = ask(client, {"type": "file", "file": file})
    assert reply.status_code == 200
    share = "3 of 9 pages"
    assert reply.headers["x-mlxserve-warning"].startswith(f"{share} of long.pdf were read")
    first, _ = shown(chat)
    assert "[page 7]\nThe contract ends in May." in first
    assert f"of which {share} are shown" in first


def test_a_document_leaves_room_for_a_long_question(client: TestClient, chat: FakeChat) -> None:
    pages = "\f".join("Something else. " * 10 for _ in range(20))
    data = base64.b64encode(pages.encode()).decode()
    file = {"filename": "a.pdf", "file_data": f"data:text/plain;base64,{data}"}
    content = [{"type": "file", "file": file}, {"type": "text", "text": "why " * 100}]
    body = {"model": "fake", "messages": [{"role": "user", "content": content}]}
    assert client.post(CHAT, json=body).status_code == 200
    first, question = shown(chat)
    # The fake's tokens are characters.
    assert 300 < len(first) < chat.max_model_len - len(question)


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ({"filename": "a.pdf", "file_data": "data:;base64,JVBERi0xLjQK"}, "a.pdf is damaged"),
        ({"filename": "a.bin", "file_data": "AAEC"}, "a.bin is not text"),
        ({"filename": "a.txt", "file_data": "data:text/plain;base64,"}, "a.txt has no text"),
        ({"filename": "a.txt", "file_data": "!"}, "a.txt is not valid base64"),
        ({"file_id": "file-1"}, "this server stores no files"),
    ],
    ids=["damaged", "binary", "empty", "base64", "id"],
)
def test_a_document_that_cannot_be_read_is_named_by_its_place(
    client: TestClient, file: dict[str, Any], words: str
) -> None:
    reply = ask(client, {"type": "file", "file": file})
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert words in error["message"]
    assert error["param"] == "messages[0].content[0]"


def test_at_most_64_documents_are_read(client: TestClient) -> None:
    file = {"type": "file", "file": {"filename": "a", "file_data": "data:text/plain;base64,YQ=="}}
    assert "at most 64 documents" in ask(client, *[file] * 65).json()["error"]["message"]


def test_a_named_prefix_refuses_documents(client: TestClient) -> None:
    body = {"messages": [{"role": "user", "content": [FILE]}]}
    reply = client.put("/v1/prefixes/rules", json=body)
    assert reply.status_code == 400
    assert "a named prefix holds no files" in reply.json()["error"]["message"]


def scanned(num_pages: int) -> dict[str, Any]:
    data = base64.b64encode(scan([jpeg()] * num_pages)).decode()
    return {"type": "file", "file": {"filename": "scan.pdf", "file_data": data}}


def test_a_model_that_sees_gets_scanned_pages_as_images(client: TestClient, chat: FakeChat) -> None:
    chat.supports_images = True
    reply = ask(client, scanned(2), FILE)
    assert reply.status_code == 200, reply.text
    first, question = chat.rendered[-1].messages
    assert PAGES in first["content"], "documents with a text stand first as ever"
    assert [part["type"] for part in question["content"]] == ["text", "image"] * 2 + ["text"]
    assert question["content"][2]["text"] == "[page 2 of scan.pdf]"
    assert (question["content"][3]["image"].width, question["content"][3]["image"].height) == (8, 6)


def test_a_reply_says_how_many_scanned_pages_were_read(client: TestClient, chat: FakeChat) -> None:
    chat.supports_images = True
    warning = ask(client, scanned(17)).headers["x-mlxserve-warning"]
    assert warning.startswith("16 of 17 pages of scan.pdf were read")


def test_a_model_that_does_not_see_refuses_scanned_pages_and_says_what_to_do(
    client: TestClient,
) -> None:
    reply = ask(client, scanned(1))
    assert reply.status_code == 400
    assert reply.json()["error"]["message"].endswith(
        "scan.pdf has no text: its pages are images, which this model does not see; recognise their "
        "text first (OCR), or name a model that sees"
    )
