"""On a full disk a chat can be deleted, and then there is room again."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from mlxserve.history.chat_file import DiskFull, open_memory
from mlxserve.history.reserve import SIZE, Reserve
from tests.small_disk import run_on_small_disk


@pytest.mark.parametrize("by", ["chats", "program"])
@pytest.mark.parametrize(
    ("kind", "size", "disk"),
    [
        ("words", 20_000, "8m"),
        pytest.param("words", 1_000_000, "24m", marks=pytest.mark.slow),
        pytest.param("letters", 100_000, "8m", marks=pytest.mark.slow),
        pytest.param("chinese", 60_000, "8m", marks=pytest.mark.slow),
    ],
)
def test_a_chat_is_deleted_on_a_full_disk(
    tmp_path: Path, kind: str, size: int, disk: str, by: str
) -> None:
    *full, room = run_on_small_disk(tmp_path, disk, "tests.history.full_disk", kind, size, by)
    assert len(full) == (by == "chats")
    assert room == "room again"


def test_the_reserve_is_made_where_there_is_room_and_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserve, file, db = Reserve(tmp_path), tmp_path / "chat.sqlite-reserve", open_memory()
    free = SIZE
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    reserve.keep(db)
    assert file.stat().st_size == SIZE // 2
    assert file.stat().st_mode & 0o077 == 0
    free = 3 * SIZE // 2
    reserve.keep(db)
    assert file.stat().st_size == SIZE // 2, "not for so little more"
    free = 2 * SIZE
    reserve.keep(db)
    assert file.stat().st_size == SIZE
    free = 0
    reserve.keep(db)
    assert file.stat().st_size == SIZE
    reserve.release()
    assert not file.exists()
    with pytest.raises(DiskFull, match="Free some disk space"):
        reserve.keep(db)
    assert not file.exists()
    db.close()
