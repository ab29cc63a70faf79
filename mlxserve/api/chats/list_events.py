"""`/api/v1/chats/events`: tells that the list of chats has changed, to who follows no chat of it."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mlxserve.api.access.security import key_id
from mlxserve.api.chats.following import event_stream
from mlxserve.api.chats.live_chats import LIST, LiveChats
from mlxserve.api.native.chats import check_owner
from mlxserve.api.server.drain import Drain


class ListEvents:
    """The endpoint over events of the list. Its route comes before those with a chat's id."""

    def __init__(self, live: LiveChats, drain: Drain) -> None:
        self._live = live
        self._drain = drain

    def routes(self) -> list[Route]:
        return [Route("/api/v1/chats/events", self.events, methods=["GET"])]

    async def events(self, request: Request) -> Response:
        """Sends an event whenever the list of chats changes, until the client leaves."""
        await check_owner(request)
        owner = key_id(request)
        self._live.check_followers(owner)
        chats = self._live.chat(owner, LIST)

        async def begin() -> tuple[bytes, int]:
            return chats.feed.state_event(b"{}", chats.feed.next), chats.feed.next

        return event_stream(request, chats, self._drain, begin)
