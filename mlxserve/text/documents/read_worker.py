"""ReadWorker: reads a document's text in a helper process."""

from __future__ import annotations

import logging
import zipfile
from io import BytesIO
from typing import Any

from mlxserve.images.video import NO_VIDEO, is_video
from mlxserve.system.extras import extra_command
from mlxserve.text.documents.document import PAGE_END
from mlxserve.text.documents.plain_text import checked_text, decode_text
from mlxserve.text.documents.web_page import is_web_page, read_web_page
from mlxserve.text.documents.word import BODY, read_word

_PDF = b"%PDF-"  # within the first 1,024 bytes of a file, say its readers
_ZIP = b"PK\x03\x04"
_OLD_WORD = b"\xd0\xcf\x11\xe0"
# What else is a ZIP file, and how it can be read.
_OFFICE = {
    "xl/": "is a spreadsheet: save it as CSV",
    "ppt/": "is a presentation: save it as PDF",
    "content.xml": "is an OpenDocument file: save it as DOCX or PDF",
    "META-INF/container.xml": "is an e-book: save it as PDF or text",
}


MAX_SCANS = 16  # pages that are read as images
_MAX_SIDE = 2_048  # pixels of such an image
_QUALITY = 85  # of JPEG


class NoText(ValueError):
    """The pages of the file are images."""


class ReadWorker:
    """Reads PDF, DOCX, HTML and text. Jobs raise ValueError with the end of a sentence about the file."""

    def read(self, name: str, data: bytes) -> str:
        """Return a file's text, with `PAGE_END` between pages."""
        return checked_text(_read(name, data))

    def page_images(self, data: bytes) -> list[Any]:
        """Return the number of a scanned PDF's pages, and the first `MAX_SCANS` as JPEG files."""
        try:
            pages = _pdf_reader(data).pages
            files = [_scanned(page) for page in pages[:MAX_SCANS]]
        except (MemoryError, ValueError):
            raise
        except Exception as error:
            # The parsers of PDF and of images raise anything.
            raise ValueError(f"is damaged ({str(error)[:200] or type(error).__name__})") from error
        if not any(files):
            raise ValueError("has neither text nor images")
        return [len(pages), *filter(None, files)]


def _read(name: str, data: bytes) -> str:
    if _PDF in data[:1_024]:
        return _read_pdf(data)
    if data.startswith(_ZIP):
        return _read_zip(data)
    if data.startswith(_OLD_WORD):
        raise ValueError("is a file of an old Office: save it as DOCX, PDF or CSV")
    if is_video(data):
        raise ValueError(NO_VIDEO)
    text = decode_text(data)
    if is_web_page(data) or name.lower().endswith((".html", ".htm", ".xhtml")):
        return read_web_page(text)
    return text


def _read_zip(data: bytes) -> str:
    try:
        names = zipfile.ZipFile(BytesIO(data)).namelist()
    except (zipfile.BadZipFile, ValueError, OSError, NotImplementedError) as error:
        raise ValueError(f"is damaged ({error})") from error
    if BODY in names:
        return read_word(data)
    for start, advice in _OFFICE.items():
        if any(each.startswith(start) for each in names):
            raise ValueError(advice)
    raise ValueError("is an archive: unpack it, and give the folder")


def _pdf_reader(data: bytes) -> Any:
    try:
        from pypdf import PdfReader
    except ImportError as error:
        raise ValueError(f"is a PDF, which needs pypdf: {extra_command('documents')}") from error
    # Its warnings of damage that does not matter would be on the terminal.
    logging.getLogger("pypdf").setLevel(logging.CRITICAL)
    reader = PdfReader(BytesIO(data))
    if reader.is_encrypted and not reader.decrypt(""):
        raise ValueError("is protected by a password")
    return reader


def _read_pdf(data: bytes) -> str:
    try:
        pages = [_text_of(page) for page in _pdf_reader(data).pages]
    except (MemoryError, ValueError):
        raise
    except Exception as error:
        # The parser raises anything.
        raise ValueError(f"is damaged ({str(error)[:200] or type(error).__name__})") from error
    if not any(map(str.strip, pages)):
        raise NoText("has no text: its pages are images; recognise their text first (OCR)")
    return PAGE_END.join(pages)


def _text_of(page: Any) -> str:
    text: str = page.extract_text()
    return text.replace(PAGE_END, "\n").strip()


def _scanned(page: Any) -> bytes:
    """Return the largest image of a page as a JPEG file; empty for a page without images."""
    try:
        images = [file.image for file in page.images]
    except ImportError as error:
        raise ValueError(
            f"has scanned pages, which need Pillow: {extra_command('vision')}"
        ) from error
    image = max(filter(None, images), key=lambda each: each.width * each.height, default=None)
    if image is None:
        return b""
    image.thumbnail((_MAX_SIDE, _MAX_SIDE))
    file = BytesIO()
    image.convert("RGB").save(file, "JPEG", quality=_QUALITY)
    return file.getvalue()
