"""What may reach a terminal of the text that mlxserve prints and logs.

Names, errors and answers come from folders, files, models and other servers. Characters in them that
could move the cursor, set the clipboard, forge a line or reorder text are written as escapes (`\\x1b`).
The terminal app, which imports nothing of mlxserve, has the same rule in `tui/sanitise.py`; a test
compares the two.
"""

from __future__ import annotations

# C0 and C1, in which every escape sequence begins; line and paragraph separators; what reorders a
# line; tags, which spell invisible text; lone surrogates, which cannot be written at all.
_CODES = [
    *range(0x20),
    *range(0x7F, 0xA0),
    *(0x061C, 0x200E, 0x200F),
    *range(0x2028, 0x202F),
    *range(0x2066, 0x206A),
    *range(0xD800, 0xE000),
    *range(0xE0000, 0xE0080),
]
_ESCAPES = {code: ascii(chr(code))[1:-1] for code in _CODES}
_ESCAPES_IN_LINES = {code: text for code, text in _ESCAPES.items() if chr(code) not in "\n\t"}


def escaped(text: str) -> str:
    """The text on one line."""
    return text.translate(_ESCAPES)


def escaped_lines(text: str) -> str:
    """The text with its lines and tabs."""
    return text.translate(_ESCAPES_IN_LINES)
