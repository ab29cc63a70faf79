"""A parser's work grows with the length of an answer, whatever a client makes the model say."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

from mlxserve.text.parsing.markup import Markup
from tests.linear import grows_in_lines
from tests.text.parsing.answers import ROWS, markup, parse
from tests.text.parsing.test_writing import written

PIECE = 5  # characters of a token
SIZES = (200, 1_600)
# One of each syntax in every run of continuous integration; the others in the workflow.
OFTEN = {row.syntax: row.name for row in ROWS.values()}.values()
MARKS = (pytest.mark.long, pytest.mark.slow)
UNITS = (
    *("a", " ", "\n", "`", "<", "</", "{", "}", "[", "]", "(", ")", '"', "'", "\\", ",", ":", "="),
    *('{"', '["', '{"a":', '"a",', "a=", "(a=", "\\u00", "1", "-", "é", "<a>", "</a>", "a(", "<|"),
    *('{"name": "look", "arguments": ', "[look(at=", "```\n", '\\"', "a\n", " {", "\n<"),
)


def beginnings(name: str) -> Iterator[str]:
    """An answer's first text, its thinking, and the places in a call where a model could go on for ever."""
    yield ""
    yield "<think>"
    call = written(name, [("look", {"at": "VALUE", "n": 1})])
    for place in ("look", "at", "VALUE"):
        yield call[: call.index(place)]
    yield call[: call.index("VALUE") + len("VALUE")]
    yield call


def units(name: str) -> set[str]:
    row = ROWS[name]
    markers = {*row.starts, *row.ends, *row.call_markers, "<think>", "</think>"} - {""}
    return {*UNITS, *markers, *(marker[:-1] for marker in markers if len(marker) > 1)}


def read(text: str, form: Markup) -> None:
    parse(text, form, pieces=[text[at : at + PIECE] for at in range(0, len(text), PIECE)])


def is_superlinear(name: str, begin: str, unit: str) -> bool:
    """At two sizes: what may be a name's or a header's beginning is held back only up to its limit."""
    form = markup(name)
    for size in SIZES:
        texts = (begin + unit * (length // len(unit) + 1) for length in (size, 4 * size))
        if not grows_in_lines(*(partial(read, text, form) for text in texts)):
            return False
    return True


@pytest.mark.parametrize("name", [pytest.param(row, marks=MARKS[row in OFTEN]) for row in ROWS])
def test_the_lines_that_a_parser_executes_grow_with_an_answer(name: str) -> None:
    grow = [
        (begin, unit)
        for begin in beginnings(name)
        for unit in sorted(units(name))
        if is_superlinear(name, begin, unit)
    ]
    assert grow == []
