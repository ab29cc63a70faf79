"""A call written into a history is read back as the same call."""

from __future__ import annotations

from typing import Any

from mlxserve.text.parsing.writing import write_calls
from tests.text.parsing.answers import CALL_HEADERS, ROWS, markup, parse

NASTY = 'say "hi", it\'s <b> & </b> {x} [y], z: 1, a=2) 🙂 ü\\n \\ \t'
ARGUMENTS: list[dict[str, Any]] = [
    {},
    {"at": NASTY, "n": 12345678901234567890},
    {"at": "    def f():\n        return 1\n"},
    {"at": ""},
    {"at": " "},
    {"at": "\nx\n"},
    {"at": "null", "n": -1},
    {"at": "<tool_call>", "tree": {"a": [1, {"b": "c, d"}], "e": None}, "list": ["x", "y, z"]},
    {"flag": True, "maybe": None, "either": "x"},
]
NAMES = ["look", "fs/read", "fs:read", "resolve-library-id", "github.create_issue"]


def written(name: str, calls: list[tuple[str, dict[str, Any]]]) -> str:
    row = ROWS[name]
    ids = (f"abcdefgh{number}" for number in range(1, 9))
    text = write_calls(row, [(*call, call_id) for call, call_id in zip(calls, ids, strict=False)])
    return f"{CALL_HEADERS.get(name, '')}{text}"


def test_written_calls_are_read_back() -> None:
    for name in ROWS:
        for number, arguments in enumerate(ARGUMENTS):
            called = "typed" if "flag" in arguments or "tree" in arguments else NAMES[number % 5]
            text = written(name, [(called, arguments)])
            found = parse(text, markup(name))
            assert (found.calls, found.text, found.reasoning) == ([(called, arguments)], "", ""), (
                text
            )


def test_several_written_calls_are_read_back() -> None:
    for name in sorted(ROWS.keys() - {"harmony"}):
        calls: list[tuple[str, dict[str, Any]]] = [
            ("look", {"at": "x\n", "n": 1}),
            ("fs/read", {"q": "y"}),
            ("rest", {}),
        ]
        assert parse(written(name, calls), markup(name)).calls == calls, name


def test_the_ids_of_calls_are_kept_where_the_format_has_them() -> None:
    for name in ("mistral_id", "mistral_list", "solar_open"):
        assert "abcdefgh1" in written(name, [("look", {})])
    assert "functions.look:0" in written("kimi_k2", [("look", {}), ("rest", {})])
    assert "functions.rest:1" in written("kimi_k2", [("look", {}), ("rest", {})])


def test_calls_look_as_the_families_write_them() -> None:
    call = [("look", {"at": "ü", "n": 2})]
    assert written("pythonic", call) == '<|tool_call_start|>[look(at="ü", n=2)]<|tool_call_end|>'
    assert written("json_tools", call) == (
        '<tool_call>\n{"name": "look", "arguments": {"at": "ü", "n": 2}}\n</tool_call>'
    )
    assert written("granite", call) == (
        '<|tool_call|>[{"name": "look", "arguments": {"at": "ü", "n": 2}}]'
    )
    assert written("phi4_mini", call).endswith("]<|/tool_call|>")
    assert written("llama3", call) == '{"name": "look", "parameters": {"at": "ü", "n": 2}}'
