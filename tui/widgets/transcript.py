"""The messages of the open chat, from the first to the last, and notices below them."""

from __future__ import annotations

from collections.abc import Sequence

from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.content import Content
from textual.message import Message as Event
from textual.widgets import Static

from tui.chat.messages import ChatMessage, Version
from tui.opening import ASSURANCE, INVITATION, WELCOME
from tui.paint.theme import Palette
from tui.widgets.message import AnswerView, MessageView, view_of


class Notice(Static):
    """Something the terminal has to say; plain text, whatever is in it."""

    def __init__(self, words: str, *, is_error: bool = False) -> None:
        sign = "✗ " if is_error else ""
        super().__init__(Content(sign + words), classes="error" if is_error else "")
        self.words = words


class Welcome(Static):
    """What an empty chat shows."""

    TEXT = Content.assemble(
        (WELCOME, "bold $primary"),
        "\n\n",
        INVITATION[0],
        (INVITATION[1], "bold"),
        f"{INVITATION[2]}\n",
        (ASSURANCE, "$text-quiet"),
    )

    def __init__(self) -> None:
        super().__init__(self.TEXT)


class EarlierMessages(Static):
    """Stands for the messages above, which are not on the screen yet."""

    def show_number(self, number: int) -> None:
        self.display = number > 0
        noun = "message" if number == 1 else "messages"
        self.update(Content(f"↑ {number} earlier {noun}"))

    def on_click(self) -> None:
        self.post_message(Transcript.WantsEarlier())


class Transcript(VerticalScroll, can_focus=False):
    """Shows one branch. Stays at the end while text comes, unless the reader scrolls up.

    A long branch is shown from its end, a window at a time: painting 200 messages at once would
    hold up the screen for seconds.
    """

    WINDOW = 24

    class WantsEarlier(Event):
        """The reader has come to the top of what is shown."""

    def __init__(self) -> None:
        super().__init__(id="transcript")
        self._path: list[ChatMessage] = []
        self._places: list[Version] = []
        self._start = 0  # the first message of the path that has a view

    def compose(self) -> ComposeResult:
        yield EarlierMessages()

    def on_mount(self) -> None:
        self.anchor()

    @property
    def views(self) -> list[MessageView]:
        return list(self.query_children(MessageView))

    async def show(
        self,
        path: Sequence[ChatMessage],
        versions: Sequence[Version],
        palette: Palette,
        *,
        must_show: int | None = None,
    ) -> None:
        """Show the end of this branch, from `must_show` on if that is earlier.

        Views of messages that were there already are kept.
        """
        self._start = self._window_start(path, must_show)
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
                await self.mount(Welcome())
        self.query_one(EarlierMessages).show_number(self._start)

    async def show_earlier(self, palette: Palette) -> None:
        """Another window of messages at the top; what is on the screen stays where it is."""
        if not self._start:
            return
        start = max(0, self._start - self.WINDOW)
        pairs = zip(self._path[start : self._start], self._places[start : self._start], strict=True)
        new = [view_of(message, version, palette) for message, version in pairs]
        from_end = self.max_scroll_y - self.scroll_y
        self._start = start
        async with self.batch():
            await self.mount_all(new, after=self.query_one(EarlierMessages))
            self.query_one(EarlierMessages).show_number(start)
        self.call_after_refresh(self._keep_place, from_end)

    def _keep_place(self, from_end: float) -> None:
        self.scroll_to(y=self.max_scroll_y - from_end, animate=False, immediate=True)

    def _window_start(self, path: Sequence[ChatMessage], must_show: int | None) -> int:
        start = max(0, len(path) - self.WINDOW)
        is_same_chat = bool(path and self._path) and path[0].chat_id == self._path[0].chat_id
        if is_same_chat:
            start = min(start, self._start)
        ids = [message.id for message in path]
        return min(start, ids.index(must_show)) if must_show in ids else start

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        super().watch_scroll_y(old_value, new_value)
        if new_value <= 0 < old_value and self._start:
            self.post_message(self.WantsEarlier())

    def view(self, message_id: int) -> MessageView | None:
        return next((view for view in self.views if view.message.id == message_id), None)

    def show_words(self, view: MessageView, words: str) -> None:
        """Scroll to the first line of a message with these words, or to its beginning."""
        lines = (view.line(y).text.casefold() for y in range(view.num_lines))
        at = next((y for y, line in enumerate(lines) if words in line), 0)
        top = view.virtual_region.y + at - self.size.height // 3
        self.scroll_to(y=max(0, top), animate=False, immediate=True)

    def answers(self) -> list[AnswerView]:
        return list(self.query_children(AnswerView))

    async def say(self, words: str, *, is_error: bool = False) -> None:
        """A notice below the last message, until the next one is shown."""
        await self.clear_notices()
        await self.mount(Notice(words, is_error=is_error))

    async def clear_notices(self) -> None:
        await self.query_children(Notice).remove()

    def use_palette(self, palette: Palette) -> None:
        for view in self.views:
            view.use_palette(palette)

    def follow(self) -> None:
        """Go to the end and stay there."""
        self.anchor()
