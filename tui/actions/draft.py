"""Fills the composer with the start of a command, a file or an editor's text."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from textual.app import App, SuspendNotSupported

from mlxserve.history.attachment import AttachmentRefused, as_markdown
from mlxserve.history.chat_file import StoreError
from mlxserve.history.messages import NewQuestion
from mlxserve.history.picture import is_picture
from mlxserve.mcp.servers_file import ToolsError
from mlxserve.system.terminal_text import one_line
from tui.actions.editor import EditorFailed, edit_in_editor
from tui.actions.server_link import ServerLink
from tui.chat.mentions import (
    ReadDocument,
    has_documents,
    is_document,
    mention,
    missing_files,
    with_files,
)
from tui.chat.open_chat import OpenChat
from tui.widgets.window import ChatWindow

_SETTING = "draft"


@dataclass
class Draft:
    """Shows a notice if something cannot be put into the composer."""

    _app: App[None]
    _window: ChatWindow
    _open_chat: OpenChat
    _link: ServerLink
    _read_document: ReadDocument | None = None
    _asked_about: str = ""  # a message that mentions a file that does not exist

    async def restore(self) -> None:
        """Restore the text that was not sent when the terminal was left."""
        try:
            text = await self._open_chat.setting(_SETTING)
            if text:
                await self._open_chat.set_setting(_SETTING, "")
        except StoreError as error:
            self._app.notify(str(error), severity="error")
            return
        if text and not self._window.composer.text:
            self._window.composer.write(text)

    async def keep(self) -> None:
        """Save the composer's text for the next start. Raises StoreError."""
        text = self._window.composer.whole_text
        if text.strip():
            await self._open_chat.set_setting(_SETTING, text)

    def begin(self, text: str) -> None:
        """Put this into the composer for the user to complete."""
        self._window.composer.write(text)
        self._window.composer.focus()

    def attach(self, name: str = "") -> None:
        """Put a file's contents into the composer."""
        if not name:
            self.begin("/attach ")
            return
        path = Path(os.path.expanduser(name))
        if path.is_dir():
            name = name.rstrip("/") + "/"
        is_read = self._read_document is not None and is_document(name, Path.cwd())
        if is_read or (is_picture(path) and path.is_file()):
            self.begin(f"{self._window.composer.text}{mention(name)} ")
            return
        try:
            block = as_markdown(path)
        except AttachmentRefused as error:
            self._put_back(f"/attach {name}", error)
        else:
            self._window.composer.write(f"{block}\n")

    async def fill(self, line: str, text_of: Callable[[str], Awaitable[str]]) -> None:
        """Replace a line by the text that a server of tools offers for it, for the user to read."""
        try:
            self.begin(await text_of(line))
        except ToolsError as error:
            self._put_back(line, error)

    def has_documents(self, text: str) -> bool:
        """True if reading the files of a message may take seconds."""
        return self._read_document is not None and has_documents(text, Path.cwd())

    async def with_documents(self, text: str) -> NewQuestion | None:
        """Like `with_files`, in a thread."""
        self._app.notify("Reading the document …")
        try:
            question = await asyncio.to_thread(with_files, text, Path.cwd(), self._read_document)
            self._refuse_unseen(question)
        except AttachmentRefused as error:
            self._put_back(text, error)
            return None
        return question

    def with_files(self, text: str) -> NewQuestion | None:
        """Return the text with the files it mentions.

        If one cannot be read, or the model does not see images, returns None and puts the text
        back.
        """
        missing = missing_files(text, Path.cwd())
        if missing and text != self._asked_about:
            self._asked_about = text
            self._window.composer.write(text)
            words = (
                f"There is no file {missing[0]}. Press Enter again to send the message as it is."
            )
            self._app.notify(words, severity="warning")
            return None
        try:
            question = with_files(text, Path.cwd())
            self._refuse_unseen(question)
        except AttachmentRefused as error:
            self._put_back(text, error)
            return None
        return question

    def _refuse_unseen(self, question: NewQuestion) -> None:
        """Raises AttachmentRefused for images that the model does not see."""
        if self._is_blind() and not all(image.is_document for image in question.images):
            raise AttachmentRefused(
                f"{one_line(self._link.model, 60)} reads text only. Choose a model that sees images "
                "with /model."
            )

    def _is_blind(self) -> bool:
        """True if the model is known to see no images."""
        connection = self._link.connection
        return connection is not None and connection.sees is False

    def in_editor(self) -> None:
        """Edit the composer's text in $VISUAL or $EDITOR."""
        try:
            with self._app.suspend():
                text = edit_in_editor(self._window.composer.whole_text)
        except EditorFailed as error:
            self._app.notify(str(error), severity="error")
        except SuspendNotSupported:
            self._app.notify("This kind of terminal cannot open an editor.")
        else:
            self._window.composer.write(text)

    def _put_back(self, text: str, error: AttachmentRefused | ToolsError) -> None:
        self._window.composer.write(text)
        self._app.notify(str(error), severity="error")
