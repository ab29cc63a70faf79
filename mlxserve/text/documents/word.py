"""Reads the text of a Word file (DOCX): its paragraphs, headings, tables and page breaks."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from io import BytesIO
from typing import IO
from xml.etree.ElementTree import Element, ParseError, iterparse

from mlxserve.text.documents.document import PAGE_END

BODY = "word/document.xml"
MAX_XML = 256 << 20  # bytes; a compressed file may claim any
_NAMESPACES = (
    "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}",
    "{http://purl.oclc.org/ooxml/wordprocessingml/main}",
)
_CHARACTERS = {"tab": "\t", "br": "\n", "cr": "\n", "noBreakHyphen": "-"}


def read_word(data: bytes) -> str:
    """Raises ValueError, whose message ends a sentence about the file."""
    try:
        with zipfile.ZipFile(BytesIO(data)) as archive:
            if archive.getinfo(BODY).file_size > MAX_XML:
                raise ValueError(f"has more than {MAX_XML >> 20} MB of text")
            with archive.open(BODY) as xml:
                return "\n".join(_blocks(xml)).strip()
    except (zipfile.BadZipFile, KeyError, ParseError, OSError, EOFError) as error:
        raise ValueError(f"is damaged or no Word file ({error})") from error


def _blocks(xml: IO[bytes]) -> Iterator[str]:
    """Yield paragraphs and rows of tables, freeing what was read."""
    depth = 0  # of tables
    for event, element in iterparse(xml, events=("start", "end")):
        name = _name(element)
        if name == "tbl":
            depth += 1 if event == "start" else -1
        if event == "start":
            continue
        if name == "p" and not depth:
            yield _paragraph(element)
        elif name == "tr" and depth == 1:
            yield " | ".join(_cell(cell) for cell in element if _name(cell) == "tc")
        else:
            continue
        element.clear()


def _name(element: Element) -> str:
    for namespace in _NAMESPACES:
        if element.tag.startswith(namespace):
            return element.tag.removeprefix(namespace)
    return ""


def _cell(cell: Element) -> str:
    paragraphs = (_paragraph(each) for each in cell.iter() if _name(each) == "p")
    return " ".join(filter(None, paragraphs))


def _paragraph(paragraph: Element) -> str:
    text, level = "", 0
    for element in paragraph.iter():
        name = _name(element)
        if name == "pStyle":
            level = _level(_value(element, "val"))
        elif name == "t":
            text += element.text or ""
        elif name == "br" and _value(element, "type") == "page":
            text += PAGE_END
        elif name == "lastRenderedPageBreak":
            text = text if text.endswith(PAGE_END) else text + PAGE_END
        else:
            text += _CHARACTERS.get(name, "")
    return f"{'#' * level} {text}" if level and text else text


def _value(element: Element, name: str) -> str:
    values = (element.get(namespace + name) for namespace in _NAMESPACES)
    return next(filter(None, values), "")


def _level(style: str) -> int:
    """The level of a heading's style, such as `Heading2`; 0 for text."""
    digits = style.lower().removeprefix("heading").strip()
    return int(digits) if style.lower().startswith("heading") and digits in "123456" else 0
