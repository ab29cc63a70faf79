"""ToolUse: tools in the chat: started with the window, shown by `/tools`, each call confirmed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from textual.app import App

from tui.chat.calls import CallsPiece
from tui.chat.tool_loop import Decision, Messages, ToolLoop
from tui.talk.connection import ServerConnection
from tui.talk.pieces import Piece
from tui.tools.session import ServerState
from tui.tools.toolbox import Tool, Toolbox
from tui.widgets.call_dialog import CallDialog
from tui.widgets.tools_dialog import ToolsDialog


class ToolUse:
    """Owns the toolbox."""

    def __init__(self, app: App[None], toolbox: Toolbox) -> None:
        self._app = app
        self._toolbox = toolbox
        self._loop = ToolLoop(toolbox, self._confirm)

    async def start(self) -> None:
        """Start the servers, and say which of them did not."""
        await self._toolbox.start()
        failed = [card for card in self._toolbox.cards if card.state is ServerState.FAILED]
        words = self._toolbox.problem or " ".join(card.problem for card in failed)
        if words:
            self._app.notify(words, title="Tools", severity="warning", markup=False)

    def show(self) -> None:
        self._app.push_screen(ToolsDialog(self._toolbox))

    async def close(self) -> None:
        """End the servers."""
        await self._toolbox.close()

    @property
    def words(self) -> str:
        """`3 tools`; empty for none."""
        count = len(self._toolbox.offered())
        return "" if not count else "1 tool" if count == 1 else f"{count} tools"

    def pieces(
        self,
        connection: ServerConnection,
        messages: Messages,
        fields: Mapping[str, float | int | str],
        *,
        continues: bool,
    ) -> AsyncGenerator[Piece | CallsPiece, None]:
        """The answer to these messages, with the calls that the user allows. Raises ChatError."""

        def ask(messages: Messages, tools: Sequence[dict[str, Any]]) -> AsyncGenerator[Piece, None]:
            return connection.client.stream(
                messages,
                model=connection.model,
                continues=bool(messages) and messages[-1]["role"] == "assistant",
                stops_loops=connection.is_ours,
                fields=fields,
                tools=tools,
            )

        return self._loop.answer(
            ask, messages, continues=continues, has_thinking=connection.is_ours
        )

    async def _confirm(self, tool: Tool, arguments: str) -> Decision:
        """Ask the user. Esc stops the answer."""
        dialog = CallDialog(tool, arguments)
        decided: asyncio.Future[Decision | None] = asyncio.get_running_loop().create_future()

        def decide(decision: Decision | None) -> None:
            if not decided.done():
                decided.set_result(decision)

        self._app.push_screen(dialog, decide)
        try:
            decision = await decided
        finally:
            if dialog.is_current:  # the answer was stopped meanwhile
                dialog.dismiss(None)
        if decision is None:
            raise asyncio.CancelledError
        return decision
