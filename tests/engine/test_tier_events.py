"""Events of pages in memory, on disk and in a page store: what they tell is what the tiers have."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pytest

from mlxserve.build import build_engine
from mlxserve.cache.events import Stored
from mlxserve.core.config import EngineConfig
from mlxserve.core.kv_events import KvEventsConfig
from mlxserve.core.sampling_params import SamplingParams
from mlxserve.disk.files import DiskFiles
from mlxserve.disk.tier import UNLIMITED, DiskTier, Tier
from mlxserve.engine.kv_events import DISK, MEDIUM, PAGES, STORAGE, BlockGroup, KvEvents
from mlxserve.engine.tier_events import TierEvents
from mlxserve.hub.files import find_model
from mlxserve.request import Request
from tests.engine.test_kv_events import PAGE, free_addresses, prompt_of, replay

LONG = 60.0


@dataclass
class Subscriber:
    """Takes `limit` events at most until all are cleared, and follows them by medium."""

    page_size: int = PAGE
    limit: int = 1 << 30
    num_events: int = 0
    pages: dict[str, set[bytes]] = field(
        default_factory=lambda: {MEDIUM: set(), DISK: set(), STORAGE: set()}
    )
    # (medium, group, hash) of the other groups' units
    units: set[tuple[str, int, bytes]] = field(default_factory=set)

    def stored(self, page: Stored, /, medium: str = MEDIUM, group: int = 0) -> bool:
        if not self._takes():
            return False
        known = self._known(medium, group)
        assert page.hash not in known, "a page was stored twice"
        self._change(medium, group, known | {page.hash})
        return True

    def removed(self, hash_: bytes, /, medium: str = MEDIUM, group: int = 0) -> bool:
        if not self._takes():
            return False
        known = self._known(medium, group)
        assert hash_ in known, "a page was removed that was not told of"
        self._change(medium, group, known - {hash_})
        return True

    def cleared(self) -> None:
        self.num_events = 0
        for pages in self.pages.values():
            pages.clear()
        self.units.clear()

    def _known(self, medium: str, group: int) -> set[bytes]:
        if not group:
            return self.pages[medium]
        return {each[2] for each in self.units if each[:2] == (medium, group)}

    def _change(self, medium: str, group: int, known: set[bytes]) -> None:
        if not group:
            self.pages[medium] = known
            return
        self.units -= {each for each in self.units if each[:2] == (medium, group)}
        self.units |= {(medium, group, hash_) for hash_ in known}

    def close(self) -> None:
        """Nothing to end."""

    def _takes(self) -> bool:
        self.num_events += 1
        return self.num_events <= self.limit


def page(number: int) -> Stored:
    return Stored(bytes([number]) * 16, None, b"r", array("i", [number] * PAGE))


def save(tier: Tier, *numbers: int) -> None:
    assert tier.save([(page(number).hash, b"x" * 100) for number in numbers]) == len(numbers)
    assert tier.flush(LONG)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Tier]:
    tier = DiskTier(tmp_path / "disk", identity=b"i" * 16, limit=1 << 20, daily_writes=1 << 30)
    yield tier
    tier.close()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Tier]:
    files = DiskFiles(tmp_path / "store", b"i" * 16)
    tier = Tier(files, limit=UNLIMITED, daily_writes=1 << 30)
    yield tier
    tier.close()


def test_each_tier_tells_what_it_has_of_pages_that_were_in_memory(disk: Tier, store: Tier) -> None:
    subscriber = Subscriber()
    save(disk, 3)
    events = TierEvents(subscriber, {DISK: disk, STORAGE: store})
    for number in range(1, 4):
        assert events.stored(page(number))
    save(disk, 1, 9)
    save(store, 1, 2)
    known = {medium: {name[0] for name in names} for medium, names in subscriber.pages.items()}
    assert known == {MEDIUM: {1, 2, 3}, DISK: {1, 3}, STORAGE: {1, 2}}
    assert events.removed(page(1).hash)
    assert disk.delete([page(1).hash, page(9).hash]) == 2
    store.clear()
    known = {medium: {name[0] for name in names} for medium, names in subscriber.pages.items()}
    assert known == {MEDIUM: {2, 3}, DISK: {3}, STORAGE: set()}


def test_a_page_that_was_evicted_before_it_was_written_is_told_when_it_is(disk: Tier) -> None:
    subscriber = Subscriber()
    events = TierEvents(subscriber, {DISK: disk})
    events.stored(page(1))
    events.removed(page(1).hash)
    save(disk, 1)
    assert subscriber.pages == {MEDIUM: set(), DISK: {page(1).hash}, STORAGE: set()}


def test_records_of_windows_and_states_are_no_pages(disk: Tier) -> None:
    subscriber = Subscriber()
    events = TierEvents(subscriber, {DISK: disk})
    events.stored(page(1))
    assert disk.save([(page(1).hash + suffix, b"x") for suffix in (b"w", b"s")]) == 2
    assert disk.flush(LONG)
    assert not subscriber.pages[DISK]


GROUPS = (PAGES, BlockGroup("windows", "sliding_window", 40), BlockGroup("states", "mamba"))


def test_units_of_other_kinds_are_told_of_while_the_page_is_known(disk: Tier) -> None:
    subscriber = Subscriber()
    events = TierEvents(subscriber, {DISK: disk}, GROUPS, max_remembered=1)
    first, second = page(1), page(2)
    events.unit_stored("states", first.hash)  # before its page
    assert not subscriber.units
    events.stored(first)
    events.stored(second)
    events.unit_stored("windows", second.hash)
    assert subscriber.units == {(MEDIUM, 2, first.hash), (MEDIUM, 1, second.hash)}
    assert disk.save([(second.hash + b"w", b"x"), (second.hash + b"?", b"x")]) == 2
    assert disk.flush(LONG)
    events.unit_removed("states", first.hash)
    assert subscriber.units == {(MEDIUM, 1, second.hash), (DISK, 1, second.hash)}
    events.removed(second.hash)
    events.unit_removed("windows", second.hash)
    events.unit_stored("windows", second.hash)
    assert len(subscriber.units) == 2, "an evicted page's tokens are remembered"
    events.removed(first.hash)
    assert not subscriber.units, "of the second page the tokens are forgotten"
    events.unit_removed("windows", second.hash)  # nobody expects it


def test_after_a_restart_units_are_told_of_anew(disk: Tier) -> None:
    subscriber = Subscriber()
    events = TierEvents(subscriber, {DISK: disk}, GROUPS)
    events.stored(page(1))
    for kind in ("windows", "states"):
        events.unit_stored(kind, page(1).hash)
    events.cleared()
    events.units_cleared("states")
    assert not subscriber.units
    events.stored(page(1))
    assert subscriber.units == {(MEDIUM, 1, page(1).hash)}, "the window is still there"
    events.units_cleared("windows")
    assert not subscriber.units


def test_records_of_a_tier_that_has_failed_are_removed(tmp_path: Path) -> None:
    class Broken(DiskFiles):
        def read(self, name: bytes) -> bytes:
            raise RuntimeError(f"a fault in reading {name.hex()}")

    tier = Tier(Broken(tmp_path, b"i" * 16), limit=UNLIMITED, daily_writes=1 << 30)
    subscriber = Subscriber()
    events = TierEvents(subscriber, {DISK: tier})
    events.stored(page(1))
    save(tier, 1)
    assert subscriber.pages[DISK]
    for _ in range(6):
        tier.load([page(1).hash])
        tier.wait(LONG)
        tier.poll()
    tier.close()
    assert not subscriber.pages[DISK]


def test_the_tokens_of_few_evicted_pages_are_remembered(disk: Tier) -> None:
    subscriber = Subscriber()
    events = TierEvents(subscriber, {DISK: disk}, max_remembered=2)
    save(disk, 1, 2, 3, 4)
    for number in range(1, 5):
        assert events.stored(page(number))
    for number in range(1, 4):
        assert events.removed(page(number).hash)
    assert {name[0] for name in subscriber.pages[DISK]} == {2, 3, 4}
    # One that comes back into memory is evicted anew.
    assert events.stored(page(2))
    assert events.removed(page(4).hash)
    assert {name[0] for name in subscriber.pages[DISK]} == {2, 3, 4}


def test_a_removal_that_is_not_taken_makes_all_begin_again(disk: Tier) -> None:
    subscriber = Subscriber(limit=2)
    events = TierEvents(subscriber, {DISK: disk})
    save(disk, 1)
    assert events.stored(page(1))
    disk.delete([page(1).hash])
    assert subscriber.pages[DISK], "it was not taken"
    subscriber.limit = 100
    assert not events.stored(page(2))
    assert not events.removed(page(1).hash)
    events.cleared()
    assert events.stored(page(2))
    assert subscriber.pages == {MEDIUM: {page(2).hash}, DISK: set(), STORAGE: set()}


@pytest.mark.parametrize("share", [0.0, 0.1])
def test_nothing_is_told_that_is_not_there_whatever_happens(
    disk: Tier, store: Tier, share: float
) -> None:
    random = Random(11)
    subscriber = Subscriber()
    subscriber._takes = lambda: random.random() >= share  # type: ignore[method-assign]
    tiers = {DISK: disk, STORAGE: store}
    events = TierEvents(subscriber, tiers, max_remembered=6)
    in_memory: set[int] = set()
    most = 0
    for _ in range(400):
        number = random.randrange(16)
        tier = random.choice((disk, store))
        is_taken = True
        match random.randrange(6):
            case 0 | 1 if number not in in_memory:
                in_memory.add(number)
                is_taken = events.stored(page(number))
            case 2 if number in in_memory:
                in_memory.discard(number)
                is_taken = events.removed(page(number).hash)
            case 3 | 4:
                save(tier, number)
            case 5:
                tier.delete([page(number).hash])
        has_stale = any(
            not each.is_written(name)
            for medium, each in tiers.items()
            for name in subscriber.pages[medium]
        )
        # What was not removed is told to nobody for long: no further page of the pool is taken.
        if not is_taken or (has_stale and not events.stored(page(16))):
            events.cleared()
            in_memory.clear()
            has_stale = False
        assert not has_stale
        most = max(most, len(subscriber.pages[DISK]), len(subscriber.pages[STORAGE]))
        if not share:
            assert subscriber.pages[MEDIUM] == {page(n).hash for n in in_memory}
            for medium, each in tiers.items():
                written = {page(n).hash for n in in_memory if each.is_written(page(n).hash)}
                assert written <= subscriber.pages[medium]
    assert most > 4


def test_a_chain_is_joined_on_its_medium_alone() -> None:
    address, replays = free_addresses(2)
    events = KvEvents(KvEventsConfig(address, replays), PAGE, {b"r": None})
    first, second = page(1), page(2)._replace(parent=page(1).hash)
    try:
        for medium in (MEDIUM, DISK):
            for each in (first, second):
                events.stored(each, medium=medium)
        events.stored(first, medium=STORAGE)
        events.stored(second, medium=DISK)
        for medium in (MEDIUM, DISK):
            for each in (first, second):
                events.removed(each.hash, medium=medium)
        told = [event for _, batch in replay(replays, 0) for event in batch[1]]
    finally:
        events.close()
    seen = [(event["type"][5:], event["medium"], len(event["block_hashes"])) for event in told]
    assert seen == [
        ("Stored", "GPU", 2),
        ("Stored", "DISK", 2),
        ("Stored", "STORAGE", 1),
        ("Stored", "DISK", 1),
        ("Removed", "GPU", 2),
        ("Removed", "DISK", 2),
    ]
    assert [event["token_ids"] for event in told[:2]] == [[1] * PAGE + [2] * PAGE] * 2


@pytest.mark.slow
def test_an_engine_tells_of_pages_that_are_on_disk_when_memory_has_lost_them(
    tmp_path: Path,
) -> None:
    address, replays = free_addresses(2)
    config = EngineConfig().with_options(
        model="mlxserve-mini",
        num_pages=24,
        page_size=PAGE,
        max_model_len=320,
        disk_cache_dir=str(tmp_path),
        disk_cache_size=1,
        kv_events=address,
        kv_events_replay=replays,
    )
    engine = build_engine(config, find_model("mlxserve-mini"))[0]
    pages: dict[str, set[int]] = {"GPU": set(), "DISK": set()}
    try:
        for number in range(8):
            params = SamplingParams(max_tokens=2, ignore_eos=True, temperature=0)
            engine.add(Request(str(number), tuple(prompt_of(number, 4)), params))
            while engine.has_work:
                engine.step()
        for _, batch in replay(replays, 0):
            for event in batch[1]:
                if event["type"] == "AllBlocksCleared":
                    continue  # at the start
                hashes = set(event["block_hashes"])
                if event["type"] == "BlockStored":
                    assert len(event["token_ids"]) == PAGE * len(hashes)
                    pages[event["medium"]] |= hashes
                else:
                    pages[event["medium"]] -= hashes
        assert len(pages["GPU"]) == engine.monitor.stats().pool.num_cached < 8 * 4
        assert pages["DISK"] - pages["GPU"], "those that were evicted are on disk"
    finally:
        engine.close()
