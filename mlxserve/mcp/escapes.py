r"""Replaces escapes of lone surrogates in JSON by that of U+FFFD.

Programs in JavaScript cut a text between the two halves of an emoji and write `"a\ud83d"`. The
client of MCP takes such a reply for no answer at all, and its connection ends when it is to send
one.
"""

from __future__ import annotations

import re

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
# Every escape: in a pair, of half a pair, and any other, so that none is found inside another.
_ESCAPE = re.compile(
    r"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    r"|(?P<half>u[dD][89a-fA-F][0-9a-fA-F]{2})|.)",
    re.DOTALL,
)
# An escape at the end that more text may complete, or make a pair.
_OPEN = re.compile(
    rb"(?<!\\)(?:\\\\)*+"
    rb"(\\(?:u(?:[0-9a-fA-F]{0,3}|[dD][89abAB][0-9a-fA-F]{2}(?:\\(?:u[0-9a-fA-F]{0,3})?)?))?)\Z"
)


def without_halves(text: str) -> str:
    r"""Replace each escape of half a surrogate pair in JSON by `\ufffd`."""
    if _SURROGATE.search(text) is None:
        return text
    return _ESCAPE.sub(lambda match: r"\ufffd" if match["half"] else match[0], text)


class HalvesFilter:
    """Like `without_halves`, for JSON in pieces of bytes."""

    def __init__(self) -> None:
        # May be the beginning of an escape.
        self._held = b""

    def push(self, part: bytes) -> bytes:
        data = self._held + part
        match = _OPEN.search(data)
        cut = len(data) if match is None else match.start(1)
        self._held = data[cut:]
        return _replaced(data[:cut])

    def finish(self) -> bytes:
        held, self._held = self._held, b""
        return _replaced(held)


def _replaced(data: bytes) -> bytes:
    return without_halves(data.decode("latin-1")).encode("latin-1")
