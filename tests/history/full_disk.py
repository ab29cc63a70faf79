"""Fills a small disk with chats until none fits, and then deletes one. A process of its own: see its test."""

from __future__ import annotations

import sys
from pathlib import Path

from mlxserve.history.chat_file import DiskFull
from mlxserve.history.messages import Role
from mlxserve.history.store import Store


def main(path: Path, size: int) -> None:
    store = Store.open(path)
    chats = []
    try:
        for number in range(1_000):
            chat = store.create_chat(f"chat {number}")
            chats.append(chat.id)
            store.add(chat.id, None, Role.USER, f"{number} " + "word " * (size // 5))
    except DiskFull:
        print(f"full after {len(chats)}")
    for chat_id in chats[:2]:
        store.delete(chat_id)
    left = [chat.id for chat in store.chats()]
    assert chats[0] not in left
    assert chats[1] not in left
    assert not store.messages(chats[0])
    chat = store.create_chat("there is room again")
    store.add(chat.id, None, Role.USER, "word " * (size // 10))
    print("room again")
    store.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
