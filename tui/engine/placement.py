"""Where the engine panel is shown: beside the chat, on a screen of its own, or not at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.css.query import DOMQuery
from textual.geometry import Size
from textual.screen import Screen

from tui.engine.page_watch import PageWatch
from tui.engine.panel import EnginePanel, PanelInput


class EngineScreen(Screen[None]):
    """The panel alone, if there is no room for it beside the chat."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "app.engine", "Back to the chat", show=False)
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
        self._watch = PageWatch(lambda: panel_input().engine)

    async def watch_pages(self) -> None:
        """Runs until cancelled."""
        await self._watch.run()

    async def toggle(self) -> None:
        app = self._app
        if isinstance(app.screen, EngineScreen):
            app.pop_screen()
        elif self._beside:
            await self._beside.remove()
        elif len(app.screen_stack) == 1:
            await self._show(app.size)

    def resized(self, size: Size) -> None:
        """Move the panel to where there is room now."""
        if isinstance(self._app.screen, EngineScreen) and _has_room_beside(size):
            self._app.pop_screen()
            self._app.run_worker(self._show(size), group="engine-panel")
        elif self._beside and not _has_room_beside(size):
            self._beside.remove()
            if len(self._app.screen_stack) == 1:
                self._app.run_worker(self._show(size), group="engine-panel")

    async def _show(self, size: Size) -> None:
        if _has_room_beside(size):
            main = self._app.screen_stack[0].query_one("#main")
            await main.mount(EnginePanel(self._panel_input, self._watch))
        else:
            await self._app.push_screen(EngineScreen(EnginePanel(self._panel_input, self._watch)))

    @property
    def _beside(self) -> DOMQuery[EnginePanel]:
        return self._app.screen_stack[0].query(EnginePanel)


def _has_room_beside(size: Size) -> bool:
    return size.width >= 110 and size.height >= 20
