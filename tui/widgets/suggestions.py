"""Suggestions for the text being typed: commands after a slash, files after an @."""

from __future__ import annotations

from collections.abc import Sequence

from textual.content import Content
from textual.widgets import OptionList
from textual.widgets.option_list import Option

from tui.commands import Command, matching
from tui.sanitise import one_line


class Suggestions(OptionList, can_focus=False):
    """Shown above the composer while there is something to complete."""

    def __init__(self) -> None:
        super().__init__(id="suggestions", compact=True)
        self._commands: list[Command] = []
        self._paths: list[str] = []

    def suggest_paths(self, paths: Sequence[str]) -> bool:
        """Suggest these files and folders; False if there are none."""
        self._commands, self._paths = [], list(paths)
        self.set_options([Option(Content(one_line(path)), id=path) for path in self._paths])
        return self._show()

    def suggest_commands(self, typed: str) -> bool:
        """Suggest matching commands; False, and hidden, if there are none."""
        is_name = typed.startswith("/") and " " not in typed and "\n" not in typed
        self._commands = matching(typed[1:]) if is_name else []
        self._paths = []
        self.set_options([Option(_line(command), id=command.name) for command in self._commands])
        return self._show()

    def _show(self) -> bool:
        if self.option_count:
            self.highlighted = 0
        self.display = self.option_count > 0
        return self.display

    def close(self) -> None:
        self.suggest_commands("")

    @property
    def chosen(self) -> Command | None:
        at = self.highlighted
        return self._commands[at] if at is not None and self._commands else None

    @property
    def chosen_path(self) -> str | None:
        at = self.highlighted
        return self._paths[at] if at is not None and self._paths else None


def _line(command: Command) -> Content:
    return Content.assemble(
        (command.usage.ljust(22), "bold"),
        (command.key_words.ljust(11), "$primary"),
        (command.help, "$text-quiet"),
    )
