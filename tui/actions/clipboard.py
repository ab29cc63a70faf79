"""Copies text to the clipboard, only on an explicit action of the user."""

from __future__ import annotations

import shutil
import subprocess

from textual.app import App

from mlxserve.system.terminal_text import clean

_TIMEOUT_SECONDS = 5.0


def put_in_clipboard(app: App[None], text: str, what: str) -> None:
    """Copy a text of the model or the user, cleaned, and show a notice."""
    if not text:
        app.notify(f"Nothing to copy: there is no {what} yet.")
        return
    copy(app, clean(text))
    app.notify(f"Copied the {what}.", timeout=2)


def copy(app: App[None], text: str) -> None:
    """Copy by OSC 52, and by pbcopy where it exists.

    Terminal.app ignores the escape sequence; over SSH only the escape sequence works.
    """
    app.copy_to_clipboard(text)
    if (pbcopy := shutil.which("pbcopy")) is None:
        return
    try:
        subprocess.run([pbcopy], input=text.encode(), check=False, timeout=_TIMEOUT_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        app.notify(f"pbcopy failed: {error}", severity="warning")
