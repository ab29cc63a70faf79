"""Tiers: the disk and a store answer as one tier does, whatever each of them has."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

from mlxserve.disk.files import DiskFiles
from mlxserve.disk.record import Unreachable, Watcher
from mlxserve.disk.tier import UNLIMITED, DiskState, DiskTier, Tier
from mlxserve.disk.tiers import Tiers
from tests.waiting import wait_until

PAGE = 100
LONG = 60.0
NAMES = [bytes([number]) * 8 for number in range(4)]
RECORDS = [(name, name * 12) for name in NAMES]


class FarFiles(DiskFiles):
    """Files in place of a store: they can be away, and others tell of them."""

    is_away = False
    watcher: Watcher

    @property
    def is_out(self) -> bool:
        return self.is_away

    def watch(self, watcher: Watcher) -> None:
        self.watcher = watcher

    def read(self, name: bytes) -> bytes:
        if self.is_away:
            raise Unreachable
        return super().read(name)


@pytest.fixture
def far(tmp_path: Path) -> FarFiles:
    return FarFiles(tmp_path / "far", b"i" * 16)


@pytest.fixture
def store(far: FarFiles) -> Iterator[Tier]:
    tier = Tier(far, limit=UNLIMITED, daily_writes=1 << 30)
    assert tier.flush(LONG)
    yield tier
    tier.close()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[DiskTier]:
    tier = DiskTier(tmp_path / "disk", identity=b"i" * 16, limit=1 << 20, daily_writes=1 << 30)
    assert tier.flush(LONG)
    yield tier
    tier.close()


def load(tiers: Tiers, names: list[bytes]) -> tuple[tuple[bytes, ...], tuple[bool, ...]]:
    ticket = tiers.load(names)
    while True:
        tiers.wait(LONG)
        for answer in tiers.poll():
            assert answer.ticket == ticket
            return answer.payloads, answer.from_store


def test_every_division_of_records_is_answered_as_by_one_tier(disk: DiskTier, store: Tier) -> None:
    tiers = Tiers(disk, store)
    for places in product(("disk", "store", "both", ""), repeat=3):
        for tier, name in ((disk, "disk"), (store, "store")):
            tier.clear()
            assert tier.flush(LONG)
            own = [RECORDS[n] for n, place in enumerate(places) if place in (name, "both")]
            assert tier.save(own) == len(own)
            assert tier.flush(LONG)
        num_leading = (*places, "").index("")
        assert tiers.num_leading(NAMES[:3]) == num_leading
        payloads, from_store = load(tiers, NAMES[:3])
        assert payloads == tuple(payload for _, payload in RECORDS[:num_leading])
        assert from_store == tuple(place == "store" for place in places[:num_leading])


def test_records_are_saved_to_both_and_deleted_from_both(disk: DiskTier, store: Tier) -> None:
    tiers = Tiers(disk, store)
    assert disk.save(RECORDS[:1]) == 1
    assert tiers.save(RECORDS) == 4
    assert disk.flush(LONG)
    assert store.flush(LONG)
    assert disk.use().num_pages == store.use().num_pages == 4
    assert tiers.delete(NAMES[:2]) == 2
    assert [name in tiers for name in NAMES] == [False, False, True, True]
    tiers.clear()
    assert not any(name in tiers for name in NAMES)


def test_a_store_that_does_not_pay_is_left_out(disk: DiskTier, store: Tier) -> None:
    tiers = Tiers(disk, store)
    assert store.save(RECORDS) == 4
    assert disk.save(RECORDS[:2]) == 2
    tiers.is_store_used = False
    assert tiers.num_leading(NAMES) == 2
    tiers.is_store_used = True
    assert tiers.num_leading(NAMES) == 4


def test_a_store_that_is_away_is_missed_and_comes_back(
    disk: DiskTier, store: Tier, far: FarFiles
) -> None:
    tiers = Tiers(disk, store)
    assert store.save(RECORDS) == 4
    assert store.flush(LONG)
    far.is_away = True
    assert load(tiers, NAMES) == ((), ())
    assert store.use().state == DiskState.STALLED
    assert not any(name in tiers for name in NAMES)
    assert tiers.save(RECORDS) == 4, "the disk takes them"
    assert disk.flush(LONG)
    assert load(tiers, NAMES)[1] == (False,) * 4
    far.is_away = False
    far.watcher.list_again()
    assert disk.delete(NAMES) == 4
    wait_until(lambda: NAMES[0] in tiers)
    assert load(tiers, NAMES)[1] == (True,) * 4


def test_what_others_write_is_found_once_they_tell(
    disk: DiskTier, store: Tier, far: FarFiles, tmp_path: Path
) -> None:
    tiers = Tiers(disk, store)
    other = DiskFiles(tmp_path / "far", b"i" * 16)
    other.write(*RECORDS[0])
    assert NAMES[0] not in tiers
    far.watcher.found(NAMES[0], PAGE)
    wait_until(lambda: NAMES[0] in tiers)
    far.watcher.found(NAMES[1], PAGE)
    wait_until(lambda: NAMES[1] in tiers)
    assert load(tiers, NAMES[:2]) == ((RECORDS[0][1],), (True,))
    assert NAMES[1] not in tiers, "there is no such record"
