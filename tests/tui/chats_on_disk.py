"""Chats in the file of a home: written before a terminal opens, and read after it."""

from __future__ import annotations

from contextlib import closing

from mlxserve.history.messages import Role, StoredMessage
from mlxserve.history.store import Store
from tui.home import Home


def write_chat(home: Home, title: str, *texts: str) -> None:
    """A chat of questions and answers in turn."""
    with closing(Store.open(home.chats)) as store:
        chat, parent = store.create_chat(title), None
        for number, text in enumerate(texts):
            role = Role.ASSISTANT if number % 2 else Role.USER
            parent = store.add(chat.id, parent, role, text).id


def delete_chat(home: Home) -> None:
    """The newest one, as another terminal does."""
    with closing(Store.open(home.chats)) as store:
        store.delete(store.chats()[0].id)


def branch(home: Home) -> list[StoredMessage]:
    """The newest chat's messages, as they are shown."""
    with closing(Store.open(home.chats)) as store:
        return store.path(store.chats()[0].leaf_id)
