"""What gets into the line the reader writes in other than by typing: the beginning of a command,
a file, what an editor was left with. Says why where something cannot.
"""

from __future__ import annotations

import os
from pathlib import Path

from textual.app import App, SuspendNotSupported

from tui.actions.editor import EditorFailed, edit_in_editor
from tui.chat.attachment import AttachmentRefused, as_markdown
from tui.chat.mentions import with_files
from tui.widgets.window import ChatWindow


class Draft:
    def __init__(self, app: App[None], window: ChatWindow) -> None:
        self._app = app
        self._window = window

    def begin(self, text: str) -> None:
        """Put this there, to be gone on with."""
        self._window.composer.write(text)
        self._window.composer.focus()

    def attach(self, name: str) -> None:
        """Put a file there, to be sent with what is written below it."""
        if not name:
            self.begin("/attach ")
            return
        try:
            block = as_markdown(Path(os.path.expanduser(name)))
        except AttachmentRefused as error:
            self._give_back(f"/attach {name}", error)
        else:
            self._window.composer.write(f"{block}\n")

    def with_files(self, text: str) -> str | None:
        """The text with the files it mentions; None, and the text back, where one cannot be read."""
        try:
            return with_files(text, Path.cwd())
        except AttachmentRefused as error:
            self._give_back(text, error)
            return None

    def in_editor(self) -> None:
        """Go on in the editor that $VISUAL or $EDITOR names."""
        try:
            with self._app.suspend():
                text = edit_in_editor(self._window.composer.text)
        except EditorFailed as error:
            self._app.notify(str(error), severity="error", markup=False)
        except SuspendNotSupported:
            self._app.notify("An editor cannot be opened from this kind of terminal.", markup=False)
        else:
            self._window.composer.write(text)

    def _give_back(self, text: str, error: AttachmentRefused) -> None:
        self._window.composer.write(text)
        self._app.notify(str(error), severity="error", markup=False)
