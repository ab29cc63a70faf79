"""Documents stand first in a conversation, by their content."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlxserve.text.conversation import Conversation, read_messages
from mlxserve.text.documents.choice import chosen_parts
from mlxserve.text.documents.document import Document
from mlxserve.text.documents.placement import Excerpt, whole, with_documents
from mlxserve.text.documents.sent import text_url

CONTRACT = "It ends in May.\fIt begins in June."


def part(text: str, name: str = "contract.pdf") -> Mapping[str, Any]:
    return {"type": "file", "file": {"filename": name, "file_data": text_url(text)}}


def asked(question: str, *parts: Mapping[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": [*parts, {"type": "text", "text": question}]}


def placed(*messages: dict[str, Any], text: str = CONTRACT) -> Conversation:
    conversation = read_messages(messages)
    documents = {sent: Document(sent.name, text) for sent in conversation.sent_documents}
    return with_documents(conversation, {sent: whole(each) for sent, each in documents.items()})


def texts(conversation: Conversation) -> list[tuple[str, str]]:
    return [(message.role, message.text) for message in conversation.messages]


def test_a_document_stands_before_the_system_prompt_and_the_question() -> None:
    system = {"role": "system", "content": "It is Monday."}
    (role, first), (_, question) = texts(placed(system, asked("When?", part(CONTRACT))))
    assert role == "system"
    assert first.startswith("<document ")
    assert "[page 1]\nIt ends in May.\n[page 2]\nIt begins in June.\n</document " in first
    assert first.endswith("\n\nIt is Monday.")
    assert question == "When?"


def test_other_questions_names_and_system_prompts_have_the_same_beginning() -> None:
    prompts = [
        texts(placed(asked("When?", part(CONTRACT)))),
        texts(placed(asked("Who?", part(CONTRACT, "copy.pdf")))),
        texts(placed({"role": "system", "content": "Tuesday."}, asked("Why?", part(CONTRACT)))),
    ]
    ends = [messages[0][1].index("Document ") for messages in prompts]
    [begin] = {messages[0][1][:end] for messages, end in zip(prompts, ends, strict=True)}
    assert "</document " in begin
    assert [messages[0][0] for messages in prompts] == ["system"] * 3


def test_a_document_that_is_sent_twice_stands_there_once_with_both_names() -> None:
    [(_, first), _] = texts(placed(asked("?", part(CONTRACT, "a.pdf"), part(CONTRACT, "b.pdf"))))
    assert first.count("It ends in May.") == 1
    assert "is a.pdf." in first
    assert "is b.pdf." in first


def test_a_document_that_is_sent_again_is_only_named() -> None:
    answer = {"role": "assistant", "content": "In May."}
    again = asked("Sure?", part(CONTRACT, "again.pdf"))
    conversation = placed(asked("When?", part(CONTRACT)), answer, again, answer, again)
    everything = "".join(text for _, text in texts(conversation))
    assert everything.count("It ends in May.") == 1
    for message in (conversation.messages[3], conversation.messages[5]):
        assert message.text.startswith("Document ")
        assert "is again.pdf." in message.text


def test_a_document_of_a_later_question_stays_with_it() -> None:
    answer = {"role": "assistant", "content": "Hello."}
    conversation = placed(asked("Hi"), answer, asked("When?", part(CONTRACT)))
    roles = [role for role, _ in texts(conversation)]
    assert roles == ["user", "assistant", "user"]
    last = conversation.messages[-1].text
    assert last.startswith("<document ")
    assert last.endswith("\n\nWhen?")
    assert conversation.sent_documents == []


def test_an_excerpt_has_the_numbers_of_its_pages_and_says_how_many_are_left_out() -> None:
    excerpt = Excerpt(Document("a.pdf", "one\ftwo\fthree"), (0, 2))
    assert "[page 1]\none\n[page 3]\nthree\n" in excerpt.text
    assert "two" not in excerpt.text
    assert excerpt.note.startswith("2 of 3 pages of a.pdf were read")
    assert "2 of 3 pages are shown" in excerpt.title


def test_parts_are_chosen_by_the_words_of_the_question_in_the_documents_order() -> None:
    parts = ["the cat", "the dog barks", "the sun", "a dog and a dog", "the end"]
    assert chosen_parts(parts, [10] * 5, "What does the DOG do?", 20) == [1, 3]
    assert chosen_parts(parts, [10, 10, 10, 100, 10], "dog", 20) == [0, 1]
    assert chosen_parts(parts, [10] * 5, "nothing of it", 25) == [0, 1]
    assert chosen_parts(["猫が好き", "犬が好きです"], [1, 1], "犬が", 1) == [1]
    assert chosen_parts(parts, [10] * 5, "dog", 25, first={4}) == [3, 4]


def test_a_text_without_pages_has_parts_that_give_it_again() -> None:
    text = "".join(f"Paragraph {number} of a long text.\n\n" for number in range(500))
    document = Document("a.txt", text)
    assert "".join(document.parts) == text
    assert max(map(len, document.parts)) <= 4_000
    assert document.unit == "part"
    assert "".join(Document("b", "x" * 9_999).parts) == "x" * 9_999
