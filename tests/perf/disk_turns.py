"""What a long chat reads from disk in a turn, where side requests have taken its last window from memory.

The scheduler is the real one, as in `memory_turns`, with a disk that has room for everything. The engine is idle
between the turns, so the disk has all units of the chat. Counts are the same on every machine.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from mlxserve.bench.report import Figure, Report
from mlxserve.cache.kinds.full_pages import FullPages
from mlxserve.cache.kinds.kind import Uses
from mlxserve.cache.kinds.window_pages import WindowPages
from tests.perf.memory_turns import (
    ANSWER,
    NEW_TEXT,
    PAGE_SIZE,
    ROUNDS,
    TOKEN_BYTES,
    WINDOW,
    WINDOW_TOKEN_BYTES,
    Chat,
    Driver,
    Memory,
)

UNIT_BYTES = {
    FullPages.name: PAGE_SIZE * TOKEN_BYTES,
    WindowPages.name: PAGE_SIZE * WINDOW_TOKEN_BYTES,
}
WINDOW_BYTES = WINDOW.num_seen * UNIT_BYTES[WindowPages.name]  # of an end
_AT_ONCE = 256  # units written between two steps


@dataclass
class HashDisk:
    """A disk as the scheduler sees it, with the hashes of units instead of their bytes."""

    hashes: dict[str, set[bytes]] = field(default_factory=lambda: defaultdict(set))
    num_read: Counter[str] = field(default_factory=Counter)
    _used: dict[str, dict[bytes, None]] = field(default_factory=lambda: defaultdict(dict))

    @property
    def bytes_read(self) -> int:
        return sum(count * UNIT_BYTES[kind] for kind, count in self.num_read.items())

    def num_leading(self, hashes: Sequence[bytes], /) -> int:
        return sum(1 for _ in takewhile(self.hashes[FullPages.name].__contains__, hashes))

    def has(self, kind: str, hash_: bytes, /) -> bool:
        return hash_ in self.hashes[kind]

    def pays(self, num_tokens: int, num_units: Mapping[str, int], /) -> bool:
        return True

    def use(self, uses: Mapping[str, Uses], /) -> None:
        for kind, (hashes, _) in uses.items():
            self._used[kind] |= dict.fromkeys(hashes)

    def unwritten(self, kind: str, /) -> Iterator[bytes]:
        return (hash_ for hash_ in list(self._used[kind]) if not self.has(kind, hash_))

    def is_unwritten(self, kind: str, hash_: bytes, /) -> bool:
        return hash_ in self._used[kind] and not self.has(kind, hash_)

    def forget(self, kind: str, hashes: Iterable[bytes], /) -> None:
        for hash_ in hashes:
            self._used[kind].pop(hash_, None)


class DiskDriver(Driver):
    """Runs requests on a scheduler with a disk, which answers before the next step."""

    def __init__(self, memory: Memory) -> None:
        self.disk = HashDisk()
        super().__init__(memory, self.disk)

    def step(self) -> None:
        moves = self.scheduler.moves
        self._write(FullPages.name, moves.disk.endangered(_AT_ONCE))
        for kind in moves.ends:
            self._write(kind.name, moves.disk.endangered_at_end(kind, _AT_ONCE))
        super().step()
        self._read()

    def idle(self) -> None:
        """Write all that is cached."""
        for kind in self.scheduler.moves.kinds:
            while units := self.scheduler.moves.disk.unwritten(kind, _AT_ONCE):
                self._write(kind.name, units)

    def _write(self, kind: str, units: Sequence[tuple[bytes, int]]) -> None:
        self.disk.hashes[kind].update(hash_ for hash_, _ in units)

    def _read(self) -> None:
        moves = self.scheduler.moves
        for load in moves.disk.pop_plan().loads:
            for kind, units in zip(moves.kinds, (load.pages, *load.ends), strict=False):
                self.disk.num_read[kind.name] += len(units)
            moves.finish_load(load, len(load.pages), has_ends=load.is_last)


def with_side_requests(
    memory: Memory, num_tokens: int, num_sides: int, side_tokens: int
) -> tuple[float, float]:
    """Return tokens computed in a turn, relative to the new ones, and bytes read relative to a window's."""
    driver = DiskDriver(memory)
    chat = Chat("chat-000")
    driver.turn(chat, num_tokens)
    driver.idle()
    computed = 0
    for index in range(ROUNDS):
        for side in range(num_sides):
            driver.turn(Chat(f"side-{index}-{side}"), side_tokens)
        computed += driver.turn(chat)
        driver.idle()
    driver.scheduler.check()
    new = ROUNDS * (NEW_TEXT + ANSWER)
    return computed / new, driver.disk.bytes_read / ROUNDS / WINDOW_BYTES


def bench_disk_turns(sizes: Sequence[float]) -> Report:
    """`sizes` in GiB."""
    figures: list[Figure] = []
    for size in sizes:
        memory = Memory(int(size * (1 << 30)), "windows")
        for num_sides, side_tokens in ((1, 600), (1, 1500), (4, 1500), (8, 1500)):
            name = f"{size:g} GiB: 20,000 beside {num_sides} of {side_tokens:,}"
            computed, read = with_side_requests(memory, 20_000, num_sides, side_tokens)
            figures += [
                Figure(f"{name}: computed", "x new", (computed,)),
                Figure(f"{name}: read", "windows", (read,)),
            ]
    settings = {"page_size": PAGE_SIZE, "window": WINDOW.size, "bytes of a window": WINDOW_BYTES}
    return Report("disk-turns", settings, tuple(figures))
