"""The chat window: title, messages, queue, composer, status line.

Shows the data it gets, and completes commands and paths in the composer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from textual import on
from textual.app import ComposeResult
from textual.containers import Container, Vertical
from textual.content import Content
from textual.message import Message as Event
from textual.widgets import Static, TextArea

from mlxserve.history.context import ContextUse
from mlxserve.system.terminal_text import one_line
from tui.chat.mentions import completions, typed_path
from tui.chat.open_chat import OpenChat
from tui.commands import Command
from tui.opening import TITLE
from tui.paint.theme import Palette, palette
from tui.widgets.composer import Composer
from tui.widgets.message import AnswerView, MessageView
from tui.widgets.status import StatusLine
from tui.widgets.suggestions import Suggestions
from tui.widgets.title_line import TitleLine
from tui.widgets.transcript import Transcript
from tui.widgets.welcome import Ideas, Welcome

_FAR = 3  # lines below the visible part
# Columns from which the whole hint fits, and the header tells the address.
_WIDE = 90
_HINT = "Enter sends · Shift+Enter or Ctrl+J new line · / commands · F1 keys"
_SHORT_HINT = "Enter sends · / commands · F1 keys"


class ChatWindow(Vertical):
    """One column, next to which the engine panel may be shown."""

    @dataclass
    class Chosen(Event):
        """The user chose a command from the list, without an argument."""

        command: Command

    def __init__(self) -> None:
        super().__init__()
        self._is_editing = False
        self.is_thinking_open = False
        self._header: tuple[str, ContextUse | None, str, Sequence[str]] = ("", None, "", ())

    def compose(self) -> ComposeResult:
        with Container(id="top"):
            yield TitleLine()
        yield Transcript()
        with Vertical(id="bottom"):
            yield Static(id="below", markup=False)
            yield Static(id="queue", markup=False)
            yield Suggestions()
            yield Composer()
        yield StatusLine()

    @property
    def transcript(self) -> Transcript:
        return self.query_one(Transcript)

    @property
    def composer(self) -> Composer:
        return self.query_one(Composer)

    @property
    def status(self) -> StatusLine:
        return self.query_one(StatusLine)

    @property
    def palette(self) -> Palette:
        """The colours of messages in the current theme."""
        return palette(dark=self.app.current_theme.dark)

    @property
    def is_on_message(self) -> bool:
        """True if a message has the focus, not the composer."""
        return isinstance(self.app.focused, MessageView)

    async def show(self, open_chat: OpenChat, must_show: int | None = None) -> None:
        """Show the messages and the title of the open chat."""
        await self.transcript.show(
            open_chat.path,
            open_chat.versions,
            self.palette,
            must_show=must_show,
            num_left_out=open_chat.num_left_out,
        )
        chat = open_chat.chat
        title = one_line(chat.title) if chat is not None else TITLE
        self.query_one(TitleLine).show_title(title)

    def show_header(
        self, model: str, use: ContextUse | None, address: str = "", settings: Sequence[str] = ()
    ) -> None:
        """Show the model, the chat's use of its context, the settings, and the server's address."""
        self._header = model, use, address, settings
        self._show_header()

    def _show_header(self) -> None:
        model, use, address, settings = self._header
        meter = "" if use is None else use.label
        is_wide = self.size.width >= _WIDE
        parts = [
            (one_line(model, 60), ""),
            (meter, "$warning" if use is not None and use.is_nearly_full else ""),
            *((one_line(words, 60), "") for words in settings),
            (address if is_wide else "", ""),
        ]
        self.query_one(TitleLine).show_parts([Content.styled(*part) for part in parts if part[0]])

    def toggle_thinking(self) -> None:
        """Open or close the thinking of all answers, and of those to come."""
        self.is_thinking_open = not self.is_thinking_open
        for view in self.query(AnswerView):
            view.open_thinking(is_open=self.is_thinking_open)

    def show_queue(self, texts: Sequence[str]) -> None:
        queue = self.query_one("#queue", Static)
        queue.display = bool(texts)
        queue.update(Content("\n".join(f"⋯ queued: {one_line(text, 90)}" for text in texts)))

    def hint(self, *, is_editing: bool) -> None:
        """Show what the keys do in the current state."""
        self._is_editing = is_editing
        self._hint()

    def on_descendant_focus(self) -> None:
        self._hint()

    @on(Transcript.WantsEarlier)
    async def _show_earlier(self) -> None:
        await self.transcript.show_earlier(self.palette)

    def on_resize(self) -> None:
        self._hint()
        self._show_header()

    def _hint(self) -> None:
        composer = self.composer
        if self._is_editing:
            words = Composer.EDIT_HINT
        elif self.is_on_message:
            words = Composer.MESSAGE_HINT
        elif isinstance(self.app.focused, Ideas):
            words = Welcome.HINT
        else:
            words = _HINT if self.size.width >= _WIDE else _SHORT_HINT
        composer.border_subtitle = words
        composer.border_title = "Editing" if self._is_editing else ""

    def focus_ideas(self) -> bool:
        """Go to the rows of an empty chat; False if there are none."""
        return any(shown.focus_ideas() for shown in self.query(Welcome))

    def focus_message(self, step: int) -> None:
        """Focus the previous or next message; after the last, the composer."""
        views = self.transcript.views
        if not views and step < 0:
            self.focus_ideas()
            return
        at = views.index(self.app.focused) if self.app.focused in views else len(views)
        at += step
        if at >= len(views):
            self.composer.focus()
        elif at >= 0:  # a long message that is in view already keeps the lines that are read
            views[at].focus(scroll_visible=not views[at].region.overlaps(self.transcript.region))

    @on(Transcript.Moved)
    def _moved(self, event: Transcript.Moved) -> None:
        """Show how much is below, once it is more than a glance away."""
        pill = self.query_one("#below", Static)
        pill.display = event.num_below > _FAR
        pill.update(Content(f"↓ {event.num_below:,} more lines · Ctrl+End"))

    # Suggestions

    def suggest_more(self, commands: Sequence[Command]) -> None:
        """Suggest these commands, of tools' servers, as well."""
        self.query_one(Suggestions).more = commands

    @on(TextArea.Changed, "#composer")
    def _typed(self, event: TextArea.Changed) -> None:
        suggestions, path = self.query_one(Suggestions), typed_path(self.composer.before_cursor)
        self.composer.has_suggestions = (
            suggestions.suggest_commands(event.text_area.text)
            if path is None
            else suggestions.suggest_paths(completions(path, Path.cwd()))
        )

    @on(Composer.Suggest)
    def _suggest(self, event: Composer.Suggest) -> None:
        suggestions = self.query_one(Suggestions)
        chosen = suggestions.chosen
        match event.key:
            case "up":
                suggestions.action_cursor_up()
            case "down":
                suggestions.action_cursor_down()
            case "tab" if isinstance(chosen, Command):
                self.composer.write(f"/{chosen.name} ")
            case "enter" if isinstance(chosen, Command):
                self._accept_command(chosen)
            case "tab" | "enter" if isinstance(chosen, str):
                self.composer.complete(chosen)
            case _:
                suggestions.close()
                self.composer.has_suggestions = False
                # The list has emptied since the key was pressed.
                if event.key == "enter":
                    # By the composer itself: what it posts while this widget, a parent, handles an
                    # event would stop here.
                    self.composer.call_next(self.composer.send)

    def _accept_command(self, command: Command) -> None:
        if command.argument.startswith("[") or not command.argument:
            self.composer.load_text("")
            self.post_message(self.Chosen(command))
        else:
            self.composer.write(f"/{command.name} ")

    @on(Suggestions.OptionSelected, "#suggestions")
    def _suggestion_clicked(self) -> None:
        self._suggest(Composer.Suggest("enter"))
