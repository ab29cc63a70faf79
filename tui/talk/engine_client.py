"""EngineClient: mlxserve's own routes about its engine. Other servers lack them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx

from tui.talk.engine_state import EngineStats, Progress
from tui.talk.errors import ChatError, NoEngine
from tui.talk.sse import ServerEvent
from tui.talk.wire import check, events, explained, json_object, said, start_of

T = TypeVar("T")

# While nothing changes, the map sends only a comment every ten seconds.
_MAP_TIMEOUT = httpx.Timeout(10.0, read=60.0)
_LONG = httpx.Timeout(10.0, read=60.0)  # a long chat is tokenised once more


@dataclass(frozen=True, slots=True)
class ForgottenPages:
    """Cached pages that a server has forgotten, and the models that it covered."""

    num_in_memory: int
    num_on_disk: int
    models: tuple[str, ...]


class EngineClient:
    """Uses the connections of a `ChatClient`. Raises NoEngine if the server lacks a route."""

    def __init__(self, http: httpx.AsyncClient, url: str) -> None:
        self._http = http
        self._url = url
        # The model whose engine is asked; empty for the server's first.
        self.model = ""

    async def requests(self) -> list[Progress]:
        """List every live request. Raises ChatError."""
        content = await self._get("/api/v1/requests")
        return self._read(lambda: [Progress.from_card(card) for card in content["data"]])

    async def stats(self) -> EngineStats:
        """Raises ChatError."""
        content = await self._get("/api/v1/kv/stats")
        return self._read(lambda: EngineStats.from_content(content))

    async def page_events(self) -> AsyncGenerator[tuple[str, Mapping[str, Any]], None]:
        """Yield the page map's events as (kind, data) until closed. Raises ChatError."""
        with explained(self._url):
            async with self._http.stream(
                "GET", "/api/v1/kv/map", params=self._params, timeout=_MAP_TIMEOUT
            ) as reply:
                if reply.status_code != httpx.codes.OK:
                    self._check(reply, await start_of(reply))
                async with aclosing(events(reply)) as stream:
                    async for event in stream:
                        yield event.name, _content_of(event)

    async def forget(self, deleted: Mapping[str, Any]) -> ForgottenPages:
        """Forget the pages of deleted conversations. Raises ChatError.

        deleted: the body of the route
        """
        with explained(self._url):
            reply = await self._http.post("/api/v1/cache/forget", json=deleted, timeout=_LONG)
        self._check(reply, reply.content)
        content = json_object(reply.content)
        return self._read(
            lambda: ForgottenPages(
                int(content["pages"]), int(content["pages_on_disk"]), tuple(content["models"])
            )
        )

    @property
    def _params(self) -> dict[str, str]:
        return {"model": self.model} if self.model else {}

    async def _get(self, path: str) -> dict[str, Any]:
        with explained(self._url):
            reply = await self._http.get(path, params=self._params)
        self._check(reply, reply.content)
        return json_object(reply.content)

    def _check(self, reply: httpx.Response, content: bytes) -> None:
        if reply.status_code in (httpx.codes.NOT_FOUND, httpx.codes.METHOD_NOT_ALLOWED):
            raise self._no_engine()
        check(reply.status_code, content, self._url)

    def _read(self, read: Callable[[], T]) -> T:
        try:
            return read()
        except (KeyError, TypeError, ValueError) as error:
            raise self._no_engine() from error

    def _no_engine(self) -> NoEngine:
        return NoEngine(
            f"The server at {self._url} does not report its engine. Pages, queue and memory are "
            "shown for `mlxserve serve`, and for the server that is started without --url."
        )


def _content_of(event: ServerEvent) -> dict[str, Any]:
    content = json_object(event.data)
    if event.name == "error":
        raise ChatError(f"The server stopped with an error: {said(content)}")
    return content
