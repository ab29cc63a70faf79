"""Opens chats and branches, and changes a chat's title and system prompt.

Every change is an operation, so it stops the running answer first. Another chat is opened beside an
answer that a server keeps.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from textual.message import Message as Event

from mlxserve.history.export import export, file_name, target
from mlxserve.history.traces import Traces
from tui.actions.answering import Answering
from tui.actions.draft import Draft
from tui.chat.open_chat import OpenChat
from tui.widgets.dialogs import ChatChoice, ChatsDialog
from tui.widgets.system_dialog import SystemDialog
from tui.widgets.window import ChatWindow

NO_MESSAGES = "This chat is empty: send a message first."
FIND = "/find "  # the start of the command that searches


@dataclass
class Browsing:
    """Owns the last search. `exports` is the default folder of exported chats."""

    class Opened(Event):
        """Another chat or branch was opened. Posted by the window."""

    _open_chat: OpenChat
    _answering: Answering
    _draft: Draft
    _window: ChatWindow
    _exports: Path
    _found: tuple[str, int] = ("", 0)  # the text searched for last, and the message that has it

    def new(self) -> None:
        self._answering.run(self._new, leaves=True)

    def open(self, choice: ChatChoice | None) -> None:
        """Open the chosen chat; None if nothing was chosen."""
        if choice is not None:
            self._answering.run(partial(self._open, choice), leaves=True)

    async def open_last(self) -> None:
        if chats := await self._open_chat.chats():
            self.open(ChatChoice(max(chats, key=lambda chat: chat.updated_at).id))

    async def show_chats(self) -> None:
        """List the chats. Raises StoreError."""
        chats = await self._open_chat.chats()
        dialog = ChatsDialog(chats, self._open_chat.search, self.delete)
        self._window.app.push_screen(dialog, self.open)

    def show_branch(self, message_id: int) -> None:
        self._answering.run(partial(self._show_branch, message_id))

    def show_sibling(self, step: int) -> None:
        """Show another version of the last message that has several."""
        for version in reversed(self._open_chat.versions):
            message_id = version.neighbour(step)
            if message_id is not None:
                self.show_branch(message_id)
                return

    def rename(self, title: str = "") -> None:
        if self._has_messages():
            if title:
                self._answering.run(partial(self._rename, title))
            else:
                self._draft.begin("/rename ")

    def set_system(self, text: str = "") -> None:
        """Set the system prompt; without a text, edit the current one."""
        if text:
            self._take_system("" if text == "off" else text)
        else:
            dialog = SystemDialog(self._open_chat.system)
            self._window.app.push_screen(dialog, self._take_system)

    def _take_system(self, text: str | None) -> None:
        """Set the prompt; None leaves it as it is."""
        if text is not None and text != self._open_chat.system:
            self._answering.run(partial(self._set_system, text))

    def export(self, argument: str = "") -> None:
        chat = self._open_chat.chat
        if not self._has_messages() or chat is None:
            return
        kind, to = target(argument)
        to = self._exports / file_name(chat, kind) if to is None else to
        try:
            export(chat, self._open_chat.path, kind, to)
        except OSError as error:
            self._window.notify(f"Export failed: {error}. Choose another file.", severity="error")
        else:
            self._window.notify(f"Exported to {to}")

    def _has_messages(self) -> bool:
        """True if the chat has messages; shows a notice if not."""
        if self._open_chat.chat is None:
            self._window.notify(NO_MESSAGES)
        return self._open_chat.chat is not None

    async def find(self, words: str = "") -> None:
        """Go to the newest message with this text; repeated, to the previous one."""
        if not words:
            self._draft.begin(FIND)
        elif await self._find(words):
            # Enter goes to the previous match.
            self._draft.begin(f"{FIND}{words}")
        else:
            self._window.notify("No match in this chat.")

    async def _find(self, words: str) -> bool:
        sought = words.casefold()
        matches = [m.id for m in reversed(self._open_chat.path) if sought in m.text.casefold()]
        if not matches:
            return False
        is_repeated = self._found[0] == words and self._found[1] in matches
        at = (matches.index(self._found[1]) + 1) % len(matches) if is_repeated else 0
        self._found = words, matches[at]
        transcript = self._window.transcript
        if transcript.view(matches[at]) is None:
            await self._window.show(self._open_chat, matches[at])
        view = transcript.view(matches[at])
        assert view is not None, "it was just shown"
        self.end_find()
        view.add_class("found")
        view.mark(sought)
        await view.painted()
        self._window.call_after_refresh(transcript.show_words, view, sought)
        return True

    def end_find(self) -> None:
        """Remove the marks of the search."""
        for view in self._window.transcript.views:
            view.remove_class("found")
            view.mark("")

    async def delete(self, chat_id: int) -> None:
        chat = self._open_chat.chat
        left = await self._open_chat.delete(chat_id)
        if chat is not None and chat.id == chat_id:
            # First, a running answer is stopped.
            self._answering.run(partial(self._new, left))
        else:
            await self._answering.forget(left)

    async def _new(self, left: Traces | None = None) -> None:
        """Open an empty chat; `left` are the traces of a chat that was deleted."""
        self._open_chat.new()
        self._window.post_message(self.Opened())
        await self._window.show(self._open_chat)
        self._answering.status.show_last()
        self._answering.status.show_ready()
        # After the focus that Textual moves when the widget that had it is removed.
        self._window.call_after_refresh(self._window.composer.focus)
        if left is not None:
            await self._answering.forget(left)

    async def _open(self, choice: ChatChoice) -> None:
        window = self._window
        await self._open_chat.open(choice.chat_id, choice.message_id)
        self._window.post_message(self.Opened())
        self._answering.status.show_ready()
        self._answering.status.show_last()
        await window.show(self._open_chat, choice.message_id)
        view = None if choice.message_id is None else window.transcript.view(choice.message_id)
        if view is None:
            window.transcript.anchor()
            window.composer.focus()
        else:
            view.focus()

    async def _show_branch(self, message_id: int) -> None:
        await self._open_chat.show_branch(message_id)
        self._window.post_message(self.Opened())
        self._answering.status.show_last()
        await self._window.show(self._open_chat)
        view = self._window.transcript.view(message_id)
        if view is not None:
            view.focus()

    async def _rename(self, title: str) -> None:
        await self._open_chat.rename(title)
        await self._window.show(self._open_chat)

    async def _set_system(self, text: str) -> None:
        await self._open_chat.set_system(text)
        self._window.post_message(self.Opened())
