"""Which chat and which branch of it is open, and what belongs to a chat: its title, its system
prompt. Every change is a turn, so it stops the answer under way first.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tui.actions.answering import Exchange
from tui.chat.open_chat import Conversation
from tui.widgets.dialogs import ChatChoice
from tui.widgets.window import ChatWindow


class Browsing:
    """`opened` is called whenever something else is shown than before."""

    def __init__(
        self,
        conversation: Conversation,
        exchange: Exchange,
        window: ChatWindow,
        opened: Callable[[], None],
    ) -> None:
        self._conversation = conversation
        self._exchange = exchange
        self._window = window
        self._opened = opened
        self._found = ("", 0)  # what was looked for last, and the message that has it

    def new(self) -> None:
        self._exchange.turn(self._new)

    def open(self, choice: ChatChoice | None) -> None:
        """None: the reader has chosen nothing."""
        if choice is not None:
            self._exchange.turn(partial(self._open, choice))

    def show_branch(self, message_id: int) -> None:
        self._exchange.turn(partial(self._show_branch, message_id))

    def show_sibling(self, step: int) -> None:
        """Of the last message that has versions."""
        for place in reversed(self._conversation.places):
            message_id = place.neighbour(step)
            if message_id is not None:
                self.show_branch(message_id)
                return

    def rename(self, title: str) -> None:
        self._exchange.turn(partial(self._rename, title))

    def set_system(self, text: str) -> None:
        self._exchange.turn(partial(self._set_system, text))

    async def find(self, words: str) -> bool:
        """Go to the newest message with these words; asked again, to the one before it."""
        looked_for = words.casefold()
        found = [m.id for m in reversed(self._conversation.path) if looked_for in m.text.casefold()]
        if not found:
            return False
        is_again = self._found[0] == words and self._found[1] in found
        at = (found.index(self._found[1]) + 1) % len(found) if is_again else 0
        self._found = words, found[at]
        transcript = self._window.transcript
        if transcript.view(found[at]) is None:
            await self._window.show(self._conversation, found[at])
        view = transcript.view(found[at])
        assert view is not None, "it has just been shown"
        self.end_find()
        view.add_class("found")
        view.mark(looked_for)
        await view.settled()
        self._window.call_after_refresh(transcript.show_words, view, looked_for)
        return True

    def end_find(self) -> None:
        """What was found is a message like any other again."""
        for view in self._window.transcript.views:
            view.remove_class("found")
            view.mark("")

    async def delete(self, chat_id: int) -> None:
        chat = self._conversation.chat
        await self._conversation.delete(chat_id)
        if chat is not None and chat.id == chat_id:
            self.new()

    async def _new(self) -> None:
        self._conversation.new()
        self._opened()
        await self._window.show(self._conversation)
        self._window.status.show_figures(())
        self._window.composer.focus()

    async def _open(self, choice: ChatChoice) -> None:
        window = self._window
        await self._conversation.open(choice.chat_id, choice.message_id)
        self._opened()
        await window.show(self._conversation, choice.message_id)
        view = None if choice.message_id is None else window.transcript.view(choice.message_id)
        if view is None:
            window.transcript.follow()
            window.composer.focus()
        else:
            view.focus()

    async def _show_branch(self, message_id: int) -> None:
        await self._conversation.show_branch(message_id)
        self._opened()
        await self._window.show(self._conversation)
        view = self._window.transcript.view(message_id)
        if view is not None:
            view.focus()

    async def _rename(self, title: str) -> None:
        await self._conversation.rename(title)
        await self._window.show(self._conversation)

    async def _set_system(self, text: str) -> None:
        await self._conversation.set_system(text)
        self._opened()
