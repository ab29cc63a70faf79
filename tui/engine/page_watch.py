"""Listening to the page map for as long as there is a server, whether the map is shown or not: the
pages of an answer are only told while it is coming, and the panel may be opened after it.

Knows nothing of widgets.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from typing import TYPE_CHECKING

from tui.engine.page_map import PageMapReplica
from tui.talk.errors import ChatError, NoEngine

if TYPE_CHECKING:  # httpx comes with it, which the first picture has no time for
    from tui.talk.engine_client import EngineClient

_LOOK_SECONDS = 0.5  # until there may be a server
_AGAIN_SECONDS = 2.0  # until one that did not answer is asked again


class PageWatch:
    """`engine` says which server is connected; `changed` is called when there is something new."""

    def __init__(self, engine: Callable[[], EngineClient | None]) -> None:
        self._engine = engine
        self._without: EngineClient | None = None  # a server that shows nothing is asked once
        self.pages = PageMapReplica()
        self.changed: Callable[[], None] = nobody_looks

    def ask_again(self) -> None:
        """Also a server that has shown nothing."""
        self._without = None

    async def run(self) -> None:
        """For ever."""
        while True:
            engine = self._engine()
            if engine is None or engine is self._without:
                await asyncio.sleep(_LOOK_SECONDS)
                continue
            try:
                await self._follow(engine)
            except ChatError as error:
                self._without = engine if isinstance(error, NoEngine) else None
            self.pages = PageMapReplica()
            self.changed()
            await asyncio.sleep(_AGAIN_SECONDS)

    async def _follow(self, engine: EngineClient) -> None:
        async with aclosing(engine.page_events()) as events:
            async for kind, data in events:
                self.pages.apply(kind, data)
                self.changed()


def nobody_looks() -> None:
    """Nobody looks."""
