"""The prompts of a server over HTTP, and replies that are none."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from mlxserve.history.saved_prompts import SavedPrompt
from tui.talk.client import ChatClient
from tui.talk.errors import ChatError, NoEngine

URL = "http://127.0.0.1:1"
CARD = {
    "id": 3,
    "name": "Rhyme",
    "system": "In verse.",
    "sampling": {"seed": 1},
    "object": "prompt",
}
PROMPT = SavedPrompt(id=3, name="Rhyme", system="In verse.", sampling={"seed": 1})


def client_of(status: int, content: Any) -> ChatClient:
    return ChatClient(
        URL, transport=httpx.MockTransport(lambda _: httpx.Response(status, json=content))
    )


async def test_prompts_are_read() -> None:
    async with client_of(200, {"data": [CARD]}) as client:
        assert await client.prompts.all() == [PROMPT]


@pytest.mark.parametrize("content", [{}, {"data": 5}, {"data": [{"id": 1}]}, {"data": [[]]}, []])
async def test_another_servers_reply_is_no_list_of_prompts(content: Any) -> None:
    async with client_of(200, content) as client:
        with pytest.raises(NoEngine, match="keeps no prompts"):
            await client.prompts.all()


@pytest.mark.parametrize(
    ("status", "code", "message"),
    [
        (409, "too_many_prompts", "100 prompts are saved already. Delete one of them first."),
        (404, "unknown_prompt", "There is no such saved prompt; it may have been deleted."),
        (403, "chats_not_allowed", "Create a key: mlxserve key create NAME."),
    ],
)
async def test_a_refusal_is_told_in_the_servers_words(status: int, code: str, message: str) -> None:
    async with client_of(status, {"error": {"code": code, "message": message}}) as client:
        with pytest.raises(ChatError) as refused:
            await client.prompts.delete(PROMPT)
        assert str(refused.value) == message
