r"""Makes untrusted text safe to print or show: the one place that decides what may reach a terminal.

Names, errors and answers come from folders, files, models and other servers. Characters that could move
the cursor, set the clipboard, forge a line or reorder text never reach the screen: what mlxserve prints and
logs shows them as escapes (`\x1b`), the chat as visible characters (`␛`). None is dropped silently.
"""

from __future__ import annotations

import re

# C0 and DEL (all but tab and line feed), and C1: every escape sequence, OSC and CSI starts with one.
# Bidi marks, embeddings, overrides and isolates reorder the text after them (CVE-2021-42574).
# Line and paragraph separators forge lines.
# Tag characters spell invisible text, which could be copied into another model's prompt.
# A lone surrogate cannot be encoded, so it would break the write itself.
_UNSAFE = (
    "\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff"
    "\U000e0000-\U000e007f"
)
_UNSAFE_IN_LINES = re.compile(f"[{_UNSAFE}]")
_UNSAFE_IN_A_LINE = re.compile(f"[\t\n{_UNSAFE}]")
_LINE_ENDS = re.compile("\r\n|\r|\u2028|\u2029|\x85|\v|\f")


def escaped(text: str) -> str:
    """Return the text on one line, with escapes for what a terminal would obey."""
    return _UNSAFE_IN_A_LINE.sub(_escape, text)


def escaped_lines(text: str) -> str:
    """Return the text with its lines and tabs, with escapes for what a terminal would obey."""
    return _UNSAFE_IN_LINES.sub(_escape, text)


def clean(text: str) -> str:
    r"""Return the text with `\n` as its only line end and visible signs for controls."""
    return _UNSAFE_IN_LINES.sub(_visible, _LINE_ENDS.sub("\n", text))


def one_line(text: str, limit: int = 200) -> str:
    """Return the cleaned text on one line of at most `limit` characters: for titles, names and status."""
    line = " ".join(clean(text[: limit * 4]).split())
    return line if len(line) <= limit else line[: limit - 1].rstrip() + "…"


def _escape(match: re.Match[str]) -> str:
    return ascii(match.group())[1:-1]


def _visible(match: re.Match[str]) -> str:
    code = ord(match.group())
    if code < 0x20:
        # The control pictures: ␛ for escape, ␇ for bell.
        return chr(0x2400 + code)
    if code == 0x7F:
        return "␡"
    if code < 0xA0 or 0xD800 <= code <= 0xDFFF:
        return "\ufffd"
    return f"⟨U+{code:04X}⟩"
