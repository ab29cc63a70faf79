"""Makes untrusted text safe to show: the one place that decides what may reach the terminal.

Model output, server messages, file names and model names pass through here before the screen,
the clipboard or the window title. Characters that could control the terminal or reorder a line
are replaced by visible ones, never dropped silently.
"""

from __future__ import annotations

import re

_LINE_ENDS = re.compile("\r\n|\r|\u2028|\u2029|\x85|\v|\f")

# C0 and DEL (except tab and line feed) and C1: every escape sequence, OSC and CSI starts with one.
# Bidi marks, embeddings, overrides and isolates reorder the text after them (CVE-2021-42574).
# Tag characters spell invisible text, which could be copied into another model's prompt.
# A lone surrogate cannot be encoded, so it would break the write itself.
_UNSAFE = re.compile(
    "[\x00-\x08\x0e-\x1f\x7f\x80-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff"
    "\U000e0000-\U000e007f]"
)


def clean(text: str) -> str:
    """The text with `\\n` as its only line end and without anything a terminal would obey."""
    return _UNSAFE.sub(_visible, _LINE_ENDS.sub("\n", text))


def one_line(text: str, limit: int = 200) -> str:
    """The cleaned text on one line of at most `limit` characters: for titles, names and status."""
    line = " ".join(clean(text[: limit * 4]).split())
    return line if len(line) <= limit else line[: limit - 1].rstrip() + "…"


def well_formed(text: str) -> str:
    """The text without lone surrogates, which JSON can carry and UTF-8 cannot."""
    if text.isascii():
        return text
    # A pair written as two JSON escapes arrives as two surrogates; utf-16 joins them again.
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _visible(match: re.Match[str]) -> str:
    code = ord(match.group())
    if code < 0x20:
        return chr(0x2400 + code)  # the control pictures: ␛ for escape, ␇ for bell
    if code == 0x7F:
        return "␡"
    if code < 0xA0 or 0xD800 <= code <= 0xDFFF:
        return "\ufffd"
    return f"⟨U+{code:04X}⟩"
