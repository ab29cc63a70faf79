r"""Markdown of answers as a tree of elements, which the page builds one by one: never as HTML.

A node is a text, or [tag, attributes, child, ...]. Raw HTML stays text; links go to web pages and
mail addresses only; a picture becomes a link, because the page loads nothing from elsewhere. Formulas,
$…$, $$…$$, \(…\) and \[…\], are MathML. Code is one text, which `mlxserve.api.page.highlighting` cuts into
spans of class `comment`, `keyword`, `string`, `number` or `name`.
"""

from __future__ import annotations

import html
import re
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any
from xml.etree.ElementTree import Element

from mlxserve.api.page.highlighting import Node

if TYPE_CHECKING:
    from markdown_it import MarkdownIt
    from markdown_it.rules_block import StateBlock
    from markdown_it.rules_inline import StateInline
    from markdown_it.token import Token

MAX_NESTING = 20  # what is nested more deeply is shown without marks
MAX_MARKED = 60_000  # characters of a text; a longer one is shown without marks
MAX_FORMULA = 2_000
_MAX_BRACES = 40  # levels of braces in a formula
_LINK = re.compile(r"(https?://|mailto:)", re.IGNORECASE)
# A bare address in a text, without the sign that ends a sentence or closes a bracket around it.
_BARE = re.compile(r"\bhttps?://[^\s<>\"\u0060]*[^\s<>\"\u0060.,;:!?'*_~()\[\]{}]")
_TASKS = {"[ ] ": "\u2610 ", "[x] ": "\u2611 ", "[X] ": "\u2611 "}  # boxes
_ALIGNMENTS = {
    "text-align:left": "left",
    "text-align:center": "center",
    "text-align:right": "right",
}
_FORMULAS = {"$$": "$$", "$": "$", "\\[": "\\]", "\\(": "\\)"}
# Of what latex2mathml writes; `href`, `style`, `class` and `id` are not among them.
_MATH_ATTRIBUTES = frozenset(
    [
        "accent",
        "columnalign",
        "columnlines",
        "displaystyle",
        "display",
        "fence",
        "form",
        "linethickness",
        "lspace",
        "mathvariant",
        "maxsize",
        "minsize",
        "movablelimits",
        "rowlines",
        "rspace",
        "scriptlevel",
        "separator",
        "stretchy",
        "width",
    ]
)


class _TooLong(Exception):
    """The parser has exceeded its time."""


class Markdown:
    """Parses texts. Not thread-safe."""

    def __init__(self) -> None:
        from markdown_it import MarkdownIt  # imported late, for a fast start

        options = {"html": False, "maxNesting": MAX_NESTING}
        self._parser = MarkdownIt("commonmark", options).enable(["table", "strikethrough"])
        _add_rules(self._parser)

    def nodes(self, text: str, seconds: float) -> list[Node] | None:
        """Parse a text into blocks; None if that takes more than `seconds` of this thread's time."""
        if len(text) > MAX_MARKED:
            return unmarked(text)
        deadline = time.thread_time() + seconds
        try:
            return _tree(self._parser.parse(text, {"deadline": deadline}), deadline)
        except _TooLong:
            return None

    def growing(self, text: str, seconds: float) -> tuple[list[Node], int, int] | None:
        """Parse the end of a text that grows.

        Returns its blocks, how many of them no longer change, and the character at which the others
        begin; None if that takes more than `seconds` of this thread's time. A block is finished once
        another one follows it.
        """
        if len(text) > MAX_MARKED:
            return unmarked(text), 0, 0
        deadline = time.thread_time() + seconds
        try:
            tokens = self._parser.parse(text, {"deadline": deadline})
            nodes = _tree(tokens, deadline)
        except _TooLong:
            return None
        starts = [
            token.map[0]
            for token in tokens
            if token.level == 0 and token.nesting >= 0 and token.map
        ]
        if len(starts) != len(nodes) or len(starts) < 2 or "\r" in text:
            return nodes, 0, 0  # lines may not be those of `split`
        lines = text.split("\n", starts[-1])
        return nodes, len(nodes) - 1, len(text) - len(lines[-1])


