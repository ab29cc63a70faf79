"""Calls with each argument in markup of its own, and texts as they are."""

from __future__ import annotations

import re
from collections.abc import Sequence, Set
from typing import Any

from mlxserve.text.parsing.cursor import BLANKS, Cursor, Reading
from mlxserve.text.parsing.formats import LONGEST_HEADER, NAME
from mlxserve.text.parsing.json_calls import read_value
from mlxserve.text.parsing.syntax import CallSyntax, Section
from mlxserve.text.parsing.values import Malformed, kinds_of, object_json, properties_of, value_json

_FIELDS = {
    "name": NAME,
    "key": r"[^\n<]+?",
    "count": r"\d+",
    "string": r"\w+",
    "type": r"\w+",
}
_CDATA = ("<![CDATA[", "]]>")


class ElementSyntax(CallSyntax):
    """`<function=NAME><parameter=KEY>VALUE</parameter></function>`, in each format's own markup."""

    def __init__(self, section: Section) -> None:
        super().__init__(section)
        row = section.row
        head, _, tail = row.call.partition("$parameters")
        key, _, end = row.parameter.partition("$value")
        self._head, self._key = _Head(head), _Head(key)
        self._value_end, self._call_end = end.strip(), tail.strip()
        self._is_padded = key.endswith("\n")
        # What may begin another call, also inside a value that was never closed.
        self._opener = (row.joint is not None and self._head.begun) or row.starts[0]

    def read_call(self) -> Reading[None]:
        cursor = self.cursor
        yield from cursor.skip()
        ends = (self._key.begun, "{", self._call_end, *self.row.ends, *self.row.starts)
        fields = yield from self._head.read(cursor, *ends)
        name = fields["name"]
        self.check(name)
        properties = properties_of(self.section.schemas.get(name))
        arguments: dict[str, str] = {}
        while not fields["closed"] and not (yield from self._is_closed()):
            if (yield from cursor.sees("{" if not self.row.block[0] else self.row.block[0])):
                yield from self._read_block(name)
                return
            said = yield from self._key.read(cursor)
            key = _attribute(said["key"].strip())
            kind = said.get("string") or said.get("type")
            is_text = None if kind is None else kind in ("true", "string")
            siblings = properties.keys() - arguments.keys() - {key}
            text = "" if said["closed"] else (yield from self._read_text(siblings))
            arguments[key] = value_json(text, kinds_of(properties.get(key)), is_text=is_text)
        if not arguments and not self._head.begun and name not in self.section.schemas:
            # A word between the markers.
            raise Malformed
        yield from self.emit(name, object_json(arguments))

    def _is_closed(self) -> Reading[bool]:
        """True if the call ends here: by its own end, or by that of the section."""
        yield from self.cursor.skip()
        if self._call_end and (yield from self.cursor.accepts(self._call_end)):
            return True
        begins = self.row.starts if not self._call_end else ()
        return (yield from self.cursor.sees_any((*self.row.ends, *begins)))

    def _read_block(self, name: str) -> Reading[None]:
        """Read arguments that are one JSON object after all."""
        begin, end = self.row.block
        yield from self.cursor.expect(begin)
        arguments = yield from read_value(self.cursor)
        yield from self.cursor.skip()
        if end:
            yield from self.cursor.expect(end)
        if not (yield from self._is_closed()):
            raise Malformed
        yield from self.emit(name, arguments)

    def _read_text(self, siblings: Set[str]) -> Reading[str]:
        """Read a value's text. Raises Malformed if another call begins in it.

        It ends at its last closing marker before another argument or the end of the call.
        siblings: other arguments, whose opening marker on a line of its own ends it, too
        """
        cursor, end = self.cursor, self._value_end
        if self.row.is_cdata and (yield from cursor.accepts(_CDATA[0])):
            end = f"{_CDATA[1]}{end}"
        sibling = f"\n{self._key.begun}" if self._is_padded else ""
        openers = [f"{key}{self._key.tail}" for key in siblings]

        def is_end(marker: str) -> Reading[bool | None]:
            if marker == end:
                return (yield from self._ends_value())
            if marker == self._opener and (yield from self._sees_call()):
                raise Malformed
            if marker != sibling or not (yield from cursor.sees_any(openers)):
                return False
            cursor.rewind(cursor.num_taken - len(sibling))
            return True

        text = yield from cursor.extent(end, self._opener, sibling, is_end=is_end)
        return self._unpadded(text)

    def _unpadded(self, text: str) -> str:
        if self._is_padded:
            return text.removeprefix("\n").removesuffix("\n")
        if self.row.is_padded and len(text) > 1 and text[0] == text[-1] == "\n":
            return text[1:-1]
        return text

    def _ends_value(self) -> Reading[bool | None]:
        """True if a closing marker ends its value; None if the call ends there, and text follows."""
        cursor, row = self.cursor, self.row
        at, _ = yield from cursor.ahead(0)
        begins = (self._key.begun, *row.ends, *(() if self._call_end else row.starts))
        if (yield from cursor.sees_any(begins, at)):
            return True
        if not self._call_end or not (yield from cursor.sees(self._call_end, at)):
            return False
        if not row.ends:
            return True
        return (yield from self.ends_call(at + len(self._call_end), self._head.begun))

    def _sees_call(self) -> Reading[bool]:
        """True if a call to one of the tools comes next, after its opener."""
        cursor = self.cursor
        at, _ = yield from cursor.ahead(0)
        if self._opener != self._head.begun:
            if not (yield from cursor.sees(self._head.begun, at)):
                return False
            at += len(self._head.begun)
        for name in self.section.schemas:
            if (yield from cursor.sees(name, at)):
                _, char = yield from cursor.ahead(at + len(name))
                if char == (self._head.after or self._key.begun)[0]:
                    return True
        return False

    def may_follow(self) -> Reading[bool]:
        begun = self._head.begun
        return bool(begun) and (yield from self.cursor.sees(begun))


