"""The events of one chat: their bytes, and a follower that gets those of its form."""

from __future__ import annotations

import asyncio

import pytest

from mlxserve.api.chats.feed import ChatFeed, Growth, TextForm, TooSlow

BLOCKS, TEXT = TextForm.BLOCKS, TextForm.TEXT


def grown(text: str, at: int = 0) -> Growth:
    data = b'{"id":12,"patches":[{"path":[140],"keep":1,"grow":"%s"}]}' % text.encode()
    return Growth("blocks", data, ("blocks", 12, at), text)


def sent(feed: ChatFeed, place: int = 1, form: TextForm = BLOCKS) -> bytes:
    """What a follower is sent, from the event with this number on."""
    written: list[bytes] = []

    async def write(event: bytes) -> None:
        written.append(event)

    async def follow() -> None:
        waiter = feed.enter(form)
        await feed.follow(waiter, place, lambda: True, write)
        feed.leave(waiter)

    asyncio.run(follow())
    return b"".join(written)


def names(events: bytes) -> list[str]:
    lines = events.decode().splitlines()
    return [line.removeprefix("event:") for line in lines if line.startswith("event:")]


def test_a_token_costs_forty_bytes_on_the_wire() -> None:
    feed, num_tokens = ChatFeed(), 12_500
    for _ in range(num_tokens):
        feed.publish_growth(grown(" abc"), BLOCKS)
    assert len(sent(feed)) < 40 * num_tokens


def test_text_at_another_place_or_after_another_event_names_its_place() -> None:
    feed = ChatFeed()
    for growth in (grown("a"), grown("b"), grown("c", at=1), grown("d", at=1)):
        feed.publish_growth(growth, BLOCKS)
    feed.publish("chat", {})
    feed.publish_growth(grown("e", at=1), BLOCKS)
    feed.publish("text", {"text": "e"}, TEXT)
    feed.publish_growth(grown("f", at=1), BLOCKS)
    assert names(sent(feed)) == ["blocks", "more", "blocks", "more", "chat", "blocks", "more"]
    assert names(sent(feed, form=TEXT)) == ["chat", "text"]


def test_nothing_is_more_for_a_follower_that_begins_with_the_state() -> None:
    feed = ChatFeed()
    feed.publish_growth(grown("a"), BLOCKS)
    place = feed.begin_state(BLOCKS)
    for text in ("b", "c"):
        feed.publish_growth(grown(text), BLOCKS)
    assert names(sent(feed, place)) == ["blocks", "more"]


def test_a_form_that_was_left_out_begins_with_the_state() -> None:
    feed = ChatFeed()
    feed.publish("message", {})
    last = sent(feed).decode().partition("\n")[0].removeprefix("id:")
    assert (feed.place(last, BLOCKS), feed.place(last, TEXT)) == (2, 2)
    feed.skip(TEXT)
    feed.publish("end", {})
    assert (feed.place(last, BLOCKS), feed.place(last, TEXT)) == (2, None)
    last = sent(feed, 2).decode().partition("\n")[0].removeprefix("id:")
    assert feed.place(last, TEXT) == 3


def test_a_follower_that_is_too_slow_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxserve.api.chats.feed.MAX_BYTES", 100)
    feed = ChatFeed()
    for _ in range(5):
        feed.publish("message", {"text": "x" * 30})
    with pytest.raises(TooSlow):
        sent(feed)
