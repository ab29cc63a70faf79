"""CallDialog: shows a call that the model wants to make, and asks the user to allow it."""

from __future__ import annotations

import json
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from mlxserve.mcp.toolbox import Tool
from mlxserve.system.terminal_text import clean, one_line
from tui.chat.tool_loop import Decision
from tui.widgets.dialog import Dialog

# Characters that are shown; the number of others is said.
_MAX_ARGUMENTS = 20_000
_CHOICES = (
    (Decision.ONCE, "Allow this call"),
    (Decision.ALWAYS, "Always allow this tool, as it is described now"),
    (Decision.NOT_NOW, "Not now"),
    (Decision.NEVER, "Never: do not offer this tool to the model again"),
)


class CallDialog(Dialog[Decision | None]):
    """Returns the decision; None for Esc, which stops the answer."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("pageup", "scroll_arguments(-1)", show=False, priority=True),
        Binding("pagedown", "scroll_arguments(1)", show=False, priority=True),
    ]

    def __init__(self, tool: Tool, arguments: str) -> None:
        super().__init__()
        self._tool = tool
        self._arguments = arguments

    def compose(self) -> ComposeResult:
        tool = self._tool
        with self.box("The model wants to call a tool", "↓ Enter chooses · Esc stops the answer"):
            yield Static(
                Content.assemble(
                    (one_line(tool.tool, 80), "bold"), f" of the server {one_line(tool.server, 60)}"
                )
            )
            if tool.description:
                yield Static(Content.styled(one_line(tool.description, 300), "$text-quiet"))
            with VerticalScroll(id="arguments", can_focus=False):
                yield Static(Content(_shown(self._arguments)))
            yield OptionList(*(Option(words) for _, words in _CHOICES), compact=True)

    def on_mount(self) -> None:
        """Highlight nothing: Enter, meant for the composer just now, must not allow a call."""
        options = self.query_one(OptionList)
        options.focus()
        options.highlighted = None

    @on(OptionList.OptionSelected)
    def _chosen(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(_CHOICES[event.option_index][0])

    def action_scroll_arguments(self, step: int) -> None:
        shown = self.query_one("#arguments", VerticalScroll)
        if step < 0:
            shown.scroll_page_up()
        else:
            shown.scroll_page_down()


def _shown(arguments: str) -> str:
    """Format the arguments, one part per line; as written if they are not JSON."""
    try:
        text = json.dumps(json.loads(arguments or "{}"), ensure_ascii=False, indent=2)
    except (ValueError, RecursionError):
        text = arguments
    left_out = len(text) - _MAX_ARGUMENTS
    more = f"\n… and {left_out:,} more characters" if left_out > 0 else ""
    return clean(text[:_MAX_ARGUMENTS]) + more
