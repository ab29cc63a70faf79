"""Texts of PDF, Word, HTML and text files."""

from __future__ import annotations

import io
import sys

import pytest
from PIL import Image

from mlxserve.text.documents.read_worker import MAX_SCANS, ReadWorker
from tests.text.documents.files import archive, jpeg, paragraph, pdf, scan, word

PAGE = b"""<!doctype html><head><title>T</title><style>p {}</style></head><body><h1>Hi</h1>
<p>some <b>bold</b>
text<ul><li>one<li>two</ul><table><tr><td>a<td>b</tr></table><pre>x:
  y</pre><script>alert(1)</script>&lt;end&gt;"""


def read(name: str, data: bytes) -> str:
    return ReadWorker().read(name, data)


def test_a_pdf_has_a_text_for_each_page() -> None:
    assert read("a.pdf", pdf(["Hello\nthere", "two"])) == "Hello\nthere\ftwo"


def test_a_word_file_has_headings_page_breaks_and_rows_of_tables() -> None:
    row = f"<w:tr><w:tc>{paragraph('a')}</w:tc><w:tc>{paragraph('b')}</w:tc></w:tr>"
    body = (
        paragraph("Title", "Heading1")
        + paragraph("Text")
        + '<w:p><w:r><w:br w:type="page"/><w:t>Two</w:t><w:tab/><w:t>tabs</w:t></w:r></w:p>'
        + f"<w:tbl>{row}</w:tbl>"
    )
    assert read("a.docx", word(body)) == "# Title\nText\n\fTwo\ttabs\na | b"


def test_a_web_page_is_what_a_reader_sees() -> None:
    assert read("a.html", PAGE) == "# Hi\nsome bold text\n- one\n- two\na | b\nx:\n  y\n<end>"


@pytest.mark.parametrize(
    "encoding",
    ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "latin-1", "cp1252"],
)
def test_text_is_read_in_any_encoding(encoding: str) -> None:
    text = "Größe, café: a plain line of text\n"
    assert read("a.txt", text.encode(encoding)) == text


def test_a_byte_that_no_encoding_of_a_letter_has_does_not_stop_a_text() -> None:
    assert read("a.txt", b"caf\xe9 \x81") == "caf\xe9 \x81"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (bytes(range(256)), "is not text"),
        (b"   \n", "has no text"),
        (b"", "has no text"),
        (pdf(["", ""]), "its pages are images"),
        (pdf(["Hello"])[:200], "is damaged"),
        (archive({"xl/workbook.xml": ""}), "save it as CSV"),
        (archive({"a.txt": ""}), "unpack it"),
        (b"PK\x03\x04 and no archive", "is damaged"),
        (archive({"word/document.xml": "<w:document"}), "no Word file"),
        (b"\xd0\xcf\x11\xe0 old", "old Office"),
        (b"\0\0\0\x20ftypisom" + bytes(20), "is a video"),
    ],
    ids=[
        *("binary", "blank", "empty", "scanned", "cut", "spreadsheet", "archive", "no-zip"),
        *("xml", "doc", "mp4"),
    ],
)
def test_what_cannot_be_read_is_refused_with_the_way_out(data: bytes, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read("a", data)


def test_a_pdf_without_pypdf_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pypdf", None)
    with pytest.raises(ValueError, match=r"pypdf: .* install .*\[.*documents.*\]"):
        read("a.pdf", pdf(["Hello"]))


def test_a_bomb_is_refused_by_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxserve.text.documents.word.MAX_XML", 1 << 20)
    with pytest.raises(ValueError, match="has more than 1 MB of text"):
        read("a.docx", word(paragraph("x" * (1 << 20))))


def test_an_entity_that_expands_without_end_is_refused() -> None:
    entities = "".join(f'<!ENTITY e{n} "{f"&e{n - 1};" * 20}">' for n in range(1, 12))
    xml = f'<!DOCTYPE d [<!ENTITY e0 "x">{entities}]><d>&e11;</d>'
    with pytest.raises(ValueError, match="no Word file"):
        read("a.docx", archive({"word/document.xml": xml}))


def test_the_pages_of_a_scan_are_images_in_their_order() -> None:
    num_pages, *files = ReadWorker().page_images(scan([jpeg("red"), b"", jpeg("blue")]))
    images = [Image.open(io.BytesIO(file)) for file in files]
    assert num_pages == 3
    assert [image.size for image in images] == [(8, 6)] * 2
    reds = [image.getpixel((0, 0))[0] > 200 for image in images]  # type: ignore[index]
    assert reds == [True, False]


def test_of_a_long_scan_the_first_pages_are_read() -> None:
    num_pages, *files = ReadWorker().page_images(scan([jpeg()] * (MAX_SCANS + 1)))
    assert (num_pages, len(files)) == (MAX_SCANS + 1, MAX_SCANS)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (scan([b"", b""]), "neither text nor images"),
        (scan([jpeg()[:200]]), "is damaged"),
        (scan([jpeg()])[:300], "is damaged"),
    ],
)
def test_a_scan_without_readable_images_is_refused(data: bytes, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ReadWorker().page_images(data)
