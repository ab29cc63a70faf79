"""Lists this user's chats, pins them and puts them into folders, for the command line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager

from mlxserve.history.chat_file import StoreError
from mlxserve.history.folders import BadFolderName, folder_name
from mlxserve.history.messages import ChatRecord
from mlxserve.history.store import Store
from tui.chat_files import ChatFileError
from tui.home import Home


def list_chats() -> list[ChatRecord]:
    """Return all chats, pinned ones first, then the most recent. Raises ChatFileError."""
    with _opened() as store:
        return store.chats(limit=-1)


def place_chats(
    numbers: Sequence[int], *, folder: str | None = None, is_pinned: bool | None = None
) -> list[ChatRecord]:
    """Move and pin chats, all or none; returns them as they are then. Raises ChatFileError."""
    with _opened() as store:
        if folder is not None:
            folder_name(folder)
        for number in numbers:
            _require(store, number)
        for number in numbers:
            store.place(number, folder=folder, is_pinned=is_pinned)
        return [store.chat(number) for number in numbers]


def _require(store: Store, number: int) -> None:
    try:
        store.chat(number)
    except StoreError as error:
        raise ChatFileError(
            f"There is no chat {number}. `mlxserve chats list` shows the numbers."
        ) from error


@contextmanager
def _opened() -> Iterator[Store]:
    try:
        with closing(Store.open(Home.from_environment().chats)) as store:
            yield store
    except BadFolderName as error:
        raise ChatFileError(f"--folder: {error}.") from error
    except StoreError as error:
        raise ChatFileError(str(error)) from error
