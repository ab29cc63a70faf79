"""What a terminal would obey is escaped, by the same rule as in the terminal app."""

from __future__ import annotations

from mlxserve.system.terminal_text import escaped, escaped_lines
from tui.sanitise import clean

# Every plane that has characters, and the tags.
CODES = [*range(0x30000), *range(0xE0000, 0xE0200)]


def test_the_terminal_app_has_the_same_rule() -> None:
    """The two may not import each other."""
    ours = [code for code in CODES if escaped_lines(chr(code)) != chr(code)]
    theirs = [code for code in CODES if clean(chr(code)) != chr(code)]
    assert ours == theirs


def test_lines_and_tabs_stay() -> None:
    for text, wanted in [
        ("plain, ünïcödé, 日本語 🙂", "plain, ünïcödé, 日本語 🙂"),
        ("\x1b[2J\x07", "\\x1b[2J\\x07"),
        ("a\r\nb\tc", "a\\r\nb\tc"),
        ("\u202eback\u2066", "\\u202eback\\u2066"),
        ("\ud800", "\\ud800"),
        ("\U000e0041", "\\U000e0041"),
    ]:
        assert escaped_lines(text) == wanted, text
        assert escaped(text) == wanted.replace("\n", "\\n").replace("\t", "\\t"), text
