"""Metal text as a list of tokens that can be edited and joined again, line numbers kept.

Knows brackets and white space, and nothing about what the words mean.
"""

import re
from collections.abc import Iterable
from typing import Literal, NamedTuple, TypeAlias

from tests.emulator.errors import MetalSourceError

Kind: TypeAlias = Literal["line", "space", "string", "number", "word", "op"]

_TOKEN = re.compile(
    r"""(?P<line>^[ \t]*\#[^\n]*)
    |(?P<space>\s+)
    |(?P<string>"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')
    |(?P<number>\.?\d(?:[eEpP][+-]|[\w.'])*)
    |(?P<word>[A-Za-z_]\w*)
    |(?P<op>\[\[|::|->|\+\+|--|<<=|>>=|<=|>=|==|!=|&&|\|\||[-+*/%&|^]=|.)""",
    re.X | re.M,
)
_LINE_MARKER = re.compile(r'\s*#\s*(?:line\s+)?(\d+)\s+"([^"]*)"')

# `]]` is two tokens, since it may also close two subscripts.
_DEPTH = {"(": 1, "[": 1, "{": 1, "[[": 2, ")": -1, "]": -1, "}": -1}


class Token(NamedTuple):
    """One token; `line` is the preprocessor's `# 12 "file"`, kept for the compiler."""

    kind: Kind
    text: str
    file: str
    number: int  # of its line

    @property
    def is_code(self) -> bool:
        return self.kind not in ("space", "line")

    @property
    def is_word(self) -> bool:
        return self.kind == "word"

    def blank(self, text: str | None = None) -> "Token":
        """White space in its place; as many lines as before unless `text` is given."""
        filler = "\n" * self.text.count("\n") if text is None else text
        return self.with_text("space", filler)

    def with_text(self, kind: Kind, text: str) -> "Token":
        """Other text in its place."""
        return Token(kind, text, self.file, self.number)

    def error(self, message: str) -> MetalSourceError:
        return MetalSourceError(f"{self.file}:{self.number}: {message}")


def depth_of(token: Token) -> int:
    """How many brackets the token opens (or, negative, closes)."""
    return _DEPTH.get(token.text, 0) if token.kind == "op" else 0


def code(tokens: Iterable[Token]) -> list[Token]:
    """Only what the compiler reads."""
    return [t for t in tokens if t.is_code]


class TokenList(list[Token]):
    """A list of tokens with the walks every pass needs; positions are list indices."""

    @classmethod
    def of(cls, source: str) -> "TokenList":
        out, file, number = cls(), "<source>", 1
        for match in _TOKEN.finditer(source):
            kind, text = match.lastgroup, match.group()
            if kind == "line" and (marker := _LINE_MARKER.match(text)):
                number, file = int(marker.group(1)) - 1, marker.group(2)
            out.append(Token(kind, text, file, number))  # type: ignore[arg-type]  # a group's name
            number += text.count("\n")
        return out

    def after(self, i: int) -> int:
        """The next code token; `len(self)` at the end."""
        i += 1
        while i < len(self) and not self[i].is_code:
            i += 1
        return i

    def before(self, i: int) -> int:
        """The previous code token; -1 at the start."""
        i -= 1
        while i >= 0 and not self[i].is_code:
            i -= 1
        return i

    def text_at(self, i: int) -> str:
        """The text there, or an empty string beyond either end."""
        return self[i].text if 0 <= i < len(self) else ""

    def is_word_at(self, i: int) -> bool:
        return 0 <= i < len(self) and self[i].is_word

    def text(self, start: int, stop: int) -> str:
        return "".join(t.text for t in self[start:stop] if t.kind != "line")

    def find(self, i: int, *texts: str) -> int:
        """The first token at or after `i` that is one of `texts`."""
        while i < len(self) and self[i].text not in texts:
            i += 1
        if i == len(self):
            raise self[-1].error(f"expected {' or '.join(repr(t) for t in texts)}")
        return i

    def closing(self, i: int) -> int:
        """The token that closes the bracket (or `[[`) at `i`."""
        depth = 0
        for k in range(i, len(self)):
            depth += depth_of(self[k])
            if depth == 0:
                return k
        raise self[i].error(f"'{self[i].text}' is never closed")

    def closing_angle(self, i: int) -> int | None:
        """The `>` that closes the `<` at `i`; None if that is a comparison."""
        depth = 0
        for k in range(i, len(self)):
            text = self[k].text
            if text in (";", "{"):
                return None
            depth += {"<": 1, ">": -1}.get(text, 0)
            if depth == 0:
                return k
        return None

    def statement_end(self, i: int) -> int:
        """The `;` that ends the statement at `i`, over any brackets."""
        while i < len(self) and self[i].text != ";":
            i = self.closing(i) + 1 if depth_of(self[i]) > 0 else i + 1
        return i

    def split(self, start: int, stop: int, separator: str = ",") -> list[list[Token]]:
        """The parts between separators outside brackets, without the empty ones."""
        parts: list[list[Token]] = [[]]
        depth = angles = 0
        for token in self[start:stop]:
            depth += depth_of(token)
            if depth == 0:
                angles += {"<": 1, ">": -1}.get(token.text, 0)
            if token.text == separator and depth == 0 and angles == 0:
                parts.append([])
            else:
                parts[-1].append(token)
        return [part for part in parts if code(part)]

    def joined(self) -> str:
        return "".join(t.text for t in self)
