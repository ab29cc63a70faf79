"""Detects a light terminal background, from COLORFGBG or by asking the terminal.

    we write   OSC 11 ; ? ST   CSI c
    it answers OSC 11 ; rgb:ffff/ffff/ffff ST   CSI ? 62 ; ... c

Not every terminal knows OSC 11 (xterm's "dynamic colours"), but all answer CSI c (device
attributes), and in order: after that answer no other one follows.
"""

from __future__ import annotations

import os
import re
import select
import time

QUESTION = "\x1b]11;?\x1b\\\x1b[c"
_SECONDS = 0.5  # timeout of the answers, which local terminals give in milliseconds
_COLOUR = re.compile(
    rb"\x1b\]11;rgba?:([0-9a-fA-F]{1,4})/([0-9a-fA-F]{1,4})/([0-9a-fA-F]{1,4})"
    rb"[^\x07\x1b]*(?:\x07|\x1b\\)"
)
_ATTRIBUTES = re.compile(rb"\x1b\[\?[0-9;]*c")
# How much red, green and blue add to brightness, as ITU-R BT.709 has it.
_BRIGHTNESS = (0.2126, 0.7152, 0.0722)


def is_light_by_name() -> bool | None:
    """Read COLORFGBG, the numbers of the text's colour and the background's; None if unset.

    iTerm2, Konsole, rxvt and others set it.
    """
    background = os.environ.get("COLORFGBG", "").rpartition(";")[2]
    if not background.isdecimal():
        return None
    return int(background) == 7 or 9 <= int(background) <= 15


def read_answer(fd: int, asked_at: float) -> tuple[bool | None, str]:
    """Return (light background or None if the terminal did not say, keys typed meanwhile).

    fd: reads the terminal, without echo and not by whole lines
    asked: time of the query on time.monotonic
    """
    read = b""
    while not _ATTRIBUTES.search(read):
        left = max(0.0, asked_at + _SECONDS - time.monotonic())
        if not select.select([fd], [], [], left)[0] or not (new := os.read(fd, 4096)):
            break
        read += new
    typed = _ATTRIBUTES.sub(b"", _COLOUR.sub(b"", read))
    return is_light_background(read), typed.decode(errors="replace")


def is_light_background(answer: bytes) -> bool | None:
    """Parse the terminal's answer; None if it did not say."""
    match = _COLOUR.search(answer)
    if match is None:
        return None
    shares = [int(digits, 16) / (16 ** len(digits) - 1) for digits in match.groups()]
    brightness = sum(w * share for w, share in zip(_BRIGHTNESS, shares, strict=True))
    return bool(brightness > 0.5)
