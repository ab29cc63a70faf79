"""Suggestions for the typed text: commands after a slash, files after an @."""

from __future__ import annotations

from collections.abc import Sequence

from textual.content import Content
from textual.widgets import OptionList
from textual.widgets.option_list import Option

from mlxserve.system.terminal_text import one_line
from tui.commands import COMMANDS, Command, matching


class Suggestions(OptionList, can_focus=False):
    """Shown above the composer while there is something to complete."""

    def __init__(self) -> None:
        super().__init__(id="suggestions", compact=True)
        self._rows: Sequence[Command | str] = ()
        self.more: Sequence[Command] = ()  # of tools' servers, after those of the table

    def suggest_paths(self, paths: Sequence[str]) -> bool:
        """Suggest these files and folders; False if there are none."""
        return self._show(paths, [Content(one_line(path)) for path in paths])

    def suggest_commands(self, typed: str) -> bool:
        """Suggest matching commands; False, and hidden, if there are none."""
        is_name = typed.startswith("/") and " " not in typed and "\n" not in typed
        commands = matching(typed[1:], (*COMMANDS, *self.more)) if is_name else []
        return self._show(commands, [_line(command) for command in commands])

    def _show(self, rows: Sequence[Command | str], lines: Sequence[Content]) -> bool:
        self._rows = rows
        self.set_options([Option(line) for line in lines])
        if rows:
            self.highlighted = 0
        self.display = bool(rows)
        return self.display

    def close(self) -> None:
        self.suggest_commands("")

    @property
    def chosen(self) -> Command | str | None:
        """The highlighted command or path."""
        at = self.highlighted
        return self._rows[at] if at is not None and self._rows else None


def _line(command: Command) -> Content:
    return Content.assemble(
        (command.usage.ljust(22), "bold"),
        (command.key_label.ljust(11), "$primary"),
        (command.help, "$text-quiet"),
    )
