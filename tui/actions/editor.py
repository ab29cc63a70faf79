"""Edits a text in the user's editor."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory


class EditorFailed(Exception):
    """The editor could not be run; the message says what to do."""


def edit_in_editor(text: str) -> str:
    """Edit a text and return it. Blocks while the editor owns the terminal. Raises EditorFailed.

    The editor is `$VISUAL`, `$EDITOR`, or vi. The file is in a temporary folder that only its owner
    can read.
    """
    editor = os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi"
    with TemporaryDirectory(prefix="mlxserve-") as folder:
        file = Path(folder) / "message.md"
        file.write_text(text, encoding="utf-8")
        try:
            done = subprocess.run([*shlex.split(editor), str(file)], check=False)
            if done.returncode != 0:
                raise EditorFailed(f"{editor} exited with code {done.returncode}.")
            return file.read_text(encoding="utf-8", errors="replace").rstrip("\n")
        except (OSError, ValueError) as error:
            raise EditorFailed(
                f"Cannot run the editor {editor!r}: {error}. Set $EDITOR to another one."
            ) from error
