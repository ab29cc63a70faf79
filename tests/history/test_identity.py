"""What names a chat file: the same for those who share it, another one for a copy."""

import shutil
from contextlib import closing
from pathlib import Path

from mlxserve.history.identity import identity_of
from mlxserve.history.store import Store


def test_two_programs_with_one_file_have_one_identity(tmp_path: Path) -> None:
    path = tmp_path / "chat.sqlite"
    with closing(Store.open(path)) as one, closing(Store.open(path)) as other:
        assert identity_of(one) == identity_of(other) != ""


def test_a_copy_and_another_file_have_others(tmp_path: Path) -> None:
    path = tmp_path / "chat.sqlite"
    with closing(Store.open(path)) as store:
        first = identity_of(store)
    shutil.copy(path, tmp_path / "copy.sqlite")
    for name in ("copy.sqlite", "new.sqlite"):
        with closing(Store.open(tmp_path / name)) as store:
            assert identity_of(store) not in ("", first)


def test_chats_in_memory_are_shared_with_nobody() -> None:
    with closing(Store.in_memory()) as store:
        assert identity_of(store) == ""
