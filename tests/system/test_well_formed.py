import json
from random import Random

from mlxserve.system.well_formed import well_formed, well_formed_value
from mlxserve.text.parsing.json_text import JsonText, well_formed_json

# Escapes as JSON has them, whole and in pieces.
PIECES = (
    r"\ud83d",
    r"\ude00",
    r"\uD83D\uDE00",
    r"\\",
    r"\n",
    r"\"",
    r"\u0041",
    "u",
    "d83d",
    "ü",
    "x",
)


def test_halves_are_replaced_and_pairs_are_one_character() -> None:
    for text, expected in [
        ("plain", "plain"),
        ("zoë 😀", "zoë 😀"),
        ("a\ud83d b", "a\ufffd b"),
        ("\ude00\ud83d", "\ufffd\ufffd"),
        ("\ud83d\ude00", "😀"),
        ("\ud83d\ud83d\ude00\ude00", "\ufffd😀\ufffd"),
        ("é" * 100_000 + "\ud83d", "é" * 100_000 + "\ufffd"),
    ]:
        assert well_formed(text) == expected


def test_all_texts_of_a_value_are_replaced() -> None:
    value = {"\ud83d": ["a\ude00", {"b": "\ud83d"}, 1, 2.5, None, True]}
    assert well_formed_value(value) == {"\ufffd": ["a\ufffd", {"b": "\ufffd"}, 1, 2.5, None, True]}


def test_the_escapes_of_halves_are_replaced_in_pieces_of_any_size() -> None:
    rng = Random(0)
    for _ in range(2_000):
        written = f'"{"".join(rng.choices(PIECES, k=rng.randrange(10)))}"'
        expected = well_formed(json.loads(written))
        assert json.loads(well_formed_json(written)) == expected, written
        value, taken = JsonText(), ""
        for char in written:
            is_whole = value.push(char)
            taken += value.take() if rng.random() < 0.3 else ""
        assert is_whole, written
        assert json.loads(taken + value.take()) == expected, written


def test_json_without_halves_stays_as_it_is_written() -> None:
    for written in ['{"a":  "\\ud83d\\ude00 \\\\ud83d", "n": 1e2}', '{"a": "\\u00e9 é"}', "[1, 2]"]:
        assert well_formed_json(written) == written


def test_json_that_was_cut_off_keeps_what_was_written() -> None:
    for written, expected in [
        (r'{"a": "\u12', r'{"a": "\u12'),
        (r'{"a": "\ud83d', r'{"a": "\ufffd'),
        (r'{"a": "\ud83d\u', r'{"a": "\ufffd\u'),
        ('{"a": "b\\', '{"a": "b\\'),
    ]:
        value = JsonText()
        for char in written:
            value.push(char)
        assert value.finish() == expected