class _Head:
    """Markup with a name in it: `<function=$name>`.

    begun: what precedes the name
    after: what follows it; empty where the next marker ends it
    tail: the end of the markup; empty where the next marker ends it
    """

    def __init__(self, written: str) -> None:
        self.begun = written.partition("$")[0].strip()
        pieces = re.split(r"\$(\w+)", written.strip())
        self.after = str(pieces[2])
        self.tail = pieces[-1][pieces[-1].rfind("<") :] if pieces[-1].count("<") > 1 else pieces[-1]
        pieces[-1] = pieces[-1].removesuffix(self.tail).rstrip()
        fixed = [_pattern(piece) for piece in pieces[::2]]
        fields = [f"(?P<{name}>{_FIELDS[name]})" for name in pieces[1::2]]
        first = f"{fixed[0]}{fields[0]}"
        others = "".join(f"{a}{b}" for a, b in zip(fixed[1:-1], fields[1:], strict=True))
        self._pattern = re.compile(f"{first}{f'(?:{others})?' if others else ''}{fixed[-1]}")

    def read(self, cursor: Cursor, *ends: str) -> Reading[dict[str, str]]:
        """Read the fields of the markup; `closed` if it is an empty element.

        Without a tail it ends before one of `ends`.
        """
        if self.begun and not (yield from cursor.sees(self.begun)):
            raise Malformed
        closed = ""
        if self.tail:
            text, tail = yield from cursor.until(*_tails(self.tail), max_length=LONGEST_HEADER)
            closed = tail if tail != self.tail else ""
        else:
            text = yield from self._before(cursor, ends)
        match = self._pattern.fullmatch(text.rstrip())
        if match is None:
            raise Malformed
        return {**match.groupdict(), "closed": closed}

    def _before(self, cursor: Cursor, ends: Sequence[str]) -> Reading[str]:
        """Read a name and the blanks after it, up to one of the markers."""
        text = cursor.take(len(self.begun))
        while len(text) <= LONGEST_HEADER:
            char = yield from cursor.char()
            if char in f"{BLANKS}<{{":
                yield from cursor.skip()
                if (yield from cursor.sees_any(ends)):
                    return text
                break
            text += cursor.take(1)
        raise Malformed


