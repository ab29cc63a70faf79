"""Metal text into C++ text that clang compiles for the host.

Most of Metal is C++ once the address spaces are type attributes (include/msl/language.h). What is
left, rewritten here token by token with line numbers kept:

    threadgroup T x[N];                 a reference into the threadgroup's arena
    float4(a, b.xy), vec<T, 2>(x)       metal::__make<...>(...)
    (float4)x, static_cast<float4>(x)   the same
    1.0, 2.5h, 1.0bf                    1.0f, half(2.5f), bfloat(1.0f)
    constant int N [[function_constant(0)]];    a constexpr
    f({a, b})                           f(metal::__braces(a, b))
    *(threadgroup T*)p = *(device T*)q  metal::__assign(p, q), as C++ copies no structs between spaces
    attributes                          nothing
"""

import re
from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import TypeAlias

from tests.emulator.declarations import SPACES
from tests.emulator.exports import Exports
from tests.emulator.rules import VECTORS
from tests.emulator.tokens import Token, TokenList, code, depth_of

Constants: TypeAlias = Mapping[int | str, bool | int | float]
Replaced: TypeAlias = tuple[int, str] | None  # the token to go on with, and the new text

FIRST_VARIABLE = 4  # MAX_THREADGROUP_ARGUMENTS in mslrt.h: their places come first

_FLOAT = re.compile(r"((?:\d+\.\d*|\.\d+|\d+)(?:[eE][+-]?\d+)?)(bf|BF|[hHfF]?)")
_NOT_CONSTRUCTED = (".", "->", "operator", "~", "struct", "class", "typename", "enum")
_DECLARING = frozenset(("typename", "class", "using", "typedef"))
_BEFORE_EXPRESSION = ("return", "else", "case", "constexpr")


def vector_names(tokens: TokenList) -> frozenset[str]:
    """Names whose call may construct a vector: vectors, aliases and template parameters."""
    names = set(VECTORS)
    for i, token in enumerate(tokens):
        if token.text not in _DECLARING:
            continue
        following = tokens.after(i)
        if token.text in ("typename", "class"):
            if tokens.is_word_at(following) and tokens.text_at(tokens.before(i)) in ("<", ","):
                names.add(tokens[following].text)
        elif token.text == "using":
            if tokens.is_word_at(following) and tokens.text_at(tokens.after(following)) == "=":
                names.add(tokens[following].text)
        else:
            last = tokens.before(tokens.find(i, ";"))
            if tokens.is_word_at(last):
                names.add(tokens[last].text)
    return frozenset(names)


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
            "*": lambda i: self._assignment(i) or self._load(i),
            "{": self._braced_argument,
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
            replaced = self._replacement(i) if token.is_code else None
            i, text = replaced or (i + 1, token.text)
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

    # -- copies between address spaces

    def _assignment(self, i: int) -> Replaced:
        """`*((threadgroup T*)p) = *((const device T*)q);`, which C++ refuses for structs."""
        tokens = self._tokens
        if not self._starts_statement(i) or not self._is_space_cast(to := tokens.after(i)):
            return None
        to_end = tokens.closing(to)
        equals = tokens.after(to_end)
        star = tokens.after(equals)
        source = tokens.after(star)
        if (tokens.text_at(equals), tokens.text_at(star)) != ("=", "*"):
            return None
        if not self._is_space_cast(source):
            return None
        end = tokens.closing(source)
        if tokens.text_at(tokens.after(end)) != ";":
            return None
        left = self._expression(tokens[to : to_end + 1])
        right = self._expression(tokens[source : end + 1])
        return end + 1, f"metal::__assign({left}, {right})"

    def _load(self, i: int) -> Replaced:
        """`x = *((device T*)p);`"""
        tokens = self._tokens
        source = tokens.after(i)
        if tokens.text_at(tokens.before(i)) != "=" or not self._is_space_cast(source):
            return None
        end = tokens.closing(source)
        if tokens.text_at(tokens.after(end)) != ";":
            return None
        return end + 1, f"metal::__load({self._expression(tokens[source : end + 1])})"

    def _is_space_cast(self, i: int) -> bool:
        """`((device T*)...)`, in brackets of its own."""
        tokens = self._tokens
        inner = tokens.after(i)
        word = tokens.after(inner)
        if tokens.text_at(word) == "const":
            word = tokens.after(word)
        is_bracketed = (tokens.text_at(i), tokens.text_at(inner)) == ("(", "(")
        return is_bracketed and tokens.text_at(word) in SPACES

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
        space = tokens.before(tokens.before(i)) if tokens.text_at(tokens.before(i)) == "::" else -1
        prefix = "" if tokens.text_at(space) == "metal" else "metal::"
        return end + 1, f"{prefix}__make<{tokens.text(i, end + 1)}>"

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
        if tokens.text_at(first) in ("const", "thread", ")", *SPACES):
            return True
        return tokens.is_word_at(first) and tokens.is_word_at(tokens.after(first))

    def _braced_argument(self, i: int) -> Replaced:
        """`f({a, b}, c)`: two parts or more are a vector."""
        tokens = self._tokens
        previous = tokens.before(i)
        opening = previous if tokens.text_at(previous) == "(" else self._call_of(previous)
        before = tokens.before(opening) if opening is not None else -1
        if not (tokens.is_word_at(before) or tokens.text_at(before) == ">"):
            return None
        closing = tokens.closing(i)
        if len(tokens.split(i + 1, closing)) < 2:
            return None
        return closing + 1, f"metal::__braces({self._expression(tokens[i + 1 : closing])})"

    def _call_of(self, comma: int) -> int | None:
        """The `(` that holds this comma."""
        tokens = self._tokens
        if tokens.text_at(comma) != ",":
            return None
        depth, at = 0, comma
        while at >= 0:
            depth -= depth_of(tokens[at])
            if depth < 0:
                return at if tokens.text_at(at) == "(" else None
            at -= 1
        return None

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
