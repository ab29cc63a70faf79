"""A chat that does not fit into the model's context, on the screen."""

from __future__ import annotations

import json

from tests.tui import scripts
from tests.tui.chats_on_disk import branch
from tests.tui.fake_server import FakeServer
from tests.tui.terminals import Open, Terminal
from tui.home import Home

CONTEXT = 1000


def too_long() -> scripts.Refuse:
    message = f"the prompt has {CONTEXT + 200} tokens, but the context has {CONTEXT}"
    error = {"message": message, "code": "context_length_exceeded"}
    return scripts.Refuse(400, json.dumps({"error": error}).encode())


def exchanges(server: FakeServer, *counts: int) -> None:
    """Answers that end at these numbers of tokens."""
    server.model_fields = {"owned_by": "mlxserve", "max_model_len": CONTEXT}
    for number, count in enumerate(counts):
        server.script(scripts.say(f"answer {number}"), scripts.usage(count - 5, 5, cached=0))


async def talk(t: Terminal, count: int) -> None:
    for number in range(count):
        await t.ask(f"question {number}")
        await t.until(lambda n=number: t.messages[-1:] == [f"answer {n}"])  # type: ignore[misc]
        await t.until_ready()


def asked(server: FakeServer) -> list[str]:
    return [message["content"] for message in server.requests[-1]["messages"]]


async def test_the_header_shows_how_much_of_the_context_is_used(
    terminal: Open, server: FakeServer
) -> None:
    exchanges(server, 300, 850)

    async with terminal() as t:
        assert "small · 0 / 1.0k" in t.screen
        await talk(t, 1)
        assert "small · 300 / 1.0k" in t.screen
        await t.ask("question 1")
        await t.until(lambda: "85% of the context is used · /compact frees it" in t.status)
        assert "small · 850 / 1.0k" in t.screen


async def test_a_full_chat_continues_without_its_oldest_messages(
    terminal: Open, server: FakeServer, home: Home
) -> None:
    exchanges(server, 300, 600, 900)
    server.script(too_long(), reason=None)

    async with terminal() as t:
        await talk(t, 3)
        await t.ask("one more")
        await t.until(lambda: "This chat is full" in t.status)
        await t.until_shown("Enter: continue without the oldest messages")
        assert "1200 tokens" in t.screen
        assert t.messages[-1] == "one more"
        await t.press("enter")
        await t.until(lambda: t.messages[-1:] == ["Yes."])
        assert asked(server) == ["question 2", "answer 2", "one more"]
        assert "↑ 4 earlier messages · the model no longer gets them" in t.screen
        await t.until_ready()
        await t.ask("and now")
        await t.until(lambda: len(server.requests) == 6)
        assert asked(server) == ["question 2", "answer 2", "one more", "Yes.", "and now"]
    texts = [message.text for message in branch(home)]
    assert texts[:4] == ["question 0", "answer 0", "question 1", "answer 1"]
    assert "" not in texts  # the refused answer is not kept


async def test_a_full_chat_can_be_summarised(terminal: Open, server: FakeServer) -> None:
    exchanges(server, 300, 600, 900)
    server.script(too_long(), reason=None)
    server.script(scripts.say("They asked three things."))

    async with terminal() as t:
        await talk(t, 3)
        await t.ask("one more")
        await t.until(lambda: "This chat is full" in t.status)
        await t.ask("/compact")
        await t.until(lambda: t.messages[-1:] == ["Yes."])
        system, last = server.requests[-1]["messages"]
        assert system["role"] == "system"
        assert "Summary of the conversation so far:\nThey asked three things." in system["content"]
        assert last == {"role": "user", "content": "one more"}
        question = server.requests[-2]
        assert question["max_tokens"] == 400
        assert "Summarise our conversation" in question["messages"][-1]["content"]
        assert question["messages"][0]["content"] == "question 0"


async def test_a_summary_that_fails_changes_nothing(terminal: Open, server: FakeServer) -> None:
    exchanges(server, 300)
    server.script(scripts.refuse(500, "it broke"), reason=None)

    async with terminal() as t:
        await talk(t, 1)
        await t.ask("/compact")
        await t.until_shown("The chat was not summarised")
        await t.until_ready()
        await t.ask("still here?")
        await t.until(lambda: len(server.requests) == 3)
        assert asked(server) == ["question 0", "answer 0", "still here?"]


async def test_a_message_that_is_too_long_alone_says_so(t: Terminal, server: FakeServer) -> None:
    server.script(too_long(), reason=None)
    await t.ask("far too long")
    await t.until(lambda: "This chat is full" in t.status)
    await t.press("enter")
    await t.until_shown("This message alone does not fit")
    await t.ask("/edit")
    assert t.composer.text == "far too long"


async def test_an_empty_chat_has_nothing_to_compact(t: Terminal) -> None:
    await t.ask("/compact")
    await t.until_shown("This chat is empty")


async def test_a_new_chat_after_a_failure_is_ready(t: Terminal, server: FakeServer) -> None:
    server.script(scripts.refuse(500, "it broke"), reason=None)
    await t.ask("why?")
    await t.until(lambda: "Failed" in t.status)
    await t.press("ctrl+n")
    await t.until_ready()
    assert "Failed" not in t.status
