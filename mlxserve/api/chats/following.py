"""Streams of events: how a follower of a live chat, or of the list of chats, is served."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from mlxserve.api.chats.feed import TextForm, TooSlow
from mlxserve.api.chats.live_chats import LiveChat
from mlxserve.api.errors import ApiError
from mlxserve.api.server.compression import GzipStream, accepts_gzip
from mlxserve.api.server.drain import Drain
from mlxserve.api.server.sse import EventStream, Write, named_event

# Makes the first event of a follower, and returns it with the number of the event after it.
Begin = Callable[[], Awaitable[tuple[bytes, int]]]


def event_stream(
    request: Request,
    chat: LiveChat,
    drain: Drain,
    begin: Begin,
    form: TextForm = TextForm.BLOCKS,
) -> Response:
    """Send the state, or what the client missed by its `Last-Event-ID`, then what happens.

    Compressed for those who take that: most of an event of a few words is its frame.

    Raises ApiError 429.
    """
    if request.method == "HEAD":
        return Response(media_type="text/event-stream")
    waiter = chat.feed.enter(form)

    async def close() -> None:
        chat.feed.leave(waiter)

    place = chat.feed.place(request.headers.get("last-event-id", ""), form)
    return EventStream(
        partial(_follow, chat, drain, waiter, place, begin),
        close=close,
        failure=lambda error: named_event("error", error.body()),
        headers={"vary": "accept-encoding"},
        gzip=GzipStream() if accepts_gzip(request.headers) else None,
    )


async def _follow(
    chat: LiveChat,
    drain: Drain,
    waiter: asyncio.Event,
    place: int | None,
    begin: Begin,
    write: Write,
) -> None:
    """Write the state, unless the follower goes on at `place`, then what happens."""

    def is_over() -> bool:
        return drain.is_on and chat.writer is None

    try:
        if place is None:
            state, place = await begin()
            await write(state)
        await chat.feed.follow(waiter, place, is_over, write)
    except TooSlow:
        error = ApiError(
            429,
            "This follower read more slowly than the chat goes on. Connect again for its state.",
            code="too_slow",
        )
        await write(named_event("error", error.body()))