def unmarked(text: str) -> list[Node]:
    """Return the text as one block without formatting."""
    return [["div", {"class": "plain"}, text]]


def code_elements(nodes: Iterable[Node]) -> Iterator[list[Any]]:
    """Yield the elements of code: ["pre", {"language": …}, code]."""
    for node in nodes:
        if isinstance(node, list):
            if node[0] == "pre":
                yield node
            else:
                yield from code_elements(node[2:])


# ---- what the parser knows beside CommonMark


def _add_rules(parser: MarkdownIt) -> None:
    inline, block = parser.inline.ruler, parser.block.ruler
    inline.before("text", "time", _check_time)
    inline.before("escape", "formula", _inline_formula)
    # Also for each line of a paragraph, list, quote or table, in the loop that looks for its end.
    block.before(
        "table",
        "time",
        _check_block_time,
        {"alt": ["paragraph", "reference", "blockquote", "list"]},
    )
    block.before("fence", "formula", _block_formula, {"alt": ["paragraph", "blockquote", "list"]})


def _require_time(deadline: float) -> None:
    if time.thread_time() > deadline:
        raise _TooLong


def _check_time(state: StateInline, _silent: bool) -> bool:
    _require_time(state.env["deadline"])
    return False


def _check_block_time(state: StateBlock, _start: int, _end: int, _silent: bool) -> bool:
    _require_time(state.env["deadline"])
    return False


def _inline_formula(state: StateInline, silent: bool) -> bool:
    """Parse a formula within a line.

    `$5 and $6` are prices: a single dollar neither opens before nor closes after a space, and does
    not close before a digit.
    """
    text, at = state.src, state.pos
    opening = next((mark for mark in _FORMULAS if text.startswith(mark, at)), None)
    if opening is None:
        return False
    begin = at + len(opening)
    end = text.find(_FORMULAS[opening], begin, begin + MAX_FORMULA)
    if end <= begin:
        return False
    formula, after = text[begin:end], text[end + 1 : end + 2]
    if opening == "$" and (formula[0].isspace() or formula[-1].isspace() or after.isdigit()):
        return False
    if not silent:
        token = state.push("formula", "", 0)
        token.content, token.markup = formula.strip(), opening
    state.pos = end + len(_FORMULAS[opening])
    return True


def _block_formula(state: StateBlock, start: int, end: int, silent: bool) -> bool:
    r"""Parse a formula over several lines.

    It begins with $$ or \[ at the beginning of a line, and ends with its other half at the end of
    one.
    """
    begin = state.bMarks[start] + state.tShift[start]
    opening = state.src[begin : begin + 2]
    if opening not in ("$$", "\\[") or state.is_code_block(start):
        return False
    closing = _FORMULAS[opening]
    end_of_formula = state.src.find(closing, begin + 2, begin + 2 + MAX_FORMULA)
    line = start
    while line < end and end_of_formula >= state.eMarks[line]:
        line += 1
    if (
        end_of_formula < 0
        or line == end
        or state.src[end_of_formula + 2 : state.eMarks[line]].strip()
    ):
        return False
    if not silent:
        lines = state.getLines(start, line + 1, state.blkIndent, False).strip()
        token = state.push("formula", "", 0)
        token.content, token.markup, token.block = lines[2:-2].strip(), opening, True
        token.map = [start, line + 1]
    state.line = line + 1
    return True


# ---- tokens as a tree


