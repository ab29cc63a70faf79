"""PanelPlacement: where the engine panel is shown.

Beside the chat, as a strip above the input in a narrow window, on a screen of its own, or not at
all.

    wide     F4  beside the chat ─ F4 ─ closed
    narrow   F4  a strip ─ F4 ─ a screen of its own ─ F4, Esc ─ closed
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import ClassVar

from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.css.query import DOMQuery
from textual.geometry import Size
from textual.screen import Screen

from tui.engine.page_watch import PageWatch
from tui.engine.panel import STRIP, EnginePanel, PanelInput
from tui.workers import start_worker

# Rows of a window from which a strip leaves room for the chat.
_STRIP_HEIGHT = 20


class EngineScreen(Screen[None]):
    """The panel alone, if there is no room for it beside the chat."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "app.command('engine')", "Back to the chat", show=False)
    ]

    def __init__(self, panel: EnginePanel) -> None:
        super().__init__()
        self._panel = panel

    def compose(self) -> ComposeResult:
        panel = self._panel
        panel.border_subtitle = "Esc back to the chat"
        yield panel


class PanelPlacement:
    """Shows, hides and moves the panel."""

    def __init__(self, app: App[None], panel_input: Callable[[], PanelInput]) -> None:
        self._app = app
        self._panel_input = panel_input
        self.watch = PageWatch(lambda: panel_input().engine)

    async def toggle(self) -> None:
        app = self._app
        if isinstance(app.screen, EngineScreen):
            app.pop_screen()
            # The strip was removed from it just before another screen was shown, which left its room.
            app.screen.query_one("#bottom").refresh(layout=True)
        elif self._beside:
            is_strip = self._beside.first().has_class(STRIP)
            await self._beside.remove()
            if is_strip and len(app.screen_stack) == 1:
                await self._show_alone()
        elif len(app.screen_stack) == 1:
            await self._show(app.size)

    def resized(self, size: Size) -> None:
        """Move the panel to where there is room."""
        if isinstance(self._app.screen, EngineScreen) and _has_room_beside(size):
            self._app.pop_screen()
            start_worker(self._app, partial(self._show, size), group="engine-panel")
        elif self._beside and self._beside.first().has_class(STRIP) == _has_room_beside(size):
            start_worker(self._app, partial(self._move, size), group="engine-panel")

    async def _move(self, size: Size) -> None:
        await self._beside.remove()
        if len(self._app.screen_stack) == 1:
            await self._show(size)

    async def _show(self, size: Size) -> None:
        window = self._app.screen_stack[0]
        panel = EnginePanel(self._panel_input, self.watch)
        if _has_room_beside(size):
            await window.query_one("#main").mount(panel)
        elif size.height >= _STRIP_HEIGHT:
            panel.add_class(STRIP)
            await window.query_one("#bottom").mount(panel, before=0)
        else:
            await self._show_alone()

    async def _show_alone(self) -> None:
        await self._app.push_screen(EngineScreen(EnginePanel(self._panel_input, self.watch)))

    @property
    def _beside(self) -> DOMQuery[EnginePanel]:
        return self._app.screen_stack[0].query(EnginePanel)


def _has_room_beside(size: Size) -> bool:
    return size.width >= 110 and size.height >= 20
