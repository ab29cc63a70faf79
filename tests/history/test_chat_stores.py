"""Each API key has a file of its own, of which a few are open."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

from mlxserve.history.chat_stores import ChatStores
from mlxserve.history.store import Store

NUM_KEYS = 40


def test_any_number_of_keys_keep_a_bounded_number_of_files_open(tmp_path: Path) -> None:
    stores, keys = ChatStores(tmp_path), [f"key{number}" for number in range(NUM_KEYS)]
    for key in keys:
        stores.run(key, lambda store, key=key: store.create_chat(f"of {key}"))
    assert 0 < len(opened()) < NUM_KEYS // 2
    for key in keys:
        [chat] = stores.run(key, lambda store: store.chats())
        assert chat.title == f"of {key}"
    stores.close()
    assert not opened()


def opened() -> set[str]:
    files = psutil.Process().open_files()
    return {file.path for file in files if file.path.endswith(".sqlite")}


def test_work_on_chats_waits_for_no_other_work(tmp_path: Path) -> None:
    stores = ChatStores(tmp_path)
    stores.run("a", lambda store: store.create_chat("One"))

    def within(store: Store) -> int:
        """While another thread reads the same file, it is read and written here."""
        assert len(store.chats()) == 1
        stores.run("a", lambda other: other.create_chat("Two"))
        return len(stores.run("a", lambda other: other.chats()))

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(stores.run, "a", within).result(timeout=60) == 2
    stores.close()


def test_a_file_in_use_is_closed_after_the_end(tmp_path: Path) -> None:
    stores = ChatStores(tmp_path)

    def work(store: Store) -> int:
        stores.close()
        return len(store.chats())

    assert stores.run("a", work) == 0
    assert not opened()
