"""Documents of the command line: files and folders, read on this machine and sent as text."""

from __future__ import annotations

from base64 import b64encode
from pathlib import Path
from typing import Any

from mlxserve.core.errors import InvalidRequest
from mlxserve.text.documents.document import Document
from mlxserve.text.documents.folder import read_folder
from mlxserve.text.documents.reader import ScannedDocument, document_reader
from mlxserve.text.documents.sent import text_url

MAX_FILE = 256 << 20  # bytes


def read_document(path: Path, typed: str | None = None) -> Document:
    """Read a file or folder. Raises InvalidRequest, which names `typed`."""
    typed = typed or str(path)
    path = path.expanduser()
    try:
        if path.is_dir():
            return read_folder(path, document_reader().read_now)
        if path.exists() and path.stat().st_size > MAX_FILE:
            raise InvalidRequest(f"is larger than {MAX_FILE >> 20} MiB")
        return document_reader().read_now(path.name, path.read_bytes())
    except FileNotFoundError as error:
        raise InvalidRequest(f"There is no file or folder {typed!r}.") from error
    except OSError as error:
        raise InvalidRequest(f"{typed} cannot be read: {error.strerror}.") from error
    except InvalidRequest as error:
        raise type(error)(f"{typed} {error}.") from error


def read_part(path: Path) -> tuple[dict[str, Any], str]:
    """Read a file or folder as a part of a message, and describe its size. Raises InvalidRequest.

    A PDF without text is sent as it is: its pages are images, which the model may see.
    """
    try:
        document = read_document(path)
    except ScannedDocument:
        data = b64encode(path.expanduser().read_bytes()).decode()
        file = {"filename": path.name, "file_data": f"data:application/pdf;base64,{data}"}
        return {"type": "file", "file": file}, "scanned pages"
    return file_part(document), document.size_label


def file_part(document: Document) -> dict[str, Any]:
    """Return a document as a part of a message, with its text."""
    file = {"filename": document.name, "file_data": text_url(document.text)}
    return {"type": "file", "file": file}