def _tree(tokens: Iterable[Token], deadline: float) -> list[Node]:
    root: list[Any] = []
    open_lists = [root]
    num_links = 0  # that are open
    for token in tokens:
        _require_time(deadline)
        if token.hidden:
            # The paragraphs of a tight list.
            continue
        if token.type == "text" and not num_links:
            open_lists[-1] += _linked(token.content)
            continue
        num_links += token.nesting if token.type in ("link_open", "link_close") else 0
        if token.nesting == 1:
            element: list[Any] = [token.tag, _attributes(token)]
            if token.type == "link_open" and not element[1]:
                element[0] = "span"
            open_lists[-1].append(element)
            open_lists.append(element)
        elif token.nesting == -1:
            closed = open_lists.pop()
            if token.type == "list_item_close":
                _box(closed)
        elif token.type == "inline":
            open_lists[-1] += _tree(token.children or (), deadline)
        elif (leaf := _leaf(token)) != "":
            open_lists[-1].append(leaf)
    return root


def _linked(text: str) -> Iterator[Node]:
    """Split a text into links, where it names addresses, and texts."""
    at = 0
    for match in _BARE.finditer(text):
        if match.start() > at:
            yield text[at : match.start()]
        yield ["a", {"href": match[0]}, match[0]]
        at = match.end()
    if at < len(text):
        yield text[at:]


def _box(item: list[Any]) -> None:
    """Turn the `[x] ` at the start of an item of a list into a box."""
    first = item[2] if len(item) > 2 else ""
    holder, at = (first, 2) if isinstance(first, list) and first[0] == "p" else (item, 2)
    text = holder[at] if len(holder) > at else ""
    if isinstance(text, str) and text[:4] in _TASKS:
        holder[at] = _TASKS[text[:4]] + text[4:]


def _attributes(token: Token) -> dict[str, str]:
    if token.type == "link_open":
        return _link(str(token.attrs.get("href", "")))
    if alignment := _ALIGNMENTS.get(str(token.attrs.get("style", ""))):
        return {"class": alignment}
    if "start" in token.attrs:
        return {"start": str(token.attrs["start"])}
    return {}


def _link(target: str) -> dict[str, str]:
    return {"href": target} if _LINK.match(target) else {}


def _leaf(token: Token) -> Node:
    match token.type:
        case "softbreak":
            return "\n"
        case "hardbreak" | "hr":
            return [token.tag, {}]
        case "code_inline":
            return ["code", {}, token.content]
        case "fence" | "code_block":
            language = (token.info.split() or [""])[0][:40]
            return ["pre", {"language": language}, token.content.removesuffix("\n")]
        case "formula":
            return _formula(token)
        case "image":
            link = _link(str(token.attrs.get("src", "")))
            return ["a" if link else "span", link, token.content or "picture"]
        case _:
            return token.content


# ---- formulas


def _formula(token: Token) -> Node:
    """Convert a formula to MathML; the source is shown if it is not convertible LaTeX."""
    from latex2mathml.converter import convert_to_element

    is_block = token.block or token.markup in ("$$", "\\[")
    source = f"{token.markup}{token.content}{_FORMULAS[token.markup]}"
    if _depth(token.content) > _MAX_BRACES:
        return ["code", {}, source]
    try:
        element = convert_to_element(token.content, display="block" if is_block else "inline")
    # The converter raises its own errors, KeyError, IndexError and others for what is not LaTeX.
    except Exception:  # noqa: BLE001
        return ["code", {}, source]
    return _math(element)


def _depth(formula: str) -> int:
    depth = deepest = 0
    for character in formula:
        depth += (character == "{") - (character == "}")
        deepest = max(deepest, depth)
    return max(deepest, formula.count("\\left"), formula.count("\\begin"))


def _math(element: Element) -> list[Any]:
    attributes = {name: value for name, value in element.attrib.items() if name in _MATH_ATTRIBUTES}
    node: list[Any] = [element.tag.rpartition("}")[2], attributes]
    if element.text:
        # The converter writes signs as references.
        node.append(html.unescape(element.text))
    for child in element:
        node.append(_math(child))
        if child.tail:
            node.append(html.unescape(child.tail))
    return node
