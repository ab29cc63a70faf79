"""Fixtures of the tests of chats: a file, and a store in it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mlxserve.history.store import Store


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "home" / "chat.sqlite"


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    store = Store.open(path)
    yield store
    store.close()
