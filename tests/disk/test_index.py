"""DiskIndex: sizes follow what is added and removed, and the least used go first."""

from __future__ import annotations

from pathlib import Path

from mlxserve.disk.files import FoundFile
from mlxserve.disk.index import DiskIndex


def file(name: str, size: int, used: float) -> FoundFile:
    return FoundFile(Path(name), size, used)


def test_sizes_follow_what_is_added_and_removed() -> None:
    index = DiskIndex()
    index.add(file("own", 10, 1), b"own")
    index.add(file("other", 5, 2), None)
    assert (index.num_bytes, index.total, index.names) == (10, 15, {b"own": 10})
    index.add(file("own", 7, 3), b"own")  # written again
    assert (index.num_bytes, index.total, index.names) == (7, 12, {b"own": 7})
    index.remove(Path("own"), b"own")
    index.remove(Path("own"), b"own")
    assert (index.num_bytes, index.total, index.names) == (0, 5, {})


def test_the_least_used_go_first_and_no_more_than_needed() -> None:
    index = DiskIndex()
    for name, used in (("new", 3), ("old", 1), ("middle", 2)):
        index.add(file(name, 10, used), None)
    assert index.least_used(0) == []
    assert index.least_used(11) == [Path("old"), Path("middle")]
    assert index.least_used(99) == [Path("old"), Path("middle"), Path("new")]
