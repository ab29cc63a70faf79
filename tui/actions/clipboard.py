"""Putting text where other programs find it. Only ever on an explicit action of the reader."""

from __future__ import annotations

import shutil
import subprocess

from textual.app import App

from tui.sanitise import clean

_PATIENCE_SECONDS = 5.0


def put_in_clipboard(app: App[None], text: str, what: str) -> None:
    """Copy a model's or the reader's words, made harmless, and say so."""
    if not text:
        app.notify(f"There is nothing to copy: no sign of {what} yet.", markup=False)
        return
    copy(app, clean(text))
    app.notify(f"Copied {what}.", timeout=2, markup=False)


def copy(app: App[None], text: str) -> None:
    """Through the terminal (OSC 52), and through pbcopy where there is one.

    Terminal.app ignores the escape sequence, and over SSH only the escape sequence works.
    """
    app.copy_to_clipboard(text)
    if (pbcopy := shutil.which("pbcopy")) is None:
        return
    try:
        subprocess.run([pbcopy], input=text.encode(), check=False, timeout=_PATIENCE_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        app.notify(f"pbcopy did not take the text: {error}", severity="warning", markup=False)
