"""Metal text into C++ text that clang compiles for the host.

Most of Metal is C++ once the address spaces are type attributes (include/msl/language.h). What is
left, rewritten here token by token with line numbers kept:

    threadgroup T x[N];                 a reference into the threadgroup's arena
    float4(a, b.xy), vec<T, 2>(x)       metal::__make<...>(...)
    (float4)x, static_cast<float4>(x)   the same
    1.0, 2.5h, 1.0bf                    1.0f, half(2.5f), bfloat(1.0f)
    constant int N [[function_constant(0)]];    a constexpr
    constant int* p[2] in a parameter list      a pointer
    attributes                          nothing
"""

import re
from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import TypeAlias

from tests.emulator.exports import Exports
from tests.emulator.rules import VECTORS
from tests.emulator.tokens import Token, TokenList, code, depth_of

Constants: TypeAlias = Mapping[int | str, bool | int | float]
Replaced: TypeAlias = tuple[int, str] | None  # the token to go on with, and the new text

FIRST_VARIABLE = 4  # MAX_THREADGROUP_ARGUMENTS in mslrt.h: their places come first

_FLOAT = re.compile(r"((?:\d+\.\d*|\.\d+|\d+)(?:[eE][+-]?\d+)?)(bf|BF|[hHfF]?)")
_SPACED = ("device", "threadgroup", "constant")
_NOT_CONSTRUCTED = (".", "->", "operator", "~", "struct", "class", "typename", "enum")
_BEFORE_EXPRESSION = ("return", "else", "case", "constexpr")


def vector_names(tokens: TokenList) -> frozenset[str]:
    """Names whose call may construct a vector: vectors, aliases and template parameters."""
    names = set(VECTORS)
    for i, token in enumerate(tokens):
        if not token.is_word:
            continue
        following = tokens.after(i)
        if token.text in ("typename", "class"):
            if tokens.is_word_at(following) and tokens.text_at(tokens.before(i)) in ("<", ","):
                names.add(tokens[following].text)
        elif token.text == "using":
            if tokens.is_word_at(following) and tokens.text_at(tokens.after(following)) == "=":
                names.add(tokens[following].text)
        elif token.text == "typedef":
            last = tokens.before(tokens.find(i, ";"))
            if tokens.is_word_at(last):
                names.add(tokens[last].text)
    return frozenset(names)


# ---- declarations that C++ spells otherwise -------------------------------------------------------


def point_array_parameters(tokens: TokenList) -> None:
    """`constant int64_t s[2]` as a parameter becomes `constant int64_t *s`."""
    brackets: list[str] = []
    for i, token in enumerate(tokens):
        if (depth := depth_of(token)) > 0:
            brackets += [token.text[0]] * depth
        elif depth < 0 and brackets:
            brackets.pop()
        elif token.is_word and token.text in _SPACED and brackets and brackets[-1] == "(":
            _point_array_parameter(tokens, i)


def _point_array_parameter(tokens: TokenList, i: int) -> None:
    end, angles, name = i + 1, 0, -1
    while end < len(tokens) and (
        angles or tokens[end].text not in (",", ")", "*", "&", "[", "(", ";")
    ):
        angles += {"<": 1, ">": -1}.get(tokens[end].text, 0)
        if tokens[end].is_word:
            name = end
        end += 1
    if tokens.text_at(end) != "[" or name < 0 or tokens[name - 1].kind != "space":
        return
    closing = tokens.closing(end)
    if tokens.text_at(tokens.after(closing)) not in (",", ")"):
        return
    tokens[name - 1] = tokens[name - 1].with_text("op", "*")
    for k in range(end, closing + 1):
        tokens[k] = tokens[k].blank()


def drop_qualified_members(tokens: TokenList) -> None:
    """Remove member functions qualified with an address space, keep their `thread` overloads.

    For C++, which has no such members.
    """
    spans = [
        _member_span(tokens, i, close)
        for i, token in enumerate(tokens)
        if token.is_word and token.text in _SPACED and (close := _qualifies(tokens, i)) is not None
    ]
    for start, stop in reversed(spans):
        text = "".join(t.text for t in tokens[start:stop])
        tokens[start:stop] = [tokens[start].blank("\n" * text.count("\n") or " ")]


def drop_thread_members(tokens: TokenList) -> None:
    """`f() thread` -> `f()`: for C++ for OpenCL, where `this` is then generic."""
    for i, token in enumerate(tokens):
        following = tokens.text_at(tokens.after(i))
        if token.text != "thread" or following not in ("{", ":", ";", "noexcept"):
            continue
        previous = tokens.before(i)
        if tokens.text_at(previous) == "const":
            previous = tokens.before(previous)
        if tokens.text_at(previous) == ")":
            tokens[i] = token.blank(" ")


def _qualifies(tokens: TokenList, i: int) -> int | None:
    """The `)` of `f() const device {` when the address space is at `i`."""
    if tokens.text_at(tokens.after(i)) not in ("{", ":", ";"):
        return None
    previous = tokens.before(i)
    if tokens.text_at(previous) == "const":
        previous = tokens.before(previous)
    return previous if tokens.text_at(previous) == ")" else None


