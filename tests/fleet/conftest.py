"""Fixtures of the suite with a real page store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fleet.redis_server import RedisServer


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RedisServer]:
    folder = tmp_path / "store"
    folder.mkdir()
    server = RedisServer(folder)
    yield server
    server.stop()


@pytest.fixture
def unhurried_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page store may be slow: others compute on this machine."""
    pytest.importorskip("redis", reason="not run: it needs mlxserve[fleet]")
    monkeypatch.setattr("mlxserve.disk.store.SILENCE", 30.0)
    monkeypatch.setattr("mlxserve.disk.store_watch.PING_SECONDS", 30.0)
