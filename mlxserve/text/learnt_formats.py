"""Learns the format of a model's calls from what its chat template writes for known calls.

What varies with a call is its name, a key or a value; everything else is markup:

    <tool_calls> <call name=" zqtool "> <arg key=" zqalpha "> zqvalue </arg> ... </call> </tool_calls>
    start        opening      $name     parameter  $key        $value                     end
    └── before ─────────────┘                                                 └── after ─────────────┘

A message with two calls tells the markers of a section from those of each call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from mlxserve.text.call_probes import (
    NAME,
    ONE,
    OTHER_NAME,
    TWO,
    CallTexts,
    thinking_in,
    value_texts,
)
from mlxserve.text.parsing.cursor import BLANKS
from mlxserve.text.parsing.formats import NAME as TOOL_NAME
from mlxserve.text.parsing.formats import CallFormat, Syntax

_ID = re.compile(r"functions\.\w+:\d|zqcall00\d")
_TAG = re.compile(r"<[^<>\s]+>|\[[A-Z_]+\]|</?\w[^<>]*>")
_KEYS = tuple(ONE[1])
_VALUE, _NUMBER = ONE[1].values()
_SECOND, _SECOND_NUMBER = TWO[1].values()
_LEARNT = "learnt"
# What markup says of a text, of a number, and as a field of `CallFormat`.
_TYPES = (
    ("true", "false", "$string"),
    ("string", "integer", "$type"),
    ("string", "number", "$type"),
)
# Syntaxes whose calls are known by their own first characters.
_BARE = (Syntax.JSON, Syntax.PYTHON, Syntax.OBJECT)


class _Body(NamedTuple):
    """One call in a text: the part that varies with it.

    call: as a template of `CallFormat`
    """

    begin: int
    end: int
    syntax: Syntax
    call: str
    parameter: str = ""
    quote: str = ""


@dataclass(frozen=True, slots=True)
class _Around:
    """The markup around the body of a call, and between those of two; None without a second call."""

    before: str
    between: str | None
    after: str

    @property
    def is_section(self) -> bool:
        """True if each call has a section of its own."""
        lead = self.before.lstrip()
        return self.between is None or (bool(lead) and self.between.endswith(lead))


def learnt_formats(texts: CallTexts) -> Iterator[CallFormat]:
    """Yield the formats that the texts may be written in. Only reading them back tells which is."""
    one = _after_thinking(texts.one.text)
    two = None if texts.two is None else _after_thinking(texts.two.text)
    for find in (_json_body, _headed_body, _python_body, _object_body, _tag_body, _element_body):
        body = find(one, (NAME, _VALUE, _NUMBER))
        if body is None:
            continue
        between = None
        call = body.call
        if two is not None:
            first = find(two[: two.find(OTHER_NAME)], (NAME, _VALUE, _NUMBER)) or body
            second = find(two[first.end :], (OTHER_NAME, _SECOND, _SECOND_NUMBER))
            if second is None:
                continue
            between = two[first.end : first.end + second.begin]
            call = _numbered(body.call, second.call)
        around = _Around(one[: body.begin], between, one[body.end :])
        # Around values that are hard to write, where there is any.
        is_cdata = any("<![CDATA[" in each.text for each in texts.hard)
        for row in _rows(body._replace(call=call), around):
            yield replace(row, is_cdata=is_cdata)


def _after_thinking(text: str) -> str:
    pair = thinking_in(text)
    return text if pair is None else text.rpartition(pair[1])[2]


# ---- the body of a call


def _decoded(text: str, at: int) -> tuple[Any, int]:
    try:
        return json.JSONDecoder().raw_decode(text, at)
    except ValueError:
        return None, at


def _objects(text: str) -> Iterator[tuple[int, int, Any]]:
    """Objects of JSON, outermost first: (begin, end, value)."""
    for match in re.finditer(r"\{", text):
        value, end = _decoded(text, match.start())
        if isinstance(value, dict):
            yield match.start(), end, value


def _arguments_in(text: str, marks: tuple[str, Any, Any]) -> tuple[int, int] | None:
    expected = value_texts(dict(zip(_KEYS, marks[1:], strict=True)))
    return next(((b, e) for b, e, value in _objects(text) if value_texts(value) == expected), None)


def _json_body(text: str, marks: tuple[str, Any, Any]) -> _Body | None:
    """`{"name": NAME, "arguments": {...}}`, or `{NAME: {...}}`."""
    for begin, end, _ in _objects(text):
        written = text[begin:end]
        span = _arguments_in(written, marks)
        if span is None or span[0] == 0:
            continue
        call = f"{written[: span[0]]}$arguments{written[span[1] :]}"
        if f'"{marks[0]}"' in call:
            call = re.sub(r'("(?:tool_call_)?id": *")[^"]+"', r'\1$id"', call)
            return _Body(begin, end, Syntax.JSON, call.replace(marks[0], "$name"))
    return None


def _headed_body(text: str, marks: tuple[str, Any, Any]) -> _Body | None:
    """The name, then an object."""
    name, span = marks[0], _arguments_in(text, marks)
    if span is None:
        return None
    before = text[: span[0]]
    called = _ID.search(before)
    # Kimi K2 has no other name than that in the id.
    if called is not None and name in before.replace(called[0], ""):
        before = before.replace(called[0], "$id")
    marked = before.replace(name, "$name")
    if marked.count("$name") != 1:
        return None
    at = min(begin for field in ("$id", "$name") if (begin := marked.find(field)) >= 0)
    return _Body(at, span[1], Syntax.HEADED, f"{marked[at:]}$arguments")


def _python_body(text: str, marks: tuple[str, Any, Any]) -> _Body | None:
    name, value, number = marks
    of_number = rf"(?:{number}|(?P=q){number}(?P=q))"
    written = rf"{name}\({_KEYS[0]}=(?P<q>['\"]){value}(?P=q), ?{_KEYS[1]}={of_number}\)"
    match = re.search(written, text)
    return match and _Body(*match.span(), Syntax.PYTHON, "$name($arguments)")


def _object_body(text: str, marks: tuple[str, Any, Any]) -> _Body | None:
    name, value, number = marks
    of_number = rf"(?:{number}|(?P=quote){number}(?P=quote))"
    of_text = rf"(?P<quote>\S{{1,16}}?){value}(?P=quote)"
    written = rf"call:{name}\{{{_KEYS[0]}:{of_text},{_KEYS[1]}:{of_number}\}}"
    match = re.search(written, text)
    if match is None or not match["quote"]:
        return None
    return _Body(*match.span(), Syntax.OBJECT, "call:$name$arguments", quote=match["quote"])


def _tag_body(text: str, marks: tuple[str, Any, Any]) -> _Body | None:
    name, value, number = marks
    first, second = (rf"(?P=q)<{key}>%s(?P=q)</{key}>" for key in _KEYS)
    tags = f"{first % value}{second % number}"
    match = re.search(rf'(?P<q>[^\s"]{{1,16}})<invoke name="{name}">{tags}(?P=q)</invoke>', text)
    if match is None:
        return None
    call = f'{match["q"]}<invoke name="$name">$arguments</invoke>'
    return _Body(*match.span(), Syntax.TAGS, call, quote=match["q"])


def _element_body(text: str, marks: tuple[str, Any, Any]) -> _Body | None:
    """Each argument in markup of its own. Ends with the markup of the last argument."""
    name, value, number = marks
    pieces = _between(text, (name, _KEYS[0], value, _KEYS[1], str(number)))
    if pieces is None:
        return None
    before, head, joint, between, other_joint, after = pieces
    opener = _common_end(head, between)
    closer = between.removesuffix(opener)
    if not opener or not closer.strip() or not after.startswith(closer.rstrip()):
        return None
    typed = _typed(joint, other_joint)
    if typed is None:
        return None
    end = len(text) - len(after) + len(closer.rstrip())
    end += len(closer) - len(closer.rstrip()) if after.startswith(closer) else 0
    call = f"$name{head.removesuffix(opener)}$parameters"
    return _Body(len(before), end, Syntax.ELEMENTS, call, f"{opener}$key{typed}$value{closer}")


def _between(text: str, marks: Sequence[str]) -> list[str] | None:
    """What is before, between and after these texts; None if they do not follow each other."""
    pieces = []
    for mark in marks:
        piece, mark_found, text = text.partition(mark)
        if not mark_found:
            return None
        pieces.append(piece)
    return [*pieces, text]


def _typed(of_text: str, of_number: str) -> str | None:
    """The markup between a key and its value, which may tell the type of the value."""
    if of_text == of_number:
        return of_text
    for word, other, field in _TYPES:
        if of_text.replace(word, other) == of_number:
            return of_text.replace(word, field)
    return None


def _numbered(first: str, second: str) -> str:
    """Replace the number of a call, if its markup has one."""
    for field, pair in (("$number", ("0", "1")), ("$count", ("1", "2"))):
        begun = re.split(rf"\b{pair[0]}\b", first)
        if first != second and pair[1].join(begun) == second:
            return field.join(begun)
    return first


# ---- the markup around it


def _common_end(first: str, second: str) -> str:
    """The longest common end that begins with a marker."""
    for match in re.finditer(r"[<\[]", first):
        if second.endswith(first[match.start() :]):
            return first[match.start() :]
    return ""


def _common_begin(first: str, second: str) -> str:
    """The longest common beginning that ends with a marker, or with white space."""
    ends = [match.end() for match in re.finditer(r"[>\]}`\n]", first)]
    return next((first[:end] for end in reversed(ends) if second.startswith(first[:end])), "")


def _rows(body: _Body, around: _Around) -> Iterator[CallFormat]:
    row = CallFormat(
        _LEARNT, body.syntax, call=body.call, parameter=body.parameter, quote=body.quote, starts=()
    )
    rows = [_own_section(row, around)] if around.is_section else []
    if around.between is not None:
        rows.append(_shared_section(row, around))
    yield from (_headed(row) for row in rows if row.starts or row.syntax in _BARE)


def _own_section(row: CallFormat, around: _Around) -> CallFormat:
    start, opening = _start(around.before.lstrip(), is_first=row.syntax is Syntax.ELEMENTS)
    closing, end = _end(around.after, row.quote)
    return _marked(replace(row, call=f"{opening}{row.call}{closing}"), start, end)


def _shared_section(row: CallFormat, around: _Around) -> CallFormat:
    assert around.between is not None
    opener = _common_end(around.before, around.between)
    closer = _common_begin(around.after, around.between.removesuffix(opener))
    joint = around.between.removeprefix(closer).removesuffix(opener)
    start, opening = _start(around.before.removesuffix(opener).lstrip())
    closing, end = _end(around.after.removeprefix(closer), row.quote)
    row = replace(
        row,
        call=f"{opener}{row.call}{closer}",
        opening=opening,
        joint=joint,
        closing=closing,
    )
    return _marked(row, start, end)


def _start(text: str, *, is_first: bool = False) -> tuple[str, str]:
    """Split what precedes a call into the marker and what follows it."""
    tags = list(_TAG.finditer(text))
    if tags:
        end = tags[0 if is_first else -1].end()
        return text[:end], text[end:]
    marker = text.rstrip().removesuffix("[")
    return marker, text[len(marker) :]


def _end(text: str, quote: str) -> tuple[str, str]:
    """Split what follows a call into what precedes the marker and the marker."""
    tags = list(_TAG.finditer(text))
    if tags:
        tag = tags[-1][0]
        before = text[: tags[-1].start()]
        marked = before.removesuffix(quote)
        return marked, f"{before[len(marked) :]}{tag}"
    marker = text.lstrip(f"{BLANKS}]")
    return text[: len(text) - len(marker)], marker.rstrip()


def _marked(row: CallFormat, start: str, end: str) -> CallFormat:
    return replace(
        row,
        starts=(start,) if start else (),
        ends=(end,) if end else (),
        is_bare=not start,
        is_marked=bool(start),
    )


def _headed(row: CallFormat) -> CallFormat:
    """Add the pattern of the header to a row whose calls have one."""
    if row.syntax is not Syntax.HEADED:
        return row
    fields = {"$name": f"(?P<name>{TOOL_NAME})", "$id": r"(?P<id>[\w.:-]*)"}
    pieces = re.split(r"(\$\w+)", row.call.partition("$arguments")[0].strip())
    header = "".join(
        fields.get(piece, r"\d+") if at % 2 else _loose(piece) for at, piece in enumerate(pieces)
    )
    return replace(row, header=header)


def _loose(markup: str) -> str:
    """A pattern of markup whose white space is optional."""
    return r"\s*".join(re.escape(piece) for piece in re.split(r"\s+", markup))
