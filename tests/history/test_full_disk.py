"""On a full disk a chat can be deleted, and then there is room again."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from mlxserve.history.reserve import SCARCE, SIZE, Reserve

ROOT = Path(__file__).parents[2]
_IN_A_NAMESPACE = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c")
_MOUNT = 'mount -t tmpfs -o size=24m tmpfs "$0"'


def _may_mount(folder: Path) -> bool:
    if shutil.which("unshare") is None:
        return False
    done = subprocess.run([*_IN_A_NAMESPACE, _MOUNT, folder], capture_output=True, check=False)
    return done.returncode == 0


@pytest.mark.parametrize("size", [20_000, 200_000])
def test_a_chat_is_deleted_on_a_full_disk(tmp_path: Path, size: int) -> None:
    if not _may_mount(tmp_path):
        pytest.skip("a small disk cannot be mounted here")
    fill = f'{_MOUNT} && exec "$1" -m tests.history.full_disk "$0/chats/c.sqlite" {size}'
    done = subprocess.run(
        [*_IN_A_NAMESPACE, fill, tmp_path, sys.executable],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    full, room = done.stdout.splitlines()
    assert full.startswith("full after ")
    assert room == "room again"


def test_the_reserve_is_made_on_a_scarce_disk_and_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserve, file = Reserve(tmp_path / "chat.sqlite"), tmp_path / "chat.sqlite-reserve"
    free = SCARCE
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    reserve.fill()
    assert not file.exists()
    free = SCARCE - 1
    reserve.release()
    reserve.fill()
    assert file.stat().st_size == SIZE
    assert file.stat().st_mode & 0o077 == 0
    reserve.release()
    assert not file.exists()
    free = SIZE
    reserve.fill()
    assert not file.exists()
