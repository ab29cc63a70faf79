"""Unwritten: what is not on disk, the last used first, as far as it would be kept there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mlxserve.disk.record import HEADER_SIZE
from mlxserve.disk.tier import DiskTier
from mlxserve.disk.unwritten import Unwritten

PAGE = 100
RECORD = PAGE + HEADER_SIZE
LONG = 60.0  # seconds, for what takes none


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[DiskTier]:
    tier = DiskTier(tmp_path, identity=b"i" * 16, limit=4 * RECORD, daily_writes=1 << 30)
    assert tier.flush(LONG)
    yield tier
    tier.close()


def write(tier: DiskTier, unwritten: Unwritten, *names: bytes) -> None:
    times = [unwritten.time(name) or 1.0 for name in names]
    assert tier.save([(name, bytes(PAGE)) for name in names], times) == len(names)
    assert tier.flush(LONG)


def test_the_last_used_come_first(tier: DiskTier) -> None:
    unwritten = Unwritten(tier, PAGE)
    unwritten.use({b"a": 1.0, b"b": 2.0, b"c": 3.0})
    unwritten.use({b"a": 4.0})
    assert list(unwritten) == [b"a", b"c", b"b"]
    assert unwritten.time(b"a") == 4.0


def test_what_is_on_disk_is_left_out(tier: DiskTier) -> None:
    unwritten = Unwritten(tier, PAGE)
    unwritten.use({b"a": 1.0, b"b": 2.0, b"c": 3.0})
    write(tier, unwritten, b"c", b"a")
    assert list(unwritten) == [b"b"]
    assert [name in unwritten for name in (b"a", b"b", b"c", b"d")] == [False, True, False, False]


def test_what_a_full_disk_would_not_keep_is_left_out(tier: DiskTier) -> None:
    unwritten = Unwritten(tier, PAGE)
    unwritten.use({b"a": 10.0, b"b": 20.0, b"c": 30.0, b"d": 40.0})
    write(tier, unwritten, *unwritten)
    unwritten.use({b"cold": 5.0})
    assert list(unwritten) == []
    assert b"cold" not in unwritten
    unwritten.use({b"hot": 50.0})
    assert list(unwritten) == [b"hot"]
    assert b"hot" in unwritten


def test_what_could_not_be_written_is_not_forgotten(tier: DiskTier) -> None:
    unwritten = Unwritten(tier, PAGE)
    unwritten.use({b"a": 1.0})
    assert tier.save([(b"a", bytes(PAGE))]) == 1
    assert b"a" not in unwritten  # it waits to be written
    tier.clear()  # and never was
    assert tier.flush(LONG)
    assert list(unwritten) == [b"a"]


def test_no_more_are_kept_than_fit_on_disk(tier: DiskTier) -> None:
    unwritten = Unwritten(tier, PAGE)
    unwritten.use({bytes([number]): float(number) for number in range(1, 10)})
    assert list(unwritten) == [b"\x09", b"\x08", b"\x07", b"\x06"]


def test_what_is_forgotten_is_gone(tier: DiskTier) -> None:
    unwritten = Unwritten(tier, PAGE)
    unwritten.use({b"a": 1.0, b"b": 2.0})
    unwritten.forget([b"b", b"unknown"])
    assert list(unwritten) == [b"a"]
    assert unwritten.time(b"b") is None
