"""What the files of the page say: the elements of an answer, and the rules of the style sheet."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from importlib.resources import files

FILES = {
    file.name: file.read_text(encoding="utf-8")
    for file in files("mlxserve.api.page").joinpath("files").iterdir()
}
_VOID = frozenset(("meta", "link", "input", "img", "br"))


def _names(constant: str) -> list[str]:
    """The words of a set in markdown.js."""
    [text] = re.findall(
        rf"const {constant} = new Set\(\((.*?)\)\.split", FILES["markdown.js"], re.DOTALL
    )
    return "".join(re.findall(r'"([^"]*)"', text)).split()


MARKDOWN_TAGS = _names("TAGS")
MATH_TAGS = _names("MATH_TAGS")


def message_tags() -> set[str]:
    """Of every element that a message can have: of its text, and of what stands around it."""
    made = {
        tag
        for name in ("markdown.js", "message.js")
        for tag in re.findall(r'\belement\("(\w+)"', FILES[name])
    }
    return {*MARKDOWN_TAGS, *MATH_TAGS, *made, "button"}


def containers() -> set[str]:
    """Selectors of all that has messages in it, and of the messages themselves."""
    classes = re.findall(
        r'"(\w+) " \+ message\.role|classList\.(?:add|toggle)\("(\w+)"', FILES["message.js"]
    )
    named = {f".{name}" for pair in classes for name in pair if name}
    return {*_above("log"), *named, ".user", ".assistant", ".hit"}


def _above(wanted: str) -> set[str]:
    """Of the element with this id and those around it: tags, ids and classes."""
    found: set[str] = set()

    class Parser(HTMLParser):
        stack: list[dict[str, str | None]] = []  # noqa: RUF012

        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            attributes = {"tag": tag, **dict(attrs)}
            if attributes.get("id") == wanted:
                for one in (*self.stack, attributes):
                    found.update(_selectors(one))
            if tag not in _VOID:
                self.stack.append(attributes)

        def handle_endtag(self, _tag: str) -> None:
            self.stack.pop()

    Parser().feed(FILES["index.html"])
    return found


def _selectors(attributes: dict[str, str | None]) -> Iterator[str]:
    yield str(attributes["tag"])
    if attributes.get("id"):
        yield f"#{attributes['id']}"
    for name in (attributes.get("class") or "").split():
        yield f".{name}"


def selectors(css: str) -> list[str]:
    """Of all rules, also of those under a condition, one by one."""
    plain = re.sub(r"/\*.*?\*/", "", css, flags=re.DOTALL)
    heads = re.findall(r"([^{};]+)\{", plain)
    return [
        one.strip()
        for head in heads
        if not head.strip().startswith("@")
        for one in re.split(r",(?![^(]*\))", head)
    ]
