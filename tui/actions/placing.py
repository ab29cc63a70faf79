"""Pins the open chat and puts it into a folder. A running answer goes on."""

from __future__ import annotations

from dataclasses import dataclass

from mlxserve.history.folders import BadFolderName
from tui.actions.browsing import NO_MESSAGES
from tui.actions.draft import Draft
from tui.actions.server_answers import ServerAnswers
from tui.chat.open_chat import OpenChat
from tui.widgets.window import ChatWindow


@dataclass
class Placing:
    """The commands `/pin` and `/folder`."""

    _open_chat: OpenChat
    _server: ServerAnswers
    _draft: Draft
    _window: ChatWindow

    async def pin(self) -> None:
        """Pin the chat, or unpin a pinned one. Raises StoreError."""
        chat = self._open_chat.chat
        if chat is None:
            self._window.notify(NO_MESSAGES)
            return
        await self._open_chat.place(is_pinned=not chat.is_pinned)
        self._server.announce()
        self._window.notify(
            "This chat is no longer pinned."
            if chat.is_pinned
            else "This chat is pinned: it stands first in the list (Ctrl+O)."
        )

    async def move(self, name: str = "") -> None:
        """Put the chat into a folder; `off` takes it out. Raises StoreError."""
        chat = self._open_chat.chat
        if chat is None:
            self._window.notify(NO_MESSAGES)
            return
        if not name:
            self._draft.begin("/folder ")
            return
        try:
            await self._open_chat.place(folder="" if name == "off" else name)
        except BadFolderName as error:
            self._draft.begin(f"/folder {name}")
            self._window.notify(f"The chat is not moved: {error}.", severity="error")
            return
        self._server.announce()
        moved = self._open_chat.chat
        folder = "" if moved is None else moved.folder
        self._window.notify(
            f"This chat is in the folder {folder}." if folder else "This chat is in no folder."
        )