def _member_span(tokens: TokenList, i: int, close: int) -> tuple[int, int]:
    start, depth = close, 0
    while start >= 0:
        token = tokens[start]
        if depth == 0 and token.text in (";", "{", "}"):
            break
        depth -= depth_of(token)
        start -= 1
    end = tokens.after(i)
    if tokens[end].text == ":":  # a constructor's initialisers
        while tokens[end].text != "{":
            end = tokens.closing(end) + 1 if tokens[end].text == "(" else end + 1
    if tokens[end].text == "{":
        end = tokens.closing(end)
        if tokens.text_at(tokens.after(end)) == ";":
            end = tokens.after(end)
    return start + 1, end + 1


def _literal(value: bool | int | float) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value!r}f" if isinstance(value, float) else repr(value)


# ---- the pass that writes the text ----------------------------------------------------------------


class Rewriter:
    """One walk over the tokens; every method answers what replaces the token at `i`, if anything."""

    def __init__(
        self, tokens: TokenList, names: frozenset[str], exports: Exports, constants: Constants
    ) -> None:
        self._tokens = tokens
        self._names = names
        self._exports = exports
        self._constants = constants
        self._num_variables = 0
        self._braces = list(accumulate({"{": 1, "}": -1}.get(t.text, 0) for t in tokens))
        self._rules: dict[str, Callable[[int], Replaced]] = {
            "threadgroup": self._threadgroup_variable,
            "constant": self._function_constant,
            "static_cast": self._static_cast,
            "(": self._vector_cast,
        }
        self.warnings: list[str] = []

    def text(self) -> str:
        out: list[str] = []
        i = 0
        while i < len(self._tokens):
            token = self._tokens[i]
            if i in self._exports.dropped:
                out.append("\n" * token.text.count("\n"))
                i += 1
                continue
            i, text = self._replacement(i) or (i + 1, token.text)
            out.append(text)
        return "".join(out)

    def _replacement(self, i: int) -> Replaced:
        token = self._tokens[i]
        if token.kind == "number":
            return self._number(i)
        if rule := self._rules.get(token.text):
            return rule(i)
        if token.text == "vec" or token.text in self._names:
            return self._constructor(i) or self._constructed_variable(i)
        return None

    def _expression(self, tokens: list[Token]) -> str:
        """The constructors and literals of an already delimited expression."""
        if not tokens:
            return ""
        inner = Rewriter(TokenList(tokens), self._names, Exports(), self._constants)
        return inner.text()

    def _number(self, i: int) -> Replaced:
        token = self._tokens[i]
        if token.text.startswith(("0x", "0X")):
            return None
        match = _FLOAT.fullmatch(token.text)
        if not match:
            return None
        digits, suffix = match.group(1), match.group(2).lower()
        is_real = re.search("[.eE]", digits) is not None
        real = digits if is_real else f"{digits}."
        if suffix == "h":
            return i + 1, f"half({real}f)"
        if suffix == "bf":
            return i + 1, f"bfloat({real}f)"
        return (i + 1, f"{digits}f") if suffix == "" and is_real else None

    # -- threadgroup variables

    def _starts_statement(self, i: int) -> bool:
        previous = self._tokens.before(i)
        return previous < 0 or self._tokens[previous].text in (";", "{", "}")

    def _threadgroup_variable(self, i: int) -> Replaced:
        tokens = self._tokens
        if not self._starts_statement(i):
            return None
        stop = self._declarator_end(i)
        if stop is None:
            return None
        end = tokens.statement_end(stop)
        if not self._exports.in_body(i):
            raise tokens[i].error("threadgroup variable outside a kernel function")
        if tokens[stop].text == "=":
            at = f"{tokens[i].file}:{tokens[i].number}"
            self.warnings.append(f"{at}: a threadgroup variable cannot have an initialiser")
        declared = self._declare(tokens.split(i + 1, stop))
        return end + 1, declared + "\n" * tokens.text(i, end).count("\n")

    def _declarator_end(self, i: int) -> int | None:
        """`;` or `=` of the declaration; None when it declares a pointer or a function."""
        tokens, k, angles = self._tokens, i + 1, 0
        while tokens[k].text not in (";", "=", "("):
            if angles == 0 and tokens[k].text in ("*", "&"):
                return None
            angles += {"<": 1, ">": -1}.get(tokens[k].text, 0)
            k = tokens.closing(k) + 1 if angles == 0 and tokens[k].text == "[" else k + 1
        return None if tokens[k].text == "(" else k

    def _declare(self, declarators: list[list[Token]]) -> str:
        first = code(declarators[0])
        subscript = next((k for k, t in enumerate(first) if t.text == "["), len(first))
        type_ = " ".join(t.text for t in first[: subscript - 1])
        variables = [first[subscript - 1 :], *(code(d) for d in declarators[1:])]
        return "".join(self._variable(type_, variable) for variable in variables)

    def _variable(self, type_: str, declarator: list[Token]) -> str:
        name = declarator[0].text
        extents = " ".join(t.text for t in declarator[1:])
        k = self._num_variables
        self._num_variables += 1
        alias = f"__tgt{k}"
        return (
            f"typedef {type_} {alias} {extents}; threadgroup {alias} &{name} = "
            f"*(threadgroup {alias} *)(ulong)"
            f'__msl_tg_var({k + FIRST_VARIABLE}, sizeof({alias}), alignof({alias}), "{name}"); '
        )

    # -- function constants

    def _function_constant(self, i: int) -> Replaced:
        tokens = self._tokens
        if not self._starts_statement(i):
            return None
        at = i
        while at < len(tokens) and tokens[at].text not in (";", "{", "(", "[["):
            at += 1
        is_one = tokens.text_at(at) == "[["
        if not is_one or tokens.text_at(tokens.after(at)) != "function_constant":
            return None
        closing = tokens.closing(at)
        index = int(next(t.text for t in tokens[at:closing] if t.kind == "number"))
        *type_, name = (t.text for t in code(tokens[i + 1 : at]))
        value = self._constants.get(index, self._constants.get(name, 0))
        return (
            closing + 1,
            f"static constexpr constant {' '.join(type_)} {name} = {_literal(value)}",
        )

    # -- vectors

    def _constructor(self, i: int) -> Replaced:
        """`float4(`: the type's name becomes a call, its arguments are walked as usual."""
        tokens, token = self._tokens, self._tokens[i]
        if not self._may_construct(tokens.before(i)):
            return None
        end = i
        if token.text == "vec":
            opening = tokens.after(i)
            closing = tokens.closing_angle(opening) if tokens.text_at(opening) == "<" else None
            if closing is None:
                return None
            end = closing
        argument = tokens.after(end)
        if tokens.text_at(argument) != "(" or self._is_declarator(argument):
            return None
        return end + 1, f"metal::__make<{tokens.text(i, end + 1)}>"

    def _may_construct(self, previous: int) -> bool:
        text = self._tokens.text_at(previous)
        if text in _NOT_CONSTRUCTED:
            return False
        return not self._tokens.is_word_at(previous) or text in _BEFORE_EXPRESSION

    def _is_declarator(self, opening: int) -> bool:
        """`T (&)` and `T (*)` name types."""
        first = self._tokens.after(opening)
        closes = self._tokens.text_at(self._tokens.after(first)) == ")"
        return self._tokens.text_at(first) in ("&", "*") and closes

    def _constructed_variable(self, i: int) -> Replaced:
        """`float2 v(a, b);` -> `float2 v = metal::__make<float2>(a, b);`"""
        tokens, type_ = self._tokens, self._tokens[i].text
        if type_ not in VECTORS or self._braces[i] == 0:  # outside, it declares a function
            return None
        name = tokens.after(i)
        opening = tokens.after(name)
        if not tokens.is_word_at(name) or tokens.text_at(opening) != "(":
            return None
        closing = tokens.closing(opening)
        is_statement = tokens.text_at(tokens.after(closing)) == ";"
        if not is_statement or self._is_prototype(opening):
            return None
        arguments = self._expression(tokens[opening + 1 : closing])
        return closing + 1, f"{type_} {tokens[name].text} = metal::__make<{type_}>({arguments})"

    def _is_prototype(self, opening: int) -> bool:
        tokens = self._tokens
        first = tokens.after(opening)
        if tokens.text_at(first) in ("const", "thread", ")", *_SPACED):
            return True
        return tokens.is_word_at(first) and tokens.is_word_at(tokens.after(first))

    def _static_cast(self, i: int) -> Replaced:
        tokens = self._tokens
        opening = tokens.after(i)
        closing = tokens.closing_angle(opening)
        if closing is None:
            return None
        type_ = tokens.text(opening + 1, closing).strip()
        if type_ not in self._names and not type_.startswith(("vec<", "metal::vec<")):
            return None
        return closing + 1, f"metal::__static_cast<{type_}>"

    def _vector_cast(self, i: int) -> Replaced:
        """`(float4)x`, with x a postfix expression."""
        tokens = self._tokens
        type_ = tokens.after(i)
        closing = tokens.after(type_)
        is_cast = tokens.text_at(type_) in VECTORS and tokens.text_at(closing) == ")"
        if not is_cast:
            return None
        operand = tokens.after(closing)
        if tokens[operand].kind not in ("word", "number") and tokens[operand].text != "(":
            return None
        end = self._postfix_end(operand)
        inner = self._expression(tokens[operand : end + 1])
        return end + 1, f"metal::__make<{tokens[type_].text}>({inner})"

    def _postfix_end(self, i: int) -> int:
        tokens = self._tokens
        end = tokens.closing(i) if tokens[i].text == "(" else i
        while (following := tokens.after(end)) < len(tokens):
            if tokens[following].text in ("(", "["):
                end = tokens.closing(following)
            elif tokens[following].text in (".", "->", "::"):
                end = tokens.after(following)
            else:
                break
        return end
