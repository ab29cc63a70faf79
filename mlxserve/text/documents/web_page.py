"""Reads the text of an HTML page, without scripts and styles."""

from __future__ import annotations

from html.parser import HTMLParser

_UNSEEN = frozenset(("script", "style", "template", "noscript", "svg", "head"))
_BLOCKS = frozenset(
    [
        *("address", "article", "aside", "blockquote", "dd", "div", "dl", "dt", "figcaption"),
        *("figure", "footer", "form", "h1", "h2", "h3", "h4", "h5", "h6", "header", "hr", "li"),
        *("main", "nav", "ol", "p", "pre", "section", "table", "tr", "ul"),
    ]
)
_HEADINGS = {f"h{level}": "#" * level + " " for level in range(1, 7)}


def is_web_page(start: bytes) -> bool:
    """True if a file begins as an HTML page does."""
    beginning = start[:1_024].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    return beginning.startswith((b"<!doctype html", b"<html"))


def read_web_page(html: str) -> str:
    """Return the text that a reader of the page sees, a line for each block."""
    reader = _PageText()
    reader.feed(html)
    reader.close()
    lines = ("".join(line).rstrip() for line in reader.lines)
    return "\n".join(line for line in lines if line)


class _PageText(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.lines: list[list[str]] = [[]]
        self._unseen: list[str] = []
        self._num_pre = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        del attrs
        if tag in _UNSEEN:
            self._unseen.append(tag)
        elif tag == "body":
            # Pages leave out the end of their head.
            self._unseen.clear()
        elif tag in _BLOCKS or tag == "br":
            self.lines.append([_HEADINGS.get(tag, "- " if tag == "li" else "")])
        elif tag in ("td", "th") and any(self.lines[-1]):
            self.lines[-1].append(" | ")
        self._num_pre += tag == "pre"

    def handle_endtag(self, tag: str) -> None:
        if tag in self._unseen:
            del self._unseen[self._unseen.index(tag) :]
        elif tag in _BLOCKS:
            self.lines.append([])
        self._num_pre = max(0, self._num_pre - (tag == "pre"))

    def handle_data(self, data: str) -> None:
        if self._unseen:
            return
        if self._num_pre:
            first, *rest = data.split("\n")
            self.lines[-1].append(first)
            self.lines += ([line] for line in rest)
            return
        words = " ".join(data.split())
        before = " " if data[:1].isspace() and any(self.lines[-1]) else ""
        after = " " if words and data[-1:].isspace() else ""
        self.lines[-1].append(before + words + after)
