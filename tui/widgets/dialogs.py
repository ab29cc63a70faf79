"""Dialogs over the chat: the list of chats, and the help."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import ClassVar

from rich.table import Table
from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from mlxserve.history.messages import ChatRecord
from mlxserve.history.store import SearchHit
from mlxserve.system.terminal_text import one_line
from tui.commands import COMMAND_GROUPS, COMPOSER_KEYS, MESSAGE_KEYS
from tui.widgets.dialog import Dialog, DialogList, ListDialog

Row = tuple[str, str, str]  # a command or key, the key of a command, its help
_TITLE_WIDTH = 18
_BEFORE_MATCH = 16  # characters of a message shown before a match


@dataclass(frozen=True, slots=True)
class ChatChoice:
    """A chat to open, at the branch through the message that a search found."""

    chat_id: int
    message_id: int | None = None


class ChatsDialog(ListDialog[ChatChoice | None, ChatChoice]):
    """The chats, pinned ones first, then the most recent; typing searches all their messages."""

    def __init__(
        self,
        chats: Sequence[ChatRecord],
        search: Callable[[str], Awaitable[list[SearchHit]]],
        delete: Callable[[int], Awaitable[None]],
    ) -> None:
        super().__init__()
        self._chats = list(chats)
        self._search = search
        self._delete = delete

    def compose(self) -> ComposeResult:
        with self.box("Chats", "Enter opens · Ctrl+D deletes · Esc closes"):
            yield Input(placeholder="Search all chats", compact=True)
            yield DialogList(compact=True)
            yield Static(id="note", markup=False)

    def on_mount(self) -> None:
        self._show_chats()

    def say(self, words: str) -> None:
        super().say(words)
        self.query_one("#note").display = bool(words)

    def _show_chats(self) -> None:
        self._show(
            [ChatChoice(chat.id) for chat in self._chats],
            [_chat_line(chat) for chat in self._chats],
            "No chats yet. Send a message to start one.",
        )

    def _show(self, choices: list[ChatChoice], lines: Sequence[Content], when_empty: str) -> None:
        self._shown = choices
        self._marked = None
        self.say("")
        options = self.query_one(DialogList)
        options.set_options(
            lines or [Option(Content.styled(when_empty, "$text-quiet"), disabled=True)]
        )
        options.highlighted = 0 if lines else None

    @on(Input.Changed)
    async def _look_for(self, event: Input.Changed) -> None:
        if not event.value.strip():
            self._show_chats()
            return
        hits = await self._search(event.value)
        if event.value != self.query_one(Input).value:
            return  # outdated by a later key
        self._show(
            [ChatChoice(hit.chat.id, hit.message_id) for hit in hits],
            [_hit_line(hit, event.value.strip()) for hit in hits],
            "No match.",
        )

    def action_move(self, step: int) -> None:
        super().action_move(step)
        self.say("")

    async def action_delete(self) -> None:
        """Delete the chat on the second press; the first asks for it."""
        choice = self._chosen
        if choice is None:
            return
        if self._marked != choice.chat_id:
            self._marked = choice.chat_id
            self.say(
                "Press Ctrl+D again to delete this chat for good, with the cached pages of its prompts."
            )
            return
        await self._delete(choice.chat_id)
        self._chats = [chat for chat in self._chats if chat.id != choice.chat_id]
        self.query_one(Input).value = ""
        self._show_chats()

    @on(Input.Submitted)
    @on(OptionList.OptionSelected)
    def _choose(self) -> None:
        if self._chosen is not None:
            self.dismiss(self._chosen)


class HelpDialog(Dialog[None]):
    """Lists all keys and commands."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("f1", "dismiss", "Close", show=False)]

    def compose(self) -> ComposeResult:
        with self.box("Keys and commands", "Esc closes", VerticalScroll):
            for heading, rows in _help():
                yield Static(heading, classes="heading", markup=False)
                yield Static(_table(rows), classes="keys")


def _help() -> Iterator[tuple[str, Sequence[Row]]]:
    yield "Writing a message", [(keys, "", words) for keys, words in COMPOSER_KEYS]
    for title, commands in COMMAND_GROUPS.items():
        rows = [(command.usage, command.key_label, command.help) for command in commands]
        yield f"{title}: commands, also in the palette (Ctrl+P)", rows
    yield "On a message (press Tab)", [(keys, "", words) for keys, words in MESSAGE_KEYS]


def _table(rows: Sequence[Row]) -> Table:
    has_keys = any(keys for _, keys, _ in rows)
    table = Table.grid(padding=(0, 1))
    table.add_column(width=21)
    if has_keys:
        table.add_column(width=9)
    table.add_column()
    for what, keys, words in rows:
        cells = [Text(what, "bold"), Text(keys), Text(words, "dim")]
        table.add_row(*cells if has_keys else (cells[0], cells[2]))
    return table


def _chat_line(chat: ChatRecord) -> Content:
    pin = Content.styled("★ " if chat.is_pinned else "", "$accent")
    folder = one_line(chat.folder, _TITLE_WIDTH)
    place = Content.styled(f"{folder} / " if folder else "", "$text-quiet")
    return Content.assemble(_when(chat, "%d %b %H:%M"), pin, place, one_line(chat.title))


def _when(chat: ChatRecord, form: str) -> Content:
    when = datetime.fromtimestamp(chat.updated_at)
    return Content.styled(f"{when:{form}}  ", "$text-quiet")


def _hit_line(hit: SearchHit, words: str) -> Content:
    """The chat's day and title and the excerpt, with the matches highlighted."""
    title = one_line(hit.chat.title, _TITLE_WIDTH).ljust(_TITLE_WIDTH)
    line = one_line(hit.excerpt, 120)
    at = line.casefold().find(words.casefold())
    if at > _BEFORE_MATCH:
        line = "…" + line[at - _BEFORE_MATCH :]
    excerpt = Content.styled(line, "$text-quiet")
    for match in re.finditer(re.escape(words), excerpt.plain, re.IGNORECASE):
        excerpt = excerpt.stylize("bold $accent", *match.span())
    return Content.assemble(_when(hit.chat, "%d %b"), title, "  ", excerpt)
