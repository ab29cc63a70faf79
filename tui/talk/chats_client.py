"""ChatsClient: the chats that an mlxserve server keeps. Asks in them, and follows what happens there."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

import httpx

from tui.talk.errors import ChatBusy, NoChat, StaleChat
from tui.talk.pieces import ChatEvent
from tui.talk.sse import ServerEvent
from tui.talk.wire import check, error_code, events, explained, json_object, said, start_of

# The server sends a comment every ten seconds.
_EVENTS_TIMEOUT = httpx.Timeout(10.0, read=60.0)
_ASKING_TIMEOUT = httpx.Timeout(10.0, read=60.0, write=60.0)  # images may be large
_CONFLICTS = {"stale_chat": StaleChat, "answer_running": ChatBusy}


class ChatsClient:
    """Uses the connections of a `ChatClient`. Raises ChatError, and NoChat for a chat that is not there."""

    def __init__(self, http: httpx.AsyncClient, url: str) -> None:
        self._http = http
        self._url = url

    async def begin(self, chat_id: int, body: Mapping[str, Any]) -> int:
        """Have the server write an answer; returns the id of its message.

        body: that of the route

        Raises StaleChat if the chat has gone on, and ChatBusy if another answer is being written.
        """
        reply = await self._send("POST", f"/api/v1/chats/{chat_id}/answers", body)
        return int(json_object(reply.content)["answer"]["id"])

    async def stop(self, chat_id: int, answer_id: int) -> None:
        """Stop an answer; without effect on one that has ended."""
        try:
            await self._send("DELETE", f"/api/v1/chats/{chat_id}/answers/{answer_id}")
        except NoChat:
            return

    async def decide(self, chat_id: int, answer_id: int, call_id: str, decision: str) -> None:
        """Say whether a call is made; without effect if another client has said so."""
        path = f"/api/v1/chats/{chat_id}/answers/{answer_id}/decision"
        try:
            await self._send("POST", path, {"call_id": call_id, "decision": decision})
        except (NoChat, ChatBusy):
            return

    async def announce(self, chat_id: int) -> None:
        """Have the server tell others that this program has changed the chat in the store."""
        await self._send("PATCH", f"/api/v1/chats/{chat_id}", {})

    async def events(self, chat_id: int, last: ChatEvent | None) -> AsyncGenerator[ChatEvent, None]:
        """Yield what happens in a chat until the connection ends.

        last: the last event that has arrived; None to begin with the state of the chat
        """
        headers = {} if last is None else {"last-event-id": last.id}
        grown = last
        path = f"/api/v1/chats/{chat_id}/events"
        with explained(self._url):
            async with self._http.stream(
                "GET", path, params={"form": "text"}, headers=headers, timeout=_EVENTS_TIMEOUT
            ) as reply:
                if reply.status_code != httpx.codes.OK:
                    self._check(reply, await start_of(reply))
                async with aclosing(events(reply)) as stream:
                    async for event in stream:
                        grown = _event_of(event, grown)
                        yield grown

    async def _send(
        self, method: str, path: str, body: Mapping[str, Any] | None = None
    ) -> httpx.Response:
        with explained(self._url):
            reply = await self._http.request(method, path, json=body, timeout=_ASKING_TIMEOUT)
        self._check(reply, reply.content)
        return reply

    def _check(self, reply: httpx.Response, content: bytes) -> None:
        if reply.status_code == httpx.codes.NOT_FOUND:
            raise NoChat("The server does not have this chat. It may have been deleted.")
        if reply.status_code == httpx.codes.CONFLICT:
            refusal = json_object(content)
            raise _CONFLICTS.get(error_code(refusal), ChatBusy)(f"{said(refusal)}.")
        check(reply.status_code, content, self._url)


def _event_of(event: ServerEvent, before: ChatEvent | None) -> ChatEvent:
    """Return an event; one that grows the text of the event before it has nothing but more of that."""
    if event.name != "more" or before is None:
        return ChatEvent(event.name, json_object(event.data), event.id)
    return ChatEvent(before.name, {**before.data, "text": json.loads(event.data)}, event.id)
