"""Dialog: a box over the chat. ListDialog: one with a list below a field that keeps the focus."""

from __future__ import annotations

from typing import ClassVar, Generic, TypeVar

from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.widget import Widget
from textual.widgets import OptionList, Static

Result = TypeVar("Result")
Row = TypeVar("Row")


class Dialog(ModalScreen[Result]):
    """A box over the chat: Esc and Ctrl+C close it, and Ctrl+Q quits."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "dismiss", "Close", show=False),
        Binding("ctrl+c", "dismiss", "Close", show=False, priority=True),
        Binding("ctrl+q", "app.quit", "Quit", show=False, priority=True),
    ]

    def box(self, title: str, keys: str, kind: type[Widget] = Vertical) -> Widget:
        """Return the container of everything else; its lower border explains `keys`."""
        box = kind(classes="dialog")
        box.border_title, box.border_subtitle = title, keys
        return box

    def say(self, words: str) -> None:
        """Show a note below the list."""
        self.query_one("#note", Static).update(Content.styled(words, "$text-quiet"))


class DialogList(OptionList, can_focus=False):
    """The list of a `ListDialog`."""


class ListDialog(Dialog[Result], Generic[Result, Row]):
    """Up and Down move in the list; Ctrl+D deletes a row on the second press (`action_delete`)."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("down", "move(1)", "Down", show=False, priority=True),
        Binding("up", "move(-1)", "Up", show=False, priority=True),
        Binding("ctrl+d", "delete", "Delete", show=False, priority=True),
    ]

    def __init__(self) -> None:
        super().__init__()
        self._shown: list[Row] = []  # row of each option
        self._marked: object = None  # the row on which Ctrl+D was pressed once

    @property
    def _chosen(self) -> Row | None:
        at = self.query_one(DialogList).highlighted
        return None if at is None or at >= len(self._shown) else self._shown[at]

    def action_move(self, step: int) -> None:
        self._marked = None
        rows = self.query_one(DialogList)
        if step > 0:
            rows.action_cursor_down()
        else:
            rows.action_cursor_up()
