"""ToolUse: tools in the chat: started with the window, shown by `/tools`, each call confirmed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

from textual.app import App

from mlxserve.history.attachment import fence_around
from mlxserve.history.calls import CallsPiece
from mlxserve.history.chat_file import StoreError
from mlxserve.mcp.offers import ServerPrompt, ServerResource
from mlxserve.mcp.session import ServerState
from mlxserve.mcp.toolbox import Tool, Toolbox
from mlxserve.system.counted import counted
from mlxserve.system.terminal_text import one_line
from tui.chat.tool_loop import Decision, Messages, ToolLoop
from tui.commands import Command
from tui.talk.connection import ServerConnection
from tui.talk.errors import ToolsRefused
from tui.talk.pieces import Piece
from tui.widgets.call_dialog import CallDialog
from tui.widgets.tools_dialog import ToolsDialog


class ToolUse:
    """Owns the toolbox."""

    def __init__(self, app: App[None], toolbox: Toolbox) -> None:
        self._app = app
        self._toolbox = toolbox
        self._loop = ToolLoop(toolbox, self._confirm)
        self._without_tools: set[str] = set()  # models that were said to answer without

    async def start(self) -> None:
        """Start the tool servers, and report those that failed."""
        try:
            await self._toolbox.start()
        except StoreError as error:
            self._app.notify(str(error), title="Tools", severity="error")
            return
        failed = [card for card in self._toolbox.cards if card.state is ServerState.FAILED]
        words = self._toolbox.problem or " ".join(card.problem for card in failed)
        if words:
            self._app.notify(words, title="Tools", severity="warning")

    def takes(self, line: str) -> bool:
        """True if a line is a prompt of a server, or attaches one of its resources."""
        return self._named(line) is not None

    async def offered_text(self, line: str) -> str:
        """Return the text of the prompt or of the resource in a line. Raises ToolsError."""
        named = self._named(line)
        if isinstance(named, ServerPrompt):
            return await self._toolbox.prompt(named, line.partition(" ")[2])
        assert named is not None
        text = await self._toolbox.resource(named)
        fence = fence_around(text)
        return f"{one_line(named.uri, 200)}:\n{fence}\n{text.rstrip()}\n{fence}\n"

    def _named(self, line: str) -> ServerPrompt | ServerResource | None:
        command, _, words = line.partition(" ")
        if command == "/attach":
            known = self._toolbox.resources
            return next((each for each in known if each.address == words.strip()), None)
        return next((each for each in self._toolbox.prompts if f"/{each.command}" == command), None)

    @property
    def commands(self) -> list[Command]:
        """The prompts of the servers, as commands, and the resources to attach."""
        prompts = [
            Command(one_line(each.command), one_line(each.description, 200), (), each.usage)
            for each in self._toolbox.prompts
        ]
        resources = (one_line(each.address) for each in self._toolbox.resources)
        return [
            *prompts,
            *(Command(f"attach {each}", "Attach this resource") for each in resources),
        ]

    def show(self) -> None:
        self._app.push_screen(ToolsDialog(self._toolbox))

    @property
    def label(self) -> str:
        """The number of tools, such as `3 tools`; empty for none."""
        count = len(self._toolbox.offered())
        return counted(count, "tool") if count else ""

    @property
    def definitions(self) -> list[dict[str, Any]]:
        """Definitions of the tools that are offered to the model."""
        return [tool.definition for tool in self._toolbox.offered()]

    def pieces(
        self,
        connection: ServerConnection,
        messages: Messages,
        fields: Mapping[str, float | int | str],
        *,
        continues: bool,
    ) -> AsyncGenerator[Piece | CallsPiece, None]:
        """Stream the answer to these messages, with the calls that the user allows.

        Raises ChatError.
        """
        ask = partial(self._ask, connection, fields)
        # Others may refuse the field.
        has_thinking = connection.is_ours
        return self._loop.answer(ask, messages, continues=continues, has_thinking=has_thinking)

    async def _ask(
        self,
        connection: ServerConnection,
        fields: Mapping[str, float | int | str],
        messages: Messages,
        tools: Sequence[dict[str, Any]],
    ) -> AsyncGenerator[Piece, None]:
        """Make one request; repeat it without tools if the server refuses them.

        Raises ChatError.
        """
        stream = partial(
            connection.client.stream,
            messages,
            model=connection.model,
            continues=bool(messages) and messages[-1]["role"] == "assistant",
            stops_loops=connection.is_ours,
            fields=fields,
        )
        try:
            async with aclosing(stream(tools=tools)) as pieces:
                async for piece in pieces:
                    yield piece
        except ToolsRefused:
            # No piece has arrived.
            if not tools:
                raise
            self._say_without_tools(connection.model)
            async with aclosing(stream()) as pieces:
                async for piece in pieces:
                    yield piece

    def _say_without_tools(self, model: str) -> None:
        """Report once per model that it gets no tools."""
        if model not in self._without_tools:
            self._without_tools.add(model)
            words = f"{one_line(model, 60)} does not take tools here, so it answers without them."
            self._app.notify(words, title="Tools")

    async def _confirm(self, tool: Tool, arguments: str) -> Decision:
        """Ask the user. Esc stops the answer."""
        decision = await self.decision(tool, arguments)
        if decision is None:
            raise asyncio.CancelledError
        return decision

    async def decision(self, tool: Tool, arguments: str) -> Decision | None:
        """Ask the user about a call; None for Esc. The dialog closes if this is cancelled."""
        dialog = CallDialog(tool, arguments)
        decided: asyncio.Future[Decision | None] = asyncio.get_running_loop().create_future()

        def decide(decision: Decision | None) -> None:
            if not decided.done():
                decided.set_result(decision)

        self._app.push_screen(dialog, decide)
        try:
            return await decided
        finally:
            # The answer was stopped meanwhile.
            if dialog.is_current:
                dialog.dismiss(None)
