from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from mlxserve.history.chat_file import StoreError
from mlxserve.history.messages import NewQuestion, State, StoredMessage
from mlxserve.history.store import Store
from tui.chat.open_chat import OpenChat


@pytest.fixture
@asynccontextmanager
async def open_chat() -> AsyncGenerator[OpenChat, None]:
    open_chat = OpenChat(Store.in_memory())
    yield open_chat
    await open_chat.close()


async def answering(open_chat: OpenChat, text: str) -> tuple[StoredMessage, StoredMessage]:
    question = await open_chat.ask(NewQuestion(text))
    answer = await open_chat.begin_answer(question, "m")
    await open_chat.save(replace(answer, text=f"re: {text}", state=State.DONE))
    return question, open_chat.path[-1]


def texts(open_chat: OpenChat) -> list[str]:
    return [message.text for message in open_chat.path]


async def test_a_chat_begins_with_its_first_question(open_chat: OpenChat) -> None:
    assert await open_chat.chats() == []
    await answering(open_chat, "one")
    await answering(open_chat, "two")
    assert texts(open_chat) == ["one", "re: one", "two", "re: two"]
    assert [chat.title for chat in await open_chat.chats()] == ["one"]


async def test_an_edited_question_starts_a_branch(open_chat: OpenChat) -> None:
    await answering(open_chat, "one")
    question, _ = await answering(open_chat, "two")
    edited = await open_chat.ask(NewQuestion("2"), instead_of=question)
    assert texts(open_chat) == ["one", "re: one", "2"]
    assert open_chat.versions[-1].sibling_ids == (question.id, edited.id)
    await open_chat.show_branch(question.id)
    assert texts(open_chat) == ["one", "re: one", "two", "re: two"]


async def test_a_regenerated_answer_starts_a_branch(open_chat: OpenChat) -> None:
    question, first = await answering(open_chat, "one")
    second = await open_chat.begin_answer(question, "m")
    assert open_chat.versions[-1].sibling_ids == (first.id, second.id)
    assert open_chat.question_of(second) == question


async def test_a_chat_opens_at_the_branch_shown_last(open_chat: OpenChat) -> None:
    question, first = await answering(open_chat, "one")
    await open_chat.begin_answer(question, "m")
    await open_chat.show_branch(first.id)
    chat = open_chat.chat
    assert chat is not None
    open_chat.new()
    assert open_chat.path == []
    await open_chat.open(chat.id)
    assert texts(open_chat) == ["one", "re: one"]


async def test_a_search_result_opens_at_its_own_branch(open_chat: OpenChat) -> None:
    question, first = await answering(open_chat, "needle")
    await open_chat.ask(NewQuestion("else"), instead_of=question)
    (hit, *_) = await open_chat.search("re: needle")
    assert hit.message_id == first.id
    await open_chat.open(hit.chat.id, hit.message_id)
    assert texts(open_chat) == ["needle", "re: needle"]


async def test_deleting_the_open_chat_leaves_an_empty_one(open_chat: OpenChat) -> None:
    await answering(open_chat, "one")
    chat = open_chat.chat
    assert chat is not None
    await open_chat.delete(chat.id)
    assert (open_chat.chat, open_chat.path) == (None, [])
    with pytest.raises(StoreError):
        await open_chat.open(chat.id)


async def test_a_chat_can_be_renamed(open_chat: OpenChat) -> None:
    await open_chat.rename("nothing yet")
    await answering(open_chat, "one")
    await open_chat.rename("better")
    assert open_chat.chat is not None
    assert open_chat.chat.title == "better"


async def test_the_history_holds_the_questions_of_all_chats(open_chat: OpenChat) -> None:
    await answering(open_chat, "one")
    open_chat.new()
    await answering(open_chat, "two")
    assert await open_chat.history() == ["one", "two"]
