"""The extent of a value: an argument may speak of the markers of its own format."""

from __future__ import annotations

import re

import pytest

from mlxserve.text.parsing.formats import Syntax
from mlxserve.text.parsing.writing import write_calls
from tests.text.parsing.answers import CALL_HEADERS, ROWS, markup, parse, parse_in_pieces

VALUES = [
    "{}",
    "Use {} to end it.",
    "{} at the beginning",
    "at the end {}",
    "\n{}\n",
    "```xml\n{}\n```\nSo it is.",
    'END = "{}"\nprint(END)\n',
    "{0}{0}",
    "one {0} two {0} three",
    "line\n{}",
]
# The other values are in JSON or in Python's quotes, which escape.
MARKED = (Syntax.ELEMENTS, Syntax.OBJECT, Syntax.TAGS)
NAMES = [row.name for row in ROWS.values() if row.syntax in MARKED]


def markers_of(name: str) -> list[str]:
    """The markers after a value, after a call and around a section, and those before."""
    row = ROWS[name]
    if row.syntax is Syntax.OBJECT:
        return [row.quote]
    if row.syntax is Syntax.TAGS:
        ends = (f"{mark}</{tag}>" for tag in ("content", "invoke") for mark in ("", row.quote))
        return [row.quote, *ends, *row.ends, f"{row.quote}<item>"]
    pieces = re.split(r"\$\w+", f"{row.call}$_{row.parameter}")
    closers = [piece.strip() for piece in pieces if "/" in piece or "close" in piece]
    return sorted({marker for marker in (*closers, *row.ends) if marker.startswith("<")})


def written(name: str, value: str, others: dict[str, object]) -> str:
    lead = CALL_HEADERS.get(name, "")
    return lead + write_calls(
        ROWS[name], [("write", {"path": "a", "content": value, **others}, None)]
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_value_that_holds_a_marker_is_read_as_it_was_written(name: str) -> None:
    for marker in markers_of(name):
        for shape in VALUES:
            for others in ({}, {"more": 3}):
                value = shape.format(marker)
                if ROWS[name].syntax is Syntax.OBJECT and f"{ROWS[name].quote}," in f"{value},":
                    continue  # such a value is written in other quotes
                text = f"Yes. {written(name, value, others)}" if not ROWS[name].channels else ""
                text = text or written(name, value, others)
                found = parse_in_pieces(text, markup(name))
                expected = {"path": "a", "content": value, **others}
                assert found.calls == [("write", expected)], (marker, text)
                assert found.text.strip() in ("Yes.", "")


@pytest.mark.parametrize("name", NAMES)
def test_such_a_call_is_no_other_call_where_it_is_cut_off(name: str) -> None:
    for marker in markers_of(name):
        value = f"Use {marker} to end it.\n"
        text = written(name, value, {})
        for end in range(len(text)):
            for _, arguments in parse(text[:end], markup(name)).calls:
                assert arguments == {"path": "a", "content": value}, text[:end]


@pytest.mark.parametrize(
    ("name", "ends"),
    [
        ("qwen3_coder", "</parameter>\n</function>"),
        ("deepseek_v4", "</｜DSML｜parameter>\n</｜DSML｜invoke>"),
        ("minimax_m3", "]<]minimax[>[</content>]<]minimax[>[</invoke>"),
    ],
)
def test_a_value_may_speak_of_the_end_of_its_call(name: str, ends: str) -> None:
    value = f"It ends with {ends} as a rule.\n"
    found = parse_in_pieces(written(name, value, {}), markup(name))
    assert found.calls == [("write", {"path": "a", "content": value})]


def test_a_declared_argument_ends_one_that_was_not_closed() -> None:
    text = (
        "<tool_call>\n<function=look>\n<parameter=at>\nx\n<parameter=n>\n3\n</parameter>\n"
        "</function>\n</tool_call>"
    )
    assert parse_in_pieces(text, markup("qwen3_coder")).calls == [("look", {"at": "x", "n": 3})]
    spoken = text.replace("<parameter=n>", "<parameter=other>")
    assert parse_in_pieces(spoken, markup("qwen3_coder")).calls == [
        ("look", {"at": "x\n<parameter=other>\n3"})
    ]


def test_a_key_holds_no_markup() -> None:
    text = (
        "<tool_call>write\n<arg_key>path</arg_key><arg_key>content</arg_key>\n"
        "<arg_value>3</arg_value>\n</tool_call>"
    )
    found = parse_in_pieces(text, markup("glm45"))
    assert (found.calls, found.text) == ([], text)


DSML = "<｜DSML｜tool_calls>\n{}\n</｜DSML｜tool_calls>"
M2, M3 = (
    "<minimax:tool_call>{}</minimax:tool_call>",
    "]<]minimax[>[<tool_call>{}]<]minimax[>[</tool_call>",
)


@pytest.mark.parametrize(
    ("name", "text", "arguments"),
    [
        ("deepseek_v4", DSML.format('<｜DSML｜invoke name="rest"/>'), {}),
        ("deepseek_v4", DSML.format('<｜DSML｜invoke name="rest" />'), {}),
        ("minimax_m2", M2.format('<invoke name="rest"/>'), {}),
        (
            "minimax_m2",
            M2.format('<invoke name="rest"><parameter name="at"/></invoke>'),
            {"at": ""},
        ),
        ("minimax_m3", M3.format(']<]minimax[>[<invoke name="rest"/>'), {}),
        ("qwen3_coder", "<tool_call>\n<function=rest/>\n</tool_call>", {}),
        ("minicpm5", '<function name="rest"/>', {}),
    ],
)
def test_an_empty_element_is_a_call_without_arguments(
    name: str, text: str, arguments: dict[str, str]
) -> None:
    found = parse_in_pieces(f"{text}\nDone.", markup(name))
    assert (found.calls, found.text) == ([("rest", arguments)], "Done.")


def test_a_bare_object_that_speaks_of_a_tool_is_no_call() -> None:
    for text in (
        '{"name": "look"}',
        '{"name": "look", "description": "Looks.", "parameters": {"type": "object"}}',
        '[{"name": "look", "type": "function"}]',
    ):
        assert parse_in_pieces(text, markup("llama3")).text == text


def test_text_after_a_call_that_no_section_closes_is_kept() -> None:
    text = "<function=look>\n<parameter=n>\n3\n</parameter>\n</function>\nDone."
    found = parse_in_pieces(text, markup("qwen3_coder"))
    assert (found.calls, found.text) == ([("look", {"n": 3})], "Done.")