def _tails(tail: str) -> tuple[str, ...]:
    """Return the end of an opening tag, and that of an empty element: `"/>`."""
    begun = tail.removesuffix(">")
    return (tail,) if begun == tail else (tail, f"{begun}/>", f"{begun} />")


def _pattern(markup: str) -> str:
    """Return a pattern in which the markup's white space is optional."""
    return r"\s*".join(re.escape(piece) for piece in re.split(r"\s+", markup))


def _attribute(text: str) -> str:
    return text.replace("&quot;", '"').replace("&amp;", "&")


class TagSyntax(CallSyntax):
    """`<invoke name="NAME"><KEY>VALUE</KEY></invoke>`, a marker before each tag; tags nest."""

    def read_call(self) -> Reading[None]:
        cursor, mark = self.cursor, self.row.quote
        yield from cursor.skip()
        yield from cursor.accepts(mark)
        yield from cursor.expect('<invoke name="')
        tails = _tails('">')
        name, tail = yield from cursor.until(*tails, max_length=LONGEST_HEADER)
        self.check(name)
        schema = self.section.schemas.get(name, {})
        is_empty = tail != tails[0]
        members = [] if is_empty else (yield from self._read_members(schema, "invoke"))
        yield from self.emit(name, object_json(dict(members)))

    def _read_members(self, schema: Any, parent: str) -> Reading[list[tuple[str, str]]]:
        """Read the tags up to the end of the enclosing one: (key, value in JSON)."""
        cursor = self.cursor
        members: list[tuple[str, str]] = []
        while True:
            yield from cursor.skip()
            yield from cursor.accepts(self.row.quote)
            if (yield from cursor.accepts(f"</{parent}>")):
                return members
            yield from cursor.expect("<")
            key, _ = yield from cursor.until(">", max_length=LONGEST_HEADER)
            if not re.fullmatch(r"[^\s<>/]+", key):
                raise Malformed
            items = schema.get("items") if isinstance(schema, dict) else None
            part = items if kinds_of(schema) == {"array"} else properties_of(schema).get(key)
            members.append((key, (yield from self._read_value(key, parent, part))))

    def _read_value(self, key: str, parent: str, schema: Any) -> Reading[str]:
        cursor, kinds = self.cursor, kinds_of(schema)
        if kinds != {"string"} and (yield from self._sees_tag()):
            members = yield from self._read_members(schema, key)
            if "array" in kinds or all(tag == "item" for tag, _ in members):
                return f"[{', '.join(value for _, value in members)}]"
            return object_json(dict(members))

        def is_end(_: str) -> Reading[bool | None]:
            return (yield from self._ends_tag(parent))

        # The mark before the end is forgotten at times.
        end = f"</{key}>"
        text = yield from cursor.extent(f"{self.row.quote}{end}", end, is_end=is_end)
        if text.strip() or not kinds or "string" in kinds:
            return value_json(text, kinds)
        return "[]" if "array" in kinds else "{}" if "object" in kinds else "null"

    def _sees_tag(self) -> Reading[bool]:
        """True if a tag comes next, and no text before it."""
        at, _ = yield from self.cursor.ahead(0)
        if not (yield from self.cursor.sees(f"{self.row.quote}<", at)):
            return False
        return (yield from self.cursor.char(at + len(self.row.quote) + 1)) != "/"

    def _ends_tag(self, parent: str) -> Reading[bool | None]:
        """True if the tag just closed ends before another or its parent's end; None if text follows that."""
        cursor, mark = self.cursor, self.row.quote
        if (yield from self._sees_tag()):
            return True
        at, _ = yield from cursor.ahead(0)
        at += len(mark) if (yield from cursor.sees(mark, at)) else 0
        if not (yield from cursor.sees(f"</{parent}>", at)):
            return False
        if parent != "invoke":
            return True
        return (yield from self.ends_call(at + len("</invoke>"), f"{mark}<invoke"))

    def may_follow(self) -> Reading[bool]:
        return (yield from self.cursor.sees(f'{self.row.quote}<invoke name="'))
