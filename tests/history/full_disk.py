"""Fills a small disk with chats until none fits, and deletes some. A process of its own: see its test."""

from __future__ import annotations

import random
import sys
from pathlib import Path

from mlxserve.history.chat_file import DiskFull
from mlxserve.history.messages import Role
from mlxserve.history.store import Store
from tests.small_disk import fill


def text(kind: str, size: int) -> str:
    """Characters whose index takes as much as they do, or several times that."""
    draw = random.Random(size)
    if kind == "words":
        return "word " * (size // 5)
    first = {"letters": 0x61, "chinese": 0x4E00}[kind]
    return "".join(
        map(chr, draw.choices(range(first, first + (26 if first == 0x61 else 9_000)), k=size))
    )


def main(folder: Path, kind: str, size: int, by: str) -> None:
    """by: what fills the disk, `chats` or another `program`"""
    path = folder / "chats" / "c.sqlite"
    store = Store.open(path)
    chats = []
    try:
        for number in range(1_000 if by == "chats" else 3):
            chat = store.create_chat(f"chat {number}")
            chats.append(chat.id)
            store.add(chat.id, None, Role.USER, f"{number} " + text(kind, size))
    except DiskFull:
        print(f"full after {len(chats)}")
    if by == "program":
        store.close()
        fill(folder)
        store = Store.open(path)
    for chat_id in chats[:2]:
        store.delete(chat_id)
    left = [chat.id for chat in store.chats()]
    assert left
    assert not {*chats[:2]} & {*left}
    assert not store.messages(chats[0])
    assert [hit.chat.id for hit in store.search(text(kind, size)[:8])], "the others are found"
    chat = store.create_chat("there is room again")
    store.add(chat.id, None, Role.USER, text(kind, size // 2))
    print("room again")
    store.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4])
