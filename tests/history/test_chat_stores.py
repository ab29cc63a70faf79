"""Each API key has a file of its own, of which a few are open."""

from __future__ import annotations

import asyncio
from pathlib import Path

import psutil

from mlxserve.history.chat_stores import ChatStores

NUM_KEYS = 40


def test_any_number_of_keys_keep_a_bounded_number_of_files_open(tmp_path: Path) -> None:
    async def scenario() -> None:
        stores, keys = ChatStores(tmp_path), [f"key{number}" for number in range(NUM_KEYS)]
        for key in keys:
            await stores.call(key, lambda store, key=key: store.create_chat(f"of {key}"))
        opened = {
            file.path for file in psutil.Process().open_files() if file.path.endswith(".sqlite")
        }
        assert 0 < len(opened) < NUM_KEYS // 2
        for key in keys:
            [chat] = await stores.call(key, lambda store: store.chats())
            assert chat.title == f"of {key}"
        await stores.close()

    asyncio.run(scenario())
