"""DiskIndex: sizes follow what is added and removed, and the least recently used goes first."""

from __future__ import annotations

from pathlib import Path

from mlxserve.disk.index import DiskIndex
from mlxserve.disk.record import FoundFile


def file(path: str, size: int, used: float, name: bytes | None = None) -> FoundFile:
    return FoundFile(Path(path), size, used, name)


def test_sizes_follow_what_is_added_and_removed() -> None:
    index = DiskIndex([file("own", 10, 1, b"own"), file("other", 5, 2)])
    assert (index.num_own, index.num_bytes, index.total) == (1, 10, 15)
    index.add(file("own", 7, 3, b"own"))  # written again
    assert (index.num_own, index.num_bytes, index.total) == (1, 7, 12)
    index.remove(Path("own"))
    index.remove(Path("own"))
    assert (index.num_own, index.num_bytes, index.total) == (0, 0, 5)


def test_each_change_of_an_own_record_is_told_once() -> None:
    index = DiskIndex(
        [file("own", 10, 1, b"own"), file("lost", 10, 1, b"lost"), file("other", 5, 2)]
    )
    index.remove(Path("lost"))
    index.remove(Path("unknown"))
    assert index.pop_changes() == {b"own": True, b"lost": False}
    assert index.pop_changes() == {}
    index.remove(Path("own"))
    assert index.pop_changes() == {b"own": False}


def coldest_first(index: DiskIndex) -> list[str]:
    names = []
    while (coldest := index.coldest()) is not None:
        names.append(coldest.path.name)
        index.remove(coldest.path)
    return names


def test_the_least_recently_used_goes_first() -> None:
    index = DiskIndex(file(name, 10, used) for name, used in (("b", 3), ("a", 1), ("c", 2)))
    index.add(file("a", 10, 4))  # used now
    index.remove(Path("c"))
    assert coldest_first(index) == ["b", "a"]
    assert index.total == 0


def test_records_that_are_used_again_and_again_stay_in_order() -> None:
    index = DiskIndex(file(str(number), 10, number) for number in range(10))
    for used in range(10, 1000):
        index.add(file(str(used % 7), 10, used))
    assert coldest_first(index) == ["7", "8", "9", *(str(used % 7) for used in range(993, 1000))]
