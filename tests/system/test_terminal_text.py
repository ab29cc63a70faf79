"""What a terminal would obey is shown by escapes or visible characters."""

from __future__ import annotations

import unicodedata

from hypothesis import given, settings
from hypothesis import strategies as st

from mlxserve.system.terminal_text import clean, escaped, escaped_lines, one_line
from mlxserve.system.well_formed import well_formed

ANY_TEXT = st.text(st.characters(exclude_categories=()))
STEERING = st.text(st.sampled_from("\x1b\x9b\x07\r\n\t\x00\x7f]52;c[31m\u202e\u2066\u200f\ud800a"))


@settings(deadline=None)
@given(ANY_TEXT | STEERING)
def test_cleaned_text_contains_nothing_a_terminal_obeys(text: str) -> None:
    for character in clean(text):
        category = unicodedata.category(character)
        assert character in "\n\t" or category not in ("Cc", "Cs")
        assert unicodedata.bidirectional(character) not in (
            *("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"),
        )
    clean(text).encode()


@settings(deadline=None)
@given(ANY_TEXT | STEERING)
def test_escaped_text_contains_nothing_a_terminal_obeys(text: str) -> None:
    assert clean(escaped_lines(text)) == escaped_lines(text)
    assert "\n" not in escaped(text)


@settings(deadline=None)
@given(ANY_TEXT | STEERING)
def test_cleaning_twice_changes_nothing(text: str) -> None:
    assert clean(clean(text)) == clean(text)


def test_control_characters_are_replaced_by_visible_ones() -> None:
    for hostile, shown in [
        ("\x1b]52;c;cm0gLXJm\x07", "␛]52;c;cm0gLXJm␇"),
        ("\x1b[2J", "␛[2J"),
        ("\x9b31m", "\ufffd31m"),
        ("a\u202eb", "a⟨U+202E⟩b"),
        ("\u2067x\u2069", "⟨U+2067⟩x⟨U+2069⟩"),
        ("a\x00b\x7f", "a␀b␡"),
        ("a\U000e0068\U000e0069", "a⟨U+E0068⟩⟨U+E0069⟩"),
    ]:
        assert clean(hostile) == shown, hostile


def test_every_line_end_becomes_a_line_feed() -> None:
    assert clean("a\r\nb\rc\u2028d\x85e\vf") == "a\nb\nc\nd\ne\nf"


def test_ordinary_text_of_any_script_is_unchanged() -> None:
    text = "Grüße, 你好, שלום, مرحبا, 👩‍🚀 \t x"
    assert clean(text) == text


@settings(deadline=None)
@given(ANY_TEXT, st.integers(1, 50))
def test_one_line_has_no_line_end_and_at_most_the_limit(text: str, limit: int) -> None:
    line = one_line(text, limit)
    assert "\n" not in line
    assert "\t" not in line
    assert len(line) <= limit


def test_a_shortened_line_ends_in_an_ellipsis() -> None:
    assert one_line("one two three", 8) == "one two…"


@settings(deadline=None)
@given(ANY_TEXT)
def test_well_formed_text_can_be_encoded(text: str) -> None:
    well_formed(text).encode()


def test_a_surrogate_pair_is_joined() -> None:
    assert well_formed("\ud83d\ude00 \ud83d.") == "😀 \ufffd."


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
