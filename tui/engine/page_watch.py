"""Follows the server's page map all the time, whether it is shown or not.

The server reports the pages of a request only while it runs, and the panel may be opened later.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from typing import TYPE_CHECKING

from tui.engine.page_map import PageMapReplica
from tui.engine.panel_text import OwnerColours
from tui.talk.errors import ChatError, NoEngine

# Imports httpx, which takes longer than the first picture may.
if TYPE_CHECKING:
    from tui.talk.engine_client import EngineClient

_POLL_SECONDS = 0.5  # while not connected
_RETRY_SECONDS = 2.0  # after a failure


class PageWatch:
    """`engine` returns the connected server; `changed` is called after every change of the map."""

    def __init__(self, engine: Callable[[], EngineClient | None]) -> None:
        self._engine = engine
        self._without: EngineClient | None = None  # a server without a page map is asked only once
        self.pages = PageMapReplica()
        self.colour_of = OwnerColours()
        self.changed: Callable[[], None] = ignore_change

    def ask_again(self) -> None:
        """Ask a server again that had no page map."""
        self._without = None

    async def run(self) -> None:
        """Follow the map until cancelled."""
        while True:
            engine = self._engine()
            if engine is None or engine is self._without:
                await asyncio.sleep(_POLL_SECONDS)
                continue
            try:
                await self._follow_one_model(engine)
            except ChatError as error:
                self._without = engine if isinstance(error, NoEngine) else None
            self.pages = PageMapReplica()
            self.changed()
            await asyncio.sleep(_RETRY_SECONDS)

    async def _follow_one_model(self, engine: EngineClient) -> None:
        """Follow one engine until another model's is to be shown."""
        model, following = engine.model, asyncio.ensure_future(self._follow(engine))
        try:
            while not following.done() and engine.model == model:
                await asyncio.wait([following], timeout=_POLL_SECONDS)
            if following.done():
                following.result()
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)

    async def _follow(self, engine: EngineClient) -> None:
        async with aclosing(engine.page_events()) as events:
            async for kind, data in events:
                self.pages.apply(kind, data)
                self.changed()


def ignore_change() -> None:
    """The default of `changed`."""
