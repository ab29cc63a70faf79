"""The messages of the open chat, and notices below them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.content import Content
from textual.message import Message as Event
from textual.widgets import Static

from mlxserve.history.messages import StoredMessage, Version
from tui.paint.theme import Palette
from tui.widgets.message import AnswerView, MessageView
from tui.widgets.question import QuestionView
from tui.widgets.welcome import Welcome, WelcomeFacts


class Notice(Static):
    """A notice of the terminal, always as plain text."""

    def __init__(self, words: str, *, is_error: bool = False) -> None:
        sign = "✗ " if is_error else ""
        super().__init__(Content(sign + words), classes="error" if is_error else "")
        self.words = words


class EarlierMessages(Static):
    """The number of earlier messages that have no widget yet."""

    def show_number(self, number: int, num_left_out: int) -> None:
        """Show two numbers: earlier messages, and those of them that the model no longer gets."""
        self.display = number > 0
        noun = "message" if number == 1 else "messages"
        words = f"↑ {number} earlier {noun}"
        if gone := min(number, num_left_out):
            all_of_them = "the model no longer gets them"
            words += f" · {all_of_them if gone == number else f'the model no longer gets {gone}'}"
        self.update(Content(words))

    def on_click(self) -> None:
        self.post_message(Transcript.WantsEarlier())


class Transcript(VerticalScroll, can_focus=False):
    """Shows one branch. Follows its end while text arrives, unless the user scrolls up.

    Only the end of a long branch is shown first, and `WINDOW` more messages at a time: painting 200
    messages at once would block the screen for seconds.
    """

    WINDOW = 24

    class WantsEarlier(Event):
        """The user has scrolled to the first message shown."""

    @dataclass
    class Moved(Event):
        """Another part of the messages is visible."""

        num_below: int  # lines below the visible part

    def __init__(self) -> None:
        super().__init__(id="transcript")
        self._path: list[StoredMessage] = []
        self._places: list[Version] = []
        # Index of the first message of the path with a view.
        self._start = 0
        self._num_below = 0
        self._facts = WelcomeFacts()
        # Messages at the start of the path that the model no longer gets.
        self._num_left_out = 0

    def compose(self) -> ComposeResult:
        yield EarlierMessages()

    def on_mount(self) -> None:
        self.anchor()

    @property
    def views(self) -> list[MessageView]:
        return list(self.query_children(MessageView))

    async def show(
        self,
        path: Sequence[StoredMessage],
        versions: Sequence[Version],
        palette: Palette,
        *,
        must_show: int | None = None,
        num_left_out: int = 0,
    ) -> None:
        """Show the end of this branch, from `must_show` on if that is earlier.

        Keeps the views of messages that are shown already. Messages that the model no longer gets
        are folded when they are left out.
        """
        is_folding = num_left_out > self._num_left_out
        self._num_left_out = num_left_out
        self._start = self._window_start(path, must_show, is_folding=is_folding)
        self._path, self._places = list(path), list(versions)
        shown = list(zip(path, versions, strict=True))[self._start :]
        old = self.views
        same = 0
        while same < min(len(old), len(shown)) and old[same].message.id == shown[same][0].id:
            same += 1
        async with self.batch():
            await self.query_children("Notice, Welcome").remove()
            for view in old[same:]:
                await view.remove()
            for view, (message, version) in zip(old[:same], shown[:same], strict=True):
                view.show(message, version)
            new = [view_of(message, version, palette) for message, version in shown[same:]]
            await self.mount_all(new)
            if not path:
                await self.mount(Welcome(self._facts))
        self.query_one(EarlierMessages).show_number(self._start, num_left_out)

    async def show_earlier(self, palette: Palette) -> None:
        """Add `WINDOW` messages at the top, without moving those on the screen."""
        if not self._start:
            return
        start = max(0, self._start - self.WINDOW)
        pairs = zip(self._path[start : self._start], self._places[start : self._start], strict=True)
        new = [view_of(message, version, palette) for message, version in pairs]
        from_end = self.max_scroll_y - self.scroll_y
        self._start = start
        async with self.batch():
            await self.mount_all(new, after=self.query_one(EarlierMessages))
            self.query_one(EarlierMessages).show_number(start, self._num_left_out)
        self.call_after_refresh(self._keep_position, from_end)

    def _keep_position(self, from_end: float) -> None:
        self.scroll_to(y=self.max_scroll_y - from_end, animate=False, immediate=True)

    def _window_start(
        self, path: Sequence[StoredMessage], must_show: int | None, *, is_folding: bool
    ) -> int:
        start = max(self._num_left_out, len(path) - self.WINDOW)
        is_same_chat = bool(path and self._path) and path[0].chat_id == self._path[0].chat_id
        if is_same_chat and not is_folding:
            start = min(start, self._start)
        ids = [message.id for message in path]
        return min(start, ids.index(must_show)) if must_show in ids else start

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        super().watch_scroll_y(old_value, new_value)
        if new_value <= 0 < old_value and self._start:
            self.post_message(self.WantsEarlier())
        self._tell_where()

    def watch_virtual_size(self) -> None:
        self._tell_where()

    def _tell_where(self) -> None:
        below = max(0, round(self.max_scroll_y - self.scroll_y))
        if below != self._num_below:
            self._num_below = below
            self.post_message(self.Moved(below))

    def welcome(self, facts: WelcomeFacts) -> None:
        """Set the contents of an empty chat."""
        self._facts = facts
        for shown in self.query_children(Welcome):
            shown.show(facts)

    def view(self, message_id: int) -> MessageView | None:
        return next((view for view in self.views if view.message.id == message_id), None)

    def show_words(self, view: MessageView, words: str) -> None:
        """Scroll to the first line of a message that contains this text, or to its start."""
        lines = (view.line(y).text.casefold() for y in range(view.num_lines))
        at = next((y for y, line in enumerate(lines) if words in line), 0)
        top = view.virtual_region.y + at - self.size.height // 3
        self.scroll_to(y=max(0, top), animate=False, immediate=True)

    async def say(self, words: str, *, is_error: bool = False) -> None:
        """Show a notice below the last message, replacing any other."""
        await self.clear_notices()
        await self.mount(Notice(words, is_error=is_error))

    async def clear_notices(self) -> None:
        await self.query_children(Notice).remove()

    def use_palette(self, palette: Palette) -> None:
        for view in self.views:
            view.use_palette(palette)


def view_of(message: StoredMessage, version: Version, palette: Palette) -> MessageView:
    """Create the widget for a message."""
    kind = QuestionView if message.role == "user" else AnswerView
    return kind(message, version, palette)
