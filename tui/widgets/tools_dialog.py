"""ToolsDialog: tool servers and their tools, and which are switched off or allowed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

from textual import on
from textual.app import ComposeResult
from textual.content import Content
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from mlxserve.mcp.servers_file import ToolsError
from mlxserve.mcp.session import ServerState
from mlxserve.mcp.toolbox import Permission, ServerCard, Tool, Toolbox
from mlxserve.system.counted import counted
from mlxserve.system.terminal_text import one_line
from tui.widgets.dialog import Dialog
from tui.workers import start_worker

_SIGNS = {
    ServerState.READY: "●",
    ServerState.STARTING: "◌",
    ServerState.FAILED: "✗",
    ServerState.OFF: "○",
}
_WORDS = {Permission.ASK: "asks first", Permission.ALWAYS: "always", Permission.NEVER: "never"}
_NEXT = {
    Permission.ASK: Permission.ALWAYS,
    Permission.ALWAYS: Permission.NEVER,
    Permission.NEVER: Permission.ASK,
}
_HOW = (
    'Servers of tools (MCP) are named in {file}, as {{"mcpServers": {{"time": {{"command": "uvx", '
    '"args": ["mcp-server-time"]}}}}}}. They start with the next chat window.'
)
_LOOK_SECONDS = 0.25


class ToolsDialog(Dialog[None]):
    """Enter on a server switches or restarts it; on a tool: ask first, always, never."""

    def __init__(self, toolbox: Toolbox) -> None:
        super().__init__()
        self._toolbox = toolbox
        self._rows: list[ServerCard | Tool] = []
        self._shown: list[Content] = []
        self._problem = ""  # problem of the last change

    def compose(self) -> ComposeResult:
        with self.box("Tools", "Enter switches · Esc closes"):
            yield OptionList(compact=True)
            yield Static(id="note", markup=False)

    def on_mount(self) -> None:
        self._show()
        self.query_one(OptionList).focus()
        self.set_interval(_LOOK_SECONDS, self._show)

    def _show(self) -> None:
        """Show the current rows, if they changed."""
        cards = self._toolbox.cards
        self._rows = []
        for card in cards:
            self._rows += [card, *card.tools]
        lines = [_line(row) for row in self._rows]
        options = self.query_one(OptionList)
        if lines != self._shown:
            at = options.highlighted or 0
            self._shown = lines
            options.set_options([Option(line) for line in lines])
            options.highlighted = min(at, len(lines) - 1) if lines else None
        options.display = bool(lines)
        self._note()

    @on(OptionList.OptionHighlighted)
    def _moved(self) -> None:
        self._problem = ""
        self._note()

    def _note(self) -> None:
        at = self.query_one(OptionList).highlighted
        row = self._rows[at] if at is not None and at < len(self._rows) else None
        words = self._toolbox.problem or _HOW.format(file=self._toolbox.file)
        if row is not None:
            words = row.problem if isinstance(row, ServerCard) else row.description
        self.say(one_line(self._problem or words, 600))

    @on(OptionList.OptionSelected)
    def _switch(self, event: OptionList.OptionSelected) -> None:
        row = self._rows[event.option_index]
        if isinstance(row, ServerCard):
            is_on = not row.is_on or row.state is ServerState.FAILED
            change = partial(self._toolbox.switch, row.name, is_on=is_on)
            start_worker(self, partial(self._change, change), group=row.name)
        else:
            start_worker(
                self,
                partial(
                    self._change, partial(self._toolbox.permit, row.name, _NEXT[row.permission])
                ),
            )

    async def _change(self, change: Callable[[], Awaitable[None]]) -> None:
        try:
            await change()
        except ToolsError as error:
            self._problem = str(error)
        self._show()


def _line(row: ServerCard | Tool) -> Content:
    if isinstance(row, Tool):
        what = one_line(row.description, 120)
        return Content.assemble(
            (f"    {_WORDS[row.permission]:10}  ", "$text-quiet"),
            one_line(row.tool, 40),
            (f"  {what}", "$text-quiet"),
        )
    count = len(row.tools)
    words = {
        ServerState.READY: counted(count, "tool"),
        ServerState.STARTING: "starting …",
        ServerState.FAILED: "failed; Enter starts it again",
        ServerState.OFF: "off",
    }[row.state]
    return Content.assemble(
        f"{_SIGNS[row.state]} ",
        (one_line(row.name, 40), "bold"),
        (f"  {words}  {row.address}", "$text-quiet"),
    )
