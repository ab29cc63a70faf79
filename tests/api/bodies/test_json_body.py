from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator

import pytest

from mlxserve.api.bodies.json_body import MAX_JSON_DEPTH, MAX_MEMBERS, MAX_VALUES, parse_json
from mlxserve.api.errors import ApiError


def refusal(raw: bytes) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse_json(raw)
    assert caught.value.status == 400
    assert caught.value.code == "invalid_json"
    return caught.value


@contextlib.contextmanager
def no_parser() -> Iterator[None]:
    """The parser holds the interpreter's lock: bodies that take long must be refused before."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json, "loads", None)
        yield


def nested(depth: int) -> bytes:
    return b'{"a":' * (depth - 1) + b"{}" + b"}" * (depth - 1)


def test_an_object_is_parsed_as_it_was_sent() -> None:
    value = {"text": "zoë \U0001f600", "numbers": [1, -2.5, 1e10], "none": None, "flag": True}
    assert parse_json(json.dumps(value).encode()) == value
    assert parse_json(json.dumps(value, ensure_ascii=False).encode()) == value


def test_anything_but_strict_json_is_refused() -> None:
    for raw in [
        b"",
        b"{",
        b"[]",
        b'"text"',
        b"null",
        b'{"a": NaN}',
        b'{"a": Infinity}',
        b'{"a": -Infinity}',
        b'{"a": 1e400}',
        b'{"a": -1e400}',
        b'{"a": ' + b"9" * 5_000 + b"}",
        b'\xff{"a": 1}',
        b'{"a": 1\xff}',
        b'{"a": "line\nbreak"}',
        b'{"a": 1} trailing',
    ]:
        refusal(raw)


@pytest.mark.parametrize("number", [b"9" * 5_000, b"-" + b"1" * 100_000])
def test_a_number_of_too_many_digits_is_a_sentence(number: bytes) -> None:
    for body in (b'{"a": %b}' % number, b'{"a": [{"b": [1, %b]}]}' % number):
        message = str(refusal(body))
        assert message == "The body is not valid JSON: a number has more than 4300 digits."


def test_a_byte_order_mark_before_the_body_is_skipped() -> None:
    assert parse_json(b'\xef\xbb\xbf{"a": 1}') == {"a": 1}


def test_what_is_not_unicode_is_replaced_with_a_warning() -> None:
    for raw, expected, warning in [
        (b'{"a": "x\\ud83d y"}', {"a": "x\ufffd y"}, "surrogate"),
        (b'{"a": "\\udc00\\ud800"}', {"a": "\ufffd\ufffd"}, "surrogate"),
        (b'{"a": [{"\\ud800": "\\ud800"}]}', {"a": [{"\ufffd": "\ufffd"}]}, "surrogate"),
        (b'{"\\ud800": 1, "\\udc00": 2}', {"\ufffd": 2}, "surrogate"),
        (b'{"a": "x\xff\xe4\xb8 y"}', {"a": "x\ufffd\ufffd y"}, "UTF-8"),
        (b'{"a": "\xe4"}', {"a": "\ufffd"}, "UTF-8"),
        (b'{"a": "\xed\xa0\xbd"}', {"a": "\ufffd\ufffd\ufffd"}, "UTF-8"),
        (b'{"\xff": 1}', {"\ufffd": 1}, "UTF-8"),
        (b'{"a": "\\ud83d\\ude00", "b": "\xf0\x9f\x98\x80"}', {"a": "😀", "b": "😀"}, ""),
    ]:
        warnings: list[str] = []
        assert parse_json(raw, warnings.append) == expected, raw
        assert [warning in told for told in warnings] == [True] * bool(warning), raw


def test_a_surrogate_pair_is_one_character() -> None:
    assert parse_json(b'{"a": "\\ud83d\\ude00"}') == {"a": "\U0001f600"}


def test_an_escaped_backslash_before_u_is_not_a_surrogate() -> None:
    assert parse_json(b'{"a": "\\\\ud800"}') == {"a": "\\ud800"}


def test_a_duplicate_name_is_named() -> None:
    assert "'seed'" in refusal(b'{"seed": 1, "other": 2, "seed": 3}').message


def test_a_million_members_are_refused() -> None:
    raw = b"{" + b",".join(b'"%d":1' % number for number in range(1_000_000)) + b"}"
    with no_parser():
        assert "members together" in refusal(raw).message
    assert (
        len(parse_json(json.dumps({str(n): n for n in range(MAX_MEMBERS)}).encode())) == MAX_MEMBERS
    )


@pytest.mark.parametrize("value", [b"1", b'"' + b"," * 9 + b'\\"\\\\"'])
def test_a_flood_of_values_is_refused_unparsed(value: bytes) -> None:
    with no_parser():
        body = b'{"b":"x","c":{"d":1},"a" :[' + b",".join([value] * (MAX_VALUES + 1)) + b"]}"
        assert refusal(body).param == "a"


def test_punctuation_inside_strings_does_not_count() -> None:
    value = {"text": '{"a": 1, "b": [2, 3]}\\"' * 100_000, "tokens": [7] * (MAX_VALUES - 10)}
    assert parse_json(json.dumps(value).encode()) == value
    refusal(
        b'{"a":"' + b'\\",' * 1_000_000
    )  # a text without an end: read once, not again and again


def test_depth_is_bounded_exactly() -> None:
    assert parse_json(nested(MAX_JSON_DEPTH))
    assert "deeper" in refusal(nested(MAX_JSON_DEPTH + 1)).message


@pytest.mark.parametrize("opening", [b"[", b'{"a":'])
def test_a_hundred_thousand_levels_are_refused_without_recursion(opening: bytes) -> None:
    refusal(opening * 100_000)
    assert "deeper" in refusal(b'{"a":' + b"[" * 50_000 + b"]" * 50_000 + b"}").message


@pytest.mark.parametrize("extra", [0, 1])
def test_depth_counts_arrays_and_objects_beside_others_and_not_in_texts(extra: int) -> None:
    value: object = [[], "[[{{" * 100, {}]
    for level in range(MAX_JSON_DEPTH - 3 + extra):
        value = [value, {}] if level % 2 else {"next": value, "more": [[]]}
    raw = json.dumps({"first": value}).encode()
    if extra:
        assert "deeper" in refusal(raw).message
    else:
        assert parse_json(raw) == {"first": value}


def test_the_field_with_too_many_values_is_named_not_a_name_within_it() -> None:
    flood = b"[" + b",".join([b'{"inner":"x"}'] * (MAX_VALUES + 1)) + b"]"
    with no_parser():
        assert refusal(b'{"first":{"a":[]},"outer":' + flood + b"}").param == "outer"
