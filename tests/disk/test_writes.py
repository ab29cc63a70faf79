"""DiskWrites: records are accepted, or refused for one stated reason each."""

from __future__ import annotations

import errno

import pytest

from mlxserve.disk.record import HEADER_SIZE
from mlxserve.disk.writes import RETRY_SECONDS, DiskWrites

PAGE = 1000
RECORD = PAGE + HEADER_SIZE
DAY = "2026-11-23"


class World:
    """A clock and a calendar that only tests move."""

    def __init__(self) -> None:
        self.now, self.day = 1000.0, DAY

    def writes(self, limit: int = 1 << 20, daily_writes: int = 1 << 20) -> DiskWrites:
        return DiskWrites(
            limit=limit,
            daily_writes=daily_writes,
            clock=lambda: self.now,
            today=lambda: self.day,
        )


def test_a_record_waits_until_it_is_done() -> None:
    writes = World().writes()
    assert all(writes.accept(name, PAGE) for name in (b"b", b"a"))
    assert b"b" in writes
    writes.done(b"b")
    assert b"b" not in writes
    assert b"a" in writes


def test_a_larger_record_than_the_limit_is_refused_and_a_smaller_one_is_not() -> None:
    writes = World().writes(limit=RECORD)
    assert not writes.accept(b"large", PAGE + 1)
    assert writes.accept(b"small", PAGE)


def test_what_waits_is_bounded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("mlxserve.disk.writes.STAGED_BYTES", 2 * RECORD)
    writes = World().writes()
    assert [writes.accept(name, PAGE) for name in (b"a", b"b", b"c", b"d")] == [
        *(True, True),
        *(False, False),
    ]
    assert len([r for r in caplog.records if "slower than pages" in r.message]) == 1
    writes.done(b"a")
    assert writes.accept(b"c", PAGE)
    writes.clear()
    assert b"b" not in writes
    assert all(writes.accept(name, PAGE) for name in (b"a", b"b"))


def test_what_waits_counts_towards_the_day() -> None:
    world = World()
    writes = world.writes(daily_writes=2 * RECORD)
    assert [writes.accept(name, PAGE) for name in (b"a", b"b", b"c")] == [True, True, False]
    writes.done(b"a")
    writes.count(DAY, RECORD)
    assert writes.written_today == RECORD
    assert not writes.accept(b"c", PAGE)
    world.day = "2026-11-24"
    assert writes.written_today == 0
    assert writes.accept(b"c", PAGE)


def test_other_processes_count_towards_the_day() -> None:
    writes = World().writes(daily_writes=3 * RECORD)
    assert writes.accept(b"a", PAGE)
    writes.done(b"a")
    writes.count(DAY, 3 * RECORD)
    assert not writes.accept(b"b", PAGE)


def test_what_is_dropped_no_longer_waits() -> None:
    writes = World().writes()
    assert all(writes.accept(name, PAGE) for name in (b"a", b"b", b"c"))
    writes.drop([b"a", b"c"])
    assert [name in writes for name in (b"a", b"b", b"c")] == [False, True, False]
    assert writes.num_bytes == PAGE


def test_after_a_failure_nothing_is_written_for_a_while(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    writes = world.writes()
    for _ in range(2):
        writes.accept(b"a", PAGE)
        writes.failed(OSError(errno.ENOSPC, "full"))
        assert writes.is_paused
    assert len([r for r in caplog.records if "full" in r.message]) == 1
    world.now += RETRY_SECONDS
    assert not writes.is_paused
    writes.accept(b"a", PAGE)
    writes.done(b"a")
    writes.failed(OSError(errno.ENOSPC, "full"))  # said again after a success
    assert len([r for r in caplog.records if "full" in r.message]) == 2
