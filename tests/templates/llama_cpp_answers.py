"""Answers of models, and how llama.cpp reads them, out of its `tests/test-chat.cpp`.

The file is C++, in the archive of `public_templates`. Its cases are chains of calls,

    tst.test("text").enable_thinking(false).tools({ a_tool }).expect_content("...").run();

inside blocks and loops over templates. A small interpreter executes what these need: literals,
named constants, loops over lists, and the few functions that build messages. A case with anything
else in it is `Unread`, by its line.
"""

from __future__ import annotations

import json
import re
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from tests.templates.public_templates import ARCHIVES, ROOT

FILE = "/tests/test-chat.cpp"
_ENTRY = "test_template_output_peg_parsers"


class Form(Enum):
    """The forms of cases."""

    WHOLE = auto()  # an answer from its first character to its last
    PARTIAL = auto()  # judged before its end
    CONTINUED = auto()  # goes on after a text of the request
    RAW = auto()  # asks for thinking inside the text, which no request to mlxserve can


@dataclass(frozen=True, slots=True)
class Message:
    content: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A case of the file.

    thinking: as the request turns it on or off
    is_raw: the request asks for thinking inside the text
    """

    template: str
    line: int
    text: str
    expected: Message = field(default_factory=Message)
    tools: tuple[Mapping[str, Any], ...] = ()
    thinking: bool = True
    is_required: bool = False
    is_partial: bool = False
    is_continued: bool = False
    is_raw: bool = True

    @property
    def form(self) -> Form:
        if self.is_partial:
            return Form.PARTIAL
        if self.is_continued:
            return Form.CONTINUED
        return Form.RAW if self.is_raw and _MARKED.search(self.expected.content) else Form.WHOLE

    @property
    def name(self) -> str:
        return f"{self.template}:{self.line}"


@dataclass(frozen=True, slots=True)
class Unread:
    """A case that this reader does not understand."""

    line: int
    reason: str


_MARKED = re.compile(r"think>|THINK\]|_THINKING\|>|<\|channel\|?>")


@cache
def cases() -> Sequence[Case | Unread]:
    """All cases of the file; none without the archive."""
    archives = sorted(ROOT.glob(ARCHIVES))
    if not archives:
        return ()
    with tarfile.open(archives[-1]) as archive:
        member = next(each for each in archive if each.name.endswith(FILE))
        file = archive.extractfile(member)
        assert file is not None
        return cases_in(file.read().decode())


def cases_in(source: str) -> list[Case | Unread]:
    """The cases of a C++ file."""
    scope = _Scope({**_FUNCTIONS, "true": True, "false": False})
    found: list[Case | Unread] = []
    for statement in _statements(_tokens(source)):
        if statement:
            _declare_function(statement, scope)
            _declare(statement, scope)
    entry = scope.values.get(_ENTRY)
    if isinstance(entry, _Function):
        _run(entry.body, scope.inner(**dict.fromkeys(entry.parameters, False)), found)
    return found


# ---- the language


class _Unreadable(Exception):
    """Something that this reader does not understand."""


class _Token(NamedTuple):
    kind: str
    text: str
    line: int


_TOKEN = re.compile(
    r"""(?P<skip>\s+|//[^\n]*|/\*.*?\*/|^\#[^\n]*)
    |R"(?P<mark>[^(\s]*)\((?P<raw>.*?)\)(?P=mark)"
    |"(?P<string>(?:\\.|[^"\\])*)"
    |(?P<char>'(?:\\.|[^'\\])+')
    |(?P<name>[A-Za-z_]\w*(?:::\w+)*)
    |(?P<number>\d[\w.]*)
    |(?P<sign>.)""",
    re.VERBOSE | re.DOTALL | re.MULTILINE,
)
_ESCAPE = re.compile(rb"\\(?:x([0-9a-fA-F]+)|u([0-9a-fA-F]{4})|(.))", re.DOTALL)
_ESCAPES = {b"n": b"\n", b"t": b"\t", b"r": b"\r", b"0": b"\0"}
_CLOSERS = {"(": ")", "{": "}", "[": "]"}


def _tokens(source: str) -> list[_Token]:
    tokens = []
    line = 1
    for match in _TOKEN.finditer(source):
        kind = str(match.lastgroup)
        if kind == "raw":
            tokens.append(_Token("string", match["raw"], line))
        elif kind == "string":
            tokens.append(_Token("string", _unescaped(match["string"]), line))
        elif kind != "skip":
            tokens.append(_Token(kind, match[0], line))
        line += match[0].count("\n")
    return tokens


def _unescaped(text: str) -> str:
    def byte(match: re.Match[bytes]) -> bytes:
        if match[1]:
            return bytes([int(match[1], 16)])
        if match[2]:
            return chr(int(match[2], 16)).encode()
        return _ESCAPES.get(match[3], match[3])

    return _ESCAPE.sub(byte, text.encode()).decode()


def _closing(tokens: Sequence[_Token], at: int) -> int:
    """The place of the bracket that closes the one at this place."""
    depth = 0
    for place in range(at, len(tokens)):
        if tokens[place].kind == "sign":
            depth += tokens[place].text in _CLOSERS
            depth -= tokens[place].text in _CLOSERS.values()
            if not depth:
                return place
    raise _Unreadable("a bracket is not closed")


def _statements(tokens: Sequence[_Token]) -> Iterator[Sequence[_Token]]:
    """Split into statements; one with a block ends with it."""
    begin = at = 0
    while at < len(tokens):
        sign = tokens[at].text if tokens[at].kind == "sign" else ""
        if sign in _CLOSERS:
            before = tokens[at - 1] if at > begin else None
            at = _closing(tokens, at)
            if sign == "{" and (before is None or before.text in (")", "else")):
                yield tokens[begin : at + 1]
                begin = at + 1
        elif sign == ";":
            yield tokens[begin:at]
            begin = at + 1
        at += 1


@dataclass(frozen=True, slots=True)
class _Function:
    parameters: tuple[str, ...]
    body: Sequence[_Token]


@dataclass(slots=True)
class _Scope:
    values: dict[str, Any]

    def inner(self, **values: Any) -> _Scope:
        return _Scope({**self.values, **values})


class _Reader:
    """Evaluates expressions."""

    def __init__(self, tokens: Sequence[_Token], scope: _Scope) -> None:
        self._tokens, self._scope, self._at = tokens, scope, 0

    def sees(self, text: str) -> bool:
        if self._at >= len(self._tokens):
            return False
        token = self._tokens[self._at]
        return token.kind != "string" and token.text == text

    def accepts(self, text: str) -> bool:
        is_next = self.sees(text)
        self._at += is_next
        return is_next

    def take(self) -> _Token:
        if self._at >= len(self._tokens):
            raise _Unreadable("the end of the statement")
        self._at += 1
        return self._tokens[self._at - 1]

    def whole(self) -> Any:
        value = self.value()
        if self._at < len(self._tokens):
            raise _Unreadable(f"`{self._tokens[self._at].text}`")
        return value

    def value(self) -> Any:
        value = self._term()
        while self.accepts("+"):
            value += self._term()
        return value

    def values(self, closer: str) -> list[Any]:
        """Values up to a closing bracket."""
        values = []
        while not self.accepts(closer):
            values.append(self.value())
            if not self.accepts(",") and not self.sees(closer):
                raise _Unreadable(f"`{self.take().text}`")
        return values

    def skip(self) -> None:
        """Pass over everything up to the bracket that closes the last one."""
        self._at = _closing(self._tokens, self._at - 1) + 1

    def _term(self) -> Any:
        token = self.take()
        if token.kind == "string":
            text = token.text
            while self._at < len(self._tokens) and self._tokens[self._at].kind == "string":
                text += self.take().text
            return text
        if token.text == "{":
            return self.values("}")
        if token.kind == "name":
            return self._named(token.text)
        raise _Unreadable(f"`{token.text}`")

    def _named(self, name: str) -> Any:
        if name.isupper():
            return name
        if name not in self._scope.values:
            raise _Unreadable(f"`{name}`")
        value = self._scope.values[name]
        if callable(value):
            if not self.accepts("("):
                raise _Unreadable(f"`{name}`")
            return value(*self.values(")"))
        return value


# ---- statements


def _declare_function(statement: Sequence[_Token], scope: _Scope) -> None:
    at = next((at for at, token in enumerate(statement) if token.text == "("), 0)
    if at and statement[-1].text == "}" and (name := statement[at - 1].text) not in scope.values:
        end = _closing(statement, at)
        inside = [*statement[at + 1 : end], _Token("sign", ",", 0)]
        parameters = [a.text for a, b in pairwise(inside) if b.text == ","]
        body = statement[end + 1 :][1:-1]
        scope.values[name] = _Function(tuple(parameters), body)


def _run(tokens: Sequence[_Token], scope: _Scope, found: list[Case | Unread]) -> None:
    for statement in _statements(tokens):
        _execute(statement, scope, found)


def _execute(statement: Sequence[_Token], scope: _Scope, found: list[Case | Unread]) -> None:
    if not statement:
        return
    texts = [token.text for token in statement]
    if texts[0] == "{":
        _run(statement[1:-1], scope.inner(), found)
    elif texts[0] == "for":
        _loop(statement, scope, found)
    elif texts[1:4] == [".", "test", "("]:
        try:
            found.append(_case(statement, scope))
        except _Unreadable as error:
            found.append(Unread(statement[0].line, str(error)))
    elif isinstance(called := scope.values.get(texts[0]), _Function):
        arguments = _Reader(statement[2:], scope).values(")")
        values = dict(zip(called.parameters, arguments, strict=True))
        _run(called.body, scope.inner(**values), found)
    else:
        _declare(statement, scope)


def _loop(statement: Sequence[_Token], scope: _Scope, found: list[Case | Unread]) -> None:
    end = _closing(statement, 1)
    colon = next(at for at, token in enumerate(statement) if token.text == ":")
    for value in _Reader(statement[colon + 1 : end], scope).whole():
        _run(statement[end + 2 : -1], scope.inner(**{statement[colon - 1].text: value}), found)


def _declare(statement: Sequence[_Token], scope: _Scope) -> None:
    """Keep the value of a constant. What needs one that could not be read is `Unread`."""
    at = next((at for at, token in enumerate(statement) if token.text in ("=", "{", "(")), 0)
    name = statement[at - 1].text
    if not at or statement[at].text == "(" or statement[0].text in ("class", "struct"):
        return
    try:
        value = _Reader(statement[at + (statement[at].text == "=") :], scope).whole()
        is_tool = statement[at - 2].text == "common_chat_tool"
        scope.values[name] = _tool(*value) if is_tool else value
    except (_Unreadable, TypeError):
        scope.values.pop(name, None)


# ---- cases


def _case(statement: Sequence[_Token], scope: _Scope) -> Case:
    reader = _Reader(statement, scope)
    template = scope.values.get(reader.take().text)
    if not isinstance(template, _Tester):
        raise _Unreadable(f"`{statement[0].text}`")
    case = Case(template=Path(template.path).stem, line=statement[0].line, text="")
    while reader.accepts("."):
        name = reader.take().text
        if not reader.accepts("("):
            raise _Unreadable(f"`{name}`")
        if name in _OTHER_STEPS:
            reader.skip()
            continue
        arguments = reader.values(")")
        if name == "run":
            return case
        if name not in _STEPS:
            raise _Unreadable(f"`.{name}`")
        case = _STEPS[name](case, *arguments)
    raise _Unreadable("no `.run()`")


def _expecting(**values: Callable[[Any], Any]) -> Callable[[Case, Any], Case]:
    def step(case: Case, value: Any) -> Case:
        fields = {name: convert(value) for name, convert in values.items()}
        return replace(case, expected=replace(case.expected, **fields))

    return step


def _tools(values: Sequence[Any]) -> tuple[Mapping[str, Any], ...]:
    """Tools, by their names or written here."""
    return tuple(_tool(*value) if isinstance(value, list) else value for value in values)


def _calls(calls: Sequence[Sequence[Any]]) -> tuple[tuple[str, str], ...]:
    return tuple((call[0], call[1]) for call in calls)


# The steps of a chain that change the answer, or its reading.
_STEPS: Mapping[str, Callable[..., Case]] = {
    "test": lambda case, text: replace(case, text=text),
    "tools": lambda case, tools: replace(case, tools=_tools(tools)),
    "enable_thinking": lambda case, value: replace(case, thinking=value),
    "reasoning_format": lambda case, value: replace(case, is_raw=value.endswith("_NONE")),
    "is_partial": lambda case, value: replace(case, is_partial=value),
    "continue_final_message": lambda case, _: replace(case, is_continued=True),
    "tool_choice": lambda case, value: replace(case, is_required=value.endswith("_REQUIRED")),
    "expect": lambda case, message: replace(case, expected=message),
    "expect_content": _expecting(content=str),
    "expect_reasoning": _expecting(reasoning=str),
    "expect_tool_calls": _expecting(calls=_calls),
}
# A request that does not say `parallel_tool_calls` lets mlxserve's models call several tools.
_OTHER_STEPS = (
    "add_generation_prompt",
    "expect_reconstruction",
    "json_schema",
    "messages",
    "parallel_tool_calls",
)


# ---- the functions of the file


@dataclass(frozen=True, slots=True)
class _Tester:
    path: str


def _tool(name: str, description: str, parameters: str) -> Mapping[str, Any]:
    function = {
        "name": name,
        "description": description,
        "parameters": json.loads(parameters),
    }
    return {"type": "function", "function": function}


def _message(
    content: str, reasoning: str = "", name: str = "", arguments: str = "", _: str = ""
) -> Message:
    return Message(content, reasoning, ((name, arguments),) if name else ())


_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "peg_tester": lambda path, *_: _Tester(path),
    "simple_assist_msg": _message,
    "message_with_tool_calls": lambda name, arguments: _message("", "", name, arguments),
    "message_with_tool_calls_and_reasoning": lambda name, arguments, reasoning: _message(
        "", reasoning, name, arguments
    ),
    "message_with_reasoning_and_tool_call": lambda reasoning, name, arguments: _message(
        "", reasoning, name, arguments
    ),
    "message_with_content_and_tool_call": lambda content, name, arguments: _message(
        content, "", name, arguments
    ),
    "message_with_reasoning_content_and_multiple_tool_calls": lambda reasoning, content, calls: (
        Message(content, reasoning, _calls(calls))
    ),
    "std::string": str,
}
