"""The terminal's background, asked of the terminal itself while the program is being imported.

    we write   OSC 11 ; ? ST   CSI c
    it answers OSC 11 ; rgb:ffff/ffff/ffff ST   CSI ? 62 ; ... c

Not every terminal knows OSC 11 (xterm's "dynamic colours"), but all answer CSI c (device attributes), and
in order: with that answer no other one is to come. Keys typed meanwhile are kept for the app.

Imports almost nothing: the opening frame is waiting.
"""

from __future__ import annotations

import os
import re
import select
import threading
import time
from collections.abc import Callable

QUESTION = "\x1b]11;?\x1b\\\x1b[c"
_SECONDS = 0.5  # for the answers, which local terminals give in milliseconds
_COLOUR = re.compile(
    rb"\x1b\]11;rgba?:([0-9a-fA-F]{1,4})/([0-9a-fA-F]{1,4})/([0-9a-fA-F]{1,4})"
    rb"[^\x07\x1b]*(?:\x07|\x1b\\)"
)
_ATTRIBUTES = re.compile(rb"\x1b\[\?[0-9;]*c")
# How much red, green and blue add to brightness, as ITU-R BT.709 has it.
_BRIGHTNESS = (0.2126, 0.7152, 0.0722)


class Background:
    """Asks in a thread of its own, which is the terminal's only reader until `wait` returns.

    found: called in that thread with whether the background is light, if the terminal says so
    """

    def __init__(
        self, fd: int, write: Callable[[str], None], found: Callable[[bool], None]
    ) -> None:
        """fd: to read the terminal, without echo, and not in the mode that waits for whole lines"""
        self._fd = fd
        self._write = write
        self._found = found
        self._read = b""
        self._thread = threading.Thread(target=self._ask, name="background", daemon=True)
        self._thread.start()

    def wait(self) -> str:
        """Wait for the answers, or until it is too late for them, and return what was typed meanwhile."""
        self._thread.join()
        typed = _ATTRIBUTES.sub(b"", _COLOUR.sub(b"", self._read))
        return typed.decode(errors="replace")

    def _ask(self) -> None:
        try:
            self._read_answers(time.monotonic() + _SECONDS)
            is_light = is_light_background(self._read)
            if is_light is not None:
                self._found(is_light)
        except OSError:
            return  # the window has been closed, which the app notices as well

    def _read_answers(self, deadline: float) -> None:
        self._write(QUESTION)
        while not _ATTRIBUTES.search(self._read):
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._fd], [], [], left)[0]:
                return
            new = os.read(self._fd, 4096)
            if not new:
                return
            self._read += new


def is_light_background(answer: bytes) -> bool | None:
    """None if the terminal did not say."""
    found = _COLOUR.search(answer)
    if found is None:
        return None
    shares = [int(digits, 16) / (16 ** len(digits) - 1) for digits in found.groups()]
    brightness = sum(w * share for w, share in zip(_BRIGHTNESS, shares, strict=True))
    return bool(brightness > 0.5)
