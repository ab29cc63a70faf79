import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from tui.chat.messages import Message, State
from tui.chat.open_chat import Conversation
from tui.chat.store import Store, StoreError


def tell(story: Callable[[Conversation], Awaitable[None]]) -> None:
    async def run() -> None:
        conversation = Conversation(Store.in_memory())
        try:
            await story(conversation)
        finally:
            await conversation.close()

    asyncio.run(run())


async def exchange(conversation: Conversation, text: str) -> tuple[Message, Message]:
    question = await conversation.ask(text)
    answer = await conversation.begin_answer(question, "m")
    await conversation.save(replace(answer, text=f"re: {text}", state=State.DONE))
    return question, conversation.path[-1]


def texts(conversation: Conversation) -> list[str]:
    return [message.text for message in conversation.path]


def test_a_chat_begins_with_its_first_question() -> None:
    async def story(conversation: Conversation) -> None:
        assert await conversation.chats() == []
        await exchange(conversation, "one")
        await exchange(conversation, "two")
        assert texts(conversation) == ["one", "re: one", "two", "re: two"]
        assert [chat.title for chat in await conversation.chats()] == ["one"]

    tell(story)


def test_a_question_asked_differently_is_a_branch() -> None:
    async def story(conversation: Conversation) -> None:
        await exchange(conversation, "one")
        question, _ = await exchange(conversation, "two")
        edited = await conversation.ask("2", instead_of=question)
        assert texts(conversation) == ["one", "re: one", "2"]
        assert conversation.places[-1].sibling_ids == (question.id, edited.id)
        await conversation.show_branch(question.id)
        assert texts(conversation) == ["one", "re: one", "two", "re: two"]

    tell(story)


def test_another_answer_is_a_branch() -> None:
    async def story(conversation: Conversation) -> None:
        question, first = await exchange(conversation, "one")
        second = await conversation.begin_answer(question, "m")
        assert conversation.places[-1].sibling_ids == (first.id, second.id)
        assert conversation.question_of(second) == question

    tell(story)


def test_a_chat_opens_where_it_was_left() -> None:
    async def story(conversation: Conversation) -> None:
        question, first = await exchange(conversation, "one")
        await conversation.begin_answer(question, "m")
        await conversation.show_branch(first.id)
        chat = conversation.chat
        assert chat is not None
        conversation.new()
        assert conversation.path == []
        await conversation.open(chat.id)
        assert texts(conversation) == ["one", "re: one"]

    tell(story)


def test_a_found_message_is_shown_in_its_own_branch() -> None:
    async def story(conversation: Conversation) -> None:
        question, first = await exchange(conversation, "needle")
        await conversation.ask("else", instead_of=question)
        (hit, *_) = await conversation.search("re: needle")
        assert hit.message_id == first.id
        await conversation.open(hit.chat.id, hit.message_id)
        assert texts(conversation) == ["needle", "re: needle"]

    tell(story)


def test_deleting_the_open_chat_leaves_an_empty_one() -> None:
    async def story(conversation: Conversation) -> None:
        await exchange(conversation, "one")
        chat = conversation.chat
        assert chat is not None
        await conversation.delete(chat.id)
        assert (conversation.chat, conversation.path) == (None, [])
        with pytest.raises(StoreError):
            await conversation.open(chat.id)

    tell(story)


def test_a_chat_can_be_renamed() -> None:
    async def story(conversation: Conversation) -> None:
        await conversation.rename("nothing yet")
        await exchange(conversation, "one")
        await conversation.rename("better")
        assert conversation.chat is not None
        assert conversation.chat.title == "better"

    tell(story)


def test_what_was_asked_is_remembered() -> None:
    async def story(conversation: Conversation) -> None:
        await exchange(conversation, "one")
        conversation.new()
        await exchange(conversation, "two")
        assert await conversation.history() == ["one", "two"]

    tell(story)
