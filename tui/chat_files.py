"""Imports and exports this user's chats, for the command line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from mlxserve.history.chat_file import StoreError
from mlxserve.history.imports import ImportRefused
from mlxserve.history.store import Store
from mlxserve.history.transfer import ImportReport, export_chats, import_chats, read_export
from tui.home import Home


class ChatFileError(Exception):
    """A file of chats cannot be read or written; the message says what to do."""


def import_file(file: Path) -> ImportReport:
    """Import the chats of a file. Raises ChatFileError."""
    with _explained(file, "read"):
        content = read_export(file)
        with closing(Store.open(Home.from_environment().chats)) as store:
            return import_chats(store, content)


def export_file(file: Path) -> int:
    """Write all chats into a new file; returns their number. Raises ChatFileError."""
    with _explained(file, "written"), closing(Store.open(Home.from_environment().chats)) as store:
        return export_chats(store, file)


@contextmanager
def _explained(file: Path, verb: str) -> Iterator[None]:
    try:
        yield
    except FileExistsError as error:
        raise ChatFileError(f"{file} exists. Give the new file another name.") from error
    except OSError as error:
        raise ChatFileError(f"{file} cannot be {verb}: {error.strerror}.") from error
    except ImportRefused as error:
        raise ChatFileError(f"{file} {error}.") from error
    except StoreError as error:
        raise ChatFileError(str(error)) from error
