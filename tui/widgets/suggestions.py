"""The commands that match what is being typed after a slash."""

from __future__ import annotations

from textual.content import Content
from textual.widgets import OptionList
from textual.widgets.option_list import Option

from tui.commands import Command, key_words, matching


class Suggestions(OptionList, can_focus=False):
    """Shown above the composer while its text is the beginning of a command."""

    def __init__(self) -> None:
        super().__init__(id="suggestions", compact=True)
        self._commands: list[Command] = []

    def suggest(self, typed: str) -> bool:
        """Show what fits; False if nothing does, and nothing is shown."""
        is_name = typed.startswith("/") and " " not in typed and "\n" not in typed
        self._commands = matching(typed[1:]) if is_name else []
        self.set_options([Option(_line(command), id=command.name) for command in self._commands])
        if self._commands:
            self.highlighted = 0
        self.display = bool(self._commands)
        return self.display

    def close(self) -> None:
        self.suggest("")

    @property
    def chosen(self) -> Command | None:
        return None if self.highlighted is None else self._commands[self.highlighted]


def _line(command: Command) -> Content:
    keys = " ".join(key_words(key) for key in command.keys)
    return Content.assemble(
        (command.usage.ljust(22), "bold"),
        (keys.ljust(11), "$primary"),
        (command.help, "$text-quiet"),
    )
