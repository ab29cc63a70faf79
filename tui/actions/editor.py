"""Writing a message in an editor of one's own."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory


class EditorFailed(Exception):
    """No editor could be used; says what to do."""


def edit_in_editor(text: str) -> str:
    """The text as it is after editing. Blocks; the editor has the terminal. Raises EditorFailed.

    The editor is `$VISUAL`, `$EDITOR`, or vi. The file is in a folder of its own, which only its
    owner can read, and is gone afterwards.
    """
    editor = os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi"
    with TemporaryDirectory(prefix="mlxserve-") as folder:
        file = Path(folder) / "message.md"
        file.write_text(text, encoding="utf-8")
        try:
            done = subprocess.run([*shlex.split(editor), str(file)], check=False)
            if done.returncode != 0:
                raise EditorFailed(f"{editor} ended with exit code {done.returncode}.")
            return file.read_text(encoding="utf-8", errors="replace").rstrip("\n")
        except (OSError, ValueError) as error:
            raise EditorFailed(
                f"The editor {editor!r} could not be used: {error}. Set $EDITOR to another one."
            ) from error
